"""allreduce: every rank ends with the reduction of all ranks' buffers."""

from gpubench.collectives.record import Call, Collective, whole
from gpubench.model.terms.bandwidth import ring_allreduce_factor
from gpubench.model.terms.operation import Layout, Segment
from gpubench.ports.collective_calls import CollectiveCalls
from gpubench.ports.launch import Launch


def expected(layout: Layout, _rank: int, _ranks: int, _root: int) -> tuple[Segment, ...]:
    """The reduction of everything, everywhere."""
    return (Segment(offset=0, count=layout.count, start=0),)


def issue(calls: CollectiveCalls, call: Call) -> Launch:
    """`ncclAllReduce`."""
    return calls.all_reduce(call.send, call.receive, call.count, call.dtype, call.op)


ALLREDUCE = Collective(
    name="allreduce",
    description="The size is the buffer of each rank. busbw = algbw × 2(n-1)/n.",
    layout=whole,
    busbw_factor=ring_allreduce_factor,
    expected=expected,
    issue=issue,
    reduces=True,
    decomposes=True,
)
