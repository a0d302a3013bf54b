"""RDMA ports that are down, slow, or set up for less than they can do."""

from collections import Counter

from gpubench.conditions.definition.circumstances import Circumstances
from gpubench.conditions.definition.complaints import doubted
from gpubench.conditions.definition.condition import Condition, Family, Found, Unread, in_each_node, joined
from gpubench.conditions.definition.sightings import nodes_with_rdma, of_device, of_node, rdma_nics, sureness
from gpubench.model.facts.error_counts import port_errors
from gpubench.model.facts.rdma_port import RDMA_MTUS, roce_mtu_bytes
from gpubench.model.facts.snapshot import NicFacts, NicKind
from gpubench.model.paths.evidence import Confidence
from gpubench.model.paths.links import card_gbit_s, is_below_card
from gpubench.model.paths.topology import Topology
from gpubench.model.results.rows.causes import Effect
from gpubench.model.results.speed import is_slow
from gpubench.model.terms.units import counted

_GID_INDEX = "NCCL_IB_GID_INDEX"
_NOT_ACTIVE = ("down", "init", "armed", "defer", "nop")
"""The kernel's words for ports that carry nothing (drivers/infiniband/core/sysfs.c)."""

_ROCE_V2 = "RoCE v2"
_VIRTUAL = "Virtual Function"
_FAR_BELOW_CARD = 0.25
"""A ConnectX-7 on a switch of 100 Gb/s is a choice that people make; below that two generations lie between them."""

_BELOW_ITS_SWITCH = ("PIX", "PXB")
_OTHER_MACHINE = frozenset(("GPU models", "product", "CPU"))
"""Traits in which two machines differ that were built with different NICs."""

_MOST_ODD = 0.25
"""Of the GPUs of a node: where more of them have fewer NICs than the rest, it may have been built so."""


@in_each_node
def _ports_down(run: Circumstances) -> Found:
    """One for each port; where another is left, it takes no node off its network."""
    for number, node, _ in nodes_with_rdma(run):
        states = [(nic, nic.state) for nic in rdma_nics(node)]
        down = [nic for nic, state in states if state in _NOT_ACTIVE]
        odd = [f"{nic.name} says {state!r}" for nic, state in states if state not in (*_NOT_ACTIVE, "active", None)]
        if odd and not down:
            yield Unread(run.on(number), f"no state of a port: {joined(odd)}")
        every = len(down) == len(states)
        for nic in down:
            if not _is_spare(node, nic):
                seen = f"port is {nic.state}" + (": none of the node is left" if every and len(down) > 1 else "")
                confidence = Confidence.PROVEN if every else Confidence.LIKELY
                yield of_device(run, number, nic, seen, confidence, effects=() if every else (Effect.SLOW,))


@in_each_node
def _ports_unused(run: Circumstances) -> Found:
    for number, node, _ in nodes_with_rdma(run):
        for nic in rdma_nics(node):
            if nic.state in _NOT_ACTIVE and _is_spare(node, nic):
                yield of_device(run, number, nic, f"port is {nic.state}; jobs may not need it", Confidence.WEAK)


def _is_spare(node: Topology, nic: NicFacts) -> bool:
    """True if nothing says that a port that is down should be up: another port of its card is, or ports of other models
    are and it is near no GPU, or it is the only one of the node and no InfiniBand.
    """
    others = [each for each in rdma_nics(node) if each is not nic]
    active = [each for each in others if each.state == "active"]
    if _VIRTUAL in (nic.model or "") or any(_card(each) == _card(nic) for each in active):
        return True
    near = any(node.pcie_path(gpu, nic) in _BELOW_ITS_SWITCH for gpu in node.gpus)
    if near or any(each.model == nic.model for each in active):
        return False
    return bool(active) or (not others and nic.kind is not NicKind.INFINIBAND)


def _card(nic: NicFacts) -> str:
    """The card of a port: its PCI address without the function, its name without the port where that is not known."""
    return nic.bus_id.rpartition(".")[0] if nic.bus_id else nic.name.partition(":")[0]


