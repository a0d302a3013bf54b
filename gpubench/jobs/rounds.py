"""What all scans share: preconditions, the folder that stores rounds, progress, and the report."""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.conditions.circumstances import Facts
from gpubench.errors import CouldNotMeasureError, UsageError, name_output
from gpubench.formats.delivery import say
from gpubench.formats.presenter import ProgressDisplay, make_progress_display
from gpubench.jobs.metadata import build_metadata
from gpubench.jobs.plans import ScanPlan
from gpubench.jobs.runner import presenting
from gpubench.machine.host import is_mps_running, sm_percent
from gpubench.measure.check.health import judge
from gpubench.measure.scan.judging import find_slowest, not_measured_inside, slow_figures, wrong_data_inside
from gpubench.measure.scan.report import ScanResult, report_of
from gpubench.measure.scan.rounds import EndOfRoundsError, Keep, RoundMeasurer
from gpubench.measure.scan.verdicts import all_rates_known, least_percent
from gpubench.model.facts.process import RankFacts
from gpubench.model.paths.nodes import group_nodes
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.profile import Profile
from gpubench.model.results import scan
from gpubench.model.results.figures import QUICK
from gpubench.model.terms.units import plural, shorten
from gpubench.model.terms.verdict import Finding, Verdict
from gpubench.ranks.scan.coordinator import NodeRanks
from gpubench.readers.documents import Wanted, json_line, read_json_line, read_text

NAME = "scan"


LEAST_NODES = 3
HOST, NCCL = "host", "nccl"

_RANKS_ALIKE = "mpirun --map-by ppr:1:node, or srun --ntasks-per-node=1"


def check_node_count(nodes: int) -> None:
    """Raise UsageError for fewer than three nodes. If a pair of nodes is slow, a third node must show which one is
    at fault.
    """
    if nodes == 1:
        raise UsageError(
            "scan of one node",
            expected="three nodes or more, because it compares the links between them",
            next_step="gpubench check for one node, or --ranks-as-nodes to try a scan on one node",
        )
    if nodes < LEAST_NODES:
        raise UsageError(
            "scan of two nodes",
            expected="three nodes or more",
            reason="two nodes that measure each other do not show which of them is slow",
            next_step="add a node that is known to be healthy, or compare gpubench allreduce on the two with its limit",
        )


def check_placement(nodes: Sequence[int], hosts: Sequence[str], gpus: Sequence[int] = ()) -> NodeRanks:
    """Return the ranks of each node and the rails of each rank. A rank has one rail, or a rail per GPU if it is
    alone on its node.

    Raises UsageError if nodes have different numbers of ranks or GPUs, or if some GPUs would not be measured.
    """
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    _check_alike({hosts[ranks[0]]: len(ranks) for ranks in members.values()}, "rank", _RANKS_ALIKE)
    if gpus:
        _check_alike(dict(zip(hosts, gpus, strict=True)), "GPU", "leave these nodes out, or set CUDA_VISIBLE_DEVICES")
    if gpus and len(set(hosts)) == len(members) == len(nodes):
        return NodeRanks(tuple(map(tuple, members.values())), (tuple(range(gpus[0])),) * len(nodes))
    ranks_a_node = len(nodes) // len(members)
    if gpus and 1 < ranks_a_node < gpus[0]:
        raise UsageError(
            f"{plural(ranks_a_node, 'rank')} on nodes of {plural(gpus[0], 'GPU')}",
            expected="one rank per GPU, or one rank per node",
            reason="the other GPUs would not be measured",
            next_step=f"mpirun --map-by ppr:{gpus[0]}:node, or ppr:1:node",
        )
    own = {rank: place for ranks in members.values() for place, rank in enumerate(ranks)}
    if max(own.values()) >= scan.MOST_RAILS:
        raise UsageError(
            f"{max(own.values()) + 1} ranks on each node",
            expected=f"{scan.MOST_RAILS} at most",
            next_step="mpirun --map-by ppr:1:node",
        )
    return NodeRanks(tuple(map(tuple, members.values())), tuple((own[rank],) for rank in range(len(nodes))))


