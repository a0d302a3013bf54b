"""Times of collectives on a simulated machine: a model, never a measurement.

Inside a node the times are those of the profile's expected values, straight lines between them; for another number of
GPUs scaled by the ratio of the busbw factors. A faulty link stretches what is above the latency, and since every rank
waits for the slowest, it stretches the whole collective; a pair that goes through host memory makes it as slow as
that. Across nodes the times are those of `collectives.between_nodes`, over NICs among which NCCL's channels divide the
bytes, with GPUDirect RDMA assumed.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpubench.collectives.between_nodes import Inside, expected_between
from gpubench.collectives.curve import Curve, curve
from gpubench.collectives.record import Collective
from gpubench.collectives.registry import SUMMARIES, collective_named
from gpubench.errors import CouldNotMeasureError, UsageError, invalid_choice
from gpubench.hardware.simulated.channels import rings_gb_s
from gpubench.hardware.simulated.links import NodeLinks, node_links
from gpubench.hardware.simulated.machine import SimulatedMachine, by_domains, check_nodes
from gpubench.model.facts.snapshot import NicKind
from gpubench.model.paths.busbw_limit import NodeNetwork
from gpubench.model.profiles.fault import Fault
from gpubench.model.terms.units import BYTES_PER_GB, compress_names

STAGED_SHARE = {"allreduce": 0.75}
STAGED_SHARE_OF_OTHERS = 0.66
STAGED_SECONDS = 14.0e-6
"""Of what one copy through host memory reaches, in busbw, and what comes on top: with NCCL_P2P_DISABLE=1 all-reduce
reaches 28.4 GB/s on 2 H200s, all-gather and reduce-scatter 25.2, where a copy reaches 38: a ring sends and receives at
once, and its kernels read host memory. 4 MiB take 168 µs: 148 at that rate, 6 healthy latency, 14 more. Kind: derived
(NCCL 2.28.9, PCIe 5 x16)."""

_SMALL_BYTES, _SMALL_SPREAD = 64 * 2**10, 0.015
_LARGE_BYTES, _LARGE_SPREAD = 2**30, 0.003
"""Spread of a row's time from run to run, seen on 4 H200: 1 to 2 % at small sizes, 0.3 % at 1 GiB."""

_RANK_SPREAD = 0.1
"""Ranks of one row differ by this part of the spread between rows: they wait for each other."""


