"""sendrecv: every rank sends its buffer to the next rank in a ring, and receives the previous rank's buffer."""

from gpubench.collectives.record import Call, Collective, whole
from gpubench.model.terms.operation import Segment, whole_factor
from gpubench.ports.backend import CollectiveCalls, Launch


def issue(calls: CollectiveCalls, call: Call) -> Launch:
    following, previous = (call.rank + 1) % call.ranks, (call.rank - 1) % call.ranks
    return calls.send_receive(call.send, following, call.receive, previous, call.count, call.dtype)


SENDRECV = Collective(
    name="sendrecv",
    description="The size is the amount that each rank sends and receives at the same time. busbw = algbw.",
    layout=whole,
    busbw_factor=whole_factor,
    expected=lambda layout, rank, ranks, _root: (
        Segment(offset=0, count=layout.count, start=0, source=(rank - 1) % ranks),
    ),
    issue=issue,
    in_place=False,
    point_to_point=True,
)