def check_backend(asked: str | None, gpus: Sequence[int], hosts: Sequence[str]) -> str:
    """Return the backend that was asked for. The default is NCCL if there are GPUs, and TCP otherwise.

    Raises UsageError if a host has fewer GPUs than ranks.
    """
    if asked == HOST or (asked is None and not any(gpus)):
        return HOST
    ranks = Counter(hosts)
    short = {host: count for host, count in zip(hosts, gpus, strict=True) if count < ranks[host]}
    if short:
        each = [f"{host} {plural(count, 'GPU')} for {plural(ranks[host], 'rank')}" for host, count in short.items()]
        named = shorten(each)
        raise UsageError(
            f"fewer GPUs than ranks: {named}",
            expected="a GPU for every rank",
            reason="a rail is a GPU and its NIC",
            next_step="mpirun --map-by ppr:GPUS:node, or --backend host, which measures TCP between CPU buffers",
        )
    return NCCL


def _check_alike(counts: dict[str, int], what: str, next_step: str) -> None:
    usual = max(set(counts.values()), key=list(counts.values()).count)
    odd = {host: count for host, count in counts.items() if count != usual}
    if odd:
        named = shorten([f"{host} {count}" for host, count in odd.items()])
        raise UsageError(
            f"nodes with {plural(usual, what)}, but these differ: {named}",
            expected=f"the same number of {what}s on every node",
            reason="rails are compared with the same rail of other nodes",
            next_step=next_step,
        )


_WRONG = (Verdict.FAIL, Verdict.ERROR, Verdict.WARN)


