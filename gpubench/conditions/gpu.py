"""GPUs that are lost, hot, throttled or in use by other jobs, or whose memory is faulty."""

from collections.abc import Callable, Sequence
from functools import partial

from gpubench.conditions.circumstances import Circumstances, Found, Sighting, joined
from gpubench.conditions.condition import Condition, Family, Look, gpu_detector, single_node
from gpubench.model.facts.health import MEMORY_ERRORS, ErrorCounts
from gpubench.model.facts.process import LEAST_CLOCK_SHARE, GpuProcess
from gpubench.model.facts.snapshot import GpuFacts, PciKind, is_workstation_card
from gpubench.model.facts.traffic import IdleGpu, LinkRates, exceeds_idle
from gpubench.model.paths.transport import Confidence
from gpubench.model.results.figures import is_busy
from gpubench.model.terms.units import format_bandwidth, format_time, plural
from gpubench.model.terms.verdict import NO_CURE, Cure

# According to NVML, these reduce the clocks by a factor of 2 or more
_BY_HARDWARE = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake")
_BY_SOFTWARE = ("sw_thermal_slowdown",)
_POWER_CAP = "sw_power_cap"

_LEAST_MARGIN_C = 3  # Must be small, since healthy GPUs at full load run within 10 °C of their slowdown temperature
_USUAL_SLOWDOWN_C = 90  # Used if the driver reports no slowdown temperature. Data centre GPUs slow down at 87 to 98 °C.
_SAME_POWER_SHARE = 0.01  # Tolerance, since power limits are set in whole watts
_LOW_POWER_SHARE = 0.6  # At or below this share of the default power limit, copies become slower


@single_node
def _lost(run: Circumstances) -> Found:
    for position, _, gpu in run.gpus():
        if gpu.lost:
            yield run.gpu_sighting(position, gpu.lost)
    for number, node in run.nodes.items():
        snapshot = node.snapshot
        on_bus = [device.bus_id for device in snapshot.pci_devices if device.kind is PciKind.GPU]
        listed = len(snapshot.gpus) + snapshot.gpus_of_others
        if snapshot.gpus and len(on_bus) > listed:
            missing = joined(bus_id for bus_id in on_bus if bus_id not in {gpu.bus_id for gpu in snapshot.gpus})
            seen = f"{plural(len(on_bus), 'GPU')} on the PCI bus, but {listed} in the driver ({missing} missing)"
            yield run.node_sighting(number, seen)


def _throttled(*harmful: str) -> Look:

    @single_node
    def look(run: Circumstances) -> Found:
        for position, _, gpu in run.gpus():
            then = run.at_work.get(position)
            every = (*(gpu.throttle_reasons or ()), *(then.throttle_reasons if then else ()))
            reasons = [reason for reason in dict.fromkeys(every) if reason in harmful]
            if reasons:
                yield run.gpu_sighting(position, f"clocks lowered: {joined(reasons).replace('_', ' ')}")

    return look


@single_node
def _capped(run: Circumstances) -> Found:
    """Find power caps on unused GPUs with siblings that are not capped. Power caps under load are normal."""
    for position, node, gpu in run.gpus():
        reasons = gpu.throttle_reasons or ()
        unused = gpu.idle is False and gpu.processes == ()
        free = any(other.name == gpu.name and _POWER_CAP not in (other.throttle_reasons or ()) for other in node.gpus)
        if _POWER_CAP in reasons and unused and free and not {*reasons} & {*_BY_HARDWARE, *_BY_SOFTWARE}:
            yield run.gpu_sighting(position, "a power cap lowers the clocks of an unused GPU")


@single_node
def _clocks_held_down(run: Circumstances) -> Found:
    """Find applications clocks below the default, and low clocks under load for which the driver reports no
    throttling.
    """
    for position, _, gpu in run.gpus():
        then, set_to, usual = run.at_work.get(position), gpu.limits.clock_mhz, gpu.limits.default_clock_mhz
        if set_to and usual and set_to < usual:
            of, seen = usual, f"applications clock {set_to} MHz, default {usual}"
        elif then is not None and then.clock_mhz and then.most_clock_mhz and not then.throttle_reasons:
            set_to, of = then.clock_mhz, then.most_clock_mhz
            seen = f"{set_to} of {of} MHz under load, although the driver reports no throttling"
            if set_to >= LEAST_CLOCK_SHARE * of:
                continue
        else:
            continue
        sure = Confidence.PROVEN if set_to <= of / 2 else Confidence.LIKELY
        yield run.gpu_sighting(position, seen, sure, expected=f"{of} MHz")


