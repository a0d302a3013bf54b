"""Reads NCCL's topology XML: dumps from NCCL_TOPO_DUMP_FILE, and files that vendors provide for NCCL_TOPO_FILE.

It uses Expat directly instead of a tree library, for two reasons. Expat reports the line of each element for error
messages. And a handler can reject a document type before any entity is declared, so no entity is expanded or fetched.
"""

import re
from collections.abc import Sequence
from itertools import chain, count
from xml.parsers import expat

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.model.facts.snapshot import (
    GpuFacts,
    HostFacts,
    NicFacts,
    NicKind,
    NumaNode,
    NvLink,
    NvlinkPeer,
    PciDevice,
    PcieLink,
    PciKind,
    PciPlace,
    PciSwitch,
    Snapshot,
    normalize_bus_id,
)
from gpubench.model.paths.topology import PCIE_GENERATION_OF_GT_S, XGMI_LINK
from gpubench.model.terms.units import format_mask, plural
from gpubench.model.terms.verdict import Origin
from gpubench.readers import limits

_EXPECTED = "NCCL's topology XML: <system> with <cpu>, <pci> and <gpu> in it"
_NEXT_STEP = "NCCL_TOPO_DUMP_FILE=topo.xml, set for any NCCL program, writes a complete file"
_DAMAGED = "the file was edited by hand, or is damaged"
_OTHER_ROOTS = {
    "graphs": "it is NCCL's graph dump (NCCL_GRAPH_DUMP_FILE): the rings and trees that NCCL chose, not a topology",
    "topology": "it is hwloc's topology (lstopo), not NCCL's",
    "nvidia_smi_log": "it is the output of nvidia-smi -q -x",
}
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]{1,16}|\d{1,18})", re.ASCII)


class Element(Struct):
    """An XML element with its line number and child elements."""

    file: str
    line: int
    tag: str
    attributes: dict[str, str]
    children: list["Element"] = field(default_factory=list)

    def named(self, *tags: str) -> list["Element"]:
        """Return the child elements with one of these tags."""
        return [child for child in self.children if child.tag in tags]

    def text(self, attribute: str) -> str | None:
        """Return the value of an attribute. None if it is missing or empty."""
        return self.attributes.get(attribute, "").strip() or None

    def integer(self, attribute: str) -> int | None:
        """Parse a decimal or hexadecimal attribute. None if it is missing or empty."""
        value = self.text(attribute)
        if value is None:
            return None
        if not _INTEGER.fullmatch(value):
            raise self.wrong(f"{attribute} is {value!r}", "a whole number")
        return int(value, 16 if "x" in value.lower() else 10)

    def wrong(self, seen: str, expected: str = _EXPECTED) -> UsageError:
        """Return an error that names the file, line and tag of this element."""
        return _refused(self.file, self.line, f"<{self.tag}>: {seen}", _DAMAGED, expected)


def _refused(file: str, line: int, seen: str, reason: str, expected: str = _EXPECTED) -> UsageError:
    return UsageError(f"{file}, line {line}: {seen}", expected=expected, reason=reason, next_step=_NEXT_STEP)


