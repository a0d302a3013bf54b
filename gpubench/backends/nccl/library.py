"""The NCCL library of this process: NVIDIA's bindings (nccl4py), function addresses, and variables.

CuPy plans to drop its own bindings. On an H100, importing nccl4py's takes 5 to 9 ms, compared with 1 ms for CuPy's.
Issuing an operation of 1 KiB takes 5.2 to 7.8 µs, compared with 5.6 to 7.5 µs. Measured with NCCL 2.21.5, 2.27.7,
2.32.3, and PyTorch's 2.28.9.
"""

import ctypes
import json
import mmap
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpubench import errors
from gpubench.backends.timing import CallFailedError
from gpubench.machine.children import die_with_parent, module_command, package_environment
from gpubench.model.facts.environment import strip_launcher
from gpubench.model.terms.operation import nccl_version
from gpubench.model.terms.verdict import Cure, Finding, Verdict
from gpubench.ports.backend import Launch

_RESET_LOG = "ncclResetDebugInit"


class NcclError(RuntimeError):
    """NCCL refused a call. The message is NCCL's."""


class NcclLibrary:
    """The NCCL library that is already loaded, or else the one that the bindings find.

    `version` is for example '2.28.9', and `version_code` is then 22809.
    """

    error: type[Exception] = NcclError

    def __init__(self, asked: str | None = None) -> None:
        if asked is not None:
            # Load the requested library first and with global symbols, so that the bindings find it as libnccl.so.2.
            try:
                _load(asked, ctypes.RTLD_GLOBAL).ncclGetVersion  # noqa: B018
            except (OSError, AttributeError) as error:
                raise errors.unreadable_nccl_library(asked, str(error)) from error
        try:
            from nccl.bindings import nccl
        except ImportError as error:
            raise errors.missing_nccl_bindings(str(error)) from error
        self.nccl: Any = nccl
        try:
            self.version_code: int = nccl.get_version()
        except (RuntimeError, OSError) as error:
            raise errors.missing_nccl(str(error).strip().splitlines()[0]) from error
        self.version = nccl_version(self.version_code)
        self.path = str(Path(nccl.get_library_path()).absolute())
        self._native = _load(self.path)
        if asked is not None and Path(asked).resolve() != Path(self.path).resolve():
            raise errors.nccl_library_not_used(asked, self.path)

    def allocate(self, size_bytes: int) -> int:
        """Allocate GPU memory with NCCL and return its address. Raise UsageError before NCCL 2.19."""
        if not self.has("ncclMemAlloc"):
            raise errors.no_nccl_allocator(self.version)
        return int(self.asked(self.nccl.mem_alloc, size_bytes))

    def free(self, address: int) -> None:
        """Free memory that `allocate` returned."""
        self.asked(self.nccl.mem_free, address)

    def asked(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the bindings. Raise NcclError if NCCL returns an error."""
        try:
            return function(*arguments)
        except self.nccl.NCCLError as error:
            raise NcclError(str(error)) from error

    def words(self, status: int) -> str:
        """Return NCCL's message for an error code."""
        return str(self.nccl.NCCLError(status))

    def issue(self, launch: Launch) -> None:
        """Make the calls of a launch. Raise NcclError with NCCL's message if one fails."""
        try:
            launch()
        except CallFailedError as error:
            raise NcclError(self.words(error.status)) from error

    @property
    def can_reset_log(self) -> bool:
        """True if NCCL can read its log variables again (2.24.3 or later)."""
        return self.has(_RESET_LOG)

    def reset_log(self) -> None:
        """Make NCCL read its log variables again before it writes the next line."""
        ctypes.CFUNCTYPE(None)(self.address(_RESET_LOG))()

    def last_error(self) -> str:
        """Return NCCL's last warning in this process. '' if there is none, and always before NCCL 2.13."""
        return str(self.nccl.get_last_error(self.nccl.Comm(0))).strip() if self.has("ncclGetLastError") else ""

    def has(self, name: str) -> bool:
        """Return True if this NCCL exports the C function `name`."""
        return hasattr(self._native, name)

    def address(self, name: str) -> int:
        """Return the address of the C function `name`."""
        return ctypes.cast(getattr(self._native, name), ctypes.c_void_p).value or 0


def _load(path: str, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    return ctypes.CDLL(path, mode)


# Every libnccl contains these names. A file without them is compressed, or is not libnccl
_KNOWN_TO_ALL = (b"NCCL_DEBUG", b"NCCL_ALGO")

_PREFIX = "NCCL_"
_NAME = re.compile(rb"\0(NCCL_[A-Z0-9_]{2,60})(?=\0)")
_PLUGINS = re.compile(r"NCCL_\w+_PLUGIN")


def check_variables(names: Sequence[str], path: str, settings: Sequence[str]) -> tuple[str, ...]:
    """Return the variables in `names` that the NCCL library at `path` does not read.

    An unknown variable may belong to another library, or to a plugin. `settings` are the names of all NCCL variables
    that are set. Searching a file of 300 MB takes 0.3 s.

    Raises:
        UsageError: A variable starts with NCCL_, is unknown to NCCL, and no plugin is set.
    """
    try:
        with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:

            def contains(name: bytes) -> bool:
                return content.find(b"\0" + name + b"\0") >= 0

            has_names = all(map(contains, _KNOWN_TO_ALL))
            unknown = [name for name in names if not (has_names and contains(name.encode()))]
            refused = [name for name in unknown if name.startswith(_PREFIX) and has_names]
            if refused and not any(map(_PLUGINS.fullmatch, settings)):
                raise _unknown(refused[0], path, {found.decode() for found in _NAME.findall(content)})
    except (OSError, ValueError):
        return tuple(names)
    return tuple(unknown)


def _unknown(name: str, path: str, known: set[str]) -> errors.UsageError:
    import difflib

    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return errors.UsageError(
        f"--set {name}: this NCCL has no such variable",
        expected=f"a variable that {path} reads",
        reason="it is misspelt, or belongs to another version of NCCL",
        next_step=f"--set {nearest[0]}=..."
        if nearest
        else f"strings {path} | grep -x 'NCCL_[A-Z0-9_]*' lists the variables of this NCCL",
    )


def unverified(names: Sequence[str]) -> tuple[Finding, ...]:
    """Return the finding for variables that NCCL may not read."""
    if not names:
        return ()
    return (
        Finding(
            id="variable-not-verified",
            severity=Verdict.WARN,
            subject=f"--set {', '.join(names)}",
            seen="the loaded NCCL does not list this variable, or lists none",
            expected="a variable that NCCL or a plugin is known to read",
            cause="it belongs to a plugin or another library, or it is misspelt and changes nothing",
            cure=Cure.of("NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=ENV shows the variables that NCCL reads"),
        ),
    )


_MODULE = "gpubench.backends.nccl.library"
_SECONDS_TO_ANSWER = 30.0


def start_asking(
    environment: dict[str, str], command: Sequence[str] = tuple(module_command(_MODULE))
) -> Callable[[], str]:
    """Start a process that loads NCCL without torch. Return a function that waits for the process and returns its
    output.

    The output is for example '2.28.9 from FILE', or '' if the process fails. It must be another process, because in a
    process with torch all backends use torch's NCCL.
    """
    process = subprocess.Popen(
        command,
        env=package_environment(strip_launcher(environment)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )

    def answer() -> str:
        try:
            printed, _ = process.communicate(timeout=_SECONDS_TO_ANSWER)
            return str(json.loads(printed)["nccl"])
        except (subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
            process.kill()
            process.communicate()
            return ""

    return answer


def main() -> None:
    """Print the version and path of the loaded NCCL as JSON."""
    library = NcclLibrary()
    sys.stdout.write(json.dumps({"nccl": f"{library.version} from {library.path}"}))


if __name__ == "__main__":
    main()