@single_node
def _power_limited(run: Circumstances) -> Found:
    """Find power limits below the default.

    If all siblings have the same limit, the operator chose it. Copies need little power, so such a limit is a finding
    only if it is low enough to slow them down. Otherwise it only explains slow results.
    """
    for position, node, gpu in run.gpus():
        share, limits = gpu.limits.power_share, gpu.limits
        if share is not None and share < 1.0:
            alike = [other.limits.power_share for other in node.gpus if other.name == gpu.name]
            is_odd = share < max(filter(None, alike)) - _SAME_POWER_SHARE
            sure = Confidence.LIKELY if share <= _LOW_POWER_SHARE else Confidence.WEAK
            seen = f"power limit {limits.power_w:g} W, default {limits.default_power_w:g}"
            expected = "the limit of its siblings" if is_odd else f"{limits.default_power_w:g} W"
            quiet = not is_odd and share > _LOW_POWER_SHARE
            yield run.gpu_sighting(position, seen, sure, expected=expected, quiet=quiet)


def _row_failed(gpu: GpuFacts) -> str:
    rows = gpu.remapped_rows
    if rows is None or not (rows.failure or rows.banks_without_spares):
        return ""
    without = f"{plural(rows.banks_without_spares or 0, 'memory bank')} without a spare row"
    return "a memory row could not be remapped" if rows.failure else without


def _row_pending(gpu: GpuFacts) -> str:
    if gpu.remapped_rows is not None and gpu.remapped_rows.pending and not _row_failed(gpu):
        return "a memory row will be remapped at the next reset"
    return "a memory page will be retired at the next reset" if gpu.retirement_pending else ""


@single_node
def _ecc_off(run: Circumstances) -> Found:
    """Find GPUs with ECC off, if siblings or the profile have ECC on. Workstation cards often have it off."""
    for position, node, gpu in run.gpus():
        profile = run.exact_profile(run.wiring.gpus[position].node)
        sibling = any(other.ecc for other in node.gpus if other.name == gpu.name)
        usual = profile is not None and profile.gpu.ecc is True and not is_workstation_card(gpu)
        if gpu.ecc is False and (sibling or usual):
            reference = "like its siblings" if sibling else "as in the profile"
            yield run.gpu_sighting(position, "ECC is off", expected=f"ECC on, {reference}")


@single_node
def _memory_errors(run: Circumstances) -> Found:
    for position, node, gpu in run.gpus():
        if gpu.memory_errors:
            yield run.gpu_sighting(position, _when(gpu.memory_errors, node.snapshot.errors_grown, gpu.device))


def _when(total: int, grown: ErrorCounts | None, device: str) -> str:
    """Describe when memory errors occurred. Errors from before this run count too, since they may have ended a
    program.
    """
    since = f"{total} {MEMORY_ERRORS} since the driver was loaded"
    if grown is None:
        return f"{since}, at unknown times"
    return f"{since}, {grown.get(device, {}).get(MEMORY_ERRORS, 0)} of them during this run"


@single_node
def _hot(run: Circumstances) -> Found:
    for position, _, gpu in run.gpus():
        margin = gpu.slowdown_margin_c
        if margin is None and gpu.temperature_c is not None:
            margin = _USUAL_SLOWDOWN_C - gpu.temperature_c
        if margin is not None and margin <= _LEAST_MARGIN_C:
            told = "its slowdown temperature" if gpu.slowdown_margin_c is not None else f"{_USUAL_SLOWDOWN_C} °C"
            where = f"{margin} °C below" if margin > 0 else f"{-margin} °C above" if margin < 0 else "at"
            expected = f"more than {_LEAST_MARGIN_C} °C below {told}"
            yield run.gpu_sighting(
                position, f"{gpu.temperature_c} °C, {where} {told}", Confidence.WEAK, expected=expected
            )


_SMI = "https://docs.nvidia.com/deploy/nvidia-smi/index.html"

