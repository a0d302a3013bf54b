"""Simulate running jobs: the traffic on a node's links, and the replies of NCCL's RAS service."""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from gpubench.model.facts.process import GpuProcess, RankFacts
from gpubench.model.facts.snapshot import NicFacts, Snapshot
from gpubench.model.facts.traffic import LOOPBACK, GpuReading, NicReading, NodeReading, TaskFacts
from gpubench.model.paths.hang import RasCommunicator, RasRank
from gpubench.model.paths.topology import BITS_PER_BYTE
from gpubench.model.profiles.fault import Fault
from gpubench.model.profiles.profile import Profile
from gpubench.model.terms.units import BYTES_PER_GB
from gpubench.simulated.links import NodeLinks, node_links

NVLINK_SHARE, PCIE_SHARE, NETWORK_SHARE, SOCKETS_GB_S = 0.09, 0.53, 0.7, 4.3
"""Average fraction of link bandwidth that a job uses, and GB/s over sockets. In data-parallel training on two
H200s, NVLinks were at 9 %, or PCIe at 53 % if host-staged. Over sockets on one host it was 4.3 GB/s. The
fraction for the network is an assumption.
"""

_NOISE = 0.03
_FIRST_PID = 4000
_USUAL_RATE_GBIT_S = 100.0
_CONTROL_GB_S = 0.005  # PCIe traffic of an idle GPU


class Rates(NamedTuple):
    """A GPU's traffic rates in GB/s."""

    nvlink_sent: float = 0.0
    nvlink_received: float = 0.0
    pcie_sent: float = 0.0
    pcie_received: float = 0.0


class SimulatedTraffic:
    """Simulated readings of a node during a job. `several` is true if the machine has more than one node.

    `links` are the node's links as NCCL uses them. `clock` returns the time in seconds.
    """

    def __init__(
        self,
        node: Snapshot,
        profile: Profile,
        faults: Sequence[Fault],
        seed: int,
        clock: Callable[[], float],
        *,
        several: bool,
        links: NodeLinks | None = None,
    ) -> None:
        self._node, self._profile, self._clock = node, profile, clock
        self._links = links or node_links(profile, faults)
        self._variables = {name: value for fault in faults for name, value in fault.variables.items()}
        self._kind = next((value for fault in faults if (value := fault.get("traffic"))), "training")
        self._several = several
        self._random = random.Random(f"{seed}/{node.host}")
        self._before = clock()
        self._nvlink = dict.fromkeys(range(len(node.gpus)), (0.0, 0.0))
        self._network: dict[str, float] = {}

    def read(self) -> NodeReading:
        """Return a reading of the node, with counters increased by the traffic since the previous reading."""
        now = self._clock()
        seconds, self._before = now - self._before, now
        usable = iter(self._usable_rates(sum(not gpu.lost for gpu in self._node.gpus)))
        rates = [Rates() if gpu.lost else next(usable) for gpu in self._node.gpus]
        rates = [Rates(*map(self._add_noise, gpu_rates)) for gpu_rates in rates]
        gpus = tuple(self._gpu(position, gpu_rates, seconds) for position, gpu_rates in enumerate(rates))
        nics = self._nics(seconds, sum(gpu_rates.pcie_sent for gpu_rates in rates))
        silent = next((failure.error for failure in self._node.failures if failure.stage == "nvml"), None)
        return NodeReading(
            host=self._node.host,
            seconds=now,
            gpus=() if silent else gpus,
            nics=nics,
            tasks=self._tasks(),
            driver_silent=silent or self._node.driver.absent,
        )

    def look_closely(self, pids: Collection[int]) -> tuple[TaskFacts, ...] | None:  # noqa: ARG002
        """Return None, because `read` already includes all processes of a simulated job."""
        return None

    def close(self) -> None: ...

    def _add_noise(self, rate: float) -> float:
        return max(rate * self._random.gauss(1, _NOISE), 0.0)

    def _usable_rates(self, gpus: int) -> Sequence[Rates]:
        pcie = self._profile.gpu.pcie_gb_s * PCIE_SHARE
        nvlink = self._profile.nvlink
        direct = 0.0 if nvlink is None else nvlink.links * nvlink.link_gb_s * NVLINK_SHARE
        pcie_rates = {
            "staged": (pcie, pcie),
            "sockets": (SOCKETS_GB_S, SOCKETS_GB_S),
            "loading": (0.01, pcie),
            "checkpoint": (pcie, 0.01),
            "inference": (pcie * 0.7, pcie * 0.65),
            "waiting": (_CONTROL_GB_S, _CONTROL_GB_S),
            "idle": (_CONTROL_GB_S, _CONTROL_GB_S),
        }
        if self._kind in pcie_rates:
            return [Rates(0.0, 0.0, *pcie_rates[self._kind])] * gpus
        # Data to other nodes crosses a GPU's PCIe link, whether or not it is host-staged.
        network = sum(map(self._network_gb_s, self._node.nics)) / max(gpus, 1) if self._several else 0.0
        return [
            rates._replace(pcie_sent=rates.pcie_sent + network, pcie_received=rates.pcie_received + network)
            for rates in _ring_rates(self._links, gpus, direct or pcie, pcie, has_nvlinks=nvlink is not None)
        ]

    def _gpu(self, position: int, rates: Rates, seconds: float) -> GpuReading:
        gpu = self._node.gpus[position]
        if gpu.lost:
            return GpuReading(index=gpu.index, bus_id=gpu.bus_id or gpu.device, lost=gpu.lost)
        sent, received = self._nvlink[position]
        sent, received = sent + rates.nvlink_sent * seconds, received + rates.nvlink_received * seconds
        self._nvlink[position] = sent, received
        works = self._kind != "idle" and (self._kind != "waiting" or position > 0)
        memory = None if gpu.memory_bytes is None else gpu.memory_bytes // 2
        has_nvlinks = self._profile.nvlink is not None
        return GpuReading(
            index=gpu.index,
            bus_id=gpu.bus_id or gpu.device,
            nvlink_sent_bytes=round(sent * BYTES_PER_GB) if has_nvlinks else None,
            nvlink_received_bytes=round(received * BYTES_PER_GB) if has_nvlinks else None,
            pcie_sent_gb_s=rates.pcie_sent,
            pcie_received_gb_s=rates.pcie_received,
            utilization_percent=98 if works else 0,
            clock_mhz=gpu.most_clock_mhz,
            throttle_reasons=gpu.throttle_reasons,
            processes=(GpuProcess(pid=_FIRST_PID + position, name="python", memory_bytes=memory),),
            unknown={} if has_nvlinks else dict.fromkeys(("nvlink_sent", "nvlink_received"), "the GPU has no NVLinks"),
        )

    def _nics(self, seconds: float, out_gb_s: float) -> tuple[NicReading, ...]:
        found = []
        trains = self._kind in ("training", "staged") and self._several
        rails = sum(nic.rdma for nic in self._node.nics)
        for nic in self._node.nics:
            rate = self._network_gb_s(nic)
            if self._kind == "staged":  # a host-staged ring leaves the node once, and its data is spread over all rails
                rate = min(rate, out_gb_s / max(len(self._node.gpus), 1) / max(rails, 1))
            moved_gb = self._add_noise(rate) * seconds if trains else 0.0
            found.append(self._nic(nic.name, moved_gb, rdma=nic.rdma, state=nic.state))
        loopback_gb = out_gb_s * seconds if self._kind == "sockets" else 0.0
        return (*found, self._nic(LOOPBACK, loopback_gb, rdma=False, state="active"))

    @staticmethod
    def _network_gb_s(nic: NicFacts) -> float:
        moves = nic.rdma and nic.state in ("active", None)
        return (nic.rate_gbit_s or _USUAL_RATE_GBIT_S) / BITS_PER_BYTE * NETWORK_SHARE if moves else 0.0

    def _nic(self, name: str, moved_gb: float, *, rdma: bool, state: str | None) -> NicReading:
        self._network[name] = self._network.get(name, 0.0) + moved_gb
        count = round(self._network[name] * BYTES_PER_GB)
        active = None if state is None else state == "active"
        return NicReading(name=name, rdma=rdma, sent_bytes=count, received_bytes=count, active=active)

    def _tasks(self) -> tuple[TaskFacts, ...]:
        together = () if self._kind == "inference" else ("torch node0:29500",)
        return tuple(
            TaskFacts(
                pid=_FIRST_PID + position,
                name="python",
                together=together,
                communicators=self._kind != "inference",
                facts=RankFacts(
                    rank=position,
                    host=self._node.host,
                    node=0,
                    local_rank=position,
                    pid=0,
                    environment=self._variables,
                ),
            )
            for position in range(len(self._node.gpus))
        )


