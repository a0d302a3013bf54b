"""Every profile's machine is healthy: each command, in each of its modes, says PASS, or SKIP where nothing is expected.

In process, as there are hundreds of runs; what a process adds is tested with each command. What judges all that a
profile expects runs on every machine; the other commands, which judge a part of that, take turns.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from gpubench.cli.app import app
from gpubench.collectives.registry import SUMMARIES
from gpubench.errors import COULD_NOT_MEASURE, DONE, UsageError
from gpubench.machine.recorded import write_recording
from gpubench.model.facts.snapshot import is_amd
from gpubench.profiles import all_profiles, load
from gpubench.simulated.machine import parse_machine, snapshots
from tests.conditions.test_edited_facts import HEALTHY, Edit
from tests.machines.test_machines import FOLDER as RECORDED

MACHINES = [profile.name for profile in all_profiles() if profile.match.visible and not is_amd(profile.gpu.name)]
JUDGING_ALL = ("check --full --strict", "allreduce --sizes 1K:1G:32 --strict")
JUDGING_A_PART = ("", "p2p --strict", "--quick", "p2p --sizes 256M --strict", "overlap --strict")
"""Topo, a usual check and watch are tried with several nodes."""

OF_MIG = ("topo --strict", "watch --for 4s --strict")

OF_ONE_GPU = ("", "--quick", "topo --strict", "p2p --strict", "check", "check --full --strict")
"""It is one GPU: commands that need several say so, and stop."""

BETWEEN_NODES = ("allreduce --sizes 1G --strict", "scan --strict")
OF_SEVERAL = (*BETWEEN_NODES, "check --strict", "topo --strict", "watch --for 2s --strict")
RARE = (
    *JUDGING_A_PART,
    *("topo --strict", "check", "watch --for 2s --strict"),
    "p2p --sizes 8:256M:8 --strict",
    "p2p --memory managed --strict",
    "check --strict",
    "check --quick --strict",
    *(f"{collective} --sizes {sizes} --strict" for collective in SUMMARIES for sizes in ("1G", "1K:1G:32")),
)


ODD = re.compile(
    r"\b(nan|inf|None|nothing is expected|1 of 1|1 ranks|1 nodes|1 GPUs|(?P<word>[a-z]{2,}) (?P=word)|Traceback)\b"
    r"|(?<![\d.])0 GB/s|\d\.\d{4,} GB/s"
)
"""What no text on a machine has: values that are not there, plurals of one, words twice, more digits than are known."""


class Said(NamedTuple):
    """What a command said of a machine; `odd` are the lines that nobody would write so."""

    machine: str
    command: str
    code: int
    sentence: str
    odd: tuple[str, ...] = ()


def said(machine: str, command: str) -> Said:
    arguments = [*command.split(), "--simulate", machine, "--no-progress"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    odd = tuple(filter(ODD.search, (result.stdout + result.stderr).splitlines()))
    return Said(machine, command, result.exit_code, result.stdout.rstrip().rpartition("\n")[2], odd)


def called_ill(name: str, runs: Sequence[Said]) -> Iterator[Said]:
    """The runs that end with another word than PASS, or have an odd line.

    SKIP is right where the profile is the reason: of a kind that nobody named some speeds are not judged, and of GPUs
    without NVLinks counters do not show the way.
    """
    profile = load(name)
    for each in runs:
        word, reason = each.sentence.partition(" (simulated):")[::2]
        expects = profile.match.generic is None and profile.typical("host_to_device_gb_s") is not None
        unjudged = not expects and "not judged" in reason
        not_told = profile.nvlink is None and "counters do not show" in reason
        alone = profile.match.visible == 1 and each.command.startswith("watch")  # it sends nothing to any other
        right = (word, each.code) == ("PASS", DONE) or (word == "SKIP" and (unjudged or not_told or alone))
        if each.odd or not right:
            yield each


def in_turn(name: str, commands: Sequence[str]) -> str:
    """One of the commands: machines beside each other in the list, which are of a kind, have different ones."""
    return commands[MACHINES.index(name) % len(commands)]


@pytest.mark.parametrize("name", MACHINES)
def test_a_healthy_machine_is_never_called_ill(name: str) -> None:
    has_peers = load(name).match.visible > 1
    commands = (*JUDGING_ALL, in_turn(name, JUDGING_A_PART)) if has_peers else OF_ONE_GPU
    assert list(called_ill(name, [said(name, command) for command in commands])) == []


AMD = [profile.name for profile in all_profiles() if is_amd(profile.gpu.name)]


@pytest.mark.parametrize("name", AMD)
def test_healthy_amd_machines_pass_in_the_commands_that_simulate_them(name: str) -> None:
    commands = ("topo --strict", "allreduce --sizes 1K:1G:32 --strict")
    assert list(called_ill(name, [said(name, command) for command in commands])) == []


@pytest.mark.parametrize(
    "command", ["", "--quick", "check", "p2p", "kv", "scan", "watch", "overlap", "topo --fault gpu0:mig=on"]
)
def test_commands_and_faults_of_nvidia_gpus_refuse_an_amd_machine(command: str) -> None:
    error = CliRunner().invoke(app, [*command.split(), "--simulate", AMD[0]]).exception
    assert isinstance(error, UsageError)
    assert "machine with NVIDIA GPUs" in error.expected
    assert error.next_step.startswith(f"gpubench topo --simulate {AMD[0]}")


SPLIT = ("hgx-a100-4", "hgx-h100-8/4", "a100-pcie-2", "h100-nvl-2", "hgx-h100-8/1")


@pytest.mark.parametrize("name", SPLIT)
def test_a_node_whose_gpus_are_all_split_by_mig_is_as_somebody_wants_it(name: str) -> None:
    """All-reduce was FAIL, 6 % of what whole GPUs reach: `MIG is on; nothing to repair`."""
    board, _, visible = name.partition("/")
    gpus = int(visible or load(board).match.visible)
    split = "".join(f" --fault gpu{gpu}:mig=on" for gpu in range(gpus))
    several = (*JUDGING_ALL, *(JUDGING_A_PART + OF_MIG)[SPLIT.index(name) % 4 :: 4])
    commands = several if gpus > 1 else OF_ONE_GPU
    runs = [said(name, command + split) for command in commands]
    assert {each.sentence.partition(" (simulated):")[0] for each in runs} <= {"PASS", "SKIP"}, runs
    assert {each.code for each in runs} <= {DONE, COULD_NOT_MEASURE}


RECORDED_WELL = ("a100-mig", "a100-pcie-bridged", "h100x1-vm", "h100x8-nic8", "h200x1-vm", "h200x4-vm", "h200x8-vm")


@pytest.mark.parametrize("name", RECORDED_WELL)
def test_recorded_machines_that_are_healthy_pass(name: str) -> None:
    for command in ("check --quick --strict", "topo --strict", "--quick"):
        words = [*command.split(), "--replay", str(RECORDED / name)]
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        assert (result.exit_code, result.stdout.rstrip().rpartition("\n")[2].partition(":")[0]) == (DONE, "PASS")


@pytest.mark.parametrize(("what", "machines", "edit"), HEALTHY)
def test_recordings_of_healthy_machines_of_other_kinds_pass(
    what: str, machines: str, edit: Edit, tmp_path: Path
) -> None:
    """Every healthy edit on one machine, by the length of its name."""
    name = machines.split()[len(what) % len(machines.split())]
    first, *others = snapshots(parse_machine(name))
    folder = tmp_path / what.replace(" ", "_")
    write_recording(folder, [replace(edit(first), host="node0"), *others], [])
    for command in ("check --quick --strict", "topo --strict"):
        result = CliRunner().invoke(app, [*command.split(), "--replay", str(folder)], catch_exceptions=False)
        word = result.stdout.rstrip().rpartition("\n")[2].partition(" (simulated):")[0]
        assert (result.exit_code, word) == (DONE, "PASS"), f"{what} on {name}: {command}"


def can_run(name: str, command: str) -> bool:
    """False for what needs a second GPU, where a machine has one."""
    alone = ("", "--quick", "topo --strict", "p2p --strict", "check", "watch --for 2s --strict")
    return load(name).match.visible > 1 or command in alone or command.startswith("check ")


def has_network(name: str) -> bool:
    return any(nic.rate_gbit_s for nic in load(name).nic)


def for_several(name: str) -> list[str]:
    """The commands for several nodes; without NICs of a known rate nothing goes between them."""
    commands = [each for each in OF_SEVERAL if has_network(name) or each not in BETWEEN_NODES]
    if load(name).match.visible == 1:
        # A GPU alone has no NVLinks to count, and watch says that it cannot know the way.
        commands = [each for each in commands if not each.startswith("watch")]
    return commands


@pytest.mark.parametrize("name", MACHINES)
def test_healthy_nodes_are_never_called_ill(name: str) -> None:
    first, *others = for_several(name)
    assert list(called_ill(name, [said(f"{name}*3", each) for each in (first, in_turn(name, others))])) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_a_healthy_machine_is_never_called_ill_in_any_mode(name: str) -> None:
    runs = [said(name, command) for command in RARE if can_run(name, command)]
    runs += [said(f"{name}*4", command) for command in for_several(name)]
    runs += [said(f"{name}*2", "check --full --strict")]
    if has_network(name):
        runs += [said(f"{name}*2", f"{each} --sizes 1K:1G:32 --strict") for each in SUMMARIES]
    assert list(called_ill(name, runs)) == []