GPU = Family.of(
    "gpu",
    "GPUs",
    Condition(
        id="gpu-lost",
        title="GPU has fallen off the bus (Xid 79), GPU is lost",
        check="gpu_present",
        expected="a GPU that answers",
        likely="the GPU fell off the bus (Xid 79): power, temperature, a PCIe fault, or a failed GPU",
        command="dmesg | grep Xid",
        comment="Reboot or power-cycle the node. If the GPU stays lost, replace it.",
        link="https://docs.nvidia.com/deploy/xid-errors/index.html",
        look=_lost,
        implies=("gpu-missing",),
    ),
    Condition(
        id="gpu-hw-slowdown",
        title="GPU clocks are throttled by the hardware (HW Slowdown, HW Thermal Slowdown, HW Power Brake)",
        settles="nvidia-smi -q -d PERFORMANCE,TEMPERATURE",
        check="throttle",
        expected="no slowdown because of heat or power",
        likely="insufficient cooling, or the power supply's brake signal",
        command="nvidia-smi -q -d PERFORMANCE,TEMPERATURE",
        comment="Then check the cooling, or the power supply if its brake signal is on.",
        link="https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html",
        look=_throttled(*_BY_HARDWARE),
        aliases=("gpu-throttled",),
    ),
    Condition(
        id="gpu-throttled",
        title="GPU clocks are throttled by the driver because of heat (SW Thermal Slowdown)",
        settles="nvidia-smi -q -d PERFORMANCE,TEMPERATURE",
        check="throttle",
        expected="no slowdown because of heat",
        likely="insufficient cooling: a fan, a cold plate, or a blocked duct",
        command="nvidia-smi -q -d PERFORMANCE,TEMPERATURE",
        comment="Then check the cooling.",
        link="https://github.com/NVIDIA/NVSentinel/issues/890",
        look=_throttled(*_BY_SOFTWARE),
    ),
    Condition(
        id="clocks-capped",
        title="A power cap lowers the clocks of an unused GPU (SW Power Cap)",
        settles="nvidia-smi -q -d PERFORMANCE,POWER -i GPU",
        check="throttle",
        expected="no power cap, like its siblings",
        likely="a low power limit, or a failed power supply",
        command="nvidia-smi -q -d PERFORMANCE,POWER -i GPU",
        link="https://github.com/l4rz/reverse-engineering-dell-idrac-to-get-rid-of-gpu-throttling/issues/3",
        look=_capped,
    ),
    Condition(
        id="clocks-held-down",
        title="GPU clocks are set low: applications clocks (nvidia-smi -ac) or locked clocks (nvidia-smi -lgc)",
        settles="`nvidia-smi -q -d CLOCK -i GPU` under load",
        check="clocks",
        likely="clocks set on purpose, for repeatable results or to save power",
        command=("nvidia-smi -rac -i GPU", "nvidia-smi -rgc -i GPU"),
        comment="Run both as root.",
        link="https://github.com/NVIDIA/nccl/issues/1551",
        look=_clocks_held_down,
    ),
    Condition(
        id="power-limited",
        title="A GPU's power limit is below its default (nvidia-smi -pl, power capping)",
        settles="`nvidia-smi -q -d POWER,PERFORMANCE -i GPU` under load",
        check="clocks",
        likely="a limit set on purpose, or power capping by the data centre",
        command="nvidia-smi -q -d POWER -i GPU",
        comment="Then, as root, set the default power limit with nvidia-smi -pl.",
        link="https://github.com/facebookexperimental/triton/pull/2023",
        look=_power_limited,
    ),
    Condition(
        id="row-remap-failed",
        title="Row remapping failed: no spare memory row is left (uncorrectable ECC errors)",
        settles="nvidia-smi -q -d ROW_REMAPPER",
        check="memory_rows",
        expected="no failed row remapping, and spare rows in every bank",
        likely="uncorrectable memory errors, and no spare row left",
        command="nvidia-smi -q -d ROW_REMAPPER -i GPU",
        comment="Replace the GPU (RMA).",
        link="https://github.com/aws/eks-node-monitoring-agent/issues/245",
        look=gpu_detector(_row_failed, Confidence.WEAK),
        aliases=("memory-rows-pending",),
    ),
    Condition(
        id="row-remap-pending",
        title="Row remapping or page retirement is pending until the next reset (uncorrectable ECC error)",
        settles="nvidia-smi -q -d ROW_REMAPPER,PAGE_RETIREMENT",
        check="memory_rows",
        expected="no pending row remapping or page retirement",
        likely="an uncorrectable memory error since the last reset",
        command="nvidia-smi --gpu-reset -i GPU",
        comment="Run it while the GPU is idle, or reboot.",
        link="https://github.com/NVIDIA/DCGM/issues/198",
        look=gpu_detector(_row_pending, Confidence.WEAK),
        aliases=("memory-rows-pending", "page-retirement-pending"),
    ),
    Condition(
        id="ecc-off",
        title="ECC is disabled on a GPU",
        check="ecc",
        likely="ECC was switched off on purpose",
        command="nvidia-smi -e 1 -i GPU",
        comment="Then reboot.",
        link="https://github.com/converged-computing/performance-study/issues/61",
        look=_ecc_off,
    ),
    Condition(
        id="memory-errors",
        title="Uncorrectable ECC memory errors",
        check="ecc",
        likely="a failing memory cell, or a one-time error caused by radiation",
        command="nvidia-smi --gpu-reset -i GPU",
        comment="Run it while the GPU is idle. `nvidia-smi -q -d ECC,ROW_REMAPPER` shows the errors.",
        link="https://github.com/NVIDIA/k8s-device-plugin/issues/243",
        look=_memory_errors,
    ),
    Condition(
        id="gpu-hot",
        title="A GPU is near its slowdown temperature",
        settles="`nvidia-smi -q -d TEMPERATURE,PERFORMANCE -i GPU` under load",
        check="temperature",
        likely="a fan, a cold plate or its paste, or a blocked duct",
        command="nvidia-smi -q -d TEMPERATURE,PERFORMANCE -i GPU",
        link="https://github.com/noonghunna/club-3090/issues/178",
        look=_hot,
    ),
    link=_SMI,
)

