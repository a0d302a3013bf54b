"""Repeat a collective or an overlap for each number of ranks in --np, and present the runs as one report.

`gpubench.measure.scaling` compares the runs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.formats.delivery import delivering
from gpubench.jobs.collective.plan import COUNT_FOLDERS, CollectivePlan
from gpubench.jobs.runner import Place, ReportCollector, Steps, check_writable
from gpubench.jobs.sources import Simulation
from gpubench.measure import scaling
from gpubench.measure.collective.sweep import check_root
from gpubench.model.paths.transport import Conclusion
from gpubench.model.paths.wiring import Wiring
from gpubench.model.results.overlap import OverlapRow
from gpubench.model.results.report import CollectiveRow, EvidenceRow, Metadata, Report, Row, Table
from gpubench.model.results.scaling import ScalingRow
from gpubench.model.terms.verdict import Finding, worst_verdict
from gpubench.simulated.times import CollectiveTimes

if TYPE_CHECKING:
    from gpubench.formats.presenter import Presenter
    from gpubench.jobs.collective.job import RankStart
    from gpubench.jobs.sources import Source


class CountListener(ReportCollector):
    """Listens to the run with one number of ranks, and presents its rows as part of the whole report."""

    exit_code = 0

    def __init__(self, presenter: "Presenter", counts: Sequence[int], ranks: int) -> None:
        super().__init__()
        self._presenter, self._counts, self.ranks = presenter, counts, ranks
        self.note, self.cut_short = presenter.note, presenter.cut_short
        self.rows = 0
        self.scaling: list[ScalingRow] = []

    def begin(self, metadata: Metadata, columns: Sequence[str] | None = None) -> None:
        """Present the metadata of the first run, which has all GPUs."""
        self.metadata = metadata
        if self.ranks == self._counts[0]:
            options = {**metadata.options, "np": sorted(self._counts)}
            self._presenter.begin(replace(metadata, options=options), columns)

    def progress(self, done: int, total: int, label: str) -> None:
        """Show the progress over all numbers of ranks."""
        before = self._counts.index(self.ranks)
        self._presenter.progress(before * total + done, len(self._counts) * total, f"{label}, {self.ranks} ranks")

    def row(self, row: Row) -> None:
        """Present a row. For scaling, keep it with its size as on the command line, before it was rounded."""
        self.rows += 1
        if self.metadata is not None and isinstance(row, CollectiveRow | OverlapRow):
            found = scaling.scaling_row(row, scaling.describe_gpus(self.metadata.ranks))
            size = min(
                (size for size in self.metadata.options["sizes"] if size >= row.size_bytes), default=row.size_bytes
            )
            self.scaling.append(replace(found, size_bytes=size))
        self._presenter.row(row)


Measure = Callable[[CollectivePlan, CountListener], object]


def measure_counts(plan: CollectivePlan, presenter: "Presenter", measure: Measure) -> Report:
    """Call `measure` for each number of ranks, largest first, and merge the reports.

    One rank of an overlap or a simulation is left out. Raises GpubenchError if a run fails.
    """
    measures_one = plan.simulation is None and plan.kernels_at_once == 1
    for one in plan.each_count:
        check_writable((), one.recording.record)
    if plan.rank_counts[0] == 1 and not measures_one:
        presenter.note(scaling.ALONE)
    counts = [count for count in sorted(plan.rank_counts, reverse=True) if count > 1 or measures_one]
    check_root(plan.collective, plan.root, counts[-1])
    for count in counts:
        if plan.simulation is not None:
            part_of_machine(plan.simulation, count)
    runs = [CountListener(presenter, counts, count) for count in counts]
    for run in runs:
        measure(plan.for_count(run.ranks), run)
    first, *others = (run.report for run in runs if run.report is not None)
    known = {_key(finding) for finding in first.findings}
    added = {_key(finding): finding for report in others for finding in report.findings}
    findings = (*first.findings, *(finding for key, finding in added.items() if key not in known))
    table = scaling.scaling_table(
        [row for run in runs for row in run.scaling],
        lambda: _find_causes(plan.for_count(counts[0]).source, runs, findings),
    )
    return replace(
        first,
        verdict=worst_verdict([first.verdict, *(report.verdict for report in others)]),
        complete=first.complete and all(report.complete for report in others),
        findings=findings,
        sections={**first.sections, **Table.group_by_section({ScalingRow: table})},
    )


def _key(finding: Finding) -> tuple[object, ...]:
    """Return what identifies a finding over numbers of ranks. A subject names the node only if there are several."""
    return finding.id, finding.severity, finding.places if finding.devices else finding.subject


def _find_causes(source: "Source", runs: Sequence[CountListener], findings: Sequence[Finding]) -> scaling.Causes:
    """Read the machine, and return what may explain that more ranks are slower."""
    ranks = [] if runs[0].metadata is None else runs[0].metadata.ranks
    numbers = {(rank.host, rank.gpu_bus_id): number for number, rank in enumerate(ranks)}
    evidence = [row for run in runs if run.report is not None for row in run.report.rows(EvidenceRow)]
    staged = {
        (numbers.get((row.source_node, row.source_bus_id)), numbers.get((row.destination_node, row.destination_bus_id)))
        for row in evidence
        if row.conclusion == Conclusion.STAGED
    }
    nodes = {node.snapshot.host: node for node in source.machines().nodes}
    wiring = Wiring(ranks, {rank.node: nodes[rank.host] for rank in ranks if rank.host in nodes})
    return scaling.Causes(wiring, staged, findings)


def launch_counts(plan: CollectivePlan, start: "RankStart") -> int:
    """Launch one job on this host per number of ranks, and present them as one report. Return the exit code."""
    with start.announced(plan) as take_back:
        presenter = start.presenter(plan, take_back)

        def measure(of_count: CollectivePlan, listener: CountListener) -> object:
            return replace(start, ranks=listener.ranks).measure(of_count, lambda: listener, take_back)

        with delivering(presenter):
            presenter.end(measure_counts(plan, presenter, measure))
    return presenter.exit_code


def part_of_machine(simulation: Simulation, ranks: int) -> Simulation:
    """Return the nodes of a simulated machine that `ranks` ranks fill, one node after the other.

    Raises UsageError if the machine has too few GPUs, or if the ranks fill a node only in part.
    """
    machine = simulation.machine
    per_node = CollectiveTimes(machine, simulation.faults, simulation.seed).gpus
    nodes = -(-ranks // per_node)
    if nodes > machine.nodes or (nodes > 1 and ranks % per_node):
        gpus = per_node * machine.nodes
        whole = f", or whole nodes: multiples of {per_node} up to {gpus}" if machine.nodes > 1 else ""
        raise UsageError(
            f"--np {ranks} on {machine}, which has {gpus} GPUs",
            expected=f"at most {per_node}{whole}",
            next_step=f"--np {gpus}",
        )
    faults = tuple(fault for fault in simulation.faults if fault.node_number < nodes)
    return replace(simulation, machine=replace(machine, nodes=nodes), faults=faults)


def recorded_counts(directory: Path) -> tuple[int, ...]:
    """Return the numbers of ranks that a recording has in folders of their own, or () if it is of one run."""
    names = [path.name.removeprefix(COUNT_FOLDERS) for path in directory.glob(f"{COUNT_FOLDERS}*")]
    return tuple(sorted(int(name) for name in names if name.isdecimal()))


def in_counts(steps: Steps[Any], plan: CollectivePlan) -> Steps[Any]:
    """Return steps that simulate or replay `steps` for each number of ranks in the plan."""
    if not plan.scales:
        return steps

    def measure_all(place: Place, _opened: None) -> Report:
        def measure(of_count: CollectivePlan, listener: CountListener) -> None:
            if plan.simulation is not None:
                part = part_of_machine(plan.simulation, listener.ranks)
                of_count = dataclasses.replace(of_count, simulation=part)
            own: Any = Place(of_count, place.arguments, shows_progress=False, is_launched=False)
            own.presenter = listener
            with steps.open(own) as opened:
                report = steps.measure(own, opened)
            if report is not None:
                listener.end(report)

        return measure_counts(plan, place.presenter, measure)

    return Steps(steps.name, lambda _place: nullcontext(), measure_all)
