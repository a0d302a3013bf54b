"""Checks of a group of real ranks: `mpirun -n 3 python -m tests.mpi.group_checks NAME`."""

import sys
from time import perf_counter, sleep

from gpubench.backends.cuda import open_device
from gpubench.backends.mpi import backends
from gpubench.backends.mpi import group as mpi
from gpubench.backends.mpi.trial import SIZES_BYTES, wrong_elements
from gpubench.backends.timing import CallTable, StartingLine
from gpubench.collectives.record import SweepRequest
from gpubench.collectives.registry import COLLECTIVES, SUMMARIES
from gpubench.jobs.runner import NullListener
from gpubench.machine.nvml import Driver
from gpubench.model.facts.environment import LaunchedRank
from gpubench.model.terms.operation import DataType, Placement, ReduceOp
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.statistics import Sampling
from gpubench.ports.backend import Region
from tests.fakes import cupy_on_numpy
from tests.fakes.one_variant import measure

ROUNDS = 5
LATE_SECONDS = 0.02


def check_clocks(group: mpi.MpiGroup) -> None:
    """Ranks of one host share a clock, so the offset has to be 0 within its uncertainty."""
    offset = group.clock_offset()
    assert abs(offset.seconds) <= offset.uncertainty < 1, offset
    assert list(group.largest([group.rank, -group.rank, 7.5])) == [2.0, 0.0, 7.5]


def check_starting_line(group: mpi.MpiGroup) -> None:
    """No rank leaves the barrier of a call table before the last rank has entered it."""
    line = StartingLine(group)
    table = line.before(CallTable([]))
    assert table is not None
    for number in range(ROUNDS):
        if group.rank == number % group.size:
            sleep(LATE_SECONDS)
        reached = perf_counter()
        table()
        assert reached <= line.barrier_passed_s <= perf_counter()
        assert line.barrier_passed_s >= max(group.gather(reached))


def check_trials(group: mpi.MpiGroup) -> None:
    """Check the data of every operation that is tried on GPU memory, with NumPy as a GPU."""
    cupy_on_numpy.install(cupy_on_numpy.ForGood(), cupy_on_numpy.Runtime(group.size))
    device = open_device(group.rank, group.size, "h", Driver(version="580", cuda=13000, gpus=3, visible=3))
    for operation in SUMMARIES:
        for size in SIZES_BYTES:
            assert wrong_elements(operation, size, group, device) == 0, (operation, size)


def check_pieces(group: mpi.MpiGroup) -> None:
    """Check every collective with messages of at most 1000 elements, instead of 2**30."""
    identities = [RankIdentity(rank=rank, host="h", node=0, local_rank=rank, pid=1) for rank in range(group.size)]
    for collective in COLLECTIVES:
        request = SweepRequest(
            collective=collective,
            sizes=(16384,),
            dtypes=(DataType.INT8, DataType.FLOAT32),
            ops=(ReduceOp.SUM, ReduceOp.AVG),
            placements=tuple(Placement) if collective.in_place else (Placement.OUT_OF_PLACE,),
            root=1,
            sampling=Sampling(iterations=2),
            warmup=1,
            graph_replays=0,
            check=True,
        )
        backend = backends.HostBackend(group, group.size, 1000)
        report = measure(request, group, backend, identities, NullListener())
        assert report.verdict == "PASS", (collective.name, report)


def check_timing(group: mpi.MpiGroup) -> None:
    """Check that the root's own copy of a broadcast is not timed, and that MPI's errors are raised."""
    backend = backends.HostBackend(group, group.size)
    send, receive = backend.allocate(64), backend.allocate(64)
    send.fill_byte(64, group.rank + 1)
    receive.fill_byte(64, 0)
    regions = Region(send, 0), Region(receive, 0)
    loop = backend.bind([backend.calls.broadcast(*regions, 16, DataType.FLOAT32, 0)] * 3, 0)
    loop()
    assert receive.array(0, 64, "uint8").tolist() == [0 if group.rank == 0 else 1] * 64
    for timed in (backend.together, backend.seconds):
        receive.fill_byte(64, 0)
        assert 0 < timed(loop) < 1
        assert receive.array(0, 64, "uint8").tolist() == [1] * 64
    nobody = backend.calls.broadcast(*regions, 16, DataType.FLOAT32, group.size)
    for run in (nobody, lambda: backend.together(backend.bind([nobody], 0))):
        said = ""
        try:
            run()
        except Exception as error:  # noqa: BLE001 - whatever it is
            said = str(error)
        assert "MPI_ERR_ROOT" in said


CHECKS = {
    "clocks": check_clocks,
    "starting_line": check_starting_line,
    "timing": check_timing,
    "pieces": check_pieces,
    "trials": check_trials,
}

if __name__ == "__main__":
    CHECKS[sys.argv[1]](mpi.start(LaunchedRank("test", 0, 1)))
    mpi.finish()
    print("all right")  # noqa: T201
