"""Logs that end before the first connection."""

import pytest

from gpubench.model.terms.verdict import Verdict
from tests.fakes.nccl_logs import Job
from tests.measure.explain.test_report import ids, report_of

JOB = Job()
REFUSED = "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"
NONE_FOUND = "NET/IB : No device found."


@pytest.mark.parametrize(
    ("id_", "lines"),
    [
        ("gpudirect-refused", [REFUSED]),
        ("gpudirect-too-far", ["GPU Direct RDMA Disabled for GPU ca000 / HCA 0 (distance 7 > 4)"]),
        ("gpudirect-too-far", ["NET/IB : GPU Direct RDMA Disabled for GPU 0[0] / HCA 0 (distance 4 >= 2)"]),
        ("sockets-despite-rdma", ["NCCL_IB_HCA set to mlx5_0:1,mlx5_1:1", NONE_FOUND]),
        ("sockets-despite-rdma", ["NET/IB : Unable to open device mlx5_bond_0", NONE_FOUND]),
    ],
)
def test_a_network_that_cannot_be_used_is_told_without_a_connection(id_: str, lines: list[str]) -> None:
    report = report_of("".join(f"{JOB.head(0)}{line}\n" for line in lines))
    assert (report.verdict, ids(report)) == (Verdict.ERROR, [id_, "no-connections"])
    assert report.findings[0].severity is Verdict.WARN
    assert all((report.findings[0].subject, report.findings[0].cause, report.findings[0].next_command))


@pytest.mark.parametrize(
    "lines",
    [
        [NONE_FOUND, "Using network Socket"],
        [
            "GPU Direct RDMA Disabled for GPU ca000 / HCA 0 (distance 7 > 4)",
            "GPU Direct RDMA Enabled for GPU ca000 / HCA 1 (distance 3 <= 4), read 0",
        ],
        ["NET/IB : Using [0]mlx5_0:1/RoCE ; OOB eth0:10.0.0.1<0>", "NET/IB : Unable to open device mlx5_9"],
    ],
)
def test_a_network_that_may_be_as_it_is_meant_is_not(lines: list[str]) -> None:
    assert ids(report_of("".join(f"{JOB.head(0)}{line}\n" for line in lines))) == ["no-connections"]


@pytest.mark.parametrize(("per_node", "told"), [(4, False), (2, True)])
def test_it_is_a_failure_between_nodes_and_nothing_on_one(per_node: int, told: bool) -> None:
    report = report_of(*Job(per_node=per_node, via=lambda *_: None, notes=[REFUSED]).logs())
    assert ("gpudirect-refused" in ids(report), report.verdict is Verdict.FAIL) == (told, told)
