"""The findings that take a node out of service, one line per kind, written by hand."""

import pytest

from gpubench.conditions.policy import SEVERITIES, drains
from gpubench.model.terms.verdict import NO_CURE, Finding, Verdict

FAIL, ERROR, WARN = Verdict.FAIL, Verdict.ERROR, Verdict.WARN

NODE_AT_FAULT = (
    ("driver-silent", ERROR),
    ("driver-missing", ERROR),
    ("cuda-refuses", FAIL),
    ("gpu-lost", FAIL),
    ("gpu-missing", FAIL),
    ("gpu-hw-slowdown", FAIL),
    ("row-remap-failed", FAIL),
    ("row-remap-pending", FAIL),
    ("memory-errors", FAIL),
    ("gpu-xid", FAIL),
    ("pcie-fatal-error", FAIL),
    ("nvlink-down", FAIL),
    ("nvlinks-all-down", FAIL),
    ("nvlink-errors", FAIL),
    ("fabric-manager-stopped", FAIL),
    ("fabric-not-ready", FAIL),
    ("pcie-width", FAIL),
    ("rdma-port-down", FAIL),
    ("nic-absent", FAIL),
    ("p2p-slow", FAIL),
    ("host-staged", FAIL),
    ("slow-unexplained", FAIL),
    ("wrong-data", FAIL),
)
NODE_STAYS = (
    ("gpu-missing", ERROR),  # a node without GPUs among nodes with GPUs
    ("probe-failed", ERROR),
    ("not-measured", ERROR),
    ("not-looked-at", ERROR),
    ("above-limit", ERROR),
    ("hosts-gave-no-result", ERROR),
    ("figures-too-noisy", Verdict.INCONCLUSIVE),
    ("gpu-in-use", WARN),
    ("mig-on", WARN),
    ("nvlink-down", WARN),
    ("p2p-slow", WARN),
    ("shm-not-shared", FAIL),
    ("mnnvl-unused", FAIL),
    ("nccl-p2p-disabled", FAIL),
    ("device-file-denied", FAIL),
    ("cuda-out-of-memory", FAIL),
    ("program-failed", FAIL),
    ("collective-stuck", FAIL),
    ("rank-is-gone", FAIL),
    ("nccl-init-unfinished", FAIL),
    ("a-new-finding", FAIL),
)


def found(id_: str, severity: Verdict) -> Finding:
    return Finding(id_, severity, "node0", seen="", expected="", cause="", cure=NO_CURE)


@pytest.mark.parametrize(("id_", "severity"), NODE_AT_FAULT)
def test_a_node_with_a_fault_of_its_own_is_drained(id_: str, severity: Verdict) -> None:
    assert drains(found(id_, severity))


@pytest.mark.parametrize(("id_", "severity"), NODE_STAYS)
def test_a_node_stays_if_the_job_is_at_fault_or_nothing_was_judged(id_: str, severity: Verdict) -> None:
    assert not drains(found(id_, severity))


def test_the_column_of_the_list_says_what_a_gate_does() -> None:
    for id_, grade in SEVERITIES.items():
        assert grade.drains == drains(found(id_, grade.severity)), id_
