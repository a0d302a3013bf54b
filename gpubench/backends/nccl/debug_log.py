"""Read NCCL's log while every operation runs once, without changing the log that the user asked for.

The user's NCCL variables and configuration files decide where the log is read:

- NCCL_DEBUG unset, VERSION or WARN: from a private file. The version and warnings that the user wants are printed.
- INFO, ABORT or TRACE without a file: from a private file with the user's subsystems, which is forwarded to stdout.
  NCCL before 2.24.3 cannot switch back to stdout, so its log is not read.
- INFO, ABORT or TRACE with NCCL_DEBUG_FILE: from the user's file, unless several ranks overwrite it.
- INFO, ABORT or TRACE with an NCCL_DEBUG_SUBSYS without INIT: the log is not read.

A private file is in the memory of this process and has a name in /proc. NCCL 2.24.3 and later can read the variables
again. That ends the log and truncates the user's file, so gpubench appends the user's earlier lines to it.
"""

import os
import re
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Protocol, Self

from msgspec import Struct, field

from gpubench.backends.mpi.group import host_name
from gpubench.machine.environment import DEBUG, DEBUG_FILE, DEBUG_SUBSYSTEMS
from gpubench.machine.host import list_names

INFO_LEVELS = ("INFO", "ABORT", "TRACE")  # Levels that show how NCCL connects ranks, in NCCL's order
_DEFAULT_SUBSYSTEMS = "INIT,BOOTSTRAP,ENV"
_SUBSYSTEMS = (
    "INIT,ENV,GRAPH,NET,TUNING"  # Connections, variables, rings, networks, and one line per operation on rank 0
)
_QUIET_SUBSYSTEMS = "INIT,ENV"  # No lines per operation, for an NCCL that cannot stop logging


class LogAccess(StrEnum):
    """Where gpubench reads NCCL's log."""

    PRIVATE = "in private"
    FORWARDED = "in private, and passed on"
    USERS_FILE = "in the user's file"
    NOT = "not at all"


class LogPlan(Struct, frozen=True):
    """Where to read NCCL's log, and the NCCL variables to set for it.

    `why_not` is the reason if the log cannot be read. `no_tuning` is the reason if it does not show algorithms.
    """

    how: LogAccess
    variables: Mapping[str, str] = field(default_factory=dict)
    why_not: str = ""
    no_tuning: str = ""


def plan_log(settings: Mapping[str, str], ranks_on_node: int, *, can_reset: bool) -> LogPlan:
    """Decide where to read NCCL's log, from the user's NCCL variables in `settings`."""
    if settings.get(DEBUG, "").upper() in INFO_LEVELS:
        return _plan_beside_user(settings, ranks_on_node, can_reset=can_reset)
    if can_reset:
        return LogPlan(LogAccess.PRIVATE, {DEBUG: "INFO", DEBUG_SUBSYSTEMS: _SUBSYSTEMS})
    reason = "before 2.24.3, NCCL would log it all the time, not only while gpubench listens"
    return LogPlan(LogAccess.PRIVATE, {DEBUG: "INFO", DEBUG_SUBSYSTEMS: _QUIET_SUBSYSTEMS}, no_tuning=reason)


def _plan_beside_user(settings: Mapping[str, str], ranks_on_node: int, *, can_reset: bool) -> LogPlan:
    """Plan for a log that the user also reads. It must keep exactly the lines that the user asked for."""
    level, file, subsystems = (settings.get(name, "") for name in (DEBUG, DEBUG_FILE, DEBUG_SUBSYSTEMS))
    if not shows(subsystems, "INIT"):
        why_not = f"{DEBUG_SUBSYSTEMS}={subsystems} leaves INIT out, which shows connections"
    elif file and "%p" not in file and ranks_on_node > 1:
        why_not = f"{DEBUG_FILE}={file} is one file for several ranks, so it needs a %p"
    elif not file and not can_reset:
        why_not = f"{DEBUG}={level} sends the log of this NCCL to stdout, where gpubench cannot read it"
    else:
        no_tuning = "" if shows(subsystems, "TUNING") else f"TUNING is not among the {DEBUG_SUBSYSTEMS} that are set"
        if file:
            return LogPlan(LogAccess.USERS_FILE, no_tuning=no_tuning)
        # Set levels from configuration files as variables too. NCCL may open its log before it reads those files.
        repeated = {name: settings[name] for name in (DEBUG, DEBUG_SUBSYSTEMS) if name in settings}
        return LogPlan(LogAccess.FORWARDED, repeated, no_tuning=no_tuning)
    return LogPlan(LogAccess.NOT, why_not=why_not)