class Parser:
    """An Expat parser that rejects document types, entities, deep nesting, and too many elements."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._elements = 0
        self._open = [Element(name, 0, "", {})]
        self._expat = expat.ParserCreate("utf-8")
        self._expat.StartElementHandler = self._start
        self._expat.EndElementHandler = lambda _tag: self._open.pop()
        self._expat.StartDoctypeDeclHandler = self._refuse_doctype
        self._expat.EntityDeclHandler = self._refuse_doctype

    def root_of(self, text: str) -> Element:
        """Parse a text and return its root element.

        Raises UsageError with the line for broken XML, another program's XML, or entities.
        """
        document = self._open[0]
        try:
            self._expat.Parse(text.encode("utf-8", "surrogatepass"), True)  # noqa: FBT003
        except expat.ExpatError as error:
            what = expat.ErrorString(error.code)
            ends_early = what in (expat.errors.XML_ERROR_NO_ELEMENTS, expat.errors.XML_ERROR_UNCLOSED_TOKEN)
            reason = "the file was cut off" if ends_early else _DAMAGED
            what = f"the XML is broken at column {error.offset + 1}: {what}"
            raise _refused(self._name, error.lineno, what, reason) from None
        return document.children[0]

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        element = Element(self._name, self._expat.CurrentLineNumber, tag, attributes)
        if len(self._open) == 1 and tag != "system":
            reason = _OTHER_ROOTS.get(tag, "it is another program's XML")
            raise _refused(element.file, element.line, f"<{tag}> instead of <system>", reason)
        if len(self._open) > limits.MOST_DEPTH:
            raise element.wrong(f"elements are nested more than {limits.MOST_DEPTH} deep")
        self._elements += 1
        if self._elements > limits.MOST_ELEMENTS:
            raise element.wrong(f"the file has more than {limits.MOST_ELEMENTS} elements")
        self._open[-1].children.append(element)
        self._open.append(element)

    def _refuse_doctype(self, root: str, *_declaration: object) -> None:
        reason = _OTHER_ROOTS.get(root, "it is another program's XML, because NCCL writes no declarations")
        raise _refused(self._name, self._expat.CurrentLineNumber, "a document type (<!DOCTYPE>)", reason)


_MOST_NVLINKS = 36
_WIDEST = 32  # Maximum number of PCIe lanes. NVML has at most 36 NVLinks per GPU
_GPU_CLASS, _NIC_CLASS, _SWITCH_CLASS = "0x03", "0x02", "0x0604"
_PEERS = {"0x068001": NvlinkPeer.CPU, "0x0680": NvlinkPeer.SWITCH, "0x03": NvlinkPeer.GPU, "0x1200": NvlinkPeer.GPU}
"""NVLink peers by PCI class prefix, as in NCCL's topo.cc. 0x068001 is POWER's bridge to its CPU, and 0x1200 AMD's
MI300.
"""

_AMD, _AMAZON = "0x1002", "0x1d0f"
_VERSION_OF_SM = {60: "1.0", 70: "2.0", 75: "2.0", 80: "3.0", 86: "3.1", 90: "4.0", 100: "5.0", 103: "5.0", 120: "5.0"}
# By compute capability × 10. These two share NVLink version 3.x but have different rates
_RAW_GB_S_OF_SM = {80: 25.0, 86: 14.0625}
_RDMA_NAMES = ("mlx", "ib", "roce", "hfi", "bnxt_re", "irdma")
_SPEED = re.compile(r"(\d+(?:\.\d+)?) ?GT/s.*", re.ASCII)
_FAKE_BUS_ID = re.compile(r"f{4,8}:ff:ff\.?[0-9a-f]?")
_MASK = re.compile(r"[0-9a-fA-F]{1,8}(?:,[0-9a-fA-F]{1,8}){0,1023}")


def recognises(text: str) -> bool:
    """Return True if a text starts like XML."""
    return re.match(r"\ufeff?\s*<[?!A-Za-z]", text) is not None


def read(text: str, name: str) -> Snapshot:
    """Read the node in the text of the file `name`. Its `host` stays empty, because the XML does not contain it.

    Vendors' files have no `<gpu>` elements, so the kind of a device follows from its PCI class.

    NCCL writes the highest speed and width that both ends of a PCIe link support, as in sysfs. They become
    `max_generation` and `max_width`. For GPUs, newer NCCL versions write NVML's current values, which are lower while a
    GPU is idle. They become `generation` and `width`, which are too high if an older NCCL wrote the file.

    Raises UsageError with the line for broken XML, another program's XML, entities, or an invalid number.
    """
    return _Node(Parser(name).root_of(text)).snapshot()


class _Node:
    def __init__(self, root: Element) -> None:
        self._root = root
        self._gpus: list[tuple[int | None, GpuFacts]] = []
        self._nics: dict[str, NicFacts] = {}
        self._ports: set[tuple[object, ...]] = set()
        self._switches: list[PciSwitch] = []
        self._others: list[PciDevice] = []
        self._bridges: set[str] = set()
        self._masks: dict[int, int] = {}
        self._all_cpus = 0
        self._unnamed = count()
        self._xgmi = False

    def snapshot(self) -> Snapshot:
        cpus = self._root.named("cpu")
        for position, cpu in enumerate(cpus):
            self._cpu(position, cpu)
        if not (self._gpus or self._nics or self._switches or self._others):
            raise self._root.wrong("it has no <cpu> with a GPU or another <pci> in it")
        gpus = self._numbered()
        far_ends = [(link.peer, link.peer_bus_id) for gpu in gpus for link in gpu.nvlinks or ()]
        return Snapshot(
            host="",
            origin=Origin.RECORDED,
            source=self._source(cpus),
            machine=self._machine(cpus),
            gpus=gpus,
            nics=tuple(self._nics.values()),
            switches=tuple(self._switches),
            pci_devices=tuple(self._others),
            nvswitches=tuple(dict.fromkeys(end for peer, end in far_ends if peer is NvlinkPeer.SWITCH and end)),
        )

    def _source(self, cpus: Sequence[Element]) -> str:
        hosts = {cpu.text("host_hash") for cpu in cpus} - {None}
        notes = ["RCCL: nvlinks are AMD xGMI"] if self._xgmi else []
        notes += [f"{plural(len(self._others), 'device')} without a class: GPUs or NICs"] if self._others else []
        notes += [f"{len(hosts)} hosts in one file, shown as one"] if len(hosts) > 1 else []
        return f"NCCL topology {self._root.file}" + (f" ({'; '.join(notes)})" if notes else "")

    def _machine(self, cpus: Sequence[Element]) -> HostFacts:
        return HostFacts(
            cpu=next((model for model in map(_cpu_model, cpus) if model), None),
            cpus=self._all_cpus.bit_count() or None,
            numa_nodes=tuple(
                NumaNode(number=node, cpus=format_mask(self._masks[node])) for node in sorted(self._masks)
            ),
        )

    def _numbered(self) -> tuple[GpuFacts, ...]:
        """Return the GPUs in the order of NCCL's device numbers. If these are not unique, number the GPUs in file
        order.
        """
        numbers = [position if dev is None else dev for position, (dev, _) in enumerate(self._gpus)]
        if len(set(numbers)) < len(numbers):
            numbers = list(range(len(self._gpus)))
        facts = [replace(gpu, index=number) for number, (_, gpu) in zip(numbers, self._gpus, strict=True)]
        return tuple(sorted(facts, key=lambda gpu: gpu.index))

    def _cpu(self, position: int, cpu: Element) -> None:
        number, mask = cpu.integer("numaid"), _mask(cpu)
        self._all_cpus |= mask
        node = number if number is not None and number >= 0 else None
        bridge = f"cpu{position if node is None else node}"
        if bridge in self._bridges:
            # In a file that describes several hosts, the same NUMA node numbers occur again.
            bridge = f"{bridge}#{position}"
        self._bridges.add(bridge)
        if node is not None:
            self._masks[node] = self._masks.get(node, 0) | mask
        place = PciPlace(host_bridge=bridge, numa_node=node)
        for pci in cpu.named("pci"):
            self._pci(pci, place, format_mask(mask) or None)
        if nics := cpu.named("nic"):
            self._nic(cpu, nics, NicFacts(name="", kind=NicKind.ETHERNET, place=place))

    def _pci(self, pci: Element, place: PciPlace, affinity: str | None) -> None:
        address = pci.text("busid")
        if address is None:
            raise pci.wrong("it has no busid", "the PCI address of every device")
        address, kind = normalize_bus_id(address), (pci.text("class") or "").lower()
        link, why = _pcie(pci)
        most = PcieLink(max_generation=link.generation, max_width=link.width)
        gpus, nics, below = pci.named("gpu"), pci.named("nic"), pci.named("pci")
        if gpus or kind.startswith(_GPU_CLASS):
            gpu = GpuFacts(index=0, bus_id=address, pcie=link, place=place, cpu_affinity=affinity, unknown=why)
            self._gpu(pci, gpus, gpu)
        elif nics or kind.startswith(_NIC_CLASS):
            nic = NicFacts(name="", kind=NicKind.ETHERNET, bus_id=address, pcie=most, place=place, unknown=why)
            self._nic(pci, nics, nic)
        elif below or kind.startswith(_SWITCH_CLASS):
            self._switches.append(PciSwitch(bus_id=address, link=most, place=place))
            place = replace(place, switches=(*place.switches, address))
        else:
            # Vendors' files list some devices only with their position, because NCCL reads the rest from the machine.
            self._others.append(PciDevice(bus_id=address, kind=PciKind.UNKNOWN, link=most, place=place, unknown=why))
        self._check_size(pci)
        for inner in below:
            self._pci(inner, place, affinity)

    def _check_size(self, read: Element) -> None:
        for held, most, what in (
            (self._gpus, limits.MOST_GPUS, "GPUs"),
            (self._nics, limits.MOST_NICS, "NICs"),
            (self._switches, limits.MOST_SWITCHES, "PCIe switches"),
            (self._others, limits.MOST_PCI_DEVICES, "other devices"),
        ):
            if len(held) > most:
                raise read.wrong(f"the file has more than {most} {what}", f"one node, with at most {most} {what}")

    def _gpu(self, pci: Element, gpus: Sequence[Element], facts: GpuFacts) -> None:
        if not gpus:
            unknown = {**facts.unknown, "nvlinks": "the file has no <gpu> for it"}
            self._gpus.append((None, replace(facts, unknown=unknown)))
            return
        gpu = gpus[0]
        dev, sm, xgmi = gpu.integer("dev"), gpu.integer("sm"), bool(gpu.named("xgmi"))
        amd = xgmi or (pci.text("vendor") or "").lower() == _AMD or gpu.text("gcn") is not None
        self._xgmi = self._xgmi or xgmi
        links, why = _nvlinks(gpu, facts.bus_id, None if amd else sm)
        facts = replace(facts, nvlinks=links, unknown={**facts.unknown, **why})
        if amd:
            # RCCL writes the number of compute units into the attribute `sm`.
            facts = replace(facts, multiprocessors=sm)
        elif sm and sm > 0:
            facts = replace(facts, compute_capability=f"{sm // 10}.{sm % 10}")
        self._gpus.append((dev if dev is not None and dev >= 0 else None, facts))

    def _nic(self, parent: Element, nics: Sequence[Element], facts: NicFacts) -> None:
        nets = [net for nic in nics for net in nic.named("net")]
        for net in nets or [Element(parent.file, parent.line, "net", {})]:
            name, port, speed = net.text("name"), net.integer("port"), net.integer("speed")
            kind, unknown = _nic_kind(parent, name or ""), dict(facts.unknown)
            same = (name, port, facts.bus_id, facts.place)
            if name and same in self._ports:
                continue
            self._ports.add(same)
            others = (f"{name}#{i}" for i in count(len(self._nics)))
            names = chain((name, f"{name}:{port}"), others) if name else (f"nic{i}" for i in self._unnamed)
            name = next(free for free in names if free not in self._nics)
            rate = speed / 1000 if speed and speed > 0 else None
            if rate is None:
                unknown["rate_gbit_s"] = "the file has no speed for it"
            if kind is NicKind.INFINIBAND and not parent.text("class"):
                unknown["kind"] = "the file has no PCI class, which distinguishes InfiniBand from RoCE"
            gdr = net.integer("gdr")
            gpudirect = None if gdr is None else gdr > 0
            if gpudirect and kind is NicKind.ETHERNET:
                kind = NicKind.ROCE
            self._nics[name] = replace(
                facts, name=name, kind=kind, rate_gbit_s=rate, gpudirect=gpudirect, unknown=unknown
            )
            self._check_size(net)


def _nvlinks(gpu: Element, own: str | None, sm: int | None) -> tuple[tuple[NvLink, ...], dict[str, str]]:
    links: list[NvLink] = []
    why: dict[str, str] = {}
    for element in gpu.named("nvlink", "xgmi"):
        size = element.integer("count")
        if size is None or not 0 <= size <= _MOST_NVLINKS - len(links):
            expected = f"a number of links, at most {_MOST_NVLINKS} per GPU"
            raise element.wrong(f"count is {element.text('count')!r}", expected)
        target, tclass = normalize_bus_id(element.text("target") or ""), (element.text("tclass") or "").lower()
        peer = next((peer for beginning, peer in _PEERS.items() if tclass.startswith(beginning)), None)
        far_end = None if not target or _FAKE_BUS_ID.fullmatch(target) else target
        if target == own:
            peer, far_end = NvlinkPeer.GPU, None
            why["nvlinks"] = "the file has the GPU itself as the far end"
        version, raw_gb_s = _VERSION_OF_SM.get(sm or 0), _RAW_GB_S_OF_SM.get(sm or 0)
        version = XGMI_LINK if element.tag == "xgmi" else version
        link = NvLink(number=0, active=True, version=version, raw_gb_s=raw_gb_s, peer=peer, peer_bus_id=far_end)
        links += [replace(link, number=len(links) + i) for i in range(size)]
    return tuple(links), why


def _pcie(pci: Element) -> tuple[PcieLink, dict[str, str]]:
    """Read a PCIe link. Also return, under 'pcie', the reason if speed or width is unknown."""
    why = []
    speed, width = pci.text("link_speed"), pci.integer("link_width")
    match = _SPEED.fullmatch(speed or "")
    generation = PCIE_GENERATION_OF_GT_S.get(float(match[1])) if match else None
    if generation is None:
        why.append(f"the file has link_speed {speed!r}" if speed else "the file has no link_speed")
    if not width:
        says = "has link_width 0, which NCCL reads as 16" if "link_width" in pci.attributes else "has no link_width"
        why.append(f"the file {says}")
    elif not 0 < width <= _WIDEST:
        # If a device does not respond, the kernel reads all bits as ones.
        why.append(f"the file has link_width {width}")
        width = None
    return PcieLink(generation=generation, width=width or None), {"pcie": "; ".join(why)} if why else {}


def _nic_kind(parent: Element, name: str) -> NicKind:
    """Infer the kind of a NIC, which the XML does not contain, from its PCI class, vendor and name.

    PCI class 0x0207 is InfiniBand.
    """
    kind, device = (parent.text("class") or "").lower(), (parent.text("device") or "").lower()
    amazon = (parent.text("vendor") or "").lower() == _AMAZON
    # Amazon's Ethernet adapter ENA has the same vendor ID. The device IDs of EFA start at 0xefa0.
    if name.startswith(("rdmap", "efa")) or (amazon and (not device or device.startswith("0xefa"))):
        return NicKind.EFA
    if kind.startswith("0x0207"):
        return NicKind.INFINIBAND
    if not name.startswith(_RDMA_NAMES):
        return NicKind.ETHERNET
    return NicKind.ROCE if kind.startswith("0x0200") else NicKind.INFINIBAND


def _cpu_model(cpu: Element) -> str | None:
    parts = [cpu.text("vendor") or cpu.text("arch") or ""]
    parts += [f"{key} {cpu.text(f'{key}id')}" for key in ("family", "model") if cpu.text(f"{key}id")]
    return " ".join(parts).strip() or None


def _mask(cpu: Element) -> int:
    """Parse NCCL's CPU mask: comma-separated hexadecimal words of 32 bits, most significant first."""
    text = cpu.text("affinity")
    if text is None:
        return 0
    if not _MASK.fullmatch(text):
        raise cpu.wrong(f"affinity is {text[:80]!r}", "32-bit hexadecimal words, separated by commas")
    return int("".join(word.rjust(8, "0") for word in text.split(",")), 16)
