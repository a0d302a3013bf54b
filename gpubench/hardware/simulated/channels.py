"""How NCCL divides what leaves a node over its NICs: in channels, each bound to a NIC.

All channels carry equal shares of the bytes, so that the slowest decides (NVIDIA/nccl#438). NCCL 2.28's search takes
the most channels × bandwidth, and gives up below 0.49 of a bandwidth at which it found some (src/graph/search.cc); then
all nodes have as many channels as the node with the fewest (src/init.cc). Its steps of bandwidth are left out: channels
here have what a NIC of the node carries, or half of it, and take the NICs in turns. Kind: derived.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

LEAST_STEP = 0.49
"""Of the bandwidth of a channel, below which no smaller one is tried."""

_ROUNDING = 1 + 1e-9


def channels_of_node(nics_gb_s: Sequence[float]) -> tuple[int, ...]:
    """The NICs of the channels that are found, channel after channel; none without NICs."""
    count, gb_s = 0, 0.0
    for each in sorted({rate / share for rate in nics_gb_s for share in (1, 2)}, reverse=True):
        if count and each < LEAST_STEP * gb_s:
            break
        fitting = sum(int(rate / each * _ROUNDING) for rate in nics_gb_s)
        if fitting * each > count * gb_s * _ROUNDING:
            count, gb_s = fitting, each
    turns = [int(rate / gb_s * _ROUNDING) if count else 0 for rate in nics_gb_s]
    return tuple(nic for turn in range(max(turns, default=0)) for nic, most in enumerate(turns) if turn < most)


def rings_gb_s(nodes: Iterable[Sequence[float]]) -> float:
    """GB/s in which all channels together leave each of these nodes, given by the GB/s of their NICs."""
    found = [(nics_gb_s, channels_of_node(nics_gb_s)) for nics_gb_s in nodes]
    count = min(len(channels) for _, channels in found)
    shares = ((nics_gb_s, Counter(channels[:count])) for nics_gb_s, channels in found)
    slowest = min((nics_gb_s[nic] / own for nics_gb_s, nics in shares for nic, own in nics.items()), default=0.0)
    return count * slowest
