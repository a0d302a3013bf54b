"""Copies on a machine that does not exist: a model of their times, never a measurement.

A copy lasts its latency and its bytes over the profile's bandwidth; links that are down, slow or staged stretch it.
Copies at the same time share what leaves a GPU and what enters it.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

from gpubench.hardware.simulated.links import node_links
from gpubench.hardware.simulated.machine import SimulatedMachine, snapshots
from gpubench.hardware.simulated.node import healthy_node
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.fault import Fault
from gpubench.model.profiles.profile import Profile
from gpubench.model.terms.copies import CopyGpu, Engine, HostMemory, Place
from gpubench.model.terms.data_pattern import Block, DataPattern
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND
from gpubench.ports.arrays import Array
from gpubench.ports.copies import CopyStream
from gpubench.ports.link_counters import LinkBytes
from gpubench.ports.memory import Memory, Region

_SPREAD = 0.0005
"""From sample to sample: pairs of four H200s differ by 0.1 %."""

_ACHIEVED = 0.85
"""Of a link's rate where the profile expects nothing: copies reach 80 to 92 %. Kind: derived."""

_LATENCY_US, _STAGED_LATENCY_US, _HOST_LATENCY_US = 2.0, 15.0, 10.0
"""Of one copy where the profile expects nothing: what four H200s show. Kind: derived."""

_PAGEABLE_SHARE = 0.37
"""Of the pinned bandwidth: 21.6 of 55.6 and 18.9 of 55.4 GB/s on H200. Kind: derived."""


class _NoMemory:
    """Memory without contents; `lost` says whether what the memory's GPU gets from another is lost on the way.

    Without it nothing was verified, and nothing may say that it was.
    """

    def __init__(self, place: Place, size_bytes: int, lost: Callable[[int, Place], bool] | None) -> None:
        self.place = place
        self.size_bytes = size_bytes
        self._lost = lost

    def array(self, offset_bytes: int, count: int, dtype: str) -> Array:
        raise NotImplementedError("simulated memory holds no data")

    def fill_sent(self, data: DataPattern, block: Block, rank: int) -> None:
        """Nothing to fill."""

    def fill_byte(self, size_bytes: int, value: int) -> None:
        """Nothing to set."""

    def count_wrong(self, data: DataPattern, blocks: Sequence[tuple[Block, int | None]]) -> int:  # noqa: ARG002
        """All elements of what is lost: the fabric drops what is written, and the destination keeps what it had."""
        lost = self._lost
        if lost is None:
            raise NotImplementedError("simulated memory holds no data")
        return sum(
            block.count * block.buffers for block, sender in blocks if sender is not None and lost(sender, self.place)
        )


