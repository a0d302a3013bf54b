"""Models the times of collectives on a simulated machine, alone and during computation. Nothing is measured.

Inside a node they are the profile's expected times, stretched by faulty links and host-staged pairs. Across nodes they
follow `collectives.expected`, over channels with equal shares, as many as the node with the fewest has
(NVIDIA/nccl#438, src/graph/search.cc and src/init.cc of NCCL 2.28, without its steps of bandwidth). Kind: derived.

The effect of a cap on CTAs was fitted to one series on 4 H200s (NCCL 2.28.9, 2026-11-22): 256 MiB with NCCL's own 24
CTAs, 16, 8, 4 and 2 took 1.233, 1.471, 2.533, 4.404 and 8.275 ms. Waiting and sharing come from 2 H200s
(docs/overlap.md).
"""

import math
import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations

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
from gpubench.simulated.choices import leaves_nvls, slower_by_choice
from gpubench.simulated.links import Hop, NodeLinks, node_links, ring_hops
from gpubench.simulated.machine import SimulatedMachine, check_nodes, merge_domains
from gpubench.simulated.settings import NVLS, channel_cap, distinct_variables, nccl_links, pairs_without_peers

LEAST_STEP = 0.49  # Smallest share of a channel's bandwidth that the search tries
_FEWEST_GPUS = 2
_ROUNDING = 1 + 1e-9


def channels_of_node(nics_gb_s: Sequence[float]) -> tuple[int, ...]:
    """Return the NIC index of each channel that the search finds. Empty without NICs."""
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
    """Return the bandwidth in GB/s at which all channels together leave each node, from the GB/s of its NICs."""
    found = [(nics_gb_s, channels_of_node(nics_gb_s)) for nics_gb_s in nodes]
    count = min(len(channels) for _, channels in found)
    shares = ((nics_gb_s, Counter(channels[:count])) for nics_gb_s, channels in found)
    slowest = min((nics_gb_s[nic] / own for nics_gb_s, nics in shares for nic, own in nics.items()), default=0.0)
    return count * slowest


STAGED_SHARE = {"allreduce": 0.75}
STAGED_SHARE_OF_OTHERS = 0.66
STAGED_SECONDS = 14.0e-6
STAGED_NODE_GB_S = 180.0
"""Host memory bandwidth of a node, and the share and extra latency of host-staged collectives. With
NCCL_P2P_DISABLE=1 all-reduce reaches 28.4 GB/s on 2 H200s, and all-gather and reduce-scatter 25.2, while a copy
reaches 38: a ring sends and receives at once, and its kernels read host memory. 4 MiB take 168 µs: 148 at that
rate, 6 healthy latency, 14 more. All staged hops of a node share its host memory, which every byte crosses
twice: 4 H200s reach 25 GB/s and 8 reach 10, which is 200 and 160 GB/s of host memory. Kind: derived (NCCL
2.28.9, PCIe 5 x16, one socket).
"""

_SMALL_BYTES, _SMALL_SPREAD = 64 * 2**10, 0.015
_LARGE_BYTES, _LARGE_SPREAD = 2**30, 0.003  # Spread between runs on 4 H200: 1 to 2 % at small sizes, 0.3 % at 1 GiB
_RANK_SPREAD = 0.1  # Spread between ranks of one row, relative to the spread between rows: ranks wait for each other


