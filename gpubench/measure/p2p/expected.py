"""The expectation of a copy: by the profile, pairs wired alike, this machine's past, or a share of the limit."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from gpubench.measure.p2p.machine import CopyMachine
from gpubench.model.paths.p2p import LIMIT_WARN_SHARE, Pair, Reference, Series
from gpubench.model.results.report import PairRow
from gpubench.model.terms.copies import Direction
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND, percent
from gpubench.model.terms.verdict import Verdict

PastBandwidth = Callable[[PairRow], tuple[float, str] | None]
"""GB/s that earlier results of this machine have of a pair, with their source; None where they have none."""

_LATE_SHARE, _LATE_MICROSECONDS = 0.3, 8.0
"""A small copy is late beyond so much of its time and these µs: direct ones of 16 bytes take 2 µs, those through host
memory 12 to 19."""


def no_past(_row: PairRow) -> None:
    """For runs that keep no results."""


@dataclass(frozen=True, slots=True)
class ExpectedCopy:
    """The bandwidth of a copy on healthy machines, in GB/s, both directions together where both are copied."""

    gb_s: float
    source: str

    def compared(self, row: PairRow, copies: int) -> PairRow:
        """The row with what is expected of it; `copies` of its size are made at once."""
        size_bytes = row.size_bytes or 0
        return replace(
            row,
            expected_gb_s=self.gb_s,
            expected_us=copies * size_bytes / (self.gb_s * BYTES_PER_GB) * MICROSECONDS_PER_SECOND,
            expected_percent=percent(row.bandwidth_gb_s, self.gb_s),
            expected_source=self.source,
        )


def expected_copy(machine: CopyMachine, series: Series, pair: Pair, reference: Reference | None) -> ExpectedCopy | None:
    """The first source that knows; without a reference the copy is judged by the profile's latency and bandwidth."""
    if reference is None:
        return _small(machine, series, machine.wiring.path(pair))
    if reference.expected_gb_s is not None:
        return ExpectedCopy(reference.expected_gb_s, reference.source)
    if reference.siblings_gb_s is not None:
        return ExpectedCopy(reference.siblings_gb_s, "pairs wired alike, in this run")
    if reference.limit_gb_s is None:
        return None
    share = f"{LIMIT_WARN_SHARE:.0%} of the limit"
    return ExpectedCopy(LIMIT_WARN_SHARE * reference.limit_gb_s, share)


def _small(machine: CopyMachine, series: Series, path: str) -> ExpectedCopy | None:
    """Latency and bytes over bandwidth, by a profile of this very kind of machine."""
    if machine.matched is None or machine.matched.profile.match.generic is not None or series.quantity is None:
        return None
    profile = machine.matched.profile
    gb_s = profile.typical(series.quantity, path)
    latency_us = profile.typical("p2p.latency_us" if series.peer else "p2p.staged_latency_us", path)
    if gb_s is None or latency_us is None:
        return None
    moved = series.size_bytes * (2 if series.direction is Direction.BOTH else 1)
    seconds = latency_us / MICROSECONDS_PER_SECOND + moved / (gb_s * BYTES_PER_GB)
    return ExpectedCopy(moved / seconds / BYTES_PER_GB, f"profile {profile.name}, latency and bandwidth")


def late_verdict(series: Series, row: PairRow) -> tuple[Verdict, str] | None:
    """The verdict on a small copy with peer access, by its time; None where nothing is expected of it."""
    if not series.peer or series.is_judged or row.expected_us is None or row.latency_us is None:
        return None
    if row.latency_us > (1 + _LATE_SHARE) * row.expected_us + _LATE_MICROSECONDS:
        return Verdict.FAIL, f"{row.latency_us:.3g} µs, {row.expected_us:.3g} are expected"
    return Verdict.PASS, ""
