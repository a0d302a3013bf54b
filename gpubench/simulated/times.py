"""A model of collective times on a simulated machine, alone and overlapped with computation. Nothing is measured.

Inside a node, the times are the profile's expected times, increased for faulty links and host-staged pairs. Between
nodes, they follow `collectives.expected`. Channels have equal shares of the data, and every node uses as many as the
node with the fewest. This follows NVIDIA/nccl#438, and src/graph/search.cc and src/init.cc in NCCL 2.28, without its
bandwidth steps. Kind: derived.

The effect of a limit on CTAs was fitted to one series on 4 H200s (NCCL 2.28.9, 2026-11-22). With NCCL's default of 24
CTAs, 256 MiB took 1.233 ms. With 16, 8, 4 and 2 CTAs, it took 1.471, 2.533, 4.404 and 8.275 ms. Waiting and sharing
come from 2 H200s (benchmarks/overlap_h200.md).
"""

import math
import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations

from msgspec import Struct
from msgspec.structs import replace

from gpubench.collectives.curve import Curve, curve
from gpubench.collectives.expected import Inside, expected_between
from gpubench.collectives.record import Collective
from gpubench.collectives.registry import SUMMARIES, collective_named
from gpubench.errors import CouldNotMeasureError, UsageError, invalid_choice
from gpubench.model.facts.snapshot import NicKind
from gpubench.model.paths.wiring import NodeNetwork
from gpubench.model.profiles.fault import Fault
from gpubench.model.profiles.profile import Profile
from gpubench.model.terms import overlap
from gpubench.model.terms.settings import PER_COMMUNICATOR
from gpubench.model.terms.units import BYTES_PER_GB, compress_names, plural
from gpubench.simulated.links import Hop, NodeLinks, corrupted_pairs, node_links, ring_hops
from gpubench.simulated.machine import SimulatedMachine, check_nodes, faults_by_node, hidden_gpus, merge_domains
from gpubench.simulated.settings import (
    NVLS,
    allows_nvls,
    channel_cap,
    distinct_variables,
    nccl_links,
    pairs_without_peers,
    slower_by_choice,
)

LEAST_STEP = 0.49  # NCCL's search tries no bandwidth per channel below this fraction of its best one
_ROUNDING = 1 + 1e-9


def node_channels(nics_gb_s: Sequence[float]) -> tuple[int, ...]:
    """Return the NIC index of each channel that NCCL's search finds. Empty without NICs."""
    count, gb_s = 0, 0.0
    for step in sorted({rate / share for rate in nics_gb_s for share in (1, 2)}, reverse=True):
        if count and step < LEAST_STEP * gb_s:
            break
        fitting = sum(int(rate / step * _ROUNDING) for rate in nics_gb_s)
        if fitting * step > count * gb_s * _ROUNDING:
            count, gb_s = fitting, step
    turns = [int(rate / gb_s * _ROUNDING) if count else 0 for rate in nics_gb_s]
    return tuple(nic for turn in range(max(turns, default=0)) for nic, most in enumerate(turns) if turn < most)


def rings_gb_s(nodes: Iterable[Sequence[float]]) -> float:
    """Return the bandwidth in GB/s at which all channels together leave each node. `nodes` has the GB/s of each
    node's NICs.
    """
    found = [(nics_gb_s, node_channels(nics_gb_s)) for nics_gb_s in nodes]
    count = min(len(channels) for _, channels in found)
    shares = ((nics_gb_s, Counter(channels[:count])) for nics_gb_s, channels in found)
    slowest = min((nics_gb_s[nic] / own for nics_gb_s, nics in shares for nic, own in nics.items()), default=0.0)
    return count * slowest


