"""The traffic of a job on a simulated node: a model that moves counters as such jobs move them, never a measurement."""

import random
from collections.abc import Callable, Collection, Sequence

from gpubench.hardware.simulated.links import NodeLinks, node_links
from gpubench.model.facts.gpu_process import GpuProcess
from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.facts.snapshot import NicFacts, Snapshot
from gpubench.model.facts.traffic import LOOPBACK, GpuReading, NicReading, NodeReading, TaskFacts
from gpubench.model.paths.topology import BITS_PER_BYTE
from gpubench.model.profiles.fault import Fault
from gpubench.model.profiles.profile import Profile
from gpubench.model.terms.units import BYTES_PER_GB

NVLINK_SHARE, PCIE_SHARE, NETWORK_SHARE, SOCKETS_GB_S = 0.09, 0.53, 0.7, 4.3
"""Of what links carry: data-parallel training of two H200s kept NVLinks at 9 %, staged at 0 and PCIe at 53 %; by
sockets of one host it moved 4.3 GB/s. Of the network nothing was seen; its share is made up."""

_NOISE = 0.03
_FIRST_PID = 4000
_LEAST_RATE_GBIT_S = 100.0

Ways = tuple[float, float, float, float]
"""GB/s of a GPU: NVLink sent and received, PCIe sent and received."""

_NOTHING: Ways = (0.0, 0.0, 0.0, 0.0)


