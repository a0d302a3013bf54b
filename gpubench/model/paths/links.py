"""Bandwidth of links in one direction: of PCIe by generation and width, of NVLink by line rate and version.

GB/s is 1e9 bytes/s.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from gpubench.model.facts.snapshot import GpuFacts, NicFacts, NvLink, NvlinkPeer, PcieLink

PCIE_GB_S_PER_LANE = {
    1: 2.5 * 8 / 10 / 8,
    2: 5.0 * 8 / 10 / 8,
    3: 8.0 * 128 / 130 / 8,
    4: 16.0 * 128 / 130 / 8,
    5: 32.0 * 128 / 130 / 8,
    6: 64.0 * 242 / 256 / 8,
}
"""Transfer rate × encoding / 8 bits (PCI Express Base Specification: 8b/10b, 128b/130b, FLITs of 242 in 256 bytes).
Headers of packets are not subtracted: copies reach 82 to 90 % of this."""

PCIE_GENERATION_OF_GT_S = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}

NVLINK_GB_S = {"1.0": 20.0, "2.0": 25.0, "2.2": 25.0, "4.0": 25.0, "5.0": 50.0}
"""Usable per link and direction by NVLink version. 3.x is missing on purpose: 25 on A100 and 14.0625 on GA102, which
only the line rate tells apart."""

_USABLE_GB_S = (14.0625, 20.0, 25.0, 50.0)
_MOST_OVERHEAD = 0.07
"""Line rates are above the usable ones by up to 6.25 % (26.5625 for 25, 53.125 for 50; 25.78125 for 25 on V100)."""
_ROUNDING = 0.0005
"""The driver cuts off after whole MB/s: it says 14.062 for GA102's 14.0625."""


def pcie_gb_s(generation: int | None, width: int | None) -> float | None:
    """GB/s per direction of a PCIe link, None where either is unknown or zero (a virtual machine hides it)."""
    if generation not in PCIE_GB_S_PER_LANE or not width:
        return None
    return PCIE_GB_S_PER_LANE[generation] * width


def pcie_ceiling_gb_s(link: PcieLink) -> float | None:
    """GB/s per direction of a link as it is trained now; a part that it does not tell counts as its best."""
    return pcie_gb_s(link.generation or link.max_generation, link.width or link.max_width)


def loaded_link(device: GpuFacts | NicFacts) -> PcieLink:
    """A device's link as it is under load.

    An idle GPU lowers its generation and raises it again at the first transfer. Nothing else does: what a busy GPU or a
    NIC has lost stays lost, and so does a width.
    """
    link = device.pcie
    rises = isinstance(device, GpuFacts) and device.idle is not False
    return replace(link, generation=link.max_generation or link.generation) if rises else link


def pcie_text(link: PcieLink, *, idle: bool | None = None) -> str | None:
    """A link now, and at most where that differs: '4 x16', '1 x16 (idle; 5 x16)', '5 x8 of 5 x16', 'at most 5 x16'."""
    now = generation_and_width(link.generation, link.width)
    if now is None:
        most = generation_and_width(link.max_generation, link.max_width)
        return most and f"at most {most}"
    most = generation_and_width(link.max_generation or link.generation, link.max_width or link.width)
    if now == most:
        return now
    is_wide = link.width == (link.max_width or link.width)
    return f"{now} (idle; {most})" if is_wide and idle else f"{now} of {most}"


def generation_and_width(generation: int | None, width: int | None) -> str | None:
    """'5 x16'; None where either is unknown."""
    return None if generation is None or width is None else f"{generation} x{width}"


def active_links(gpu: GpuFacts) -> int | None:
    """The number of a GPU's active NVLinks; None where the state of any is unknown, which might be one more."""
    states = None if gpu.nvlinks is None else [link.active for link in gpu.nvlinks]
    return None if states is None or None in states else states.count(True)


def usual_active_links(gpus: Iterable[GpuFacts], model: str | None) -> int:
    """The most frequent count of active links among GPUs of a model; between equally frequent ones the larger."""
    tally = Counter(count for gpu in gpus if gpu.name == model and (count := active_links(gpu)) is not None)
    return max(tally, key=lambda count: (tally[count], count), default=0)


def leads_to_switches(gpus: Iterable[GpuFacts]) -> bool | None:
    """True where NVLinks of these GPUs lead to NVSwitches, False where to GPUs alone; None where nothing tells."""
    peers = {link.peer for gpu in gpus for link in gpu.nvlinks or ()}
    return True if NvlinkPeer.SWITCH in peers else False if NvlinkPeer.GPU in peers else None


def nvlink_gb_s(link: NvLink) -> float | None:
    """Usable GB/s per direction of one NVLink: by its line rate where the driver gives it, else by its version."""
    if link.raw_gb_s:
        fitting = [usable for usable in _USABLE_GB_S if -_ROUNDING < link.raw_gb_s / usable - 1 < _MOST_OVERHEAD]
        if fitting:
            return fitting[0]
    return NVLINK_GB_S.get(link.version or "")


_BITS = 8
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
"""The highest rate of any card of a model, in Gb/s (NVIDIA's data sheets); variants of a model may have less."""

_BELOW_CARD = 0.9
"""PCIe carries a little less than the card's rate."""


def card_gbit_s(nic: NicFacts) -> float | None:
    """The highest rate of any card of a NIC's model, in Gb/s, as far as its slot carries it; None for other models."""
    most = next((rate for name, rate in _MOST_GBIT_S.items() if (nic.model or "").startswith(name)), None)
    slot = pcie_gb_s(nic.pcie.max_generation, nic.pcie.max_width)
    return None if most is None else most if slot is None else min(most, slot * _BITS)


def is_below_card(nic: NicFacts) -> bool:
    """True if a port was negotiated to a lower rate than cards of its model can."""
    most = card_gbit_s(nic)
    return most is not None and nic.rate_gbit_s is not None and nic.rate_gbit_s < _BELOW_CARD * most
