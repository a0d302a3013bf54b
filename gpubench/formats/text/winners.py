"""The end of a sweep over settings for people: the fastest by size, what the own choice loses, where lines cross."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from gpubench.formats.text.columns import Column, fitted_lines
from gpubench.model.results.report import BACKENDS, Metadata, Report
from gpubench.model.results.winners import REFUSED_SECTION, WINNERS_SECTION, RefusedRow, WinnerRow, crossings
from gpubench.model.terms.nccl_choice import AGAIN, HIERARCHICAL, OWN_CHOICE, NcclChoice, taken_name
from gpubench.model.terms.units import format_percent, format_size

_BEYOND_NOISE = "*"


def way_name(backend: str, setting: str | None, *, several: bool) -> str:
    """The size and setting of a line; with several backends, the backend too."""
    if not several:
        return setting or OWN_CHOICE
    return " ".join(filter(None, (backend, setting)))


def way_names(metadata: Metadata) -> list[str]:
    """The names of all ways of a sweep; none where there is only one."""
    names = list(metadata.options.get("settings") or ())
    if not names:
        return []
    beside, backend = backends_beside(metadata), str(metadata.backend)
    own = [name for name in (None, *names, AGAIN) if name not in beside]
    ways = [way_name(backend, name, several=bool(beside)) for name in own]
    for other in beside:
        ways += [other, *([f"{other} {HIERARCHICAL}"] if HIERARCHICAL in names else [])]
    return ways


def backends_beside(metadata: Metadata) -> list[str]:
    """The backends that were measured beside the first."""
    return [each for each in metadata.options.get("settings") or () if each in BACKENDS and each != metadata.backend]


def winner_lines(report: Report, width: int) -> Iterator[str]:
    """Tables by type, reduction and placement, each with its cross-overs; then what could not run."""
    best = report.rows(WINNERS_SECTION, WinnerRow)
    if all(row.setting is None for row in best):
        best = []  # whole backends alone have a table of their own, by size
    for _, series in groupby(best, key=lambda row: (row.dtype, row.op, row.placement)):
        yield from ("", *_series(list(series), width))
    if best:
        yield from ("", _legend(best))
    yield from map(_refused, report.rows(REFUSED_SECTION, RefusedRow))


def _series(rows: Sequence[WinnerRow], width: int) -> Iterator[str]:
    first = rows[0]
    what = ", ".join(filter(None, (first.dtype, first.op, first.placement.replace("_", " "))))
    yield f"fastest by size, {what}"
    columns = (
        Column("size", [format_size(row.size_bytes) for row in rows], right=True),
        Column("fastest", [row.fastest for row in rows]),
        Column("time µs", [_number(row.time_us) for row in rows], right=True),
        Column("own choice", [_own(row) for row in rows]),
        Column("time µs", [_number(row.own_time_us) for row in rows], right=True),
        Column("loses", [_loss(row) for row in rows], right=True),
        Column("noise", [format_percent(row.noise_percent, "?", 1) for row in rows], spare=1, right=True),
        Column("drift", [format_percent(row.own_drift_percent, "?", 1) for row in rows], spare=2, right=True),
    )
    yield from fitted_lines(columns, width)
    yield f"cross-over  {_crossings(rows)}"


def _crossings(rows: Sequence[WinnerRow]) -> str:
    """'ring/ll up to 2M, ring/simple from 4M on'."""
    (_, name), *further = crossings(rows)
    if not further:
        return f"none: {name} at all sizes, or no slower than noise"
    before = max(row.size_bytes for row in rows if row.size_bytes < further[0][0])
    return (
        ", ".join(
            (f"{name} up to {format_size(before)}", *(f"{each} from {format_size(size)}" for size, each in further))
        )
        + " on"
    )


def _own(row: WinnerRow) -> str:
    return taken_name(row.own_algorithm, row.own_protocol) or row.own_backend


def _loss(row: WinnerRow) -> str:
    mark = _BEYOND_NOISE if row.beyond_noise else " "
    return f"{row.loss_percent:.1f}%{mark}"


def _legend(rows: Sequence[WinnerRow]) -> str:
    worst = max(rows, key=lambda row: row.loss_percent if row.beyond_noise else float("-inf"))
    if all(row.beyond_noise is None for row in rows):
        return "noise unknown: sizes were too few; more of them, or --iters auto, tell"
    if not worst.beyond_noise:
        return "own choice        nothing is faster beyond the noise"
    where = f"{format_size(worst.size_bytes)} {worst.placement.replace('_', ' ')}"
    return (
        f"own choice        loses {worst.loss_percent:.1f}% at most, at {where} to {worst.fastest} (* beyond the noise)"
    )


def _refused(row: RefusedRow) -> str:
    where = "" if row.size_bytes is None else f" from {format_size(row.size_bytes)}"
    what = " ".join(filter(None, (row.dtype, row.op)))
    name = row.setting if NcclChoice.of(row.setting) != NcclChoice() else f"{row.backend} {row.setting}"
    name = row.backend if row.setting == row.backend else name
    return f"could not run     {name}{f', {what}' if what else ''}{where}: {row.reason}"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 1_000 else f"{value:.1f}"