class CollectiveTimes:
    """Times of collectives on a simulated machine. Equal arguments give equal times.

    `noise` is the relative spread of a row's time. With `whole_nodes`, NICs of idle GPUs carry their share. `root` is
    the rank that gathers or scatters. `shape` lists parts that a healthy machine lacks too. Raises UsageError for a
    fault on a missing part.
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
        faults = (*shape, *faults)
        self._root = root
        self._whole_nodes = whole_nodes
        self._given = machine
        variables = distinct_variables(faults)
        self._choice = {
            name: value for variable in variables for name, value in variable.items() if name in PER_COMMUNICATOR
        }
        self._nvls = all(variable.get(NVLS) != "0" and leaves_nvls(variable) for variable in variables)
        self._channels = min(filter(None, map(channel_cap, variables)), default=None)
        forbidden = any(pairs_without_peers(machine.profile, variable) for variable in variables)
        machine, faults = merge_domains(machine, faults, joined=not forbidden)
        self._joined = self._given.nodes // machine.nodes
        self._machine = machine
        self._seed = seed
        self._noise = noise
        self._healthy = node_links(machine.profile, [fault for fault in shape if fault.node_number == 0])
        self._faulty = _links_by_node(machine.profile, faults)
        self._corrupting: dict[int, list[frozenset[int]]] = {}
        for fault in faults:
            if fault.get("corrupts") and fault.index is not None and fault.second is not None:
                self._corrupting.setdefault(fault.node_number, []).append(frozenset((fault.index, fault.second)))

    @property
    def gpus(self) -> int:
        """GPUs that every node has, the default number of ranks per node."""
        return min(len(links.gpus) for links in self._kinds_of_node()) // self._joined

    @property
    def has_network(self) -> bool:
        """False if nodes of this kind have no NIC with a known rate, so that nothing crosses nodes."""
        return self._machine.nodes == 1 or any(links.nics_gb_s for links in self._kinds_of_node())

    def seconds(self, name: str, size_bytes: int, *, row: int, ranks_per_node: int | None = None) -> list[float]:
        """Return the seconds of one operation per rank. `row` distinguishes repeats. Raises UsageError,
        CouldNotMeasureError.
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
        """Return the seconds on the same machine without faults and noise. Raises like `seconds`."""
        healthy = CollectiveTimes(self._given, noise=0.0, shape=self._shape)
        return healthy.seconds(name, size_bytes, row=0, ranks_per_node=ranks_per_node)[0]

    def staged_pairs(self, ranks_per_node: int) -> list[tuple[int, int]]:
        """Return the ordered pairs of ranks, node by node, whose copies a fault makes host-staged."""
        ranks_per_node *= self._joined
        return [
            (number * ranks_per_node + source, number * ranks_per_node + destination)
            for number, links in self._faulty.items()
            for source, gpu in enumerate(links.gpus[:ranks_per_node])
            for destination, other in enumerate(links.gpus[:ranks_per_node])
            if source != destination and other.index in gpu.staged_with
        ]

    def corrupted(self, name: str, ranks_per_node: int) -> list[int]:
        """Return the ranks of a collective whose data a fault corrupts."""
        return self._model(name, ranks_per_node).corrupted(self._corrupting)

    def _kinds_of_node(self) -> list[NodeLinks]:
        healthy = [self._healthy] if len(self._faulty) < self._machine.nodes else []
        return list({id(links): links for links in [*self._faulty.values(), *healthy]}.values())

    def _model(self, name: str, ranks_per_node: int | None) -> "_Model":
        if name not in SUMMARIES:
            raise invalid_choice("collective", name, tuple(SUMMARIES))
        if not self.gpus:
            raise UsageError(
                f"{name} on {self._given}, which has no GPU",
                expected="a machine with GPUs",
                next_step="--simulate hgx-h100-8",
            )
        collective = collective_named(name)
        local = self.gpus if ranks_per_node is None else ranks_per_node
        if not 1 <= local <= self.gpus:
            raise UsageError(
                f"{plural(local, 'rank')} per node of {self._given}", expected=f"1 to {self.gpus} ranks per node"
            )
        if local * self._given.nodes < _FEWEST_GPUS:
            board, part, _ = str(self._given).partition("/")
            raise UsageError(
                f"{name} on one GPU of {self._given}",
                expected="at least 2 GPUs",
                reason="a collective moves data between GPUs",
                next_step=f"--simulate {board}/2" if part else f"--simulate '{board}*2'",
            )
        with_nics = (self.gpus if self._whole_nodes else local) * self._joined
        return _Model(
            self._machine,
            collective,
            local * self._joined,
            self._faulty,
            self._kinds_of_node(),
            with_nics,
            self._root,
            nvls=self._nvls,
            channels=None if collective.point_to_point else self._channels,
            choice=self._choice,
            healthy=self._healthy,
        )


def _links_by_node(profile: Profile, faults: Sequence[Fault]) -> dict[int, NodeLinks]:
    """Return the links of nodes with faults. Nodes with equal faults share one value."""
    by_node: dict[int, list[Fault]] = {}
    for fault in faults:
        by_node.setdefault(fault.node_number, []).append(fault)
    alike: dict[tuple[object, ...], NodeLinks] = {}
    found = {}
    for number, own in sorted(by_node.items()):
        key = tuple((each.subject, each.settings, each.index, each.second) for each in own)
        if key not in alike:
            alike[key] = nccl_links(profile, own)
        found[number] = alike[key]
    return found


