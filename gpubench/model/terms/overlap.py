"""Overlap of communication with computation: the computation, steps on two streams, and their times.

A step runs one collective and a computation at the same time. The computation is called the partner.
"""

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from gpubench.errors import UsageError
from gpubench.model.terms.operation import DataType
from gpubench.model.terms.units import format_size

if TYPE_CHECKING:
    from gpubench.model.terms.statistics import Spread

OVERLAP = "overlap"  # The name of the command and of its section in results
OWN_CTAS = "own"  # `--ctas own` leaves the number of CTAs to NCCL.
DEFAULT_CTAS: tuple[int | None, ...] = (None, 16, 8, 4, 2)
MOST_CTAS = 64  # NCCL's maximum number of channels (MAXCHANNELS). Each CTA serves one channel.
DEFAULT_SIZES = "1M:1G:4"
DEFAULT_GEMM_SIDE = 8192
DEFAULT_SECONDS = 0.25


class Partner(StrEnum):
    """The computation that runs at the same time as the collective."""

    GEMM = "gemm"
    COPY = "copy"
    CHAIN = "chain"


def parse_ctas(texts: Sequence[str]) -> tuple[int | None, ...]:
    """Parse the limits of --ctas ('own,16,8'). Keep their order and drop duplicates. Raises UsageError."""
    words = list(dict.fromkeys(cap.strip().lower() for text in texts for cap in text.split(",")))
    for cap in words:
        if cap != OWN_CTAS and not (cap.isascii() and cap.isdecimal() and 1 <= int(cap) <= MOST_CTAS):
            raise UsageError(
                f"--ctas {cap or repr(cap)}",
                expected=f"numbers from 1 to {MOST_CTAS}, or {OWN_CTAS} for NCCL's own number",
                next_step="--ctas own,16,8,4,2",
            )
    return tuple(None if cap == OWN_CTAS else int(cap) for cap in words)


def describe_cap(ctas: int | None) -> str:
    """Return for example '8 CTAs'. None means that NCCL chooses the number."""
    return "NCCL's own" if ctas is None else f"{ctas} CTA{'' if ctas == 1 else 's'}"


COPY_BYTES = 256 * 2**20  # Larger than any GPU cache
CHAIN_KERNELS = 64  # Number of consecutive kernels per CHAIN operation, replayed from a CUDA graph
CHAIN_BYTES = 1 * 2**20  # Bytes that each kernel reads and writes. They stay in the cache.


def gemm_type(dtype: DataType) -> DataType:
    """Return the 16-bit type for the GEMM that runs with a collective of this type, as in training."""
    return DataType.FLOAT16 if dtype is DataType.FLOAT16 else DataType.BFLOAT16


def partner_bytes(partner: Partner, gemm_side: int) -> int:
    """Return the bytes of GPU memory that the computation needs, including its reference result."""
    if partner is Partner.GEMM:
        return 4 * gemm_side**2 * DataType.BFLOAT16.size_bytes
    return 2 * (COPY_BYTES if partner is Partner.COPY else CHAIN_BYTES)


def describe_operation(partner: Partner, gemm_side: int, dtype: DataType) -> str:
    """Describe one operation of the computation: 'GEMM 8192³ bfloat16'."""
    if partner is Partner.GEMM:
        return f"GEMM {gemm_side}³ {gemm_type(dtype)}"
    if partner is Partner.COPY:
        return f"copy of {format_size(COPY_BYTES)} within GPU memory"
    return f"chain of {CHAIN_KERNELS} kernels on {format_size(CHAIN_BYTES)}"


# Computation time per communication time. Less computation could not hide the collective.
_COMPUTE_TO_COMMUNICATION = 2
# The slowdown is meaningless if the computation did less than this share of its work during the collective.
_LEAST_PROGRESS = 0.05


class OverlapTimes(Struct, frozen=True, kw_only=True):
    """Times in seconds of a step in which a collective and several operations of the partner start together.

    - `communication_first`: time of the collective if it gets SMs first; None if it is too short to overlap
    - `in_flight`: computation time until the collective finishes
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
        """κ_c: computation time during the collective, divided by the time of the same work without a collective.

        None if the computation made almost no progress during the collective.
        """
        work = self.in_flight - (self.partner_together - self.partner_alone)
        return self.in_flight / work if work > _LEAST_PROGRESS * self.in_flight else None

    @property
    def communication_slowdown(self) -> float:
        """κ_m: the collective's time from its earliest start, divided by its time without computation."""
        return self.communication_together / self.communication_alone

    @property
    def waiting_slowdown(self) -> float | None:
        """The share of κ_m - 1 that comes from waiting for SMs. Reserving SMs for the collective would save it."""
        first = self.communication_first
        return None if first is None else (self.communication_together - first) / self.communication_alone

    @property
    def sharing_slowdown(self) -> float | None:
        """The rest of κ_m - 1, which comes from sharing memory, caches, links, power and clocks."""
        first = self.communication_first
        return None if first is None else first / self.communication_alone - 1

    @property
    def hidden_share(self) -> float:
        """The time that overlapping saves, divided by the collective's time without computation. Negative if
        overlapping is slower.
        """
        return (self.partner_alone + self.communication_alone - self.together) / self.communication_alone


