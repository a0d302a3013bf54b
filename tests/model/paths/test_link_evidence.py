"""Counters and bandwidth as evidence, with figures as four H200s give them."""

from math import inf

import pytest
from msgspec.structs import replace

from gpubench.model.paths.p2p import Carried, Flow, Speed, flow_evidence, most_share
from gpubench.model.paths.transport import State

OVER_NVLINK = Carried(nvlink_bytes=2**31, nvlink_share=1.5, pcie_bytes=2**15)
OVER_PCIE = Carried(nvlink_bytes=0, nvlink_share=None, pcie_bytes=2**31, pcie_share=1.64)
STOOD_STILL = replace(OVER_PCIE, nvlink_share=0.0)
PARTLY = Carried(nvlink_bytes=2**28, nvlink_share=0.3)
BLIND = Carried()
FAST = Speed(size_bytes=2**30, passed_gb_s=236.0, busbw_gb_s=354.0)
SLOW = Speed(size_bytes=2**30, passed_gb_s=19.0, busbw_gb_s=28.9)
FLOW = Flow(ends=(), speed=None, has_nvlinks=True, limit_gb_s=450.0, staged_gb_s=63.0)
YES, NO, SILENT = State.PRESENT, State.CONTRADICTING, State.ABSENT


@pytest.mark.parametrize(
    ("ends", "speed", "state", "said"),
    [
        ((OVER_NVLINK, OVER_NVLINK), FAST, YES, "NVLink counters show 1.5 times"),
        ((OVER_NVLINK, replace(OVER_NVLINK, nvlink_share=0.4)), None, SILENT, "there are no counters"),
        ((STOOD_STILL, STOOD_STILL), FAST, NO, "show no traffic here"),
        ((OVER_PCIE, OVER_PCIE), SLOW, NO, "PCIe counters show 1.6 times"),
        ((OVER_PCIE,), None, NO, "PCIe counters show"),
        ((OVER_PCIE, replace(OVER_PCIE, nvlink_bytes=None)), SLOW, NO, "28.9 GB/s at 1G"),
        ((PARTLY, PARTLY), FAST, YES, "236 GB/s measured"),
        ((BLIND, BLIND), FAST, YES, "host memory carries at most 63 GB/s"),
        ((), FAST, YES, "236 GB/s measured"),
        ((BLIND,), SLOW, NO, "NVLinks carry 450"),
        ((BLIND,), replace(SLOW, size_bytes=2**20), SILENT, "1M is too small"),
        ((BLIND,), replace(FAST, passed_gb_s=70.0), SILENT, "may be either"),
        ((BLIND,), replace(SLOW, busbw_gb_s=None), SILENT, "this path may have been held up by slower ones"),
        ((BLIND,), None, SILENT, "there are no counters"),
        ((replace(OVER_PCIE, pcie_share=0.3),), None, SILENT, "there are no counters"),
        ((replace(OVER_PCIE, nvlink_bytes=2**30),), None, SILENT, "there are no counters"),
    ],
)
def test_what_figures_say(ends: tuple[Carried, ...], speed: Speed | None, state: State, said: str) -> None:
    evidence = flow_evidence(replace(FLOW, ends=ends, speed=speed))
    assert evidence.state is state
    assert said in evidence.seen


TIMES_16 = replace(OVER_NVLINK, nvlink_share=16.0)


@pytest.mark.parametrize(
    ("ends", "most_shares", "said"),
    [
        (
            (TIMES_16, TIMES_16),
            (6.6, 6.6),
            "counters show 16 times the bytes of this job: another program uses these links",
        ),
        ((OVER_NVLINK, TIMES_16), (6.6, 6.6), "16 times"),
        ((replace(OVER_PCIE, pcie_share=40.0),), (6.6,), "40 times"),
    ],
)
def test_counters_that_moved_by_more_than_was_ours_prove_nothing(
    ends: tuple[Carried, ...], most_shares: tuple[float, ...], said: str
) -> None:
    """However fast it was: what was timed was contended."""
    for speed in (FAST, SLOW, None):
        evidence = flow_evidence(replace(FLOW, ends=ends, most_shares=most_shares, speed=speed))
        assert evidence.state is SILENT
        assert said in evidence.seen


def test_the_pcie_counters_of_somebody_else_take_nothing_from_nvlinks_that_moved() -> None:
    busy = replace(OVER_NVLINK, pcie_share=40.0)
    assert flow_evidence(replace(FLOW, ends=(busy, busy), most_shares=(6.6, 6.6))).state is YES


@pytest.mark.parametrize(("foreign_gb_s", "state"), [(0.02, YES), (40.0, YES), (371.0, SILENT)])
def test_traffic_of_others_as_large_as_ours_may_be_what_was_counted(foreign_gb_s: float, state: State) -> None:
    evidence = flow_evidence(replace(FLOW, ends=(OVER_NVLINK,), most_shares=(6.6,), foreign_gb_s=foreign_gb_s))
    assert evidence.state is state
    assert ("the NVLinks carried 371 GB/s while this job was idle" in evidence.seen) == (state is SILENT)


@pytest.mark.parametrize(("expected", "most"), [(1.0, 6.6), (0.25, 26.4), (0.0, inf)])
def test_an_algorithm_sends_three_times_the_buffer_at_most(expected: float, most: float) -> None:
    """In LL twice the bytes: flags; an all-gather has to send one block alone, and a ring forwards the others."""
    assert most_share(expected) == pytest.approx(most)


def test_gpus_without_nvlinks_are_not_told_apart() -> None:
    evidence = flow_evidence(replace(FLOW, ends=(OVER_PCIE, OVER_PCIE), speed=SLOW, has_nvlinks=False))
    assert evidence.state is SILENT


def test_narrow_nvlinks_are_not_told_by_bandwidth() -> None:
    assert flow_evidence(replace(FLOW, speed=SLOW, limit_gb_s=112.5)).state is SILENT
    assert flow_evidence(replace(FLOW, speed=SLOW, limit_gb_s=None)).state is SILENT


@pytest.mark.parametrize(
    ("flow", "state"),
    [
        (replace(FLOW, ends=(replace(OVER_NVLINK, nvlink_share=0.5),)), YES),
        (replace(FLOW, ends=(replace(OVER_NVLINK, nvlink_share=0.1),)), SILENT),
        (replace(FLOW, ends=(replace(OVER_PCIE, pcie_share=0.5),)), NO),
        (replace(FLOW, ends=(replace(OVER_PCIE, nvlink_bytes=2**31 // 10 + 1),)), SILENT),
        (replace(FLOW, speed=replace(SLOW, passed_gb_s=1.2 * 63.0)), NO),
        (replace(FLOW, speed=replace(SLOW, size_bytes=64 * 2**20)), NO),
        (replace(FLOW, speed=replace(SLOW, busbw_gb_s=63.0)), SILENT),
        (replace(FLOW, speed=SLOW, limit_gb_s=126.0), SILENT),
        (replace(FLOW, speed=SLOW, limit_gb_s=126.1), NO),
    ],
)
def test_at_a_threshold_evidence_is_what_the_words_say(flow: Flow, state: State) -> None:
    """Half moved is moved, a tenth is not still, a fifth above the host is not enough, 64 MiB are judged."""
    assert flow_evidence(flow).state is state
