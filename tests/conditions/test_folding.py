"""Consequences are folded under their root causes."""

import pytest
from msgspec.structs import replace

from gpubench.conditions.folding import folded
from gpubench.model.terms.verdict import NO_CURE, Finding, Verdict

FAIL, WARN = Verdict.FAIL, Verdict.WARN


def finding(id_: str, severity: Verdict, *subjects: str) -> Finding:
    return Finding(id_, severity, ", ".join(subjects), f"{id_} seen", "", "", NO_CURE, subjects)


NO_P2P = finding("nccl-p2p-disabled", FAIL, "GPU0 → GPU1", "GPU1 → GPU0")
BUSY = finding("gpu-in-use", WARN, "GPU2 (0000:08:00.0)")
RANKS = finding("host-staged", FAIL, "0 → 1", "1 → 0")
COPIES = finding("host-staged", FAIL, "GPU0 → GPU1")
SLOW = finding("slow-unexplained", FAIL, "vm")
LATE = finding("straggler", WARN, "rank 2 on vm (GPU 2, 0000:08:00.0)")
PAIR = finding("p2p-slow", FAIL, "GPU2 → GPU3")
OTHER_PAIR = finding("p2p-slow", FAIL, "GPU0 → GPU1")
HOST_COPIES = finding("host-copies-slow", WARN, "GPU2 (0000:08:00.0)")
LANES = finding("pcie-width", FAIL, "GPU2 (0000:08:00.0)")
WRONG = finding("wrong-data", FAIL, "GPU2 → GPU3")
DEFERRED = finding("row-remap-pending", WARN, "GPU2 (0000:08:00.0)")
NO_FABRIC = finding("fabric-not-ready", FAIL, "GPU0 (0000:06:00.0)", "GPU1 (0000:07:00.0)")
REFUSED = finding("peer-access-refused", FAIL, "all 2 GPU pairs")


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ([NO_P2P, RANKS, SLOW, LATE], [NO_P2P]),
        ([NO_P2P, COPIES, PAIR], [NO_P2P, COPIES, PAIR]),
        ([RANKS, SLOW, LATE], [RANKS]),
        ([BUSY, PAIR, SLOW, LATE], [BUSY]),
        ([BUSY, OTHER_PAIR], [BUSY, OTHER_PAIR]),
        ([BUSY, WRONG], [BUSY, WRONG]),
        ([DEFERRED, PAIR], [DEFERRED, PAIR]),
        ([LANES, PAIR, HOST_COPIES], [LANES, PAIR]),
        ([NO_FABRIC, REFUSED, COPIES], [NO_FABRIC]),
        ([SLOW, LATE], [SLOW, LATE]),
    ],
)
def test_a_root_cause_stands_alone(given: list[Finding], left: list[Finding]) -> None:
    found = folded(given, ["vm"], nvlinked=True)
    assert [each.id for each in found] == [each.id for each in left]
    told = " ".join(line for each in found for line in each.consequences)
    assert all(f"{each.subject}: {each.seen}" in told for each in given if each not in left)
    assert f"{SLOW.id}:" not in told, "it is explained by now"


def test_what_is_slow_is_said_once() -> None:
    staged = replace(RANKS, consequences=("allreduce: 27 GB/s",))
    assert folded([staged, SLOW], ["vm"], nvlinked=True) == (staged,)


def test_a_root_cause_is_as_grave_as_what_follows_from_it() -> None:
    (found,) = folded([BUSY, PAIR], ["vm"], nvlinked=True)
    assert found.severity is FAIL


def test_a_node_explains_nothing_of_another() -> None:
    busy = finding("gpu-in-use", WARN, "node0 GPU2 (0000:08:00.0)")
    pair = finding("p2p-slow", FAIL, "node1 GPU2 → GPU3")
    assert len(folded([busy, pair], ["node0", "node1"], nvlinked=True)) == 2
    whole = finding("slow-unexplained", FAIL, "node0", "node1")
    assert len(folded([busy, whole], ["node0", "node1"], nvlinked=True)) == 1


def test_lanes_explain_copies_between_gpus_without_nvlinks() -> None:
    assert [each.id for each in folded([LANES, PAIR, HOST_COPIES], ["vm"], nvlinked=False)] == ["pcie-width"]
