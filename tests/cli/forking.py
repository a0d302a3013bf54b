"""A process that has imported gpubench and forks for each command: of a command that a test runs, half is imports.

The child is what `python -m gpubench` is: its own environment, folder, streams and exit. Where variables differ that
Python itself reads at its start, it has to be a process of its own; but for those of encodings, of which each set has a
process that forks, and for the folder of a `sitecustomize` of the tests, which the child runs.
"""

import array
import atexit
import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from gpubench import records
from gpubench.backends import timing
from gpubench.cli import process
from gpubench.cli.app import typer_command
from gpubench.cli.process import COMMANDS
from gpubench.formats import presenter
from gpubench.machine.children import die_with_parent
from gpubench.model.terms.commands import BARE
from gpubench.profiles import all_profiles
from gpubench.ranks import launch
from tests.cli import children
from tests.modules import load_all_modules

_LOADED_AHEAD = (
    *("rich.console", "rich.progress", "rich.table", "typer.core", "pydantic.fields", "pydantic.types"),
    "tests.mpi.on_import",
)
"""Beside all of gpubench, of which no module imports MPI, CuPy, NumPy or NVML before it is used."""

_ENCODING = ("LANG", "LC_", "PYTHONIOENCODING", "PYTHONCOERCECLOCALE", "PYTHONUTF8")
_READ_BY_PYTHON = (*_ENCODING, "PYTHON", "COVERAGE")
_MOST_BYTES = 1 << 20
_ROOT = Path(__file__).parents[2]
_INJECTED = [str(_ROOT / "tests" / each / "inject") for each in ("cli", "mpi")]
KEPT_RANKS = "GPUBENCH_TEST_KEPT_RANKS"
"""Names the folder of `tests/mpi/kept.py`, whose ranks a job takes in the place of an mpirun's."""
UNENDED_RANKS = "GPUBENCH_TEST_UNENDED_RANKS"
"""Names the folder in which a kept rank has a file until it has left MPI: one that ended otherwise leaves it there."""
GATE = "GPUBENCH_TEST_GATE"
"""Names a file: before it is there no worker of a scan copies in its memory, so that phase 0 goes on."""
FORKED_RANKS = "GPUBENCH_TEST_FORKED_RANKS"
"""Names the same folder, of which a job takes the process that forks, for ranks that its mpirun starts."""


class Finished(NamedTuple):
    """How a command ended; `returncode` is None where it took too long and was killed."""

    returncode: int | None
    stdout: str
    stderr: str


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a fork of this process's Python is what a new one would be."""
    names = {name for name in {*environment, *os.environ} if name.startswith(_READ_BY_PYTHON)} - {"PYTHONPATH"}
    same = (environment.get(name) == os.environ.get(name) for name in names if not name.startswith(_ENCODING))
    return all(same) and _folders(environment) - _folders(os.environ) <= {str(_ROOT), *_INJECTED}


def _folders(environment: Mapping[str, str]) -> set[str]:
    return {each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each}


def run(arguments: Sequence[str], environment: Mapping[str, str], cwd: Path, seconds: float) -> Finished:
    """Run `gpubench` with these arguments, without input."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        told = {"arguments": list(arguments), "environment": dict(environment), "cwd": str(cwd), "streams": [1, 2]}
        request = json.dumps(told)
        encoding = frozenset(item for item in environment.items() if item[0].startswith(_ENCODING))
        returncode = _server(encoding).ask(request, (stdout.fileno(), stderr.fileno()), seconds)
        texts = []
        for stream in (stdout, stderr):
            stream.seek(0)
            texts.append(stream.read().decode().replace("\r\n", "\n"))
    return Finished(returncode, *texts)


class _Server:
    def __init__(self, encoding: Mapping[str, str]) -> None:
        others = {name: value for name, value in os.environ.items() if not name.startswith(_ENCODING)}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            process = subprocess.Popen(
                command,
                env={**others, **encoding},
                pass_fds=[theirs.fileno()],
                cwd=_ROOT,
                stdout=subprocess.PIPE,  # as a shell's: Python asks once whether it can seek
                stderr=subprocess.PIPE,
            )
        atexit.register(process.communicate)
        atexit.register(self._socket.close)  # comes first, and ends it

    def ask(self, request: str, streams: Sequence[int], seconds: float) -> int | None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))]
        self._socket.settimeout(seconds)
        self._socket.sendmsg([request.encode()], rights)
        child = int(self._socket.recv(64))
        try:
            return int(self._socket.recv(64))
        except TimeoutError:
            with suppress(ProcessLookupError):  # it ended in this moment
                os.kill(child, 9)
            self._socket.recv(64)
            return None

    def listen(self, listening: socket.socket) -> int:
        """Have a fork that forks for whoever connects there, until it is killed: its number."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listening.fileno()]))]
        self._socket.sendmsg([json.dumps({"listens": True}).encode()], rights)
        return int(self._socket.recv(64))


