"""The rows of a sweep: what each will measure, and how its times become a row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpubench.collectives.record import Collective
from gpubench.model.bandwidth import algbw_gb_s
from gpubench.model.operation import DataType, Layout, Placement, ReduceOp
from gpubench.model.report import CollectiveRow, Origin, Verified
from gpubench.model.samples import RankTimes
from gpubench.model.sweep import DroppedSize
from gpubench.model.units import MICROSECONDS_PER_SECOND, format_size
from gpubench.model.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """What to measure. `graph_replays` of 0 launches plainly; `ops` is ignored by collectives that do not reduce."""

    collective: Collective
    sizes: tuple[int, ...]
    dtypes: tuple[DataType, ...]
    ops: tuple[ReduceOp, ...]
    placements: tuple[Placement, ...]
    root: int
    iterations: int
    warmup: int
    graph_replays: int
    check: bool


@dataclass(frozen=True, slots=True)
class Case:
    """One row to be: a size with its layout, a type, a reduction and a placement."""

    dtype: DataType
    op: ReduceOp | None
    placement: Placement
    layout: Layout

    @property
    def size_bytes(self) -> int:
        """nccl-tests' size: the larger buffer of a rank, after rounding."""
        return self.layout.largest * self.dtype.size_bytes

    @property
    def label(self) -> str:
        """The case for a progress line."""
        return f"{format_size(self.size_bytes)} {self.placement.replace('_', ' ')}"


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What all rows of a job have in common."""

    backend: str
    origin: Origin
    ranks: int
    nodes: int


def cases(request: SweepRequest, ranks: int) -> Iterator[Case]:
    """Every row to be, in the order in which it is measured."""
    ops: tuple[ReduceOp | None, ...] = request.ops if request.collective.reduces else (None,)
    for dtype in request.dtypes:
        for op in ops:
            for size in request.sizes:
                laid_out = layout(request, size, dtype, ranks)
                for placement in request.placements:
                    yield Case(dtype, op, placement, laid_out)


def layout(request: SweepRequest, size_bytes: int, dtype: DataType, ranks: int) -> Layout:
    """How a size is split over the ranks."""
    return request.collective.layout(size_bytes // dtype.size_bytes, dtype, ranks)


def without_data(request: SweepRequest, sizes: Sequence[int], ranks: int) -> tuple[DroppedSize, ...]:
    """The sizes so small that a rank's share of them rounds to nothing, each with its reason."""
    empty = {size: dtype for size in sizes for dtype in request.dtypes if not layout(request, size, dtype, ranks).count}
    return tuple(
        DroppedSize(size, f"a rank's share rounds down to 0 elements of {dtype} on {ranks} ranks")
        for size, dtype in empty.items()
    )


def describe(request: SweepRequest, case: Case, job: JobFacts, times: RankTimes, wrong: int) -> CollectiveRow:
    """The row of a case from its times; `wrong` elements count only where the request has data checked."""
    collective = request.collective
    algbw = algbw_gb_s(case.size_bytes, times.mean_seconds)
    if not request.check:
        verified = Verified.NO
    else:
        verified = Verified.REPEAT if case.placement is Placement.IN_PLACE else Verified.LAST
    return CollectiveRow(
        collective=collective.name,
        backend=job.backend,
        origin=job.origin,
        ranks=job.ranks,
        nodes=job.nodes,
        size_bytes=case.size_bytes,
        count=case.layout.count,
        dtype=case.dtype,
        op=case.op,
        root=request.root if collective.rooted else None,
        placement=case.placement,
        mode="throughput",
        graph=request.graph_replays,
        iterations=request.iterations,
        time_us=times.mean_seconds * MICROSECONDS_PER_SECOND,
        time_us_fastest_rank=times.fastest_seconds * MICROSECONDS_PER_SECOND,
        time_us_slowest_rank=times.slowest_seconds * MICROSECONDS_PER_SECOND,
        slowest_rank=times.slowest_rank,
        algbw_gb_s=algbw,
        busbw_gb_s=algbw * collective.busbw_factor(job.ranks),
        wrong=wrong if request.check else None,
        verified=verified,
        verdict=(Verdict.FAIL if wrong else Verdict.PASS) if request.check else None,
    )
