"""Measure KV-cache transfers between two processes on this machine, or simulate them."""

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from gpubench.backends.kv_pair import ProcessTransfers
from gpubench.backends.nixl_agent import is_nixl_installed
from gpubench.backends.transfer_libraries import read_ucx_version, ucx_copies, ucx_transports
from gpubench.errors import CouldNotMeasureError, UsageError, no_gpu
from gpubench.jobs import runner
from gpubench.jobs.kv_plan import Isolate, KvPlan, Visible
from gpubench.jobs.machines import Machines, check_drivers
from gpubench.jobs.metadata import build_metadata
from gpubench.jobs.rank import usable_driver
from gpubench.jobs.runner import Place, Steps
from gpubench.jobs.sources import Replayed, Simulated, Simulation, first_node
from gpubench.machine import recorded
from gpubench.machine.nvml import NvmlCounters
from gpubench.measure import scaling
from gpubench.measure.kv import FILE, SMALLEST_BLOCK, VERSION, KvRequest, KvRun, Measured, RecordedKv, copy_gb_s
from gpubench.measure.kv import SECTIONS as SECTIONS
from gpubench.measure.p2p.request import CopyMachine, find_pairs, wiring_of_process
from gpubench.measure.paths import Meter
from gpubench.model.facts.environment import detect_launcher, refuse_several_ranks
from gpubench.model.paths.ucx import Allocation
from gpubench.model.profiles.fault import COPIES
from gpubench.model.results.kv import KvRow
from gpubench.model.results.report import Report, Table
from gpubench.model.results.required_path import MEASURE_PAIRS, check_possible, require_evidence
from gpubench.model.results.scaling import ScalingRow
from gpubench.model.terms.operation import CopyGpu, TransferBackend
from gpubench.model.terms.units import format_size, plural
from gpubench.model.terms.verdict import Origin
from gpubench.ports.transfers import WORD_BYTES
from gpubench.profiles import match_node
from gpubench.readers.documents import check_version, read_json_line
from gpubench.simulated.links import NoCounters, SimulatedCopies
from gpubench.simulated.transfers import SimulatedTransfers, allocation_fault

if TYPE_CHECKING:
    from gpubench.ports.copies import Copies
    from gpubench.ports.group import Listener

NAME = "kv"
CHECK_BYTES = 64 * 2**20  # Size of the transfer of `gpubench check --kv`, the smallest whose speed is judged
_SECONDS_TO_OPEN = 6.0  # Reading facts, and copies for comparison
_HEADROOM_BYTES = 2**30  # For the CUDA contexts of two processes
_SECONDS_TO_ISOLATE = 10.0


class KvSetup(Struct, frozen=True, kw_only=True):
    """Everything that a run needs. `recorded` has the transfers of a recording, which are not measured again."""

    machines: Machines
    kv: KvRun
    libraries: Mapping[str, str] = {}
    recorded: Sequence[Measured] | None = None


def run(plan: KvPlan, arguments: Sequence[str]) -> int:
    """Measure transfers and return the exit code. Raises GpubenchError if nothing can be measured."""
    expected = "one process, because kv starts the two processes of each transfer itself"
    refuse_several_ranks(detect_launcher(os.environ), NAME, expected)
    _check_sizes(plan)
    return runner.run(STEPS, plan, arguments)


def _check_sizes(plan: KvPlan) -> None:
    """Raise UsageError if transfers of these sizes cannot be cut into equal blocks and verified."""
    odd = next((size for size in plan.sizes if size % WORD_BYTES), None)
    if odd is not None:
        raise UsageError(
            f"--sizes {odd}",
            expected=f"multiples of {WORD_BYTES} bytes, because the data are verified in words of {WORD_BYTES} bytes",
            next_step="--sizes 4K:256M:16",
        )
    cases = list(KvRequest(plan.backend, (), (), plan.sizes, plan.blocks, to_host=False).cases())
    uneven = [(case.size_bytes, case.blocks) for case in cases if case.size_bytes % case.blocks]
    if uneven or not cases:
        size_bytes, blocks = uneven[0] if uneven else (max(plan.sizes), min(plan.blocks))
        raise UsageError(
            f"--sizes {format_size(size_bytes)} with --blocks {blocks}",
            expected=f"blocks of equal size, of {format_size(SMALLEST_BLOCK)} or more",
            next_step="--sizes 4K:256M:16 --blocks 1,256,4096",
        )


