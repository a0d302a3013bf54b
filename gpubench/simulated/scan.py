"""A model of a scan on a simulated machine: a network fabric with faults, and rounds on it. Nothing is measured."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from math import prod
from statistics import median_low

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.collectives.expected import NIC_EFFICIENCY
from gpubench.collectives.registry import collective_named
from gpubench.errors import UsageError
from gpubench.model.profiles.fault import Fault, Subject
from gpubench.model.profiles.profile import Profile
from gpubench.model.results import scan
from gpubench.model.terms.units import BYTES_PER_GB
from gpubench.simulated.links import corrupted_pairs, is_nic_down, nic_gb_s, node_links
from gpubench.simulated.machine import SimulatedMachine, check_nodes, faults_by_node, wrong_value
from gpubench.simulated.times import CollectiveTimes

# Relative standard deviation of a bandwidth. benchmarks/scan_confusion.py tests the scan's thresholds with it
NOISE = 0.02
DIPS = 0.01  # Fraction of samples whose bandwidth a brief disturbance lowers by 5 to 40 %
_SMALLEST_DIP, _LARGEST_DIP = 0.05, 0.4

_COLLECTIVE_SPREAD = 0.003  # Relative standard deviation for a collective with large messages, as in simulated.times
# Time to create communicators of two ranks on each GPU, in the slowest first attempt on four H200s
SET_UP_SECONDS = 0.44
SECONDS_OF_COPYING = 0.5  # Time of copying per round, after warm-up
# Time to start a round on all nodes and collect the replies. Checked by benchmarks/scan_control.py.
CONTROL_SECONDS = 0.1
DEADLINE_SECONDS = 10.0  # A round with a node that hangs is aborted after this time


class SimulatedFabric(Struct, frozen=True):
    """A network fabric with faults. Each fault is the fraction that remains of the usual bandwidth.

    `cells` has faults by node and rail, `leaf_rails` by leaf and rail, and `uplinks` those of a leaf's uplinks. `dies`
    and `hangs` have the first affected round by node. `dips` has the probability of a brief slowdown by node.
    """

    usual_gb_s: float
    cells: Mapping[scan.NodeRail, float] = field(default_factory=dict)
    leaf_rails: Mapping[tuple[str, int], float] = field(default_factory=dict)
    uplinks: Mapping[tuple[str, int], float] = field(default_factory=dict)
    dies: Mapping[int, int] = field(default_factory=dict)
    hangs: Mapping[int, int] = field(default_factory=dict)
    dips: Mapping[int, float] = field(default_factory=dict)
    noise: float = NOISE
    usual_dips: float = DIPS


class SimulatedRounds:
    """Simulate rounds with the fabric's model. Equal seeds result in equal bandwidths."""

    def __init__(self, fabric: scan.ScanFabric, model: SimulatedFabric, seed: int) -> None:
        self._fabric, self._model, self._seed = fabric, model, seed

    def measure(self, planned: scan.PlannedRound) -> scan.RoundOutcome:
        """Simulate all pairs of a round. A node that dies is gone. A node that hangs makes the round last until the
        deadline.
        """
        model, source = self._model, random.Random(f"{self._seed}/round{planned.number}")
        taking_part = {node for pair in planned.pairs for node in pair}
        gone = {
            node: "its supervisor stopped answering"
            for node in taking_part
            if planned.number >= model.dies.get(node, planned.number + 1)
        }
        samples: list[scan.PairSample] = []
        hung = False
        for first, second in planned.pairs:
            dead = next((node for node in (first, second) if node in gone), None)
            hangs = any(planned.number >= model.hangs.get(node, planned.number + 1) for node in (first, second))
            for rail in range(self._fabric.rails):
                if planned.retired and not planned.retired.isdisjoint(
                    (scan.NodeRail(first, rail), scan.NodeRail(second, rail))
                ):
                    continue
                if dead is not None:
                    samples.append(scan.PairSample(first, second, rail, 0.0, "the node is gone", dead))
                elif hangs:
                    hung = True
                    samples.append(scan.PairSample(first, second, rail, 0.0, "not done within the deadline"))
                else:
                    samples.append(scan.PairSample(first, second, rail, self._sample_gb_s(source, first, second, rail)))
        seconds = SET_UP_SECONDS + SECONDS_OF_COPYING + CONTROL_SECONDS + (DEADLINE_SECONDS if hung or gone else 0.0)
        return scan.RoundOutcome(planned.number, planned.phase, tuple(samples), seconds, gone)

    def collective(self, nodes: Sequence[int]) -> tuple[float | None, str]:
        """Return the bandwidth in GB/s of rings through these nodes, summed over rails and limited by the slowest
        link.

        Return None with the reason if a node is dead or hangs.
        """
        model = self._model
        if {*model.dies, *model.hangs}.intersection(nodes):
            return None, "not done within the deadline"
        share = 1.0
        if model.cells or model.leaf_rails or model.uplinks:
            share = min(
                self._share(node, rail) * model.uplinks.get((self._leaf(node), rail), 1.0)
                for node in nodes
                for rail in range(self._fabric.rails)
            )
        noise = 1 + _COLLECTIVE_SPREAD * random.Random(f"{self._seed}/collective{len(nodes)}").gauss(0.0, 1.0)
        return self._fabric.rails * model.usual_gb_s * share * noise, ""

    def _sample_gb_s(self, source: random.Random, first: int, second: int, rail: int) -> float:
        model = self._model
        share = min(self._share(first, rail), self._share(second, rail))
        if model.uplinks and not self._fabric.inside(first, second):
            share = min(share, *(model.uplinks.get((self._leaf(node), rail), 1.0) for node in (first, second)))
        gb_s = model.usual_gb_s * share * (1 + model.noise * source.gauss(0.0, 1.0))
        dips = max((model.dips.get(node, 0.0) for node in (first, second)), default=0.0) if model.dips else 0.0
        if source.random() < max(dips, model.usual_dips):
            gb_s *= 1 - source.uniform(_SMALLEST_DIP, _LARGEST_DIP)
        return max(gb_s, 0.0)

    def _share(self, node: int, rail: int) -> float:
        share = self._model.cells.get(scan.NodeRail(node, rail), 1.0) if self._model.cells else 1.0
        if self._model.leaf_rails:
            share *= self._model.leaf_rails.get((self._leaf(node), rail), 1.0)
        return share

    def _leaf(self, node: int) -> str:
        return self._fabric.leaves[node] or ""


