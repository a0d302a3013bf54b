"""Transfers through host memory between the GPUs of two processes, at rates below those of other alarms."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.model.facts.traffic import NodeRates, TaskFacts
from gpubench.model.results.report import Report
from gpubench.model.terms.verdict import Verdict
from tests.measure.watch.test_course import rows, watched
from tests.measure.watch.traffic import Ways, facts, gpu, nic, node, task

IDLE = 0.02


def server(pid: int, *together: str, ucx: bool = True, **environment: str) -> TaskFacts:
    known = replace(facts(pid, **environment), libraries={"libucp": "/opt/nixl/libucp.so.0"} if ucx else {})
    return task(pid, *together, communicators=False, facts=known)


def sends(rate: float, nvlink: float = 0.0) -> Ways:
    return nvlink, nvlink, rate, IDLE


def receives(rate: float, nvlink: float = 0.0) -> Ways:
    return nvlink, nvlink, IDLE, rate


def servers(*ways: Ways, loopback: float = 0.0, ucx: bool = True, nics: Sequence[Any] = ()) -> NodeRates:
    """Return one interval of unrelated servers with one GPU each."""
    gpus = [gpu(number, way, 100 + number) for number, way in enumerate(ways)]
    tasks = [server(100 + number, ucx=ucx) for number in range(len(ways))]
    return node(gpus, tasks, nic("lo", loopback, rdma=False), *nics)


def transfer(rate: float = 0.39, loopback: float | None = None, *, ucx: bool = True) -> NodeRates:
    return servers(sends(rate), receives(rate), loopback=0.92 * rate if loopback is None else loopback, ucx=ucx)


QUIET = servers(sends(IDLE), receives(IDLE))
QUIET_WITHOUT_UCX = servers(sends(IDLE), receives(IDLE), ucx=False)
IN_GROUPS = servers(*[sends(0.4, nvlink=30.0)] * 2, *[receives(0.4, nvlink=20.0)] * 2, loopback=0.74)


def found(report: Report) -> list[tuple[str, Verdict, str]]:
    return [(finding.id, finding.severity, finding.subject.partition(" on ")[0]) for finding in report.findings]


@pytest.mark.parametrize(
    ("intervals", "ends"),
    [
        ([transfer()] * 3, "GPU0 → GPU1"),
        ([transfer(0.06)] * 3, "GPU0 → GPU1"),
        ([transfer(5.0)] * 3, "GPU0 → GPU1"),
        # A request every few seconds
        ([transfer(0.1), *[QUIET] * 4] * 3, "GPU0 → GPU1"),
        # An interval ends within a transfer
        ([transfer(), transfer(), servers(sends(0.2), receives(0.02)), transfer()], "GPU0 → GPU1"),
        # Servers with two GPUs each, which use their NVLinks inside a server
        ([IN_GROUPS] * 3, "GPU0, GPU1 → GPU2, GPU3"),
    ],
)
def test_a_transfer_over_the_loopback_fails_at_any_rate(intervals: Sequence[NodeRates], ends: str) -> None:
    report = watched(intervals)
    assert found(report) == [("host-staged", Verdict.FAIL, ends)]
    (finding,) = report.findings
    assert "through TCP on the loopback interface" in finding.seen
    assert finding.expected == f"traffic {ends} over NVLink"
    assert finding.next_command == "gpubench kv"
    assert "process 100 (python)" in finding.subject
    assert {row.way for row in rows(report)} >= {"sockets", "idle"} or len(intervals) == 3


@pytest.mark.parametrize(
    ("environment", "namespaces", "cause"),
    [
        ({}, (1, 1), "kv-staged-unexplained"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, (1, 1), "kv-memory-expandable"),
        ({"UCX_TLS": "^cuda_ipc"}, (1, 1), "ucx-tls"),
        ({}, (1, 2), "kv-pid-namespaces"),
    ],
)
def test_the_cause_of_a_transfer_is_in_its_processes(environment: Any, namespaces: Any, cause: str) -> None:
    rates = transfer()
    tasks = [server(each.pid, **environment) for each in rates.tasks]
    known = [replace(each.facts, namespaces={"pid": number}) for each, number in zip(tasks, namespaces, strict=True)]
    tasks = [replace(each, facts=of_task) for each, of_task in zip(tasks, known, strict=True)]
    report = watched([replace(rates, tasks=tuple(tasks))] * 3)
    row = next(row for row in rows(report) if row.way == "sockets")
    assert (row.cause, row.verdict) == (cause, Verdict.FAIL)
    assert report.findings[0].cause == row.cause_seen