@contextmanager
def _open(place: Place) -> Iterator[KvSetup]:
    plan: KvPlan = place.plan
    if isinstance(plan.source, Replayed):
        yield _replayed(plan, plan.source)
        return
    if isinstance(plan.source, Simulated):
        plan.source.simulation.note_effects(COPIES, by=NAME)
        simulation = plan.source.simulation
        yield _simulated(plan, simulation, first_node(simulation, plan.source.machines(), NAME))
        return
    place.presenter.waiting("reading this machine", _SECONDS_TO_OPEN)
    driver = usable_driver(NAME)
    library, libraries = choose_library(plan.backend)
    prefix = _isolating(plan.isolate)
    machines = plan.source.machines()
    from gpubench.backends.copies import open_copies

    copies = open_copies(driver, {gpu.bus_id: gpu.device for gpu in machines.nodes[0].gpus if gpu.bus_id})
    try:
        _check_memory(copies.free_bytes(), max(plan.sizes))
        kv = _prepare(plan, machines, copies, Origin.MEASURED)
    finally:
        copies.close()
    gpus, own_gpu_only = kv.machine.gpus, plan.visible is Visible.OWN
    counters = NvmlCounters([gpu.bus_id for gpu in gpus])
    kv.meter = Meter(counters)
    kv.transfers = ProcessTransfers(
        library, gpus, max(plan.sizes), plan.timeout_s, own_gpu_only=own_gpu_only, prefix=prefix
    )
    try:
        yield KvSetup(machines=machines, kv=kv, libraries=libraries)
    finally:
        counters.close()


def _machine(plan: KvPlan, machines: Machines, gpus: Sequence[CopyGpu], origin: Origin) -> CopyMachine:
    (node,) = machines.nodes[:1]
    if not gpus:
        raise no_gpu(node.snapshot.driver.absent or "this machine has none", for_what=NAME)
    if max(plan.rank_counts, default=0) > len(gpus):
        seen = f"--np {max(plan.rank_counts)} on {node.snapshot.host}, which has {plural(len(gpus), 'GPU')}"
        raise UsageError(seen, expected=f"at most {len(gpus)}", next_step=f"--np {len(gpus)}")
    matched = match_node(node, os.environ, None)
    return CopyMachine(wiring_of_process(node, gpus), gpus, machines.processes, matched, origin)


def _prepare(
    plan: KvPlan, machines: Machines, copies: "Copies", origin: Origin, fault: Allocation | None = None
) -> KvRun:
    """Choose the transfers, and make a plain copy between their GPUs. Raises UsageError for GPUs that are missing.

    `fault` is the kind of memory that all processes allocate instead of the chosen ones.
    """
    machine = _machine(plan, machines, copies.gpus, origin)
    pairs = tuple(combinations(range(max(plan.rank_counts, default=len(machine.gpus))), 2)) or ((0, 0),)
    if plan.pairs is not None:
        pairs = tuple(dict.fromkeys((min(pair), max(pair)) for pair in find_pairs(plan.pairs, machine.gpus)))
    kinds = plan.allocations(os.environ) if fault is None else (fault,)
    request = KvRequest(plan.backend, pairs, kinds, plan.sizes, plan.blocks, to_host=plan.host)
    ordered = [way for one, other in pairs for way in ((one, other), (other, one)) if one != other]
    rates = {pair: copy_gb_s(copies, pair) for pair in ordered}
    return KvRun(machine=machine, request=request, copies_gb_s=rates)


