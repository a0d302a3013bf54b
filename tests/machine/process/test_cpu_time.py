"""The CPU time that control groups grant, and how long this process waited for a CPU, from trees."""

from pathlib import Path

import pytest

from gpubench.machine.host import RunDelay, run_delay, waited_share
from gpubench.machine.process import cpu_quota
from gpubench.model.facts.process import CpuQuota
from tests.fakes.sysfs import Tree

POD = "sys/fs/cgroup/kubepods/pod1"
OLD = "sys/fs/cgroup/cpu,cpuacct"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/kubepods/pod1"}, None),
        ({"proc/self/cgroup": "0::/kubepods/pod1", f"{POD}/cpu.max": "max 100000"}, None),
        (
            {"proc/self/cgroup": "0::/kubepods/pod1/a", f"{POD}/cpu.max": "150000 100000", f"{POD}/a/cpu.max": "max 1"},
            CpuQuota(cpus=1.5, by="/sys/fs/cgroup/kubepods/pod1/cpu.max"),
        ),
        (
            {
                "proc/self/cgroup": "0::/kubepods/pod1",
                f"{POD}/cpu.max": "800000 100000",
                "sys/fs/cgroup/kubepods/cpu.max": "400000 100000",
            },
            CpuQuota(cpus=4.0, by="/sys/fs/cgroup/kubepods/cpu.max"),
        ),
        (
            {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"},
            CpuQuota(cpus=0.5, by="/sys/fs/cgroup/cpu.max"),
        ),
        (
            {
                "proc/self/cgroup": "9:memory:/a\n4:cpu,cpuacct:/docker/1f\n0::/x",
                f"{OLD}/docker/1f/cpu.cfs_quota_us": "200000",
                f"{OLD}/docker/1f/cpu.cfs_period_us": "100000",
                f"{OLD}/cpu.cfs_quota_us": "-1",
                f"{OLD}/cpu.cfs_period_us": "100000",
            },
            CpuQuota(cpus=2.0, by=f"/{OLD}/docker/1f/cpu.cfs_quota_us"),
        ),
        ({"proc/self/cgroup": "odd\n0::/", "sys/fs/cgroup/cpu.max": "half a line"}, None),
    ],
)
def test_the_least_quota_of_the_groups_above(tmp_path: Path, files: dict[str, str], expected: CpuQuota | None) -> None:
    tree = Tree(tmp_path)
    for path, text in files.items():
        tree.write(path, text)
    assert cpu_quota(tree.root) == expected


def test_how_long_a_thread_waited(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    assert run_delay(root=tree.root) is None
    tree.write("proc/self/schedstat", "1000 250 17")
    assert run_delay(root=tree.root) == RunDelay(ran_ns=1000, waited_ns=250)
    tree.write("proc/self/schedstat", "not counted")
    assert run_delay(root=tree.root) is None
    before, after = RunDelay(10**9, 10**6), RunDelay(2 * 10**9, 3001 * 10**6)
    assert waited_share(before, after) == 0.75
    assert waited_share(before, before) is None
    assert waited_share(RunDelay(0, 0), RunDelay(10**6, 10**6)) is None
    assert waited_share(None, after) is None


def test_this_process_itself() -> None:
    delay = run_delay()
    assert delay is None or delay.ran_ns > 0
