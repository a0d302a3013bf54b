"""Evidence of the kind `measurement` on the path between two GPUs, from counters and bandwidth."""

from dataclasses import dataclass
from math import inf

from gpubench.model.facts.idle_gpu import FOREIGN_SHARE
from gpubench.model.paths.evidence import Evidence, State
from gpubench.model.paths.p2p import JUDGED_FROM_BYTES, MOVED_SHARE, SOMEBODY_ELSE, STILL_SHARE, Carried
from gpubench.model.terms.units import format_size

_ABOVE_HOST = 1.2
"""So much more than the PCIe links carry, a bandwidth is not that of host memory."""

_MOST_COPIES = 3.0
"""Of the buffer that a rank of any algorithm sends, or receives: in a tree it sends one to its parent and one to each
of two children.
"""

_MOST_FRAMED = 2.2
"""Bytes that NVLinks count for one of data, at most: NCCL's protocol LL sends a flag with every 4; a tenth more."""

_NARROW = 2.0
"""NVLinks of less than so many times what PCIe carries are not told from it by bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The speed of the largest operation. `passed_gb_s` is the rate that must have passed along the path, at least.

    `busbw_gb_s` is None where other paths may have held it up.
    """

    size_bytes: int
    passed_gb_s: float
    busbw_gb_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The counts, speed and limits of a path.

    `ends` are the counts of the GPUs at its ends, of those through which something had to pass. `has_nvlinks` is
    whether NVLinks join them; `limit_gb_s` what these carry, `through_host_gb_s` what the way to host memory does.
    `most_shares` are the shares of each end that the operation can have moved at most, none where they are not known;
    `foreign_gb_s` is what passed these ends' NVLinks while this job was idle.
    """

    ends: tuple[Carried, ...]
    speed: Speed | None
    has_nvlinks: bool
    limit_gb_s: float | None
    through_host_gb_s: float | None
    most_shares: tuple[float, ...] = ()
    foreign_gb_s: float = 0.0


def most_share(expected: float) -> float:
    """How often the bytes that have to pass an end, at least, may pass it: these as a part of the operation's size."""
    return _MOST_COPIES * _MOST_FRAMED / expected if expected else inf


def measured(flow: Flow) -> Evidence:
    """Counters first; where these say nothing, bandwidth."""
    if not flow.has_nvlinks:
        return Evidence(seen="without NVLinks, counters and bandwidth do not tell direct from staged")
    return _of_others(flow) or _counted(flow.ends) or _timed(flow)


def _of_others(flow: Flow) -> Evidence | None:
    """No evidence, where counters moved by what was not ours; None where nothing says so. Times were contended too."""
    counted = (end.pcie_share if end.nvlink_share is None else end.nvlink_share for end in flow.ends)
    ends = zip(counted, flow.most_shares, strict=False)
    shares = [share for share, most in ends if share is not None and share > most]
    if shares:
        return Evidence(seen=f"counters moved by {max(shares):.2g} times our bytes: {SOMEBODY_ELSE}")
    if flow.limit_gb_s is not None and flow.foreign_gb_s > FOREIGN_SHARE * flow.limit_gb_s:
        passed = f"{flow.foreign_gb_s:.3g} GB/s passed the NVLinks while this job was idle"
        return Evidence(seen=f"{passed}: {SOMEBODY_ELSE}")
    return None


def _counted(ends: tuple[Carried, ...]) -> Evidence | None:
    """The evidence of both ends' counters; None where they neither clearly moved nor stood still."""
    nvlink = [end.nvlink_share for end in ends if end.nvlink_share is not None]
    if nvlink and min(nvlink) >= MOVED_SHARE:
        return Evidence(State.PRESENT, f"NVLink counters moved by {min(nvlink):.2g} times the bytes that had to pass")
    if nvlink and max(nvlink) < STILL_SHARE:
        return Evidence(State.CONTRADICTING, "NVLink counters, which moved elsewhere in this run, stood still here")
    if nvlink:
        return None
    pcie = [end.pcie_share for end in ends if end.pcie_share is not None and _nvlink_stood_still(end)]
    if pcie and len(pcie) == len(ends) and min(pcie) >= MOVED_SHARE:
        seen = f"PCIe counters moved by {min(pcie):.2g} times the bytes that had to pass, NVLink counters did not"
        return Evidence(State.CONTRADICTING, seen)
    return None


def _nvlink_stood_still(end: Carried) -> bool:
    """True if NVLink counters, which may not work, moved by no share worth the name of what PCIe's did."""
    if end.nvlink_bytes is None or end.pcie_bytes is None:
        return False
    return end.nvlink_bytes < STILL_SHARE * end.pcie_bytes


def _timed(flow: Flow) -> Evidence:
    speed, through_host = flow.speed, flow.through_host_gb_s
    if speed is None or through_host is None or flow.limit_gb_s is None:
        return Evidence(seen="nothing was counted, and nothing tells what host memory would carry")
    most = f"the way through host memory carries {through_host:.3g} GB/s at most"
    if speed.passed_gb_s > _ABOVE_HOST * through_host:
        return Evidence(State.PRESENT, f"{speed.passed_gb_s:.3g} GB/s passed, {most}")
    if speed.size_bytes < JUDGED_FROM_BYTES:
        return Evidence(seen=f"nothing was counted, and {format_size(speed.size_bytes)} is too little to tell by time")
    if speed.busbw_gb_s is None:
        return Evidence(seen="nothing was counted, and slower paths may have held this one up")
    if speed.busbw_gb_s < through_host and flow.limit_gb_s > _NARROW * through_host:
        seen = (
            f"{speed.busbw_gb_s:.3g} GB/s at {format_size(speed.size_bytes)}, NVLinks carry {flow.limit_gb_s:g}; {most}"
        )
        return Evidence(State.CONTRADICTING, seen)
    return Evidence(seen=f"nothing was counted, and {speed.busbw_gb_s:.3g} GB/s may be either: {most}")
