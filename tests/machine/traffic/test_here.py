"""A node from its child, its counters and its processes to what is concluded of it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpubench.jobs.metadata import recorded_settings
from gpubench.machine.host import FIRST_PID_NAMESPACE
from gpubench.machine.traffic import NodeTraffic
from gpubench.measure.watch.jobs import WatchedJobs
from gpubench.measure.watch.report import Course, Intervals, NodeWatch, nvlink_finder
from gpubench.model.facts.process import GpuProcess
from gpubench.model.facts.traffic import GpuReading
from gpubench.model.paths.topology import Topology
from gpubench.model.results.watch import Way
from gpubench.model.terms.plain import to_plain
from gpubench.model.terms.verdict import Cure
from gpubench.simulated.machine import parse_machine, snapshots
from tests.fakes.sysfs import Tree
from tests.machine.traffic.test_tasks import LIBRARY, Processes

NODE = Topology(snapshots(parse_machine("hgx-h200-2"))[0])
PIDS = (50, 51)


def staged(number: int) -> GpuReading:
    gpu = NODE.gpus[number]
    return GpuReading(
        index=gpu.index,
        bus_id=gpu.bus_id or "",
        nvlink_sent_gb_s=0.0,
        nvlink_received_gb_s=0.0,
        pcie_sent_gb_s=33.5,
        pcie_received_gb_s=29.3,
        kernels_percent=98.0,
        processes=(GpuProcess(pid=PIDS[number], memory_bytes=2**30),),
    )


@pytest.fixture
def traffic(tmp_path: Path) -> Iterator[NodeTraffic]:
    processes = Processes(Tree(tmp_path))
    processes.tree.symlink("proc/self/ns/pid", FIRST_PID_NAMESPACE)
    processes.tree.write("sys/class/net/lo/statistics/tx_bytes", "5")
    processes.tree.write("sys/class/net/lo/statistics/rx_bytes", "5")
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1", "NCCL_P2P_DISABLE": "1"}
    for pid in PIDS:
        processes.add(pid, launched, maps=LIBRARY)
    answer = json.dumps({"gpus": [to_plain(staged(number)) for number in (0, 1)]})
    command = [sys.executable, "-c", f"import sys\nfor _ in sys.stdin: print({answer!r}, flush=True)"]
    clock = iter(range(100))
    made = NodeTraffic(
        "node0", {}, recorded_settings, 20.0, 20.0, root=tmp_path, command=command, clock=lambda: float(next(clock))
    )
    yield made
    made.close()


def test_a_staged_job_is_named_after_two_intervals_with_its_own_settings(traffic: NodeTraffic) -> None:
    course = Course({"node0": NODE}.get)
    intervals = Intervals(course)
    node = NodeWatch(traffic, nvlink_finder(NODE), WatchedJobs())
    readings = [node.read() for _ in range(4)]
    assert all(readings)
    ways = []
    for reading in readings:
        assert reading is not None
        interval = intervals.add([reading])
        if interval is not None:
            ways.append(interval.nodes[0][1][0].way)
    assert ways == [Way.STAGED] * 3
    (job,) = course.jobs.values()
    assert job.explanation is not None
    assert (job.name, job.explanation.id, job.explanation.cure) == (
        "python3 (torch h:1)",
        "nccl-p2p-disabled",
        Cure.of("gpubench p2p && unset NCCL_P2P_DISABLE"),
    )
    assert (job.main.way, job.main.is_steady) == (Way.STAGED, True)


def test_what_nobody_asked_for_is_not_watched(traffic: NodeTraffic) -> None:
    node = NodeWatch(traffic, nvlink_finder(NODE), WatchedJobs(pids=(7,)))
    reading = node.read()
    assert reading is not None
    assert (reading.gpus, reading.tasks, [nic.name for nic in reading.nics]) == ((), (), ["lo"])
    one = NodeWatch(traffic, nvlink_finder(NODE), WatchedJobs(pids=(51,))).read()
    assert one is not None
    assert [task.pid for task in one.tasks] == list(PIDS)
