"""The programs that NVLink fabrics and memory shared between nodes need: whether they run, and their versions.

Of IMEX and the subnet manager neither was seen on hardware.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from gpubench.hardware.process.names import FIRST_PID_NAMESPACE
from gpubench.hardware.system_files import UnknownFields, names_in, text_of
from gpubench.model.facts.driver_settings import Service

FABRIC_MANAGER, SUBNET_MANAGER, IMEX = "nv-fabricmanager", "nvlsm", "nvidia-imex"
_PROGRAMS = (FABRIC_MANAGER, SUBNET_MANAGER, IMEX)
_KERNELS_LENGTH = 15
"""The kernel keeps so many characters of a program's name (TASK_COMM_LEN)."""

_LOGS = {
    FABRIC_MANAGER: ("var/log/fabricmanager.log", rb"[Ff]abric ?[Mm]anager(?: NVIDIA GPU driver interface)? version"),
    SUBNET_MANAGER: ("var/log/nvlsm.log", rb"(?:nvlsm|NVLSM|OpenSM) (?:version )?"),
    IMEX: ("var/log/nvidia-imex.log", rb"IMEX (?:Log )?[Vv]ersion"),
}
"""Their default log files, and the text before their version in there. The fabric manager's line about a driver
that does not match is as users quote it; the others were not seen."""

_LOG_BYTES = 2**16
_MOST_PROCESSES = 10_000


def read_services(root: Path) -> tuple[dict[str, Service], dict[str, str]]:
    """The programs by name, and why something of them is unknown, as `services.NAME.FIELD`. None needs root."""
    hidden = _why_hidden(root)
    running, complete = (set[str](), False) if hidden else _running(root)
    found, unknown = {}, {}
    for name in _PROGRAMS:
        is_running = True if name in running else False if complete else None
        if is_running is None:
            unknown[f"services.{name}.running"] = hidden or f"more than {_MOST_PROCESSES} processes run"
        version, reason = _version(root, name)
        if version is None:
            unknown[f"services.{name}.version"] = reason
        found[name] = Service(running=is_running, version=version)
    return found, unknown


def _why_hidden(root: Path) -> str:
    """The reason why the host's processes cannot be seen; empty where they can."""
    try:
        namespace = (root / "proc/self/ns/pid").readlink().name
    except OSError as error:
        return f"/proc/self/ns/pid: {error.strerror}"
    if namespace != FIRST_PID_NAMESPACE:
        return "this PID namespace is a container's own: the host's processes are not visible"
    return "" if text_of(root / "proc/1/comm") is not None else "/proc hides the processes of other users"


def _running(root: Path) -> tuple[set[str], bool]:
    """The programs that run, and whether all processes were looked at that could be one of them."""
    wanted = {name[:_KERNELS_LENGTH]: name for name in _PROGRAMS}
    found: set[str] = set()
    for looked_at, pid in enumerate(_pids(root)):
        if looked_at == _MOST_PROCESSES:
            return found, False
        name = wanted.get(_name(root, pid))
        if name is not None:
            found.add(name)
            if len(found) == len(wanted):
                break
    return found, True


def _pids(root: Path) -> Iterator[str]:
    """The processes: first those that the first process started or took over, as it does with services, then all others
    but the kernel's own threads, of which machines with thousands of CPUs have tens of thousands.
    """
    services = _children(root, "1")
    yield from services
    others = {name for name in names_in(root / "proc") if name.isdecimal()}
    yield from sorted(others - set(services) - set(_children(root, "2")), key=int, reverse=True)


def _children(root: Path, pid: str) -> list[str]:
    """Those of a process, where the kernel was built to tell them (CONFIG_PROC_CHILDREN)."""
    return (text_of(root / f"proc/{pid}/task/{pid}/children") or "").split()


def _name(root: Path, pid: str) -> str:
    name = UnknownFields().tail("", root / f"proc/{pid}/comm", _KERNELS_LENGTH + 1) or b""
    return name.decode(errors="replace").strip()


def _version(root: Path, name: str) -> tuple[str | None, str]:
    """The version that stands last in the program's log, or why there is none."""
    path, before = _LOGS[name]
    unknown = UnknownFields()
    text = unknown.tail("version", root / path, _LOG_BYTES)
    if text is None:
        return None, unknown.reasons["version"]
    found = re.findall(before + rb"\s*:?\s*(\d+(?:\.\d+)+)", text)
    if not found:
        return None, f"{Path(path).name} names no version near its end"
    return found[-1].decode(), ""