def whole_node_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without CUDA_VISIBLE_DEVICES, because it may show a rank only one GPU of its node."""
    return {name: value for name, value in environment.items() if name != "CUDA_VISIBLE_DEVICES"}


def fact_findings(
    nodes: Sequence[Topology], profiles: Sequence[Profile | None], ranks: Sequence[RankFacts] = ()
) -> list[Finding]:
    """Return the findings that `gpubench check --quick` has for nodes with GPUs. `profiles` has one entry per node."""
    if not any(node.gpus for node in nodes):
        return []
    found = judge(Facts(nodes, group_nodes(nodes), ranks, profiles, QUICK)).findings
    return [each for each in found if each.severity in _WRONG]


@contextmanager
def telling(plan: ScanPlan, keep: Keep, *, is_rank: bool = False) -> Iterator[Keep]:
    """Yield a function that calls `keep` and shows the progress of the scan on stderr."""
    display = ProgressDisplay()
    if plan.presentation.show_progress:
        display = make_progress_display(sys.stderr, is_rank=is_rank, say=partial(say, to=sys.stderr))
    display.update(0, scan.ROUNDS[scan.ScanPhase.SCREENING], scan.ScanPhase.SCREENING)

    def kept(planned: scan.PlannedRound, outcome: scan.RoundOutcome) -> None:
        keep(planned, outcome)
        display.update(planned.number, _most_rounds(planned.phase), f"rounds at most, after {planned.phase}")

    try:
        yield kept
    finally:
        display.stop()


def _most_rounds(phase: scan.ScanPhase) -> int:
    """Return the maximum number of rounds for a scan that is in this phase. A scan without suspects ends after
    screening.
    """
    if phase is scan.ScanPhase.SCREENING:
        return scan.ROUNDS[phase]
    return sum(
        scan.ROUNDS[each] for each in (scan.ScanPhase.SCREENING, scan.ScanPhase.SUSPECTS, scan.ScanPhase.CONFIRMATION)
    )


FILE = "scan.jsonl"
_PHASES = tuple(phase for phase, rounds in scan.ROUNDS.items() for _ in range(rounds))
_SCREENING = scan.ROUNDS[scan.ScanPhase.SCREENING]
_MOST_BYTES = 512 * 2**20
_WANTED = Wanted("a folder from gpubench scan --rounds", "gpubench scan --rounds DIR", _MOST_BYTES, "rounds/")


class KeptScan(Struct, frozen=True):
    """The contents of a folder of rounds.

    - `phases_0` has the measurements within nodes before the first round, called phase 0. There is one for the scan and
      one for each job that resumed it.
    - `before` has the nodes and rails that failed before the first round.
    """

    stored: scan.StoredFabric
    fabric: scan.ScanFabric
    phases_0: list[scan.StoredLocal] = field(default_factory=list)
    outcomes: list[scan.RoundOutcome] = field(default_factory=list)
    before: scan.BeforeRounds = field(default_factory=scan.BeforeRounds)

    def local(self) -> dict[scan.LocalFigure, float]:
        """Return the slow measurements of phase 0, each as a fraction of the typical value."""
        return find_slowest(*(slow_figures(each.figures(self.fabric)) for each in self.phases_0))

    def findings(self) -> list[Finding]:
        """Return the findings from before the first round.

        Older versions stored only the measurements of phase 0, so findings are derived from these.
        """
        found: list[Finding] = []
        for each in self.phases_0:
            if each.findings is not None:
                found += each.findings
                continue
            figures = each.figures(self.fabric)
            found += wrong_data_inside(self.fabric, figures)
            found += not_measured_inside(self.fabric, [figures], list(slow_figures(figures)))
        return each_once(found)


def each_once(findings: Iterable[Finding]) -> list[Finding]:
    """Remove duplicates: return the last finding for each combination of id and subject."""
    return list({(finding.id, finding.subject): finding for finding in findings}.values())


class RoundsFolder:
    """Writes each round to disk as it ends. A resumed scan only writes the new rounds."""

    def __init__(self, directory: Path | None, kept: KeptScan | None = None) -> None:
        self._path = None if directory is None else directory / FILE
        self._kept = kept

    def begin(self, stored: scan.StoredFabric) -> None:
        """Create the file. If the scan is resumed, remove an incomplete last line instead.

        Raises UsageError if the folder is not writable or already has a scan. Raises CouldNotMeasureError if the file
        of a resumed scan is not writable.
        """
        if self._path is None:
            return
        if self._kept is not None:
            self._cut()
            return
        if self._path.exists():
            raise UsageError(
                f"{self._path} already exists",
                expected="a new or empty folder for --rounds",
                next_step=f"gpubench scan --resume {self._path.parent}, or name another folder",
            )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._write(json_line(stored))
        except OSError as error:
            raise UsageError(
                f"{self._path} cannot be written: {os.strerror(error.errno or 0)}",
                expected="a folder that you may write",
                next_step="name such a folder with --rounds",
            ) from error

    def _cut(self) -> None:
        if self._path is None:
            return
        try:
            text = self._path.read_bytes()
            with self._path.open("r+b") as file:
                file.truncate(text.rfind(b"\n") + 1)
        except OSError as error:
            raise self._lost(error) from error

    def found(self, before: scan.BeforeRounds) -> None:
        """Write the nodes and rails that failed before the next round. Raises CouldNotMeasureError if the file is
        not writable.
        """
        if before.gone or before.failed:
            self._add(json_line(scan.StoredAbsent.of(before)))

    def phase_0(self, local: Sequence[scan.LocalFigure], findings: Sequence[Finding] = ()) -> None:
        """Write the measurements and findings of phase 0. Raises CouldNotMeasureError if the file is not writable."""
        stored = scan.StoredLocal.of(local, findings)
        if self._kept is None or stored not in self._kept.phases_0:
            self._add(json_line(stored))

    def _lost(self, error: OSError) -> CouldNotMeasureError:
        return CouldNotMeasureError(
            f"{self._path} can no longer be written: {os.strerror(error.errno or 0)}",
            expected="room for every round",
            next_step=f"gpubench scan --replay {self._path.parent if self._path else ''} judges the earlier rounds",
        )

    def keep(self, _planned: scan.PlannedRound, outcome: scan.RoundOutcome) -> None:
        """Write a round to disk, unless it is there already. Raises CouldNotMeasureError if the file is not
        writable.
        """
        if self._kept is None or outcome.number > len(self._kept.outcomes):
            self._add(json_line(scan.StoredRound.of(outcome)))

    def _add(self, lines: str) -> None:
        try:
            self._write(lines)
        except OSError as error:
            raise self._lost(error) from error

    def _write(self, lines: str) -> None:
        if self._path is None:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())


def is_quick(asked: bool, kept: KeptScan | None) -> bool:  # noqa: FBT001 - what --quick is
    """Return whether to stop after screening. If the folder has later rounds, they are judged despite --quick."""
    return asked and (kept is None or len(kept.outcomes) <= _SCREENING)


def check_same(kept: KeptScan, now: scan.StoredFabric, directory: Path) -> KeptScan:
    """Return the stored scan. Raises UsageError if nodes, rails, seed or backend differ between the stored scan and
    this job.
    """
    for what, before, here in (
        ("nodes", kept.stored.hosts, now.hosts),
        ("rails", kept.stored.rails, now.rails),
        ("seed", kept.stored.seed, now.seed),
        ("backend", kept.stored.backend, now.backend),
    ):
        if before != here:
            raise UsageError(
                f"--resume {directory}: its {what} are {_shown(before)}, here {_shown(here)}",
                expected="the same job, with all its nodes or the remaining ones",
                next_step=f"gpubench scan --replay {directory} judges the finished rounds, and --rounds DIR starts "
                "again",
            )
    return kept


def _shown(value: object) -> str:
    return f"{len(value)} of other names" if isinstance(value, tuple) else str(value)


def read_rounds(directory: Path) -> KeptScan:
    """Read a folder of rounds, and ignore an incomplete last line. Raises UsageError."""
    path = directory / FILE
    text = read_text(path, _WANTED)
    lines = text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]
    if not lines:
        raise _WANTED.unfit(f"{path} is cut off in its first line", reason="the job ended at its start")
    stored = read_json_line(scan.StoredFabric, lines[0], f"{path}, line 1")
    kept = KeptScan(stored, stored.fabric())
    for number, line in enumerate(lines[1:], 2):
        where = f"{path}, line {number}"
        if '"quantities"' in line:
            kept.phases_0.append(read_json_line(scan.StoredLocal, line, where))
            kept.phases_0[-1].figures(kept.fabric)
        elif '"absent"' in line:
            kept = _without(kept, read_json_line(scan.StoredAbsent, line, where))
        else:
            kept.outcomes.append(read_json_line(scan.StoredRound, line, where).outcome(kept.fabric))
    _check_order(kept.outcomes, path)
    return kept


def _without(kept: KeptScan, absent: scan.StoredAbsent) -> KeptScan:
    gone = absent.nodes(kept.fabric)
    before = scan.BeforeRounds(kept.before.gone, {**absent.rails(kept.fabric), **kept.before.failed})
    if kept.outcomes:
        kept.outcomes[-1] = replace(kept.outcomes[-1], gone={**gone, **kept.outcomes[-1].gone})
        return replace(kept, before=before)
    return replace(kept, before=replace(before, gone={**gone, **kept.before.gone}))


def _check_order(outcomes: Sequence[scan.RoundOutcome], path: Path) -> None:
    numbers = [outcome.number for outcome in outcomes]
    phases = [outcome.phase for outcome in outcomes]
    if numbers != list(range(1, len(numbers) + 1)) or phases != list(_PHASES[: len(phases)]):
        raise UsageError(
            f"{path} has rounds {', '.join(map(str, numbers[:12]))}",
            expected="every round once, in this order: three of screening, three of suspects, five of confirmation",
            reason="two scans wrote to one folder, or the file was edited by hand",
        )


class ResumedRounds:
    """Returns the stored rounds first, then measures new ones. Nodes that are missing now are reported as gone in
    the last stored round.
    """

    def __init__(
        self, kept: Sequence[scan.RoundOutcome], measurer: RoundMeasurer | None, absent: Mapping[int, str] | None = None
    ) -> None:
        self._kept = list(kept)
        self._measurer = measurer
        if self._kept and absent:
            last = self._kept[-1]
            self._kept[-1] = replace(last, gone={**absent, **last.gone})

    def measure(self, planned: scan.PlannedRound) -> scan.RoundOutcome:
        """Return the stored round with this number, or measure it. Raises EndOfRoundsError if there is no measurer."""
        if planned.number <= len(self._kept):
            return self._kept[planned.number - 1]
        if self._measurer is None:
            raise EndOfRoundsError
        return self._measurer.measure(planned)


class RenumberedRounds:
    """Measures rounds of a resumed scan in a job that numbers the nodes differently."""

    def __init__(self, measurer: RoundMeasurer, numbers: Mapping[int, int]) -> None:
        """`numbers` maps node numbers of this job to node numbers of the original scan."""
        self._measurer = measurer
        self._then = numbers
        self._now = {then: now for now, then in numbers.items()}

    def measure(self, planned: scan.PlannedRound) -> scan.RoundOutcome:
        """Measure a round, and return it with the node numbers of the original scan."""
        now = self._now
        pairs = tuple(scan.NodePair(now[first], now[second]) for first, second in planned.pairs)
        retired = frozenset(scan.NodeRail(now[node], rail) for node, rail in planned.retired if node in now)
        outcome = self._measurer.measure(replace(planned, pairs=pairs, retired=retired))
        samples = (
            sample._replace(
                first=self._then[sample.first],
                second=self._then[sample.second],
                culprit=None if sample.culprit is None else self._then[sample.culprit],
            )
            for sample in outcome.samples
        )
        gone = {self._then[node]: seen for node, seen in outcome.gone.items()}
        return replace(outcome, samples=tuple(samples), gone=gone)


def numbered(found: scan.BeforeRounds, numbers: Mapping[int, int]) -> scan.BeforeRounds:
    """Return the failures of phase 0 with the node numbers of the original scan."""
    failed = {scan.NodeRail(numbers[node], rail): seen for (node, rail), seen in found.failed.items()}
    return scan.BeforeRounds({numbers[node]: seen for node, seen in found.gone.items()}, failed)


def numbers_of_kept(kept: KeptScan, hosts: Sequence[str], directory: Path) -> dict[int, int]:
    """Map node numbers of this job to node numbers of the resumed scan.

    Raises UsageError if a node was not in the scan, or if the scan finished no round.
    """
    then = {host: number for number, host in enumerate(kept.fabric.hosts)}
    strangers = [host for host in hosts if host not in then]
    if strangers or not kept.outcomes:
        raise UsageError(
            f"--resume {directory}: {shorten(strangers)} did not take part in it"
            if strangers
            else f"--resume {directory}: it has no finished round",
            expected="the remaining nodes of the same scan",
            next_step=f"gpubench scan --replay {directory} judges the finished rounds, and --rounds DIR starts again",
        )
    return {number: then[host] for number, host in enumerate(hosts)}


def deliver(
    plan: ScanPlan,
    arguments: Sequence[str],
    result: ScanResult,
    *,
    backend: str,
    seed: int,
    source: str | None = None,
    profile: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    is_rank: bool = False,
) -> int:
    """Present the report and return the exit code. Raises GpubenchError if an output cannot be written."""
    course, fabric = result.course, result.course.fabric
    sharing: dict[str, object] = {} if plan.ranks_per_gpu == 1 else {"ranks_per_gpu": plan.ranks_per_gpu}
    if sharing and is_mps_running(os.environ):
        sharing["sm_percent"] = sm_percent(os.environ)
    report = report_of(result, 0 if plan.ranks_as_nodes else fabric.rails)
    metadata = build_metadata(
        arguments,
        NAME,
        origin=result.origin,
        backend=backend,
        hosts=list(fabric.hosts),
        source=source,
        profile=profile,
        environment=environment or {},
        options={
            "quick": plan.quick,
            "strict": plan.strict,
            "seed": seed,
            "rails": fabric.rails,
            **sharing,
            "leaves": len(set(filter(None, fabric.leaves))),
            "rounds": len(course.outcomes),
            "seconds": round(sum(outcome.seconds for outcome in course.outcomes), 3),
            "noise_percent": 100 * course.yardstick.deviation,
            "sure_loss_percent": result.sure_loss_percent,
            "rates_known": all_rates_known(course),
            "nic_rate_percent": least_percent(course, result.rails_without_level()),
            **({} if plan.hostfile is None else {"hostfile": str(plan.hostfile)}),
        },
    )
    with presenting(plan.presentation, is_rank=is_rank) as presenter:
        presenter.begin(metadata, ())
        presenter.end(report)
        if plan.hostfile is not None:
            rows = report.rows(scan.ExclusionRow)
            lines = [f"{row.line}\n" for row in rows if row.tool == scan.Tool.MPIRUN]
            with name_output(plan.hostfile):
                plan.hostfile.write_text("".join(lines), encoding="utf-8")
        return presenter.exit_code