def choose_library(backend: TransferBackend) -> tuple[Path | None, dict[str, str]]:
    """Return the UCX to load, and its name. Raises CouldNotMeasureError if the library is missing."""
    if backend is TransferBackend.NIXL:
        if not is_nixl_installed():
            raise CouldNotMeasureError(
                "--backend nixl: NIXL is not in this Python environment",
                expected="the Python environment of the inference engine, with nixl and torch",
                next_step="pip install nixl, or gpubench kv --backend ucx",
            )
        return None, {}
    copies = ucx_copies(os.environ)
    usable = next((library for library in copies if "cuda" in ucx_transports(library)), None)
    if usable is None:
        without = f"{next(iter(copies))} has no CUDA module" if copies else "no UCX was found"
        raise CouldNotMeasureError(
            f"--backend ucx: {without}",
            expected="UCX with its CUDA module libuct_cuda.so",
            next_step="pip install libucx-cu13 (CUDA 12: libucx-cu12)",
        )
    return usable, {"UCX": f"{read_ucx_version(usable, os.environ)} from {copies[usable]}"}


def _isolating(isolate: Isolate | None) -> tuple[str, ...]:
    """Return the command that starts a process in a namespace of its own. Raises CouldNotMeasureError."""
    if isolate is None:
        return ()
    prefix = ("unshare", f"--{isolate}", *(("--fork", "--mount-proc") if isolate is Isolate.PID else ()))
    try:
        subprocess.run([*prefix, "true"], check=True, capture_output=True, text=True, timeout=_SECONDS_TO_ISOLATE)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip()
        raise CouldNotMeasureError(
            f"--isolate {isolate}: {said}",
            expected="the right to create namespaces (root, or CAP_SYS_ADMIN)",
            reason="containers usually do not have it. Nothing was tested",
            next_step=f"sudo -E gpubench kv --isolate {isolate}",
        ) from error
    return prefix


def _check_memory(free: Mapping[str, int], size_bytes: int) -> None:
    """Raise CouldNotMeasureError if a GPU has no room for the buffers of two processes."""
    needed = 4 * size_bytes + _HEADROOM_BYTES
    short = next((f"{gpu} has {format_size(left)} free" for gpu, left in free.items() if left < needed), None)
    if short is not None:
        raise CouldNotMeasureError(
            f"{short}: transfers of {format_size(size_bytes)} need {format_size(needed)}",
            expected="free GPU memory",
            reason="other processes use it (nvidia-smi lists them)",
            next_step="gpubench kv --sizes 4K:16M:16",
        )


def _simulated(plan: KvPlan, simulation: Simulation, machines: Machines) -> KvSetup:
    copies = SimulatedCopies(simulation.machine, simulation.faults, simulation.seed)
    faults = [fault for fault in simulation.faults if fault.node_number == 0]
    kv = _prepare(plan, machines, copies, Origin.SIMULATED, allocation_fault(faults))
    kv.meter = Meter(NoCounters())
    kv.transfers = SimulatedTransfers(copies, faults, simulation.seed, kv.copies_gb_s)
    return KvSetup(machines=machines, kv=kv)


def simulate_pair(source: Simulated, listener: "Listener[KvRow]") -> Report:
    """Simulate the transfer of `gpubench check --kv` between the first two GPUs. Raises CouldNotMeasureError."""
    machines = source.machines()
    first = replace(machines, nodes=machines.nodes[:1])
    check_drivers([first.nodes[0].snapshot], NAME, source.text)
    pairs = ((0, 1),) if len(first.nodes[0].gpus) > 1 else None
    plan = KvPlan(sizes=(CHECK_BYTES,), blocks=(1,), host=False, pairs=pairs, timeout_s=1.0)
    return _simulated(plan, source.simulation, first).kv.run(listener, lambda _: None)


