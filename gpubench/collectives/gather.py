"""gather: the root ends with the blocks of all ranks, one after another."""

from gpubench.collectives.record import Call, Collective, every_block, gathered
from gpubench.model.terms.bandwidth import all_but_own_factor
from gpubench.model.terms.operation import Layout, Segment
from gpubench.ports.collective_calls import CollectiveCalls
from gpubench.ports.launch import Launch


def expected(layout: Layout, rank: int, ranks: int, root: int) -> tuple[Segment, ...]:
    """Block r is what rank r sent, on the root alone."""
    return every_block(layout, ranks) if rank == root else ()


def issue(calls: CollectiveCalls, call: Call) -> Launch:
    """`ncclGather`."""
    return calls.gather(call.send, call.receive, call.count, call.dtype, call.root)


GATHER = Collective(
    name="gather",
    description="The size is the root's result; each rank sends an n-th of it. busbw = algbw × (n-1)/n.",
    layout=gathered,
    busbw_factor=all_but_own_factor,
    expected=expected,
    issue=issue,
    rooted=True,
    point_to_point=True,
)
