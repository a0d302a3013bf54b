"""A rank that runs every collective on the host with messages cut into pieces of so many elements.

Started by mpirun as `pieces.py MOST_ELEMENTS SIZE,SIZE`.
"""

import sys

from gpubench.collectives.registry import COLLECTIVES
from gpubench.collectives.request import SweepRequest
from gpubench.hardware.mpi import group as mpi
from gpubench.hardware.mpi import host
from gpubench.jobs.listeners import NullListener
from gpubench.model.facts.launched_by import LaunchedBy
from gpubench.model.terms.operation import DataType, Placement, ReduceOp
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.model.terms.statistics.sampling import Sampling
from tests.fakes.one_variant import measure


def main(most_elements: int, sizes: tuple[int, ...]) -> None:
    group = mpi.start(LaunchedBy("test", 0, 1))
    identities = [RankIdentity(rank=rank, host="h", node=0, local_rank=rank, pid=1) for rank in range(group.size)]
    for collective in COLLECTIVES:
        request = SweepRequest(
            collective=collective,
            sizes=sizes,
            dtypes=(DataType.INT8, DataType.FLOAT32),
            ops=(ReduceOp.SUM, ReduceOp.AVG),
            placements=tuple(Placement) if collective.in_place else (Placement.OUT_OF_PLACE,),
            root=1,
            sampling=Sampling(iterations=2),
            warmup=1,
            graph_replays=0,
            check=True,
        )
        backend = host.HostBackend(group, group.size, most_elements)
        report = measure(request, group, backend, identities, NullListener())
        assert report.verdict == "PASS", (collective.name, report)
    mpi.finish()
    print("all right")  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), tuple(int(size) for size in sys.argv[2].split(",")))