def _replayed(plan: KvPlan, source: Replayed) -> KvSetup:
    machines = source.machines()
    lines = recorded.read_samples(source.directory, FILE, NAME)
    if not lines:
        raise UsageError(f"{source.text}, {FILE}: empty", expected="a recorded run of kv", reason="it was interrupted")
    found = read_json_line(RecordedKv, *lines[0])
    check_version(found.schema_version, VERSION, lines[0][1])
    measured = [read_json_line(Measured, *line) for line in lines[1:]]
    for one, (_, where) in zip(measured, lines[1:], strict=True):
        if not all(0 <= gpu < len(found.gpus) for gpu in one.pair):
            raise UsageError(f"{where}: the pair {list(one.pair)}", expected=f"two of {len(found.gpus)} GPUs")
    origin = Origin.RECORDED if found.origin is Origin.MEASURED else found.origin
    return KvSetup(
        machines=machines,
        kv=KvRun(machine=_machine(plan, machines, found.gpus, origin), request=found.request),
        libraries=found.libraries,
        recorded=measured,
    )


@contextmanager
def _recording(plan: KvPlan, setup: KvSetup) -> Iterator[Callable[[object], object]]:
    """Yield the function that records what was measured. Without --record, it does nothing."""
    directory = plan.recording.record
    if directory is None:
        yield lambda _: None
        return
    machine = setup.kv.machine
    recorded.write_recording(directory, setup.machines.snapshots, machine.processes)
    with recorded.recording_samples(directory, FILE) as write:
        write(
            RecordedKv(
                schema_version=VERSION,
                origin=machine.origin,
                request=setup.kv.request,
                gpus=tuple(machine.gpus),
                libraries=setup.libraries,
            )
        )
        yield write


def _measure(place: Place, setup: KvSetup) -> Report:
    plan: KvPlan = place.plan
    machine, request = setup.kv.machine, setup.kv.request
    check_possible(plan.require_path, machine.wiring)
    metadata = build_metadata(
        place.arguments,
        NAME,
        machines=setup.machines,
        matched=machine.matched,
        origin=machine.origin,
        backend=request.backend,
        libraries=setup.libraries,
        options={
            "pairs": [[machine.label(gpu) for gpu in pair] for pair in request.pairs],
            "sizes": sorted(request.sizes),
            "blocks": list(request.blocks),
            "memory": list(request.allocations),
            "visible": plan.visible,
            "isolate": plan.isolate,
            "strict": plan.strict,
            "gpus": {machine.label(gpu): machine.describe(gpu) for gpu in range(len(machine.gpus))},
        },
    )
    place.listener.begin(metadata, KvRow.columns())
    if len(plan.rank_counts) > 1 and plan.rank_counts[0] == 1:
        place.presenter.note(scaling.ALONE)
    if setup.recorded is not None:
        report = setup.kv.replay(setup.recorded, place.listener)
    else:
        with _recording(plan, setup) as write:
            report = setup.kv.run(place.listener, write)
    report = require_evidence(report, plan.require_path, machine.nodes, MEASURE_PAIRS)
    return _add_scaling(plan, setup.kv, report)


def _add_scaling(plan: KvPlan, kv: KvRun, report: Report) -> Report:
    """Add the slowest pair among the first GPUs, for each number of GPUs in --np. Each pair was measured once."""
    if not plan.rank_counts:
        return report
    numbers = {kv.machine.label(gpu): gpu for gpu in range(len(kv.machine.gpus))}
    found = [row for count in plan.rank_counts for row in scaling.kv_scaling(kv.rows, list(numbers)[:count])]
    staged = {(numbers[row.source], numbers[row.destination]) for row in kv.rows if row.host_staged}
    table = scaling.scaling_table(found, lambda: scaling.Causes(kv.machine.wiring, staged, report.findings))
    return replace(report, sections={**report.sections, **Table.group_by_section({ScalingRow: table})})


STEPS = Steps(NAME, _open, _measure, shows_progress=True)