class SimulatedTraffic:
    """Readings of a simulated node whose job began `clock()` seconds ago; `several` is whether it has other nodes."""

    def __init__(
        self,
        node: Snapshot,
        profile: Profile,
        faults: Sequence[Fault],
        seed: int,
        clock: Callable[[], float],
        *,
        several: bool,
    ) -> None:
        self._node, self._profile, self._clock = node, profile, clock
        self._links = node_links(profile, faults)
        asked = next((value for fault in faults if (value := fault.get("traffic"))), "training")
        self._kind = asked
        self._several = several
        self._random = random.Random(f"{seed}/{node.host}")
        self._begun = clock()
        self._before = self._begun
        self._nvlink = dict.fromkeys(range(len(node.gpus)), (0.0, 0.0))
        self._network: dict[str, float] = {}

    def read(self) -> NodeReading:
        """The node now: counters have moved by what its links carried since the reading before."""
        now = self._clock()
        seconds, self._before = now - self._before, now
        ways = [tuple(self._noisy(each) for each in way) for way in self._ways()]
        gpus = tuple(self._gpu(position, way, seconds) for position, way in enumerate(ways))
        nics = self._nics(seconds, sum(way[2] for way in ways))
        silent = next((each.error for each in self._node.failures if each.stage == "nvml"), None)
        return NodeReading(
            host=self._node.host,
            seconds=now,
            gpus=() if silent else gpus,
            nics=nics,
            tasks=self._tasks(),
            driver_silent=silent or self._node.driver.absent,
        )

    def look_closely(self, pids: Collection[int]) -> tuple[TaskFacts, ...] | None:  # noqa: ARG002
        """Nothing is hidden here."""
        return None

    def close(self) -> None:
        """Nothing is open."""

    def _noisy(self, rate: float) -> float:
        return max(rate * self._random.gauss(1, _NOISE), 0.0)

    def _ways(self) -> list[Ways]:
        """The rates of every GPU; one that fell off the bus moves nothing, and no ring goes through it."""
        usable = iter(self._ways_of_usable(sum(not gpu.lost for gpu in self._node.gpus)))
        return [_NOTHING if gpu.lost else next(usable) for gpu in self._node.gpus]

    def _ways_of_usable(self, gpus: int) -> Sequence[Ways]:
        pcie = self._profile.gpu.pcie_gb_s * PCIE_SHARE
        nvlink = self._profile.nvlink
        direct = 0.0 if nvlink is None else nvlink.links * nvlink.link_gb_s * NVLINK_SHARE
        still = (0.0, 0.0, 0.005, 0.005)
        by_kind: dict[str, Ways] = {
            "staged": (0.0, 0.0, pcie, pcie),
            "sockets": (0.0, 0.0, SOCKETS_GB_S, SOCKETS_GB_S),
            "loading": (0.0, 0.0, 0.01, pcie),
            "checkpoint": (0.0, 0.0, pcie, 0.01),
            "inference": (0.0, 0.0, pcie * 0.7, pcie * 0.65),
            "waiting": still,
            "idle": still,
        }
        if self._kind in by_kind:
            return [by_kind[self._kind]] * gpus
        # What leaves the node passes the PCIe link of a GPU, by host memory or not.
        through = sum(map(self._network_gb_s, self._node.nics)) / max(gpus, 1) if self._several else 0.0
        ring = _ring(self._links, gpus, direct or pcie, pcie, has_nvlinks=nvlink is not None)
        return [(sent, received, out + through, into + through) for sent, received, out, into in ring]

    def _gpu(self, position: int, way: tuple[float, ...], seconds: float) -> GpuReading:
        gpu = self._node.gpus[position]
        if gpu.lost:
            return GpuReading(index=gpu.index, bus_id=gpu.bus_id or gpu.device, lost=gpu.lost)
        sent, received = self._nvlink[position]
        self._nvlink[position] = sent + way[0] * seconds, received + way[1] * seconds
        works = 0 if self._kind == "idle" or (self._kind == "waiting" and position == 0) else 98
        memory = None if gpu.memory_bytes is None else gpu.memory_bytes // 2
        counts = [round(each * BYTES_PER_GB) for each in self._nvlink[position]]
        known = self._profile.nvlink is not None
        return GpuReading(
            index=gpu.index,
            bus_id=gpu.bus_id or gpu.device,
            nvlink_sent_bytes=counts[0] if known else None,
            nvlink_received_bytes=counts[1] if known else None,
            pcie_sent_gb_s=way[2],
            pcie_received_gb_s=way[3],
            utilization_percent=works,
            clock_mhz=gpu.most_clock_mhz,
            throttle_reasons=gpu.throttle_reasons,
            processes=(GpuProcess(pid=_FIRST_PID + position, name="python", memory_bytes=memory),),
            unknown={} if known else dict.fromkeys(("nvlink_sent", "nvlink_received"), "the GPU has no NVLinks"),
        )

    def _nics(self, seconds: float, out_gb_s: float) -> tuple[NicReading, ...]:
        found = []
        trains = self._kind in ("training", "staged") and self._several
        rails = sum(nic.rdma for nic in self._node.nics)
        for nic in self._node.nics:
            rate = self._network_gb_s(nic)
            if self._kind == "staged":  # what one GPU hands to the next is what leaves the node, over all rails
                rate = min(rate, out_gb_s / max(len(self._node.gpus), 1) / max(rails, 1))
            moved = self._noisy(rate) * seconds if trains else 0.0
            found.append(self._nic(nic.name, moved, rdma=nic.rdma, up=nic.state))
        through = out_gb_s * seconds if self._kind == "sockets" else 0.0
        return (*found, self._nic(LOOPBACK, through, rdma=False, up="active"))

    @staticmethod
    def _network_gb_s(nic: NicFacts) -> float:
        """What a port carries of a job on several nodes."""
        moves = nic.rdma and nic.state in ("active", None)
        return (nic.rate_gbit_s or _LEAST_RATE_GBIT_S) / BITS_PER_BYTE * NETWORK_SHARE if moves else 0.0

    def _nic(self, name: str, moved_gb: float, *, rdma: bool, up: str | None) -> NicReading:
        self._network[name] = self._network.get(name, 0.0) + moved_gb
        count = round(self._network[name] * BYTES_PER_GB)
        active = None if up is None else up == "active"
        return NicReading(name=name, rdma=rdma, sent_bytes=count, received_bytes=count, active=active)

    def _tasks(self) -> tuple[TaskFacts, ...]:
        together = () if self._kind == "inference" else ("torch node0:29500",)
        return tuple(
            TaskFacts(
                pid=_FIRST_PID + position,
                name="python",
                together=together,
                communicators=self._kind != "inference",
                facts=RankFacts(rank=position, host=self._node.host, node=0, local_rank=position, pid=0),
            )
            for position in range(len(self._node.gpus))
        )


def _ring(links: NodeLinks, gpus: int, direct: float, pcie: float, *, has_nvlinks: bool) -> Sequence[Ways]:
    """What a ring of these GPUs moves: every hop the same, by NVLink where it is direct, and as fast as the slowest."""
    staged_with = [gpu.staged_with for gpu in links.gpus[:gpus]]
    indices = [gpu.index for gpu in links.gpus[:gpus]]
    hops = [(one, (one + 1) % gpus) for one in range(gpus)]
    staged = {
        (one, other)
        for one, other in hops
        if not has_nvlinks or indices[other] in staged_with[one] or indices[one] in staged_with[other]
    }
    rate = pcie if staged else direct * min((links.gpus[one].share for one in range(gpus)), default=1.0)
    found = []
    for position in range(gpus):
        out = (position, (position + 1) % gpus) in staged
        into = ((position - 1) % gpus, position) in staged
        over_nvlink = [0.0 if each else rate for each in (out, into)]
        over_pcie = [rate if each else 0.005 for each in (out, into)]
        found.append((*over_nvlink, *over_pcie))
    return [(one, two, three, four) for one, two, three, four in found]
