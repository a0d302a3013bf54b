"""`--expect-gpus` of every command that has it, on simulated machines and on one without GPUs."""

import json

import pytest
from msgspec.structs import replace

from gpubench.conditions.checks import presence_findings
from gpubench.conditions.circumstances import Facts
from gpubench.errors import CouldNotMeasureError
from gpubench.jobs.collective.job import choose_ranks
from gpubench.jobs.collective.opened import count_gpus_by_host
from gpubench.machine.nvml import Driver
from gpubench.model.facts.snapshot import GpuFacts, Snapshot
from gpubench.model.paths.topology import Topology
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.verdict import Origin
from tests.cli.running import gpubench, without_gpus
from tests.cli.test_commands import options

COMMANDS = (
    ("topo", "--strict"),
    ("p2p", "--strict", "--sizes", "16", "--no-patterns"),
    ("check", "--quick"),
    ("allreduce", "--strict", "--sizes", "1K"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: each[0])
@pytest.mark.parametrize(("expected", "found"), [(4, None), (8, "gpu-missing"), (2, "gpu-model")])
def test_another_number_of_gpus_fails_with_the_node_and_the_count(
    command: tuple[str, ...], expected: int, found: str | None
) -> None:
    simulated = ("--simulate", "hgx-h200-4", "--expect-gpus", str(expected), "--format", "json")
    result = gpubench(*command, *simulated)
    document = json.loads(result.stdout)
    findings = [each for each in document["findings"] if each["id"] in ("gpu-missing", "gpu-model")]
    assert result.returncode == (0 if found is None else 1)
    assert [each["id"] for each in findings] == ([] if found is None else [found])
    for each in findings:
        assert (each["severity"], each["subject"]) == ("FAIL", "node0")
        assert each["seen"] == f"4 GPUs, {expected} expected"
        assert each["expected"] == f"{expected} GPUs, as --expect-gpus requires"


@without_gpus
@pytest.mark.parametrize("command", ["topo", "p2p", "check", "allreduce"])
def test_where_there_is_none_at_all_nothing_is_measured(command: str) -> None:
    result = gpubench(command, "--expect-gpus", "4")
    assert result.returncode == 3
    assert "no usable GPU" in result.stderr
    assert not result.stdout


def test_a_profile_that_was_asked_for_has_a_number_too() -> None:
    for command in (("topo",), ("p2p", "--sizes", "16", "--no-patterns")):
        arguments = ("--simulate", "hgx-h200-4", "--profile", "hgx-h200-8", "--strict", "--format", "json")
        result = gpubench(*command, *arguments)
        findings = {each["id"]: each for each in json.loads(result.stdout)["findings"]}
        assert findings["gpu-missing"]["expected"] == "8 GPUs, as in profile hgx-h200-8"
        assert result.returncode == 1


def test_chosen_gpus_are_no_reason_to_power_cycle_the_node() -> None:
    machine = ("--simulate", "hgx-h100-8", "--gpus", "0,3")
    chosen = gpubench("check", "--quick", *machine, "--profile", "hgx-h100-8", "--format", "json")
    assert (chosen.returncode, json.loads(chosen.stdout)["findings"]) == (0, [])
    both = gpubench("check", *machine, "--expect-gpus", "8")
    assert both.returncode == 2
    assert "--expect-gpus counts all GPUs of a node" in both.stderr
    hidden = Snapshot(host="n0", origin=Origin.MEASURED, source="", gpus=(GpuFacts(index=0),), gpus_of_others=7)
    (finding,) = presence_findings(Facts([Topology(hidden)], expected_gpus=8))
    assert (finding.seen, finding.commands) == ("1 GPU, 8 expected", ("echo $CUDA_VISIBLE_DEVICES",))
    (finding,) = presence_findings(Facts([Topology(replace(hidden, gpus_of_others=0))], expected_gpus=8))
    assert finding.commands == ("lspci -d 10de: | grep -c 3D",)


def test_ranks_that_are_shown_one_gpu_each_have_all_of_them() -> None:
    ranks = [
        RankIdentity(rank=number, host=host, node=0, local_rank=0, pid=1, gpu_uuid=uuid)
        for number, (host, uuid) in enumerate([("n0", "a"), ("n0", "b"), ("n1", "c"), ("n1", "d"), ("n2", None)])
    ]
    assert count_gpus_by_host(ranks, [1, 1, 8, 8, 0]) == {"n0": 2, "n1": 8, "n2": 0}


def test_no_cpu_ranks_are_launched_where_gpus_were_expected() -> None:
    with pytest.raises(CouldNotMeasureError, match="--expect-gpus 4, but there is no GPU"):
        choose_ranks(options(expected_gpus=4), Driver(absent="no driver"))
    assert choose_ranks(options(), Driver(absent="no driver")) == 2
