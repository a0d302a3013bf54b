"""Debuggers, sanitizers and profilers of this process."""

import re
from pathlib import Path

from gpubench.hardware.system_files import printable, text_of

_TRACER = re.compile(r"^TracerPid:\s*([1-9]\d*)$", re.ASCII | re.MULTILINE)
_TOOLS = {
    "compute-sanitizer": re.compile(r"libsanitizer-(collection|public)"),
    "Nsight Systems (nsys)": re.compile(r"libToolsInjection(Proxy)?64|libnsys[\w-]*|libQuadDCommon"),
    "Nsight Compute (ncu)": re.compile(r"libcuda-injection|libnv-nsight-cu|libInterceptorInjectionTarget"),
    "compute-sanitizer or ncu": re.compile(r"libTreeLauncher\w*Injection"),
    "cuda-gdb": re.compile(r"libcudadebugger|libCUDBG"),
    "AddressSanitizer": re.compile(r"lib(clang_rt\.)?[at]san"),
    "Valgrind": re.compile(r"vgpreload_"),
}
"""By the file names of what each loads into the process that it looks at. libcupti alone is none: PyTorch loads it
without asking it for anything."""


def tracer(status: str, root: Path) -> str | None:
    """The process that traces this one ('4711 (gdb)'), from the text of /proc/self/status; None for none."""
    match = _TRACER.search(status)
    if match is None:
        return None
    name = printable(text_of(root / "proc" / match[1] / "comm") or "")
    return f"{match[1]} ({name})" if name else match[1]


def tools(root: Path) -> dict[str, str]:
    """The first library of each tool that is mapped here, by the tool's name."""
    found: dict[str, str] = {}
    for line in (text_of(root / "proc/self/maps") or "").splitlines():
        path = line.partition("/")[2].removesuffix(" (deleted)")
        file = path.rpartition("/")[2]
        for name, pattern in _TOOLS.items():
            if file and name not in found and pattern.match(file):
                found[name] = f"/{printable(path)}"
    return found
