"""NCCL variables of simulated jobs: what each changes, by how much, and that nothing else changes."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from gpubench.errors import UsageError
from gpubench.jobs.sources import Simulated, parse_simulation
from gpubench.measure.topo import examine
from gpubench.model.terms.operation import Engine
from gpubench.model.terms.units import BYTES_PER_GB
from gpubench.ports.backend import Region
from gpubench.ports.copies import CopyStream
from gpubench.simulated.links import SimulatedCopies
from gpubench.simulated.times import CollectiveTimes

_SMALL, _LARGE = 2**10, 256 * 2**20
_RESULTS = Path(__file__).parents[1] / "results"


class Effect(NamedTuple):
    """A variable of the whole job, or of one node; then the staged pairs by node, and times of 1 KiB and 256 MiB.

    The times are multiples of those without the variable.
    """

    machine: str
    variable: str
    staged: Mapping[int, int] = MappingProxyType({})
    small: float = 1.0
    large: float = 1.0
    on: str = ""


EFFECTS = [
    Effect("hgx-h200-2", "NCCL_P2P_DISABLE=1", {0: 2}, 3.2, 10.5),
    Effect("hgx-h100-8", "NCCL_P2P_DISABLE=1", {0: 56}, 2.0, 33.0),
    Effect("hgx-h100-8", "NCCL_P2P_DISABLE=0"),
    Effect("hgx-h100-8", "NCCL_P2P_LEVEL=LOC", {0: 56}, 2.0, 33.0),
    Effect("hgx-h100-8", "NCCL_P2P_LEVEL=0", {0: 56}, 2.0, 33.0),
    Effect("hgx-h100-8", "NCCL_P2P_LEVEL=NVL"),
    Effect("hgx-h100-8", "NCCL_P2P_LEVEL=SYS"),
    Effect("h100-nvl-2", "NCCL_P2P_DISABLE=1", {0: 2}, 2.2, 7.5),
    Effect("dgx-1-v100", "NCCL_P2P_DISABLE=1", {0: 32}, 1.65, 16.0),  # Its other pairs are SYS
    Effect("l40s-8", "NCCL_P2P_DISABLE=1"),  # PHB and SYS: NCCL uses host memory anyway
    Effect("rtx-4090-2", "NCCL_P2P_LEVEL=PXB"),
    Effect("hgx-h100-8*2", "NCCL_P2P_DISABLE=1", {0: 56, 1: 56}, 1.0, 25.0),
    Effect("hgx-h100-8*2", "NCCL_P2P_DISABLE=1", {1: 56}, 1.0, 25.0, on="node1:env="),
    Effect("hgx-h100-8*2", "NCCL_P2P_LEVEL=LOC", {0: 56}, 1.0, 25.0, on="node0:env="),
    Effect("gb200-nvl72/8", "NCCL_P2P_DISABLE=1", {0: 12, 1: 12}, 2.4, 28.0),
    Effect("hgx-h200-4", "NCCL_MAX_NCHANNELS=4", large=3.5),
    Effect("hgx-h200-4", "NCCL_MAX_CTAS=8", large=2.05),
    Effect("hgx-h200-4", "NCCL_MIN_NCHANNELS=4"),
    Effect("hgx-b200-8", "NCCL_NVLS_ENABLE=0", small=1.0, large=1.1),
    Effect("hgx-h200-4", "NCCL_NVLS_ENABLE=0"),
    Effect("hgx-h200-4", "NCCL_ALGO=Ring"),
    Effect("hgx-h200-4", "NCCL_PROTO=LL", large=2.27),
    Effect("hgx-h100-8", "NCCL_ALGO=^nvls", large=1.055),
]


def times_with(effect: Effect) -> tuple[CollectiveTimes, CollectiveTimes]:
    """The times with the variable, and without."""
    name, _, value = effect.variable.partition("=")
    job = {} if effect.on else {name: value}
    faults = [effect.on + effect.variable] if effect.on else []
    found = parse_simulation(effect.machine, faults, 0, job)
    assert not found.ignored
    return CollectiveTimes(found.machine, found.faults, noise=0.0), CollectiveTimes(found.machine, noise=0.0)


@pytest.mark.parametrize("effect", EFFECTS, ids=lambda each: f"{each.machine} {each.on}{each.variable}")
def test_a_variable_stages_its_pairs_and_slows_rows_by_a_known_factor(effect: Effect) -> None:
    changed, healthy = times_with(effect)
    per_node = healthy.gpus
    by_node: dict[int, int] = {}
    for source, destination in changed.staged_pairs(per_node):
        assert source // per_node == destination // per_node
        by_node[source // per_node] = by_node.get(source // per_node, 0) + 1
    assert by_node == effect.staged
    for size, factor in ((_SMALL, effect.small), (_LARGE, effect.large)):
        taken = changed.seconds("allreduce", size, row=0)[0] / healthy.seconds("allreduce", size, row=0)[0]
        assert taken == pytest.approx(factor, rel=0.15 if factor != 1 else 0.01), (size, taken)


@pytest.mark.parametrize("machine", ["hgx-h100-8", "l40s-8", "hgx-h200-2"])
def test_copies_of_cuda_are_as_fast_under_any_variable_of_nccl(machine: str) -> None:
    found = []
    for job in ({}, {"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "LOC"}):
        made = parse_simulation(machine, (), 0, job)
        copies = SimulatedCopies(made.machine, made.faults, 0, noise=0.0)
        copies.enable(0, 1)
        ends = [Region(copies.allocate(gpu, _LARGE), 0) for gpu in (0, 1)]
        found.append(copies.seconds([CopyStream(0, Engine.CE, ends[0], ends[1], _LARGE)], 1))
        assert Simulated(made).machines().snapshots == Simulated(parse_simulation(machine, (), 0)).machines().snapshots
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("machine", "job", "ignored"),
    [
        ("hgx-h100-8", {"NCCL_BUFFSIZE": "4", "NCCL_P2P_DISABLE": "1"}, "NCCL_BUFFSIZE=4"),
        ("hgx-h100-8", {"NCCL_DEBUG": "INFO", "NCCL_VERSION": "2.28.9", "UCX_TLS": "tcp"}, ""),
        ("hgx-h100-8", {"NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}, "NCCL_SHM_DISABLE=1 NCCL_IB_DISABLE=1"),
        ("l40s-8", {"NCCL_P2P_LEVEL": "SYS"}, "NCCL_P2P_LEVEL=SYS"),  # May be faster or slower than host memory
        ("l40s-8", {"NCCL_MAX_NCHANNELS": "1"}, "NCCL_MAX_NCHANNELS=1"),
        ("hgx-a100-8", {"NCCL_MAX_CTAS": "2"}, "NCCL_MAX_CTAS=2"),
    ],
)
def test_variables_without_a_known_effect_are_named_and_change_nothing(
    machine: str, job: dict[str, str], ignored: str
) -> None:
    found = parse_simulation(machine, (), 0, job)
    assert found.note == (f"ignored in simulation: {ignored}" if ignored else "")
    assert set(found.environment) == set(job) & {"NCCL_P2P_DISABLE"}


@pytest.mark.parametrize(
    "fault",
    ["node0:env=NCCL_BUFFSIZE=4", "node0:env=UCX_TLS=tcp", "node0:env=NCCL_P2P_DISABLE", "gpu0:env=NCCL_ALGO=x"],
)
def test_a_fault_with_a_variable_of_unknown_effect_is_refused(fault: str) -> None:
    with pytest.raises(UsageError):
        parse_simulation("hgx-h100-8", [fault], 0)


def recorded(path: str) -> float:
    """busbw of 256 MiB out of place in a stored run with NCCL_P2P_DISABLE=1."""
    document = json.loads((_RESULTS / path).read_text())
    rows = document.get("collectives") or document["rows"]
    return float(next(row["busbw_gb_s"] for row in rows if row["size_bytes"] == _LARGE))


@pytest.mark.parametrize(
    ("machine", "path"),
    [
        ("hgx-h200-2", "h200x2/gpubench-p2p-disabled.json"),
        ("hgx-h200-4", "h200x4/check-p2p-disabled.json"),
        ("hgx-h200-8", "h200x8/allreduce-p2p-disabled.json"),
    ],
)
def test_host_staged_rows_are_near_those_of_real_gpus(machine: str, path: str) -> None:
    made = parse_simulation(machine, (), 0, {"NCCL_P2P_DISABLE": "1"})
    times = CollectiveTimes(made.machine, made.faults, noise=0.0)
    moved = 2 * (times.gpus - 1) / times.gpus * _LARGE
    assert moved / times.seconds("allreduce", _LARGE, row=0)[0] / BYTES_PER_GB == pytest.approx(
        recorded(path), rel=0.15
    )


@pytest.mark.parametrize(("channels", "measured_gb_s"), [("4", 91.4), ("8", 158.9), ("16", 273.7), ("1", 21.0)])
def test_few_channels_are_as_slow_as_on_real_h200s(channels: str, measured_gb_s: float) -> None:
    made = parse_simulation("hgx-h200-4", (), 0, {"NCCL_MAX_CTAS": channels})
    seconds = CollectiveTimes(made.machine, made.faults, noise=0.0).seconds("allreduce", _LARGE, row=0)[0]
    assert 1.5 * _LARGE / seconds / BYTES_PER_GB == pytest.approx(measured_gb_s, rel=0.2)


def test_topo_names_only_the_node_whose_ranks_have_the_variable() -> None:
    """The pairs of the first node were named, whose ranks do not have it."""
    machines = Simulated(parse_simulation("hgx-h100-8*4", ["node3:env=NCCL_P2P_DISABLE=1"], 0)).machines()
    report = examine(machines.nodes, machines.processes, [None] * 4)
    (finding,) = (each for each in report.findings if each.id == "nccl-p2p-disabled")
    assert len(finding.subjects) == 56
    assert all(each.startswith("node3 ") for each in finding.subjects)


@pytest.mark.parametrize("fault", ["node0:env=NCCL_P2P_DISABLE=1", "env=NCCL_MAX_CTAS=8"])
def test_scan_refuses_variables_of_faults_and_names_those_of_the_environment(fault: str) -> None:
    """What they do to a scan is not modelled: it would pass as healthy."""
    with pytest.raises(UsageError, match=r"--fault .*env=NCCL_.* with scan"):
        parse_simulation("hgx-h100-8*4", [fault], 0).drop_variables("scan")
    left = parse_simulation("hgx-h100-8*4", ["gpu0:nvlink=9"], 0, {"NCCL_P2P_DISABLE": "1"}).drop_variables("scan")
    assert left.note == "ignored in simulation: NCCL_P2P_DISABLE=1"
    assert [str(each) for each in left.faults] == ["gpu0:nvlink=9"]


@pytest.mark.parametrize("variable", ["NCCL_NVLS_ENABLE", "NCCL_ALGO"])
def test_rings_alone_do_not_reduce_in_switches(variable: str) -> None:
    """From 1 GiB on eight H100s reduce in NVSwitches; a ring was as fast as they are."""
    value = {"NCCL_NVLS_ENABLE": "0", "NCCL_ALGO": "ring"}[variable]
    made = parse_simulation("hgx-h100-8", (), 0, {variable: value})
    found, own = (CollectiveTimes(made.machine, faults, noise=0.0) for faults in (made.faults, ()))
    large = 4 * 2**30
    assert found.seconds("allreduce", large, row=0)[0] / own.seconds("allreduce", large, row=0)[0] > 1.2
