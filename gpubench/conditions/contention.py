"""Contention: GPUs, links and hosts that others use, or that are too busy for this job."""

from collections.abc import Callable, Sequence

from gpubench.conditions.definition.circumstances import Circumstances
from gpubench.conditions.definition.condition import Condition, Family, Found, Look, Sighting, in_each_node
from gpubench.conditions.definition.sightings import of_gpu
from gpubench.model.facts.gpu_process import GpuProcess
from gpubench.model.facts.idle_gpu import BUSY_PERCENT, FOREIGN_GB_S, IdleGpu, LinkRates, is_foreign
from gpubench.model.facts.snapshot import GpuFacts
from gpubench.model.paths.evidence import Confidence
from gpubench.model.results.measured_copies import is_busy
from gpubench.model.terms.units import counted

_MOST_USED_SHARE = 0.02
"""Of the memory of a GPU that nobody uses; the driver's own part is not counted as used."""

_HOST_BOUND_SHARE = 0.9
"""Of an operation's time that the host takes to issue it. Healthy small operations take 5.3 to 6.7 of 8.8 µs."""

_IDLE = "while this job is idle"
_UNSEEN = "a process that is not visible here"


def _foreign(link: str, rates_of: Callable[[LinkRates], tuple[float | None, float | None]]) -> Look:
    """Traffic over links of one kind that is not this job's, by what GPUs send and receive of it."""

    def look(run: Circumstances) -> Found:
        for position, gpu in run.idle_gpus.items():
            sent, received = rates_of(gpu.rates)
            words = [f"sends {sent:.3g}"] if sent is not None and is_foreign(sent) else []
            words += [f"receives {received:.3g}"] if received is not None and is_foreign(received) else []
            if words:
                seen = f"{run.name(position)} {' and '.join(words)} GB/s over {link} {_IDLE}"
                yield of_gpu(run, position, seen + _there(gpu.use.users), cure=_cure(gpu.use.users))

    return look


def _foreign_nvlink(run: Circumstances) -> Found:
    """The same, and counters that moved by more than this job can have moved, where nothing was seen of a GPU idle."""
    found = list(_foreign("NVLink", lambda rates: (rates.nvlink_sent, rates.nvlink_received))(run))
    yield from found
    seen = {gpu for each in found if isinstance(each, Sighting) for gpu in each.gpus or ()}
    for position, times in run.beyond.items():
        if position not in seen:
            moved = f"the NVLink counters of {run.name(position)} moved by {times:.2g} times what this job can move"
            yield of_gpu(run, position, moved)


def _there(users: Sequence[GpuProcess]) -> str:
    return f" (on it: {_named(users)})" if users else ""


def _cure(users: Sequence[GpuProcess]) -> str:
    return f"end {_named(users)}, or measure when it is done" if users else ""


def _named(users: Sequence[GpuProcess]) -> str:
    held = ((each, each.memory_bytes) for each in users)
    return ", ".join(each.label + (f", {size / 2**30:.1f} GiB" if size else "") for each, size in held)


@in_each_node
def _in_use(run: Circumstances) -> Found:
    """As GPUs were while this job was idle; where nobody looked then, as the machine was read."""
    for position, _, gpu in run.gpus():
        idle = run.idle_gpus.get(position)
        if idle is not None:
            yield from _used_while_idle(run, position, idle)
        else:
            others = _others(run, position, gpu)
            if others and is_busy(gpu):
                yield of_gpu(run, position, f"in use by {', '.join(each.label for each in others)}")


def _used_while_idle(run: Circumstances, position: int, gpu: IdleGpu) -> Found:
    """A process that computes is proven to be in the way, one on a GPU with traffic likely, one that sleeps may be."""
    use, name = gpu.use, run.name(position)
    if use.is_busy:
        by = _named(use.users) or _UNSEEN
        seen = f"{name} is in use by {by}: {use.utilization_percent} % busy {_IDLE}"
        yield of_gpu(run, position, seen, cure=_cure(use.users))
    elif use.users:
        rates = gpu.rates
        moved = any(map(is_foreign, (rates.nvlink_sent, rates.nvlink_received, rates.pcie_sent, rates.pcie_received)))
        sure = Confidence.LIKELY if moved else Confidence.WEAK
        did = "its links carry what is not this job's" if moved else "idle when it was looked at"
        yield of_gpu(run, position, f"{name} is open to {_named(use.users)}: {did}", sure, cure=_cure(use.users))


