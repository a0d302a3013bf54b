"""CPUs: ranks that share too few, control groups that grant too little of them, and ranks that waited for one."""

from collections.abc import Iterator, Sequence

from gpubench.conditions.definition.circumstances import Circumstances
from gpubench.conditions.definition.condition import Condition, Family, Found
from gpubench.conditions.definition.sightings import of_ranks, unread
from gpubench.conditions.node import cpus_in
from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.paths.evidence import Confidence
from gpubench.model.terms.cpu_ranges import ranges_of

_WAITED_SHARE, _SURELY_WAITED_SHARE = 0.1, 0.3
"""Of its time that a rank was ready to run and had no CPU. On a machine with a CPU to spare for each rank it is below
one percent; with three busy loops on the CPU of each it is three quarters."""


_WIDER = (
    "start it without taskset or numactl -C, and with mpirun --bind-to none; a job with more CPUs: "
    "srun --cpus-per-task=8, docker run without --cpuset-cpus"
)
_CPUS_A_RANK = 2
"""One for the thread that launches, one for those of NCCL and MPI."""


def _shared(run: Circumstances) -> Found:
    """Ranks that together may use fewer CPUs than they are: a rank keeps one busy while it waits for the GPU."""
    for node in sorted({each.node for each in run.facts}):
        for ranks, cpus in _crowded(run.ranks_of(node)):
            shown = ranges_of(sum(1 << cpu for cpu in cpus))
            count = f"CPU {shown}" if len(cpus) == 1 else f"{len(cpus)} CPUs ({shown})"
            # All bound alike: that comes from outside of mpirun, which binds ranks apart.
            outside = len(ranks) == len(run.ranks_of(node))
            yield of_ranks(run, ranks, f"{len(ranks)} ranks may run on {count} only", cure=_WIDER if outside else "")
        for each in run.ranks_of(node):
            yield from unread(run.on(node, f"rank {each.rank}"), each.unknown, "affinity")


def _crowded(ranks: Sequence[RankFacts]) -> Iterator[tuple[list[RankFacts], set[int]]]:
    """The ranks of a node that are more than their CPUs: of those bound alike first, then of all that overlap."""
    known = [(each, frozenset(cpus)) for each in ranks if (cpus := cpus_in(each.affinity or ""))]
    for common in dict.fromkeys(mask for _, mask in known):
        alike = [each for each, mask in known if mask == common]
        if len(alike) > len(common):
            yield alike, set(common)
            known = [(each, mask) for each, mask in known if mask != common]
    while known:
        union, within = set(known[0][1]), [known[0]]
        while more := [each for each in known if each not in within and not union.isdisjoint(each[1])]:
            within += more
            union.update(*(mask for _, mask in more))
        if len(within) > len(union):
            yield [each for each, _ in within], union
        known = [each for each in known if each not in within]


def _quota(run: Circumstances) -> Found:
    """Less than a CPU for each rank of a control group; ranks of separate containers have separate groups."""
    groups: dict[tuple[int, int | None, str], list[RankFacts]] = {}
    for each in run.facts:
        if each.cpu_quota is not None:
            key = each.node, each.namespaces.get("cgroup"), each.cpu_quota.by
            groups.setdefault(key, []).append(each)
    for (_, _, by), ranks in groups.items():
        cpus = min(each.cpu_quota.cpus for each in ranks if each.cpu_quota is not None)
        if cpus < len(ranks):
            count, enough = len(ranks), _CPUS_A_RANK * len(ranks)
            cure = f"docker run --cpus={enough}, limits.cpu: {enough} of the pod, or systemd CPUQuota={enough}00%"
            seen = f"{by} grants {cpus:g} CPUs to {count} rank{'s' * (count > 1)}"
            yield of_ranks(run, ranks, seen, cure=cure)


def _oversubscribed(run: Circumstances) -> Found:
    for node in sorted({each.node for each in run.facts}):
        waited = {each.rank: run.waited.get(each.rank, 0.0) for each in run.ranks_of(node)}
        late = [each for each in run.ranks_of(node) if waited[each.rank] >= _WAITED_SHARE]
        if late:
            most = max(waited.values())
            sure = Confidence.PROVEN if most >= _SURELY_WAITED_SHARE else Confidence.LIKELY
            yield of_ranks(run, late, f"waited for a CPU for {most:.0%} of their time", sure)


_BINDING = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-ignore-cpu-affinity"
_CONTROL_GROUPS = "https://github.com/kubernetes/kubernetes/issues/67577"
_LATENCY = "gpubench allreduce --sizes 1K, and the same "

CORES = Family.of(
    "cores",
    "CPUs of the ranks",
    Condition(
        id="cores-shared",
        title="Ranks share CPU cores: several are bound to the same (mpirun --bind-to core, taskset, cpuset)",
        detection="sched_getaffinity of all ranks of a node: fewer CPUs than ranks that may use them",
        settles=f"{_LATENCY}with mpirun --bind-to none",
        cure="mpirun --bind-to none, or --bind-to numa --map-by numa; srun --cpus-per-task=8 --cpu-bind=cores",
        link=_BINDING,
        look=_shared,
        implies=("cpu-oversubscribed",),
    ),
    Condition(
        id="cpu-quota",
        title="A control group grants fewer CPUs than there are ranks (cpu.max, cfs quota, Kubernetes limits)",
        seen_as=("nr_throttled",),
        detection="cpu.max of the control groups of every rank, or cpu.cfs_quota_us over cpu.cfs_period_us",
        settles="grep throttled /sys/fs/cgroup/cpu.stat, before and after",
        cure="a limit of at least two CPUs a rank: docker run --cpus, resources.limits.cpu of the pod, or none",
        link=_CONTROL_GROUPS,
        look=_quota,
        implies=("cpu-oversubscribed",),
    ),
    Condition(
        id="cpu-oversubscribed",
        title="Ranks wait for a CPU: other programs use the same cores (oversubscription, load above the CPUs)",
        detection=f"/proc/self/schedstat of every rank before and after: {_WAITED_SHARE:.0%} of its time without a CPU",
        settles=f"top, then 1, while it runs; {_LATENCY}when nothing else runs",
        cure="ps -eo pid,psr,pcpu,comm --sort=-pcpu | head, and end or move what else runs there",
        link=_BINDING,
        look=_oversubscribed,
    ),
)
