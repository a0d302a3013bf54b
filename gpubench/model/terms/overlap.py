"""Communication during computation: the options, the computation, its steps on two streams, and their times."""

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from gpubench.errors import UsageError
from gpubench.model.terms.operation import DataType
from gpubench.model.terms.units import format_size

if TYPE_CHECKING:
    from gpubench.model.terms.statistics import Spread

OVERLAP = "overlap"  # The name of the command, and of the section that its rows are in
OWN_CTAS = "own"  # The word of --ctas for NCCL's own number
DEFAULT_CTAS: tuple[int | None, ...] = (None, 16, 8, 4, 2)
MOST_CTAS = 64  # NCCL has no more channels than that (MAXCHANNELS), and a CTA serves one
DEFAULT_SIZES = "1M:1G:4"
DEFAULT_GEMM_SIDE = 8192
DEFAULT_SECONDS = 0.25


class Partner(StrEnum):
    """The computation that runs with the communication."""

    GEMM = "gemm"
    COPY = "copy"
    CHAIN = "chain"


def parse_ctas(texts: Sequence[str]) -> tuple[int | None, ...]:
    """Parse the caps of --ctas in order without duplicates: 'own,16,8'. Raises UsageError."""
    words = list(dict.fromkeys(cap.strip().lower() for text in texts for cap in text.split(",")))
    for cap in words:
        if cap != OWN_CTAS and not (cap.isascii() and cap.isdecimal() and 1 <= int(cap) <= MOST_CTAS):
            raise UsageError(
                f"--ctas {cap or repr(cap)}",
                expected=f"numbers from 1 to {MOST_CTAS}, and {OWN_CTAS} for NCCL's own",
                next_step="--ctas own,16,8,4,2",
            )
    return tuple(None if cap == OWN_CTAS else int(cap) for cap in words)


def describe_cap(ctas: int | None) -> str:
    """Return '8 CTAs', or NCCL's own for None."""
    return "NCCL's own" if ctas is None else f"{ctas} CTA{'' if ctas == 1 else 's'}"


COPY_BYTES = 256 * 2**20  # That an operation of the partner copy reads and writes: beyond any cache
CHAIN_KERNELS = 64  # Kernels of one operation of the partner chain, one after another in a captured graph
CHAIN_BYTES = 1 * 2**20  # Bytes that each of them reads and writes: they stay in a cache


def gemm_type(dtype: DataType) -> DataType:
    """Return the type of a GEMM during a collective of a type: 16 bits, as in training."""
    return DataType.FLOAT16 if dtype is DataType.FLOAT16 else DataType.BFLOAT16


def partner_bytes(partner: Partner, gemm_side: int) -> int:
    """Return the memory of a partner on every GPU, including its reference result."""
    if partner is Partner.GEMM:
        return 4 * gemm_side**2 * DataType.BFLOAT16.size_bytes
    return 2 * (COPY_BYTES if partner is Partner.COPY else CHAIN_BYTES)


def describe_operation(partner: Partner, gemm_side: int, dtype: DataType) -> str:
    """Describe one operation: 'GEMM 8192³ bfloat16'."""
    if partner is Partner.GEMM:
        return f"GEMM {gemm_side}³ {gemm_type(dtype)}"
    if partner is Partner.COPY:
        return f"copy of {format_size(COPY_BYTES)} within GPU memory"
    return f"chain of {CHAIN_KERNELS} kernels on {format_size(CHAIN_BYTES)}"


_COMPUTE_OF_COMMUNICATION = 2
"""A step computes this many times as long as its collective takes alone with NCCL's own CTAs, plus one operation
for which the collective waits. With less computation, nothing could be hidden behind it.
"""

_LEAST_PROGRESS = 0.05  # Of the time in flight: less computation makes the ratio of the two say nothing


class OverlapTimes(Struct, frozen=True, kw_only=True):
    """Seconds of a step: a collective and some operations of a partner, started together.

    `communication_first` is the collective with the partner if it got its SMs before the partner, None if it was too
    short to overlap. `in_flight` is the part of the partner's time in which the collective was not done.
    """

    partner_alone: float
    communication_alone: float
    communication_first: float | None
    partner_together: float
    communication_together: float
    together: float
    step: float
    in_flight: float

    @property
    def compute_slowdown(self) -> float | None:
        """κ_c: time of computation while the collective is in flight, over the time of the same work alone.

        In flight the partner did the work of `in_flight` minus all that it lost. None if it lost nearly all of it.
        """
        work = self.in_flight - (self.partner_together - self.partner_alone)
        return self.in_flight / work if work > _LEAST_PROGRESS * self.in_flight else None

    @property
    def communication_slowdown(self) -> float:
        """κ_m: time of the collective from its earliest start, over its time alone."""
        return self.communication_together / self.communication_alone

    @property
    def waiting_slowdown(self) -> float | None:
        """The part of κ_m - 1 that is waiting for SMs, which reserving them would save."""
        first = self.communication_first
        return None if first is None else (self.communication_together - first) / self.communication_alone

    @property
    def sharing_slowdown(self) -> float | None:
        """The rest of κ_m - 1: memory, caches, links, power and clocks that are shared while it runs."""
        first = self.communication_first
        return None if first is None else first / self.communication_alone - 1

    @property
    def hidden_share(self) -> float:
        """The share of the collective's time alone that overlapping saves, negative if it costs time."""
        one_after_the_other = self.partner_alone + self.communication_alone
        return (one_after_the_other - self.together) / self.communication_alone


