"""gather: the root receives the blocks of all ranks, in rank order."""

from gpubench.collectives.record import Collective, every_block, gathered
from gpubench.model.terms.operation import all_but_own_factor

GATHER = Collective(
    name="gather",
    description="The size is that of the root's result. Each rank sends 1/n of it. busbw = algbw × (n-1)/n.",
    layout=gathered,
    busbw_factor=all_but_own_factor,
    expected=lambda layout, rank, ranks, root: every_block(layout, ranks) if rank == root else (),
    issue=lambda calls, call: calls.gather(call.send, call.receive, call.count, call.dtype, call.root),
    rooted=True,
    point_to_point=True,
)