class SimulatedCopies:
    """`ports.Copies` on one node of a simulated machine; `noise` is the spread from sample to sample."""

    def __init__(
        self, machine: SimulatedMachine, faults: Sequence[Fault], seed: int, *, noise: float = _SPREAD, node: int = 0
    ) -> None:
        self.snapshot = snapshots(machine, faults, seed)[node]
        self._profile = machine.profile
        self._typical = cache(machine.profile.typical)
        self._spread = noise
        links = node_links(machine.profile, [fault for fault in faults if fault.node_number == node])
        self._noise = random.Random(f"{seed}/copies" + (f"/{node}" if node else ""))
        alive = [gpu for gpu in self.snapshot.gpus if not gpu.lost]
        self.gpus = tuple(
            CopyGpu(gpu.device, position, gpu.bus_id or "", gpu.uuid or "", gpu.name or "")
            for position, gpu in enumerate(alive)
        )
        self._shares = [each.share for each in links.gpus]
        self._host_shares = [each.host_share for each in links.gpus]
        self._paths = _paths(machine.profile)
        self._staged = [each.staged_with for each in links.gpus]
        self._indices = [each.index for each in links.gpus]
        self._access = {(pair.source, pair.destination): pair.cuda is True for pair in self.snapshot.pairs}
        self._enabled: set[tuple[int, int]] = set()
        self._corrupted = {
            frozenset((fault.index, fault.second))
            for fault in faults
            if fault.node_number == node and fault.get("corrupts")
        }

    @property
    def corrupts(self) -> bool:
        """True where a fault has data arrive wrong: only then is there anything to verify."""
        return bool(self._corrupted)

    def can_reach(self, source: int, destination: int) -> bool:
        """The answer of the simulated CUDA."""
        return self._access.get((self.gpus[source].device, self.gpus[destination].device), False)

    def enable(self, source: int, destination: int) -> None:
        """Copies between the two are direct from now on."""
        self._enabled.add((source, destination))

    def allocate(self, place: Place, size_bytes: int) -> Memory:
        """Memory without a limit, and without contents."""
        return _NoMemory(place, size_bytes, self._is_lost if self.corrupts else None)

    def seconds(self, streams: Sequence[CopyStream], repeats: int) -> float:
        """The longest of the streams, each slowed by those that leave or enter the same GPU."""
        ends = [(_place(stream.source), _place(stream.destination)) for stream in streams]
        leaving, entering = Counter(source for source, _ in ends), Counter(destination for _, destination in ends)
        lasts = [
            self._seconds(stream, source, destination) * max(leaving[source], entering[destination])
            for stream, (source, destination) in zip(streams, ends, strict=True)
        ]
        return repeats * max(lasts) * (1 + abs(self._noise.gauss(0.0, self._spread)))

    def close(self) -> None:
        """Nothing to give back."""

    def _seconds(self, stream: CopyStream, source: Place, destination: Place) -> float:
        if isinstance(source, HostMemory) or isinstance(destination, HostMemory):
            gb_s, latency_us = self._host_gb_s(source, destination), _HOST_LATENCY_US
        elif self._is_direct(source, destination):
            gb_s = self._direct_gb_s(stream, source, destination) * min(self._shares[source], self._shares[destination])
            latency_us = self._typical("p2p.latency_us") or _LATENCY_US
        else:
            healthy = self._typical("p2p.staged_gb_s") or self._profile.gpu.host_gb_s * _ACHIEVED
            gb_s = healthy * min(self._host_shares[source], self._host_shares[destination])
            latency_us = self._typical("p2p.staged_latency_us") or _STAGED_LATENCY_US
        return latency_us / MICROSECONDS_PER_SECOND + stream.size_bytes / gb_s / BYTES_PER_GB

    def _is_lost(self, source: int, destination: Place) -> bool:
        if isinstance(destination, HostMemory) or source >= len(self._indices):
            return False
        ends = self._indices[source], self._indices[destination]
        return frozenset(ends) in self._corrupted and self._is_direct(source, destination)

    def _is_direct(self, source: int, destination: int) -> bool:
        ends = (source, destination), (destination, source)
        staged = any(self._indices[other] in self._staged[one] for one, other in ends)
        return (source, destination) in self._enabled and not staged

    def _direct_gb_s(self, stream: CopyStream, source: int, destination: int) -> float:
        writes = stream.by == source
        path = self._paths[self._indices[source], self._indices[destination]]
        if stream.engine is Engine.SM:
            quantity = "p2p.sm_write_gb_s"
        else:
            quantity = "p2p.write_gb_s" if writes else "p2p.read_gb_s"
        typical = self._typical(quantity, path) or self._typical("p2p.write_gb_s", path)
        nvlink, links = self._profile.nvlink, path.removeprefix("NV")
        by_nvlink = nvlink is not None and links.isdecimal()
        limit = int(links) * nvlink.link_gb_s if nvlink is not None and by_nvlink else self._profile.gpu.pcie_gb_s
        return typical or limit * _ACHIEVED

    def _host_gb_s(self, source: Place, destination: Place) -> float:
        to_gpu = isinstance(source, HostMemory)
        gpu = destination if to_gpu else source
        share = 1.0 if isinstance(gpu, HostMemory) else self._host_shares[gpu]
        typical = self._typical("host_to_device_gb_s" if to_gpu else "device_to_host_gb_s")
        pageable = HostMemory.PAGEABLE in (source, destination)
        healthy = typical or self._profile.gpu.host_gb_s * _ACHIEVED
        return healthy * share * (_PAGEABLE_SHARE if pageable else 1.0)


def _paths(profile: Profile) -> dict[tuple[int, int], str]:
    """Path classes of pairs as they are without faults: a link that is down makes a path slower, and no other one."""
    node = Topology(healthy_node(profile))
    return {(one.index, other.index): node.path(one, other) for one in node.gpus for other in node.gpus}


class NoCounters:
    """`ports.LinkCounters` where nothing counts."""

    def read(self, gpu: int) -> LinkBytes:  # noqa: ARG002
        """Nothing."""
        return LinkBytes()


def _place(region: Region) -> Place:
    if not isinstance(region.memory, _NoMemory):
        raise TypeError("a simulated copy has simulated memory at both ends")
    return region.memory.place
