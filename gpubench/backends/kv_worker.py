"""The program of one process of a KV transfer. Its argument is the file descriptor of the pipe for commands."""

import ctypes
import os
import select
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gpubench.backends.cuda import load_cupy
from gpubench.backends.kv_memory import TransferMemory
from gpubench.backends.nixl_agent import HOST_BUFFER, NixlProcess
from gpubench.backends.ucp import TransferBlock, UcxProcess
from gpubench.machine.nvml import read_driver
from gpubench.model.paths.ucx import Allocation
from gpubench.model.terms.operation import Direction
from gpubench.ports.transfers import Moved, ProcessEnd, TransferCase

OUT, IN, HOST = "out", "in", HOST_BUFFER  # Buffers of each process: sent from, received into, and in host memory
_PROGRESS_CALLS = 100  # Between two looks at the pipe
_RELEVANT = ("UCX_", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "NIXL_")
_WARM_UPS = 2
_LEAST_SAMPLES, _MOST_SAMPLES = 5, 500


class Worker:
    """One process of a transfer. Each public method is a command of `kv_pair`."""

    def __init__(self) -> None:
        self._process: Any = None
        self._buffers: dict[str, TransferMemory] = {}
        self._peer_buffers: dict[str, int] = {}

    def progress(self) -> int:
        return 0 if self._process is None else self._process.progress()

    def open(
        self, library: Path | None, device: int, allocation: Allocation, size_bytes: int, seed: int
    ) -> tuple[Any, ProcessEnd]:
        """Allocate and register the buffers. Return the peer's arguments of `connect`, and facts about this process."""
        cupy = load_cupy(read_driver(os.environ))
        cupy.cuda.Device(device).use()
        self._buffers = {name: TransferMemory(cupy, device, allocation, size_bytes) for name in (OUT, IN)}
        self._buffers[HOST] = TransferMemory(cupy, device, None, size_bytes)
        self._buffers[OUT].fill(seed)
        self._process = UcxProcess(library) if library else NixlProcess(f"gpubench{seed}")
        for name, own in self._buffers.items():
            self._process.register(name, own.address, size_bytes)
        addresses = {name: own.address for name, own in self._buffers.items()}
        maps = Path("/proc/self/maps").read_text().splitlines()
        end = ProcessEnd(
            ucx_files=tuple(sorted({line.split()[-1] for line in maps if "libucp" in line})),
            exportable=self._buffers[OUT].exportable,
            pid_namespace=Path("/proc/self/ns/pid").stat().st_ino,
            variables={name: value for name, value in os.environ.items() if name.startswith(_RELEVANT)},
        )
        return (self._process.address(), addresses), end

    def connect(self, peer: Any, buffers: dict[str, int]) -> None:
        self._peer_buffers = buffers
        self._process.connect(peer)

    def transfer(self, case: TransferCase, seconds: float) -> Moved:
        """Time transfers for some seconds."""
        writes, blocks, size = case.direction is Direction.WRITE, case.blocks, case.size_bytes // case.blocks
        own, peers = (OUT, _destination(case)) if writes else (IN, OUT)
        local, remote = self._buffers[own].address, self._peer_buffers[peers]
        order = (*range(0, blocks, 2), *range(1, blocks, 2))  # So that no library joins neighboring blocks
        cut = [TransferBlock(local + block * size, remote + block * size, size) for block in order]
        move = self._process.prepare(own, peers, cut, writes=writes)
        taken: list[float] = []
        least, most = _WARM_UPS + _LEAST_SAMPLES, _WARM_UPS + _MOST_SAMPLES
        while len(taken) < least or (len(taken) < most and sum(taken[_WARM_UPS:]) < seconds):
            taken.append(move())
            if taken[-1] > seconds:  # Far longer than what the first transfer takes more than others
                break
        return Moved(case=case, seconds=tuple(taken[_WARM_UPS:] or taken[-1:]), transfers=len(taken))

    def clear(self, case: TransferCase) -> None:
        self._buffers[_destination(case)].clear(case.size_bytes)

    def count_wrong(self, case: TransferCase, seed: int) -> int:
        return self._buffers[_destination(case)].count_wrong(seed, case.size_bytes)


def _destination(case: TransferCase) -> str:
    return HOST if case.to_host else IN


def main() -> None:
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: end with the parent
    pipe, worker = Connection(int(sys.argv[-1])), Worker()
    while True:
        while not select.select([pipe], [], [], 0)[0]:
            for _ in range(_PROGRESS_CALLS):
                worker.progress()
        try:
            command, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = getattr(worker, command)(*arguments), ""
        except Exception as error:  # noqa: BLE001 - the parent reports it
            answer = None, f"{type(error).__name__}: {error}"
        pipe.send(answer)


if __name__ == "__main__":
    main()
