"""A rank that leaves MPI's barrier through a table of calls; one of them comes late, and none leaves before it.

Started by mpirun as `starting_line.py`. Clocks are compared within one host, where all have the same.
"""

from time import perf_counter, sleep

from gpubench.hardware.mpi import group as mpi
from gpubench.hardware.timing.native_loop import CallTable
from gpubench.hardware.timing.starting_line import StartingLine
from gpubench.model.facts.launched_by import LaunchedBy

ROUNDS = 5
LATE_SECONDS = 0.02


def main() -> None:
    group = mpi.start(LaunchedBy("test", 0, 1))
    line = StartingLine(group)
    table = line.before(CallTable([]))
    assert table is not None
    for number in range(ROUNDS):
        if group.rank == number % group.size:
            sleep(LATE_SECONDS)
        reached = perf_counter()
        table()
        assert reached <= line.passed_at <= perf_counter()
        assert line.passed_at >= max(group.gather(reached))
    mpi.finish()
    print("all right")  # noqa: T201


if __name__ == "__main__":
    main()
