"""broadcast: every rank receives the root's buffer."""

from gpubench.collectives.record import Collective, whole
from gpubench.model.terms.operation import Segment, whole_factor

BROADCAST = Collective(
    name="broadcast",
    description="The size is that of the buffer. busbw = algbw.",
    layout=whole,
    busbw_factor=whole_factor,
    expected=lambda layout, _rank, _ranks, root: (Segment(offset=0, count=layout.count, start=0, source=root),),
    issue=lambda calls, call: calls.broadcast(call.send, call.receive, call.count, call.dtype, call.root),
    rooted=True,
)