STAGED_SHARE = {"allreduce": 0.75}
STAGED_SHARE_OF_OTHERS = 0.66
STAGED_SECONDS = 14.0e-6
STAGED_NODE_GB_S = 180.0
"""Constants for host-staged collectives: fraction of a copy's bandwidth, extra latency, and host memory bandwidth
per node.

With NCCL_P2P_DISABLE=1 on 2 H200s, all-reduce reaches 28.4 GB/s, and all-gather and reduce-scatter reach 25.2. A copy
reaches 38. A ring is slower because it sends and receives at once, and its kernels read host memory. An all-reduce of 4
MiB takes 168 µs: 148 at that rate, 6 of healthy latency, and 14 more.

All host-staged hops of a node share its host memory, which every byte crosses twice. 4 H200s reach 25 GB/s and 8 reach
10, which is 200 and 160 GB/s of host memory. Kind: derived (NCCL 2.28.9, PCIe 5 x16, one socket).
"""

_SMALL_BYTES, _SMALL_SPREAD = 64 * 2**10, 0.015
# Relative standard deviation between runs on 4 H200s: 1 to 2 % at small sizes, 0.3 % at 1 GiB
_LARGE_BYTES, _LARGE_SPREAD = 2**30, 0.003
_RANK_SPREAD = 0.1  # Spread between ranks relative to the spread between rows. Small, because ranks wait for each other


