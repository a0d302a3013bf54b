"""scatter: rank r receives block r of the root's buffer."""

from gpubench.collectives.record import Collective, scattered
from gpubench.model.terms.operation import Segment, all_but_own_factor

SCATTER = Collective(
    name="scatter",
    description="The size is that of the root's buffer. Each rank receives 1/n of it. busbw = algbw × (n-1)/n.",
    layout=scattered,
    busbw_factor=all_but_own_factor,
    expected=lambda layout, rank, _ranks, root: (
        Segment(offset=0, count=layout.count, start=rank * layout.count, source=root),
    ),
    issue=lambda calls, call: calls.scatter(call.send, call.receive, call.count, call.dtype, call.root),
    rooted=True,
    point_to_point=True,
)