# Memory use below the larger of these is normal, since the driver and a CUDA context need 0.5 to 1.5 GiB
_MOST_USED_SHARE, _MOST_USED_BYTES = 0.02, 2 * 2**30
# Share of an operation's time that the host needs to issue it. For healthy small operations, it is 5.3 to 6.7 of 8.8
# µs.
_HOST_BOUND_SHARE = 0.9
_IDLE = "while this job is idle"
_UNSEEN = "a process that is not visible here"


def _foreign(link: str, rates_of: Callable[[LinkRates], tuple[float | None, float | None]]) -> Look:

    def look(run: Circumstances) -> Found:
        for position, gpu in run.idle_gpus.items():
            sent, received = rates_of(gpu.rates)
            words = [f"sends {format_bandwidth(sent, 3)}"] if sent is not None and exceeds_idle(sent) else []
            words += (
                [f"receives {format_bandwidth(received, 3)}"] if received is not None and exceeds_idle(received) else []
            )
            if words:
                seen = f"{run.gpu_name(position)} {' and '.join(words)} over {link} {_IDLE}"
                seen += f" (used by {_named(gpu.use.users)})" if gpu.use.users else ""
                yield run.gpu_sighting(position, seen, cure=_cure(gpu.use.users))

    return look


def _foreign_nvlink(run: Circumstances) -> Found:
    """Find NVLink traffic while this job is idle, or NVLink counters that moved further than this job's traffic can
    explain.
    """
    found = list(_foreign("NVLink", lambda rates: (rates.nvlink_sent, rates.nvlink_received))(run))
    yield from found
    seen = {gpu for result in found if isinstance(result, Sighting) for gpu in result.gpus or ()}
    for position, times in run.beyond.items():
        if position not in seen:
            moved = (
                f"{run.gpu_name(position)}'s NVLink counters show {times:.2g} times as much traffic as this "
                "job can cause"
            )
            yield run.gpu_sighting(position, moved)


def _cure(users: Sequence[GpuProcess]) -> Cure:
    if not users:
        return NO_CURE
    pids = ",".join(str(user.pid) for user in users)
    return Cure.of(f"ps -o pid,user,args -p {pids}", comment=f"End {_named(users)}, or measure after it has ended.")


def _named(users: Sequence[GpuProcess]) -> str:
    held = ((user.label, user.memory_bytes) for user in users)
    return ", ".join(label + (f", {size / 2**30:.1f} GiB" if size else "") for label, size in held)


