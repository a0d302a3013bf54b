"""Reasons why a check does not apply to a machine, and notes on what a passed check did not cover."""

import re
from collections import Counter
from collections.abc import Callable, Iterable

from gpubench.conditions.circumstances import Facts, joined
from gpubench.model.facts.health import HIDDEN, name_every_gpu
from gpubench.model.facts.snapshot import GpuFacts, NicFacts, find_display_cards, is_virtual_gpu
from gpubench.model.paths.nics import card_gbit_s, is_below_card, port_roles
from gpubench.model.paths.topology import Topology
from gpubench.model.results.figures import Need
from gpubench.model.terms.units import plural

NOT_THERE = (
    *("Not Supported", "Function Not Found", "this nvidia-ml-py", "under MIG", "the port is down"),
    *("not in the profile", HIDDEN),
    "the profile does not say",  # In recordings of earlier versions
)
"""Phrases in the reasons for missing facts.

They show that the fact does not exist for this GPU, driver, library, port, process or simulated machine.
"""

_MEMORY_HELD_BYTES = 2**29

Lack = Callable[[Facts], str]  # Returns a reason or note as text, empty if there is none


def always_something(_facts: Facts) -> str:
    """Return an empty text, for checks that apply to every machine."""
    return ""


def _unless(seen: Iterable[object], reason: str) -> str:
    return "" if any(True for _ in seen) else reason


def left_out_gpus(facts: Facts) -> str:
    """Name display cards, which are not used for computing, and vGPUs, which have no peer access."""
    cards = [gpu for node in facts.nodes for gpu in find_display_cards(node.gpus)]
    virtual = sum(is_virtual_gpu(gpu) for gpu in _gpus(facts))
    words = [f"{gpu.device} {gpu.name} is a display card and is left out" for gpu in cards]
    return joined([*words, f"{plural(virtual, 'vGPU')}: no peer access" if virtual else ""])


def rdma_nics(facts: Facts) -> str:
    return _unless((nic for node in facts.nodes for nic in node.nics if nic.rdma), "no RDMA NIC")


def rates_of_cards(facts: Facts) -> str:
    """Report port rates below the card's highest rate, or that the highest rate is unknown."""
    active = [nic for node in facts.nodes for nic in port_roles(node).gpu_ports if nic.state == "active"]
    low = [nic for nic in active if is_below_card(nic)]
    if low:
        rates = joined(f"{nic.rate_gbit_s:g} of {card_gbit_s(nic):g} Gb/s" for nic in low)
        return f"{plural(len(low), 'NIC port')} below the card's highest rate: {rates}"
    unknown = any(nic.rate_gbit_s is None or card_gbit_s(nic) is None for nic in active)
    return "rates compared only with siblings, because the cards' highest rate is unknown" if unknown else ""


def unknown_gpudirect(facts: Facts) -> str:
    """Explain why GPUDirect RDMA could not be judged: facts about dma-buf or about the module's registration are
    missing.
    """
    for node in facts.nodes:
        ways = node.snapshot.gpudirect
        if ways.efa_peermem or not any(nic.rdma for nic in node.nics):
            continue
        if ways.dma_buf and (ways.peermem is False or ways.peermem_registered is False):
            return "not judged: nvidia-peermem is not in use, and dma-buf works only if the NIC's driver supports it"
        if ways.peermem and ways.peermem_registered is None and ways.dma_buf is False:
            return "not judged: it is unknown whether nvidia-peermem is registered"
    return ""


def count_of_gpus(facts: Facts) -> str:
    """Report GPU counts for which there is no expected count.

    An expected count comes from the command line, a requested profile, the board, or CUDA_VISIBLE_DEVICES.
    """
    if facts.expected_gpus is not None:
        return ""
    run = facts.circumstances
    open_ = [
        node
        for number, node in run.nodes.items()
        if node.gpus
        and not (facts.asked and run.exact_profile(number))
        and not _shows_its_board(node)
        and not name_every_gpu(node.snapshot, run.node_ranks(number))
    ]
    counts = joined(sorted({str(len(node.gpus)) for node in open_}))
    return f"GPU count not judged ({counts} found): --expect-gpus N" if open_ else ""