class _Model:
    def __init__(
        self,
        machine: SimulatedMachine,
        collective: Collective,
        local: int,
        faulty: Mapping[int, NodeLinks],
        kinds: Sequence[NodeLinks],
        with_nics: int,
        root: int,
        *,
        nvls: bool,
        channels: int | None,
        choice: Mapping[str, str],
        healthy: NodeLinks,
    ) -> None:
        self._healthy = healthy
        self._choice = choice
        self._root = root
        self.ranks = local * machine.nodes
        self._channels = channels
        self._with_nics = with_nics
        self._profile = machine.profile
        self._nodes = machine.nodes
        self._collective = collective
        self._local = local
        self._faulty = faulty
        self._kinds = kinds
        # A single rank on a node has no local peer, so all its time is the network's.
        single = Curve(((1, 0.0),), machine.profile.link_gb_s)
        self._curve = single if local == 1 else curve(machine.profile, collective, local, self.ranks, nvls=nvls)
        self._factor = collective.busbw_factor(self.ranks)
        known = machine.profile.all_expected
        by_nvls = any(each.nvls and each.quantity.startswith(f"{collective.name}.") for each in known)
        self._in_switches = by_nvls and nvls and not (machine.profile.nvlink and machine.profile.nvlink.pairs)
        self._inside_node = Inside.of(machine.profile, collective, local) if machine.nodes > 1 else Inside()
        if not nvls:
            self._inside_node = replace(self._inside_node, nvls=None)
        staged = machine.profile.find("p2p.staged_gb_s")
        copied_gb_s = staged[0].value if staged else machine.profile.gpu.host_gb_s
        self._staged_gb_s = copied_gb_s * STAGED_SHARE.get(collective.name, STAGED_SHARE_OF_OTHERS)

    def seconds(self, size_bytes: int) -> float:
        """Return the seconds under the job's NCCL variables. Raises CouldNotMeasureError."""
        own = self._own_seconds(size_bytes)
        if self._choice:
            gb_s = _LARGE_BYTES * self._factor / self._own_seconds(_LARGE_BYTES) / BYTES_PER_GB
            own *= slower_by_choice(self._choice, self._collective, size_bytes, self.ranks, gb_s)
        return own if self._channels is None else capped(own, size_bytes * self._factor, self._channels)

    def _own_seconds(self, size_bytes: int) -> float:
        slowest = max(self._inside(links, size_bytes) for links in self._kinds)
        across = self._across(self._kinds, size_bytes)
        seconds = max(self._curve.latency + max(slowest, across), self.least_seconds(size_bytes))
        return seconds * self._longer_by_clocks(size_bytes, seconds)

    def _longer_by_clocks(self, size_bytes: int, seconds: float) -> float:
        """Return the factor by which lower clocks slow a GPU's CTAs. 1 if links are the limit."""
        share = min(gpu.clock_share for links in self._kinds for gpu in links.gpus[: self._local])
        reached = size_bytes * self._factor / seconds / BYTES_PER_GB / (own_ctas(self._profile) * _CTA_GB_S)
        longer: float = (1 + (share**-_ROUNDNESS - 1) * reached**_ROUNDNESS) ** (1 / _ROUNDNESS)
        return min(longer, 1 / share)

    def least_seconds(self, size_bytes: int) -> float:
        """Return the seconds that a GPU's links need for the bytes of a node's own ranks, at the slowest GPU's
        share.
        """
        if self._local == 1:
            return 0.0
        share = min(self._slowest(links)[1] for links in self._kinds)
        factor = self._collective.busbw_factor(self._local)
        return size_bytes * factor / (self._curve.limit_gb_s * share * BYTES_PER_GB)

    def slowest_rank(self, size_bytes: int) -> int | None:
        """Return the rank that all others wait for: the one on the faulty GPU, or the first on the node with faulty
        NICs.
        """
        links = self._healthy
        if not links.nics_gb_s:
            # If only faults set rates, the fastest NICs among them are the healthy ones.
            links = replace(links, nics_gb_s=max((kind.nics_gb_s for kind in self._kinds), key=sum))
        healthy = self._latency_overhead(links, size_bytes)
        times = {number: self._latency_overhead(links, size_bytes) for number, links in self._faulty.items()}
        worst = max(times, key=times.__getitem__, default=None)
        if worst is None or times[worst] <= healthy:
            gpus = [gpu for links in self._by_node() for gpu in links.gpus[: self._local]]
            slow = min(range(self.ranks), key=lambda rank: gpus[rank].clock_share)
            return slow if gpus[slow].clock_share < 1 else None
        links = self._faulty[worst]
        staged = links.staged(self._local)
        return worst * self._local + (self._slowest(links)[0] if staged is None else staged)

    def _by_node(self) -> list[NodeLinks]:
        healthy = node_links(self._profile, ())
        return [self._faulty.get(number, healthy) for number in range(self._nodes)]

    def corrupted(self, pairs: Mapping[int, Collection[frozenset[int]]]) -> list[int]:
        """Return the ranks with corrupted data, if the paths between these GPU pairs, by node, corrupt it."""
        found: set[int] = set()
        for number, links in enumerate(self._by_node()):
            for hop in self._hops(links) if number in pairs else ():
                if frozenset(links.gpus[end].index for end in hop) in pairs[number]:
                    found |= {number * self._local + end for end in hop}
        return sorted(found)

    def _hops(self, links: NodeLinks) -> list[Hop]:
        """Return the GPU pairs whose path the collective uses, none for a reduction in NVSwitches."""
        if self._in_switches:
            return []
        exchanges = self._collective.point_to_point and self._collective.name != "sendrecv"
        return self._exchanging() if exchanges else ring_hops(self._profile, links, self._local)

    def _slowest(self, links: NodeLinks) -> tuple[int, float]:
        """Return the GPU that the others wait for, and its remaining share of bandwidth.

        Collectives made of sends and receives serve one peer after another, so a slow path stretches only its part of
        the time.
        """
        in_turn = self._collective.point_to_point and self._collective.name != "sendrecv"
        return links.slowest(self._local, self._hops(links), 1 / (self.ranks - 1) if in_turn else 1.0)

    def _exchanging(self) -> list[Hop]:
        hops = combinations(range(self._local), 2)
        if not self._collective.rooted:
            return list(hops)
        # With several nodes, a root waits for its NICs.
        return [hop for hop in hops if self._root in hop] if self._nodes == 1 else []

    def _latency_overhead(self, links: NodeLinks, size_bytes: int) -> float:
        return max(self._inside(links, size_bytes), self._across([links], size_bytes))

    def _inside(self, links: NodeLinks, size_bytes: int) -> float:
        if self._local == 1:
            return 0.0
        healthy = self._curve.at(size_bytes) - self._curve.latency
        share = self._slowest(links)[1]
        # The smallest size in a profile may be large, and then its time is more than latency.
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
            cut_off = compress_names([f"node{number}" for number, links in self._faulty.items() if not links.nics_gb_s])
            raise CouldNotMeasureError(
                f"{cut_off or 'a simulated node'} has no NIC that is up and whose rate is known",
                expected="one, to reach the other nodes",
            )
        slowest = min(min(links.nics_gb_s) for links in kinds)
        most = self._with_nics * self._profile.gpu.host_gb_s
        alike = min(len(links.nics_gb_s) for links in kinds) * slowest
        node_gb_s = alike if self._collective.point_to_point else rings_gb_s(links.nics_gb_s for links in kinds)
        rdma = any(nic.kind is not NicKind.ETHERNET for nic in self._profile.nic)
        network = NodeNetwork(self._nodes, self.ranks, min(node_gb_s, most), min(slowest, most), rdma)
        share = min(self._slowest(links)[1] for links in kinds)
        inside = replace(self._inside_node, share=share)
        return expected_between(self._collective, size_bytes, network, inside).seconds - self._curve.latency


