"""Lines of nvidia-smi about GPUs outside its matrices: its table, -L, nvlink -s and nvlink -R."""

import re
from collections.abc import Sequence
from dataclasses import replace

from gpubench.model.facts.snapshot import GpuFacts, NvLink, NvlinkPeer, bus_id

_GPU_LINE = re.compile(r"\bGPU (\d{1,4}): (\S.{0,100}?) \(UUID: (GPU-[0-9a-fA-F-]+)\)", re.ASCII)
_LINK_LINE = re.compile(
    r"\bLink (\d{1,2}): (?:(?P<rate>\d{1,6}(?:\.\d{1,6})?) GB/s|(?P<down><inactive>)|"
    r"Remote Device (?P<peer>[0-9a-fA-F:.]+): )",
    re.ASCII,
)
_TABLE_ROW = re.compile(
    r"\|\s+(\d{1,4})\s+(\S.{0,100}?)\s+(?:On|Off|N/A)\s*\|\s+([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])\s",
    re.ASCII,
)
_HIDDEN_BUS_ID = re.compile(r"f{4,8}:ff:ff\.[0-9a-f]")


def gpus_in_lines(lines: Sequence[str]) -> dict[int, GpuFacts]:
    """The GPUs in lines of nvidia-smi's table, -L, nvlink -s and nvlink -R, by index."""
    gpus: dict[int, GpuFacts] = {}
    links: dict[int, dict[int, NvLink]] = {}
    current: int | None = None
    for line in lines:
        if found := _GPU_LINE.search(line):
            current = int(found[1])
            before = gpus.get(current) or GpuFacts(index=current)
            if before.uuid not in (None, found[3]):
                # Another boot, or another machine: links that were read before are not this GPU's.
                links.pop(current, None)
            gpus[current] = replace(before, name=found[2], uuid=found[3])
        elif current is not None and (found := _LINK_LINE.search(line)):
            held = links.setdefault(current, {})
            number = int(found[1])
            held[number] = _link(held.get(number) or NvLink(number=number), found)
        elif found := _TABLE_ROW.search(line):
            index = int(found[1])
            before = gpus.get(index) or GpuFacts(index=index)
            full_name = None if found[2].endswith("...") else found[2]
            gpus[index] = replace(before, bus_id=bus_id(found[3]), name=before.name or full_name)
    own = {gpu.bus_id for gpu in gpus.values()} - {None}
    for index, held in links.items():
        facing = (
            replace(held[i], peer=NvlinkPeer.GPU) if held[i].peer_bus_id in own else held[i] for i in sorted(held)
        )
        gpus[index] = replace(gpus[index], nvlinks=tuple(facing))
    return gpus


def _link(link: NvLink, found: "re.Match[str]") -> NvLink:
    if found["rate"]:
        return replace(link, active=True, raw_gb_s=float(found["rate"]))
    if found["down"]:
        return replace(link, active=False, raw_gb_s=None)
    peer = bus_id(found["peer"])
    return replace(link, peer_bus_id=None if _HIDDEN_BUS_ID.fullmatch(peer) else peer)
