"""GPUs that are lost, hot, slowed down, have faulty memory, or are in use by other jobs."""

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

from gpubench.conditions.definition.circumstances import Circumstances
from gpubench.conditions.definition.condition import (
    Condition,
    Family,
    Found,
    Look,
    Sighting,
    in_each_node,
    joined,
    of_every_gpu,
    of_gpu,
)
from gpubench.model.facts.gpu_use import LEAST_CLOCK_SHARE, GpuProcess
from gpubench.model.facts.health import MEMORY_ERRORS, ErrorCounts
from gpubench.model.facts.snapshot import GpuFacts
from gpubench.model.facts.traffic import BUSY_PERCENT, FOREIGN_GB_S, IdleGpu, LinkRates, is_foreign
from gpubench.model.paths.evidence import Confidence
from gpubench.model.results.figures import is_busy
from gpubench.model.terms.units import counted

_BY_HARDWARE = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake")
"""Reasons for which the hardware divides its clocks by two or more (NVML, clocks event reasons)."""

_BY_SOFTWARE = ("sw_thermal_slowdown",)
_POWER_CAP, _SYNC_BOOST = "sw_power_cap", "sync_boost"

_MOST_ABOVE_SIBLINGS_C = 20
"""Idle GPUs of one server differ by some 10 °C from the first to the last in the air."""

_HOT_C = 85
"""Below the slowdown of data centre GPUs, 87 to 93 °C (nvidia-smi -q -d TEMPERATURE)."""

_LOW_POWER_SHARE = 0.6
"""Of the default limit."""


def _throttled(*harmful: str) -> Look:
    """As its node was read, and as it was at work for a rank."""

    @in_each_node
    def look(run: Circumstances) -> Found:
        for position, _, gpu in run.gpus():
            then = run.at_work.get(position)
            every = (*(gpu.throttle_reasons or ()), *(then.throttle_reasons if then else ()))
            reasons = [reason for reason in dict.fromkeys(every) if reason in harmful]
            if reasons:
                yield of_gpu(run, position, f"clocks are lowered: {joined(reasons).replace('_', ' ')}")

    return look


@in_each_node
def _held_back(run: Circumstances) -> Found:
    """A power cap is how a busy GPU runs: it means trouble where no process uses the GPU. A sync boost group means that
    one slow GPU of the group slows the others.
    """
    for position, _, gpu in run.gpus():
        reasons = gpu.throttle_reasons or ()
        if _SYNC_BOOST in reasons:
            expected, likely = "clocks of its own", "a group of GPUs that run at one clock: dcgmi or nvidia-smi set it"
            yield of_gpu(
                run, position, "clocks are held to those of a sync boost group", expected=expected, likely=likely
            )
        elif _POWER_CAP in reasons and gpu.processes == () and not {*reasons} & {*_BY_HARDWARE, *_BY_SOFTWARE}:
            expected, likely = "a power cap at work alone", "a low power limit, or a power supply that has failed"
            yield of_gpu(
                run, position, "a power cap lowers its clocks, and no process uses it", expected=expected, likely=likely
            )


@in_each_node
def _clocks_held_down(run: Circumstances) -> Found:
    """Clocks that somebody set below the driver's, and those at work that nothing the driver tells of holds down."""
    for position, _, gpu in run.gpus():
        then, set_to, usual = run.at_work.get(position), gpu.limits.clock_mhz, gpu.limits.default_clock_mhz
        if set_to and usual and set_to < usual:
            of, seen = usual, f"applications clock {set_to} MHz, {usual} by default"
        elif then is not None and then.clock_mhz and then.most_clock_mhz and not then.throttle_reasons:
            set_to, of = then.clock_mhz, then.most_clock_mhz
            seen = f"{set_to} of {of} MHz at work, and the driver throttles nothing"
            if set_to >= LEAST_CLOCK_SHARE * of:
                continue
        else:
            continue
        sure = Confidence.PROVEN if set_to <= of / 2 else Confidence.LIKELY
        yield of_gpu(run, position, seen, sure, expected=f"{of} MHz")