def _shows_its_board(node: Topology) -> bool:
    """True if a bare-metal node's NVSwitches, or its mesh of NVLinks, show how many GPUs its board has."""
    snapshot = node.snapshot
    return snapshot.machine.virtual_machine is False and (bool(snapshot.nvswitches) or is_mesh(node))


def is_mesh(node: Topology) -> bool:
    """True if NVLinks join every GPU directly to another GPU of its node."""
    here = {gpu.bus_id for gpu in node.gpus}
    return len(node.gpus) > 1 and all(
        any(link.active and link.peer_bus_id in here for link in gpu.nvlinks or ()) for gpu in node.gpus
    )


def _count_gpus(words: Callable[[GpuFacts], str]) -> Lack:
    """Return a function that counts GPUs by the text that `words` returns for them. GPUs with an empty text are
    skipped.
    """

    def note(facts: Facts) -> str:
        gpus = [*_gpus(facts)]
        known = Counter(filter(None, map(words, gpus)))
        return joined(f"{word} on {count} of {plural(len(gpus), 'GPU')}" for word, count in known.items())

    return note


power_caps = _count_gpus(lambda gpu: "a power cap" if "sw_power_cap" in (gpu.throttle_reasons or ()) else "")
ecc_off = _count_gpus(lambda gpu: "ECC is off" if gpu.ecc is False else "")
split_gpus = _count_gpus(lambda gpu: "MIG is on" if gpu.mig else "")


@_count_gpus
def power_limits(gpu: GpuFacts) -> str:
    share = gpu.limits.power_share
    return f"power limit {gpu.limits.power_w:g} of {gpu.limits.default_power_w:g} W" if share and share < 1.0 else ""


@_count_gpus
def memory_held(gpu: GpuFacts) -> str:
    """Report GPU memory in use without a visible process. The driver, or a process outside this container, uses it."""
    used = gpu.memory_used_bytes or 0
    return f"{used / 2**30:.1f} GiB in use" if used >= _MEMORY_HELD_BYTES and not gpu.processes else ""


@_count_gpus
def remapped_rows(gpu: GpuFacts) -> str:
    rows = gpu.remapped_rows
    return f"{rows.uncorrectable} remapped memory rows" if rows is not None and rows.uncorrectable else ""


OF_THE_BOARD = "the limit of the slot or board, by which copies are judged"
_SOLDERED = re.compile(r"SXM|HBM3\b|GH200|GB\d|B[23]00|H200\b(?! NVL)|H20\b")
_OF_DESKTOPS = re.compile(r"GeForce|TITAN")
_DESKTOPS = ("desktop", "laptop")


def is_soldered(gpu: GpuFacts) -> bool:
    """True if the GPU is soldered to its board, so that its PCIe link has the same width on every such board."""
    return _SOLDERED.search(gpu.name or "") is not None


def is_desktop(node: Topology) -> bool:
    """True for desktops, laptops and consumer GPUs, whose slots may have different widths."""
    consumer = bool(node.gpus) and all(_OF_DESKTOPS.search(gpu.name or "") for gpu in node.gpus)
    return consumer or node.snapshot.machine.chassis in _DESKTOPS


def nodes_to_compare(facts: Facts) -> str:
    return "" if len(facts.nodes) > 1 else "needs several nodes to compare"


def ranks_to_compare(facts: Facts) -> str:
    """Return a reason if there is only one rank. Without any rank, the facts that the check reads decide."""
    return "needs several ranks to compare" if len(facts.ranks) == 1 else ""


def nodes_or_ranks(facts: Facts) -> str:
    return nodes_to_compare(facts) and ranks_to_compare(facts)


def timed_ranks(facts: Facts) -> str:
    return "" if any(row.ranks > 1 for row in facts.measurements.collectives) else "needs several ranks to compare"


