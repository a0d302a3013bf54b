"""PCIe links between GPUs, NICs and CPUs: trained low, counting errors, or shared by several pairs at once."""

from collections.abc import Iterator, Sequence

from gpubench.conditions.definition.circumstances import Circumstances
from gpubench.conditions.definition.condition import (
    Condition,
    Family,
    Found,
    Look,
    Unread,
    in_each_node,
    joined,
)
from gpubench.conditions.definition.sightings import of_device, of_node, of_pairs, sureness
from gpubench.model.facts.error_counts import FEW_MEANWHILE, pcie_errors
from gpubench.model.facts.pci_capabilities import PciKind
from gpubench.model.facts.snapshot import GpuFacts, NicKind, PcieLink
from gpubench.model.paths.evidence import Confidence
from gpubench.model.paths.selection import Pair
from gpubench.model.paths.topology import Device, Topology
from gpubench.model.terms.verdict import Verdict

_BELOW_ONE_SWITCH = ("PIX", "PXB")

_COLLAPSED = 2.0
"""So many times as fast as writes, reads by the same pairs show that it is not the links. Where links are all that
counts, the two differ by a third at most (H200, over NVLink)."""

_SEVERAL = 2


def _links(node: Topology) -> Iterator[tuple[Device, PcieLink]]:
    """Those of GPUs, and of NICs that carry their data: onboard Ethernet hangs on fewer lanes than its chip has."""
    yield from ((gpu, gpu.pcie) for gpu in node.gpus)
    yield from ((nic, nic.pcie) for nic in node.nics if nic.kind is not NicKind.ETHERNET)


@in_each_node
def _width(run: Circumstances) -> Found:
    for number, node in run.nodes.items():
        for device, link in _links(node):
            if _is_narrow(link):
                yield of_device(run, number, device, f"PCIe trained to {link.width} of {link.max_width} lanes")


@in_each_node
def _generation(run: Circumstances) -> Found:
    """Of busy GPUs and of NICs: an idle GPU lowers its generation to save power."""
    for number, node in run.nodes.items():
        for device, link in _links(node):
            if _is_slow(link) and (not isinstance(device, GpuFacts) or device.idle is False):
                seen = f"PCIe trained to generation {link.generation} of {link.max_generation}"
                yield of_device(run, number, device, seen, Confidence.LIKELY)


def _is_narrow(link: PcieLink) -> bool:
    return bool(link.width and link.max_width and link.width < link.max_width)


def _is_slow(link: PcieLink) -> bool:
    return bool(link.generation and link.max_generation and link.generation < link.max_generation)


@in_each_node
def _uplink(run: Circumstances) -> Found:
    for number, node in run.nodes.items():
        links = {switch.bus_id: switch.link for switch in node.snapshot.switches}
        ports = (each for each in node.snapshot.pci_devices if each.kind is PciKind.UPSTREAM_PORT)
        links |= {each.bus_id: each.link for each in ports}
        above = {switch for gpu in node.gpus for switch in gpu.place.switches}
        known = {each for each, link in links.items() if link.width and link.max_width}
        unread = sorted((above | links.keys()) - known)
        if unread:
            yield Unread(run.on(number), f"the uplink of switch {joined(unread)} was not read")
        for bus_id, link in links.items():
            narrow = _is_narrow(link)
            if narrow or _is_slow(link):
                now, most = ((link.generation, link.width), (link.max_generation, link.max_width))
                yield of_node(
                    run,
                    number,
                    "PCIe trained to {} x{} of {} x{}".format(*("?" if each is None else each for each in now + most)),
                    Confidence.PROVEN if narrow else Confidence.LIKELY,
                    f"the uplink of switch {bus_id}",
                    severity=Verdict.FAIL if narrow else Verdict.WARN,
                    gpus=_below(run, number, bus_id) or run.gpus_of(number),
                )


def _below(run: Circumstances, number: int, switch: str) -> frozenset[int]:
    known = ((position, run.wiring.gpu(position)) for position in run.gpus_of(number))
    return frozenset(position for position, gpu in known if gpu is not None and switch in gpu.place.switches)


@in_each_node
def _errors(run: Circumstances) -> Found:
    for number, node in run.nodes.items():
        gpus = {gpu.device: gpu for gpu in node.gpus}
        kinds = {each.bus_id: each.kind.replace("_", " ") for each in node.snapshot.pci_devices}
        for errors in pcie_errors(node.snapshot):
            gpu, sure = gpus.get(errors.device), sureness(errors)
            if gpu is not None:
                yield of_device(run, number, gpu, errors.seen, sure, expected=errors.expected)
            else:
                words = filter(None, (kinds.get(errors.device), errors.device))
                yield of_node(run, number, errors.seen, sure, *words, expected=errors.expected)


def _shared_uplink(run: Circumstances) -> Found:
    for pair in run.staged or ():
        refusal = run.refusals.get(pair)
        if refusal is not None and refusal.by_design and run.wiring.path(pair) in _BELOW_ONE_SWITCH:
            yield of_pairs(
                run,
                [pair],
                f"{run.wiring.path(pair)}, and through host memory: up and down the same uplink",
                Confidence.LIKELY,
            )


