"""Alarms, causes and the report after many intervals."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.measure.watch.jobs import WatchedJobs
from gpubench.measure.watch.report import Course, needs_closer_look, nvlink_finder, observe, report_course
from gpubench.model.facts.process import GpuProcess
from gpubench.model.facts.traffic import GpuReading, NodeRates, NodeReading
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.fault import parse_fault
from gpubench.model.results.report import Report
from gpubench.model.results.watch import JobRow, Way
from gpubench.model.terms.verdict import Origin, Verdict
from gpubench.simulated.machine import parse_machine, snapshots
from tests.measure.watch.traffic import BOTH, IN, KEY, NVLINK, STAGED, STILL, Ways, facts, gpu, job, nic, node, task


def machine(*faults: str, name: str = "hgx-h200-4") -> Topology:
    return Topology(snapshots(parse_machine(name), [parse_fault(fault) for fault in faults])[0])


def watched(intervals: Sequence[NodeRates], *faults: str, name: str = "hgx-h200-4") -> Report:
    topology = machine(*faults, name=name)
    course = Course({"node0": topology}.get)
    addresses = {each.index: each.bus_id or "" for each in topology.gpus}
    for number, rates in enumerate(intervals):
        gpus = tuple(replace(each, bus_id=addresses[each.index]) for each in rates.gpus)
        rates = replace(rates, gpus=gpus, begin=float(number), end=number + 1.0)
        course.add(rates, course.observe(rates), number + 1.0)
    return report_course(course, Origin.MEASURED)


def rows(report: Report) -> list[JobRow]:
    return report.rows(JobRow)


def test_only_direct_traffic_passes() -> None:
    report = watched([job(NVLINK, NVLINK)] * 3)
    assert (report.verdict, report.findings) == (Verdict.PASS, ())
    (row,) = rows(report)
    assert (row.way, row.seconds, row.first_seconds, row.nvlink_gb_s, row.gpus) == (
        "direct",
        3,
        1,
        80,
        ["GPU0", "GPU1"],
    )
    for calm in (STILL, IN):
        assert watched([job(calm, calm)] * 3).verdict is Verdict.SKIP
    assert watched([]).verdict is Verdict.SKIP


def test_one_interval_is_no_alarm_and_passes_nothing() -> None:
    """For a second between two phases of a job, its traffic may look like any other."""
    report = watched([job(STAGED, STAGED)])
    assert report.verdict is Verdict.WARN
    assert [(finding.id, finding.cause) for finding in report.findings] == [
        ("path-unknown", "staged for 1 s is too short to be sure")
    ]
    assert watched([job(NVLINK, NVLINK)] * 3 + [job(STAGED, STAGED)] + [job(NVLINK, NVLINK)]).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("ways", "nics", "expected"),
    [
        ((BOTH,), [nic("eth0", 3.0, rdma=False), nic("mlx5_0", 0.0)], "traffic between nodes over RDMA"),
        ((STAGED, STAGED), [nic("eth0", 3.0, rdma=False), nic("mlx5_0", 0.0)], "GPU traffic over NVLink"),
        ((STAGED, STAGED), [], "GPU traffic over NVLink"),
    ],
)
def test_the_expected_path_is_one_that_the_job_can_use(ways: Any, nics: Any, expected: str) -> None:
    (finding,) = watched([job(*ways, nics=nics)] * 4).findings
    assert finding.expected == expected


def settings(rates: NodeRates, **environment: str) -> NodeRates:
    tasks = [replace(each, facts=facts(each.pid, **environment)) for each in rates.tasks]
    return replace(rates, tasks=tuple(tasks))


@pytest.mark.parametrize(
    ("environment", "nics", "cause"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, [], "nccl-p2p-disabled"),
        ({"NCCL_P2P_LEVEL": "LOC"}, [], "nccl-p2p-disabled"),
        ({"NCCL_SHM_DISABLE": "1"}, [nic("lo", 4.0, rdma=False)], "nccl-shm-disabled"),
        ({}, [], "unknown"),
    ],
)
def test_the_cause_is_in_the_environment_of_the_processes(environment: Any, nics: Any, cause: str) -> None:
    report = watched([settings(job(STAGED, STAGED, nics=nics), **environment)] * 3)
    row = rows(report)[0]
    assert (row.cause, row.verdict) == (cause, Verdict.FAIL)
    if cause != "unknown":
        assert row.advice is not None
        assert f" && unset {next(iter(environment))}" in row.advice


def test_a_cause_is_found_in_nccls_configuration_file() -> None:
    rates = job(STAGED, STAGED)
    own = [replace(facts(each.pid), nccl_files={"/etc/nccl.conf": {"NCCL_P2P_DISABLE": "1"}}) for each in rates.tasks]
    tasks = tuple(replace(each, facts=known) for each, known in zip(rates.tasks, own, strict=True))
    row = rows(watched([replace(rates, tasks=tasks)] * 2))[0]
    assert (row.cause, row.advice) == (
        "nccl-p2p-disabled",
        "gpubench p2p && grep -nE 'NCCL_P2P_DISABLE' /etc/nccl.conf. Remove NCCL_P2P_DISABLE from /etc/nccl.conf.",
    )


def test_the_cause_in_another_users_process_cannot_be_read() -> None:
    rates = job(STAGED, STAGED)
    tasks = tuple(replace(each, facts=None, unread="process 100 belongs to user ann") for each in rates.tasks)
    row = rows(watched([replace(rates, tasks=tasks)] * 2))[0]
    assert row.cause_seen == (
        "the environment and files of its processes cannot be read: process 100 belongs to user ann"
    )


def test_copies_of_one_process_without_nccl_may_be_intended() -> None:
    one_way: list[Ways] = [(0.0, 0.0, 38.0, 0.1), (0.0, 0.0, 0.1, 37.5)]
    rates = node([gpu(n, way, 7) for n, way in enumerate(one_way)], [task(7, communicators=False)])
    report = watched([rates] * 2)
    assert (report.verdict, report.findings[0].severity) == (Verdict.WARN, Verdict.WARN)
    assert "perhaps on purpose" in report.findings[0].cause


def test_machines_without_nvlinks_raise_no_alarm() -> None:
    report = watched([job(STAGED, STAGED)] * 3, name="l40s-8")
    assert report.verdict is Verdict.SKIP
    assert [(finding.id, finding.severity) for finding in report.findings] == [("path-unknown", Verdict.SKIP)]


def of_nodes(*nodes: NodeRates) -> Report:
    topology = machine()
    course = Course(lambda _: topology)
    addresses = [each.bus_id or "" for each in topology.gpus]
    for second in range(3):
        for number, rates in enumerate(nodes):
            gpus = tuple(replace(each, bus_id=addresses[each.index]) for each in rates.gpus)
            rates = replace(rates, host=f"node{number}", gpus=gpus, begin=float(second), end=second + 1.0)
            course.add(rates, course.observe(rates), second + 1.0)
    return report_course(course, Origin.MEASURED)


def test_jobs_of_a_node_that_show_the_same_are_one_finding() -> None:
    gpus = [gpu(index, STAGED, 100 + index) for index in range(4)]
    tasks = [task(100 + index, f"torch 127.0.0.1:2950{index // 2}") for index in range(4)]
    (finding,) = watched([node(gpus, tasks)] * 3).findings
    assert finding.id == "host-staged"
    assert "29500) on node0 GPU0-1" in finding.subject
    assert "29501) on node0 GPU2-3" in finding.subject
    assert finding.seen.endswith("the same for 1 more job on node0")
    assert finding.subjects == ("GPU0", "GPU1", "GPU2", "GPU3")
    assert finding.expected == "GPU traffic over NVLink"


def test_nodes_that_show_the_same_are_one_finding() -> None:
    (of_two,) = of_nodes(*[job(STAGED, STAGED)] * 2).findings
    assert of_two.subjects == ("node0", "node1")
    report = of_nodes(*[job(STAGED, STAGED)] * 16)
    (finding,) = report.findings
    assert (finding.id, finding.severity) == ("host-staged", Verdict.FAIL)
    assert f"{KEY}) on node0-15 GPU0-1" in finding.subject
    assert "the same on 15 more nodes" in finding.seen
    healthy = job(*[(40.0, 40.0, 20.0, 20.0)] * 2, nics=[nic("mlx5_0", 38.0)])
    assert (of_nodes(*[healthy] * 16).verdict, of_nodes(*[healthy] * 16).findings) == (Verdict.PASS, ())


def test_an_unknown_path_does_not_pass_next_to_direct_nodes() -> None:
    by_rdma_alone = job(*[(0.0, 0.0, 20.0, 20.0)] * 2, nics=[nic("mlx5_0", 38.0)])
    assert of_nodes(*[by_rdma_alone] * 3).verdict is Verdict.SKIP
    report = of_nodes(job(NVLINK, NVLINK), by_rdma_alone, job(NVLINK, NVLINK))
    (finding,) = report.findings
    assert (report.verdict, finding.severity) == (Verdict.WARN, Verdict.WARN)
    assert finding.cause.endswith("the same job is direct")
    other = replace(by_rdma_alone, tasks=tuple(replace(each, together=("other",)) for each in by_rdma_alone.tasks))
    assert of_nodes(job(NVLINK, NVLINK), other).verdict is Verdict.SKIP


def test_nvlinks_of_an_unknown_gpu_are_unknown() -> None:
    node = machine()
    own, other = str(node.gpus[0].bus_id), str(node.gpus[1].bus_id)
    joined = nvlink_finder(node)
    assert (joined(own, other), joined(own, "elsewhere"), joined("elsewhere", own)) == (True, None, None)
    assert nvlink_finder(None)(own, other) is None


def test_a_silent_driver_is_an_error_and_earlier_rows_are_kept() -> None:
    silent = replace(job(), driver_silent="the driver has not answered for 4 s")
    report = watched([job(NVLINK, NVLINK), silent, silent])
    assert report.verdict is Verdict.ERROR
    assert [finding.id for finding in report.findings] == ["driver-silent"]
    assert rows(report)[0].way == "direct"


def test_a_single_late_answer_is_no_error() -> None:
    late = replace(job(), driver_silent="the driver did not answer within 1 s")
    good = job(NVLINK, NVLINK)
    assert watched([good, late, good]).verdict is Verdict.PASS
    assert watched([good, late]).verdict is Verdict.ERROR
    assert watched([good, late, late, good]).verdict is Verdict.ERROR


@pytest.mark.parametrize("beside", [job(STAGED, STAGED), job((30.0,) * 4, (30.0,) * 4)])
def test_a_direct_path_with_many_doubts_does_not_pass(beside: NodeRates) -> None:
    direct = job(NVLINK, NVLINK)
    report = watched([direct, beside] * 5 + [direct])
    assert report.verdict is Verdict.WARN
    assert rows(report)[0].way in ("staged", "unknown")
    assert watched([*[direct] * 3, beside, *[direct] * 3]).verdict is Verdict.PASS
    assert watched([*[direct] * 20, beside, *[direct] * 20, beside]).verdict is Verdict.PASS


def test_busy_nvlinks_of_shared_gpus_do_not_pass_either_job() -> None:
    gpus = [gpu(n, NVLINK, 100 + n, 200 + n) for n in (0, 1)]
    jobs = [task(100 + n, KEY) for n in (0, 1)], [task(200 + n, "Slurm 7.0") for n in (0, 1)]
    report = watched([node(gpus, [*jobs[0], *jobs[1]])] * 3)
    assert report.verdict is Verdict.SKIP
    assert "process 200 also uses GPU0" in report.findings[0].seen
    # --job hides the processes of the other job, but not its traffic.
    assert watched([node(gpus, jobs[1])] * 3).verdict is Verdict.SKIP
    # A process on one GPU has no peer, and services have a context on every GPU.
    alone = [gpu(0, NVLINK, 100, 7), gpu(1, NVLINK, 101)]
    assert watched([node(alone, [*jobs[0], task(7)])] * 3).verdict is Verdict.PASS
    served = [
        replace(each, processes=(*(each.processes or ())[:1], GpuProcess(pid=9, name="nvidia-cuda-mps-server")))
        for each in gpus
    ]
    assert watched([node(served, [*jobs[0]])] * 3).verdict is Verdict.PASS
    # A server is not the job even if its pid is the lowest.
    server = replace(task(9), name="nvidia-cuda-mps-server")
    of_one = [
        replace(gpu(0, NVLINK, 100, 101), processes=(GpuProcess(pid=9), GpuProcess(pid=100), GpuProcess(pid=101)))
    ]
    (job_of_one,) = rows(watched([node(of_one, [server, *jobs[0]])] * 3))
    assert job_of_one.job == "python (torch 127.0.0.1:29500)"


def test_a_slurm_job_id_does_not_match_a_container_id() -> None:
    mine, other = replace(task(1), slurm_job="4711"), replace(task(2), container="docker 4711ab34cd56")
    reading = NodeReading(host="node0", seconds=1.0, tasks=(mine, other))
    for job_id, pids in (("4711", [1]), ("4711ab", [2]), ("4711AB34CD56ef00", [2]), ("99", [])):
        assert [each.pid for each in WatchedJobs(job=job_id).of(reading).tasks] == pids


def test_a_lost_gpu_is_reported_for_every_job() -> None:
    lost = GpuReading(index=1, bus_id="0000:01:00.0", lost="GPU is lost")
    kept = GpuReading(index=0, bus_id="0000:00:00.0", processes=(GpuProcess(pid=100),))
    reading = NodeReading(host="node0", seconds=1.0, gpus=(kept, lost), tasks=(task(100, KEY),))
    assert WatchedJobs(pids=(100,)).of(reading).gpus == (kept, lost)
    direct = job(NVLINK, NVLINK)
    fallen = replace(direct.gpus[1], lost="GPU is lost", processes=())
    report = watched([direct, replace(direct, gpus=(direct.gpus[0], fallen)), direct])
    assert (report.verdict, report.findings[-1].id, report.findings[-1].seen) == (
        Verdict.FAIL,
        "gpu-lost",
        "GPU is lost",
    )


def test_lasting_unbalanced_rails_and_waiting_gpus_are_warnings() -> None:
    rails = [nic(f"mlx5_{n}", 20.0) for n in range(3)] + [nic("mlx5_3", 5.0)]
    assert watched([job(NVLINK, NVLINK, nics=rails)] * 3).verdict is Verdict.WARN
    rates = job(STILL, STILL)
    waiting = replace(rates, gpus=(replace(rates.gpus[0], utilization_percent=0), rates.gpus[1]))
    report = watched([waiting] * 3)
    assert (report.verdict, report.findings[0].id) == (Verdict.WARN, "gpu-idle-while-peers-wait")


def test_processes_with_staged_traffic_are_inspected() -> None:
    def asked(rates: NodeRates) -> frozenset[int]:
        return needs_closer_look(observe(rates, lambda *_: True))

    assert asked(job(STAGED, STAGED, communicators=None)) == {100, 101}
    assert asked(job(STAGED, STAGED)) == frozenset()
    assert asked(job(NVLINK, NVLINK, communicators=None)) == frozenset()
    assert asked(job(IN, IN, communicators=None)) == frozenset()
    assert asked(job(BOTH, communicators=None)) == frozenset()
    assert asked(job(BOTH, communicators=None, nics=[nic("lo", 3.0, rdma=False)])) == {100}


def test_a_shared_gpu_belongs_to_the_larger_job() -> None:
    gpus = [gpu(0, STAGED, 100, 7), gpu(1, STAGED, 101)]
    tasks = [task(7, communicators=False), task(100, KEY), task(101, KEY)]
    (found,) = observe(node(gpus, tasks), lambda *_: True)
    assert (found.way, found.job.name, found.job.devices) == (Way.STAGED, f"python ({KEY})", "GPU0-1")


def test_jobs_that_share_any_key_are_one() -> None:
    tasks = [task(1, "a"), task(2, "b"), task(3, "a", "b"), task(4, "c")]
    gpus = [gpu(n, NVLINK, n + 1) for n in range(4)]
    found = observe(node(gpus, tasks), lambda *_: True)
    assert sorted(len(each.job.gpus) for each in found) == [1, 3]