class CollectiveTimes:
    """Times of collectives on a simulated machine. Equal arguments result in equal times.

    `noise` is the relative standard deviation of a row's time. With `whole_nodes`, the NICs of idle GPUs are used too.
    `root` is the root rank of rooted collectives. `shape` lists faults that the healthy machine has too, such as
    missing devices. Raise UsageError if the machine does not have a faulty device.
    """

    def __init__(
        self,
        machine: SimulatedMachine,
        faults: Sequence[Fault] = (),
        seed: int = 0,
        *,
        noise: float | None = None,
        whole_nodes: bool = False,
        root: int = 0,
        shape: Sequence[Fault] = (),
    ) -> None:
        check_nodes(machine, faults)
        self._shape = shape
        shape = (*shape, *hidden_gpus(machine, range(machine.nodes)))
        faults = (*shape, *faults)
        self._whole_nodes = whole_nodes
        self._requested = machine
        settings = distinct_variables(faults)
        forbidden = any(pairs_without_peers(machine.profile, variables) for variables in settings)
        machine, faults = merge_domains(machine, faults, joined=not forbidden)
        self._nodes_merged = self._requested.nodes // machine.nodes
        self._seed = seed
        self._noise = noise
        healthy = node_links(machine.profile, [fault for fault in shape if fault.node_number == 0])
        faulty = _links_by_node(machine.profile, faults)
        kinds = [*faulty.values(), *([healthy] if len(faulty) < machine.nodes else [])]
        self._job = _SimulatedJob(
            machine=machine,
            healthy=healthy,
            faulty=faulty,
            kinds=list({id(links): links for links in kinds}.values()),
            root=root,
            nvls=all(variables.get(NVLS) != "0" and allows_nvls(variables) for variables in settings),
            channels=min(filter(None, map(channel_cap, settings)), default=None),
            choice={
                name: value for variables in settings for name, value in variables.items() if name in PER_COMMUNICATOR
            },
        )
        self._corrupting = {number: corrupted_pairs(own) for number, own in faults_by_node(faults).items()}

    @property
    def gpus(self) -> int:
        """The number of GPUs that every node has, which is the default number of ranks per node."""
        return min(len(links.gpus) for links in self._job.kinds) // self._nodes_merged

    @property
    def has_network(self) -> bool:
        """False if there are several nodes but no NIC with a known rate, so that nothing can be sent between nodes."""
        return self._job.machine.nodes == 1 or any(links.nics_gb_s for links in self._job.kinds)

    def seconds(self, name: str, size_bytes: int, *, row: int, ranks_per_node: int | None = None) -> list[float]:
        """Return the time of one operation in seconds, for each rank. `row` selects the noise for repeated rows.

        Raise UsageError for an impossible collective, and CouldNotMeasureError if nodes cannot reach each other.
        """
        model = self._model(name, ranks_per_node)
        source = random.Random(f"{self._seed}/{name}/{size_bytes}/{row}")
        spread = _spread(size_bytes) if self._noise is None else self._noise
        least, ideal = model.least_seconds(size_bytes), model.seconds(size_bytes)
        typical = max(least, ideal * math.exp(source.gauss(0.0, spread)))
        times = [typical * (1 + abs(source.gauss(0.0, spread * _RANK_SPREAD))) for _ in range(model.ranks)]
        slowest = model.slowest_rank(size_bytes)
        if slowest is not None:
            times[slowest] = max(times) * (1 + spread * _RANK_SPREAD)
        return times

    def healthy_seconds(self, name: str, size_bytes: int, *, ranks_per_node: int | None = None) -> float:
        """Return the time in seconds on the same machine without faults and noise. Raise the same errors as
        `seconds`.
        """
        healthy = CollectiveTimes(self._requested, noise=0.0, shape=self._shape)
        return healthy.seconds(name, size_bytes, row=0, ranks_per_node=ranks_per_node)[0]

    def staged_pairs(self, ranks_per_node: int) -> list[tuple[int, int]]:
        """Return the ordered pairs of ranks on a node whose copies are host-staged because of a fault."""
        ranks_per_node *= self._nodes_merged
        return [
            (number * ranks_per_node + source, number * ranks_per_node + destination)
            for number, links in self._job.faulty.items()
            for source, gpu in enumerate(links.gpus[:ranks_per_node])
            for destination, other in enumerate(links.gpus[:ranks_per_node])
            if source != destination and other.index in gpu.staged_peers
        ]

    def corrupted(self, name: str, ranks_per_node: int) -> list[int]:
        """Return the ranks of a collective that receive data which a fault corrupts."""
        return self._model(name, ranks_per_node).corrupted(self._corrupting)

    def _model(self, name: str, ranks_per_node: int | None) -> "_Model":
        if name not in SUMMARIES:
            raise invalid_choice("collective", name, tuple(SUMMARIES))
        if not self.gpus:
            raise UsageError(
                f"{name} on {self._requested}, which has no GPU",
                expected="a machine with GPUs",
                next_step="--simulate hgx-h100-8",
            )
        collective = collective_named(name)
        local = self.gpus if ranks_per_node is None else ranks_per_node
        if not 1 <= local <= self.gpus:
            raise UsageError(
                f"{plural(local, 'rank')} per node of {self._requested}", expected=f"1 to {self.gpus} ranks per node"
            )
        if local * self._requested.nodes == 1:
            board, part, _ = str(self._requested).partition("/")
            raise UsageError(
                f"{name} on one GPU of {self._requested}",
                expected="at least 2 GPUs",
                reason="a collective moves data between GPUs",
                next_step=f"--simulate {board}/2" if part else f"--simulate '{board}*2'",
            )
        nic_gpus = (self.gpus if self._whole_nodes else local) * self._nodes_merged
        return _Model(self._job, collective, local * self._nodes_merged, nic_gpus)


def _links_by_node(profile: Profile, faults: Sequence[Fault]) -> dict[int, NodeLinks]:
    """Return the links of each node with faults. Nodes with equal faults share one object."""
    distinct: dict[tuple[object, ...], NodeLinks] = {}
    found = {}
    for number, node_faults in sorted(faults_by_node(faults).items()):
        key = tuple((fault.subject, fault.settings, fault.index, fault.second) for fault in node_faults)
        if key not in distinct:
            distinct[key] = nccl_links(profile, node_faults)
        found[number] = distinct[key]
    return found


class _SimulatedJob(Struct, frozen=True, kw_only=True):
    """Parameters that all collectives of a simulated job share.

    `faulty` has the links of nodes with faults. `kinds` has each different set of links once.
    """

    machine: SimulatedMachine
    healthy: NodeLinks
    faulty: Mapping[int, NodeLinks]
    kinds: Sequence[NodeLinks]
    root: int
    nvls: bool
    channels: int | None
    choice: Mapping[str, str]