class StepSample(Struct, frozen=True, kw_only=True):
    """The measurements of one row over all ranks. `wrong` is None if data was not checked."""

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
    """Return the number of partner operations per step.

    `communication_seconds` is the collective's time without computation and without a CTA limit. The collective waits
    for the first partner operation, so one operation is added.
    """
    return 1 + math.ceil(_COMPUTE_TO_COMMUNICATION * communication_seconds / operation_seconds)


HOLD_SECONDS = 15e-6  # Delay of the computation in steps where the collective comes first. Its launch takes 3 to 8 µs.
# A collective shorter than this number of delays ends before the delayed computation can overlap it.
_LEAST_HOLDS = 4.0


class StepOrder(StrEnum):
    """The work in a step, and whether computation or communication gets SMs first."""

    COMPUTATION = "computation alone"
    COMMUNICATION = "communication alone"
    COMPUTATION_FIRST = "computation first"
    COMMUNICATION_FIRST = "communication first"


class TimeSpan(NamedTuple):
    """The start and end of some work, in seconds."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class StepMarks(NamedTuple):
    """The earliest start and the end of a step's computation and communication. None for work that the step does
    not have.
    """

    computation: TimeSpan | None = None
    communication: TimeSpan | None = None

    @property
    def start(self) -> float:
        return min(span.start for span in self if span is not None)

    @property
    def end(self) -> float:
        return max(span.end for span in self if span is not None)

    @property
    def in_flight(self) -> float:
        """Seconds of computation between the collective's earliest start and its end."""
        if self.computation is None or self.communication is None:
            return 0.0
        end = min(self.computation.end, self.communication.end)
        return max(0.0, end - max(self.computation.start, self.communication.start))


class ClockedStep(NamedTuple):
    """Times of one step on one rank, in seconds. `period` is the time from its start to the start of the next step."""

    partner: float
    communication: float
    together: float
    in_flight: float
    period: float


def clock_steps(batch: Sequence[StepMarks]) -> list[ClockedStep]:
    """Return the times of a batch's steps. Skip the first step, because it starts on idle streams."""
    ends = [step.start for step in batch[1:]] + [batch[-1].end]
    return [
        ClockedStep(
            partner=0.0 if step.computation is None else step.computation.seconds,
            communication=0.0 if step.communication is None else step.communication.seconds,
            together=step.end - step.start,
            in_flight=step.in_flight,
            period=end - step.start,
        )
        for step, end in zip(batch[1:], ends[1:], strict=True)
    ]


def _mean(values: Iterable[float]) -> float:
    from statistics import fmean  # The import takes milliseconds, and every command imports this module.

    return fmean(values)


class RankSteps(Struct, frozen=True):
    """The steps of one phase, by rank. All ranks have the same number of steps."""

    by_rank: Sequence[Sequence[ClockedStep]]

    @property
    def count(self) -> int:
        return len(self.by_rank[0])

    @property
    def partner(self) -> float:
        """Seconds of computation per step, averaged over steps and ranks."""
        return _mean(step.partner for steps in self.by_rank for step in steps)

    @property
    def communication(self) -> float:
        """Time of the collective in seconds, from when the last rank can start it.

        Minimum over ranks, averaged over steps.
        """
        return _mean(min(step.communication for step in ranks) for ranks in zip(*self.by_rank, strict=True))

    @property
    def together(self) -> float:
        """Seconds of the whole step on its slowest rank, averaged over steps."""
        return _mean(max(step.together for step in ranks) for ranks in zip(*self.by_rank, strict=True))

    @property
    def in_flight(self) -> float:
        """Seconds of computation during an unfinished collective, averaged over steps and ranks."""
        return _mean(step.in_flight for steps in self.by_rank for step in steps)

    @property
    def periods(self) -> "Spread":
        """The times from one step to the next, each on its slowest rank."""
        from gpubench.model.terms.statistics import Spread

        return Spread.of([max(step.period for step in ranks) for ranks in zip(*self.by_rank, strict=True)])


def compute_overlap_times(
    partner_alone: RankSteps,
    communication_alone: RankSteps,
    communication_first: RankSteps | None,
    together: RankSteps,
) -> OverlapTimes:
    """Combine the phases of a row. In the phase `together`, the computation gets SMs first."""
    undisturbed = communication_alone.communication
    is_met = communication_first is not None and undisturbed >= _LEAST_HOLDS * HOLD_SECONDS
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