@single_node
def _find_used_gpus(run: Circumstances) -> Found:
    for position, _, gpu in run.gpus():
        idle = run.idle_gpus.get(position)
        if idle is not None:
            yield from _used_while_idle(run, position, idle)
        else:
            node = run.wiring.gpus[position].node
            own = {fact.pid for fact in run.facts if fact.node == node}
            others = [
                process for process in gpu.processes or () if process.pid not in own and not process.is_mps_server
            ]
            if others and is_busy(gpu):
                yield run.gpu_sighting(position, f"in use by {', '.join(other.label for other in others)}")


def _used_while_idle(run: Circumstances, position: int, gpu: IdleGpu) -> Found:
    """Find other processes that use a GPU while this job is idle.

    The confidence is proven if the GPU is busy, likely if there is traffic on its links, and weak if a process only has
    the GPU open.
    """
    use, name = gpu.use, run.gpu_name(position)
    if use.is_busy:
        by = _named(use.users) or _UNSEEN
        seen = f"{name} is in use by {by}: {use.utilization_percent} % busy {_IDLE}"
        yield run.gpu_sighting(position, seen, cure=_cure(use.users))
    elif use.users:
        rates = gpu.rates
        moved = any(map(exceeds_idle, (rates.nvlink_sent, rates.nvlink_received, rates.pcie_sent, rates.pcie_received)))
        sure = Confidence.LIKELY if moved else Confidence.WEAK
        did = "its links carry traffic of another job" if moved else "the GPU was idle"
        yield run.gpu_sighting(position, f"{name} is used by {_named(use.users)}: {did}", sure, cure=_cure(use.users))


@single_node
def _memory_kept(run: Circumstances) -> Found:
    """Find GPU memory in use before this job opened the GPU, if no visible process accounts for it."""
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
        if gpu.memory_bytes and used > max(_MOST_USED_BYTES, _MOST_USED_SHARE * gpu.memory_bytes) and not users:
            yield run.gpu_sighting(position, f"{used / 2**30:.1f} GiB in use, but no process is visible", sure)


def _host_bound(run: Circumstances) -> Found:
    bound = [row for row in run.issued if row.issue_us >= _HOST_BOUND_SHARE * row.time_us]
    if bound:
        worst = max(bound, key=lambda row: row.time_us)
        more = f" (also in {plural(len(bound) - 1, 'more row')})" if len(bound) > 1 else ""
        seen = (
            f"{worst.label} takes {format_time(worst.time_us)}, and the host needs {format_time(worst.issue_us)} "
            f"to issue it{more}"
        )
        gpus = frozenset(range(len(run.wiring.gpus)))
        yield Sighting(subject="the host", seen=seen, gpus=gpus)


_used_by_somebody = partial(
    Condition,
    check="gpu_free",
    likely="a job that is still running, or a job in another container, whose processes are not visible here",
    settles="nvidia-smi pmon -s um",
    command="fuser -v /dev/nvidia*",
)


def _foreign_traffic(id_: str, link: str, look: Look) -> Condition:
    return Condition(
        id=id_,
        title=f"Another job's traffic uses a GPU's {link} while this job is idle",
        settles="gpubench watch",
        command="gpubench watch",
        comment="It shows the process. End it, or measure when the machine is idle.",
        look=look,
        implies=("gpu-in-use",),
    )


CONTENTION = Family.of(
    "contention",
    "Contention",
    _foreign_traffic("foreign-nvlink-traffic", "NVLinks", _foreign_nvlink),
    _foreign_traffic(
        "foreign-pcie-traffic", "PCIe link", _foreign("PCIe", lambda rates: (rates.pcie_sent, rates.pcie_received))
    ),
    _used_by_somebody(
        id="gpu-in-use", title="A GPU is in use by another process", expected="no other process", look=_find_used_gpus
    ),
    _used_by_somebody(
        id="memory-in-use",
        title="GPU memory is in use although no process is shown (nvidia-smi: No running processes found)",
        expected="free memory",
        look=_memory_kept,
    ),
    Condition(
        id="host-bound",
        title="The host is too slow to launch operations: issuing them takes as long as running them",
        settles="perf top; nsys profile --trace=osrt,cuda",
        command="gpubench allreduce --graph 10",
        comment="To speed up the host, give each rank a free core and run without tracing.",
        link="https://github.com/vllm-project/vllm/pull/26",
        look=_host_bound,
        general=True,
    ),
    link="https://docs.nvidia.com/deploy/nvidia-smi/index.html",
)
