"""A rank that runs every collective once on more bytes than MPI's counts allow: `huge.py SIZE`, under mpirun.

`group_checks.py` checks how messages are split. This checks that MPI accepts messages of real size. Every rank sends
its number plus one in every byte.
"""

import sys

from gpubench.backends.mpi import backends
from gpubench.backends.mpi import group as mpi
from gpubench.collectives.record import Call
from gpubench.collectives.registry import COLLECTIVES
from gpubench.model.facts.environment import LaunchedRank
from gpubench.model.terms.operation import DataType, ReduceOp
from gpubench.ports.backend import Region


def main(size: int) -> None:
    group = mpi.start(LaunchedRank("test", 0, 1))
    rank, ranks, root = group.rank, group.size, 1
    backend = backends.HostBackend(group, ranks)
    send, receive = backend.allocate(size), backend.allocate(size)
    for collective in COLLECTIVES:
        layout = collective.layout(size, DataType.INT8, ranks)
        send.fill_byte(size, rank + 1)
        receive.fill_byte(size, 0)
        regions = Region(send, 0), Region(receive, 0)
        collective.issue(backend.calls, Call(*regions, layout.count, DataType.INT8, ReduceOp.SUM, root, rank, ranks))()
        for segment in collective.expected(layout, rank, ranks, root):
            expected = ranks * (ranks + 1) // 2 if segment.source is None else segment.source + 1
            values = receive.array(segment.offset, segment.count, "uint8")
            assert (int(values.min()), int(values.max())) == (expected, expected), collective.name
    mpi.finish()
    print("all right")  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]))
