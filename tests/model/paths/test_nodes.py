from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.model.facts.snapshot import DriverFacts, GpuFacts, PairFacts, PcieLink, ProbeFailure, Snapshot
from gpubench.model.paths.nodes import (
    Difference,
    MachineKind,
    condense,
    differences,
    group,
    node_traits,
    topologies,
    with_own_names,
)
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.fault import parse_fault
from gpubench.simulated.machine import parse_machine, snapshots

HEALTHY = snapshots(parse_machine("hgx-h100-8"))[0]


def kinds_of(nodes: Sequence[Snapshot]) -> tuple[MachineKind, ...]:
    return group([Topology(each) for each in nodes])


def cluster(machine: str, *faults: str) -> tuple[MachineKind, ...]:
    return kinds_of(snapshots(parse_machine(machine), [parse_fault(fault) for fault in faults]))


def words(kind: MachineKind) -> dict[int, list[str]]:
    return {position: condense(found) for position, found in kind.odd.items()}


def driven_by(version: str) -> Snapshot:
    return replace(HEALTHY, driver=DriverFacts(version=version))


def with_gpu(index: int, **facts: Any) -> Snapshot:
    gpus = [replace(gpu, **facts) if gpu.index == index else gpu for gpu in HEALTHY.gpus]
    return replace(HEALTHY, gpus=tuple(gpus))


def test_nodes_that_share_a_host_are_told_apart() -> None:
    named = with_own_names([HEALTHY, replace(HEALTHY, host="b"), HEALTHY, HEALTHY])
    assert [each.host for each in named] == [HEALTHY.host, "b", f"{HEALTHY.host}~2", f"{HEALTHY.host}~3"]


def test_many_alike_are_one_kind() -> None:
    kinds = kinds_of([HEALTHY] * 50)
    assert [(kind.name, len(kind.alike), kind.odd) for kind in kinds] == [("A", 50, {})]
    assert kinds[0].representative == 0


def test_one_odd_node_stands_out() -> None:
    (kind,) = cluster("hgx-h100-8*16", "node3.gpu5:nvlink=12")
    assert kind.alike == (*range(3), *range(4, 16))
    assert words(kind) == {3: ["GPU5 NVLinks active 12 (others 18)"]}


def test_what_differs_between_equal_nodes_is_no_difference() -> None:
    busy = replace(
        with_gpu(2, uuid="GPU-x", memory_used_bytes=5, throttle_reasons=("hw_slowdown",), idle=False, cuda_index=7),
        host="other",
        taken_at="2026-01-01",
    )
    slow = with_gpu(2, pcie=replace(HEALTHY.gpus[2].pcie, generation=1), bus_id="0000:ff:00.0")
    (kind,) = kinds_of([HEALTHY, busy, slow])
    assert kind.alike == (0, 1, 2)


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


def test_a_quarter_is_a_kind_and_less_is_odd() -> None:
    quarter = kinds_of([driven_by("1")] * 6 + [driven_by("2")] * 2)
    assert [kind.alike for kind in quarter] == [tuple(range(6)), (6, 7)]
    less = kinds_of([driven_by("1")] * 7 + [driven_by("2")] * 2)
    assert [(kind.alike, tuple(kind.odd)) for kind in less] == [(tuple(range(7)), (7, 8))]


def test_an_odd_node_belongs_to_the_kind_it_is_nearest_to() -> None:
    other = replace(driven_by("2"), nvswitches=())
    odd = replace(other, driver=DriverFacts(version="2", cuda="9"))
    kinds = kinds_of([driven_by("1")] * 4 + [other] * 4 + [odd])
    assert [tuple(kind.odd) for kind in kinds] == [(8,), ()]
    assert kinds[0].alike == (4, 5, 6, 7)
    assert words(kinds[0]) == {8: ["CUDA 9 (others unknown)"]}


def test_a_node_with_a_gpu_less_is_of_the_kind() -> None:
    (kind,) = cluster("hgx-h100-8*3", "node1.gpu7:missing=yes")
    assert kind.alike == (0, 2)
    assert words(kind) == {1: ["GPUs 7 (others 8)"]}


def test_a_node_with_a_lost_gpu_is_of_the_kind() -> None:
    (kind,) = cluster("hgx-h100-8*3", "node1.gpu7:lost=yes")
    assert kind.alike == (0, 2)
    assert "GPU7 state lost (others present)" in words(kind)[1]


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


def test_other_models_are_a_kind_from_a_quarter_of_the_nodes_on() -> None:
    other = models("NVIDIA H200")
    assert [len(kind.alike) for kind in kinds_of([HEALTHY] * 6 + [other] * 2)] == [6, 2]
    (kind,) = kinds_of([HEALTHY] * 7 + [other] * 2)
    assert sorted(kind.odd) == [7, 8]
    assert [kind.alike for kind in kinds_of([HEALTHY, other])] == [(0,), (1,)]
    assert [kind.differs_from for kind in kinds_of([HEALTHY] * 6 + [other] * 2)] == [None, None]