NODES_PER_LEAF = 32  # Nodes per leaf switch and rail in NVIDIA's DGX SuperPOD H100 reference architecture
_LOCAL_SPREAD = 0.005  # Relative standard deviation between nodes for copies inside a node


def simulated_scan_fabric(
    machine: SimulatedMachine, leaves: Sequence[str] | None, faults: Sequence[Fault] = ()
) -> scan.ScanFabric:
    """Return the fabric of a machine with one rail per GPU and host names from `node0` on.

    `leaves` has the leaf switch of each node, by default with 32 nodes per leaf. Raise UsageError if nodes have no
    GPUs, or no NICs with a known rate.
    """
    profile = machine.profile
    gpus, nics = profile.match.visible, len(profile.nic)
    if not gpus or not nics or nic_gb_s(profile.nic[0], ()) is None:
        raise UsageError(
            f"--simulate {machine}: its nodes have {gpus} GPUs and no NIC with a known rate",
            expected="nodes with GPUs, and with NICs that connect them",
            next_step="--simulate 'hgx-h100-8*64'",
        )
    hosts = host_names(machine)
    usual = tuple(f"leaf{node // NODES_PER_LEAF}" for node in range(machine.nodes))
    named = tuple(f"nic{_nic_index(profile, rail)}" for rail in range(gpus))
    nic_faults = list(faults_by_node(fault for fault in faults if fault.subject is Subject.NIC).values())
    nic_faults += [[]] * (machine.nodes - len(nic_faults))
    typical = (median_low(_nic_rate(profile, own, rail) for own in nic_faults) for rail in range(gpus))
    rates = tuple(gb_s and min(gb_s, profile.gpu.host_gb_s) for gb_s in typical)
    return scan.ScanFabric(hosts, gpus, usual if leaves is None else tuple(leaves), named, rates)


