"""allreduce: every rank receives the reduction of all ranks' buffers."""

from gpubench.collectives.record import Collective, whole
from gpubench.model.terms.operation import Segment, ring_allreduce_factor

ALLREDUCE = Collective(
    name="allreduce",
    description="The size is that of each rank's buffer. busbw = algbw × 2(n-1)/n.",
    layout=whole,
    busbw_factor=ring_allreduce_factor,
    expected=lambda layout, _rank, _ranks, _root: (Segment(offset=0, count=layout.count, start=0),),
    issue=lambda calls, call: calls.all_reduce(call.send, call.receive, call.count, call.dtype, call.op),
    reduces=True,
    decomposes=True,
)
