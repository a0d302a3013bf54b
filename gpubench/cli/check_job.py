"""What `gpubench check` does on one host, or on machines that are not there."""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpubench.cli.check import NAME, CheckOptions
from gpubench.cli.check_machines import profiles_of
from gpubench.cli.check_measure import measured_collectives, measured_copies, measured_memory
from gpubench.cli.delivery import delivering
from gpubench.cli.presentation import check_writable
from gpubench.cli.presenter import Presenter, terminal_style
from gpubench.cli.run_metadata import recorded_settings, stamp
from gpubench.conditions.circumstances import Facts
from gpubench.hardware import recorded
from gpubench.hardware.mpi.one_process import AloneGroup
from gpubench.hardware.node.probe import probe, watch_errors
from gpubench.hardware.process.facts import read_rank_facts
from gpubench.hardware.simulated.machine import snapshots as simulated_nodes
from gpubench.installation_errors import no_gpu
from gpubench.measure.check.documents import together
from gpubench.measure.check.health import judge
from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.nodes import group, with_own_names
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.profile import Generic
from gpubench.model.results.measurements import QUICK, Measurements, Need
from gpubench.model.results.report import Metadata, Report
from gpubench.model.results.result_file import MODELS
from gpubench.model.terms.origin import Origin
from gpubench.profiles.matching import ProfileMatch
from gpubench.readers.documents.json_lines import read_json_line

FILE = "check.jsonl"
"""What a check measured, in a recording."""


def run_alone(options: CheckOptions, arguments: Sequence[str]) -> int:
    """Check the machine in front of us, or the one asked for; the exit code.

    Raises:
        GpubenchError: no GPU where none was said to be, a broken profile, or an output that cannot be written.
    """
    shown = options.presentation
    check_writable(shown.outputs, options.record)
    presenter = Presenter(shown, terminal_style(shown, sys.stdout), progress=False)
    with delivering(presenter):
        snapshots, ranks = _machines(options)
        nodes = [Topology(snapshot) for snapshot in with_own_names(snapshots)]
        matches = profiles_of(nodes, options.profile, os.environ)
        refuse_without_gpu(nodes, matches)
        measurements = _measured(options, nodes, matches)
        if measurements is not QUICK and options.simulation is None and options.replay is None:
            nodes = [Topology(watch_errors(node.snapshot, options.facts_timeout_s, os.environ)) for node in nodes]
        return deliver(options, arguments, nodes, ranks, matches, measurements, presenter)


def refuse_without_gpu(nodes: Sequence[Topology], matches: Sequence[ProfileMatch | None]) -> None:
    """Raise CouldNotMeasureError where no node has a GPU, unless the profile asked for is that of a host."""
    if any(node.gpus or node.snapshot.failures for node in nodes) or _is_host(matches):
        return
    raise no_gpu(nodes[0].snapshot.driver.absent or "the driver finds none on this host", for_what=NAME)


def _is_host(matches: Sequence[ProfileMatch | None]) -> bool:
    return any(each is not None and each.profile.match.generic is Generic.HOST for each in matches)


def deliver(
    options: CheckOptions,
    arguments: Sequence[str],
    nodes: Sequence[Topology],
    ranks: Sequence[RankFacts],
    matches: Sequence[ProfileMatch | None],
    measurements: Measurements,
    presenter: Presenter,
) -> int:
    """Record where asked, then judge and present; the exit code."""
    if options.record is not None:
        recorded.write_recording(options.record, [node.snapshot for node in nodes], ranks)
        with recorded.recording_samples(options.record, FILE) as write:
            write(measurements)
    profiles = [None if found is None else found.profile for found in matches]
    facts = Facts(nodes, group(nodes), ranks, profiles, measurements, options.profile is not None)
    report: Report = judge(facts, strict=options.strict)
    presenter.begin(metadata_of(options, arguments, nodes, matches), ())
    presenter.end(report)
    return options.presentation.exit_code(report.verdict)


