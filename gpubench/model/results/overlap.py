"""The rows, curves and last line of `gpubench overlap`, which runs a collective and computation at the same time."""

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
    *(OVERLAP_SECTION, "scaling", "shortest_steps", "rows", "rank_times", "evidence", "fallback", "causes"),
    *("refused", "findings"),
)


class OverlapRow(Record, frozen=True, kw_only=True):
    """One case: a collective and a partner's operations, started together (times: docs/internals/measuring.md)."""

    section = "overlap"
    on_page = HIDDEN

    #: name of the collective: allreduce, allgather, reducescatter, broadcast, reduce, alltoall, gather, scatter or
    #: sendrecv
    collective: str
    #: backend that ran the collective: nccl, host (MPI on CPU buffers), ...; simulated: no data moved
    backend: Annotated[str, BACKENDS]
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    ranks: int  #: number of ranks in the job
    nodes: int  #: number of hosts in the job
    size_bytes: int  #: size as nccl-tests defines it, in bytes: the larger buffer of a rank, after rounding
    data_type: Annotated[str, DataType]  #: element type of the collective
    ctas: int | None  #: cap on the number of NCCL's CTAs (null for NCCL's default)
    channels: int | None = None  #: number of channels in NCCL's log (null if unknown)
    #: how the cap is set: configuration (of the communicator) or environment (null without a cap)
    capped_by: str | None = None
    #: computation that runs with the collective: gemm (Tensor Cores), copy (within GPU memory), chain (small kernels)
    partner: Annotated[str, Partner]
    partner_operation: str  #: description of one operation of the partner
    partner_count: int  #: number of the partner's operations per step
    #: time of all the partner's operations without the collective in microseconds, mean over ranks
    partner_alone_us: float
    communication_alone_us: float  #: time of the collective without the partner, with the same cap
    #: time of the collective with the partner if the collective had its SMs first (null if too short)
    communication_first_us: float | None
    together_us: float  #: time until both have finished on the slowest rank
    partner_together_us: float  #: time of the partner's operations together with the collective
    #: time of the collective together with the partner, from the moment it could start
    communication_together_us: float
    in_flight_us: float  #: time during which the partner ran and the collective had not finished
    #: κ_c: slowdown of computation while the collective is in flight (null if it lost nearly all its speed)
    compute_slowdown: float | None
    communication_slowdown: float  #: κ_m: communication_together_us divided by communication_alone_us
    #: part of κ_m - 1 that comes from waiting for SMs (null if not separated)
    waiting_slowdown: Annotated[float | None, SIGNED]
    #: part of κ_m - 1 that comes from shared bandwidth, power and clocks (null if not separated)
    sharing_slowdown: Annotated[float | None, SIGNED]
    #: share of communication_alone_us that running both together saves; negative: it costs time (null if the collective
    #: is shorter than the noise of step_us)
    hidden_share: Annotated[float | None, SIGNED]
    step_us: float  #: time of one step in microseconds on the slowest rank, mean over many consecutive steps
    step_ci95_percent: float | None  #: half of the 95 % confidence interval of step_us, as a percentage of it
    steps: int  #: number of measured steps
    sm_clock_mhz: int | None  #: SM clock of the slowest GPU while both ran, in MHz (null if unknown)
    sm_clock_alone_mhz: int | None = None  #: SM clock of the slowest GPU while the partner ran alone, in MHz
    power_w: float | None  #: power per GPU while both ran in watts, mean over GPUs (null if unknown)
    #: reason for lowered clocks while both ran, as NVML names it (null if none or unknown)
    throttled_by: str | None = None
    wrong: int | None = None  #: number of wrong elements on all ranks (null if not checked)
    verified: Annotated[str, Verified]  #: verified output: last (of the timed operations, every buffer), or no
    verdict: Annotated[str | None, Verdict] = None  #: verdict on the data (null if not checked)
    note: str | None = None  #: remark on the row


class ShortestStepRow(Record, frozen=True, kw_only=True):
    """The CTA limit that gave the shortest step for one size and one partner kernel, compared with NCCL's default."""

    section = "shortest_steps"

    collective: str  #: name of the collective
    partner: Annotated[str, Partner]  #: computation that runs with the collective: gemm, copy or chain
    size_bytes: int  #: size as nccl-tests defines it, in bytes: the larger buffer of a rank, after rounding
    ctas: int | None  #: CTA limit that gave the shortest step; null for NCCL's default
    step_us: float  #: time of the shortest step in microseconds
    #: step time with NCCL's default in microseconds, measured before the caps (null if not measured)
    own_step_us: float | None
    #: slowdown of that step when measured again after the caps, in percent (null if not measured)
    own_drift_percent: Annotated[float | None, SIGNED]
    own_compute_slowdown: float | None  #: κ_c with NCCL's default
    own_communication_slowdown: float | None  #: κ_m with NCCL's default
    gain_percent: float | None  #: time saved by the shortest step, as a percentage of the mean of both
    noise_percent: float | None  #: part of gain_percent that noise explains (null if unknown)
    beyond_noise: bool | None  #: whether gain_percent exceeds noise_percent
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded


_MOST_LINES = 4  # A chart with more curves is hard to read
_FEWEST_SIZES = 2


def overlap_charts(rows: Sequence[OverlapRow]) -> Iterator[Chart]:
    """Yield two charts per partner: the relative step time for each cap, and the slowdowns with NCCL's default CTAs."""
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
            yield Chart(f"Step time with {partner}, relative to NCCL's own number of CTAs", "×", some, logarithmic=True)
        if own:
            slowdowns = (
                _line("communication, κm", list(own.values()), lambda row: row.communication_slowdown),
                _line("computation, κc", list(own.values()), lambda row: row.compute_slowdown),
            )
            yield Chart(f"Slow-down with {partner} and NCCL's own number of CTAs", "×", slowdowns, logarithmic=True)


def _line(name: str, rows: Sequence[OverlapRow], value: Callable[[OverlapRow], float | None]) -> CurveLine:
    known = {row.size_bytes: found for row in rows if (found := value(row)) is not None}
    return CurveLine(name, tuple(sorted(known.items())))


_BESIDE = {Partner.GEMM: "GEMMs", Partner.COPY: "copies", Partner.CHAIN: "small kernels"}


def overlap_parts(report: Report) -> Iterator[LinePart]:
    """Yield the parts of the last line: 'allreduce of 256M takes 2.4 times as long beside GEMMs', '8 CTAs make …'.

    Yield nothing if only one cap was measured.
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
        f"{shown.collective} of {format_size(shown.size_bytes)} takes {shown.own_communication_slowdown:.2g} "
        f"times as long during {beside}"
    )
    yield part(f"{said}{slowed}", said)
    gains = [row for row in known if row.beyond_noise and row.partner == shown.partner]
    best = max(gains, key=lambda row: row.gain_percent or 0, default=None)
    if best is None:
        yield part("no limit on CTAs makes a step shorter", importance=SOON)
    else:
        at = f" at {format_size(best.size_bytes)}"
        yield part(f"{describe_cap(best.ctas)} make the step {best.gain_percent:.1f} % shorter{at}", importance=SOON)


def _format_slowdown(slowdown: float) -> str:
    return f"{100 * (slowdown - 1):.0f} %"
