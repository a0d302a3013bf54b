"""A rank that runs every collective on the host with messages cut into pieces of so many elements.

Started by mpirun as `pieces.py MOST_ELEMENTS SIZE,SIZE`.
"""

import sys

from gpubench.cli.job import Silent
from gpubench.collectives import COLLECTIVES
from gpubench.hardware import host, mpi
from gpubench.hardware.launch import LaunchedBy
from gpubench.measure.cases import SweepRequest
from gpubench.measure.collective import measure
from gpubench.model.operation import DataType, Placement, ReduceOp
from gpubench.model.report import RankIdentity
from gpubench.model.sampling import Sampling


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
        report = measure(request, group, backend, identities, Silent())
        assert report.verdict == "PASS", (collective.name, report)
    mpi.finish()
    print("all right")  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), tuple(int(size) for size in sys.argv[2].split(",")))
