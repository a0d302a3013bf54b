"""The program of one process of a KV transfer: reads commands as JSON lines from stdin, and answers on stdout.

What libraries print goes to stderr, because UCX writes its protocol tables to stdout.
"""

import ctypes
import json
import os
import select
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from gpubench.backends.cuda import load_cupy
from gpubench.backends.kv_memory import TransferMemory
from gpubench.backends.nixl_agent import HOST_BUFFER, NixlProcess
from gpubench.backends.ucp import TransferBlock, UcxProcess
from gpubench.machine.nvml import read_driver
from gpubench.model.paths.ucx import Allocation

OUT, IN, HOST = "out", "in", HOST_BUFFER  # Buffers of each process: sent from, received into, and in host memory
_PROGRESS_CALLS = 100  # Between two looks at stdin
_WARM_UPS = 2
_LEAST_SAMPLES, _MOST_SAMPLES = 5, 500


class Worker:
    """One process of a transfer. Each public method is a command; its keywords are the command's arguments."""

    def __init__(self) -> None:
        self._process: Any = None
        self._buffers: dict[str, TransferMemory] = {}
        self._peer_buffers: dict[str, int] = {}
        self._seed = 0

    def progress(self) -> int:
        return 0 if self._process is None else self._process.progress()

    def open(self, backend: str, library: str, device: int, allocation: str, size_bytes: int, seed: int) -> Any:
        """Allocate and register the buffers. Return what the peer needs to connect, and facts about this process."""
        cupy = load_cupy(read_driver(os.environ))
        cupy.cuda.Device(device).use()
        self._seed = seed
        memory = Allocation(allocation)
        self._buffers = {name: TransferMemory(cupy, device, memory, size_bytes) for name in (OUT, IN)}
        self._buffers[HOST] = TransferMemory(cupy, device, None, size_bytes)
        self._buffers[OUT].fill(seed)
        name = f"gpubench{seed}"
        self._process = NixlProcess(name) if backend == "nixl" else UcxProcess(Path(library), name)
        keys = {name: self._process.register(name, own.address, size_bytes) for name, own in self._buffers.items()}
        return {
            "address": b64encode(self._process.address()).decode(),
            "keys": {name: b64encode(key).decode() for name, key in keys.items()},
            "buffers": {name: buffer.address for name, buffer in self._buffers.items()},
            "version": self._process.version,
            "exportable": self._buffers[OUT].exportable,
            "pid_namespace": Path("/proc/self/ns/pid").stat().st_ino,
            "rdma_devices": len(list(Path("/dev/infiniband").glob("uverbs*"))),
            "ucx": sorted({line.split()[-1] for line in _maps() if "libucp" in line}),
        }

    def connect(self, address: str, keys: dict[str, str], buffers: dict[str, int]) -> None:
        self._peer_buffers = buffers
        self._process.connect(b64decode(address), {name: b64decode(key) for name, key in keys.items()})

    def transfer(self, to: str, size_bytes: int, blocks: int, seconds: float, *, writes: bool) -> dict[str, Any]:
        """Time transfers for some seconds. Return the time of each in seconds, and how many were made in all."""
        own, peers = (OUT, to) if writes else (IN, OUT)
        local, remote, size = self._buffers[own].address, self._peer_buffers[peers], size_bytes // blocks
        order = (*range(0, blocks, 2), *range(1, blocks, 2))  # So that no library joins neighboring blocks
        cut = [TransferBlock(local + block * size, remote + block * size, size) for block in order]
        prepared = self._process.prepare(own, peers, cut, writes=writes)
        move = self._process.transfer
        times: list[float] = []
        transfers = 0
        start = perf_counter()
        while transfers < _WARM_UPS or (
            len(times) < _MOST_SAMPLES and (len(times) < _LEAST_SAMPLES or perf_counter() - start < seconds)
        ):
            took = move(prepared)
            transfers += 1
            if took > seconds:
                times.append(took)  # Far longer than what the first transfer takes more than others
                break
            if transfers > _WARM_UPS:
                times.append(took)
            else:
                start = perf_counter()
        return {"seconds": times, "transfers": transfers}

    def clear(self, to: str, size_bytes: int) -> None:
        self._buffers[to].clear(size_bytes)

    def count_wrong(self, to: str, seed: int, size_bytes: int) -> int:
        return self._buffers[to].count_wrong(seed, size_bytes)


def _maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def _commands(progress: Callable[[], int]) -> Iterator[dict[str, Any]]:
    """Yield commands from stdin, and let the library work in between."""
    held = b""
    while True:
        line, found, rest = held.partition(b"\n")
        if found:
            held = rest
            yield json.loads(line)
            continue
        for _ in range(_PROGRESS_CALLS):
            progress()
        if select.select([0], [], [], 0)[0]:
            read = os.read(0, 2**20)
            if not read:
                return
            held += read


def main() -> None:
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: end with the parent
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    for command in _commands(worker.progress):
        name = command.pop("do")
        try:
            answer = {"value": getattr(worker, name)(**command)}
        except Exception as error:  # noqa: BLE001 - the parent reports it
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