def _ring_rates(links: NodeLinks, gpus: int, direct: float, pcie: float, *, has_nvlinks: bool) -> Iterator[Rates]:
    ring = links.ring_order(gpus)
    hops = list(zip(ring, [*ring[1:], *ring[:1]], strict=True))
    staged = {hop: not has_nvlinks or links.is_staged(*hop) for hop in hops}
    rate = pcie if any(staged.values()) else direct * min((links.share(*hop) for hop in hops), default=1.0)
    sends = {one: is_staged for (one, _), is_staged in staged.items()}
    receives = {other: is_staged for (_, other), is_staged in staged.items()}
    for position in range(gpus):
        sends_staged, receives_staged = sends[position], receives[position]
        yield Rates(
            nvlink_sent=0.0 if sends_staged else rate,
            nvlink_received=0.0 if receives_staged else rate,
            pcie_sent=rate if sends_staged else _CONTROL_GB_S,
            pcie_received=rate if receives_staged else _CONTROL_GB_S,
        )


_OPERATIONS_BEFORE, _OPERATIONS_PER_ANSWER = 6650, 500  # Operations before the first reply, and between two replies


def ras_answer(nodes: Sequence[Snapshot], faults: Iterable[Fault], number: int) -> tuple[RasCommunicator, ...]:
    """Return RAS's reply with one communicator of all ranks. If a rank hangs, the other ranks wait in the next
    operation.
    """
    hanging = {(fault.node_number, fault.index) for fault in faults if fault.get("hang")}
    launched = _OPERATIONS_BEFORE + (0 if hanging else number * _OPERATIONS_PER_ANSWER)
    places = [(number, gpu.index) for number, node in enumerate(nodes) for gpu in node.gpus if not gpu.lost]
    ranks = tuple(
        RasRank(
            rank=rank,
            host=nodes[node].host,
            pid=_FIRST_PID + index,
            counts={"AllReduce": launched - ((node, index) in hanging)},
        )
        for rank, (node, index) in enumerate(places)
    )
    return (RasCommunicator("0x51a1", len(ranks), ranks),)
