"""A model of transfers between two processes by UCX, with the costs that UCX 1.22 showed on H200s."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from msgspec import Struct

from gpubench.model.paths.p2p import Pair
from gpubench.model.paths.ucx import Allocation, ProtocolRange
from gpubench.model.profiles.fault import Fault
from gpubench.model.terms.operation import Direction
from gpubench.model.terms.units import BYTES_PER_GB
from gpubench.ports.transfers import WORD_BYTES, Moved, OpenTransfers, ProcessEnd, TransferCase
from gpubench.simulated.links import SimulatedCopies

_COPY_SHARE = 0.985  # UCX reached 389 GB/s where plain copies reached 394
_ONE_GPU_GB_S = 1920.0  # Between two processes on one GPU
_START_SECONDS, _BLOCK_SECONDS = 5e-6, 5.2e-6
_STAGED_GB_S, _STAGED_SECONDS = 0.5, 220e-6  # Software emulation over TCP on the loopback interface
_SPREAD = 0.005
_SAMPLES = 50
_DIRECT = ProtocolRange(0, None, "zero-copy", "cuda_ipc/cuda")
_EMULATED = ProtocolRange(0, None, "software emulation", "tcp/lo")

NO_CUDA_IPC, NAMESPACES = "ucx_tls", "pid"  # Values of the fault `kv` that do not name a kind of memory


def allocation_fault(faults: Sequence[Fault]) -> Allocation | None:
    """Return the kind of memory that processes use although they were asked for another one."""
    return next((Allocation(value) for value in sorted(_faults_of_kv(faults)) if value in set(Allocation)), None)


def _faults_of_kv(faults: Sequence[Fault]) -> set[str]:
    return {value for fault in faults if (value := fault.get("kv"))}


class SimulatedTransfers:
    """Simulates `ports.Transfers` on one node. `copies_gb_s` has the bandwidth of copies between two GPUs."""

    def __init__(
        self, copies: SimulatedCopies, faults: Sequence[Fault], seed: int, copies_gb_s: Mapping[Pair, float]
    ) -> None:
        self.copies, self.copies_gb_s, self.seed = copies, copies_gb_s, seed
        self._kv = _faults_of_kv(faults)
        # UCX looks at the first GPU, and disables reads over CUDA IPC unless all its NVLinks are active.
        nvlinks = copies.snapshot.gpus[0].nvlinks or ()
        self.reads_directly = bool(nvlinks) and all(link.active for link in nvlinks)
        self._no_ipc = {frozenset((fault.index, fault.second)) for fault in faults if fault.get("ipc")}

    @contextmanager
    def open(self, pair: Pair, allocation: Allocation) -> Iterator[OpenTransfers]:
        exportable = allocation is Allocation.MALLOC
        one_namespace = NAMESPACES not in self._kv
        direct = exportable and one_namespace and NO_CUDA_IPC not in self._kv and frozenset(pair) not in self._no_ipc
        direct = direct and (pair[0] == pair[1] or self.copies.can_reach(*pair))
        variables = {"UCX_TLS": "^cuda_ipc"} if NO_CUDA_IPC in self._kv else {}
        first, second = (
            ProcessEnd(exportable=exportable, pid_namespace=0 if one_namespace else number, variables=variables)
            for number in range(2)
        )
        yield _Opened(self, pair, allocation, (first, second), direct)


class _Opened(Struct, frozen=True):
    """Two processes. `direct` is true if UCX uses CUDA IPC between them."""

    model: SimulatedTransfers
    pair: Pair
    allocation: Allocation
    ends: tuple[ProcessEnd, ProcessEnd]
    direct: bool

    def clear(self, case: TransferCase, *, backwards: bool) -> None: ...

    def move(self, case: TransferCase, *, backwards: bool) -> Moved:
        pair, model = self._ordered(backwards), self.model
        direct = self.direct and not case.to_host and (model.reads_directly or case.direction is Direction.WRITE)
        rate = _STAGED_GB_S
        if direct:
            copied = model.copies_gb_s.get(pair)
            rate = _ONE_GPU_GB_S if copied is None else copied * _COPY_SHARE
        start = _START_SECONDS if direct else _STAGED_SECONDS
        seconds = start + case.blocks * _BLOCK_SECONDS + case.size_bytes / rate / BYTES_PER_GB
        noise = random.Random(f"{model.seed}/kv/{pair}/{self.allocation}/{case}")
        return Moved(
            case=case,
            transfers=_SAMPLES,
            seconds=tuple(seconds * (1 + abs(noise.gauss(0.0, _SPREAD))) for _ in range(_SAMPLES)),
            chosen=_DIRECT if direct else _EMULATED,
        )

    def count_wrong(self, case: TransferCase, *, backwards: bool) -> int | None:
        is_lost = self.direct and not case.to_host and self.model.copies.is_lost(*self._ordered(backwards))
        return case.size_bytes // WORD_BYTES if is_lost else None  # No data are moved

    def _ordered(self, backwards: bool) -> Pair:  # noqa: FBT001
        one, other = self.pair
        return (other, one) if backwards else self.pair