def shows(subsystems: str, name: str) -> bool:
    """Return True if a log with this NCCL_DEBUG_SUBSYS contains the lines of subsystem `name`."""
    words = (subsystems or _DEFAULT_SUBSYSTEMS).upper().removeprefix("^").split(",")
    return (name in words or "ALL" in words) != subsystems.startswith("^")


_WARN = b" NCCL WARN "
_VERSION = re.compile(rb"NCCL version \d\S*")
_SECONDS_BETWEEN_LOOKS = 0.1
_CHUNK_BYTES = 1 << 16


class ResettableLog(Protocol):
    """The functions of an NCCL library that `NcclLog` needs."""

    @property
    def can_reset_log(self) -> bool:
        """True if NCCL can read its log variables again (2.24.3 or later)."""

    def reset_log(self) -> None:
        """Make NCCL read its log variables again before it writes the next line."""


class NcclLog:
    """The NCCL log of this process. Enter the context before the first NCCL call.

    `no_log` and `no_tuning` are reasons why the log or its algorithms cannot be read, or ''.
    """

    def __init__(
        self,
        library: ResettableLog,
        settings: Mapping[str, str],
        ranks_on_node: int,
        environment: MutableMapping[str, str] = os.environ,
        stdout: int = 1,
    ) -> None:
        self._library = library
        self._settings = settings
        self._environment = environment
        self._stdout = stdout
        self._plan = plan_log(settings, ranks_on_node, can_reset=library.can_reset_log)
        self.no_log = self._plan.why_not
        self.no_tuning = self._plan.no_tuning
        self._is_ours = self._plan.how in (LogAccess.PRIVATE, LogAccess.FORWARDED)
        self._before: dict[str, str | None] = {}
        self._descriptor: int | None = None
        self._forwarder: _Forwarder | None = None
        self._offset = 0
        self._rest = b""
        self._warnings: list[bytes] = []
        self._users_lines: list[bytes] = []

    def __enter__(self) -> Self:
        """Make NCCL write its log to a file of this process."""
        if self._is_ours:
            try:
                self._descriptor = os.memfd_create("nccl-log")
            except OSError as error:
                self._is_ours = False
                self.no_log = f"this system cannot create a memory file for NCCL's log: {os.strerror(error.errno or 0)}"
        if self._is_ours and self._descriptor is not None:
            self._set({**self._plan.variables, DEBUG_FILE: f"/proc/self/fd/{self._descriptor}"})
            if self._plan.how is LogAccess.FORWARDED:
                self._forwarder = _Forwarder(self._descriptor, self._stdout)
        return self

    def __exit__(self, *_error: object) -> None:
        """Restore NCCL's log and the environment, and print the lines that the user asked for."""
        self.switch_off()
        self.lines()
        self._write_users_lines()
        self._set(self._before)
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def is_readable(self) -> bool:
        """Return True if NCCL writes to the file and not to stdout. If False, `no_log` has the reason."""
        if self._plan.how is LogAccess.USERS_FILE and self._descriptor is None:
            self._open_users_file()
        elif self._is_ours and self._descriptor is not None and not _is_open_twice(self._descriptor):
            self.no_log = "NCCL did not open the log file of gpubench, and wrote to stdout instead"
        return not self.no_log

    def lines(self) -> list[bytes]:
        """Return the complete lines that NCCL has written since the last call."""
        if self._descriptor is None:
            return []
        while chunk := os.pread(self._descriptor, _CHUNK_BYTES, self._offset):
            self._offset += len(chunk)
            self._rest += chunk
        *found, self._rest = self._rest.split(b"\n")
        self._warnings += [line.partition(_WARN)[2] for line in found if _WARN in line]
        if self._plan.how is LogAccess.PRIVATE:
            self._users_lines += lines_at_user_level(self._settings, found)
        return found

    def warnings(self) -> list[str]:
        """Return all NCCL warnings so far, without the source file and line number."""
        self.lines()
        return [line.decode(errors="replace").strip() for line in self._warnings]

    def switch_off(self) -> None:
        """Stop reading. If NCCL can read its variables again, it logs from now on as the user configured it."""
        if not self._is_ours:
            return
        self._is_ours = False
        if self._forwarder is not None:
            self._forwarder.finish()
        self.lines()
        self._set({name: self._settings.get(name) for name in (DEBUG, DEBUG_SUBSYSTEMS, DEBUG_FILE)})
        if self._library.can_reset_log:
            self._library.reset_log()
        if not self._settings.get(DEBUG_FILE):
            self._write_users_lines()

    def _set(self, variables: Mapping[str, str | None]) -> None:
        for name, value in variables.items():
            self._before.setdefault(name, self._environment.get(name))
            if value is None:
                self._environment.pop(name, None)
            else:
                self._environment[name] = value

    def _open_users_file(self) -> None:
        path = Path(log_path(self._settings[DEBUG_FILE]))
        try:
            if path.is_file():
                self._descriptor = os.open(path, os.O_RDONLY)
            else:
                self.no_log = f"{path}, NCCL's log, is not a readable file"
        except OSError as error:
            self.no_log = f"{path}, NCCL's log, cannot be read: {os.strerror(error.errno or 0)}"

    def _write_users_lines(self) -> None:
        text, self._users_lines = b"".join(line + b"\n" for line in self._users_lines), []
        file = self._settings.get(DEBUG_FILE)
        if not text:
            return
        with suppress(OSError):
            if not file or self._settings.get(DEBUG, "").upper() == "VERSION":
                _write_all(self._stdout, text)
            else:
                with Path(log_path(file)).open("ab") as stream:
                    stream.write(text)


