"""Machines from parts that no profile is of: none is called ill, and of one fault on one part no other part is named.

The normal run tries seventy of them with what costs little, `-m hypothesis --hypothesis-profile search` twenty
times as many, other ones each time.
"""

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings
from msgspec.structs import replace
from typer.testing import CliRunner

from gpubench.cli.app import app
from gpubench.errors import COULD_NOT_MEASURE, DONE, JUDGED_AND_FAILED
from gpubench.profiles import load
from tests.cli.any_machine import NAME, Machine, Planted, known, machines, planted, with_figures
from tests.cli.test_healthy_machines import said
from tests.examples import examples

BY_FACTS = ("topo --strict", "check --quick --strict", "watch --for 2s --strict")
MEASURED = ("", "check --strict", "p2p --strict", "allreduce --sizes 1G --strict")
GRAVE = ("FAIL", "WARN", "ERROR", "INCONCLUSIVE")


def called_ill(machine: Machine, commands: tuple[str, ...]) -> list[str]:
    """The commands that say another word than PASS or SKIP, with what they say."""
    with known(machine):
        runs = [said(machine.text, command + machine.settings) for command in commands]
    fine = {("PASS", DONE), ("SKIP", DONE), ("SKIP", COULD_NOT_MEASURE)}
    return [str(each) for each in runs if (each.sentence.partition(" (simulated):")[0], each.code) not in fine]


@settings(max_examples=examples(24))
@given(machines(8))
def test_no_healthy_machine_is_called_ill_by_its_facts(machine: Machine) -> None:
    assert called_ill(machine, BY_FACTS) == []


@settings(max_examples=examples(10))
@given(machines(4))
def test_no_healthy_machine_is_called_ill_by_what_it_reaches(machine: Machine) -> None:
    assert called_ill(machine, tuple(each for each in MEASURED if can_measure(machine, each))) == []


def test_copies_through_host_memory_are_held_against_pcie_whatever_links_join_the_gpus() -> None:
    """Under MIG the two of three GPUs with a bridge were at 11 % of what the third pair reached."""
    bridged = load("a100-pcie-2")
    profile = replace(bridged, name=NAME, match=replace(bridged.match, visible=3), expected=(), curve=())
    machine = Machine(with_figures(profile, None), 1, split=True)
    assert called_ill(machine, ("", "check --strict", "p2p --strict")) == []


def can_measure(machine: Machine, command: str) -> bool:
    """False for what needs a second GPU, or NICs between nodes, where there is none."""
    profile = machine.profile
    if profile.match.visible == 1:
        return machine.nodes == 1 and command in ("", "check --strict", "p2p --strict")
    if machine.nodes > 1 and command.startswith("p2p"):
        return not machine.split  # it measures one node, and takes settings of no other
    return machine.nodes == 1 or bool(profile.nic)


@settings(max_examples=examples(36))
@given(planted())
def test_a_fault_is_named_and_no_other_part(fault: Planted) -> None:
    with known(fault.machine):
        arguments = ["check", "--quick", "--strict", "--simulate", fault.machine.text, "--fault", fault.text]
        result = CliRunner().invoke(app, [*arguments, "--format", "json"], catch_exceptions=False)
    report = json.loads(result.stdout)
    grave = [each for each in report["findings"] if each["severity"] in GRAVE]
    assert grave, report["sentence"]
    assert result.exit_code in (JUDGED_AND_FAILED, COULD_NOT_MEASURE)
    assert [subject for each in grave for subject in other_parts(fault, each)] == []


def other_parts(fault: Planted, finding: Mapping[str, Any]) -> list[str]:
    """The subjects of a finding that are another node than that of the fault, or another device on it."""
    nics = {nic.name for nic in fault.machine.profile.nic}
    found = []
    for subject in finding["subjects"] or [finding["subject"]]:
        words = subject.replace("→", " ").replace(",", " ").split()
        hosts = {word for word in words if word.startswith("node")}
        devices = {word for word in words if word.startswith("GPU") or word in nics}
        elsewhere = f"node{fault.node}" not in hosts if hosts else fault.machine.nodes > 1
        if elsewhere or (devices and fault.name not in devices):
            found.append(subject)
    return found