def _spread(size_bytes: int) -> float:
    """Return the standard deviation of the logarithm of a row's time, which falls with the logarithm of the size."""
    position = math.log(max(size_bytes, 1) / _SMALL_BYTES) / math.log(_LARGE_BYTES / _SMALL_BYTES)
    return _SMALL_SPREAD * math.exp(min(1.0, max(0.0, position)) * math.log(_LARGE_SPREAD / _SMALL_SPREAD))


_CTA_GB_S = 24.4  # busbw of one CTA, from 2 CTAs on 4 H200s
_ROUNDNESS = 2.5  # Sharpness of the transition from the CTAs' rate to the links' rate
_OWN_CTAS_A_LINK = 4 / 3
_FEWEST_OWN_CTAS = 8  # NCCL's own number of CTAs: 24 for the 18 links of an H200 and the 12 links of an A100
_PEAK_TFLOPS_AN_SM: Mapping[str, float] = {"7": 0.98, "8": 2.89, "9": 7.49, "10": 15.2, "12": 2.5}
_GEMM_EFFICIENCY = 0.77
"""Share of the dense 16-bit Tensor-Core peak (NVIDIA's data sheets of V100, A100, H100, B200 and RTX 6000
Blackwell, divided by their SMs, by compute capability). An H200 reached 764 of 989 TFLOP/s.
"""

