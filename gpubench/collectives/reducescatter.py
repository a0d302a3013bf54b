"""reducescatter: rank r receives block r of the reduction of all ranks' buffers."""

from gpubench.collectives.record import Collective, scattered
from gpubench.model.terms.operation import Segment, all_but_own_factor

REDUCESCATTER = Collective(
    name="reducescatter",
    description="The size is that of each rank's input. Each rank keeps 1/n of the result. busbw = algbw × (n-1)/n.",
    layout=scattered,
    busbw_factor=all_but_own_factor,
    expected=lambda layout, rank, _ranks, _root: (Segment(offset=0, count=layout.count, start=rank * layout.count),),
    issue=lambda calls, call: calls.reduce_scatter(call.send, call.receive, call.count, call.dtype, call.op),
    reduces=True,
)
