"""Python runs this at start in every process that has this folder on its path: it breaks a rank as a test asks.

GPUBENCH_TEST_FAULT is `RANK:KIND`. At that rank's fifth row it will `raise`, be killed (`kill`) or sleep (`stall`). Or
its received data are wrong (`spoil`); it prints at the start (`print`); after every row its resident memory and the
free memory of its GPU are noted, in KiB (`memory`).
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

    from gpubench.measure import collective

    rows = 0
    measure_row = collective._Sweep.row
    verify = collective._Sweep._verify

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
        self.receive.array(0, 64, "uint8")[:] ^= 0x55
        return verify(self, *arguments)

    collective._Sweep.row = row  # type: ignore[method-assign]
    if kind == "spoil":
        collective._Sweep._verify = spoiled  # type: ignore[assignment,method-assign]


if _fault == f"{_rank}:print":
    print("hello from NCCL", flush=True)  # noqa: T201
elif _fault and _rank == _fault.partition(":")[0]:
    _install(_fault.partition(":")[2])
