"""The folder with the logs of a job that `run` starts, and the variables that make the job write them.

A variable that the user has set is kept, and its files are read, but an NCCL_DEBUG below INFO becomes INFO because it
logs no connections.
"""

import ctypes
import glob
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from gpubench.backends.nccl.debug_log import INFO_LEVELS
from gpubench.errors import UsageError
from gpubench.machine.environment import DEBUG, DEBUG_FILE, DEBUG_SUBSYSTEMS
from gpubench.ranks.ras import ADDRESS

_UCX_FILE = "UCX_LOG_FILE"
_RECORDER_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_RECORDER_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variables of PyTorch's Flight Recorder: the name today, and the only name that older versions read."""

FOLDER_VARIABLE = "GPUBENCH_RUN_FOLDER"
_SUBSYSTEMS = "INIT,BOOTSTRAP,ENV,GRAPH,NET"  # All that `explain` needs. None of them logs a line per operation
_RECORDED_CALLS = "2000"  # PyTorch's default today. Older versions record nothing by default
_UCX_FILES = "/tmp/gpubench-run-"  # UCX aborts its process if it cannot create its log, and every host has /tmp
_MARK = ".running-"
_SECONDS_TO_START = 600.0  # torchrun waits this long for other hosts (--rdzv-conf join_timeout)
_CLOCK_SECONDS = 2.0  # File systems may round the time of a file down
MOST_BYTES = 2**29
"""Disk space for the logs of a job, which `explain` reads in five seconds."""

_PUNCH_HOLE = 0x03  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE in linux/falloc.h
_PAGE_BYTES = 4096
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)


