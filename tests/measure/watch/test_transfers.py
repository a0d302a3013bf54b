"""Transfers through host memory between the GPUs of two processes, at rates below those of other alarms."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.measure.watch.transfers import transferring_pids
from gpubench.model.facts.traffic import NodeRates, TaskFacts
from gpubench.model.results.report import Report
from gpubench.model.terms.verdict import Verdict
from tests.measure.watch.test_course import rows, watched
from tests.measure.watch.traffic import KEY, Ways, facts, gpu, nic, node, task

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


def test_a_program_that_sends_copies_itself_is_a_doubt() -> None:
    (finding,) = watched([transfer(ucx=False)] * 3).findings
    assert (finding.id, finding.severity) == ("host-staged", Verdict.WARN)
    assert "may be their wish" in finding.cause
    closed = [replace(each, facts=None, communicators=None) for each in transfer().tasks]
    (finding,) = watched([replace(transfer(), tasks=tuple(closed))] * 3).findings
    assert (finding.severity, finding.next_command) == (Verdict.WARN, "sudo gpubench watch")


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([transfer(loopback=0.0)] * 3, Verdict.WARN),
        # Without UCX, only transfers that start together several times are more than a coincidence.
        ([transfer(loopback=0.0, ucx=False)] * 8, Verdict.SKIP),
        ([QUIET_WITHOUT_UCX, transfer(loopback=0.0, ucx=False)] * 4, Verdict.WARN),
    ],
)
def test_a_transfer_without_the_loopback_is_never_certain(intervals: Sequence[NodeRates], expected: Verdict) -> None:
    assert found(watched(intervals)) == [("path-unknown", expected, "GPU0 → GPU1")]
    # Without NVLinks, direct copies over PCIe look the same.
    assert found(watched(intervals, name="l40s-8")) == []


@pytest.mark.parametrize(
    "intervals",
    [
        [transfer()] * 2,
        [transfer(), servers(sends(0.39), receives(0.1)), servers(sends(0.1), receives(0.39))] * 4,
        # The file system of the network holds the checkpoint of one GPU and the weights of the other.
        [servers(sends(0.4), receives(0.4), nics=[nic("eth0", 0.38, rdma=False)])] * 5,
        # Each GPU copies to host memory and back.
        [servers((0.0, 0.0, 0.4, 0.4), (0.0, 0.0, 0.38, 0.38), loopback=0.4)] * 5,
        [servers(sends(0.4), receives(0.2), loopback=0.2)] * 5,
        [servers(receives(0.4), receives(0.4), loopback=0.4)] * 5,
        [servers((None, None, None, None), receives(0.4), loopback=0.4)] * 5,
        # One job that uses its NVLinks saves, loads and synchronizes its CPUs.
        [
            node(
                [gpu(0, sends(0.4, nvlink=30.0), 100), gpu(1, receives(0.4, nvlink=30.0), 101)],
                [server(100, KEY), server(101, KEY)],
                nic("lo", 0.37, rdma=False),
            )
        ]
        * 5,
        # One process that copies
        [node([gpu(0, sends(0.4), 100), gpu(1, receives(0.4), 100)], [server(100)], nic("lo", 0.37, rdma=False))] * 5,
    ],
)
def test_other_traffic_is_no_transfer(intervals: Sequence[NodeRates]) -> None:
    assert not {row.way for row in rows(watched(intervals))} & {"sockets", "staged"}
    assert all(" → " not in subject for _, _, subject in found(watched(intervals)))


def test_only_processes_that_may_transfer_are_inspected() -> None:
    assert transferring_pids(transfer(), []) == {100, 101}
    assert transferring_pids(QUIET, []) == frozenset()
    assert transferring_pids(servers(sends(0.4), receives(0.1)), []) == frozenset()
