"""The cases of a sweep, and the rows that their times become."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpubench.collectives.request import SweepRequest
from gpubench.model.facts.backends import composed
from gpubench.model.results.report import CollectiveRow, Verified
from gpubench.model.results.speed import ONE_RANK
from gpubench.model.terms.bandwidth import algbw_gb_s
from gpubench.model.terms.operation import DataType, Layout, Placement, ReduceOp
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.rank_identity import RankIdentity, hosts_of_nccl, ranks_per_gpu
from gpubench.model.terms.statistics.samples import RowTimes
from gpubench.model.terms.sweep import DroppedSize
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND, format_size
from gpubench.model.terms.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Case:
    """One row to measure: a size with its layout, a type, a reduction, a placement, and a setting of the library."""

    dtype: DataType
    op: ReduceOp | None
    placement: Placement
    layout: Layout
    setting: str | None = None

    @property
    def size_bytes(self) -> int:
        """nccl-tests' size: the larger buffer of a rank, after rounding."""
        return self.layout.largest * self.dtype.size_bytes

    @property
    def label(self) -> str:
        """The case for a progress line."""
        placed = f"{format_size(self.size_bytes)} {self.placement.replace('_', ' ')}"
        return placed if self.setting is None else f"{placed}, {self.setting}"


@dataclass(frozen=True, slots=True)
class JobFacts:
    """The facts that all rows of a job repeat; `ranks_per_gpu` is None where no rank drives a GPU."""

    backend: str
    origin: Origin
    ranks: int
    nodes: int
    ranks_per_gpu: int | None = None

    @classmethod
    def of(cls, backend: str, origin: Origin, ranks: Sequence[RankIdentity]) -> "JobFacts":
        """Those of ranks that measure together; nodes are counted as NCCL counts hosts."""
        return cls(backend, origin, len(ranks), hosts_of_nccl(ranks), ranks_per_gpu(ranks))


def cases(request: SweepRequest, ranks: int) -> Iterator[Case]:
    """Every case, in the order in which they are measured."""
    ops: tuple[ReduceOp | None, ...] = request.ops if request.collective.reduces else (None,)
    for dtype in request.dtypes:
        for op in ops:
            for size in request.sizes:
                laid_out = layout(request, size, dtype, ranks)
                for placement in request.placements:
                    yield Case(dtype, op, placement, laid_out)


def layout(request: SweepRequest, size_bytes: int, dtype: DataType, ranks: int) -> Layout:
    """The split of a size over the ranks."""
    return request.collective.layout(size_bytes // dtype.size_bytes, dtype, ranks)


def without_data(request: SweepRequest, sizes: Sequence[int], ranks: int) -> tuple[DroppedSize, ...]:
    """The sizes so small that a rank's share of them rounds to nothing, each with its reason."""
    empty = {size: dtype for size in sizes for dtype in request.dtypes if not layout(request, size, dtype, ranks).count}
    return tuple(
        DroppedSize(size, f"a rank's share rounds down to 0 elements of {dtype} on {ranks} ranks")
        for size, dtype in empty.items()
    )


def describe(request: SweepRequest, case: Case, job: JobFacts, times: RowTimes, wrong: int) -> CollectiveRow:
    """The row of a case from its times; `wrong` elements count only where the request has data checked."""
    collective, ranks = request.collective, times.ranks
    algbw = algbw_gb_s(case.size_bytes, ranks.mean_seconds)
    if not request.check:
        verified = Verified.NO
    else:
        verified = Verified.REPEAT if case.placement is Placement.IN_PLACE else Verified.LAST
    batches, percentiles = times.batches, times.percentiles
    made_of = composed(job.backend, collective.name, case.dtype, case.op, case.placement)
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
        mode=request.sampling.mode,
        graph=request.graph_replays,
        iterations=times.iterations,
        time_us=ranks.mean_seconds * MICROSECONDS_PER_SECOND,
        time_us_fastest_rank=ranks.fastest_seconds * MICROSECONDS_PER_SECOND,
        time_us_slowest_rank=ranks.slowest_seconds * MICROSECONDS_PER_SECOND,
        slowest_rank=ranks.slowest_rank,
        algbw_gb_s=algbw,
        busbw_gb_s=None if job.ranks == 1 else algbw * collective.busbw_factor(job.ranks),
        wrong=wrong if request.check else None,
        verified=verified,
        verdict=_verdict(request, job, wrong),
        note="; ".join(filter(None, (ONE_RANK if job.ranks == 1 else None, times.note, made_of))) or None,
        ranks_per_gpu=job.ranks_per_gpu,
        setting=case.setting,
        ci95_percent=None if times.interval is None else 100 * times.interval,
        batch_median_us=None if batches is None else batches.median_seconds * MICROSECONDS_PER_SECOND,
        batch_cv=None if batches is None else batches.variation,
        p50_us=None if percentiles is None else percentiles.p50_seconds * MICROSECONDS_PER_SECOND,
        p95_us=None if percentiles is None else percentiles.p95_seconds * MICROSECONDS_PER_SECOND,
        p99_us=None if percentiles is None else percentiles.p99_seconds * MICROSECONDS_PER_SECOND,
    )


def _verdict(request: SweepRequest, job: JobFacts, wrong: int) -> Verdict | None:
    """The verdict on the data of a row; one rank sends none."""
    if wrong and request.check:
        return Verdict.FAIL
    return Verdict.SKIP if job.ranks == 1 else Verdict.PASS if request.check else None
