"""Free host memory from recorded /proc and /sys trees."""

from pathlib import Path

import pytest

from gpubench.machine.host import free_bytes

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = {"proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {32 * GIB // 1024} kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 32 * GIB),
        ({"proc/self/cgroup": "0::/\n"}, 32 * GIB),
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n",
                "sys/fs/cgroup/job/memory.current": f"{2 * GIB}\n",
                "sys/fs/cgroup/job/step/memory.max": "max\n",
                "sys/fs/cgroup/job/step/memory.current": f"{GIB}\n",
            },
            6 * GIB,
        ),
        (
            # In a container the own group is the mount's root.
            {
                "proc/self/cgroup": "0::/not/shown/here\n",
                "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/memory.current": f"{GIB}\n",
            },
            3 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/slurm/job_1\n",
                "sys/fs/cgroup/memory/slurm/job_1/memory.limit_in_bytes": f"{16 * GIB}\n",
                "sys/fs/cgroup/memory/slurm/job_1/memory.usage_in_bytes": f"{GIB}\n",
            },
            15 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{GIB}\n",
                "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
            },
            0,
        ),
    ],
    ids=["no groups", "no limit", "limit above", "container", "version 1", "over the limit"],
)
def test_the_tightest_limit_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    write(tmp_path, MEMINFO | files)
    assert free_bytes(tmp_path) == expected
