"""CPU time of this process: what its control groups grant, and how long it waited for a CPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gpubench.hardware.system_files import exists, number_of, text_of
from gpubench.model.facts.rank_facts import CpuQuota

_LEAST_NS = 20_000_000


class RunDelay(NamedTuple):
    """Nanoseconds that the main thread ran, and that it was ready to run and waited for a CPU."""

    ran_ns: int
    waited_ns: int


def run_delay(root: Path = Path("/")) -> RunDelay | None:
    """Both since the thread was made (sched-stats.rst of the kernel); None where the kernel keeps no count."""
    fields = (text_of(root / "proc/self/schedstat") or "").split()
    if len(fields) < len(RunDelay._fields) or not all(each.isdecimal() for each in fields):
        return None
    return RunDelay(int(fields[0]), int(fields[1]))


def waited_share(before: RunDelay | None, after: RunDelay | None) -> float | None:
    """The share of the time between two readings in which the thread could have run that it waited for a CPU.

    None where it was ready for less than 20 ms, of which one slice of another thread is too large a part.
    """
    if before is None or after is None:
        return None
    waited_ns = after.waited_ns - before.waited_ns
    ready_ns = after.ran_ns - before.ran_ns + waited_ns
    return waited_ns / ready_ns if ready_ns >= _LEAST_NS else None


def cpu_quota(root: Path) -> CpuQuota | None:
    """The least that this process's control group and those above it grant, versions 1 and 2; None for no limit."""
    found: list[CpuQuota] = []
    for entry in (text_of(root / "proc/self/cgroup") or "").splitlines():
        controllers, _, path = entry.partition(":")[2].partition(":")
        if entry.startswith("0::"):
            found += _limits(root, "sys/fs/cgroup", path)
        elif "cpu" in controllers.split(","):
            found += _limits(root, "sys/fs/cgroup/cpu", path)
            found += _limits(root, f"sys/fs/cgroup/{controllers}", path)
    return min(found, key=lambda each: each.cpus, default=None)


def _limits(root: Path, mount: str, path: str) -> Iterator[CpuQuota]:
    """In a container the mount shows the own group as its root, so groups that are not there are passed over."""
    top = root / mount
    group = top / path.strip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(top):
            break
        cpus = _of_version_2(folder) or _of_version_1(folder)
        if cpus:
            file = "cpu.max" if exists(folder / "cpu.max") else "cpu.cfs_quota_us"
            yield CpuQuota(cpus=cpus, by=f"/{(folder / file).relative_to(root)}")


def _of_version_2(folder: Path) -> float | None:
    """'200000 100000' is two CPUs, 'max 100000' no limit."""
    fields = (text_of(folder / "cpu.max") or "").split()
    if not fields or not fields[0].isdecimal():
        return None
    period_us = int(fields[1]) if len(fields) > 1 and fields[1].isdecimal() else 100_000
    return int(fields[0]) / period_us if period_us else None


def _of_version_1(folder: Path) -> float | None:
    quota_us, period_us = number_of(folder / "cpu.cfs_quota_us"), number_of(folder / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None
