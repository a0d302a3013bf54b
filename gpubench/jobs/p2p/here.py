"""What `gpubench p2p` does: look at the machine, copy, show."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from gpubench.errors import UsageError, no_gpu
from gpubench.formats.delivery import delivering
from gpubench.formats.presenter import Presenter, terminal_style
from gpubench.hardware import recorded
from gpubench.hardware.node.nvml.library import read_driver
from gpubench.hardware.node.probe import probe, watch_errors
from gpubench.hardware.process.facts import read_rank_facts
from gpubench.jobs.metadata import recorded_settings, stamp
from gpubench.jobs.outputs import check_writable
from gpubench.jobs.p2p.plan import NAME, As, P2pPlan
from gpubench.measure.p2p.bench import (
    NVBANDWIDTH,
    Bench,
    CopyBench,
    Method,
    P2pRequest,
    default_series,
    steps,
    sweep_series,
)
from gpubench.measure.p2p.recording import FILE, VERSION, RecordedP2p, RecordingBench
from gpubench.measure.p2p.rows import Machine
from gpubench.measure.p2p.run import LookAgain, P2pRun
from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.links import leads_to_switches
from gpubench.model.paths.p2p import Pair, Series
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.wiring import GpuPlace, Wiring
from gpubench.model.results.report import PAIR_COLUMNS, Metadata
from gpubench.model.terms.copies import CopyGpu, CopyPattern, Direction, Engine
from gpubench.model.terms.origin import Origin
from gpubench.ports.copies import Copies
from gpubench.ports.link_counters import LinkCounters
from gpubench.profiles.matching import match

DEFAULT_BYTES = 256 * 2**20
DEFAULT_HOST_BYTES = 64 * 2**20
"""Less than between GPUs: the host fills and checks its end itself."""

NVBANDWIDTH_BYTES = 512 * 2**20
_SECONDS_A_CELL = 0.07
"""What a cell of a matrix takes on H200: warm-up, three samples of 10 ms, filling and checking."""


@dataclass(frozen=True, slots=True)
class _Here:
    """What copies, what counts, the facts of the machine and of this process, and versions for the metadata.

    A simulated machine has no process.
    """

    copies: Copies
    counters: LinkCounters
    snapshot: Snapshot
    processes: tuple[RankFacts, ...]
    libraries: Mapping[str, str]


def run_alone(options: P2pPlan, arguments: Sequence[str]) -> int:
    """Measure the GPUs of this host, or a simulated one's; the exit code.

    Raises:
        GpubenchError: no GPU, a pair that does not exist, or an output that cannot be written.
    """
    shown = options.presentation
    check_writable(shown.outputs, options.recording.record)
    shows_progress = shown.show_progress and sys.stderr.isatty() and options.simulation is None
    presenter = Presenter(shown, terminal_style(shown, sys.stdout), progress=shows_progress)
    with delivering(presenter), _copies(options) as here:
        copies = here.copies
        request = _request(options, copies.gpus)
        origin = Origin.MEASURED if options.simulation is None else Origin.SIMULATED
        machine = machine_of(here.snapshot, copies.gpus, origin, here.processes)
        metadata = metadata_of(options, arguments, machine, request, here)
        bench: Bench = CopyBench(request, copies, here.counters)
        with _recorded(options.recording.record, here, request, bench, metadata) as bench:
            presenter.begin(metadata, PAIR_COLUMNS)
            if shows_progress:
                cells = steps(request, len(copies.gpus))
                presenter.note(f"{cells} copies to time: about {max(2, round(cells * _SECONDS_A_CELL))} s")
            look_again = None if options.simulation is not None else _looking_again(options)
            report = P2pRun(request, bench, machine, presenter, look_again).run(strict=options.strict)
        presenter.end(report)
    return options.presentation.exit_code(report.verdict)


def _looking_again(options: P2pPlan) -> LookAgain:
    """Reads what devices have counted since; a recording gets it too."""

    def look_again(machine: Machine) -> Machine:
        (node,) = machine.nodes
        snapshot = watch_errors(node.snapshot, options.timeout_s, os.environ)
        if options.recording.record is not None:
            recorded.write_recording(options.recording.record, [snapshot], machine.facts)
        return replace(machine, wiring=replace(machine.wiring, nodes={0: Topology(snapshot)}))

    return look_again


def machine_of(
    snapshot: Snapshot, gpus: Sequence[CopyGpu], origin: Origin, processes: Sequence[RankFacts] = ()
) -> Machine:
    """What is known of a host, of those of its GPUs that copy, and of the process that has them copy."""
    node = Topology(snapshot)
    names = sorted({gpu.name for gpu in node.gpus if gpu.name})
    found = match(names, len(node.gpus), switched=leads_to_switches(node.gpus))
    return Machine(
        wiring=Wiring([GpuPlace(snapshot.host, 0, gpu.bus_id) for gpu in gpus], {0: node}),
        profile=None if found is None else found.profile,
        busy=_busy(snapshot, gpus),
        origin=origin,
        gpus=gpus,
        facts=tuple(processes),
    )


@contextmanager
def _recorded(
    directory: Path | None, here: _Here, request: P2pRequest, bench: Bench, metadata: Metadata
) -> Iterator[Bench]:
    """The bench, writing down what it measures where that was asked for."""
    if directory is None:
        yield bench
        return
    recorded.write_recording(directory, [here.snapshot], here.processes)
    with recorded.recording_samples(directory, FILE) as write:
        write(
            RecordedP2p(
                schema_version=VERSION,
                origin=Origin(metadata.origin),
                request=request,
                hosts=(here.snapshot.host,),
                gpus=tuple(here.copies.gpus),
                unreachable=tuple(pair for pair in request.pairs if not bench.can_reach(pair)),
                like=metadata.options["as"],
                strict=metadata.options["strict"],
                libraries=metadata.libraries,
                environment=metadata.environment,
            )
        )
        yield RecordingBench(bench, write)


@contextmanager
def _copies(options: P2pPlan) -> Iterator[_Here]:
    """The machine to measure; its facts are read before anything is put on its GPUs."""
    if options.simulation is not None:
        from gpubench.hardware.simulated.copies import NoCounters, SimulatedCopies

        simulation = options.simulation
        simulated = SimulatedCopies(simulation.machine, simulation.faults, simulation.seed)
        yield _Here(simulated, NoCounters(), simulated.snapshot, (), {})
        return
    from gpubench.hardware.copies.one_process import open_copies
    from gpubench.hardware.cuda.device import check_installed
    from gpubench.hardware.node.nvml.link_counters import NvmlCounters

    driver = read_driver(os.environ)
    if not driver.visible:
        raise no_gpu(driver.hidden_gpus() or driver.absent or "the driver finds none on this host", for_what="p2p")
    check_installed(driver)
    snapshot = probe(options.timeout_s, os.environ)
    copies = open_copies(driver, {gpu.bus_id: gpu.device for gpu in snapshot.gpus if gpu.bus_id})
    counters = NvmlCounters([gpu.bus_id for gpu in copies.gpus])
    try:
        process = read_rank_facts(0, 0, 0, recorded_settings(os.environ))
        yield _Here(copies, counters, snapshot, (process,), copies.libraries())
    finally:
        counters.close()
        copies.close()


def _request(options: P2pPlan, gpus: Sequence[CopyGpu]) -> P2pRequest:
    """What to measure on these GPUs.

    Raises:
        UsageError: `--pairs` names a GPU that is not there.
    """
    pairs = _pairs(options, gpus)
    size_bytes, method = DEFAULT_BYTES, Method()
    if options.like is As.NVBANDWIDTH:
        size_bytes, method = NVBANDWIDTH_BYTES, NVBANDWIDTH
        series: tuple[Series, ...] = tuple(
            Series(engine, direction, peer=True, size_bytes=size_bytes)
            for engine in Engine
            for direction in (Direction.WRITE, Direction.READ)
        )
    elif options.sizes is not None:
        series = sweep_series(options.sizes)
    else:
        series = default_series(size_bytes)
    whole = options.sizes is None and options.pairs is None
    several = len(gpus) > 1
    return P2pRequest(
        pairs=pairs,
        series=series if several else (),
        host_bytes=_host_bytes(options) if options.host and whole else None,
        patterns=tuple(CopyPattern) if options.patterns and whole and options.like is None and several else (),
        pattern_bytes=size_bytes,
        method=method,
        check=options.check and options.simulation is None,
    )


def _host_bytes(options: P2pPlan) -> int:
    return NVBANDWIDTH_BYTES if options.like is As.NVBANDWIDTH else DEFAULT_HOST_BYTES


def _pairs(options: P2pPlan, gpus: Sequence[CopyGpu]) -> tuple[Pair, ...]:
    everybody = range(len(gpus))
    if options.pairs is None:
        return tuple(
            (source, destination) for source in everybody for destination in everybody if source != destination
        )
    positions = {gpu.device: position for position, gpu in enumerate(gpus)}
    chosen = []
    for pair in options.pairs:
        for index in pair:
            if f"GPU{index}" not in positions:
                raise UsageError(
                    f"--pairs {pair[0]}-{pair[1]}: there is no GPU{index}",
                    expected=f"GPUs among {', '.join(positions)}",
                    reason="CUDA_VISIBLE_DEVICES hides it, or this machine has fewer",
                    next_step="gpubench topo shows the GPUs and their numbers",
                )
        chosen.append((positions[f"GPU{pair[0]}"], positions[f"GPU{pair[1]}"]))
    return tuple(chosen)


def _busy(snapshot: Snapshot, gpus: Sequence[CopyGpu]) -> dict[int, str]:
    """Whose work is on the GPUs, by position, as it was before this process touched them.

    A process that merely holds a context, as a desktop does, leaves a GPU idle.
    """
    users = {gpu.device: gpu.processes for gpu in snapshot.gpus if gpu.processes and gpu.idle is not True}
    return {
        position: ", ".join(f"process {each.pid}" for each in users[gpu.device] or ())
        for position, gpu in enumerate(gpus)
        if gpu.device in users
    }


def metadata_of(
    options: P2pPlan, arguments: Sequence[str], machine: Machine, request: P2pRequest, here: _Here
) -> Metadata:
    """What a reader needs to know of a run in one process."""
    simulation = options.simulation
    return Metadata(
        **stamp(arguments),
        subject=NAME,
        origin=machine.origin,
        hosts=[node.snapshot.host for node in machine.nodes],
        libraries=here.libraries,
        environment=recorded_settings(os.environ) if simulation is None else {},
        options=describe(machine, request, options, options.like),
        topology=machine.nodes[0].fingerprint(),
        profile=profile_of(machine),
        source=None if simulation is None else simulation.source,
    )


def describe(machine: Machine, request: P2pRequest, options: P2pPlan, like: str | None) -> dict[str, object]:
    """The request as plain data, for the metadata."""
    return {
        "pairs": [[machine.label(gpu) for gpu in pair] for pair in request.pairs],
        "sizes": sorted({each.size_bytes for each in request.series}),
        "warmup": request.method.warmup,
        "samples": request.method.samples,
        "repeats": request.method.repeats,
        "sample_seconds": request.method.sample_seconds,
        "as": like,
        "check": request.check,
        "strict": options.strict,
        "evidence": options.evidence.value,
        "gpus": {machine.label(gpu): machine.describe(gpu) for gpu in range(len(machine.gpus))},
    }


def profile_of(machine: Machine) -> dict[str, str] | None:
    """The profile, for the metadata."""
    return None if machine.profile is None else {"name": machine.profile.name, "sha256": machine.profile.sha256}
