"""The rows of `gpubench explain`: who is connected to whom over what, and why it goes through host memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from gpubench.model.results.report import Record

PATHS_SECTION = "paths"

_MOST_CANDIDATES = 3
_SCOPES = ("node", "network", "unknown")
_VERDICTS = ("PASS", "WARN", "FAIL", "SKIP", "ERROR")


def either(candidates: Sequence[str]) -> str:
    """The communicators that lines may be of which fit several: '0xa or 0xb'; empty where there are none."""
    more = len(candidates) - _MOST_CANDIDATES
    shown = candidates[: _MOST_CANDIDATES if more > 0 else None]
    return " or ".join((*shown, f"one of {more} more")) if more > 0 else " or ".join(shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRow(Record):
    """Channels from one rank of a communicator to another that travel alike."""

    communicator: str | None  #: NCCL's commId; null where lines could not be told
    src: int  #: sending rank
    dst: int  #: receiving rank
    src_host: str | None  #: its host
    src_pid: int | None  #: its process
    src_bus_id: str | None  #: its GPU
    dst_host: str | None  #: its host
    dst_pid: int | None  #: its process
    dst_bus_id: str | None  #: its GPU
    scope: Annotated[str, _SCOPES]  #: whether NCCL takes both ranks for those of one machine
    transport: str  #: as NCCL names it; the sender's word, else the receiver's
    transport_received: str | None  #: the receiver's word where it is another
    host_staged: bool | None  #: whether the bytes pass through host memory
    channels: int  #: channels that travel alike
    peer_to_peer: bool  #: for send and receive; else for collectives
    proxy_rank: int | None  #: the rank whose NIC is used (PXN)
    verdict: Annotated[str, _VERDICTS]  #: through host memory SKIP by design, WARN perhaps so; ERROR: not known
    cause: str | None  #: id of the cause where host_staged


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportRow(Record):
    """Pairs of a communicator that are connected alike."""

    communicator: str | None  #: its id; null where lines could not be told
    scope: Annotated[str, _SCOPES]  #: inside a node, or between nodes
    transport: str  #: what carries it, as NCCL prints it: P2P/CUMEM, SHM/direct, NET/IB/0/GDRDMA
    pairs: Annotated[int, {"minimum": 1}]  #: ordered pairs connected alike
    channels_least: int  #: of a pair
    channels_most: int  #: of a pair
    host_staged: bool | None  #: whether bytes pass through host memory
    verdict: Annotated[str, _VERDICTS]  #: through host memory SKIP by design, WARN perhaps so; ERROR: not known
    first: tuple[tuple[int, int], ...]  #: the first of the pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorRow(Record):
    """A communicator as all logs together show it."""

    id: str | None  #: as NCCL prints it
    ranks: int | None  #: ranks it has
    nodes: int | None  #: as NCCL counts machines
    hosts: tuple[str, ...]  #: where they are
    missing_ranks: tuple[int, ...]  #: those without a log
    pairs: int  #: that are connected
    candidates: tuple[str, ...]  #: where id is null: the communicators that the lines may be of


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRow(Record):
    """A rank of a communicator."""

    communicator: str | None  #: its id
    rank: int  #: number in the job
    host: str  #: host name
    node: str  #: what NCCL takes for its machine
    pid: int  #: process id
    bus_id: str | None  #: PCI address of its GPU
    nvml_index: int | None  #: as nvidia-smi counts
