"""Prospects of machines that nothing was sent between: pairs that would fall back or be slow, and the causes."""

from collections.abc import Collection, Iterator, Sequence

from gpubench.model.paths.evidence import Conclusion, Confidence
from gpubench.model.results.fallback import shown
from gpubench.model.results.report import Report
from gpubench.model.results.rows.causes import CAUSES_SECTION, UNREAD_SECTION, CauseRow, Effect
from gpubench.model.results.rows.evidence import FALLBACK_SECTION, FallbackRow
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.units import compress_names
from gpubench.model.terms.verdict import Verdict

_MOST_PAIRS = 8
_FEW_PAIRS = 2
_ARROW = " → "

_BETWEEN_NODES = (Effect.SOCKETS, Effect.NO_GPUDIRECT)
_ELSEWHERE = {
    Effect.SLOW: "would be slow, because",
    Effect.NETWORK_INSIDE: "would take a network inside a node where there is no P2P, because",
    Effect.APPLICATION: "would be copied through host memory by MPI, UCX or a framework, because",
    Effect.WRONG: "would hang or get wrong data, because",
}
"""Words for causes that leave a path direct, by the first of their effects."""


def was_looked_at(report: Report) -> bool:
    """True where nothing was sent between the machines of a report: it alone has causes that could not be read."""
    return UNREAD_SECTION in report.sections


def lead(origin: str) -> str:
    """The beginning of every line on fallback."""
    return "fallback (simulated): " if origin == Origin.SIMULATED else "fallback: "


def prospect_lines(report: Report, said: Collection[str] = ()) -> list[tuple[Verdict, str]]:
    """The pairs of GPUs and the nodes that would fall back, with causes; of those in `said` no cure is told."""
    rows = report.rows(FALLBACK_SECTION, FallbackRow)
    between = list(_between(report, said))
    alone = len(rows) == 1
    return [*((Verdict(row.verdict), _line(row, said, alone=alone, nodes=bool(between))) for row in rows), *between]


def other_lines(report: Report) -> Iterator[tuple[Verdict, str]]:
    """Causes that would make paths slow, or go wrong in other ways."""
    blamed = {row.cause for row in report.rows(FALLBACK_SECTION, FallbackRow)}
    for row in _causes(report):
        said = _ELSEWHERE.get(Effect(row.effects[0]))
        if row.id not in blamed and said is not None:
            maybe = said.replace("would", "might") if row.confidence == Confidence.WEAK else said
            yield Verdict(row.verdict), f"{row.subject} {maybe} {row.evidence} ({row.id})"


def _line(row: FallbackRow, said: Collection[str], *, alone: bool, nodes: bool) -> str:
    """A line of pairs inside nodes. `alone` is whether it is of all of them; `nodes` whether others are between."""
    pairs = f"all {row.count} pairs" if alone and row.count > 1 else _named(row)
    begin = lead(row.origin)
    match Conclusion(row.conclusion):
        case Conclusion.IMPOSSIBLE:
            kind = "by design" if row.verdict == Verdict.SKIP else "HOST-STAGED"
            cure = "" if row.verdict == Verdict.SKIP or row.cause in said or not row.advice else f"; {row.advice}"
            return f"{begin}{pairs} would fall back, because {row.cause_seen}: {kind}, {row.cause} ({row.how}){cure}"
        case Conclusion.POSSIBLE:
            none = f"no pair {'inside a node ' if nodes else ''}would fall back: " if alone else ""
            where = pairs if alone else "all others"
            return f"{begin}{none}direct possible for {where} ({row.how}); gpubench p2p shows what is"
        case _:
            return f"{begin}not known{f' for {pairs}' if row.pairs else ''}: {row.how}"


def _named(row: FallbackRow) -> str:
    """The pairs of a line: by the GPU that all of them have in common, else the first few."""
    common = set[str].intersection(*(set(pair.split(_ARROW)) for pair in row.pairs))
    if len(common) == 1 and len(row.pairs) == row.count > _FEW_PAIRS:
        return f"all {row.count} pairs of {common.pop()}"
    return shown(row, _MOST_PAIRS)


def _between(report: Report, said: Collection[str]) -> Iterator[tuple[Verdict, str]]:
    """Lines of nodes whose way to others would be sockets, or lead through host memory."""
    origin = next((row.origin for row in report.rows(FALLBACK_SECTION, FallbackRow)), "")
    for row in _causes(report):
        effects = [effect for effect in row.effects if effect in _BETWEEN_NODES]
        if row.effects[0] not in _BETWEEN_NODES:
            continue
        kind = "by design" if row.verdict == Verdict.SKIP else " or ".join(effects)
        cure = "" if row.verdict == Verdict.SKIP or row.id in said else f"; {row.advice}"
        would = "might" if row.confidence == Confidence.WEAK else "would"
        hosts = compress_names(row.hosts)
        yield (
            Verdict(row.verdict),
            f"{lead(origin)}{hosts} → other nodes {would} fall back, because {row.evidence}: {kind}, {row.id}{cure}",
        )


def _causes(report: Report) -> Sequence[CauseRow]:
    """Those that follow from no other."""
    return [row for row in report.rows(CAUSES_SECTION, CauseRow) if not row.implied_by]
