"""A rank on a real GPU whose results are spoiled on purpose: `faulty_rank.py FAULT` under mpirun prints verdicts."""

import os
import sys
from typing import TYPE_CHECKING

from gpubench.cli.job import Silent
from gpubench.collectives import COLLECTIVES
from gpubench.hardware import cuda, mpi
from gpubench.hardware.launch import launched_by
from gpubench.hardware.nccl import NcclBackend, NcclLibrary
from gpubench.hardware.nvml import read_driver
from gpubench.measure.collective import SweepRequest, measure
from gpubench.model.operation import DataType, Placement, ReduceOp
from gpubench.model.report import RankIdentity
from tests.fakes import faults

if TYPE_CHECKING:
    from gpubench.ports import Backend

FAULTS: dict[str, faults.Fault | None] = {
    "none": lambda _data: None,
    "wrong-block": faults.wrong_block,
    "swapped-blocks": faults.swapped_blocks,
    "one-bit": faults.one_bit,
    "stale": None,
}


def main(name: str) -> None:
    launch = launched_by(os.environ)
    assert launch is not None
    group = mpi.start(launch)
    device = cuda.open_device(group.rank, group.size, "here", read_driver(os.environ))
    identities = [RankIdentity(rank=rank, host="here", node=0, local_rank=rank, pid=1) for rank in range(group.size)]
    library = NcclLibrary()
    for collective in COLLECTIVES:
        for placement in Placement if collective.in_place else (Placement.OUT_OF_PLACE,):
            in_place = placement is Placement.IN_PLACE
            backend: Backend = NcclBackend(group, device, library)
            if group.rank == 0 or name == "stale":
                fault = FAULTS[name]
                backend = faults.FaultyBackend(backend, fault, skip=fault is None, timed=1 if in_place else 3)
            request = SweepRequest(
                collective=collective,
                sizes=(2**20,),
                dtypes=(DataType.FLOAT32,),
                ops=(ReduceOp.SUM,),
                placements=(placement,),
                root=0,
                iterations=3,
                warmup=2,
                graph_replays=0,
                check=True,
            )
            report = measure(request, group, backend, 1, identities, Silent())
            backend.close()
            if group.rank == 0:
                print(name, collective.name, placement, report.verdict, flush=True)  # noqa: T201
    mpi.finish()


if __name__ == "__main__":
    main(sys.argv[1])