class _Model:
    """The times of one collective with `local` ranks per node. `nic_gpus` is the number of GPUs per node that send
    to NICs.
    """

    def __init__(self, job: _SimulatedJob, collective: Collective, local: int, nic_gpus: int) -> None:
        self._job = job
        self._profile = profile = job.machine.profile
        self._nodes = job.machine.nodes
        self._kinds = job.kinds
        self.ranks = local * self._nodes
        self._channels = None if collective.point_to_point else job.channels
        self._nic_gpus = nic_gpus
        self._collective = collective
        self._local = local
        # A single rank per node has no local peer, so only the network takes time.
        single = Curve(((1, 0.0),), profile.link_gb_s)
        self._curve = single if local == 1 else curve(profile, collective, local, self.ranks, nvls=job.nvls)
        self._factor = collective.busbw_factor(self.ranks)
        has_nvls_values = any(
            expected.nvls and expected.quantity.startswith(f"{collective.name}.") for expected in profile.all_expected
        )
        self._in_switches = has_nvls_values and job.nvls and not (profile.nvlink and profile.nvlink.pairs)
        self._inside_node = Inside.of(profile, collective, local) if self._nodes > 1 else Inside()
        if not job.nvls:
            self._inside_node = replace(self._inside_node, nvls=None)
        staged = profile.find("p2p.staged_gb_s")
        copied_gb_s = staged[0].value if staged else profile.gpu.host_gb_s
        self._staged_gb_s = copied_gb_s * STAGED_SHARE.get(collective.name, STAGED_SHARE_OF_OTHERS)

    def seconds(self, size_bytes: int) -> float:
        """Return the time in seconds with the job's NCCL variables. Raise CouldNotMeasureError if they leave no
        algorithm.
        """
        seconds = self._unrestricted_seconds(size_bytes)
        if self._job.choice:
            gb_s = _LARGE_BYTES * self._factor / self._unrestricted_seconds(_LARGE_BYTES) / BYTES_PER_GB
            seconds *= slower_by_choice(self._job.choice, self._collective, size_bytes, self.ranks, gb_s)
        return seconds if self._channels is None else capped(seconds, size_bytes * self._factor, self._channels)

    def _unrestricted_seconds(self, size_bytes: int) -> float:
        slowest = max(self._inside(links, size_bytes) for links in self._kinds)
        across = self._across(self._kinds, size_bytes)
        seconds = max(self._curve.latency + max(slowest, across), self.least_seconds(size_bytes))
        # Lower clocks slow down a GPU's CTAs. This matters only if links are not the limit.
        share = min(gpu.clock_share for links in self._kinds for gpu in links.gpus[: self._local])
        reached = size_bytes * self._factor / seconds / BYTES_PER_GB / (own_ctas(self._profile) * _CTA_GB_S)
        longer: float = (1 + (share**-_ROUNDNESS - 1) * reached**_ROUNDNESS) ** (1 / _ROUNDNESS)
        return seconds * min(longer, 1 / share)

    def least_seconds(self, size_bytes: int) -> float:
        """Return the shortest possible time in seconds, in which the slowest GPU's links can transfer the data
        within a node.
        """
        if self._local == 1:
            return 0.0
        share = min(self._slowest(links)[1] for links in self._kinds)
        factor = self._collective.busbw_factor(self._local)
        return size_bytes * factor / (self._curve.limit_gb_s * share * BYTES_PER_GB)

    def slowest_rank(self, size_bytes: int) -> int | None:
        """Return the rank that all others wait for. None if no fault makes a rank slow.

        If NICs are faulty, return the first rank of the node.
        """
        links = self._job.healthy
        if not links.nics_gb_s:
            # If the profile has no NIC rates and only faults set them, treat the fastest NICs as healthy.
            links = replace(links, nics_gb_s=max((kind.nics_gb_s for kind in self._kinds), key=sum))
        healthy = self._latency_overhead(links, size_bytes)
        times = {number: self._latency_overhead(links, size_bytes) for number, links in self._job.faulty.items()}
        worst = max(times, key=times.__getitem__, default=None)
        if worst is None or times[worst] <= healthy:
            gpus = [gpu for links in self._nodes_links() for gpu in links.gpus[: self._local]]
            slow = min(range(self.ranks), key=lambda rank: gpus[rank].clock_share)
            return slow if gpus[slow].clock_share < 1 else None
        links = self._job.faulty[worst]
        staged = links.staged(self._local)
        return worst * self._local + (self._slowest(links)[0] if staged is None else staged)

    def _nodes_links(self) -> list[NodeLinks]:
        healthy = node_links(self._profile, ())
        return [self._job.faulty.get(number, healthy) for number in range(self._nodes)]

    def corrupted(self, pairs: Mapping[int, Collection[frozenset[int | None]]]) -> list[int]:
        """Return the ranks with corrupted data. `pairs` has the GPU pairs by node whose paths corrupt data."""
        found: set[int] = set()
        for number, links in enumerate(self._nodes_links()):
            for hop in self._hops(links) if number in pairs else ():
                if frozenset(links.gpus[end].index for end in hop) in pairs[number]:
                    found |= {number * self._local + end for end in hop}
        return sorted(found)

    def _hops(self, links: NodeLinks) -> list[Hop]:
        """Return the GPU pairs between which the collective sends data. Empty for a reduction in NVSwitches."""
        if self._in_switches:
            return []
        if not self._serves_peers_in_turn:
            return ring_hops(self._profile, links, self._local)
        hops = combinations(range(self._local), 2)
        if not self._collective.rooted:
            return list(hops)
        # With several nodes, the root waits for its NICs, not for GPUs of its node.
        return [hop for hop in hops if self._job.root in hop] if self._nodes == 1 else []

    def _slowest(self, links: NodeLinks) -> tuple[int, float]:
        """Return the position of the GPU that all others wait for, and the fraction of bandwidth that remains for
        it.
        """
        # If a rank serves its peers one after another, a slow path only affects its fraction of the time.
        part = 1 / (self.ranks - 1) if self._serves_peers_in_turn else 1.0
        return links.slowest(self._local, self._hops(links), part)

    @property
    def _serves_peers_in_turn(self) -> bool:
        return self._collective.point_to_point and self._collective.name != "sendrecv"

    def _latency_overhead(self, links: NodeLinks, size_bytes: int) -> float:
        return max(self._inside(links, size_bytes), self._across([links], size_bytes))

    def _inside(self, links: NodeLinks, size_bytes: int) -> float:
        if self._local == 1:
            return 0.0
        healthy = self._curve.at(size_bytes) - self._curve.latency
        share = self._slowest(links)[1]
        # The profile's smallest size may be large. Its time then includes more than latency, so add what the links
        # need.
        least = size_bytes * self._factor / (self._curve.limit_gb_s * BYTES_PER_GB)
        stretched = max(healthy / share, healthy + least * (1 / share - 1))
        if links.staged(self._local) is None:
            return stretched
        gb_s = min(self._staged_gb_s, STAGED_NODE_GB_S / (2 * links.staged_hops(self._local)))
        return max(stretched, STAGED_SECONDS + size_bytes * self._factor / (gb_s * BYTES_PER_GB))

    def _across(self, kinds: Sequence[NodeLinks], size_bytes: int) -> float:
        if self._nodes == 1:
            return 0.0
        if not all(links.nics_gb_s for links in kinds):
            numbers = [number for number, links in self._job.faulty.items() if not links.nics_gb_s]
            cut_off = compress_names([f"node{number}" for number in numbers])
            raise CouldNotMeasureError(
                f"{cut_off or 'a simulated node'} has no NIC that is up and whose rate is known",
                expected="a NIC that reaches the other nodes",
            )
        slowest = min(min(links.nics_gb_s) for links in kinds)
        most = self._nic_gpus * self._profile.gpu.host_gb_s
        if self._collective.point_to_point:
            node_gb_s = min(len(links.nics_gb_s) for links in kinds) * slowest
        else:
            node_gb_s = rings_gb_s(links.nics_gb_s for links in kinds)
        rdma = any(nic.kind is not NicKind.ETHERNET for nic in self._profile.nic)
        network = NodeNetwork(self._nodes, self.ranks, min(node_gb_s, most), min(slowest, most), rdma)
        share = min(self._slowest(links)[1] for links in kinds)
        inside = replace(self._inside_node, share=share)
        return expected_between(self._collective, size_bytes, network, inside).seconds - self._curve.latency


