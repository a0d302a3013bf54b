"""A rank on a real GPU that runs every collective in one process, under mpirun: `rank.py GRAPH_REPLAYS`.

Then it runs every collective without graphs for every planted fault. It prints a line per case with the verdict.
"""

import os
import sys
from typing import TYPE_CHECKING

from gpubench.backends import cuda
from gpubench.backends.mpi import group as mpi
from gpubench.backends.nccl.backend import NcclBackend
from gpubench.backends.nccl.library import NcclLibrary
from gpubench.collectives.record import Collective, SweepRequest
from gpubench.collectives.registry import COLLECTIVES
from gpubench.jobs.runner import NullListener
from gpubench.machine.nvml import read_driver
from gpubench.model.facts.environment import detect_launcher
from gpubench.model.terms.operation import Allocator, DataType, Placement, ReduceOp
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.statistics import Sampling
from tests.fakes import faults
from tests.fakes.one_variant import measure

if TYPE_CHECKING:
    from gpubench.ports.backend import Backend

FAULTS: dict[str, faults.Fault | None] = {
    "none": lambda _data: None,
    "wrong-block": faults.wrong_block,
    "swapped-blocks": faults.swapped_blocks,
    "one-bit": faults.one_bit,
    "stale": None,
}


def request_for(collective: Collective, placements: tuple[Placement, ...], replays: int) -> SweepRequest:
    return SweepRequest(
        collective=collective,
        sizes=(2**20,),
        dtypes=(DataType.FLOAT32,),
        ops=(ReduceOp.SUM,),
        placements=placements,
        root=0,
        sampling=Sampling(iterations=3),
        warmup=2,
        graph_replays=replays,
        check=True,
    )


def placements_of(collective: Collective) -> tuple[Placement, ...]:
    return tuple(Placement) if collective.in_place else (Placement.OUT_OF_PLACE,)


def main(replays: int) -> None:
    launch = detect_launcher(os.environ)
    assert launch is not None
    group = mpi.start(launch)
    device = cuda.open_device(group.rank, group.size, "here", read_driver(os.environ))
    identities = [RankIdentity(rank=rank, host="here", node=0, local_rank=rank, pid=1) for rank in range(group.size)]
    library = NcclLibrary()

    def run(
        name: str, collective: Collective, placements: tuple[Placement, ...], backend: "Backend", graph: int
    ) -> None:
        report = measure(request_for(collective, placements, graph), group, backend, identities, NullListener())
        if group.rank == 0:
            print(name, collective.name, report.verdict, flush=True)  # noqa: T201

    for allocator in Allocator:
        backend = NcclBackend(group, device, library, allocator)
        for collective in COLLECTIVES:
            for graph in (0, replays):
                run(f"{allocator}-{graph}", collective, placements_of(collective), backend, graph)
        backend.close()
    backend = NcclBackend(group, device, library)
    for name, fault in FAULTS.items():
        for collective in COLLECTIVES:
            for placement in placements_of(collective):
                timed = 1 if placement is Placement.IN_PLACE else 3
                faulty = faults.FaultyBackend(backend, fault, skip=fault is None, timed=timed)
                spoils = group.rank == 0 or name == "stale"
                run(name, collective, (placement,), faulty if spoils else backend, 0)
    backend.close()
    mpi.finish()


if __name__ == "__main__":
    main(int(sys.argv[1]))
