"""What `gpubench p2p --replay` does: the report of a recorded run, as if it were measured now."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpubench.errors import UsageError
from gpubench.formats.delivery import delivering
from gpubench.formats.presenter import Presenter, terminal_style
from gpubench.hardware import recorded
from gpubench.jobs.metadata import stamp
from gpubench.jobs.outputs import check_writable
from gpubench.jobs.p2p.here import describe, machine_of, profile_of
from gpubench.jobs.p2p.plan import NAME, P2pPlan
from gpubench.jobs.p2p.ranks import machine_of as machine_of_ranks
from gpubench.measure.p2p.ranks import RankRun
from gpubench.measure.p2p.recording import FILE, RecordedCopy, RecordedP2p, ReplayedBench, ReplayedRounds, read_samples
from gpubench.measure.p2p.rows import Machine, RankMachine
from gpubench.measure.p2p.run import MatrixRun, P2pRun
from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.results.report import PAIR_COLUMNS, Metadata
from gpubench.model.terms.origin import Origin


def run_replayed(options: P2pPlan, directory: Path, arguments: Sequence[str]) -> int:
    """Show what was recorded; the exit code.

    Raises:
        GpubenchError: there is no recording of p2p, or an output cannot be written.
    """
    shown = options.presentation
    check_writable(shown.outputs)
    presenter = Presenter(shown, terminal_style(shown, sys.stdout), progress=False)
    with delivering(presenter):
        snapshots, facts = recorded.read_recording(directory)
        found, samples = read_samples(recorded.read_samples(directory, FILE, NAME), f"--replay {directory}")
        machine = _machine(found, snapshots, facts, directory)
        options = replace(options, strict=options.strict or found.strict)
        presenter.begin(_metadata(options, arguments, directory, machine, found), PAIR_COLUMNS)
        report = _run(found, samples, machine, presenter).run(strict=options.strict)
        presenter.end(report)
    return options.presentation.exit_code(report.verdict)


def _machine(found: RecordedP2p, snapshots: Sequence[Snapshot], facts: Sequence[RankFacts], directory: Path) -> Machine:
    """The machine as it was.

    Raises:
        UsageError: samples and nodes do not belong together.
    """
    origin = Origin.RECORDED if found.origin is Origin.MEASURED else found.origin
    by_host = {snapshot.host: snapshot for snapshot in snapshots}
    if missing := [host for host in found.hosts if host not in by_host]:
        raise _strangers(directory, f"samples of {', '.join(missing)}")
    nodes = [by_host[host] for host in found.hosts]
    if found.ranks:
        return machine_of_ranks(nodes, found.ranks, facts, origin)
    known = {gpu.device for gpu in nodes[0].gpus}
    if missing := [gpu.device for gpu in found.gpus if gpu.device not in known]:
        raise _strangers(directory, f"samples of {', '.join(missing)}")
    return machine_of(nodes[0], found.gpus, origin, facts)


def _strangers(directory: Path, what: str) -> UsageError:
    return UsageError(
        f"--replay {directory}: {what}, which no node of the recording has",
        expected="nodes and samples of one run",
        reason="the folder was put together from several recordings",
    )


def _run(found: RecordedP2p, samples: Sequence[RecordedCopy], machine: Machine, presenter: Presenter) -> MatrixRun:
    if isinstance(machine, RankMachine):
        return RankRun(found.request, ReplayedRounds(found, samples), machine, presenter)
    return P2pRun(found.request, ReplayedBench(found, samples), machine, presenter)


def _metadata(
    options: P2pPlan, arguments: Sequence[str], directory: Path, machine: Machine, found: RecordedP2p
) -> Metadata:
    return Metadata(
        **stamp(arguments),
        subject=NAME,
        origin=machine.origin,
        hosts=[node.snapshot.host for node in machine.nodes],
        ranks=found.ranks,
        libraries=found.libraries,
        environment=found.environment,
        options=describe(machine, found.request, options, found.like),
        topology=machine.nodes[0].fingerprint(),
        profile=profile_of(machine),
        source=f"--replay {directory}",
    )
