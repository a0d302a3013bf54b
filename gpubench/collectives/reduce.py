"""reduce: the root receives the reduction of all ranks' buffers."""

from gpubench.collectives.record import Collective, whole
from gpubench.model.terms.operation import Segment, whole_factor

REDUCE = Collective(
    name="reduce",
    description="The size is that of the buffer. busbw = algbw.",
    layout=whole,
    busbw_factor=whole_factor,
    expected=lambda layout, rank, _ranks, root: (
        (Segment(offset=0, count=layout.count, start=0),) if rank == root else ()
    ),
    issue=lambda calls, call: calls.reduce(call.send, call.receive, call.count, call.dtype, call.op, call.root),
    reduces=True,
    rooted=True,
)