def test_a_second_kind_says_how_it_differs_from_the_first_of_its_models() -> None:
    first, second = kinds_of([driven_by(version) for version in ("1", "2", "1", "2")])
    assert (first.differs_from, first.differs) == (None, ())
    assert (second.differs_from, condense(second.differs)) == ("A", ["driver 2 (others 1)"])


def test_of_two_nodes_that_differ_the_one_with_less_is_odd() -> None:
    for versions, odd in ((("1", "2"), 0), (("2", "1"), 1)):
        (kind,) = kinds_of([driven_by(version) for version in versions])
        assert words(kind) == {odd: ["driver 1 (others 2)"]}


def test_of_two_nodes_of_which_neither_has_less_the_first_is_the_norm() -> None:
    cpus = [replace(HEALTHY, machine=replace(HEALTHY.machine, cpu=name)) for name in ("b", "a")]
    (kind,) = kinds_of(cpus)
    assert words(kind) == {1: ["CPU a (others b)"]}
    assert kind.rivals == (1,)
    (kind,) = kinds_of([*cpus, cpus[0]])
    assert kind.rivals == ()


def test_wiring_alone_is_told_when_nothing_explains_it() -> None:
    other = replace(HEALTHY, pairs=(PairFacts(source="GPU0", destination="GPU1", path="SYS"),))
    (kind,) = kinds_of([replace(HEALTHY, pairs=()), other])
    assert words(kind) == {
        1: ["paths differ (others as in the matrix)", "peer access differ (others as in the matrix)"]
    }


def test_devices_of_other_names_are_told_when_nothing_else_is() -> None:
    nics = tuple(replace(nic, name=nic.name.replace("mlx5_", "ibp")) for nic in HEALTHY.nics)
    (kind,) = kinds_of([HEALTHY, HEALTHY, replace(HEALTHY, nics=nics)])
    (said,) = words(kind)[2]
    assert said.startswith("devices GPU0-7, ibp0-")
    assert "(others GPU0-7, mlx5_0-" in said


def test_a_silent_source_makes_a_node_odd() -> None:
    (kind,) = cluster("hgx-h100-8*3", "node2:silent=cuda")
    assert "silent cuda (others unknown)" in words(kind)[2]


def test_words_of_several_devices_are_joined() -> None:
    found = [Difference(f"GPU{number} ECC", False, True) for number in (0, 1, 4)]
    found += [Difference("kernel", "5.1", "5.2"), Difference("GPU0 PCIe at most", None, "5 x16")]
    found += [Difference("NUMA nodes", 1, 2), Difference("ibwork state", "down", "active")]
    assert condense(found) == [
        "GPU0, GPU1, GPU4 ECC off (others on)",
        "kernel 5.1 (others 5.2)",
        "GPU0 PCIe at most unknown (others 5 x16)",
        "NUMA nodes 1 (others 2)",
        "ibwork state down (others active)",
    ]
    assert condense([]) == []


def test_a_difference_reads_as_a_phrase() -> None:
    assert str(Difference("GPU0 ECC", False, True)) == "GPU0 ECC off (others on)"
    assert str(Difference("driver", None, "535")) == "driver unknown (others 535)"


def test_links_of_a_gpu_count() -> None:
    traits = node_traits(Topology(with_gpu(0, nvlinks=None, pcie=PcieLink())))
    assert traits["GPU0 NVLinks"] is None
    assert traits["GPU0 NVLinks active"] is None
    assert traits["GPU1 NVLinks active"] == 18
    assert {each.trait for each in differences(traits, node_traits(Topology(HEALTHY)))} == {
        *("GPU0 NVLinks active", "GPU0 NVLinks", "GPU0 PCIe width", "GPU0 PCIe at most"),
    }


def test_a_node_is_like_the_one_before_it_with_the_same_facts() -> None:
    renamed = replace(with_gpu(0, uuid="GPU-other"), host="other", machine=replace(HEALTHY.machine, boot_id="other"))
    hot, grown = with_gpu(1, temperature_c=90), replace(HEALTHY, errors_grown={"GPU1": {"replays": 1}})
    kernel = replace(HEALTHY, machine=replace(HEALTHY.machine, kernel="9.9"))
    nodes = topologies([HEALTHY, renamed, hot, hot, grown, kernel, HEALTHY])
    assert [nodes.index(node.like) for node in nodes] == [0, 0, 2, 2, 4, 5, 6]
    assert nodes[1].matrix is nodes[0].matrix
    assert [node.fingerprint() for node in nodes] == [Topology(node.snapshot).fingerprint() for node in nodes]


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
    assert all(condense(found) for kind in kinds for found in kind.odd.values())
    sizes = [len(kind.alike) + len(kind.odd) for kind in kinds]
    assert sizes == sorted(sizes, reverse=True)
    assert kinds_of(nodes) == kinds


def test_kinds_have_letters() -> None:
    named = [replace(HEALTHY, gpus=(GpuFacts(index=0, name=str(number)),), nics=(), pairs=()) for number in range(78)]
    assert [kind.name for kind in kinds_of(named)] == [
        *"ABCDEFGHIJKLMNOPQRSTUVWXYZ",
        *(f"A{letter}" for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
        *(f"B{letter}" for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    ]