def _nic_rate(profile: Profile, faults: Sequence[Fault], rail: int) -> float:
    """Return a rail's NIC bandwidth in GB/s after these faults. 0 if the NIC is down."""
    number = _nic_index(profile, rail)
    own = [fault for fault in faults if fault.subject is Subject.NIC and fault.index == number]
    return 0.0 if is_nic_down(own) else nic_gb_s(profile.nic[number], own) or 0.0


def simulated_model(machine: SimulatedMachine, faults: Sequence[Fault], fabric: scan.ScanFabric) -> SimulatedFabric:
    """Return the fabric with the effect of these faults. Raise UsageError if the machine does not have the faulty
    device.
    """
    check_nodes(machine, faults)
    names = list(dict.fromkeys(leaf for leaf in fabric.leaves if leaf is not None))
    cells = {
        scan.NodeRail(node, rail): share
        for node, own in sorted(faults_by_node(_node_faults(faults)).items())
        for rail, share in enumerate(_rail_shares(machine.profile, own))
        if share < 1
    }
    leaf_rails: dict[tuple[str, int], float] = {}
    uplinks: dict[tuple[str, int], float] = {}
    for fault in (fault for fault in faults if fault.subject in _LEAF_SUBJECTS):
        leaf, rails = _leaf(fault, names), _rails(fault, fabric)
        for key, shares in (("bandwidth", leaf_rails), ("uplink", uplinks)):
            value = fault.get(key)
            shares |= {(leaf, rail): float(value) for rail in rails if value is not None}
    usual = nic_gb_s(machine.profile.nic[0], ()) or 0.0
    return SimulatedFabric(
        usual * NIC_EFFICIENCY * scan.BOTH_WAYS,
        cells,
        leaf_rails,
        uplinks,
        dies=dict(_faulty_nodes(faults, "dies")),
        hangs=dict(_faulty_nodes(faults, "hangs")),
        dips={fault.node_number: float(value) for fault in faults if (value := fault.get("dips")) is not None},
    )


def simulated_local_figures(
    machine: SimulatedMachine, faults: Sequence[Fault], nodes: Sequence[int], seed: int
) -> Iterator[scan.LocalFigure]:
    """Yield the results of phase 0: copies between GPUs and host memory, copies between GPUs, and an all-reduce per
    node.
    """
    usual = list(_local_figures(machine.profile, ()))
    faulty = {
        node: list(_local_figures(machine.profile, own)) for node, own in faults_by_node(_node_faults(faults)).items()
    }
    source = random.Random(f"{seed}/local")
    for node in nodes:
        for figure in faulty.get(node, usual):
            yield figure._replace(node=node, gb_s=figure.gb_s * (1 + _LOCAL_SPREAD * source.gauss(0.0, 1.0)))


