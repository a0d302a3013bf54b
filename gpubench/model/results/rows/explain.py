"""The rows of `gpubench explain`: who is connected to whom over what, and why it goes through host memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpubench.model.results.report import Record

PATHS_SECTION = "paths"

_MOST_CANDIDATES = 3


def either(candidates: Sequence[str]) -> str:
    """The communicators that lines may be of which fit several: '0xa or 0xb'; empty where there are none."""
    more = len(candidates) - _MOST_CANDIDATES
    shown = candidates[: _MOST_CANDIDATES if more > 0 else None]
    return " or ".join((*shown, f"one of {more} more")) if more > 0 else " or ".join(shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRow(Record):
    """Channels from one rank of a communicator to another that travel alike.

    `transport` is the sender's word, or the receiver's where no line of the sender is known; `transport_received` is
    the receiver's where it says another. `peer_to_peer` is whether it is for send and receive instead of collectives.
    `verdict` is PASS, FAIL, SKIP (through host memory by design) or ERROR (not known).
    """

    communicator: str | None
    src: int
    dst: int
    src_host: str | None
    src_pid: int | None
    src_bus_id: str | None
    dst_host: str | None
    dst_pid: int | None
    dst_bus_id: str | None
    scope: str
    transport: str
    transport_received: str | None
    host_staged: bool | None
    channels: int
    peer_to_peer: bool
    proxy_rank: int | None
    verdict: str
    cause: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportRow(Record):
    """Pairs of a communicator that are connected alike. `first` are some of them, each source and destination."""

    communicator: str | None
    scope: str
    transport: str
    pairs: int
    channels_least: int
    channels_most: int
    host_staged: bool | None
    verdict: str
    first: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorRow(Record):
    """A communicator: its ranks, how many the log misses, its machines as NCCL counts them.

    `id` is None where lines could not be told; `candidates` are then those that they may be of.
    """

    id: str | None
    ranks: int | None
    nodes: int | None
    hosts: tuple[str, ...]
    missing_ranks: tuple[int, ...]
    pairs: int
    candidates: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRow(Record):
    """A rank of a communicator. `node` is what NCCL takes for its machine; `nvml_index` counts as nvidia-smi does."""

    communicator: str | None
    rank: int
    host: str
    node: str
    pid: int
    bus_id: str | None
    nvml_index: int | None