def _write_collapse(run: Circumstances) -> Found:
    """Of copies that were made at once both ways: by the sources, which write, and by the destinations, which read."""
    for each in run.together:
        pairs = _converging(run, each.pairs)
        if pairs and each.read_gb_s > _COLLAPSED * each.write_gb_s:
            seen = f"{each.pattern}: together writes reach {each.write_gb_s:.3g} GB/s, reads {each.read_gb_s:.3g}"
            yield of_pairs(run, pairs, seen, Confidence.LIKELY)


def _converging(run: Circumstances, pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs over PCIe whose sources share a switch and write to GPUs below several root complexes."""
    by_switch: dict[tuple[int, str], list[Pair]] = {}
    for pair in pairs:
        source, destination = (run.wiring.gpu(gpu) for gpu in pair)
        if source is None or destination is None or run.wiring.has_nvlinks(pair):
            continue
        for switch in source.place.switches[:1]:
            if switch not in destination.place.switches and destination.place.host_bridge is not None:
                by_switch.setdefault((run.wiring.gpus[pair[0]].node, switch), []).append(pair)
    return [
        pair
        for members in by_switch.values()
        if len({source for source, _ in members}) >= _SEVERAL and len(_roots(run, members)) >= _SEVERAL
        for pair in members
    ]


def _roots(run: Circumstances, pairs: Sequence[Pair]) -> set[str]:
    found = (run.wiring.gpu(destination) for _, destination in pairs)
    return {gpu.place.host_bridge for gpu in found if gpu is not None and gpu.place.host_bridge is not None}


def _link(id_: str, title: str, detection: str, look: Look, link: str, *aliases: str) -> Condition:
    """A condition of links that trained low."""
    return Condition(
        id=id_,
        title=title,
        seen_as=("LnkSta: Speed 16GT/s (downgraded), Width x8 (downgraded)",),
        detection=detection,
        settles="lspci -vv -s BUS_ID | grep -E 'LnkCap|LnkSta' while gpubench p2p runs",
        check="pcie_link",
        expected="what both ends of the link can do",
        likely="a riser or slot with fewer lanes, a card not seated, a BIOS setting, dirt on the contacts",
        aliases=aliases,
        cure="lspci -vv -s BUS_ID | grep -E 'LnkCap|LnkSta'; reseat the card or riser, look for the slot's lanes and "
        "generation in the BIOS and the board's manual",
        link=link,
        look=look,
    )


PCIE = Family.of(
    "pcie",
    "PCIe links",
    _link(
        "pcie-width",
        "A GPU or NIC runs on fewer PCIe lanes than it has (LnkSta: Width x8, downgraded)",
        "current against maximal width, NVML and /sys current_link_width",
        _width,
        "https://github.com/NVIDIA/nccl/issues/2397",
    ),
    _link(
        "pcie-uplink",
        "The uplink of a PCIe switch runs at a lower width or generation than it could",
        "current against maximal width and generation of every upstream port above GPUs and NICs",
        _uplink,
        "https://github.com/local-inference-lab/rtx6kpro/pull/88",
        "pcie-width",
        "pcie-generation",
    ),
    _link(
        "pcie-generation",
        "A GPU under load, or a NIC, runs at a lower PCIe generation than it could (LnkSta: Speed 8GT/s)",
        "current against maximal generation, of GPUs that are not idle",
        _generation,
        "https://github.com/NVIDIA/NVSentinel/issues/890",
    ),
    Condition(
        id="pcie-errors",
        title="PCIe replays or AER errors (BadTLP, ACSViol, correctable errors) on the way of a GPU",
        seen_as=("PCIe Bus Error: severity=Corrected", "Replays Since Reset"),
        detection="aer_dev_* in /sys of every hop, and NVML's replay counter: more than "
        f"{FEW_MEANWHILE} that come while p2p or check runs, or any that cannot be corrected; weak where they were "
        "read once: totals far above those of siblings, or fatal ones",
        settles="the same again after gpubench p2p: do they grow? dmesg | grep AER",
        check="pcie_errors",
        likely="a riser, a slot, dirt on the contacts, or a card that is not seated",
        cure="reseat the card, riser or cable; a slower generation in the BIOS where errors go on",
        link="https://github.com/NVIDIA/NVSentinel/issues/890",
        look=_errors,
    ),
    Condition(
        id="posted-write-collapse",
        title="P2P writes collapse when several GPUs below one PCIe switch write to several root complexes; reads "
        "do not",
        detection="gpubench p2p's patterns: the same pairs at once, over PCIe, read more than twice as fast as "
        "they write",
        settles="gpubench p2p: the lines `all to all`, write and read; pair by pair both are fine",
        cure="have NCCL read: NCCL_P2P_READ_ENABLE=1 gpubench alltoall, and without; else spread the cards over "
        "root complexes",
        link="https://github.com/local-inference-lab/rtx6kpro",
        look=_write_collapse,
    ),
    Condition(
        id="staging-shares-uplink",
        title="Pairs under one PCIe switch are slower through host memory than pairs under two",
        detection="pairs without P2P by design, through host memory, below one switch",
        settles="gpubench p2p: PIX pairs slower than SYS pairs",
        cure="nothing to repair: both ways share the switch's uplink; spread such ranks over switches",
        link="https://github.com/NVIDIA/nccl/issues/1086",
        look=_shared_uplink,
        by_design=True,
    ),
)
