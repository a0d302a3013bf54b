"""What a sweep has found out about paths: all four kinds of evidence for every pair that it used, and the verdict."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gpubench.conditions.circumstances import Circumstances
from gpubench.measure.collective.counting import Traffic
from gpubench.measure.collective.logged_choices import LoggedChoices, shared
from gpubench.measure.paths.diagnosis import Explained
from gpubench.measure.paths.report import PathOutcome, path_sections, report_on
from gpubench.model.paths.evidence import Conclusion, Evidence, PathEvidence, State
from gpubench.model.paths.link_evidence import Flow, Speed, measured
from gpubench.model.paths.p2p import Carried
from gpubench.model.paths.selection import Pair, is_staged, names, without_idle
from gpubench.model.paths.transport import Transport
from gpubench.model.paths.wiring import Located, Wiring
from gpubench.model.results.explanation import Explanation
from gpubench.model.results.fallback import End, KnownPath, fallback_rows, unknown_row
from gpubench.model.results.report import CollectiveRow, Report
from gpubench.model.terms.origin import Origin

_Kind = tuple[bool, bool, bool | None]
"""Of a path: inside a node, over NVLinks, host-staged."""

_OF_ONE_KIND = "paths of several kinds meet at these GPUs, whose counters and times do not tell them apart"


@dataclass(slots=True)
class RowObservations:
    """What operations have shown so far, on the first rank.

    `traffic` and `wrong` are by rank; `largest` is the row of the largest size, of these the fastest.
    """

    traffic: Sequence[Traffic] = ()
    wrong: dict[int, int] = field(default_factory=dict)
    checked: bool = False
    largest: CollectiveRow | None = None

    def take(self, row: CollectiveRow, wrong_by_rank: Sequence[int]) -> None:
        """One more row."""
        self.checked = self.checked or row.wrong is not None
        for rank, wrong in enumerate(wrong_by_rank):
            self.wrong[rank] = self.wrong.get(rank, 0) + wrong
        best = self.largest
        if best is None or (row.size_bytes, row.busbw_gb_s) > (best.size_bytes, best.busbw_gb_s):
            self.largest = row


def conclude(
    heard: LoggedChoices,
    seen: RowObservations,
    around: Circumstances,
    due: Sequence[tuple[float, float]],
    *,
    strict: bool,
    origin: Origin = Origin.MEASURED,
) -> PathOutcome:
    """The verdict on all paths. `due` are each rank's sent and received bytes for a byte of the size, at least."""
    paths = _Paths(heard, seen, around, due).known()
    unheard = f"NCCL's log was not heard: {heard.silence}" if heard.silence else ""
    explained = Explained(replace(around, staged=_staged(paths), wrong=_wrong(paths)))
    rows = fallback_rows(paths, origin, lambda members: explained.first(_staged(members)), unheard, _lost(heard))
    if rows and heard.no_tuning and not heard.silence:
        rows[0] = replace(rows[0], how=f"{rows[0].how}; no algorithms: {heard.no_tuning}")
    return report_on(paths, rows, origin, explained.rows(), strict=strict)


def unwatched(report: Report, why: str, origin: Origin = Origin.MEASURED) -> Report:
    """The report of a run that nobody watched: paths have no rows where there is nothing to know, else the reason."""
    sections = path_sections((), [unknown_row(origin, why)] if why else (), ())
    return replace(report, sections={**sections, **report.sections})


def simulated(staged: Sequence[Pair], wiring: Wiring, source: str, *, strict: bool) -> PathOutcome:
    """What a model of a machine with faults says of the paths that these make go through host memory."""
    paths = [
        KnownPath(
            source=_end(pair[0], wiring.gpus[pair[0]]),
            destination=_end(pair[1], wiring.gpus[pair[1]]),
            evidence=PathEvidence(
                capability=wiring.capability(pair),
                selection=Evidence(State.CONTRADICTING, "the model goes through host memory"),
            ),
            path_class=wiring.path(pair),
            limit_gb_s=wiring.limit(pair).gb_s,
        )
        for pair in staged
    ]
    explained = Explained(Circumstances(wiring=wiring, staged=dict.fromkeys(staged, ())))
    fault = Explanation("simulated", source, "leave the fault out")

    def cause_of(members: Sequence[KnownPath]) -> Explanation:
        """What the facts show of a fault; some faults nothing tells of."""
        found = explained.explaining(_staged(members))
        return found[0].explanation if found else fault

    rows = fallback_rows(paths, Origin.SIMULATED, cause_of)
    return report_on(paths, rows, Origin.SIMULATED, explained.rows(), strict=strict)


def _lost(heard: LoggedChoices) -> list[str]:
    """Ranks whose library was heard, and named nobody that they send to."""
    ranks = {rank for used in shared(heard.choices) for rank in used.unheard}
    return [] if heard.silence else [str(rank) for rank in sorted(ranks)]


def _staged(paths: Sequence[KnownPath]) -> dict[Pair, Sequence[Transport]]:
    """Of some paths those that go through host memory, by their ranks, with what they take."""
    return {_ranks(path): path.transports for path in paths if path.judgement.conclusion is Conclusion.STAGED}


def _wrong(paths: Sequence[KnownPath]) -> frozenset[Pair]:
    return frozenset(_ranks(path) for path in paths if path.judgement.conclusion is Conclusion.WRONG)


def _ranks(path: KnownPath) -> Pair:
    return int(path.source.short), int(path.destination.short)


