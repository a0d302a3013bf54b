"""Conditions that only several rows of one collective show together; single rows are in `measured`."""

from collections.abc import Iterable, Sequence

from gpubench.conditions.definition.circumstances import Circumstances
from gpubench.conditions.definition.condition import Condition, Family, Found, Sighting
from gpubench.conditions.measured import LATE_RANK
from gpubench.model.paths.wiring import Wiring
from gpubench.model.results.figures import COLLECTIVE_NAMES, Measurements
from gpubench.model.results.neighbours import LONE, SHARE, slow_range
from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.speed import SLOW_RANGE, TOO_NOISY, is_lost_in_noise
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.units import format_size, format_time, grouped
from gpubench.model.terms.verdict import Cure, Finding, Verdict

_ONE_PER_CPU, _IDLE = "Start at most one rank per CPU.", "Run it on an idle machine."


def _noisy(run: Circumstances) -> Found:
    """Rows that somebody expects something of; a gate calls others not judged."""
    yield from _noise_of(row for row in run.measurements.collectives if row.expected_us is not None)


def _noise_of(rows: Iterable[CollectiveRow]) -> Iterable[Sighting]:
    noisy = [row for row in rows if row.verdict == Verdict.INCONCLUSIVE]
    for alike in grouped(noisy, lambda row: row.collective).values():
        worst = max(alike, key=lambda row: (row.ci95_percent or 0.0, row.time_us))
        size, more = format_size(worst.size_bytes), f", and {len(alike) - 1} more" if len(alike) > 1 else ""
        placement = worst.placement.replace("_", " ")
        shares_cpus = SHARE in (worst.note or "")
        option, comment = ("--np 2", _ONE_PER_CPU) if shares_cpus else ("--budget 2", _IDLE)
        yield Sighting(
            subject=f"{COLLECTIVE_NAMES.get(worst.collective, worst.collective)} of {size} {placement}{more}",
            seen=_seen_noise(worst),
            likely="more ranks than CPUs" if shares_cpus else "",
            cure=Cure.of(f"gpubench {worst.command} --sizes {size} {option}", comment=comment),
        )


def _seen_noise(row: CollectiveRow) -> str:
    seen = format_time(row.time_us) + ("" if row.ci95_percent is None else f" ±{row.ci95_percent:.0f} %")
    why = [part for part in (row.note or "").split("; ") if part == LONE or SHARE in part]
    if row.expected_us is not None and not is_lost_in_noise(row.ci95_percent):
        seen = f"{seen}, {format_time(row.expected_us)} expected"
    return "; ".join((seen, *why))


def _slow_range(run: Circumstances) -> Found:
    for rows in grouped(run.measurements.collectives, lambda row: (row.collective, row.group)).values():
        right = [row for row in rows if not row.wrong and row.verdict in (None, Verdict.PASS)]
        if (found := slow_range(right)) is not None:
            first, last, worst = found.rows[0], found.rows[-1], found.worst
            size, usual = format_size(worst.size_bytes), format_time(found.usual_us)
            seen = f"{format_time(worst.time_us)} at {size}, {worst.time_us / found.usual_us - 1:.0%} more than {usual}"
            yield Sighting(
                subject=f"{worst.collective} of {format_size(first.size_bytes)} to {format_size(last.size_bytes)}",
                seen=seen,
                cure=Cure.of(
                    f"gpubench {worst.command} --sizes {size} --evidence",
                    comment="It shows the algorithm and the paths.",
                ),
            )


SWEEP = Family.of(
    "sweep",
    "What the rows of a sweep show",
    Condition(
        id=TOO_NOISY,
        title="A time varies too much to be judged, or stands alone among its neighbours",
        check="collective_bandwidth",
        expected="a 95 % interval far below the time, and a time that fits those of neighbouring sizes",
        likely="other programs on the same cores or links, or too few operations",
        cure=Cure.of("gpubench allreduce --budget 2", comment="Run it on an idle machine."),
        look=_noisy,
    ),
    Condition(
        id=SLOW_RANGE,
        title="A range of sizes is slower than smaller and larger sizes of the same sweep",
        check="collective_bandwidth",
        expected="a time between those of smaller and larger sizes",
        likely="an algorithm or protocol that does not fit these sizes, a setting of NCCL, or other work at that time",
        cure=Cure.of("gpubench allreduce --evidence", comment="It shows the algorithm and the paths."),
        look=_slow_range,
    ),
    link="reading.md",
)


def sweep_findings(rows: Sequence[CollectiveRow], ranks: Sequence[RankIdentity] = ()) -> tuple[Finding, ...]:
    """Return the findings on all rows of a sweep together: noise, a slow range, a late rank."""
    run = Circumstances(wiring=Wiring([], {}), measurements=Measurements(collectives=tuple(rows), ranks=tuple(ranks)))
    noise, range_, *_ = SWEEP.conditions
    return (*noise.findings_of(_noise_of(rows)), *range_.findings(run), *LATE_RANK.findings(run))