class StepSample(Struct, frozen=True, kw_only=True):
    """The samples of a row over all ranks. `wrong` is None if data was not checked."""

    times: OverlapTimes
    partner_count: int
    steps: int
    step_ci95_percent: float | None = None
    clock_mhz: int | None = None
    clock_alone_mhz: int | None = None
    power_w: float | None = None
    throttled_by: str | None = None
    channels: int | None = None
    capped_by: str | None = None
    wrong: int | None = None
    note: str | None = None


def partner_operations(communication_seconds: float, operation_seconds: float) -> int:
    """Return the partner's operations in a step whose collective takes that long alone with NCCL's own CTAs."""
    return 1 + math.ceil(_COMPUTE_OF_COMMUNICATION * communication_seconds / operation_seconds)


HOLD_SECONDS = 15e-6  # Computation begins later where the collective comes first: its launch takes 3 to 8 µs
_LEAST_MET = 4.0  # Times of that: a collective that is over sooner is hardly met by computation that begins so late


class StepOrder(StrEnum):
    """The work of a step, and which of both gets SMs first."""

    COMPUTATION = "computation alone"
    COMMUNICATION = "communication alone"
    COMPUTATION_FIRST = "computation first"
    COMMUNICATION_FIRST = "communication first"


class TimeSpan(NamedTuple):
    """Start and end in seconds of a clock."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


class StepMarks(NamedTuple):
    """One step by the marks on both streams: when each could start, and when it was done. None if not in the step."""

    computation: TimeSpan | None = None
    communication: TimeSpan | None = None

    @property
    def start(self) -> float:
        """The start of what starts first."""
        return min(each.start for each in self if each is not None)

    @property
    def end(self) -> float:
        """The end of what ends last."""
        return max(each.end for each in self if each is not None)

    @property
    def in_flight(self) -> float:
        """Seconds of computation in which the collective could have started and was not done."""
        if self.computation is None or self.communication is None:
            return 0.0
        end = min(self.computation.end, self.communication.end)
        return max(0.0, end - max(self.computation.start, self.communication.start))


class ClockedStep(NamedTuple):
    """Seconds of a step on one rank. `period` is from its start to that of the next."""

    partner: float
    communication: float
    together: float
    in_flight: float
    period: float


def clock_steps(batch: Sequence[StepMarks]) -> list[ClockedStep]:
    """Return the steps of a batch without the first, which starts on idle streams."""
    ends = [each.start for each in batch[1:]] + [batch[-1].end]
    return [
        ClockedStep(
            partner=0.0 if each.computation is None else each.computation.seconds,
            communication=0.0 if each.communication is None else each.communication.seconds,
            together=each.end - each.start,
            in_flight=each.in_flight,
            period=end - each.start,
        )
        for each, end in zip(batch[1:], ends[1:], strict=True)
    ]


class RankSteps(Struct, frozen=True):
    """The steps of one phase by rank, equally many per rank."""

    by_rank: Sequence[Sequence[ClockedStep]]

    @property
    def count(self) -> int:
        """The number of steps."""
        return len(self.by_rank[0])

    @property
    def partner(self) -> float:
        """Computation per step, mean over steps and ranks."""
        from statistics import fmean

        return fmean(step.partner for steps in self.by_rank for step in steps)

    @property
    def communication(self) -> float:
        """A collective from when the last rank could start it: the minimum over ranks, mean over steps."""
        from statistics import fmean

        return fmean(min(step.communication for step in ranks) for ranks in zip(*self.by_rank, strict=True))

    @property
    def together(self) -> float:
        """From the start of a step until all of it is done, on the slowest rank, mean over steps."""
        from statistics import fmean

        return fmean(max(step.together for step in ranks) for ranks in zip(*self.by_rank, strict=True))

    @property
    def in_flight(self) -> float:
        """Computation during an unfinished collective, mean over steps and ranks."""
        from statistics import fmean

        return fmean(step.in_flight for steps in self.by_rank for step in steps)

    @property
    def periods(self) -> "Spread":
        """From step to step, on the slowest rank."""
        from gpubench.model.terms.statistics import Spread

        return Spread.of([max(step.period for step in ranks) for ranks in zip(*self.by_rank, strict=True)])


def compute_overlap_times(
    partner_alone: RankSteps,
    communication_alone: RankSteps,
    communication_first: RankSteps | None,
    together: RankSteps,
) -> OverlapTimes:
    """Return the times of a row from its phases. In `together`, computation gets SMs first."""
    undisturbed = communication_alone.communication
    is_met = communication_first is not None and undisturbed >= _LEAST_MET * HOLD_SECONDS
    return OverlapTimes(
        partner_alone=partner_alone.partner,
        communication_alone=undisturbed,
        communication_first=communication_first.communication if communication_first is not None and is_met else None,
        partner_together=together.partner,
        communication_together=together.communication,
        together=together.together,
        step=together.periods.mean,
        in_flight=together.in_flight,
    )