class SilentLog:
    """A log without lines, for a library that does not log its paths. `no_log` is the reason."""

    no_tuning = ""

    def __init__(self, no_log: str) -> None:
        self.no_log = no_log

    def is_readable(self) -> bool:
        return False

    def lines(self) -> list[bytes]:
        return []

    def switch_off(self) -> None:
        pass


def lines_at_user_level(settings: Mapping[str, str], lines: Sequence[bytes]) -> list[bytes]:
    """Keep the lines of an INFO log that the user's log level would show: the version and warnings."""
    level = settings.get(DEBUG, "").upper()
    if level not in ("WARN", "VERSION"):
        return []
    found = []
    for line in lines:
        version = _VERSION.search(line)
        if version:
            found.append(version[0])
        elif _WARN in line and level == "WARN":
            found.append(line)
    return found


def log_path(file: str) -> str:
    """Expand NCCL_DEBUG_FILE as NCCL does: %h is the host name, %p the process ID, and %% a percent sign."""
    words = {"%h": host_name(), "%p": str(os.getpid()), "%%": "%"}
    return re.sub("%[hp%]", lambda found: words[found[0]], file)


def _is_open_twice(descriptor: int) -> bool:
    own, found = os.fstat(descriptor), 0
    for name in list_names(Path("/proc/self/fd")):
        with suppress(OSError):
            found += os.path.samestat(own, os.fstat(int(name)))
    return found > 1


class _Forwarder(threading.Thread):
    """A thread that copies new content from one file to another, also while NCCL blocks the main thread."""

    def __init__(self, source: int, destination: int) -> None:
        super().__init__(daemon=True)
        self._source, self._destination = source, destination
        self._offset = 0
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.wait(_SECONDS_BETWEEN_LOOKS):
            self._forward()

    def finish(self) -> None:
        self._over.set()
        self.join()
        self._forward()

    def _forward(self) -> None:
        while chunk := os.pread(self._source, _CHUNK_BYTES, self._offset):
            self._offset += len(chunk)
            with suppress(OSError):
                _write_all(self._destination, chunk)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