def _others(run: Circumstances, position: int, gpu: GpuFacts) -> list[GpuProcess]:
    """The processes on a GPU that are no rank of this job, and work: an MPS server does not."""
    node = run.wiring.gpus[position].node
    own = {each.pid for each in run.facts if each.node == node}
    return [each for each in gpu.processes or () if each.pid not in own and not each.is_mps_server]


@in_each_node
def _memory_kept(run: Circumstances) -> Found:
    """Memory that somebody held before this job opened the GPU; where paths were measured, it holds some itself."""
    for position, _, gpu in run.gpus():
        idle = run.idle_gpus.get(position)
        if idle is not None:
            used, users = idle.use.held_bytes or 0, len(idle.use.users)
            sure = Confidence.WEAK
        else:
            used, users = gpu.memory_used_bytes or 0, len(gpu.processes or ())
            sure = Confidence.PROVEN
            if run.staged is not None:
                continue
        if gpu.memory_bytes and used > _MOST_USED_SHARE * gpu.memory_bytes and not users:
            yield of_gpu(run, position, f"{used / 2**30:.1f} GiB in use, and no process is seen", sure)


def _host_bound(run: Circumstances) -> Found:
    """Rows of which the host needs nearly all the time to issue their operations."""
    bound = [each for each in run.issued if each.issue_us >= _HOST_BOUND_SHARE * each.time_us]
    if bound:
        worst = max(bound, key=lambda each: each.time_us)
        more = f", as of {counted(len(bound) - 1, 'more row')}" if len(bound) > 1 else ""
        seen = f"the host takes {worst.issue_us:.3g} of the {worst.time_us:.3g} µs of {worst.label} to issue it{more}"
        gpus = frozenset(range(len(run.wiring.gpus)))
        yield Sighting(subject="the host", seen=seen, gpus=gpus)


def _used_by_somebody(id_: str, title: str, detection: str, expected: str, look: Look) -> Condition:
    return Condition(
        id=id_,
        title=title,
        detection=detection,
        check="gpu_free",
        expected=expected,
        likely="a job that was not ended, or one in another container, whose processes are not visible here",
        settles="nvidia-smi pmon -s um",
        cure="nvidia-smi; fuser -v /dev/nvidia*",
        look=look,
    )


def _foreign_traffic(id_: str, link: str, detection: str, look: Look) -> Condition:
    return Condition(
        id=id_,
        title=f"Somebody else's traffic passes a GPU's {link} while this job is idle",
        detection=detection,
        settles="gpubench watch",
        cure="find out who: nvidia-smi, gpubench watch; end it, or measure when the machine is idle",
        look=look,
        implies=("gpu-in-use",),
    )


CONTENTION = Family.of(
    "contention",
    "Contention",
    _foreign_traffic(
        "foreign-nvlink-traffic",
        "NVLinks",
        f"NVML's NVLink byte counters over 20 ms before the first operation and after the last: {FOREIGN_GB_S:g} GB/s; "
        "counters that move by more than any algorithm sends",
        _foreign_nvlink,
    ),
    _foreign_traffic(
        "foreign-pcie-traffic",
        "PCIe link",
        f"NVML's PCIe byte counters over 20 ms before the first operation and after the last: {FOREIGN_GB_S:g} GB/s",
        _foreign("PCIe", lambda rates: (rates.pcie_sent, rates.pcie_received)),
    ),
    _used_by_somebody(
        "gpu-in-use",
        "A GPU is in use by another process",
        "processes that NVML lists on a GPU that is not idle, but this job's; what is measured there is not judged; "
        f"beside a measurement, {BUSY_PERCENT} % utilization while this job is idle",
        "nobody",
        _in_use,
    ),
    _used_by_somebody(
        "memory-in-use",
        "GPU memory is used although no process is shown (nvidia-smi: No running processes found)",
        f"more than {_MOST_USED_SHARE:.0%} of a GPU's memory, and no process",
        "free memory",
        _memory_kept,
    ),
    Condition(
        id="host-bound",
        title="The host is too slow to launch operations: issuing them takes as long as they do",
        detection=f"slow rows of which the host needs {_HOST_BOUND_SHARE:.0%} of the time to issue them",
        settles="perf top; nsys profile --trace=osrt,cuda",
        cure="free the cores of the ranks: no tracing, no other jobs, one core a rank and more; or --graph 10",
        look=_host_bound,
        general=True,
    ),
    link="https://docs.nvidia.com/deploy/nvidia-smi/index.html",
)