@in_each_node
def _below_card(run: Circumstances) -> Found:
    """Rates that were negotiated against what cards can do; a finding where that is far below, something is slow, or
    healthy machines of the very type have more: on bare metal, as virtual machines have other NICs.
    """
    slow = len(run.nodes) > 1 and any(map(is_slow, run.measurements.collectives))
    for number, node, _ in nodes_with_rdma(run):
        told = run.profile_asked_for or node.snapshot.machine.virtual_machine is not False  # or other NICs are there
        profile = None if told else run.exact_profile(number)
        usual = min((nic.rate_gbit_s or 0.0 for nic in profile.nic), default=0.0) if profile is not None else 0.0
        best = max((nic.rate_gbit_s or 0.0 for nic in rdma_nics(node) if nic.state == "active"), default=0.0)
        for nic in rdma_nics(node):
            most, rate = card_gbit_s(nic), nic.rate_gbit_s
            if most is not None and rate is not None and nic.state == "active" and is_below_card(nic):
                seen = f"the port runs at {rate:g} Gb/s; cards of its model, {nic.model}, reach up to {most:g}"
                far = rate < _FAR_BELOW_CARD * most
                expected = f"up to {most:g} Gb/s, if the switch and this variant of the card have it"
                expected += f"; {usual:g} in profile {profile.name}" if profile is not None and rate < usual else ""
                quiet = not far and not slow and not rate == best < usual  # siblings tell what is below them
                yield of_device(run, number, nic, seen, Confidence.LIKELY, expected=expected, quiet=quiet)


@in_each_node
def _ports_slow(run: Circumstances) -> Found:
    """Beside active ports of the same model: those that are down say no rate, or their lowest."""
    for number, node, _ in nodes_with_rdma(run):
        rates: dict[tuple[str | None, NicKind], Counter[float]] = {}
        active = [nic for nic in rdma_nics(node) if nic.rate_gbit_s and nic.state == "active"]
        for nic in active:
            rates.setdefault((nic.model, nic.kind), Counter())[nic.rate_gbit_s or 0.0] += 1
        for nic in active:
            siblings = rates[nic.model, nic.kind]
            usual = max(siblings, key=lambda rate: (siblings[rate], rate))
            if (nic.rate_gbit_s or 0.0) < usual:
                expected = f"{usual:g} Gb/s, as its siblings have"
                yield of_device(run, number, nic, f"{nic.rate_gbit_s:g} Gb/s", expected=expected)


@in_each_node
def _port_errors(run: Circumstances) -> Found:
    for number, node, _ in nodes_with_rdma(run):
        nics = {nic.name: nic for nic in node.nics}
        for errors in port_errors(node.snapshot):
            if errors.device in nics:
                nic, sure = nics[errors.device], sureness(errors)
                yield of_device(run, number, nic, errors.seen, sure, expected=errors.expected)


@in_each_node
def _roce_mtu(run: Circumstances) -> Found:
    for number, node, _ in nodes_with_rdma(run):
        for nic in rdma_nics(node):
            size = roce_mtu_bytes(nic.mtu) if nic.kind is NicKind.ROCE and nic.mtu else None
            if size is not None and size < RDMA_MTUS[-1]:
                seen = f"MTU {nic.mtu} of its interface leaves RoCE {size} bytes of {RDMA_MTUS[-1]}"
                interface = next(iter(nic.interfaces), f"$(ls /sys/class/infiniband/{nic.name}/device/net)")
                cure = f"ip link set {interface} mtu 9000, on switches too: 4200 is the least for 4096"
                yield of_node(run, number, seen, Confidence.LIKELY, nic.name, cure=cure)


def _roce_gid(run: Circumstances) -> Found:
    indices = {int(value) for value in run.values(_GID_INDEX) if value.isdecimal()}
    for number, node, _ in nodes_with_rdma(run):
        roce = {nic.name for nic in rdma_nics(node) if nic.kind is NicKind.ROCE}
        for port in node.snapshot.rdma_ports:
            if port.nic not in roce or port.gids is None:
                continue
            kinds = {gid.index: gid.kind for gid in port.gids}
            for index in sorted(indices):
                if kinds.get(index) != _ROCE_V2:
                    seen = f"{_GID_INDEX}={index}, which is {kinds.get(index, 'not set')} on {port.nic}"
                    yield of_node(run, number, seen, Confidence.PROVEN, port.nic)