def _spread(size_bytes: int) -> float:
    """Return the standard deviation of the logarithm of a row's time. It decreases with the logarithm of the size."""
    position = math.log(max(size_bytes, 1) / _SMALL_BYTES) / math.log(_LARGE_BYTES / _SMALL_BYTES)
    return _SMALL_SPREAD * math.exp(min(1.0, max(0.0, position)) * math.log(_LARGE_SPREAD / _SMALL_SPREAD))


_CTA_GB_S = 24.4  # busbw per CTA, measured with 2 CTAs on 4 H200s
_ROUNDNESS = 2.5  # Sharpness of the transition between the limit by CTAs and the limit by links
_OWN_CTAS_A_LINK = 4 / 3
_FEWEST_OWN_CTAS = 8  # NCCL's default is 24 CTAs for both the 18 links of an H200 and the 12 links of an A100
_PEAK_TFLOPS_AN_SM: Mapping[str, float] = {"7": 0.98, "8": 2.89, "9": 7.49, "10": 15.2, "12": 2.5}
_GEMM_EFFICIENCY = 0.77
"""Fraction of the dense 16-bit Tensor Core peak that a GEMM reaches. An H200 reached 764 of 989 TFLOP/s.

The peaks above are from NVIDIA's data sheets for V100, A100, H100, B200 and RTX 6000 Blackwell, divided by the number
of SMs. The keys are major compute capabilities.
"""