def _local_figures(profile: Profile, faults: Sequence[Fault]) -> Iterator[scan.LocalFigure]:
    links = node_links(profile, faults)
    gpus = links.gpus
    for gpu in gpus:
        for quantity in (scan.LocalQuantity.TO_HOST, scan.LocalQuantity.FROM_HOST):
            yield scan.LocalFigure(0, gpu.index, quantity, profile.gpu.host_gb_s * gpu.host_share)
    copies, staged = profile.find("p2p.write_gb_s"), profile.find("p2p.staged_gb_s")
    if not copies:
        return
    staged_gb_s = staged[0].value if staged else profile.gpu.host_gb_s
    corrupted = corrupted_pairs(faults)
    for one, other in combinations(range(len(gpus)), 2):
        gb_s = copies[0].value * links.share(one, other)
        first, second = gpus[one].index, gpus[other].index
        gb_s = min(gb_s, staged_gb_s) if second in gpus[one].staged_peers else gb_s
        wrong = scan.WRONG_DATA_ARRIVED if frozenset((first, second)) in corrupted else ""
        yield scan.LocalFigure(
            0, first, scan.LocalQuantity.PAIR, 0.0 if wrong else scan.BOTH_WAYS * gb_s, second, wrong
        )
    with suppress(UsageError):
        times = CollectiveTimes(SimulatedMachine(profile), [replace(fault, node=0) for fault in faults], noise=0.0)
        seconds = max(times.seconds("allreduce", scan.EXCHANGED_BYTES, row=0))
        busbw = scan.EXCHANGED_BYTES * collective_named("allreduce").busbw_factor(len(gpus)) / seconds / BYTES_PER_GB
        yield scan.LocalFigure(0, 0, scan.LocalQuantity.ALL_REDUCE, busbw)


_LEAF_SUBJECTS = (Subject.LEAF, Subject.RAIL)


def _node_faults(faults: Iterable[Fault]) -> Iterator[Fault]:
    return (fault for fault in faults if fault.subject not in _LEAF_SUBJECTS)


def _rail_shares(profile: Profile, faults: Sequence[Fault]) -> Iterator[float]:
    """Yield the fraction of bandwidth that remains for each rail of a node, after faults of the NIC, GPU link and
    node.
    """
    node_share = 1.0
    for fault in faults:
        if fault.subject is Subject.NODE:
            node_share *= 0.0 if fault.get("driver_missing") else float(fault.get("bandwidth") or 1)
    gpus = {gpu.index: gpu for gpu in node_links(profile, faults).gpus}
    for rail in range(profile.match.visible):
        nic_share = _nic_share(profile, faults, rail)
        nic_gb_s_reached = _nic_rate(profile, (), rail) * NIC_EFFICIENCY
        gpu_gb_s = profile.gpu.host_gb_s * gpus[rail].host_share if rail in gpus else 0.0
        gpu_share = min(1.0, gpu_gb_s / nic_gb_s_reached) if nic_gb_s_reached else float(rail in gpus)
        yield node_share * nic_share * gpu_share


def _nic_share(profile: Profile, faults: Sequence[Fault], rail: int) -> float:
    number = _nic_index(profile, rail)
    own = [fault for fault in faults if fault.subject is Subject.NIC and fault.index == number]
    if is_nic_down(own):
        return 0.0
    usual = nic_gb_s(profile.nic[number], ())
    left = nic_gb_s(profile.nic[number], own)
    share = left / usual if left is not None and usual else 1.0
    return share * prod(float(fault.get("bandwidth") or 1) for fault in own)


def _nic_index(profile: Profile, rail: int) -> int:
    return rail * len(profile.nic) // profile.match.visible


def _leaf(fault: Fault, names: Sequence[str]) -> str:
    if fault.index is None or fault.index >= len(names):
        have = f"the nodes are connected to {len(names)} leaves, 0 to {len(names) - 1}" if names else "no leaf is known"
        raise wrong_value(fault, f"there is no leaf {fault.index}", have)
    return names[fault.index]


def _rails(fault: Fault, fabric: scan.ScanFabric) -> Sequence[int]:
    if fault.second is None:
        return range(fabric.rails)
    if fault.second >= fabric.rails:
        raise wrong_value(fault, f"there is no rail {fault.second}", f"a node has rails 0 to {fabric.rails - 1}")
    return [fault.second]


def _faulty_nodes(faults: Sequence[Fault], key: str) -> Iterator[tuple[int, int]]:
    for fault in faults:
        value = fault.get(key)
        if value is not None:
            yield fault.node_number, int(value.removeprefix("round"))


def host_names(machine: SimulatedMachine) -> tuple[str, ...]:
    return tuple(f"node{node}" for node in range(machine.nodes))