def nvlinks(facts: Facts) -> str:
    """Return a reason if no GPU has NVLinks. A GPU whose NVLinks are unknown counts as having some."""
    return _unless((gpu for gpu in _gpus(facts) if gpu.nvlinks != ()), "no GPU has NVLinks")


def nvlink_mode(facts: Facts) -> str:
    """Report that the NVLink bandwidth mode was not read, if driver and GPUs support it."""
    for node in facts.nodes:
        settings = node.snapshot.driver_settings
        reasons = [settings.unknown.get(f"nvlink_bandwidth_{name}", "") for name in ("mode", "reduced")]
        read = settings.nvlink_bandwidth_mode is not None or settings.nvlink_bandwidth_reduced is not None
        if not read and not any(words in reason for reason in reasons for words in NOT_THERE):
            return "the NVLink bandwidth mode was not read"
    return ""


def fabric(facts: Facts) -> str:
    """Return a reason if no GPU belongs to an NVLink fabric. A GPU whose fabric is unknown counts as belonging to
    one.
    """
    outside = "no GPU belongs to an NVLink fabric"
    return _unless((gpu for gpu in _gpus(facts) if gpu.fabric is None or gpu.fabric.state != "not_supported"), outside)


def fabric_health(facts: Facts) -> str:
    """Report that the fabric's health is unknown, as with older drivers and in virtual machines."""
    joined = [gpu.fabric for gpu in _gpus(facts) if gpu.fabric is not None and gpu.fabric.state == "completed"]
    all_reported = joined and all(fabric.health_mask for fabric in joined)
    return "" if all_reported else "joined; the driver does not report the fabric health of every GPU"


def several_gpus(facts: Facts) -> str:
    return "" if any(len(node.gpus) > 1 for node in facts.nodes) else "one GPU per node"


def reaches_over_pcie(node: Topology) -> bool:
    """True if any GPU reaches a NIC or another GPU over PCIe. NVLink traffic bypasses PCIe bridges and the IOMMU."""
    return any(uses_pcie(node, gpu) for gpu in node.gpus)


def uses_pcie(node: Topology, gpu: GpuFacts) -> bool:
    """True if this GPU reaches a NIC or another GPU over PCIe."""
    others = (other for other in node.gpus if other is not gpu)
    return bool(gpudirect_nics(node, gpu)) or any(
        not node.nvlinks(gpu, other) and node.peer_access(gpu, other).possible for other in others
    )


def gpudirect_nics(node: Topology, gpu: GpuFacts) -> list[NicFacts]:
    """Return NICs that may reach a GPU's memory: those below its PCIe switch, or all if the GPU's paths are unknown."""
    roles = port_roles(node)
    able = [nic for nic in roles.gpu_ports if node.gpudirect(nic)[0] is not False]
    below = roles.below.get(gpu.device)
    return able if below is None else [nic for nic in able if nic in below]


def traffic_over_pcie(facts: Facts) -> str:
    return _unless(
        (node for node in facts.nodes if reaches_over_pcie(node)), "no GPU reaches another, or a NIC, over PCIe"
    )


def counts_during_a_run(facts: Facts) -> str:
    """Report that error counters were not read again under load, so only totals are known."""
    grown = [node.snapshot.errors_grown is not None for node in facts.nodes]
    if all(grown):
        return ""
    where = "" if not any(grown) else f" on {plural(grown.count(False), 'node')} of {len(grown)}"
    return f"totals only{where}, because they were not read again under load"


def measurements(facts: Facts) -> str:
    left_out = facts.measurements.left_out
    return next(iter(left_out.values())) if len(left_out) >= len(Need) - 1 else ""


def a_profile(facts: Facts) -> str:
    return _unless((profile for profile in facts.profiles if profile is not None), "no profile matches")


def a_profile_asked_for(facts: Facts) -> str:
    return "" if facts.asked else "needs --profile, because machines of one type can have different NICs"


def _gpus(facts: Facts) -> Iterable[GpuFacts]:
    return (gpu for node in facts.nodes for gpu in node.gpus)
