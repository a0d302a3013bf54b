"""broadcast: every rank ends with the root's buffer."""

from gpubench.collectives.record import Call, Collective, whole
from gpubench.model.terms.bandwidth import whole_factor
from gpubench.model.terms.operation import Layout, Segment
from gpubench.ports.collective_calls import CollectiveCalls
from gpubench.ports.launch import Launch


def expected(layout: Layout, _rank: int, _ranks: int, root: int) -> tuple[Segment, ...]:
    """What the root sent, everywhere."""
    return (Segment(offset=0, count=layout.count, start=0, source=root),)


def issue(calls: CollectiveCalls, call: Call) -> Launch:
    """`ncclBroadcast`."""
    return calls.broadcast(call.send, call.receive, call.count, call.dtype, call.root)


BROADCAST = Collective(
    name="broadcast",
    description="The size is the buffer. busbw = algbw.",
    layout=whole,
    busbw_factor=whole_factor,
    expected=expected,
    issue=issue,
    rooted=True,
)