@in_each_node
def _power_limited(run: Circumstances) -> Found:
    """Copies need little power: only a low limit is likely to slow them down."""
    for position, _, gpu in run.gpus():
        limit, usual = gpu.limits.power_w, gpu.limits.default_power_w
        if limit and usual and limit < usual:
            sure = Confidence.LIKELY if limit <= _LOW_POWER_SHARE * usual else Confidence.WEAK
            seen = f"power limit {limit:g} W, {usual:g} by default"
            yield of_gpu(run, position, seen, sure, expected=f"{usual:g} W")


def _row(*, failed: bool) -> Look:
    """Of rows that wait for a reset, or could not be remapped, which is said alone. It slows down what uses them."""
    seen = "a memory row could not be remapped" if failed else "a memory row waits to be remapped"

    def found(gpu: GpuFacts) -> str:
        rows = gpu.remapped_rows
        return seen if rows is not None and (rows.failure if failed else rows.pending and not rows.failure) else ""

    return of_every_gpu(found, Confidence.WEAK)


@in_each_node
def _ecc_off(run: Circumstances) -> Found:
    """Off where the profile or a sibling has it on."""
    for position, node, gpu in run.gpus():
        profile = run.exact_profile(run.wiring.gpus[position].node)
        sibling = any(other.ecc for other in node.gpus if other.name == gpu.name)
        if gpu.ecc is False and (sibling or (profile is not None and profile.gpu.ecc is True)):
            has_it = "its siblings have it" if sibling else "the profile has it"
            yield of_gpu(run, position, "ECC is off", expected=f"ECC on, as {has_it}")


@in_each_node
def _memory_errors(run: Circumstances) -> Found:
    for position, node, gpu in run.gpus():
        if gpu.memory_errors:
            yield of_gpu(run, position, _when(gpu.memory_errors, node.snapshot.errors_grown, gpu.device))


def _when(total: int, grown: ErrorCounts | None, device: str) -> str:
    """A total, and what of it came during the run: each of them may have stopped a program, so old ones count too."""
    since = f"{total} {MEMORY_ERRORS} since the driver was loaded"
    if grown is None:
        return f"{since}, when is not known"
    return f"{since}, {grown.get(device, {}).get(MEMORY_ERRORS, 0)} of them during this run"


def _low_clocks(run: Circumstances) -> Found:
    """Another highest clock than GPUs of the same model have, over all nodes."""
    every = [gpu for _, _, gpu in run.gpus() if gpu.most_clock_mhz]
    by_model = {
        name: Counter(gpu.most_clock_mhz for gpu in every if gpu.name == name) for name in {g.name for g in every}
    }
    usual = {name: max(clocks, key=lambda mhz: (clocks[mhz], mhz or 0)) or 0 for name, clocks in by_model.items()}
    for position, _, gpu in run.gpus():
        if gpu.most_clock_mhz and gpu.most_clock_mhz < usual[gpu.name]:
            expected = f"{usual[gpu.name]} MHz, as GPUs of its model have"
            yield of_gpu(run, position, f"at most {gpu.most_clock_mhz} MHz", Confidence.LIKELY, expected=expected)


@in_each_node
def _hot(run: Circumstances) -> Found:
    """Far above the middle of its siblings, or near its slowdown."""
    for position, node, gpu in run.gpus():
        if gpu.temperature_c is None:
            continue
        others = [each.temperature_c for each in node.gpus if each.temperature_c is not None and each is not gpu]
        usual = median(others) if others else gpu.temperature_c
        above = gpu.temperature_c - usual
        if above > _MOST_ABOVE_SIBLINGS_C or gpu.temperature_c >= _HOT_C:
            expected = f"about {usual:g} °C, as its siblings have" if above > 0 else f"below {_HOT_C} °C"
            yield of_gpu(run, position, f"{gpu.temperature_c} °C", Confidence.WEAK, expected=expected)


_MEMORY = "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html"
_SMI = "https://docs.nvidia.com/deploy/nvidia-smi/index.html"


