"""The rows of the section `rank_times`: every row of a collective, as each of its ranks saw it."""

from dataclasses import dataclass
from typing import Annotated

from gpubench.model.results.report import BACKENDS, SIGNED, Record
from gpubench.model.terms.operation import DataType, Placement, ReduceOp
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.statistics.sampling import Mode

RANK_TIMES_SECTION = "rank_times"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeRow(Record):
    """A row of a collective as one of its ranks saw it."""

    collective: str  #: allreduce, allgather, reducescatter, broadcast, reduce, alltoall, gather, scatter or sendrecv
    backend: Annotated[str, BACKENDS]  #: what moved the data: nccl, or host (MPI on CPU buffers); simulated moved none
    origin: Annotated[str, Origin]  #: where the numbers come from
    size_bytes: int  #: nccl-tests' size: the larger buffer of a rank, after rounding
    dtype: Annotated[str, DataType]  #: element type
    op: Annotated[str | None, ReduceOp]  #: reduction; null where data are only moved
    placement: Annotated[str, Placement]  #: result in a buffer of its own, or over the input
    mode: Annotated[str, Mode]  #: throughput: operations back to back; latency: each alone
    rank: int  #: rank of the job
    host: str  #: name of its host
    node: int  #: its host, counted from 0 by its first rank
    gpu_bus_id: str | None  #: GPU it drives; null on the host backend
    time_us: float  #: microseconds an operation on that rank, waiting for others included
    #: median of how long after the first rank it entered operations; known of operations alone
    late_us: Annotated[float | None, SIGNED]
    clock_uncertainty_us: float | None  #: by how much that may be wrong: half a round trip between the clocks
    #: of operations alone, in how many it was the last to enter
    last_percent: Annotated[float | None, {"minimum": 0, "maximum": 100}]
    setting: str | None = None  #: that of the row