_COPY_GB_S: Mapping[str, float] = {"7": 800.0, "8": 1700.0, "9": 3900.0, "10": 7000.0, "12": 1500.0}
_KERNEL_SECONDS = 1.6e-6

_WAITS: Mapping[overlap.Partner, float] = {
    overlap.Partner.GEMM: 0.95,
    overlap.Partner.COPY: 1.0,
    overlap.Partner.CHAIN: 0.0,
}
"""Number of partner operations that end before the collective can start. About one if an operation fills all SMs."""

_SHARING: Mapping[overlap.Partner, float] = {
    overlap.Partner.GEMM: 1.08,
    overlap.Partner.COPY: 1.56,
    overlap.Partner.CHAIN: 1.0,
}
# Fraction of the collective's time by which a chain is delayed. Kernels of 1.6 µs lose more than the SMs that it uses.
_CHAIN_LOSES = 0.7
_SPREAD = 0.003
_STEPS = 100


def own_ctas(profile: Profile) -> int:
    """Return NCCL's default number of CTAs, derived from the number of NVLinks."""
    return max(_FEWEST_OWN_CTAS, round((profile.nvlink.links if profile.nvlink else 0) * _OWN_CTAS_A_LINK))


class OverlapModel:
    """Steps of overlapped computation and communication on a simulated machine. Equal arguments result in equal
    times.

    Raise the same errors as `CollectiveTimes`.
    """

    def __init__(
        self, machine: SimulatedMachine, faults: tuple[Fault, ...], seed: int, ranks_per_node: int | None = None
    ) -> None:
        self._times = CollectiveTimes(machine, faults, seed)
        self._machine, self._seed = machine, seed
        self._per_node = self._times.gpus if ranks_per_node is None else ranks_per_node

    @property
    def own_ctas(self) -> int:
        return own_ctas(self._machine.profile)

    def operation_seconds(self, partner: overlap.Partner, gemm_side: int) -> float:
        """Return the time of one partner operation in seconds, without a collective."""
        gpu = self._machine.profile.gpu
        generation = gpu.compute_capability.partition(".")[0]
        if partner is overlap.Partner.GEMM:
            peak = _PEAK_TFLOPS_AN_SM.get(generation, _PEAK_TFLOPS_AN_SM["8"]) * gpu.multiprocessors
            return 2 * gemm_side**3 / (peak * _GEMM_EFFICIENCY * 1e12)
        if partner is overlap.Partner.COPY:
            return 2 * overlap.COPY_BYTES / (_COPY_GB_S.get(generation, _COPY_GB_S["8"]) * BYTES_PER_GB)
        return overlap.CHAIN_KERNELS * _KERNEL_SECONDS

    def step(
        self,
        name: str,
        size_bytes: int,
        ctas: int | None,
        partner: overlap.Partner,
        *,
        gemm_side: int,
    ) -> overlap.StepSample:
        """Simulate a step with one collective and as many partner operations as a real run would use."""
        source = random.Random(f"{self._seed}/overlap/{name}/{size_bytes}/{ctas}/{partner}")
        own = max(self._times.seconds(name, size_bytes, row=0, ranks_per_node=self._per_node))
        operation = self.operation_seconds(partner, gemm_side)
        operations = overlap.partner_operations(own, operation)
        undisturbed = self._capped(name, size_bytes, own, ctas) * _noise(source)
        # Collective and partner share a source of noise, because the GPU's clock affects both.
        partner_alone = operations * operation * _noise(source)
        waiting = min(partner_alone, _WAITS[partner] * operation)
        first = undisturbed * _SHARING[partner] * _noise(source)
        taken = min(self.own_ctas, ctas or self.own_ctas) / self._machine.profile.gpu.multiprocessors
        if partner is overlap.Partner.CHAIN:
            taken = _CHAIN_LOSES
        # During the collective, the partner runs on the remaining SMs, and it may finish first.
        ends_first = waiting + (partner_alone - waiting) / (1 - taken) <= waiting + first
        extra = (partner_alone - waiting) * taken / (1 - taken) if ends_first else first * taken
        partner_together = partner_alone + extra * _noise(source)
        communication_together = waiting + first
        together = max(partner_together, communication_together)
        return overlap.StepSample(
            times=overlap.OverlapTimes(
                partner_alone=partner_alone,
                communication_alone=undisturbed,
                communication_first=first,
                partner_together=partner_together,
                communication_together=communication_together,
                together=together,
                step=together * (1 + abs(source.gauss(0.0, _SPREAD))),
                in_flight=min(communication_together, partner_together),
            ),
            partner_count=operations,
            steps=_STEPS,
            step_ci95_percent=100 * 1.96 * _SPREAD,  # all steps of a row have the same noise
        )

    def _capped(self, name: str, size_bytes: int, own_seconds: float, ctas: int | None) -> float:
        """Return the collective's time in seconds without a partner, with at most `ctas` CTAs."""
        if ctas is None or ctas >= self.own_ctas:
            return own_seconds
        ranks = self._per_node * self._machine.nodes
        return capped(own_seconds, size_bytes * collective_named(name).busbw_factor(ranks), ctas)


def capped(own_seconds: float, moved_bytes: float, ctas: int) -> float:
    """Return an operation's time in seconds with `ctas` channels, each with one CTA."""
    cta_seconds = moved_bytes / (ctas * _CTA_GB_S * BYTES_PER_GB)
    total: float = (own_seconds**_ROUNDNESS + cta_seconds**_ROUNDNESS) ** (1 / _ROUNDNESS)
    return total


def _noise(source: random.Random) -> float:
    return math.exp(source.gauss(0.0, _SPREAD))
