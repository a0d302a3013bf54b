"""The rows, curves and last line of `gpubench overlap`: a collective during computation, and the best cap on CTAs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

from gpubench.model.results.compare import Chart, CurveLine
from gpubench.model.results.ending import SOON, LinePart, part
from gpubench.model.results.report import (
    BACKENDS,
    HIDDEN,
    OVERLAP_SECTION,
    SIGNED,
    Record,
    Report,
    Verified,
)
from gpubench.model.terms.operation import DataType
from gpubench.model.terms.overlap import Partner, describe_cap
from gpubench.model.terms.units import format_size, group_by
from gpubench.model.terms.verdict import Origin, Verdict

SECTIONS = (
    *(OVERLAP_SECTION, "shortest_steps", "rows", "rank_times", "evidence", "fallback", "causes", "refused"),
    "findings",
)


class OverlapRow(Record, frozen=True, kw_only=True):
    """A step: a collective and a partner's operations, started together. docs/overlap.md defines every time."""

    section = "overlap"
    on_page = HIDDEN

    collective: str  #: allreduce, allgather, reducescatter, broadcast, reduce, alltoall, gather, scatter or sendrecv
    backend: Annotated[str, BACKENDS]  #: what moved the data; simulated moved none
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    ranks: int  #: ranks in the job
    nodes: int  #: hosts in the job
    size_bytes: int  #: nccl-tests' size: the larger buffer of a rank, after rounding
    data_type: Annotated[str, DataType]  #: element type of the collective
    ctas: int | None  #: cap on NCCL's CTAs; null: NCCL's default
    channels: int | None = None  #: channels in NCCL's log; null: unknown
    capped_by: str | None = None  #: configuration (of the communicator) or environment; null: no cap
    partner: Annotated[str, Partner]  #: gemm (Tensor Cores), copy (within GPU memory), chain (small kernels)
    partner_operation: str  #: one operation of the partner, in words
    partner_count: int  #: operations of the partner in a step
    partner_alone_us: float  #: all of them alone, mean over ranks
    communication_alone_us: float  #: the collective alone, with the same cap
    #: the collective during the partner's operations, if it had its SMs first; null: too short
    communication_first_us: float | None
    together_us: float  #: time until both have finished, on the slowest rank
    partner_together_us: float  #: the partner's operations during the collective
    communication_together_us: float  #: the collective during the partner's operations, from its possible start
    in_flight_us: float  #: part of the partner's time until the collective finished
    compute_slowdown: float | None  #: κ_c, of computation while the collective is in flight; null: it lost nearly all
    communication_slowdown: float  #: κ_m, communication_together_us over communication_alone_us
    #: part of κ_m - 1 due to waiting for SMs; null: not separated
    waiting_slowdown: Annotated[float | None, SIGNED]
    #: part of κ_m - 1 due to shared bandwidth, power and clocks; null: not separated
    sharing_slowdown: Annotated[float | None, SIGNED]
    #: part of communication_alone_us that running both together saves; negative: it costs time; null: the collective
    #: takes less than step_ci95_percent of step_us, and what it saves is lost in that
    hidden_share: Annotated[float | None, SIGNED]
    step_us: float  #: mean time per step of many consecutive steps, on the slowest rank
    step_ci95_percent: float | None  #: half of the 95 % confidence interval of step_us, percent of it
    steps: int  #: steps that were measured
    sm_clock_mhz: int | None  #: SM clock while both ran, of the slowest GPU; null: not known
    sm_clock_alone_mhz: int | None = None  #: the same while the partner ran alone
    power_w: float | None  #: power per GPU while both ran, mean over GPUs; null: unknown
    #: what held clocks down while both ran, as NVML names it; null: nothing, or not known
    throttled_by: str | None = None
    wrong: int | None = None  #: wrong elements of the collective over all ranks; null: not checked
    verified: Annotated[str, Verified]  #: last: every buffer of the timed operations; no: not checked
    verdict: Annotated[str | None, Verdict] = None  #: verdict on the data; null: not checked
    note: str | None = None  #: remark