class JobLogs(Struct, frozen=True):
    """The logs of a job.

    - `folder`: the absolute path of the folder for logs
    - `variables`: the variables for the job, including those that the user has set
    - `kept_files`: patterns of the log files that the user's own variables name
    - `started`: the Unix time at which the job started
    """

    folder: Path
    variables: Mapping[str, str]
    kept_files: tuple[Path, ...]
    started: float

    @property
    def mark(self) -> Path:
        """A file that lets other hosts of the job join the folder while this host uses it."""
        return self.folder / f"{_MARK}{socket.gethostname()}"

    @property
    def variables_file(self) -> Path:
        """The file with the variables, one NAME=VALUE per line. It is hidden, so `explain` does not read it."""
        return self.folder / ".env"

    def files(self) -> list[Path]:
        """Return the log files that are not empty, except the user's own."""
        found = [*self.folder.glob("[!.]*"), *self._ucx_files()]
        return [path for path in found if path.is_file() and path.stat().st_size]

    def to_read(self) -> list[str]:
        """Return what `explain` has to read: the folder, unless it is empty, and the user's own files of this job."""
        own = [path for file in self.kept_files for path in Path(file.anchor).glob(str(file.relative_to(file.anchor)))]
        new = [path for path in own if path.is_file() and path.stat().st_mtime >= self.started - _CLOCK_SECONDS]
        return [str(path) for path in ([self.folder] if self.files() else []) + new]

    def limit_size(self, most_bytes: int = MOST_BYTES) -> bool:
        """Free disk space if the logs take more than `most_bytes`. Return False if the file system cannot do that.

        Each file keeps the beginning and the newest part of its share of `most_bytes`.
        """
        try:
            used = {path: path.stat().st_blocks * 512 for path in self.files()}
            share = most_bytes // max(len(used), 1)
            for path in used if sum(used.values()) > most_bytes else ():
                if used[path] > share:
                    _free_middle(path, share // 2 // _PAGE_BYTES * _PAGE_BYTES)
        except OSError:
            return False
        return True

    def collect(self) -> None:
        """Move UCX's logs of this host into the folder, and remove the holes that `limit_size` made."""
        self.mark.unlink(missing_ok=True)
        for path in self._ucx_files():
            with suppress(OSError):  # A process of another user wrote it
                if path.stat().st_size:
                    shutil.move(path, self.folder / path.name)
                else:
                    path.unlink()
        for path in self.files():
            _close_hole(path)

    def _ucx_files(self) -> Iterator[Path]:
        pattern = self.variables[_UCX_FILE]
        own = _as_pattern(pattern)
        return own.parent.glob(own.name) if pattern.startswith(_UCX_FILES) else iter(())


def make_logs(folder: Path, environment: Mapping[str, str], *, has_ras: bool) -> JobLogs:
    """Create the folder for logs, and choose the variables of the job. With `has_ras`, NCCL's RAS gets its own port.

    Raises UsageError if the folder cannot be written, or contains files of another job.
    """
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        found = sorted(folder.glob("[!.]*"))
        is_old = any(time.time() - path.stat().st_mtime > _SECONDS_TO_START for path in found)
    except OSError as error:
        raise UsageError(
            f"--logs {folder} cannot be written: {error.strerror}",
            expected="a folder in which all processes of the job can create files",
            next_step=f"--logs {tempfile.gettempdir()}/logs",
        ) from None
    variables = _variables(folder, environment, has_ras=has_ras)
    logs = JobLogs(folder, variables, tuple(_users_files(environment)), time.time())
    has_other_hosts = any(path != logs.mark for path in folder.glob(f"{_MARK}*"))
    if found and (is_old or not has_other_hosts):
        raise UsageError(
            f"--logs {folder} is not empty: {found[0].name}",
            expected="a new or empty folder, or one in which other hosts of this job have just started",
            reason="it has files of an earlier job, which would be read as files of this job",
            next_step=f"--logs {folder}-2",
        )
    logs.mark.touch()
    logs.variables_file.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    return logs


def _variables(folder: Path, environment: Mapping[str, str], *, has_ras: bool) -> dict[str, str]:
    recorder: dict[str, str] = {}
    for names, value in ((_RECORDER_SIZE, _RECORDED_CALLS), (_RECORDER_FILE, f"{folder}/flight_recorder_rank_")):
        if not any(environment.get(name) for name in names):
            recorder |= dict.fromkeys(names, value)
    wanted = {
        DEBUG: "INFO",
        DEBUG_SUBSYSTEMS: _SUBSYSTEMS,
        DEBUG_FILE: f"{str(folder).replace('%', '%%')}/nccl.%h.%p.log",
        "UCX_PROTO_INFO": "y",
        _UCX_FILE: f"{_UCX_FILES}{secrets.token_hex(4)}.%h.%p.ucx.log",
        **recorder,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        **({ADDRESS: f"localhost:{_free_port()}"} if has_ras else {}),
        FOLDER_VARIABLE: str(folder),
    }
    variables = {name: environment.get(name) or value for name, value in wanted.items()}
    return variables if variables[DEBUG].upper() in INFO_LEVELS else variables | {DEBUG: "INFO"}


def _users_files(environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield glob patterns of the log files that the user's own variables name."""
    for name in (DEBUG_FILE, _UCX_FILE):
        if environment.get(name):
            yield _as_pattern(environment[name])
    for name in _RECORDER_FILE:
        if environment.get(name):
            yield Path(f"{glob.escape(environment[name])}*")


def _as_pattern(file: str) -> Path:
    """Convert NCCL's or UCX's name of a log file to a glob pattern for the files of all hosts and processes."""
    return Path(re.sub("%[hp%]", lambda found: "%" if found[0] == "%%" else "*", glob.escape(file)))


def _free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


def _free_middle(path: Path, half: int) -> None:
    """Free the disk space between the first and the last `half` bytes of a file that another process may write.

    Raises OSError.
    """
    with path.open("rb+") as file:
        end = (os.fstat(file.fileno()).st_size - half) // _PAGE_BYTES * _PAGE_BYTES
        if end > half and _libc.fallocate(file.fileno(), _PUNCH_HOLE, half, end - half):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))


def _close_hole(path: Path) -> None:
    """Rewrite a file without its hole, and without the lines that the hole cut."""
    with path.open("rb") as file:
        opened, size = file.fileno(), path.stat().st_size
        hole = os.lseek(opened, 0, os.SEEK_HOLE)
        if hole >= size:
            return
        end = os.lseek(opened, hole, os.SEEK_DATA)
        begin, newest = os.pread(opened, hole, 0), os.pread(opened, size - end, end)
    shorter = path.with_name(f".{path.name}")
    shorter.write_bytes(begin[: begin.rfind(b"\n") + 1] + newest[newest.find(b"\n") + 1 :])
    shorter.replace(path)
