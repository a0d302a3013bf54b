"""GPUs by themselves: lost, hot, slowed down, with memory that wears out or is not corrected."""

from collections import Counter
from statistics import median

from gpubench.conditions.definition.circumstances import Circumstances
from gpubench.conditions.definition.condition import Condition, Family, Found, Look, in_each_node, joined
from gpubench.conditions.definition.sightings import of_every_gpu, of_gpu
from gpubench.model.facts.error_counts import MEMORY_ERRORS, ErrorCounts
from gpubench.model.facts.gpu_condition import LEAST_CLOCK_SHARE
from gpubench.model.facts.snapshot import GpuFacts
from gpubench.model.paths.evidence import Confidence

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
