"""reduce: the root ends with the reduction of all ranks' buffers."""

from gpubench.collectives.record import Call, Collective, whole
from gpubench.model.terms.bandwidth import whole_factor
from gpubench.model.terms.operation import Layout, Segment
from gpubench.ports.collective_calls import CollectiveCalls
from gpubench.ports.launch import Launch


def expected(layout: Layout, rank: int, _ranks: int, root: int) -> tuple[Segment, ...]:
    """The reduction, on the root alone."""
    return (Segment(offset=0, count=layout.count, start=0),) if rank == root else ()


def issue(calls: CollectiveCalls, call: Call) -> Launch:
    """`ncclReduce`."""
    return calls.reduce(call.send, call.receive, call.count, call.dtype, call.op, call.root)


REDUCE = Collective(
    name="reduce",
    description="The size is the buffer. busbw = algbw.",
    layout=whole,
    busbw_factor=whole_factor,
    expected=expected,
    issue=issue,
    reduces=True,
    rooted=True,
)
