"""scatter: rank r ends with block r of the root's buffer."""

from gpubench.collectives.record import Call, Collective, scattered
from gpubench.model.terms.bandwidth import all_but_own_factor
from gpubench.model.terms.operation import Layout, Segment
from gpubench.ports.collective_calls import CollectiveCalls
from gpubench.ports.launch import Launch


def expected(layout: Layout, rank: int, _ranks: int, root: int) -> tuple[Segment, ...]:
    """Block r of what the root sent, on rank r."""
    return (Segment(offset=0, count=layout.count, start=rank * layout.count, source=root),)


def issue(calls: CollectiveCalls, call: Call) -> Launch:
    """`ncclScatter`."""
    return calls.scatter(call.send, call.receive, call.count, call.dtype, call.root)


SCATTER = Collective(
    name="scatter",
    description="The size is the root's buffer; each rank receives an n-th of it. busbw = algbw × (n-1)/n.",
    layout=scattered,
    busbw_factor=all_but_own_factor,
    expected=expected,
    issue=issue,
    rooted=True,
    point_to_point=True,
)
