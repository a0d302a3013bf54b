"""A model of transfers between two processes by UCX, with the costs that UCX 1.22 showed on H200s."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

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


class SimulatedTransfers:
    """Simulates `ports.Transfers` on one node. `copy_gb_s` returns the bandwidth of a copy between two GPUs."""

    def __init__(
        self,
        copies: SimulatedCopies,
        faults: Sequence[Fault],
        seed: int,
        copy_gb_s: Callable[[Pair], float | None],
    ) -> None:
        self._copies, self._copy_gb_s, self._seed = copies, copy_gb_s, seed
        self._kv = {value for fault in faults if (value := fault.get("kv"))}
        # UCX looks at the first GPU, and disables reads over CUDA IPC unless all its NVLinks are active.
        nvlinks = copies.snapshot.gpus[0].nvlinks or ()
        self._reads_directly = bool(nvlinks) and all(link.active for link in nvlinks)
        self._no_ipc = {frozenset((fault.index, fault.second)) for fault in faults if fault.get("ipc")}

    def allocation(self, asked: Allocation) -> Allocation:
        """Return the kind of memory that processes use although they were asked for another one."""
        return next((Allocation(value) for value in sorted(self._kv) if value in set(Allocation)), asked)

    @contextmanager
    def open(self, pair: Pair, allocation: Allocation) -> Iterator[OpenTransfers]:
        exportable = allocation is Allocation.MALLOC
        one_namespace = NAMESPACES not in self._kv
        direct = exportable and one_namespace and NO_CUDA_IPC not in self._kv and frozenset(pair) not in self._no_ipc
        direct = direct and (pair[0] == pair[1] or self._copies.can_reach(*pair))
        variables = {"UCX_TLS": "^cuda_ipc"} if NO_CUDA_IPC in self._kv else {}
        ends = [
            ProcessEnd(
                exportable=exportable,
                pid_namespace=0 if one_namespace else number,
                variables=variables,
            )
            for number in range(2)
        ]
        yield _Opened((ends[0], ends[1]), pair, allocation, self, direct=direct)

    def moved(self, pair: Pair, case: TransferCase, allocation: Allocation, *, direct: bool) -> Moved:
        """Return the simulated measurement of one transfer."""
        reads = case.direction is Direction.READ
        direct = direct and not case.to_host and (self._reads_directly or not reads)
        rate = _STAGED_GB_S
        if direct:
            copied = self._copy_gb_s(pair)
            rate = _ONE_GPU_GB_S if copied is None else copied * _COPY_SHARE
        start = _START_SECONDS if direct else _STAGED_SECONDS
        seconds = start + case.blocks * _BLOCK_SECONDS + case.size_bytes / rate / BYTES_PER_GB
        noise = random.Random(f"{self._seed}/kv/{pair}/{allocation}/{case}")
        return Moved(
            transfers=_SAMPLES,
            seconds=tuple(seconds * (1 + abs(noise.gauss(0.0, _SPREAD))) for _ in range(_SAMPLES)),
            chosen=_DIRECT if direct else _EMULATED,
        )

    def count_wrong(self, pair: Pair, case: TransferCase, *, direct: bool) -> int:
        is_lost = direct and not case.to_host and self._copies.is_lost(*pair)
        return case.size_bytes // WORD_BYTES if is_lost else 0


class _Opened:
    def __init__(
        self,
        ends: tuple[ProcessEnd, ProcessEnd],
        pair: Pair,
        allocation: Allocation,
        transfers: SimulatedTransfers,
        *,
        direct: bool,
    ) -> None:
        self.ends = ends
        self._pair, self._allocation, self._transfers, self._direct = pair, allocation, transfers, direct

    def clear(self, case: TransferCase, *, backwards: bool) -> None: ...

    def move(self, case: TransferCase, *, backwards: bool) -> Moved:
        return self._transfers.moved(self._ordered(backwards), case, self._allocation, direct=self._direct)

    def count_wrong(self, case: TransferCase, *, backwards: bool) -> int:
        return self._transfers.count_wrong(self._ordered(backwards), case, direct=self._direct)

    def _ordered(self, backwards: bool) -> Pair:  # noqa: FBT001
        one, other = self._pair
        return (other, one) if backwards else self._pair
