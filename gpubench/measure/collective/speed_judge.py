"""The judgement of the speed of rows: each as it is measured, and in the end why those that are slow are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from gpubench.collectives.record import Collective
from gpubench.model.facts.backends import TORCH_NCCL, composed
from gpubench.model.paths.evidence import Confidence
from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.speed import ExpectedTime, Slowness, compared, is_judged, is_slow, judged
from gpubench.model.terms.operation import DataType, Placement, ReduceOp
from gpubench.model.terms.units import counted
from gpubench.model.terms.verdict import HOST_STAGED, SLOW_UNEXPLAINED, Finding, Verdict, overall

if TYPE_CHECKING:
    from gpubench.conditions.ranking import Named
    from gpubench.measure.paths.diagnosis import Explained
    from gpubench.model.paths.busbw_limit import NodeNetwork
    from gpubench.model.profiles.profile import Profile

_MOST_TRIES = 3

_SIMULATED, _HOST = "simulated", "host"
_BY_NCCL = ("nccl", _SIMULATED)
"""Backends whose times profiles and limits are of."""

PastTime = Callable[[CollectiveRow], ExpectedTime | None]


def _no_past(_row: CollectiveRow) -> None:
    return None


T = TypeVar("T")


def middle(tries: Sequence[T], time_of: Callable[[T], float]) -> T:
    """Of several tries the one whose time is in the middle, the faster of two."""
    return sorted(tries, key=time_of)[(len(tries) - 1) // 2]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTimes:
    """The sources of what is expected of rows, asked in their order: a profile, this machine's past, a model of what
    joins its nodes, the limit.

    `nccl` is the version that measures; `network` is what joins the nodes, None where that is not known; `unlike` is
    why these ranks are compared with nothing, '' where they may be. `assumed` says what of the network nobody told, as
    the NICs of a table; slow rows of several nodes then warn, and do not fail.
    """

    collective: Collective
    profile: "Profile | None" = None
    nccl: str | None = None
    past: PastTime = _no_past
    network: "NodeNetwork | None" = None
    unlike: str = ""
    assumed: str = ""

    def of(self, row: CollectiveRow) -> ExpectedTime | None:
        """The expectation of a row; None where no source has one: its speed is not judged."""
        found = None if self.unlike or row.ranks == 1 else self._known(row)
        return found.doubted(self.assumed) if found is not None and self.assumed and row.nodes > 1 else found

    def _known(self, row: CollectiveRow) -> ExpectedTime | None:
        if row.backend not in _BY_NCCL and not _is_one_call_of_nccl(row):
            return self.past(row) or self._over_links(row)
        from gpubench.collectives.expected import from_limit, from_network, from_profile

        found = None
        if self.profile is not None:
            like_model = row.backend == _SIMULATED
            found = from_profile(self.profile, self.collective, row, nccl=self.nccl, like_model=like_model)
        found = found or self.past(row)
        if found is None and self.network is not None:
            found = from_network(self.collective, row, self.network, self.profile)
        return found or from_limit(self.collective, row)

    def _over_links(self, row: CollectiveRow) -> ExpectedTime | None:
        """What a row of the host backend should take over the links between its nodes, where these are known."""
        if self.network is None or row.backend != _HOST:
            return None
        from gpubench.collectives.expected import from_links

        return from_links(self.collective, row, self.network)


def _is_one_call_of_nccl(row: CollectiveRow) -> bool:
    """True of what a framework hands to NCCL as it is, and not made of several operations."""
    op = None if row.op is None else ReduceOp(row.op)
    parts = composed(row.backend, row.collective, DataType(row.dtype), op, Placement(row.placement))
    return row.backend == TORCH_NCCL and not parts


@dataclass(slots=True)
class SpeedJudge:
    """Judges the rows of a sweep, and explains those that are slow; `slow` are these.

    Beside another backend a framework's rows are compared and not judged: the table holds them against that.
    """

    expected: ExpectedTimes
    hosts: Sequence[str]
    slow: list[CollectiveRow] = field(default_factory=list)
    _first: str | None = None

    def wants_another(self, tries: Sequence[CollectiveRow]) -> bool:
        """True if a row should be measured again: it is slow or nearly, or the verdicts on two tries differ.

        What goes through host memory is explained, and measured once: a size may take a minute there.
        """
        first, *more = tries
        expected = self.expected.of(first) if is_judged(first) else None
        if expected is None or any(row.wrong or row.host_staged for row in tries) or len(tries) >= _MOST_TRIES:
            return False
        return (not more and expected.wants_another(first)) or len({expected.verdict(row) for row in tries}) > 1

    def row(self, row: CollectiveRow) -> CollectiveRow:
        """The row with what is expected of it, and the verdict on its speed.

        Settings that somebody wants to compare are as fast as they are, and not judged.
        """
        self._first = self._first or row.backend
        expected = self.expected.of(row)
        if expected is None:
            return row
        is_beside = row.backend == TORCH_NCCL and self._first != TORCH_NCCL
        if is_beside or not is_judged(row):
            return compared(row, expected)
        row = judged(row, expected)
        if is_slow(row):
            self.slow.append(row)
        return row

    def findings(self, found: Sequence[Finding], explained: "Explained | None") -> tuple[Finding, ...]:
        """All findings: those on paths with the slow rows that they explain, or one that says why rows are slow."""
        if not self.slow:
            return tuple(found)
        slowness = Slowness.of(self.slow)
        staged = next((each for each in found if each.id == HOST_STAGED and each.severity is Verdict.FAIL), None)
        if staged is not None:
            told = replace(staged, consequences=(*staged.consequences, str(slowness)))
            return tuple(told if each is staged else each for each in found)
        return (*found, self._finding(slowness, explained))

    def _finding(self, slowness: Slowness, explained: "Explained | None") -> Finding:
        where = self.hosts[0] if len(self.hosts) == 1 else counted(len(self.hosts), "host")
        why = _NOT_LOOKED_AT if explained is None else _not_explained(explained)
        found = replace(slow_unexplained(slowness, where, why), subjects=tuple(self.hosts))
        cause = None if explained is None else _first_cause(explained, slowness)
        if cause is None:
            return found
        return replace(
            found,
            id=cause.cause.id,
            severity=overall((found.severity, cause.gravity)),
            seen=_seen_where(cause),
            cause=cause.cause.title,
            next_command=cause.with_ids(cause.cure),
            consequences=(str(slowness),),
        )


_NOT_LOOKED_AT = "not known: neither paths nor settings were looked at"
_ADVICE = (
    "gpubench p2p finds a slow pair; gpubench check reads clocks, links and errors; "
    "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,TUNING gpubench allreduce shows what NCCL chose"
)


def slow_unexplained(slowness: Slowness, where: str, why: str = _NOT_LOOKED_AT) -> Finding:
    """The finding on rows that are slow for no reason that is known."""
    return Finding(
        id=SLOW_UNEXPLAINED,
        severity=slowness.severity,
        subject=slowness.subject(where),
        seen=slowness.seen,
        expected=slowness.expected,
        cause=why,
        next_command=_ADVICE,
    )


def _first_cause(explained: "Explained", slowness: Slowness) -> "Named | None":
    """The likeliest cause of slowness; a weak one explains nothing by itself."""
    found = explained.with_slow(slowness.rows).slowing(small=slowness.is_of_small)
    return next((each for each in found if each.confidence is not Confidence.WEAK), None)


def _seen_where(cause: "Named") -> str:
    """The evidence for a cause, with the device that it is on."""
    is_on_device = any(each.gpus is not None or each.pairs is not None for each in cause.sightings)
    is_told = all(each.subject in each.seen for each in cause.sightings)
    return f"{cause.subject}: {cause.seen}" if is_on_device and not is_told else cause.seen


def _not_explained(explained: "Explained") -> str:
    from gpubench.model.results.rows.causes import Effect

    weak = [each.seen for each in explained.diagnosis.of_effect(Effect.SLOW)]
    perhaps = f"; perhaps {', or '.join(weak)}" if weak else ""
    return f"no setting, process, device or link that could be read explains it{perhaps}"