@cache
def for_shells() -> Sequence[str]:
    """What comes before the arguments of a shell's commands: one process forks for those of all tests, to their end."""
    folder = Path(tempfile.mkdtemp(prefix="fork-"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as place:
        place.bind(str(folder / "fork"))
        place.listen()
        usual = frozenset(item for item in os.environ.items() if item[0].startswith(_ENCODING))
        process = _server(usual).listen(place)
    atexit.register(shutil.rmtree, folder)
    atexit.register(os.kill, process, 9)
    return asking(folder)


def listening(folder: Path, environment: Mapping[str, str], *loaded: str) -> "subprocess.Popen[bytes]":
    """Start a process that forks for whoever asks it by way of the folder, and has loaded these modules too."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(folder / "fork"))
        listening.listen()
        command = [sys.executable, "-m", __name__, str(listening.fileno()), "listening", *loaded, children.ROOM]
        pipe = subprocess.PIPE  # as a shell's: Python asks once whether it can seek
        return subprocess.Popen(
            command,
            env=dict(environment) | {children.ROOM_VARIABLE: children.ROOM},
            pass_fds=[listening.fileno()],
            cwd=_ROOT,
            stdout=pipe,
            stderr=pipe,
            preexec_fn=die_with_parent,
        )


def asking(folder: Path, ranks: Path | None = None) -> list[str]:
    """What stands for gpubench, or for as many ranks as have files in a folder, before the arguments."""
    script = str(Path(__file__).with_name("asking.py"))
    return [sys.executable, "-I", "-S", script, str(folder / "fork"), str(ranks or "")]


@cache
def _server(encoding: frozenset[tuple[str, str]]) -> _Server:
    return _Server(dict(encoding))


def serve(listening: socket.socket) -> None:
    """Be the process that forks for whoever connects, until it is killed. A child returns as from `serve_one`."""
    while True:
        connection, _ = listening.accept()
        with connection:
            if os.fork() == 0:
                listening.close()
                if serve_one(connection):
                    return
                os._exit(0)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def serve_one(connection: socket.socket) -> bool:
    """Fork for each request until the other end is closed, then return False; in a child, True: it is set up to run.

    Where the other end is closed before the child has ended, the child is killed.
    """
    for request, streams in _requests(connection):
        told = json.loads(request)
        listens = "listens" in told
        child = os.fork()
        if child == 0 and listens:
            die_with_parent()
            connection.close()
            serve(socket.socket(fileno=streams[0]))
            return True
        if child == 0:
            _join(_asking(connection))
            connection.close()
            _become(told, streams)
            return True
        for stream in streams:
            os.close(stream)
        connection.send(str(child).encode())
        if listens:
            continue
        ended = os.pidfd_open(child)
        if ended not in select.select([ended, connection.fileno()], [], [])[0]:
            os.kill(child, 9)
        os.close(ended)
        _, status = os.waitpid(child, 0)
        with suppress(BrokenPipeError):
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    return False


def _requests(connection: socket.socket) -> Iterator[tuple[bytes, Sequence[int]]]:
    while True:
        request, streams, _, _ = socket.recv_fds(connection, _MOST_BYTES, 2)
        if not request:
            return
        yield request, streams


def _asking(connection: socket.socket) -> int:
    """The process at the other end."""
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def _join(pid: int) -> None:
    """Be where a process is: on its cores, with its limit of files' sizes, and on its host, which are namespaces."""
    os.sched_setaffinity(0, os.sched_getaffinity(pid))
    resource.setrlimit(resource.RLIMIT_FSIZE, resource.prlimit(pid, resource.RLIMIT_FSIZE))
    places = [Path(f"/proc/{pid}/ns/{name}") for name in ("uts", "net", "mnt")]
    opened = [os.open(each, os.O_RDONLY) for each in places if not each.samefile(f"/proc/self/ns/{each.name}")]
    for each in opened:
        if ctypes.CDLL(None, use_errno=True).setns(each, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(each)


def _become(request: Mapping[str, object], streams: Sequence[int]) -> None:
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    environment, arguments, numbers = request["environment"], request["arguments"], request["streams"]
    assert isinstance(environment, dict)
    assert isinstance(arguments, list)
    assert isinstance(numbers, list)
    for number, stream in zip(numbers, streams, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if number not in numbers:  # as in a Python that is started with a closed one
            os.close(number)
            vars(sys).update({name: None, f"__{name}__": None})
    os.environ.clear()
    os.environ.update(environment)
    if folder := os.environ.pop(UNENDED_RANKS, ""):
        _UNENDED.append(Path(folder, str(os.getpid())))
        _UNENDED[0].touch()
    os.chdir(str(request["cwd"]))
    sys.argv = ["gpubench", *arguments]
    sys.orig_argv = [sys.executable, "-m", *sys.argv]
    children.show(sys.orig_argv)
    for folder in sorted(_folders(os.environ).intersection(_INJECTED)):
        runpy.run_path(f"{folder}/sitecustomize.py")
    # Nothing here ends a rank because another one has ended, so that none has to wait until the first has spoken.
    vars(process).update(SECONDS_FOR_THE_FIRST_RANK=0.0)
    # A job of a test takes ten seconds only where others take the cores from it, of which stderr is not to speak.
    vars(presenter).update(SECONDS_TO_FIRST_LINE=600.0)
    # What a worker of a scan copies in its memory, 64 MiB, would be half of all that it takes.
    vars(timing).update(copy_seconds=_copy_an_eighth)
    children.fork_instead()
    gc.set_threshold(10_000)  # a search for garbage writes to all that is new, a third of what most commands take
    if KEPT_RANKS in os.environ:
        found = _KeptLauncher(os.environ[KEPT_RANKS], launch.Flavour.OPEN_MPI)
        launch.find_launcher = lambda search_path=None: found
    if FORKED_RANKS in os.environ:
        launch.module_command = _of_forks  # type: ignore[assignment, attr-defined]


def _copy_an_eighth(
    size_bytes: int, samples: int, _copy: Callable[..., list[float]] = timing.copy_seconds
) -> list[float]:
    while GATE in os.environ and not Path(os.environ[GATE]).exists():
        time.sleep(0.01)
    return [8 * seconds for seconds in _copy(size_bytes // 8, samples)]


_UNENDED: list[Path] = []


def _end(code: int) -> None:
    """End as Python does, but free nothing: to free all that was imported takes longer than most commands.

    Returns where Python itself has to end the process: with a stream that cannot be written, and inside MPI.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        return
    for each in _UNENDED:
        each.unlink()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (OSError, ValueError):
        return
    ctypes.PyDLL(None).exit(code)


class _KeptLauncher(launch.Launcher):
    """Where `tests/mpi/kept.py` has that many ranks, they are taken in the place of an mpirun's."""

    def command(self, ranks: int, arguments: Sequence[str]) -> list[str]:
        return [*asking(Path(self.path), Path(self.path, str(ranks))), *arguments]


def _of_forks(_module: str, *arguments: str) -> list[str]:
    """In the place of `module_command` where launchers are asked for ranks: what they start asks for forks."""
    return [*asking(Path(os.environ[FORKED_RANKS])), *arguments]


if __name__ == "__main__":
    load_all_modules()
    _given, *_words = sys.argv[1:]
    for _name in (*_LOADED_AHEAD, *_words[1:-1]):
        with suppress(ModuleNotFoundError):  # not every version of typer has all of them
            importlib.import_module(_name)
    all_profiles()  # read once, and kept, as they are in each process
    for _each in [*records._WITHOUT_METHODS]:  # once, and not in each child
        records._write_methods(_each)
    for _command in (BARE, *COMMANDS):
        typer_command(_command)
    gc.freeze()
    _socket = socket.socket(fileno=int(_given))
    if _words:
        serve(_socket)
    elif not serve_one(_socket):
        sys.exit()
    try:
        runpy.run_module("gpubench", run_name="__main__", alter_sys=True)
    except SystemExit as _ended:
        _end(int(_ended.code or 0))
        raise