GPU = Family.of(
    "gpu",
    "GPUs",
    Condition(
        id="gpu-lost",
        title="GPU has fallen off the bus (Xid 79), GPU is lost",
        detection="NVML's answer for every GPU",
        check="gpu_present",
        expected="a GPU that answers",
        likely="it fell off the bus (Xid 79): power, temperature, a PCIe fault, or a failed GPU",
        cure="dmesg | grep Xid; a reboot or power cycle brings it back, or it has to be replaced",
        link="https://docs.nvidia.com/deploy/xid-errors/index.html",
        look=of_every_gpu(lambda gpu: gpu.lost),
    ),
    Condition(
        id="gpu-hw-slowdown",
        title="GPU clocks are throttled by the hardware (HW Slowdown, HW Thermal Slowdown, HW Power Brake)",
        seen_as=("HW Slowdown : Active", "HW Thermal Slowdown : Active", "HW Power Brake Slowdown : Active"),
        detection="nvmlDeviceGetCurrentClocksEventReasons: clocks are divided by two or more",
        settles="nvidia-smi -q -d PERFORMANCE,TEMPERATURE",
        check="throttle",
        expected="no slowdown by heat or power",
        likely="cooling, or the power supply's brake signal",
        cure="nvidia-smi -q -d PERFORMANCE,TEMPERATURE; then cooling, or the power supply whose brake signal is on",
        link="https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html",
        look=_throttled(*_BY_HARDWARE),
        aliases=("gpu-throttled",),
    ),
    Condition(
        id="gpu-throttled",
        title="GPU clocks are throttled by the driver for heat (SW Thermal Slowdown)",
        seen_as=("SW Thermal Slowdown : Active",),
        detection="nvmlDeviceGetCurrentClocksEventReasons: the driver lowers clocks for heat",
        settles="nvidia-smi -q -d PERFORMANCE,TEMPERATURE",
        check="throttle",
        expected="no slowdown by heat",
        likely="cooling: a fan, a cold plate, a blocked duct",
        cure="nvidia-smi -q -d PERFORMANCE,TEMPERATURE; then cooling",
        link="https://github.com/NVIDIA/NVSentinel/issues/890",
        look=_throttled(*_BY_SOFTWARE),
    ),
    Condition(
        id="clocks-capped",
        title="A GPU's clocks are capped by power while it idles, or held to those of a sync boost group",
        seen_as=("SW Power Cap : Active", "Sync Boost : Active"),
        detection="nvmlDeviceGetCurrentClocksEventReasons; a power cap only where no process uses the GPU",
        settles="nvidia-smi -q -d PERFORMANCE,POWER -i GPU",
        check="throttle",
        cure="nvidia-smi -q -d PERFORMANCE,POWER -i GPU",
        look=_held_back,
    ),
    Condition(
        id="clocks-held-down",
        title="GPU clocks are set low: applications clocks (nvidia-smi -ac) or locked clocks (nvidia-smi -lgc)",
        seen_as=("Applications Clocks Setting : Active",),
        detection="nvmlDeviceGetApplicationsClock against nvmlDeviceGetDefaultApplicationsClock; the clock right after "
        f"operations below {LEAST_CLOCK_SHARE:.0%} of the highest, with no reason of the driver's",
        settles="nvidia-smi -q -d CLOCK -i GPU, while it works",
        check="clocks",
        likely="somebody set them, for even results or to save power",
        cure="nvidia-smi -rac -i GPU; nvidia-smi -rgc -i GPU, as root",
        look=_clocks_held_down,
    ),
    Condition(
        id="power-limited",
        title="A GPU's power limit is below its default (nvidia-smi -pl, power capping)",
        seen_as=("SW Power Cap : Active",),
        detection="nvmlDeviceGetPowerManagementLimit against nvmlDeviceGetPowerManagementDefaultLimit; weak above "
        f"{_LOW_POWER_SHARE:.0%} of it",
        settles="nvidia-smi -q -d POWER,PERFORMANCE -i GPU, while it works",
        check="clocks",
        likely="somebody set it, or the data centre caps its power",
        cure="nvidia-smi -q -d POWER -i GPU; then nvidia-smi -pl with its default power limit, as root",
        look=_power_limited,
    ),
    Condition(
        id="row-remap-failed",
        title="Row remapping failed: no spare memory row is left (uncorrectable ECC errors)",
        seen_as=("Remapping Failure Occurred : Yes", "Xid 64"),
        detection="nvmlDeviceGetRemappedRows",
        settles="nvidia-smi -q -d ROW_REMAPPER",
        check="memory_rows",
        expected="no row pending or failed",
        likely="uncorrectable memory errors, and no spare row left",
        cure="replace the GPU (RMA)",
        link=_MEMORY,
        look=_row(failed=True),
        aliases=("memory-rows-pending",),
    ),
    Condition(
        id="row-remap-pending",
        title="Row remapping pending: a memory row is replaced at the next reset (uncorrectable ECC error)",
        seen_as=("Pending : Yes", "Xid 63"),
        detection="nvmlDeviceGetRemappedRows",
        settles="nvidia-smi -q -d ROW_REMAPPER",
        check="memory_rows",
        expected="no row pending or failed",
        likely="an uncorrectable memory error since the last reset",
        cure="nvidia-smi --gpu-reset -i GPU, when nobody uses it, or reboot",
        link="https://github.com/NVIDIA/DCGM/issues/198",
        look=_row(failed=False),
        aliases=("memory-rows-pending",),
    ),
    Condition(
        id="page-retirement-pending",
        title="Page retirement pending: a memory page is retired at the next reset (double bit ECC error)",
        detection="nvmlDeviceGetRetiredPagesPendingStatus",
        check="memory_rows",
        likely="memory errors since the last reset",
        cure="nvidia-smi -q -d PAGE_RETIREMENT; nvidia-smi --gpu-reset -i GPU, when nobody uses it",
        link="https://docs.nvidia.com/deploy/dynamic-page-retirement/index.html",
        look=of_every_gpu(lambda gpu: "a memory page waits to be retired" if gpu.retirement_pending else ""),
    ),
    Condition(
        id="ecc-off",
        title="ECC is disabled on a GPU",
        detection="nvmlDeviceGetEccMode against siblings and the profile",
        check="ecc",
        likely="somebody switched it off",
        cure="nvidia-smi -e 1 -i GPU, then reboot",
        look=_ecc_off,
    ),
    Condition(
        id="memory-errors",
        title="Uncorrectable ECC memory errors",
        detection="nvmlDeviceGetTotalEccErrors, uncorrected and volatile; what came during the run",
        check="ecc",
        likely="a cell of its memory fails, or a particle hit it once",
        cure="nvidia-smi -q -d ECC,ROW_REMAPPER; nvidia-smi --gpu-reset -i GPU, when nobody uses it",
        link=_MEMORY,
        look=_memory_errors,
    ),
    Condition(
        id="clock-limited",
        title="A GPU's highest clock is below that of others of its model",
        detection="nvmlDeviceGetMaxClockInfo of GPUs of one model, over all nodes",
        settles="nvidia-smi -q -d CLOCK -i GPU, while it works",
        check="clocks",
        likely="another VBIOS or power limit",
        cure="nvidia-smi -q -d CLOCK,POWER -i GPU; nvidia-smi -q | grep VBIOS",
        look=_low_clocks,
    ),
    Condition(
        id="gpu-hot",
        title="A GPU is much hotter than its siblings, or near its slowdown temperature",
        settles="nvidia-smi -q -d TEMPERATURE,PERFORMANCE -i GPU, while it works",
        detection=f"more than {_MOST_ABOVE_SIBLINGS_C} °C above the middle of its siblings, or {_HOT_C} °C",
        check="temperature",
        likely="a fan, a cold plate or its paste, a blocked duct; or it alone is at work",
        cure="nvidia-smi -q -d TEMPERATURE,PERFORMANCE -i GPU",
        look=_hot,
    ),
    link=_SMI,
)


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
