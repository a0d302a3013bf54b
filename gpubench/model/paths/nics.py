"""Decide which RDMA ports of a node are for GPU traffic, and which are for storage or the front-end network."""

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct

from gpubench.model.facts.snapshot import NicFacts, NicKind
from gpubench.model.paths.topology import BITS_PER_BYTE, UNKNOWN_PATH, Topology, pcie_gb_s

VIRTUAL = "Virtual Function"
# Port states in which no data can flow (infiniband/core/sysfs.c in Linux)
NOT_ACTIVE = ("down", "init", "armed", "defer", "nop")

_MOST_GBIT_S = {
    "ConnectX-4 Lx": 50.0,
    "ConnectX-4": 100.0,
    "ConnectX-5": 100.0,
    "ConnectX-6 Lx": 50.0,
    "ConnectX-6": 200.0,
    "ConnectX-7": 400.0,
    "ConnectX-8": 800.0,
    "BlueField-2": 200.0,
    "BlueField-3": 400.0,
}
"""Highest port rate of any card of a model, in Gb/s (NVIDIA data sheets). Variants may be slower."""

_BELOW_CARD = 0.9  # A PCIe slot may be slightly slower than the card.


def card_gbit_s(nic: NicFacts) -> float | None:
    """Return the highest rate of a NIC's model in Gb/s, limited by its PCIe slot. None if the model is unknown."""
    most = next((rate for name, rate in _MOST_GBIT_S.items() if (nic.model or "").startswith(name)), None)
    slot = pcie_gb_s(nic.pcie.max_generation, nic.pcie.max_width)
    return None if most is None else most if slot is None else min(most, slot * BITS_PER_BYTE)


def is_below_card(nic: NicFacts) -> bool:
    """True if a port runs at a lower rate than cards of its model support."""
    most = card_gbit_s(nic)
    return most is not None and nic.rate_gbit_s is not None and nic.rate_gbit_s < _BELOW_CARD * most


class PortRoles(Struct, frozen=True):
    """The roles of RDMA ports.

    - `working`: ports that carry GPU traffic
    - `failing`: ports that should carry GPU traffic, but do not work
    - `others`: ports for other purposes
    - `below`: the ports below each GPU's PCIe switches, by GPU; None if unknown
    """

    working: tuple[NicFacts, ...]
    failing: tuple[NicFacts, ...]
    others: tuple[NicFacts, ...]
    below: Mapping[str, Sequence[NicFacts] | None]

    @property
    def gpu_ports(self) -> tuple[NicFacts, ...]:
        """Ports that carry GPU traffic, and ports that should."""
        return self.working + self.failing

    def ports_below(self, device: str) -> Sequence[NicFacts]:
        """Return the ports for GPU traffic below a GPU's PCIe switches."""
        return [nic for nic in self.below.get(device) or () if nic in self.gpu_ports]


def port_roles(node: Topology) -> PortRoles:
    """Assign a role to each RDMA port of a node.

    Candidates are the ports below the GPUs' PCIe switches, or all ports if no port is below such a switch. Candidates
    with the most frequent kind, model and rate of active ports are working.

    Another candidate is failing only if a GPU next to it has fewer working ports than its siblings. All remaining ports
    are for storage or the front-end network, or have no cable.
    """
    ports = [nic for nic in node.nics if nic.rdma]
    below = {gpu.device: _ports_below(node, gpu.device, ports) for gpu in node.gpus}
    near = [known for known in below.values() if known]
    candidates = [nic for nic in ports if any(nic in known for known in near)] if near else ports
    alike = Counter(map(_type, (nic for nic in candidates if nic.state in ("active", None))))
    usual = max(alike, key=lambda port: (alike[port], port[2] or 0.0), default=None)
    working = [nic for nic in candidates if nic.state not in NOT_ACTIVE and _is_alike(nic, usual)]
    if near:
        failing = _unlike_siblings(candidates, working, [known or () for known in below.values()])
    else:
        failing = _uneven(candidates, working, len(node.gpus))
    roles = working + failing
    return PortRoles(tuple(working), tuple(failing), tuple(nic for nic in ports if nic not in roles), below)


_Type = tuple[NicKind, str | None, float | None]


def _type(nic: NicFacts) -> _Type:
    return nic.kind, nic.model, nic.rate_gbit_s


def _is_alike(nic: NicFacts, usual: _Type | None) -> bool:
    return usual is not None and (nic.kind, nic.model) == usual[:2] and nic.rate_gbit_s in (usual[2], None)


def _ports_below(node: Topology, gpu: str, ports: Sequence[NicFacts]) -> list[NicFacts] | None:
    paths = [(nic, node.matrix[gpu][nic.device]) for nic in ports if VIRTUAL not in (nic.model or "")]
    found = [nic for nic, path in paths if path in ("PIX", "PXB")]
    return found if found or all(path != UNKNOWN_PATH for _, path in paths) else None


def _unlike_siblings(
    candidates: Sequence[NicFacts], working: Sequence[NicFacts], below: Sequence[Sequence[NicFacts]]
) -> list[NicFacts]:
    counts = [sum(nic in working for nic in known) for known in below]
    frequent = Counter(filter(None, counts))
    due = max(frequent, key=lambda count: (frequent[count], count), default=1)
    lacking = [known for known, count in zip(below, counts, strict=True) if count < due]
    return [nic for nic in candidates if nic not in working and any(nic in known for known in lacking)]


def _uneven(candidates: Sequence[NicFacts], working: Sequence[NicFacts], gpus: int) -> list[NicFacts]:
    """Return the failing ports of a node whose PCI tree does not show which port serves which GPU.

    One working port per GPU is enough. If the GPUs can be divided evenly among the working ports, a port that is down
    may simply have no cable if another port of its card is active. If no port works, only InfiniBand ports are certain
    to fail.
    """
    if not working:
        return [nic for nic in candidates if nic.kind is NicKind.INFINIBAND]
    if gpus > 1 and len(working) % gpus == 0:
        return []
    kinds, cards = {(nic.kind, nic.model) for nic in working}, {_card(nic) for nic in working}
    is_even = gpus <= 1 or gpus % len(working) == 0

    def may_be_spare(nic: NicFacts) -> bool:
        return nic.state in NOT_ACTIVE and (VIRTUAL in (nic.model or "") or (is_even and _card(nic) in cards))

    others = (nic for nic in candidates if nic not in working and (nic.kind, nic.model) in kinds)
    return [nic for nic in others if not may_be_spare(nic)]


def _card(nic: NicFacts) -> str:
    """Return an id for the card: the bus id without the function, or the device name without the port."""
    return nic.bus_id.rpartition(".")[0] if nic.bus_id else nic.name.partition(":")[0]