class CollectiveTimes:
    """Times of collectives on a simulated machine; equal arguments give equal times.

    `noise` is the spread of a row's time, as a part of it; else that which real machines have at its size. With
    `whole_nodes` the GPUs that take no part are at work in other groups, and the NICs near them carry their share.
    Raises UsageError for a fault on something that the machine does not have.
    """

    def __init__(
        self,
        machine: SimulatedMachine,
        faults: Sequence[Fault] = (),
        seed: int = 0,
        *,
        noise: float | None = None,
        whole_nodes: bool = False,
    ) -> None:
        check_nodes(machine, faults)
        self._whole_nodes = whole_nodes
        self._given = machine
        machine, faults = by_domains(machine, faults)
        self._joined = self._given.nodes // machine.nodes
        self._machine = machine
        self._seed = seed
        self._noise = noise
        self._healthy = node_links(machine.profile, ())
        self._faulty = {
            number: node_links(machine.profile, [each for each in faults if each.node_number == number])
            for number in sorted({fault.node_number for fault in faults})
        }

    @property
    def gpus(self) -> int:
        """GPUs that every node has: the ranks a node where nothing else is said."""
        return min(len(links.gpus) for links in self._kinds_of_node()) // self._joined

    @property
    def has_network(self) -> bool:
        """False if nodes of this kind have no NIC whose rate is known, so that nothing goes between them."""
        return self._machine.nodes == 1 or any(links.nics_gb_s for links in self._kinds_of_node())

    def seconds(self, name: str, size_bytes: int, *, row: int, ranks_per_node: int | None = None) -> list[float]:
        """Seconds of one operation by rank, node after node.

        `size_bytes` is nccl-tests' size; `row` tells repeats apart, each with noise of its own.

        Raises:
            UsageError: an unknown collective, no expected value to start from, or ranks that the machine cannot have.
            CouldNotMeasureError: a node has no NIC that is up.
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
        """Seconds on the same machine without faults and noise. Raises as `seconds`."""
        healthy = CollectiveTimes(self._given, noise=0.0)
        return healthy.seconds(name, size_bytes, row=0, ranks_per_node=ranks_per_node)[0]

    def staged_pairs(self, ranks_per_node: int) -> list[tuple[int, int]]:
        """Ordered pairs of ranks, node after node, whose copies a fault makes go through host memory."""
        ranks_per_node *= self._joined
        return [
            (number * ranks_per_node + source, number * ranks_per_node + destination)
            for number, links in self._faulty.items()
            for source, gpu in enumerate(links.gpus[:ranks_per_node])
            for destination, other in enumerate(links.gpus[:ranks_per_node])
            if source != destination and other.index in gpu.staged_with
        ]

    def _kinds_of_node(self) -> list[NodeLinks]:
        healthy = [self._healthy] if len(self._faulty) < self._machine.nodes else []
        return [*self._faulty.values(), *healthy]

    def _model(self, name: str, ranks_per_node: int | None) -> "_Model":
        if name not in SUMMARIES:
            raise invalid_choice("collective", name, tuple(SUMMARIES))
        collective = collective_named(name)
        local = self.gpus if ranks_per_node is None else ranks_per_node
        if not 1 <= local <= self.gpus or local * self._given.nodes < 2:
            raise UsageError(
                f"{local} ranks on each of {self._given.nodes} nodes of {self._given}",
                expected=f"1 to {self.gpus} ranks a node, and at least 2 in all",
                reason="one GPU alone has nobody to talk to",
            )
        with_nics = (self.gpus if self._whole_nodes else local) * self._joined
        return _Model(self._machine, collective, local * self._joined, self._faulty, self._kinds_of_node(), with_nics)


class _Model:
    """One collective on so many ranks a node."""

    def __init__(
        self,
        machine: SimulatedMachine,
        collective: Collective,
        local: int,
        faulty: Mapping[int, NodeLinks],
        kinds: Sequence[NodeLinks],
        with_nics: int,
    ) -> None:
        self.ranks = local * machine.nodes
        self._with_nics = with_nics
        self._profile = machine.profile
        self._nodes = machine.nodes
        self._collective = collective
        self._local = local
        self._faulty = faulty
        self._kinds = kinds
        # One rank of a node has nobody to talk to there: all its time is the network's.
        alone = Curve(((1, 0.0),), machine.profile.link_gb_s)
        self._curve = alone if local == 1 else curve(machine.profile, collective, local, self.ranks)
        self._factor = collective.busbw_factor(self.ranks)
        self._inside_node = Inside.of(machine.profile, collective, local) if machine.nodes > 1 else Inside()
        staged = machine.profile.find("p2p.staged_gb_s")
        copied_gb_s = staged[0].value if staged else machine.profile.gpu.host_gb_s
        self._staged_gb_s = copied_gb_s * STAGED_SHARE.get(collective.name, STAGED_SHARE_OF_OTHERS)

    def seconds(self, size_bytes: int) -> float:
        """The slower of the links inside the slowest node and of what joins all of them."""
        slowest = max(self._inside(links, size_bytes) for links in self._kinds)
        across = self._across(self._kinds, size_bytes)
        return max(self._curve.latency + max(slowest, across), self.least_seconds(size_bytes))

    def least_seconds(self, size_bytes: int) -> float:
        """Seconds that a GPU's links need for the bytes of a node's own ranks, at the slowest GPU's share."""
        if self._local == 1:
            return 0.0
        share = min(links.slowest(self._local)[1] for links in self._kinds)
        factor = self._collective.busbw_factor(self._local)
        return size_bytes * factor / (self._curve.limit_gb_s * share * BYTES_PER_GB)

    def slowest_rank(self, size_bytes: int) -> int | None:
        """The rank that all others wait for: on the GPU at fault, or the first of the node whose NICs are."""
        links = node_links(self._profile, ())
        if not links.nics_gb_s:
            # Only faults give rates: then the fastest NICs of them are the healthy ones.
            links = replace(links, nics_gb_s=max((each.nics_gb_s for each in self._kinds), key=sum))
        healthy = self._above_latency(links, size_bytes)
        times = {number: self._above_latency(links, size_bytes) for number, links in self._faulty.items()}
        worst = max(times, key=times.__getitem__, default=None)
        if worst is None or times[worst] <= healthy:
            return None
        links = self._faulty[worst]
        staged = links.staged(self._local)
        return worst * self._local + (links.slowest(self._local)[0] if staged is None else staged)

    def _above_latency(self, links: NodeLinks, size_bytes: int) -> float:
        return max(self._inside(links, size_bytes), self._across([links], size_bytes))

    def _inside(self, links: NodeLinks, size_bytes: int) -> float:
        if self._local == 1:
            return 0.0
        healthy = self._curve.at(size_bytes) - self._curve.latency
        share = links.slowest(self._local)[1]
        # The smallest size that a profile knows may be large: then its time is not latency alone.
        least = size_bytes * self._factor / (self._curve.limit_gb_s * BYTES_PER_GB)
        stretched = max(healthy / share, healthy + least * (1 / share - 1))
        if links.staged(self._local) is None:
            return stretched
        staged = STAGED_SECONDS + size_bytes * self._factor / (self._staged_gb_s * BYTES_PER_GB)
        return max(stretched, staged)

    def _across(self, kinds: Sequence[NodeLinks], size_bytes: int) -> float:
        """Seconds above the latency inside a node, where nodes have these links."""
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
        share = min(links.slowest(self._local)[1] for links in kinds)
        inside = replace(self._inside_node, share=share)
        return expected_between(self._collective, size_bytes, network, inside).seconds - self._curve.latency


def _spread(size_bytes: int) -> float:
    """Standard deviation of the logarithm of a row's time, falling with the logarithm of the size."""
    position = math.log(max(size_bytes, 1) / _SMALL_BYTES) / math.log(_LARGE_BYTES / _SMALL_BYTES)
    return _SMALL_SPREAD * math.exp(min(1.0, max(0.0, position)) * math.log(_LARGE_SPREAD / _SMALL_SPREAD))
