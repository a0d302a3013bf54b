"""Jobs of real ranks that are kept: what mpirun, Python and the imports take, a job is spared.

MPI knows a rank by variables that mpirun gives it. An mpirun whose processes only wait lends theirs, to one job after
another, whose ranks are forked by a process that has imported everything. It waits for no rank that it has lost, so
that a job after that one would begin without some, or never: where a rank ended inside MPI, the next job gets another
mpirun. What tests how ranks end or die, or what mpirun does, has an mpirun of its own, which starts what asks that
process for forks, and takes signals and ends as they do: `own_gpubench`, `own_mpirun`. What tests how they
start has them started: `tests/cli/running.py`.
"""

import atexit
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import IO

from gpubench.ranks.launch import Flavour, find_launcher, start
from tests.cli import forking, running
from tests.cli.running import MPI_ENVIRONMENT, ROOT, SECONDS, environment
from tests.mpi.believed_driver import RANKS

_WAITS = 'env -0 > "$0/$OMPI_COMM_WORLD_RANK"; echo kept; read -r _ < "$0.held"'
_OF_A_SHELL = ("PWD", "OLDPWD", "SHLVL", "_")


def gpubench(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> "subprocess.CompletedProcess[str]":
    """A command that launches ranks: as many as `--np` says, as believe in GPUs, or two."""
    variables = dict(env or environment())
    usual = RANKS if "GPUBENCH_TEST_LOGS" in variables else 2
    ranks = int(arguments[arguments.index("--np") + 1]) if "--np" in arguments else usual
    folder = _kept(ranks)
    return running.gpubench(*arguments, env=variables | ({forking.KEPT_RANKS: str(folder)} if folder else {}), cwd=cwd)


def mpirun(ranks: int, *arguments: str, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """A user's own job of that many ranks."""
    folder = _kept(ranks)
    if folder is None or not forking.can_fork(env or environment()):
        return running.mpirun(ranks, *arguments, env=env)
    command = [*forking.asking(folder, folder / str(ranks)), *arguments]
    variables = dict(env or environment()) | MPI_ENVIRONMENT
    return subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, check=False, env=variables, cwd=ROOT
    )


def own_gpubench(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> "subprocess.CompletedProcess[str]":
    """A command that launches ranks under an mpirun of its own."""
    return running.gpubench(*arguments, env=forked(env or environment()), cwd=cwd)


def own_mpirun(ranks: int, *arguments: str, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """A user's own job of that many ranks under an mpirun of its own."""
    variables = dict(env or environment())
    return running.mpirun(ranks, *arguments, env=variables, program=program(variables))


def program(env: Mapping[str, str]) -> Sequence[str]:
    """What stands for `python -m gpubench` on a command line with this environment."""
    if find_launcher().flavour is not Flavour.OPEN_MPI or not forking.can_fork(env):
        return running.PROGRAM
    return forking.asking(_forking())


def forked(env: Mapping[str, str]) -> dict[str, str]:
    """An environment in which the ranks that a command launches are forks."""
    if find_launcher().flavour is not Flavour.OPEN_MPI or not forking.can_fork(env):
        return dict(env)
    return {**env, forking.FORKED_RANKS: str(_forking())}


def _kept(ranks: int) -> Path | None:
    """The folder of the ranks that are kept, with that many among them; None where that is not known to work."""
    mpi = find_launcher()
    if mpi.flavour is not Flavour.OPEN_MPI:
        return None
    folder = _forking()
    if not Path(folder, _LIBRARY).exists():
        return None
    unended = folder / f"{ranks}.unended"
    if ranks in _HELD and (_HELD[ranks][0].poll() is not None or any(unended.iterdir())):
        _let_go(*_HELD.pop(ranks))
    if ranks not in _HELD:
        shutil.rmtree(unended, ignore_errors=True)
        unended.mkdir()
        _HELD[ranks] = _hold(mpi.path, ranks, folder / str(ranks))
    return folder


_LOADED = ("numpy", "mpi4py.MPI", "tests.fakes.library_log", "tests.fakes.nccl_log")


_HELD: "dict[int, tuple[subprocess.Popen[bytes], IO[bytes]]]" = {}
"""By number of ranks, their mpirun, and the pipe on which they wait: this process ends, closing it, and so do they."""


def _let_go(process: "subprocess.Popen[bytes]", held: IO[bytes]) -> None:
    held.close()
    with process:
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


@atexit.register
def _let_all_go() -> None:
    while _HELD:
        _let_go(*_HELD.popitem()[1])


@cache
def _forking() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="kept-ranks-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    variables = environment(MPI4PY_RC_INITIALIZE="0", MPI4PY_RC_FINALIZE="0") | idle_waits(folder)
    process = forking.listening(folder, variables, *_LOADED)
    ending = ExitStack()
    ending.enter_context(process)
    ending.callback(process.kill)
    atexit.register(ending.close)
    return folder


_IN_RANKS = """
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
static long long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}
static int wait_a_while(void) {
    static __thread long long began, ended;
    if (now() - ended > 100000) began = now();
    long long sleep = (now() - began) / 8;
    struct timespec t = {0, sleep < 100000 ? 100000 : sleep > 2000000 ? 2000000 : sleep};
    int code = nanosleep(&t, 0);
    ended = now();
    return code;
}
int sched_yield(void) { return wait_a_while(); }
int usleep(unsigned us) {
    struct timespec t = {us / 1000000, us % 1000000 * 1000L};
    return us > 100 ? nanosleep(&t, 0) : wait_a_while();
}
int shutdown(int socket, int how) {
    struct sockaddr peer = {0};
    socklen_t size = sizeof peer;
    struct timespec t = {0, 50000000};
    if (!getpeername(socket, &peer, &size) && peer.sa_family == AF_INET) nanosleep(&t, 0);
    return syscall(SYS_shutdown, socket, how);
}
"""
"""How a rank waits for messages, and for others in MPI_Init and MPI_Finalize, which call usleep: an eighth of what this
wait has lasted, from 0.1 to 2 ms; it is another one where 0.1 ms went to something else.

And how it ends its connection to mpirun, 50 ms late: PMIx 5.0.11 answers a rank that leaves, then notes that it left
(`op_cbfunc2` in src/server/pmix_server.c), and takes one for lost whose connection ends in between.
"""

_LIBRARY = "ranks.so"


def idle_waits(folder: Path) -> dict[str, str]:
    """Variables with which a rank that waits inside MPI, which else looks for messages without end, sleeps in between.

    Where there is no C compiler there are none, and no ranks are kept.
    """
    compiler, library = shutil.which("cc"), folder / _LIBRARY
    if compiler is None:
        return {}
    words = [compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library)]
    compiled = subprocess.run(words, input=_IN_RANKS, text=True, capture_output=True, check=False)
    return {"LD_PRELOAD": str(library)} if compiled.returncode == 0 else {}


def _started(
    command: Sequence[str], environment: Mapping[str, str], ranks: int
) -> "tuple[subprocess.Popen[bytes], list[bytes]]":
    """An mpirun, and as many lines of what it prints as it has ranks."""
    process = start(command, environment)
    assert process.stdout is not None
    return process, [process.stdout.readline() for _ in range(ranks)]


def _hold(mpirun: str, ranks: int, folder: Path) -> "tuple[subprocess.Popen[bytes], IO[bytes]]":
    folder.mkdir(exist_ok=True)
    pipe = folder.with_suffix(".held")
    if not pipe.exists():
        os.mkfifo(pipe)
    held = os.fdopen(os.open(pipe, os.O_RDWR), "r+b", buffering=0)
    given = environment() | MPI_ENVIRONMENT
    command = [mpirun, "-n", str(ranks), "sh", "-c", _WAITS, str(folder)]
    process, said = _started(command, given, ranks)
    if said != [b"kept\n"] * ranks:  # as in running.mpirun: now and then one cannot start anything
        with process:
            process.kill()
        process, said = _started(command, given, ranks)
    assert said == [b"kept\n"] * ranks
    for path in folder.iterdir():
        variables = dict(each.split("=", 1) for each in path.read_text().split("\0") if each)
        own = {name: value for name, value in variables.items() if given.get(name) != value and name not in _OF_A_SHELL}
        path.write_text(json.dumps(own | {forking.UNENDED_RANKS: str(folder.with_suffix(".unended"))}))
    return process, held
