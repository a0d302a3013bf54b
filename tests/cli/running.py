"""Run gpubench as a user does: as a process, or in this process if the command measures nothing."""

import codecs
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from unittest.mock import patch

import pytest

from gpubench.cli import process
from gpubench.cli.app import run_command_line
from gpubench.cli.process import PREFIX
from gpubench.formats import presenter
from gpubench.model.terms.options import options_of, plan_from
from gpubench.profiles import FOLDER_VARIABLE
from gpubench.ranks.launch import DAEMON_FAILED, find_launcher

ROOT = Path(__file__).parents[2]
INJECT = Path(__file__).parent / "inject"
PROGRAM = (sys.executable, "-m", "gpubench")
SECONDS = 300
"""What a command has to end: on a busy machine one takes a minute."""

MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_btl": "^ofi",
}
"""What a test's own mpirun needs as root on a small machine; btl ^ofi spares each start a second."""


def environment(**changes: str) -> dict[str, str]:
    own = ("COLUMNS", "NO_COLOR", "FORCE_COLOR")
    return {name: value for name, value in os.environ.items() if name not in own} | changes


ASCII = environment(LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONCOERCECLOCALE="0")
"""Variables of a terminal that shows ASCII alone."""


def broken(fault: str) -> dict[str, str]:
    """An environment in which ranks have the fault that inject/sitecustomize.py describes."""
    return environment(PYTHONPATH=f"{INJECT}{os.pathsep}{ROOT}", GPUBENCH_TEST_FAULT=fault)


_MEASURES_NOTHING = {"compare", "explain", "profiles", "report"}
_OF_ANOTHER_MACHINE = {"--simulate", "--replay", "--from", "--hang"}
_NO_OPTIONS = (FOLDER_VARIABLE, "GPUBENCH_TEST_")
_VARIABLES = environment()


def _can_run_here(arguments: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Return whether the command needs nothing of this machine, no stdin, and no variables but options."""
    is_elsewhere = {*arguments[:1]} & _MEASURES_NOTHING or _OF_ANOTHER_MACHINE.intersection(arguments)
    changed = {name for name, _ in variables.items() ^ _VARIABLES.items()} - {"PYTEST_CURRENT_TEST", "NCCL_RAS_ADDR"}
    are_options = all(each.startswith(PREFIX) and not each.startswith(_NO_OPTIONS) for each in changed)
    return bool(is_elsewhere) and "-" not in arguments and are_options and Path.cwd() == ROOT


def _run_here(arguments: Sequence[str], variables: Mapping[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """As `python -m gpubench` would in that folder."""
    codecs.register_error(process._HANDLER, process._spell)
    main = ModuleType("__main__")
    vars(main).update(__package__="gpubench", __file__=str(ROOT / "gpubench" / "__main__.py"))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors=process._HANDLER) as stdout,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors=process._HANDLER) as stderr,
    ):
        with (
            patch.dict(os.environ, variables, clear=True),
            pytest.MonkeyPatch.context() as patched,
            redirect_stdout(stdout),
            redirect_stderr(stderr),
            chdir(cwd),
        ):
            patched.setitem(sys.modules, "__main__", main)
            patched.setattr(sys, "argv", ["gpubench", *arguments])
            patched.setattr(sys, "orig_argv", [sys.executable, "-m", "gpubench", *arguments])
            patched.setattr(presenter, "SECONDS_TO_FIRST_LINE", 600.0)
            code = process._ended(run_command_line, process._own_launch())
        for number, handler in handlers.items():
            signal.signal(number, handler)
        texts = []
        for stream in (stdout, stderr):
            stream.seek(0)
            texts.append(stream.read())
    return subprocess.CompletedProcess(["gpubench", *arguments], code, *texts)


def gpubench(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT, program: Sequence[str] = PROGRAM
) -> subprocess.CompletedProcess[str]:
    """Run a command in this process if it needs no other, and as a process with this program otherwise."""
    variables = env or environment()
    if program is PROGRAM and _can_run_here(arguments, variables):
        return _run_here(arguments, variables, cwd)
    command = [*program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=variables, cwd=cwd)


def _has_gpus() -> bool:
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    return any(each.read_text().strip() == "0x10de" for each in vendors)


without_gpus = pytest.mark.skipif(_has_gpus(), reason="this machine has GPUs, whose slots no test can hide")
"""For tests of what a machine without GPUs is told (see tests/conftest.py)."""


def document_so_far(path: Path) -> dict[str, Any]:
    """What a job under way has written, empty before that: at first it only tries whether it can write there."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        text = ""
    document: dict[str, Any] = json.loads(text) if text else {}
    return document


def mpirun_command(ranks: int, *arguments: str, program: Sequence[str] = PROGRAM) -> Sequence[str]:
    return [find_launcher().path, "-n", str(ranks), *program, *arguments]


def mpirun(
    ranks: int, *arguments: str, env: Mapping[str, str] | None = None, program: Sequence[str] = PROGRAM
) -> subprocess.CompletedProcess[str]:
    """Run gpubench under an mpirun of the test's own, once more if that could not start anything."""
    command = mpirun_command(ranks, *arguments, program=program)
    return run_mpirun(command, dict(env or environment()) | MPI_ENVIRONMENT)


def run_mpirun(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=False, env=variables, cwd=ROOT
        )

    first = run()
    return run() if first.returncode == DAEMON_FAILED else first


Plan = TypeVar("Plan")


def planned(kind: type[Plan], checked: Callable[[Plan], Plan], typed: Mapping[str, object]) -> Plan:
    """The plan of a command as if its fields, and those of its presentation, had been typed."""
    assert typed.keys() <= {option.field for option in options_of(kind)}, "the command lacks an option"
    return checked(plan_from(kind, typed))