class ShortestStepRow(Record, frozen=True, kw_only=True):
    """The cap with the shortest step for a size and a partner, compared with NCCL's default number of CTAs."""

    section = "shortest_steps"

    collective: str  #: as in its rows
    partner: Annotated[str, Partner]  #: as in its rows
    size_bytes: int  #: as in its rows
    ctas: int | None  #: of the shortest step; null: NCCL's own number
    step_us: float  #: the shortest
    own_step_us: float | None  #: with NCCL's own number, before the caps had their turn; null: not measured
    own_drift_percent: Annotated[float | None, SIGNED]  #: how much longer it was after the caps; null: not measured
    own_compute_slowdown: float | None  #: κ_c with NCCL's own number
    own_communication_slowdown: float | None  #: κ_m with NCCL's own number
    gain_percent: float | None  #: how much shorter it is, in percent of the mean of both
    noise_percent: float | None  #: part of that which noise explains; null: unknown
    beyond_noise: bool | None  #: whether the gain exceeds the noise
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded


_MOST_LINES = 4  # A page with more curves is hard to read
_FEWEST_SIZES = 2


def overlap_charts(rows: Sequence[OverlapRow]) -> Iterator[Chart]:
    """Yield charts per partner: the relative step time under each cap, and both slowdowns with NCCL's default CTAs."""
    for partner, members in group_by(rows, lambda row: row.partner).items():
        if len({row.size_bytes for row in members}) < _FEWEST_SIZES:
            continue
        own = {row.size_bytes: row for row in members if row.ctas is None}
        capped = [row for row in members if row.ctas is not None and row.size_bytes in own]
        lines = [
            CurveLine(
                describe_cap(ctas),
                tuple(sorted((row.size_bytes, row.step_us / own[row.size_bytes].step_us) for row in alike)),
            )
            for ctas, alike in group_by(capped, lambda row: row.ctas).items()
        ]
        for start in range(0, len(lines), _MOST_LINES):
            some = tuple(lines[start : start + _MOST_LINES])
            yield Chart(f"Step beside {partner}, over that with NCCL's own CTAs", "×", some, logarithmic=True)
        if own:
            slowdowns = (
                _line("communication, κm", list(own.values()), lambda row: row.communication_slowdown),
                _line("computation, κc", list(own.values()), lambda row: row.compute_slowdown),
            )
            yield Chart(f"Slow-down beside {partner}, NCCL's own CTAs", "×", slowdowns, logarithmic=True)


def _line(name: str, rows: Sequence[OverlapRow], value: Callable[[OverlapRow], float | None]) -> CurveLine:
    known = {row.size_bytes: found for row in rows if (found := value(row)) is not None}
    return CurveLine(name, tuple(sorted(known.items())))


_BESIDE = {Partner.GEMM: "GEMMs", Partner.COPY: "copies", Partner.CHAIN: "small kernels"}


def overlap_parts(report: Report) -> Iterator[LinePart]:
    """Yield 'allreduce of 256M takes 2.4 times as long beside GEMMs', '8 CTAs make …'. Nothing if one cap was
    measured.
    """
    rows = report.rows(ShortestStepRow)
    known = [row for row in rows if row.own_communication_slowdown is not None]
    if not known:
        return
    shown = max(known, key=lambda row: row.size_bytes)
    beside = _BESIDE[Partner(shown.partner)]
    slowed = (
        ""
        if shown.own_compute_slowdown is None
        else f", which slow down by {_format_slowdown(shown.own_compute_slowdown)}"
    )
    said = (
        f"{shown.collective} of {format_size(shown.size_bytes)} takes {shown.own_communication_slowdown:.2g} times "
        f"as long beside {beside}"
    )
    yield part(f"{said}{slowed}", said)
    gains = [row for row in known if row.beyond_noise and row.partner == shown.partner]
    best = max(gains, key=lambda row: row.gain_percent or 0, default=None)
    if best is None:
        yield part("no cap on CTAs makes a step shorter", importance=SOON)
    else:
        at = f" at {format_size(best.size_bytes)}"
        yield part(f"{describe_cap(best.ctas)} make the step {best.gain_percent:.1f} % shorter{at}", importance=SOON)


def _format_slowdown(slowdown: float) -> str:
    return f"{100 * (slowdown - 1):.0f} %"
