"""Bandwidth of a simulated node's links, faults included: shares of GPUs, host-staged GPUs, rates of NICs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gpubench.hardware.simulated.faults import wrong_value
from gpubench.model.facts.snapshot import NicKind
from gpubench.model.paths.links import pcie_gb_s
from gpubench.model.profiles.fault import Fault, Subject
from gpubench.model.profiles.profile import NicKindOfMachine, Profile

_BITS_PER_BYTE = 8
STAGING = ("p2p", "cuda_peer", "mig", "fabric", "staged")
"""Keys of faults that make copies go through host memory."""


@dataclass(frozen=True, slots=True)
class GpuLinks:
    """One GPU that is there: the share of its links' bandwidth that is left, and whether its copies are host-staged.

    `host_share` is what is left between it and host memory.
    """

    index: int
    share: float = 1.0
    host_share: float = 1.0
    staged_with: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class NodeLinks:
    """The GPUs that are there, and GB/s of each NIC that is up: of RDMA NICs, or of the others where there is none."""

    gpus: tuple[GpuLinks, ...]
    nics_gb_s: tuple[float, ...]

    def slowest(self, ranks: int) -> tuple[int, float]:
        """The one of the first `ranks` GPUs with the smallest share, and that share."""
        position = min(range(ranks), key=lambda each: self.gpus[each].share)
        return position, self.gpus[position].share

    def staged(self, ranks: int) -> int | None:
        """The first of the first `ranks` GPUs that reaches another through host memory; None where none does."""
        taking_part = {gpu.index for gpu in self.gpus[:ranks]}
        return next((n for n, gpu in enumerate(self.gpus[:ranks]) if gpu.staged_with & taking_part), None)


def node_links(profile: Profile, faults: Sequence[Fault]) -> NodeLinks:
    """The links of a node of that kind with these faults.

    A refusal of peer access (NVML's or CUDA's, and so MIG and a fabric that is not ready), staged=yes and a GPU without
    any NVLink left make copies host-staged: NCCL and MPI go through host memory then.
    Raises UsageError for a GPU or NIC that the node does not have.
    """
    on_gpus = [fault for fault in faults if fault.subject in (Subject.GPU, Subject.LINK)]
    on_nics = [fault for fault in faults if fault.subject is Subject.NIC]
    for fault in on_gpus:
        for index in (fault.index, fault.second):
            _check_index(fault, index, profile.match.visible, "GPU")
    for fault in on_nics:
        _check_index(fault, fault.index, len(profile.nic), "NIC")
    gone = {fault.index for fault in on_gpus if fault.get("missing") or fault.get("lost")}
    gpus = tuple(_gpu_links(profile, index, on_gpus) for index in range(profile.match.visible) if index not in gone)
    return NodeLinks(gpus, _nics_gb_s(profile, on_nics))


def _check_index(fault: Fault, index: int | None, count: int, word: str) -> None:
    if index is not None and index >= count:
        raise wrong_value(fault, f"there is no {word} {index}", f"an index below {count}")


def _gpu_links(profile: Profile, index: int, faults: Sequence[Fault]) -> GpuLinks:
    share, host_share, staged_with = 1.0, 1.0, set[int]()
    others = set(range(profile.match.visible)) - {index}
    for fault in faults:
        if index not in (fault.index, fault.second):
            continue
        ends = {fault.index, fault.second} - {index, None}
        partners = {end for end in ends if end is not None} if fault.subject is Subject.LINK else others
        remaining = _share(profile, fault)
        if any(fault.get(key) for key in STAGING) or remaining == 0:
            staged_with |= partners
        share *= remaining or 1.0
        host_share *= _pcie_share(profile, fault) if fault.subject is Subject.GPU else 1.0
    return GpuLinks(index, share, host_share, frozenset(staged_with))


def _share(profile: Profile, fault: Fault) -> float:
    """The share of the bandwidth of a GPU's links that one fault leaves; 0 where no NVLink is left."""
    share = float(fault.get("speed") or 1)
    active, nvlink = fault.get("nvlink"), profile.nvlink
    if active is not None and nvlink is not None:
        share *= min(1.0, int(active) / (nvlink.links if fault.subject is Subject.GPU else nvlink.pair_links))
    elif fault.subject is Subject.GPU and nvlink is None:
        share *= _pcie_share(profile, fault)
    return share


def _pcie_share(profile: Profile, fault: Fault) -> float:
    """The share of the bandwidth of a GPU's PCIe link that a fault leaves."""
    left = pcie_gb_s(
        int(fault.get("generation") or profile.gpu.pcie_generation), int(fault.get("width") or profile.gpu.pcie_width)
    )
    return min(1.0, (left or 0.0) / profile.gpu.pcie_gb_s) if profile.gpu.pcie_gb_s else 1.0


def _nics_gb_s(profile: Profile, faults: Sequence[Fault]) -> tuple[float, ...]:
    """Of those that are up; devices that share a physical port have equal parts of what it carries."""
    own = {number: [fault for fault in faults if fault.index == number] for number in range(len(profile.nic))}
    up = {
        number: nic
        for number, nic in enumerate(profile.nic)
        if not any(fault.get("missing") or fault.get("state") for fault in own[number])
    }
    sharing = Counter(nic.port for nic in up.values() if nic.port)
    rdma: list[float] = []
    ethernet: list[float] = []
    for number, nic in up.items():
        gb_s = nic_gb_s(nic, own[number], sharing[nic.port or ""] or 1)
        if gb_s is not None:
            (ethernet if nic.kind is NicKind.ETHERNET else rdma).append(gb_s)
    return tuple(rdma or ethernet)


def nic_gb_s(nic: NicKindOfMachine, faults: Sequence[Fault], sharing: int = 1) -> float | None:
    """Of its part of the port or its slot, whichever carries less; None where the machine does not tell the rate."""
    rate, generation, width = nic.rate_gbit_s, nic.pcie_generation, nic.pcie_width
    for fault in faults:
        given = fault.get("rate")
        rate = rate if given is None else float(given)
        generation = int(fault.get("generation") or generation or 0)
        width = int(fault.get("width") or width or 0)
    if rate is None:
        return None
    slot = pcie_gb_s(generation, width)
    port = rate / _BITS_PER_BYTE / sharing
    return min(port, slot) if slot else port
