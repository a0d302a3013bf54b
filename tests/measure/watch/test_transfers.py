"""Transfers through host memory between the GPUs of two processes, at rates below those of other alarms.

`h200x2.json` has what two H200s showed every 0.5 s beside host-staged transfers ("sick") and healthy jobs: NVLink and
PCIe rates in GB/s, sent and received, of both GPUs, and the rate of the loopback interface.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.measure.watch.transfers import transferring_pids
from gpubench.model.facts.traffic import NodeRates, TaskFacts
from gpubench.model.results.report import Report
from gpubench.model.terms.verdict import Verdict
from tests.measure.watch.test_course import rows, watched
from tests.measure.watch.traffic import KEY, Ways, facts, gpu, nic, node, task

RECORDED: dict[str, list[list[float]]] = json.loads((Path(__file__).parent / "h200x2.json").read_text())
HEALTHY = [name for name in RECORDED if not name.startswith("sick")]


def server(pid: int, *together: str, ucx: bool = True, pid_namespace: int = 1, **environment: str) -> TaskFacts:
    libraries = {"libucp": "/opt/nixl/libucp.so.0"} if ucx else {}
    known = replace(facts(pid, **environment), libraries=libraries, namespaces={"pid": pid_namespace})
    return task(pid, *together, communicators=False, facts=known)


def servers(*ways: Ways, loopback: float = 0.0, ucx: bool = True, nics: Sequence[Any] = ()) -> NodeRates:
    """Return one interval of unrelated servers with one GPU each."""
    gpus = [gpu(number, way, 100 + number) for number, way in enumerate(ways)]
    tasks = [server(100 + number, ucx=ucx) for number in range(len(ways))]
    return node(gpus, tasks, nic("lo", loopback, rdma=False), *nics)


def recorded(name: str, *, ucx: bool, merged: int = 1) -> list[NodeRates]:
    """Return the recorded intervals of a job, or means over `merged` intervals."""
    intervals = RECORDED[name]
    groups = [intervals[begin : begin + merged] for begin in range(0, len(intervals) - merged + 1, merged)]
    means = [[sum(values) / merged for values in zip(*group, strict=True)] for group in groups]
    one = [servers(tuple(each[:4]), tuple(each[4:8]), loopback=each[8], ucx=ucx) for each in means]
    if name.startswith("ddp"):
        return [replace(each, tasks=(task(100, KEY), task(101, KEY))) for each in one]
    return one


def sends(rate: float, nvlink: float = 0.0) -> Ways:
    return nvlink, nvlink, rate, 0.0


def receives(rate: float, nvlink: float = 0.0) -> Ways:
    return nvlink, nvlink, 0.06 * rate, rate


def transfer(rate: float = 0.39, *, loopback: bool = True, ucx: bool = True) -> NodeRates:
    return servers(sends(1.01 * rate), receives(rate), loopback=0.93 * rate * loopback, ucx=ucx)


def pause(gpus: int = 2, *, ucx: bool = True) -> NodeRates:
    return servers(*[sends(0.02)] * gpus, ucx=ucx)


def found(report: Report) -> list[tuple[str, Verdict, str]]:
    return [(finding.id, finding.severity, finding.subject.partition(" on ")[0]) for finding in report.findings]


@pytest.mark.parametrize("merged", [1, 2])
@pytest.mark.parametrize(
    ("name", "with_ucx", "without_ucx"),
    [
        *[(name, "FAIL host-staged", "WARN host-staged") for name in RECORDED if name.startswith("sick-tcp")],
        ("sick-shm", "WARN path-unknown", "SKIP path-unknown"),
    ],
)
def test_recorded_transfers_through_host_memory_are_found(
    name: str, with_ucx: str, without_ucx: str, merged: int
) -> None:
    for ucx, expected in ((True, with_ucx), (False, without_ucx)):
        report = watched(recorded(name, ucx=ucx, merged=merged))
        assert [f"{severity} {id_} {ends}" for id_, severity, ends in found(report)] == [f"{expected} GPU0 → GPU1"]


@pytest.mark.parametrize("merged", [1, 2])
@pytest.mark.parametrize("name", HEALTHY)
def test_recorded_healthy_jobs_raise_no_alarm(name: str, merged: int) -> None:
    report = watched(recorded(name, ucx=False, merged=merged))
    is_direct = name.startswith(("ddp", "nvlink"))
    assert report.verdict is (Verdict.PASS if is_direct else Verdict.SKIP)
    # A checkpoint and a load at the same rate are what a transfer through shared memory looks like.
    assert not report.findings or name.startswith("save-and-load")
    # Processes that have loaded UCX are no different.
    assert watched(recorded(name, ucx=True, merged=merged)).verdict is report.verdict


@pytest.mark.parametrize(
    ("intervals", "ends"),
    [
        ([transfer()] * 3, "GPU0 → GPU1"),
        ([transfer(0.06)] * 3, "GPU0 → GPU1"),
        # A request every few seconds
        ([pause(), *[transfer(0.1), *[pause()] * 4] * 3], "GPU0 → GPU1"),
        # One of five bursts may disagree.
        ([pause(), servers(receives(0.0), receives(0.1)), *[pause(), transfer()] * 3], "GPU0 → GPU1"),
        # Weights were loaded twice, and later there are several requests.
        ([*[pause(), servers(receives(0.0), receives(9.0))] * 2, *[pause(), transfer()] * 6], "GPU0 → GPU1"),
        # Weights were loaded twice before.
        ([*[pause(), servers(receives(0.0), receives(9.0))] * 2, pause(), *[transfer()] * 10], "GPU0 → GPU1"),
        # The receiver has a context on the sender's GPU too.
        ([replace(transfer(), gpus=(gpu(0, sends(0.4), 100, 101), *transfer().gpus[1:]))] * 3, "GPU0 → GPU1"),
        # Servers with two GPUs each, which use their NVLinks inside a server
        (
            [servers(*[sends(0.4, nvlink=30.0)] * 2, *[receives(0.4, nvlink=20.0)] * 2, loopback=0.74)] * 3,
            "GPU0, GPU1 → GPU2, GPU3",
        ),
        # Another process loads data.
        ([servers(sends(0.4), receives(0.4), receives(2.0), loopback=0.37)] * 3, "GPU0 → GPU1"),
    ],
)
def test_a_transfer_over_the_loopback_fails(intervals: Sequence[NodeRates], ends: str) -> None:
    report = watched(intervals)
    assert found(report) == [("host-staged", Verdict.FAIL, ends)]
    (finding,) = report.findings
    assert "through TCP on the loopback interface" in finding.seen
    assert finding.expected == f"direct traffic {ends}, over NVLink or PCIe"
    assert finding.next_command == "gpubench kv"
    assert finding.subject == f"{ends} on node0"
    (row,) = [row for row in rows(report) if row.way == "sockets"]
    assert row.verdict is Verdict.FAIL
    assert row.job.startswith("process 100 (python)")
    assert f"; {row.job}, NVLink" in finding.seen


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
    tasks = [server(100 + gpu, pid_namespace=namespace, **environment) for gpu, namespace in enumerate(namespaces)]
    report = watched([replace(transfer(), tasks=tuple(tasks))] * 3)
    row = next(row for row in rows(report) if row.way == "sockets")
    assert (row.cause, row.verdict) == (cause, Verdict.FAIL)
    assert report.findings[0].cause == row.cause_seen
    assert "()" not in report.findings[0].cause


def test_a_transfer_between_gpus_without_peer_access_is_a_doubt() -> None:
    (finding,) = watched([transfer()] * 3, name="rtx-4090-2").findings
    assert (finding.severity, finding.id) == (Verdict.WARN, "host-staged")
    assert "no peer access" in finding.cause


def test_a_program_that_sends_copies_itself_is_a_doubt() -> None:
    (finding,) = watched([transfer(ucx=False)] * 3).findings
    assert (finding.id, finding.severity) == ("host-staged", Verdict.WARN)
    assert "perhaps on purpose" in finding.cause
    closed = [replace(each, facts=None, communicators=None) for each in transfer().tasks]
    (finding,) = watched([replace(transfer(), tasks=tuple(closed))] * 3).findings
    assert (finding.severity, finding.next_command) == (Verdict.WARN, "sudo gpubench watch")
    hidden = [replace(each, processes=None) for each in transfer().gpus]
    (finding,) = watched([replace(transfer(), gpus=tuple(hidden), tasks=())] * 3).findings
    assert (finding.severity, finding.next_command) == (Verdict.WARN, "sudo gpubench watch")


def test_bursts_without_the_loopback_are_a_doubt_only_between_nvlinks() -> None:
    intervals = [pause(ucx=False), transfer(loopback=False, ucx=False)] * 4 + [pause(ucx=False)]
    assert found(watched(intervals[:-2])) == [("path-unknown", Verdict.SKIP, "GPU0 → GPU1")]
    assert found(watched(intervals * 2)) == [("path-unknown", Verdict.WARN, "GPU0 → GPU1")]
    # Without NVLinks, direct copies over PCIe look the same.
    assert found(watched(intervals * 2, name="l40s-8")) == []


@pytest.mark.parametrize(
    "rates",
    [
        # The file system on the network has the checkpoint of one GPU and the weights of the other.
        servers(sends(0.4), receives(0.4), nics=[nic("eth0", 0.38, rdma=False)]),
        servers(sends(0.4), receives(0.2), loopback=0.2),
        servers(sends(0.03), receives(0.03), loopback=0.028),
        servers((None, None, None, None), receives(0.4), loopback=0.4),
        # One job that uses its NVLinks saves, loads and synchronizes its CPUs.
        node(
            [gpu(0, sends(0.4, nvlink=30.0), 100), gpu(1, receives(0.4, nvlink=30.0), 101)],
            [server(100, KEY), server(101, KEY)],
            nic("lo", 0.37, rdma=False),
        ),
        # One process that copies
        node([gpu(0, sends(0.4), 100), gpu(1, receives(0.4), 100)], [server(100)], nic("lo", 0.37, rdma=False)),
    ],
)
def test_other_traffic_is_no_transfer(rates: NodeRates) -> None:
    report = watched([rates] * 5)
    assert not {row.way for row in rows(report)} & {"sockets", "staged"}
    assert all(" → " not in subject for _, _, subject in found(report))


def test_servers_with_several_gpus_are_one_transfer_without_the_loopback() -> None:
    four = servers(*[sends(0.4, nvlink=30.0)] * 2, *[receives(0.396, nvlink=20.0)] * 2)
    assert found(watched([four] * 3)) == [("path-unknown", Verdict.WARN, "GPU0, GPU1 → GPU2, GPU3")]


def test_too_few_intervals_or_bursts_that_differ_are_no_transfer() -> None:
    assert found(watched([transfer()] * 2)) == []
    turns = [servers(sends(0.39), receives(0.0)), servers(sends(0.0), receives(0.39)), pause()]
    assert found(watched([pause(), *turns * 5])) == []
    other = servers(sends(0.39), receives(0.1), loopback=0.36)
    assert found(watched([pause(), *[other, pause(), transfer(), pause()] * 4])) == []


def test_only_processes_that_may_transfer_are_inspected() -> None:
    assert transferring_pids(transfer()) == {100, 101}
    assert transferring_pids(pause()) == frozenset()
    assert transferring_pids(servers(receives(0.4), receives(0.1))) == frozenset()
