"""What `--replay` of a collective does: the report of a recorded run, as if it were measured now."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpubench.cli.collective_metadata import metadata_of
from gpubench.cli.delivery import delivering
from gpubench.cli.options import CollectiveOptions
from gpubench.cli.presentation import check_writable
from gpubench.cli.presenter import Presenter, terminal_style
from gpubench.conditions.circumstances import Circumstances
from gpubench.errors import UsageError
from gpubench.hardware import recorded
from gpubench.hardware.launch.started_by import LaunchedBy
from gpubench.measure.collective.recording import RecordedCollective, file_of
from gpubench.measure.collective.replay import read_recorded, replay
from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.evidence import EvidenceUse
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.wiring import Wiring


def run(options: CollectiveOptions, directory: Path, arguments: Sequence[str], launched_by: LaunchedBy | None) -> int:
    """Show what was recorded; the exit code.

    Raises:
        GpubenchError: under a launcher, there is no recording of this collective, or an output cannot be written.
    """
    collective, shown = options.collective, options.presentation
    if launched_by is not None and launched_by.size > 1:
        raise UsageError(
            f"{collective.name} --replay under {launched_by.launcher}",
            expected="one process: nothing is measured",
            next_step="the same without the launcher",
        )
    check_writable(shown.outputs)
    presenter = Presenter(shown, terminal_style(shown, sys.stdout), progress=False)
    source = f"--replay {directory}"
    with delivering(presenter):
        snapshots, facts = recorded.read_recording(directory)
        lines = recorded.read_samples(directory, file_of(collective.name), collective.name)
        found, rows = read_recorded(lines, collective, source)
        found = _as_asked(found, options)
        around = _circumstances(found, snapshots, facts, source)
        topology = None if found.model is None else around.wiring.nodes[0].fingerprint()
        presenter.begin(metadata_of(found, collective, arguments, topology=topology, replayed=source))
        report = replay(found, rows, collective, around, presenter, strict=found.options.strict)
        presenter.end(report)
    return shown.exit_code(report.verdict)


def _as_asked(found: RecordedCollective, options: CollectiveOptions) -> RecordedCollective:
    """The recording with what may be asked of it anew: to be stricter, and to show evidence where there is any."""
    evidence = found.options.evidence
    if options.evidence is EvidenceUse.SHOWN and evidence is not EvidenceUse.OFF:
        evidence = options.evidence
    return replace(
        found, options=replace(found.options, strict=found.options.strict or options.strict, evidence=evidence)
    )


def _circumstances(
    found: RecordedCollective, snapshots: Sequence[Snapshot], facts: Sequence[RankFacts], source: str
) -> Circumstances:
    """Nodes and processes as they were.

    Raises:
        UsageError: they and the samples do not belong together.
    """
    by_host = {snapshot.host: snapshot for snapshot in snapshots}
    missing = [f"samples of {host}, which no node of the recording is" for host in found.hosts if host not in by_host]
    if found.model is None and [each.rank for each in facts] != [each.rank for each in found.ranks]:
        missing.append(f"samples of {len(found.ranks)} ranks, and processes of {len(facts)}")
    if missing:
        raise UsageError(
            f"{source}: {missing[0]}",
            expected="nodes, ranks and samples of one run",
            reason="the folder was put together from several recordings, or is not whole",
            next_step="copy the whole folder again, or record it again: --record DIR",
        )
    nodes = {number: Topology(by_host[host]) for number, host in enumerate(found.hosts)}
    return Circumstances(wiring=Wiring(found.ranks, nodes), facts=facts)
