"""What a start imports: nothing of the commands for --help, and of one command what its own help needs."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from gpubench.cli import commands
from gpubench.cli.process import COMMANDS
from tests.cli.running import ROOT

OWN_MODULES_OF_HELP = 15
"""The package, the command line, the records of commands and collectives and their maker, errors, who started us."""

OWN_MODULES_OF_A_COMMAND = {
    "kv": 30,
    "profiles": 20,
    "overlap": 56,  # as those of a collective
    "collective": 70,  # and the words of its options: types, operations, algorithms, modes, backends
}
"""By module of `gpubench.cli.commands`, where it is not as usual; one above what each takes."""

OWN_MODULES_OF_OTHERS = 29
"""The formats, whose names the help of a command lists, and none of the row types that they write."""

FOREIGN = {"rich", "pydantic", "numpy", "mpi4py", "cupy", "pandas", "pynvml"}
"""None is needed to print a help; rich and pydantic come with typer, which loads them when it needs them."""

TRIED = ["", "allreduce", *(each.name for each in COMMANDS if each.module != "collective")]
"""Commands of which help is asked, the first for that of them all."""

PROGRAM = """
import os, sys
from gpubench.cli.app import main
for command in sys.argv[1:]:
    if os.fork() == 0:
        sys.argv = ["gpubench", *command.split(), "--help"]
        try:
            main()
        except SystemExit:
            print("loaded", command, *sys.modules, sep="\\t")
            sys.exit()
    assert os.wait()[1] == 0
"""


@cache
def every_help() -> Mapping[str, frozenset[str]]:
    """By command the modules of a process that has printed its help: each a fork of what all of them begin with."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    words = [sys.executable, "-c", PROGRAM, *TRIED]
    result = subprocess.run(words, capture_output=True, text=True, check=True, env=plain)
    assert result.stdout.count("Usage: gpubench") == len(TRIED)
    lines = [line.split("\t") for line in result.stdout.splitlines() if line.startswith("loaded\t")]
    return {command: frozenset(modules) for _, command, *modules in lines}


def loaded_by_help(command: str = "") -> frozenset[str]:
    return every_help()[command]


def own(modules: frozenset[str]) -> list[str]:
    return sorted(name for name in modules if name.partition(".")[0] == "gpubench")


def test_help_imports_no_command() -> None:
    loaded = own(loaded_by_help())
    assert len(loaded) <= OWN_MODULES_OF_HELP, loaded
    assert not any(name.startswith(("gpubench.cli.commands", "gpubench.cli.options")) for name in loaded)


@pytest.mark.parametrize("name", TRIED[1:])
def test_the_help_of_a_command_imports_what_it_needs(name: str) -> None:
    (module,) = (each.module for each in COMMANDS if each.name == name)
    loaded = own(loaded_by_help(name))
    assert len(loaded) <= OWN_MODULES_OF_A_COMMAND.get(module, OWN_MODULES_OF_OTHERS), loaded
    imported = {each for each in loaded if each.startswith("gpubench.cli.commands.")}
    assert imported == {f"gpubench.cli.commands.{module}"}


def test_the_help_of_a_collective_imports_no_other() -> None:
    loaded = loaded_by_help("allreduce")
    others = {f"gpubench.collectives.{each.name}" for each in COMMANDS if each.module == "collective"}
    assert loaded & others == {"gpubench.collectives.allreduce"}


@pytest.mark.parametrize("command", ["", "topo", "allreduce"])
def test_help_loads_no_heavy_library(command: str) -> None:
    assert not FOREIGN & loaded_by_help(command)


def test_a_list_of_profiles_loads_nothing_to_read_values_with() -> None:
    program = PROGRAM.replace(', "--help"]', "]")
    result = subprocess.run([sys.executable, "-c", program, "profiles list"], capture_output=True, check=True)
    assert b"hgx-h100-8" in result.stdout
    assert not FOREIGN & set(result.stdout.decode().splitlines()[-1].split("\t"))


def test_no_module_imports_a_foreign_library_before_it_is_used() -> None:
    """Tests fork from a process that has imported all of gpubench: a child may start MPI, or a driver, afresh."""
    program = "import sys; from tests.modules import load_all_modules; load_all_modules(); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(result.stdout.split())
    assert "gpubench.backends.mpi.group" in loaded
    assert not loaded & {"cupy", "mpi4py", "nvtx", "numpy", "pandas", "pynvml", "torch"}


def test_ranks_are_launched_before_what_presents_them_is_imported() -> None:
    program = "import sys, gpubench.jobs.collective.job, gpubench.cli.commands.collective; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    later = (
        "formats.presenter",
        "conditions",
        "measure.collective.sweep",
        "model.results.report",
        "model.facts.snapshot",
    )
    assert not loaded & {*FOREIGN, *(f"gpubench.{each}" for each in later)}


def test_drivers_are_asked_before_what_examines_their_answers_is_imported() -> None:
    program = "import sys, gpubench.jobs.topo, gpubench.cli.commands.machine; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    later = ("formats.presenter", "conditions", "measure", "hardware.probe", "model.paths.topology")
    assert not set(result.stdout.split()) & {*FOREIGN, *(f"gpubench.{each}" for each in later)}


@pytest.mark.parametrize(
    ("stage", "needless"),
    [
        ("cuda", ("hardware.node.nvml", "hardware.node.sysfs", "hardware.probe")),
        ("nvml", ("hardware.node.sysfs", "hardware.probe")),
        ("sysfs", ("hardware.node.drivers", "hardware.node.gpus", "hardware.probe")),
    ],
)
def test_a_child_that_reads_a_node_imports_its_own_source_alone(stage: str, needless: Sequence[str]) -> None:
    child = f"from gpubench.machine.stage import main; main(['{stage}', '/nowhere'])"
    program = f"import sys; {child}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not set(result.stdout.split()) & {f"gpubench.{each}" for each in needless}


def test_every_module_of_a_command_is_in_the_table() -> None:
    modules = {path.stem for path in Path(commands.__path__[0]).glob("*.py")} - {"__init__"}
    assert modules == {each.module for each in COMMANDS}
