"""reducescatter: rank r ends with block r of the reduction of all ranks' buffers."""

from gpubench.collectives.record import Call, Collective, scattered
from gpubench.model.terms.bandwidth import all_but_own_factor
from gpubench.model.terms.operation import Layout, Segment
from gpubench.ports.collective_calls import CollectiveCalls
from gpubench.ports.launch import Launch


def expected(layout: Layout, rank: int, _ranks: int, _root: int) -> tuple[Segment, ...]:
    """Block r of the reduction, on rank r."""
    return (Segment(offset=0, count=layout.count, start=rank * layout.count),)


def issue(calls: CollectiveCalls, call: Call) -> Launch:
    """`ncclReduceScatter`."""
    return calls.reduce_scatter(call.send, call.receive, call.count, call.dtype, call.op)


REDUCESCATTER = Collective(
    name="reducescatter",
    description="The size is each rank's input; each rank keeps an n-th of the result. busbw = algbw × (n-1)/n.",
    layout=scattered,
    busbw_factor=all_but_own_factor,
    expected=expected,
    issue=issue,
    reduces=True,
)
