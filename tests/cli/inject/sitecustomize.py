"""Python runs this at start in every process that has this folder on its path: it breaks a rank as a test asks.

GPUBENCH_TEST_FAULT is `RANK:KIND`. At that rank's fifth row it will `raise`, be killed (`kill`) or sleep (`stall`). Or
its received data are wrong (`spoil`); it prints at the start (`print`); it comes 30 ms behind the others out of every
barrier (`late`); after every row its resident memory and the free memory of its GPU are noted, in KiB (`memory`).
`SIGKILL@PHASE` and `SIGSTOP@PHASE` strike where it enters a phase, of those that every row has at the fourth row; with
`inside MPI_Init` a moment later, and the others come only when it was struck, so that it is inside. `never` is a rank
that never starts. `clock` is every rank's: the wall clock jumps by a day at each look.

GPUBENCH_TEST_FILE is where memory is noted, and what is there once a rank was struck inside of something.

GPUBENCH_TEST_START_SECONDS is what launch and initialisation have, in the place of 300.
"""

import os

_fault = os.environ.get("GPUBENCH_TEST_FAULT", "")
_rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", ""))
_STRIKES_AT = 6
"""The first row of a sweep is a warm-up that nobody hears of."""


def _install(kind: str) -> None:
    import signal
    import sys
    import time
    from pathlib import Path
    from typing import Any

    from gpubench.backends.mpi import group as mpi
    from gpubench.measure.collective import sweep as collective

    rows = 0
    barrier = mpi.MpiGroup.barrier
    measure_row = collective.Sweep.row
    verify = collective.Sweep.verify

    def row(self: Any, number: int, case: Any) -> Any:
        nonlocal rows
        rows += 1
        if rows == _STRIKES_AT and kind == "raise":
            message = "planted in a test"
            raise RuntimeError(message)
        if rows == _STRIKES_AT and kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if rows == _STRIKES_AT and kind == "stall":
            time.sleep(60)
        result = measure_row(self, number, case)
        if kind == "memory":
            status = Path("/proc/self/status").read_text().splitlines()
            resident = next(line.split()[1] for line in status if line.startswith("RssAnon:"))
            cupy = sys.modules.get("cupy")
            device = cupy.cuda.runtime.memGetInfo()[0] // 1024 if cupy else 0
            with Path(os.environ["GPUBENCH_TEST_FILE"]).open("a") as stream:
                stream.write(f"{resident} {device}\n")
        return result

    def spoiled(self: Any, *arguments: Any) -> Any:
        self.buffers.receive.array(0, 64, "uint8")[:] ^= 0x55
        return verify(self, *arguments)

    def late_barrier(self: Any) -> None:
        barrier(self)
        time.sleep(0.03)

    if kind == "late":
        mpi.MpiGroup.barrier = late_barrier  # type: ignore[method-assign]
    collective.Sweep.row = row  # type: ignore[method-assign]
    if kind == "spoil":
        collective.Sweep.verify = spoiled  # type: ignore[assignment,method-assign]


_ENTERED = {"warm-up": 14, "operation": 4, "verification": 4, "output": 4}
"""How often a rank has entered a phase when some rows of a small sweep are there; all sizes are warmed up at first."""


def _strike(number: str, phase: str) -> None:
    import signal
    import subprocess
    import time
    from pathlib import Path
    from typing import Any

    from gpubench.ranks.watchdog.progress import ProgressBlock

    entered = 0
    enter = ProgressBlock.enter
    inside = phase.startswith("inside ")
    own = _rank == _fault.partition(":")[0]

    def entering(self: Any, entered_phase: Any, label: str = "", operations: int = 0) -> None:
        nonlocal entered
        enter(self, entered_phase, label, operations)
        entered += entered_phase == phase.removeprefix("inside ")
        if entered != _ENTERED.get(phase, 1):
            return
        if not inside:
            os.kill(os.getpid(), signal.Signals[number])
        elif own:
            struck = 'sleep 0.3; kill -s "$0" "$1"; touch "$2"'
            subprocess.Popen(["bash", "-c", struck, number, str(os.getpid()), os.environ["GPUBENCH_TEST_FILE"]])
        else:
            while not Path(os.environ["GPUBENCH_TEST_FILE"]).exists():
                time.sleep(0.01)

    if own or inside:
        ProgressBlock.enter = entering  # type: ignore[method-assign,assignment]


def _jump() -> None:
    import itertools
    import time

    days = itertools.cycle((86400.0, -86400.0, 0.0))
    now = time.time
    time.time = lambda: now() + next(days)


if "GPUBENCH_TEST_START_SECONDS" in os.environ:
    from gpubench.model.terms import ranks

    ranks.SECONDS_TO_START = float(os.environ["GPUBENCH_TEST_START_SECONDS"])
if _fault.endswith(":clock"):
    _jump()
elif _fault == f"{_rank}:never":
    import time

    time.sleep(600)
elif "@" in _fault:
    if _rank:
        _strike(*_fault.partition(":")[2].split("@"))
elif _fault == f"{_rank}:print":
    print("hello from NCCL", flush=True)  # noqa: T201
elif _fault and _rank == _fault.partition(":")[0]:
    _install(_fault.partition(":")[2])