def _nics_below(node: Topology) -> dict[str, int | None]:
    """By GPU, the RDMA NICs below its PCIe switch; None where the paths to some are not known."""
    nics = [nic for nic in rdma_nics(node) if _VIRTUAL not in (nic.model or "")]
    paths = {gpu.device: [node.pcie_path(gpu, nic) for nic in nics] for gpu in node.gpus}
    return {
        name: None if None in known else sum(path in _BELOW_ITS_SWITCH for path in known)
        for name, known in paths.items()
    }


def _with_fewer_nics(node: Topology) -> dict[str, str]:
    """The GPUs with fewer RDMA NICs below their PCIe switch than most of the node, and what those have."""
    below = {name: count for name, count in _nics_below(node).items() if count is not None}
    counts = Counter(below.values())
    usual = max(counts, key=lambda count: (counts[count], count), default=0)
    fewer = [name for name, count in below.items() if count < usual]
    few = len(fewer) <= _MOST_ODD * len(below)
    return dict.fromkeys(fewer, f"{usual}, as {counts[usual]} of its siblings have") if few else {}


@in_each_node
def _nics_absent(run: Circumstances) -> Found:
    """A NIC that is gone leaves no trace but GPUs with fewer below their PCIe switch than their siblings."""
    for number, node, _ in nodes_with_rdma(run):
        below = _nics_below(node)
        for name, expected in _with_fewer_nics(node).items():
            seen = f"{counted(below[name] or 0, 'RDMA NIC')} below its PCIe switch"
            yield of_node(run, number, seen, Confidence.LIKELY, name, expected=expected)
        if None in below.values() and len(below) * _MOST_ODD >= 1:
            yield Unread(run.on(number), "not how far GPUs are from NICs: where a NIC is gone does not show")


def _nics_differ(run: Circumstances) -> Found:
    """A finding where the node is otherwise the same machine as most others, and nothing says which of its NICs it is;
    else a cause alone.
    """
    counts = {
        number: sum(nic.state in ("active", None) and _VIRTUAL not in (nic.model or "") for nic in rdma_nics(node))
        for number, node in run.nodes.items()
    }
    most = max(counts.values(), default=0)
    if min(counts.values(), default=0) == most:
        return
    faulty = {
        number
        for kind in run.kinds
        for number, differs in kind.odd.items()
        if counts[number] < counts[kind.representative]
        and number not in kind.rivals
        and _OTHER_MACHINE.isdisjoint(each.trait for each in differs)
        and not any(nic.state in _NOT_ACTIVE for nic in rdma_nics(run.nodes[number]))
        and not _with_fewer_nics(run.nodes[number])
    }
    for number, count in counts.items():
        if count < most:
            seen = f"{count} RDMA NICs are up, on other nodes {most}"
            yield of_node(run, number, seen, Confidence.LIKELY, quiet=number not in faulty)


_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_AREAL = "https://github.com/areal-project/AReaL/issues/639"


