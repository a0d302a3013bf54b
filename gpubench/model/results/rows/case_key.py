"""The columns that say at which size of a sweep ways of running a collective are held against each other."""

from dataclasses import dataclass
from typing import Annotated

from gpubench.model.results.report import Record
from gpubench.model.terms.operation import DataType, Placement, ReduceOp
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.statistics.sampling import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseKey(Record):
    """The columns that say which size of a sweep a row is of, in which ways of running it stand beside each other."""

    collective: str  #: allreduce, allgather, reducescatter, broadcast, reduce, alltoall, gather, scatter or sendrecv
    origin: Annotated[str, Origin]  #: where the numbers come from
    ranks: int  #: ranks in the group
    size_bytes: int  #: nccl-tests' size: the larger buffer of a rank, after rounding
    dtype: Annotated[str, DataType]  #: element type
    op: Annotated[str | None, ReduceOp]  #: reduction; null where data are only moved
    placement: Annotated[str, Placement]  #: result in a buffer of its own, or over the input
    mode: Annotated[str, Mode]  #: throughput: operations back to back; latency: each alone