def _by_design(pair: Pair, transports: Sequence[Transport], wiring: Wiring) -> str:
    """Why a pair goes through host memory where that is no fault; inside a node, no design makes it take a network."""
    if wiring.together(pair) and any(transport.network for transport in transports):
        return ""
    return wiring.by_design(pair)


class _Paths:
    """Puts together what is known of each pair."""

    def __init__(
        self, heard: LoggedChoices, seen: RowObservations, around: Circumstances, due: Sequence[tuple[float, float]]
    ) -> None:
        self._seen, self._wiring, self._due = seen, around.wiring, due
        self._chosen: dict[Pair, dict[Transport, None]] = {}
        for used in shared(heard.choices):
            for pair in without_idle(used.pairs, due):
                self._chosen.setdefault(pair, {}).update(dict.fromkeys(used.pairs[pair]))
        self._silent = bool(heard.silence)
        self._out: dict[int, set[_Kind]] = {}
        self._into: dict[int, set[_Kind]] = {}
        for pair in self._chosen:
            self._out.setdefault(pair[0], set()).add(self._kind(pair))
            self._into.setdefault(pair[1], set()).add(self._kind(pair))
        self._kinds = {kind for kinds in self._out.values() for kind in kinds}

    def known(self) -> list[KnownPath]:
        """The pairs that were used; where the library was silent, those of a node of which figures tell."""
        pairs = set(self._chosen)
        if self._silent:
            ranks = range(len(self._wiring.gpus))
            pairs |= {(one, other) for one in ranks for other in ranks if one != other}
            pairs = {pair for pair in pairs if self._wiring.together(pair) and self._tells(pair)}
        return [self._path(pair) for pair in sorted(pairs)]

    def _tells(self, pair: Pair) -> bool:
        return pair in self._chosen or self._measurement(pair).state is not State.ABSENT

    def _path(self, pair: Pair) -> KnownPath:
        transports = tuple(self._chosen.get(pair, ()))
        source, destination = (_end(rank, self._wiring.gpus[rank]) for rank in pair)
        return KnownPath(
            source=source,
            destination=destination,
            evidence=PathEvidence(
                capability=self._wiring.capability(pair),
                selection=_selection(transports),
                measurement=self._measurement(pair),
                correctness=self._correctness(pair),
                by_design=_by_design(pair, transports, self._wiring),
            ),
            transports=transports,
            path_class=self._wiring.path(pair),
            bandwidth_gb_s=self._bandwidth_gb_s(transports),
            limit_gb_s=self._wiring.limit(pair).gb_s,
        )

    def _measurement(self, pair: Pair) -> Evidence:
        if not self._wiring.together(pair):
            return Evidence(seen="no counter here sees what passes between nodes")
        if not self._is_of_one_kind(pair):
            return Evidence(seen=_OF_ONE_KIND)
        flow = Flow(
            ends=self._ends(pair),
            speed=self._speed(pair),
            has_nvlinks=self._wiring.has_nvlinks(pair),
            limit_gb_s=self._wiring.limit(pair).gb_s,
            through_host_gb_s=self._wiring.through_host_gb_s(pair),
        )
        return measured(flow)

    def _is_of_one_kind(self, pair: Pair) -> bool:
        """Whether all paths out of the source, and all into the destination, are of the kind of this one."""
        return len(self._out.get(pair[0], set()) | self._into.get(pair[1], set())) <= 1

    def _kind(self, pair: Pair) -> _Kind:
        wiring = self._wiring
        return wiring.together(pair), wiring.has_nvlinks(pair), is_staged(tuple(self._chosen[pair]))

    def _ends(self, pair: Pair) -> tuple[Carried, ...]:
        """The counts of those ends through which something had to pass."""
        source, destination = (self._seen.traffic[rank] for rank in pair)
        sent, received = self._due[pair[0]][0], self._due[pair[1]][1]
        return (*([source.sent] if sent else []), *([destination.received] if received else []))

    def _speed(self, pair: Pair) -> Speed | None:
        row = self._seen.largest
        if row is None:
            return None
        due = max(self._due[pair[0]][0], self._due[pair[1]][1])
        busbw = row.busbw_gb_s if len(self._kinds) <= 1 else None
        return Speed(size_bytes=row.size_bytes, passed_gb_s=row.algbw_gb_s * due, busbw_gb_s=busbw)

    def _bandwidth_gb_s(self, transports: Sequence[Transport]) -> float | None:
        """The busbw of a sweep is that of its slowest paths: where some are staged, it says nothing of the others."""
        row = self._seen.largest
        some_staged = any(staged is not False for *_, staged in self._kinds)
        return None if row is None or (some_staged and is_staged(transports) is False) else row.busbw_gb_s

    def _correctness(self, pair: Pair) -> Evidence:
        if not self._seen.checked:
            return Evidence(seen="data were not verified")
        wrong = self._seen.wrong.get(pair[1], 0)
        if wrong:
            return Evidence(State.CONTRADICTING, f"{wrong} wrong elements at rank {pair[1]}")
        if pair not in self._chosen:
            return Evidence(seen="which pairs data came by is not known")
        return Evidence(State.PRESENT, "every element that arrived is right")


def _selection(transports: Sequence[Transport]) -> Evidence:
    if not transports:
        return Evidence(seen="NCCL named no connection")
    staged, said = is_staged(transports), f"NCCL chose {names(transports)}"
    if staged is None:
        return Evidence(seen=f"{said}, of which gpubench does not know what it means")
    return Evidence(State.CONTRADICTING if staged else State.PRESENT, said)


def _end(rank: int, gpu: Located) -> End:
    return End(f"rank {rank}", str(rank), gpu.host, gpu.gpu_bus_id)
