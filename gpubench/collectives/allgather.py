"""allgather: every rank ends with the blocks of all ranks, one after another."""

from gpubench.collectives.record import Call, Collective, every_block, gathered
from gpubench.model.terms.bandwidth import all_but_own_factor
from gpubench.model.terms.operation import Layout, Segment
from gpubench.ports.collective_calls import CollectiveCalls
from gpubench.ports.launch import Launch


def expected(layout: Layout, _rank: int, ranks: int, _root: int) -> tuple[Segment, ...]:
    """Block r is what rank r sent."""
    return every_block(layout, ranks)


def issue(calls: CollectiveCalls, call: Call) -> Launch:
    """`ncclAllGather`."""
    return calls.all_gather(call.send, call.receive, call.count, call.dtype)


ALLGATHER = Collective(
    name="allgather",
    description="The size is the gathered result; each rank sends an n-th of it. busbw = algbw × (n-1)/n.",
    layout=gathered,
    busbw_factor=all_but_own_factor,
    expected=expected,
    issue=issue,
)