def _machines(options: CheckOptions) -> tuple[list[Snapshot], list[RankFacts]]:
    if options.replay is not None:
        return recorded.read_recording(options.replay)
    if options.simulation is not None:
        simulation = options.simulation
        return simulated_nodes(simulation.machine, simulation.faults, simulation.seed), []
    facts = read_rank_facts(0, 0, 0, recorded_settings(os.environ))
    return [probe(options.facts_timeout_s, os.environ)], [facts]


def _measured(options: CheckOptions, nodes: Sequence[Topology], matches: Sequence[ProfileMatch | None]) -> Measurements:
    if options.replay is not None:
        return _recorded_measurements(options.replay)
    if not options.plan.measures:
        return QUICK
    profile = matches[0].profile if matches[0] is not None else None
    if options.simulation is not None:
        from gpubench.cli.check_simulated import measured

        simulation = options.simulation
        snapshots = [node.snapshot for node in nodes]
        return measured(
            simulation.machine, simulation.faults, simulation.seed, snapshots, options.plan, profile=profile
        )
    if not nodes[0].gpus:
        copies = Measurements(left_out=dict.fromkeys((Need.PEER_COPIES, Need.HOST_COPIES), "no GPU"))
    else:
        copies = measured_copies(options.plan, options.timeout_s, nodes[0])
    memory = measured_memory(AloneGroup(), nodes, 0)
    return together([memory, copies, measured_collectives(options.plan, options.timeout_s, nodes, profile)])


def _recorded_measurements(directory: Path) -> Measurements:
    """What a recorded check measured; of another command's recording nothing.

    Raises:
        UsageError: the file cannot be read, or is none that a check wrote.
    """
    if not (directory / FILE).exists():
        reason = "the recording is of another command than check"
        return replace(QUICK, left_out=dict.fromkeys(QUICK.left_out, reason))
    lines = recorded.read_samples(directory, FILE, NAME)
    found = together([read_json_line(Measurements, line, where) for line, where in lines])
    return replace(
        found,
        pairs=tuple(replace(row, origin=_as_recorded(row.origin)) for row in found.pairs),
        collectives=tuple(replace(row, origin=_as_recorded(row.origin)) for row in found.collectives),
    )


def _as_recorded(origin: str) -> str:
    return Origin.RECORDED if origin == Origin.MEASURED else origin


def metadata_of(
    options: CheckOptions,
    arguments: Sequence[str],
    nodes: Sequence[Topology],
    matches: Sequence[ProfileMatch | None],
) -> Metadata:
    """What a reader needs to know of a check."""
    origins = {node.snapshot.origin for node in nodes}
    driver = nodes[0].snapshot.driver
    here = options.simulation is None and options.replay is None
    source = f"--replay {options.replay}" if options.replay is not None else None
    matched = matches[0]
    return Metadata(
        **stamp(arguments),
        subject=NAME,
        origin=origins.pop() if len(origins) == 1 else Origin.RECORDED,
        hosts=[node.snapshot.host for node in nodes],
        libraries={"driver": f"{driver.version} (runs CUDA {driver.cuda})"} if driver.version else {},
        environment=recorded_settings(os.environ) if here else {},
        options={
            "depth": options.plan.depth.value,
            "strict": options.strict,
            "timeout_s": options.timeout_s,
            MODELS: sorted({gpu.name for node in nodes for gpu in node.gpus if gpu.name}),
        },
        topology=Counter(node.fingerprint() for node in nodes).most_common(1)[0][0],
        profile=None if matched is None else _described(matched, asked=options.profile is not None),
        source=options.simulation.source if options.simulation is not None else source,
    )


def _described(matched: ProfileMatch, *, asked: bool) -> dict[str, str]:
    note = "asked for" if asked else str(matched).removeprefix(matched.profile.name).strip(" ()")
    return {"name": matched.profile.name, "sha256": matched.profile.sha256} | ({"note": note} if note else {})
