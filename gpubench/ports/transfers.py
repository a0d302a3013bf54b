"""What `gpubench kv` needs for transfers of GPU memory between two processes."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from statistics import median
from typing import Protocol

from msgspec import field

from gpubench.model.paths.p2p import Carried, Pair
from gpubench.model.paths.ucx import Allocation, ProtocolRange
from gpubench.model.terms.operation import Direction
from gpubench.model.terms.plain import Bytes, Count, MeasuredSeconds
from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.units import BYTES_PER_GB

WORD_BYTES = 8  # Data are verified in words of this size


class TransferCase(Struct, frozen=True):
    """One kind of transfer. It writes from the source process or reads from the destination process.

    - `size_bytes`: all blocks together
    - `to_host`: the destination is host memory of the other process
    """

    direction: Direction
    size_bytes: Bytes
    blocks: Count = 1
    to_host: bool = False


class ProcessEnd(Struct, frozen=True, kw_only=True):
    """One of the two processes of a transfer. None is unknown.

    - `ucx_files`: the copies of UCX that the process has loaded
    - `exportable`: whether CUDA IPC can export its GPU memory
    - `pid_namespace`: inode of its PID namespace
    - `variables`: environment variables that can change the path
    """

    ucx_files: tuple[str, ...] = ()
    exportable: bool | None = None
    pid_namespace: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


class Moved(Struct, frozen=True, kw_only=True):
    """The measurement of one case.

    - `seconds`: the time of each transfer, until the data have arrived
    - `transfers`: the number of transfers that were made, with those before the timed ones
    - `wrong`: number of wrong 8-byte words at the destination; None if not verified
    - `sent`, `received`: bytes on the links of the two GPUs
    - `chosen`: UCX's protocol for this size; None if UCX did not print it
    - `error`: why the transfer failed
    """

    case: TransferCase
    seconds: tuple[MeasuredSeconds, ...] = ()
    transfers: Count = 0
    wrong: Count | None = None
    sent: Carried = Carried()
    received: Carried = Carried()
    chosen: ProtocolRange | None = None
    error: str | None = None

    @property
    def gb_s(self) -> float | None:
        """Bandwidth of the median transfer in GB/s."""
        return self.case.size_bytes / median(self.seconds) / BYTES_PER_GB if self.seconds else None

    @property
    def is_staged(self) -> bool | None:
        """True if UCX chose a path through host memory. None if unknown."""
        return None if self.chosen is None else self.chosen.route.host_staged


class OpenTransfers(Protocol):
    """Two processes that are connected to each other. The first one is on the first GPU of the pair."""

    @property
    def ends(self) -> tuple[ProcessEnd, ProcessEnd]: ...

    def clear(self, case: TransferCase, *, backwards: bool) -> None:
        """Overwrite the destination. The methods raise CouldNotMeasureError if a process fails."""

    def move(self, case: TransferCase, *, backwards: bool) -> Moved:
        """Time transfers from the first process to the second, or `backwards` from the second to the first."""

    def count_wrong(self, case: TransferCase, *, backwards: bool) -> int | None:
        """Return the number of wrong 8-byte words at the destination, or None if no data are moved."""


class Transfers(Protocol):
    """Transfers between the GPUs of this machine. GPUs are identified by their position."""

    def open(self, pair: Pair, allocation: Allocation) -> AbstractContextManager[OpenTransfers]:
        """Start two processes whose GPU memory is allocated in this way, and connect them.

        Raises CouldNotMeasureError if one of them fails, or they cannot connect.
        """