RDMA_PORTS = Family.of(
    "rdma_ports",
    "RDMA ports",
    Condition(
        id="rdma-port-down",
        title="InfiniBand or RoCE port is down (state INIT or DOWN, phys_state Polling)",
        seen_as=("State: Down", "Physical state: Polling", "State: Initializing", "Got async event : port error"),
        detection="/sys/class/infiniband/*/ports/*/state of every RDMA NIC",
        check="nic_state",
        expected="active",
        likely="cable, transceiver or switch port; without a subnet manager a port stays in init",
        aliases=("nic-down",),
        settles="ibstat; the switch's log",
        cure="ibstat; mlxlink -d DEVICE; the switch's log: cable, transceiver or switch port; in state INIT a "
        "subnet manager is missing",
        link=_AREAL,
        look=_ports_down,
        in_job=doubted(r"async event ?: port error"),
        implies=("nics-differ",),
    ),
    Condition(
        id="rdma-port-unused",
        title="A spare InfiniBand or RoCE port is down: its card has another one, or its model no active one",
        detection="ports that are down beside an active port of the same card, or of another model and far from GPUs",
        check="nic_state",
        expected="active, if it is used",
        likely="a port without a cable, which is normal where it is not used",
        settles="ibstat",
        cure="NCCL_IB_HCA=^DEVICE keeps NCCL off it; else cable and switch port",
        link="https://github.com/Azure/azurehpc-health-checks",
        look=_ports_unused,
    ),
    Condition(
        id="nic-below-card",
        title="A NIC's port runs at a lower rate than cards of its model can",
        detection="the rate that was negotiated against the highest of its model, as far as its slot carries that; a "
        f"finding below {_FAR_BELOW_CARD:.0%}, or where all are below the profile on bare metal; else a cause alone",
        check="nic_state",
        likely="a cable, transceiver or switch of a lower rate, or a variant of the card that has less",
        settles="ibstat; mlxlink -d DEVICE",
        cure="mlxlink -d DEVICE shows the rates that card, cable and switch port support",
        link="https://github.com/NVIDIA/nccl/issues/2397",
        look=_below_card,
    ),
    Condition(
        id="rdma-port-slow",
        title="InfiniBand or RoCE port runs at a lower rate than its siblings",
        detection="/sys/class/infiniband/*/ports/*/rate against active ports of the same model on the node",
        check="nic_state",
        likely="cable, transceiver or switch port",
        aliases=("nic-rate",),
        settles="ibstat; mlxlink -d DEVICE",
        cure="ibstat; mlxlink -d DEVICE: cable, transceiver, or the switch port's configured speed",
        link="https://github.com/NVIDIA/nccl/issues/2397",
        look=_ports_slow,
    ),
    Condition(
        id="nic-absent",
        title="Fewer RDMA NICs below the PCIe switch of a GPU than below those of its siblings",
        detection="InfiniBand, RoCE and EFA devices at PIX or PXB of every GPU; named where a quarter of the GPUs "
        "of the node or less have fewer",
        check="nic_state",
        likely="a NIC that fell off the bus, was not given to this host or container, or has no driver",
        settles="lspci -tv shows the slot; dmesg | grep -e mlx5 -e pciehp -e AER",
        cure="lspci -d 15b3: and dmesg on the node: reseat or replace the NIC",
        link="https://github.com/NVIDIA/nccl/issues/349",
        look=_nics_absent,
        implies=("nics-differ",),
    ),
    Condition(
        id="rdma-port-errors",
        title="InfiniBand port counts link_downed, symbol_error or receive errors",
        detection="/sys/class/infiniband/*/ports/*/counters: what comes while p2p or check runs; weak where they "
        "were read once: totals far above those of siblings",
        settles="the same after gpubench allreduce over these nodes: do they grow?",
        check="nic_errors",
        likely="cable, transceiver or switch port",
        aliases=("nic-errors",),
        cure="perfquery -x, again after some traffic: clean or replace cable and transceiver of a port whose "
        "counters grow",
        link="https://github.com/NVIDIA/nccl-tests/issues/112",
        look=_port_errors,
    ),
    Condition(
        id="roce-mtu-small",
        title="RoCE MTU is 1024 because the interface's MTU is 1500",
        detection="MTU of a RoCE port's interface: RoCE takes the largest of 256 to 4096 that fits with headers",
        settles="ibv_devinfo | grep active_mtu",
        cure="ip link set INTERFACE mtu 9000, on switches too: 4200 is the least for 4096",
        link="https://github.com/NVIDIA/nccl-tests/issues/112",
        look=_roce_mtu,
    ),
    Condition(
        id="roce-gid-index",
        title="NCCL_IB_GID_INDEX names a GID that is no RoCE v2 address",
        seen_as=("Got completion with error 12, opcode 0, len 0, vendor err 129", "Call to ibv_modify_qp failed"),
        detection="NCCL_IB_GID_INDEX against gid_attrs/types of every RoCE port",
        settles="show_gids",
        cure="unset NCCL_IB_GID_INDEX: NCCL 2.21 and later finds the address",
        link=_ENV,
        look=_roce_gid,
    ),
    Condition(
        id="nics-differ",
        title="One node has fewer active RDMA NICs than the others",
        detection="active RDMA NICs of every node; a finding where most nodes of the same model and GPUs have more",
        check="nic_state",
        expected="as many as most nodes of the job have",
        likely="NICs that are not on the bus, or whose driver is not loaded",
        settles="gpubench topo under mpirun names the odd node",
        cure="lspci -d 15b3: and ibstat on the node; take it out of the job until its ports are up",
        link="https://github.com/NVIDIA/nccl/issues/349",
        look=_nics_differ,
    ),
)
