from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpubench.model.facts.snapshot import DriverFacts, GpuFacts, ProbeFailure, Snapshot
from gpubench.model.paths.nodes import Difference, MachineKind, describe_differences, group_nodes
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.fault import parse_fault
from gpubench.simulated.machine import parse_machine, snapshots

HEALTHY = snapshots(parse_machine("hgx-h100-8"))[0]


def kinds_of(nodes: Sequence[Snapshot]) -> tuple[MachineKind, ...]:
    return group_nodes([Topology(each) for each in nodes])


def cluster(machine: str, *faults: str) -> tuple[MachineKind, ...]:
    return kinds_of(snapshots(parse_machine(machine), [parse_fault(fault) for fault in faults]))


def words(kind: MachineKind) -> dict[int, list[str]]:
    return {position: describe_differences(found) for position, found in kind.odd.items()}


def driven_by(version: str) -> Snapshot:
    return replace(HEALTHY, driver=DriverFacts(version=version))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("node1.gpu3:ecc=off", ["GPU3 ECC off (others on)"]),
        ("node1.gpu3:width=8", ["GPU3 PCIe width 8 (others 16)"]),
        ("node1.gpu3:fabric=in_progress", ["GPU3 fabric in_progress (others completed)"]),
        ("node1.nic3:rate=200", ["mlx5_3 rate 200.0 (others 400.0)"]),
        ("node1.nic3:state=down", ["mlx5_3 state down (others active)"]),
        ("node1:driver=1.2", None),
        ("node1:peermem=no", ["nvidia-peermem off (others on)"]),
        ("node1.gpu3:p2p=NS", ["peer access differ (others as in the matrix)"]),
    ],
)
def test_a_difference_is_said_in_words(fault: str, said: list[str] | None) -> None:
    (kind,) = cluster("hgx-h100-8*4", fault)
    found = words(kind)
    assert list(found) == [1]
    assert found[1] == (said or [f"driver 1.2 (others {HEALTHY.driver.version})"])


def test_two_variants_half_and_half_are_two_kinds() -> None:
    kinds = kinds_of([driven_by(version) for version in ("1", "2", "1", "2")])
    assert [(kind.name, kind.alike, kind.odd) for kind in kinds] == [("A", (0, 2), {}), ("B", (1, 3), {})]


def models(name: str | None, count: int = 8) -> Snapshot:
    gpus = tuple(replace(gpu, name=name) for gpu in HEALTHY.gpus[:count])
    return replace(HEALTHY, gpus=gpus, pairs=())


@pytest.mark.parametrize(
    ("stray", "seen"),
    [
        (models("NVIDIA H200"), "NVIDIA H200"),
        (models(None, 0), "none"),
        (replace(models(None, 0), failures=(ProbeFailure(stage="nvml", error="broke"),)), "none"),
    ],
)
def test_a_node_with_other_gpus_among_many_is_odd(stray: Snapshot, seen: str) -> None:
    (kind,) = kinds_of([stray, *[HEALTHY] * 9])
    assert kind.alike == tuple(range(1, 10))
    silent = ["silent nvml (others unknown)"] if stray.failures else []
    assert words(kind) == {0: [f"GPU models {seen} (others NVIDIA H100 80GB HBM3)", *silent]}


def test_devices_of_other_names_are_told_when_nothing_else_is() -> None:
    nics = tuple(replace(nic, name=nic.name.replace("mlx5_", "ibp")) for nic in HEALTHY.nics)
    (kind,) = kinds_of([HEALTHY, HEALTHY, replace(HEALTHY, nics=nics)])
    (said,) = words(kind)[2]
    assert said.startswith("devices GPU0-7, ibp0-")
    assert "(others GPU0-7, mlx5_0-" in said


def test_a_difference_reads_as_a_phrase() -> None:
    assert str(Difference("GPU0 ECC", False, True)) == "GPU0 ECC off (others on)"
    assert str(Difference("driver", None, "535")) == "driver unknown (others 535)"


VERSIONS = st.sampled_from(["535", "550", "560", None])
MODELS = st.lists(st.sampled_from(["H100", "H200", None]), max_size=3)


@given(st.lists(st.tuples(VERSIONS, MODELS, st.booleans()), min_size=1, max_size=40))
def test_every_node_is_in_one_place(drawn: list[tuple[str | None, list[str | None], bool]]) -> None:
    nodes = [
        replace(
            driven_by(version or ""),
            nics=(),
            pairs=(),
            gpus=tuple(GpuFacts(index=index, name=model, mig=mig) for index, model in enumerate(models)),
        )
        for version, models, mig in drawn
    ]
    kinds = kinds_of(nodes)
    positions = [position for kind in kinds for position in (*kind.alike, *kind.odd)]
    assert sorted(positions) == list(range(len(nodes)))
    assert all(kind.alike for kind in kinds)
    assert all(describe_differences(found) for kind in kinds for found in kind.odd.values())
    sizes = [len(kind.alike) + len(kind.odd) for kind in kinds]
    assert sizes == sorted(sizes, reverse=True)
    assert kinds_of(nodes) == kinds
