"""allgather: every rank receives the blocks of all ranks, in rank order."""

from gpubench.collectives.record import Collective, every_block, gathered
from gpubench.model.terms.operation import all_but_own_factor

ALLGATHER = Collective(
    name="allgather",
    description="The size is that of the gathered result. Each rank sends 1/n of it. busbw = algbw × (n-1)/n.",
    layout=gathered,
    busbw_factor=all_but_own_factor,
    expected=lambda layout, _rank, ranks, _root: every_block(layout, ranks),
    issue=lambda calls, call: calls.all_gather(call.send, call.receive, call.count, call.dtype),
)
