"""Containers of processes, GPUs and free memory of a host, from trees of /proc and /sys."""

from pathlib import Path

import pytest

from gpubench.machine.host import count_gpus, find_container, free_bytes
from tests.fakes.sysfs import Tree

ID = "3f2a91bc04de" + 52 * "0"


@pytest.mark.parametrize(
    ("groups", "container"),
    [
        (f"12:memory:/docker/{ID}\n", "docker 3f2a91bc04de"),
        (f"0::/system.slice/docker-{ID}.scope\n", "docker 3f2a91bc04de"),
        (f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope", "container 3f2a91bc04de"),
        (f"0::/machine.slice/libpod-{ID}.scope", "libpod 3f2a91bc04de"),
        ("0::/user.slice/user-0.slice/session-1.scope", None),
        ("0::/docker/short", None),
        ("", None),
    ],
)
def test_a_container_is_known_by_its_control_group(tmp_path: Path, groups: str, container: str | None) -> None:
    Tree(tmp_path).write("proc/7/cgroup", groups)
    assert find_container(7, tmp_path) == container


def test_the_driver_lists_the_gpus_of_a_host(tmp_path: Path) -> None:
    assert count_gpus(tmp_path) == 0
    for name in ("0000:18:00.0", "0000:2a:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    assert count_gpus(tmp_path) == 2


GIB = 2**30
MEMINFO = {"proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {32 * GIB // 1024} kB"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 32 * GIB),
        ({"proc/self/cgroup": "0::/"}, 32 * GIB),
        (
            {
                "proc/self/cgroup": "0::/job/step",
                "sys/fs/cgroup/job/memory.max": f"{8 * GIB}",
                "sys/fs/cgroup/job/memory.current": f"{2 * GIB}",
                "sys/fs/cgroup/job/step/memory.max": "max",
                "sys/fs/cgroup/job/step/memory.current": f"{GIB}",
            },
            6 * GIB,
        ),
        (
            # In a container the own group is the mount's root.
            {
                "proc/self/cgroup": "0::/not/shown/here",
                "sys/fs/cgroup/memory.max": f"{4 * GIB}",
                "sys/fs/cgroup/memory.current": f"{GIB}",
            },
            3 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/slurm/job_1",
                "sys/fs/cgroup/memory/slurm/job_1/memory.limit_in_bytes": f"{16 * GIB}",
                "sys/fs/cgroup/memory/slurm/job_1/memory.usage_in_bytes": f"{GIB}",
            },
            15 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "0::/",
                "sys/fs/cgroup/memory.max": f"{GIB}",
                "sys/fs/cgroup/memory.current": f"{2 * GIB}",
            },
            0,
        ),
    ],
    ids=["no groups", "no limit", "limit above", "container", "version 1", "over the limit"],
)
def test_the_tightest_limit_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    tree = Tree(tmp_path)
    for name, text in (MEMINFO | files).items():
        tree.write(name, text)
    assert free_bytes(tmp_path) == expected