_COPY_GB_S: Mapping[str, float] = {"7": 800.0, "8": 1700.0, "9": 3900.0, "10": 7000.0, "12": 1500.0}
_KERNEL_SECONDS = 1.6e-6

_WAITS: Mapping[overlap.Partner, float] = {
    overlap.Partner.GEMM: 0.95,
    overlap.Partner.COPY: 1.0,
    overlap.Partner.CHAIN: 0.0,
}
"""Partner operations that the collective waits for: one, if the operation fills all SMs."""

_SHARING: Mapping[overlap.Partner, float] = {
    overlap.Partner.GEMM: 1.08,
    overlap.Partner.COPY: 1.56,
    overlap.Partner.CHAIN: 1.0,
}
# Share of the time during a collective that a chain loses: kernels of 1.6 µs lose more than their SMs
_CHAIN_LOSES = 0.7
_SPREAD = 0.003
_STEPS = 100


def own_ctas(profile: Profile) -> int:
    """Return NCCL's own number of CTAs from the number of NVLinks."""
    return max(_FEWEST_OWN_CTAS, round((profile.nvlink.links if profile.nvlink else 0) * _OWN_CTAS_A_LINK))


class OverlapModel:
    """Overlapped steps on a simulated machine. Equal arguments give equal times. Raises like `CollectiveTimes`."""

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
        """Return the seconds of one operation of a partner alone."""
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
        """Simulate a step of one collective and as many operations as a real run would use."""
        source = random.Random(f"{self._seed}/overlap/{name}/{size_bytes}/{ctas}/{partner}")
        own = max(self._times.seconds(name, size_bytes, row=0, ranks_per_node=self._per_node))
        operation = self.operation_seconds(partner, gemm_side)
        operations = overlap.partner_operations(own, operation)
        undisturbed = self._capped(name, size_bytes, own, ctas) * _noise(source)
        # collective and partner share the noise, because the GPU's clock varies
        partner_alone = operations * operation * _noise(source)
        waiting = min(partner_alone, _WAITS[partner] * operation)
        first = undisturbed * _SHARING[partner] * _noise(source)
        taken = min(self.own_ctas, ctas or self.own_ctas) / self._machine.profile.gpu.multiprocessors
        if partner is overlap.Partner.CHAIN:
            taken = _CHAIN_LOSES
        # During the collective the partner has the other SMs, and it may finish first.
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
            step_ci95_percent=100 * 1.96 * _SPREAD,  # steps of a row share their noise
        )

    def _capped(self, name: str, size_bytes: int, own_seconds: float, ctas: int | None) -> float:
        """Return the seconds of the collective alone under a cap."""
        if ctas is None or ctas >= self.own_ctas:
            return own_seconds
        ranks = self._per_node * self._machine.nodes
        return capped(own_seconds, size_bytes * collective_named(name).busbw_factor(ranks), ctas)


def capped(own_seconds: float, moved_bytes: float, ctas: int) -> float:
    """Return the seconds of an operation over `ctas` channels of one CTA each."""
    by_ctas = moved_bytes / (ctas * _CTA_GB_S * BYTES_PER_GB)
    total: float = (own_seconds**_ROUNDNESS + by_ctas**_ROUNDNESS) ** (1 / _ROUNDNESS)
    return total


def _noise(source: random.Random) -> float:
    return math.exp(source.gauss(0.0, _SPREAD))
