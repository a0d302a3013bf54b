"""Children of a command that `forking.py` runs are forks of it: the start of Python and all imports are spared.

That is for modules of gpubench that have nothing of their parent but descriptors, arguments and variables.
"""

import atexit
import ctypes
import inspect
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

_MODULES = (
    "gpubench",
    "gpubench.backends.libraries",
    "gpubench.machine.stage",
    "gpubench.backends.scan_worker",
    "gpubench.machine.traffic",
    "gpubench.ranks.watchdog.main",
)
_ROOT = str(Path(__file__).parents[2])
_STREAMS = (("stdin", "r", "p2cread"), ("stdout", "w", "c2pwrite"), ("stderr", "w", "errwrite"))
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")

_Popen: Any = subprocess.Popen
_start_anew = _Popen._execute_child
_SIGNATURE = inspect.signature(_start_anew)


def fork_instead() -> None:
    """From now on, of this process and its forks, `subprocess` forks for those modules."""
    _Popen._execute_child = _start


ROOM, ROOM_VARIABLE = " " * 20_000, "GPUBENCH_TEST_ROOM"
"""What makes room for the words and the variables that a fork shows, where its process has it as a word and in one."""


def show(words: Sequence[str]) -> None:
    """Have /proc show these words, and the variables of now, as of a process that was started with them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, last, first_variable, last_variable = map(int, fields[45:49])
    variables = [f"{name}={value}" for name, value in os.environ.items()]
    for texts, begin, end in ((words, first, last), (variables, first_variable, last_variable)):
        shown = "".join(f"{each}\0" for each in texts).encode(errors="surrogateescape")
        if len(shown) < end - begin:
            ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def _start(popen: Any, *arguments: Any) -> Any:
    """In the place of Popen's method of that name, with its arguments."""
    given = _SIGNATURE.bind(popen, *arguments).arguments
    match given["args"]:
        case [sys.executable, "-P", "-m", module, *_] if module in _MODULES and _alike(given["env"]):
            words = given["args"][3:]
        case _:
            return _start_anew(popen, *arguments)
    popen.pid = os.fork()
    if popen.pid == 0:
        _be_child(words, given)
    popen._child_created = True
    return popen._close_pipe_fds(*(given[each] for each in _PIPES))


def _alike(environment: Mapping[str, str] | None) -> bool:
    """Whether Python would start there as it is here."""
    given = os.environ if environment is None else environment

    def read(variables: Mapping[str, str]) -> set[tuple[str, str]]:
        folders = {each for each in variables.get("PYTHONPATH", "").split(os.pathsep) if each not in ("", _ROOT)}
        others = {item for item in variables.items() if item[0].startswith(("PYTHON", "LANG", "LC_", "COVERAGE"))}
        return {item for item in others if item[0] != "PYTHONPATH"} | {("PYTHONPATH", each) for each in folders}

    return read(given) == read(os.environ)


def _be_child(words: Sequence[str], given: Mapping[str, Any]) -> NoReturn:
    code = 1
    try:
        _inherit_nothing_else(given)
        sys.argv = [*words]
        sys.orig_argv = [sys.executable, "-P", "-m", *words]
        show(sys.orig_argv)
        sys.modules.pop(words[0], None)  # it is run as the program
        try:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - as Python does
        traceback.print_exc()
    finally:
        os._exit(code)


def _inherit_nothing_else(given: Mapping[str, Any]) -> None:
    """What exec does away with, and what Popen's arguments ask for."""
    atexit._clear()
    for each in filter(lambda number: callable(signal.getsignal(number)), signal.valid_signals()):
        signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
    if given["start_new_session"]:
        os.setsid()
    _keep_descriptors(given)
    if given["preexec_fn"] is not None:
        given["preexec_fn"]()
    if given["cwd"] is not None:
        os.chdir(given["cwd"])
    if given["env"] is not None:
        variables = dict(given["env"])
        os.environ.clear()
        os.environ.update(variables)


def _keep_descriptors(given: Mapping[str, Any]) -> None:
    for number, (_, _, name) in enumerate(_STREAMS):
        if given[name] >= 0:
            os.dup2(given[name], number)
    for opened in {int(each.name) for each in Path("/proc/self/fd").iterdir()} - {0, 1, 2, *given["pass_fds"]}:
        with suppress(OSError):  # what lists them
            os.close(opened)
    for each in given["pass_fds"]:
        os.set_inheritable(each, True)
    for number, (name, mode, _) in enumerate(_STREAMS):
        old = getattr(sys, f"__{name}__") or getattr(sys, name)  # None of one that was closed at the start
        stream = open(number, mode, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
