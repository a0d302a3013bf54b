"""RDMA ports that are down, slow, different from their siblings, or configured below their capability."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from gpubench.conditions.circumstances import Circumstances, Found, Sighting, Unread, joined
from gpubench.conditions.condition import Condition, Family, error_severity, nodes_with_rdma, rdma_nics, single_node
from gpubench.conditions.logged import Complained
from gpubench.model.facts.health import port_errors
from gpubench.model.facts.snapshot import RDMA_MTUS, NicFacts, NicKind, roce_mtu_bytes
from gpubench.model.paths.nccl_log import LogFacts
from gpubench.model.paths.nics import NOT_ACTIVE, VIRTUAL, PortRoles, card_gbit_s, is_below_card, port_roles
from gpubench.model.paths.topology import Topology, generation_and_width
from gpubench.model.paths.transport import Confidence
from gpubench.model.results.report import Effect
from gpubench.model.results.speed import is_slow
from gpubench.model.terms.units import plural
from gpubench.model.terms.verdict import Cure, Verdict

_GID_INDEX = "NCCL_IB_GID_INDEX"
_ROCE_V2 = "RoCE v2"
# A ConnectX-7 on a 100 Gb/s switch may be intended. Below that, card and switch are two generations apart.
_FAR_BELOW_CARD = 0.25
# If nodes differ in one of these properties, they may also have different NICs
_OTHER_MACHINE = frozenset(("GPU models", "product", "CPU"))
# If more than this share of a node's GPUs have fewer NICs than the rest, the node may have been built like that
_MOST_ODD = 0.25


def _unless_it_came_back(sighting: Sighting, facts: LogFacts) -> Sighting:
    is_back = any("port active" in complaint.text for complaint in facts.complaints)
    return replace(sighting, severity=Verdict.WARN if is_back else None)


@single_node
def _ports_down(run: Circumstances) -> Found:
    for number, node in nodes_with_rdma(run):
        ports, failing = rdma_nics(node), port_roles(node).failing
        down = [nic for nic in ports if nic.state in NOT_ACTIVE]
        odd = [f"{nic.name} is {nic.state!r}" for nic in ports if nic.state not in (*NOT_ACTIVE, "active", None)]
        if odd and not down:
            yield Unread(run.subject(number), f"unknown port state: {joined(odd)}")
        every = len(down) == len(ports)
        for nic in down:
            if nic in failing:
                seen = f"port is {nic.state}" + (", like all ports of the node" if every and len(down) > 1 else "")
                confidence = Confidence.PROVEN if every else Confidence.LIKELY
                yield run.device_sighting(number, nic, seen, confidence, effects=() if every else (Effect.SLOW,))


@single_node
def _ports_unused(run: Circumstances) -> Found:
    for number, node in nodes_with_rdma(run):
        for nic in port_roles(node).others:
            if nic.state in NOT_ACTIVE:
                yield run.device_sighting(number, nic, f"port is {nic.state}; it may be unused", Confidence.WEAK)


@single_node
def _find_rates_below_card(run: Circumstances) -> Found:
    """Compare the rates of ports that serve GPUs with the highest rates of their cards.

    A low rate is a finding if it is far below the card's, if a measurement was slow, or if other nodes have faster
    ports. Otherwise the switches may be slower by design.
    """
    slow = len(run.nodes) > 1 and any(map(is_slow, run.measurements.collectives))
    roles = {number: port_roles(node) for number, node in nodes_with_rdma(run)}
    for number, own in roles.items():
        elsewhere = [nic for other, role in roles.items() if other != number for nic in role.working]
        near = [nic for known in own.below.values() for nic in known or ()]
        for nic in own.gpu_ports:
            most, rate = card_gbit_s(nic), nic.rate_gbit_s
            if most is not None and rate is not None and nic.state == "active" and is_below_card(nic):
                seen = f"the port runs at {rate:g} Gb/s; {nic.model} cards reach up to {most:g}"
                is_for_gpus = nic in near or (not near and nic.kind is NicKind.INFINIBAND)
                far = is_for_gpus and rate < _FAR_BELOW_CARD * most
                usual = max((other.rate_gbit_s or 0.0 for other in elsewhere if other.model == nic.model), default=0.0)
                expected = f"up to {most:g} Gb/s, if the switch and this variant of the card support it"
                expected += f"; {usual:g} on other nodes" if rate < usual else ""
                quiet = not far and not slow and (rate >= usual or nic not in own.working)
                yield run.device_sighting(number, nic, seen, Confidence.LIKELY, expected=expected, quiet=quiet)


@single_node
def _ports_slow(run: Circumstances) -> Found:
    """Find active ports that are slower than working ports of the same model.

    Inactive ports are skipped, since they report no rate, or their lowest one.
    """
    for number, node in nodes_with_rdma(run):
        roles = port_roles(node)
        for nic in roles.failing:
            alike = [other for other in roles.working if (other.model, other.kind) == (nic.model, nic.kind)]
            usual = max((other.rate_gbit_s or 0.0 for other in alike), default=0.0)
            if nic.state == "active" and nic.rate_gbit_s and nic.rate_gbit_s < usual:
                expected = f"{usual:g} Gb/s, like its siblings"
                yield run.device_sighting(number, nic, f"{nic.rate_gbit_s:g} Gb/s", expected=expected)


@single_node
def _port_errors(run: Circumstances) -> Found:
    for number, node in nodes_with_rdma(run):
        nics = {nic.name: nic for nic in node.nics}
        for errors in port_errors(node.snapshot):
            if errors.device in nics:
                yield run.device_sighting(number, nics[errors.device], errors.seen, **error_severity(errors))


@single_node
def _roce_mtu(run: Circumstances) -> Found:
    for number, node in nodes_with_rdma(run):
        for nic in rdma_nics(node):
            size = roce_mtu_bytes(nic.mtu) if nic.kind is NicKind.ROCE and nic.mtu else None
            if size is not None and size < RDMA_MTUS[-1]:
                seen = f"interface MTU {nic.mtu} limits the RoCE MTU to {size} of {RDMA_MTUS[-1]} bytes"
                interface = next(iter(nic.interfaces), f"$(ls /sys/class/infiniband/{nic.name}/device/net)")
                cure = Cure.of(
                    f"ip link set {interface} mtu 9000",
                    comment="Set it on the switches too. RoCE MTU 4096 needs an interface MTU of at least 4200.",
                )
                yield run.node_sighting(number, seen, Confidence.LIKELY, nic.name, cure=cure)


def _roce_gid(run: Circumstances) -> Found:
    indices = {int(value) for value in run.values(_GID_INDEX) if value.isdecimal()}
    for number, node in nodes_with_rdma(run):
        roce = {nic.name for nic in rdma_nics(node) if nic.kind is NicKind.ROCE}
        for port in node.snapshot.rdma_ports:
            if port.nic not in roce or port.gids is None:
                continue
            kinds = {gid.index: gid.kind for gid in port.gids}
            for index in sorted(indices):
                if kinds.get(index) != _ROCE_V2:
                    seen = f"{_GID_INDEX}={index} is {kinds.get(index, 'not set')} on {port.nic}"
                    yield run.node_sighting(number, seen, Confidence.PROVEN, port.nic)


def _gpus_with_fewer_nics(node: Topology, roles: PortRoles) -> dict[str, str]:
    """Return GPUs with fewer RDMA NICs below their PCIe switch than most siblings, each with the usual number as
    text.
    """
    below = {name: len(roles.ports_below(name)) for name, known in roles.below.items() if known is not None}
    counts = Counter(below.values())
    usual = max(counts, key=lambda count: (counts[count], count), default=0)
    fewer = [name for name, count in below.items() if count < usual]
    few = len(fewer) <= _MOST_ODD * len(node.gpus)
    return dict.fromkeys(fewer, f"{usual}, like {counts[usual]} of its siblings") if few else {}


@single_node
def _nics_absent(run: Circumstances) -> Found:
    """Find GPUs with fewer NICs below their PCIe switch than their siblings. A missing NIC leaves no other trace."""
    for number, node in nodes_with_rdma(run):
        roles = port_roles(node)
        for name, expected in _gpus_with_fewer_nics(node, roles).items():
            seen = f"{plural(len(roles.ports_below(name)), 'RDMA NIC')} under its PCIe switch"
            yield run.node_sighting(number, seen, Confidence.LIKELY, name, expected=expected)
        if None in roles.below.values() and len(node.gpus) * _MOST_ODD >= 1:
            yield Unread(
                run.subject(number), "paths between GPUs and NICs are unknown, so a missing NIC cannot be detected"
            )


def _nics_differ(run: Circumstances) -> Found:
    yield from _ports_differ(run)
    yield from _fewer_than_profile(run)
    yield from _nodes_differ(run)


def _nodes_differ(run: Circumstances) -> Found:
    """Find nodes with fewer active NICs than other nodes.

    It is a finding only if most nodes are equal, and no other condition explains the difference.
    """
    roles = {number: port_roles(node) for number, node in run.nodes.items()}
    counts = {
        number: sum(
            nic.state in ("active", None) and VIRTUAL not in (nic.model or "") for nic in port_roles(node).gpu_ports
        )
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
        and _OTHER_MACHINE.isdisjoint(differ.trait for differ in differs)
        # Otherwise the missing ports may belong to missing GPUs
        and len(run.nodes[number].gpus) == len(run.nodes[kind.representative].gpus)
        and not any(nic.state in NOT_ACTIVE for nic in roles[number].failing)
        and not _gpus_with_fewer_nics(run.nodes[number], roles[number])
    }
    for number, count in counts.items():
        if count < most:
            seen = f"{count} RDMA NICs are up; other nodes have {most}"
            yield run.node_sighting(number, seen, Confidence.LIKELY, quiet=number not in faulty)


@single_node
def _fewer_than_profile(run: Circumstances) -> Found:
    """Find bare-metal nodes with fewer NICs than their profile, of the same kind and rate.

    Half the number, or a single NIC, may be intended.
    """
    for number, node in nodes_with_rdma(run):
        profile, roles = run.exact_profile(number), port_roles(node)
        due = [] if profile is None else [nic for nic in profile.nic if nic.kind is not NicKind.ETHERNET]
        types = {(nic.kind, nic.rate_gbit_s) for nic in due}
        is_alike = {(nic.kind, nic.rate_gbit_s) for nic in roles.gpu_ports} == types
        is_whole = profile is not None and len(node.gpus) == profile.match.board and not node.snapshot.failures
        bare = node.snapshot.machine.virtual_machine is False and is_whole
        have = len(roles.gpu_ports)
        share_a_port = len({nic.port for nic in due}) == 1 and due[0].port is not None if due else False
        is_odd = bool(have) and (len(node.gpus) % have != 0 or share_a_port)
        if bare and is_alike and have < len(due) and is_odd and not _gpus_with_fewer_nics(node, roles):
            expected = f"{len(due)}, as in profile {profile and profile.name}"
            seen = f"{plural(have, 'RDMA NIC')} for {plural(len(node.gpus), 'GPU')}"
            yield run.node_sighting(number, seen, Confidence.LIKELY, severity=Verdict.WARN, expected=expected)


@single_node
def _ports_differ(run: Circumstances) -> Found:
    """Find ports that serve GPUs and differ in a property from most such ports of the node."""
    for number, node in nodes_with_rdma(run):
        roles = port_roles(node)
        for nic, seen, usual in _odd_ports(node, [nic for nic in roles.gpu_ports if nic.state == "active"]):
            yield run.device_sighting(
                number, nic, seen, Confidence.LIKELY, severity=Verdict.WARN, expected=f"{usual}, like its siblings"
            )


def _odd_ports(node: Topology, ports: Sequence[NicFacts]) -> Iterator[tuple[NicFacts, str, str]]:
    traits = {nic.name: _traits(node, nic) for nic in ports}
    usual_model, _ = _most_frequent([nic.model for nic in ports])
    for trait in ("kind", "model", "firmware", "MTU", "PCIe at most", "RoCE v2 GID"):
        compared = [nic for nic in ports if trait in ("kind", "model") or nic.model == usual_model]
        known = [nic for nic in compared if traits[nic.name].get(trait) is not None]
        usual, is_usual = _most_frequent([traits[nic.name][trait] for nic in known])
        for nic in known if is_usual else ():
            value = traits[nic.name][trait]
            if value != usual:
                yield nic, f"{trait} {value}", f"{trait} {usual}"


def _most_frequent(values: Sequence[str | None]) -> tuple[str | None, bool]:
    """Return the most frequent value, and whether more than half of the values equal it."""
    counts = Counter(values)
    usual = max(counts, key=lambda value: counts[value], default=None)
    return usual, counts[usual] * 2 > len(values)


def _traits(node: Topology, nic: NicFacts) -> Mapping[str, str | None]:
    port = next((known for known in node.snapshot.rdma_ports if known.nic == nic.name), None)
    gids = port.gids if port is not None and nic.kind is NicKind.ROCE else None
    return {
        "kind": nic.kind.value,
        "model": nic.model,
        "firmware": nic.firmware,
        "MTU": str(nic.mtu) if nic.mtu and nic.kind is NicKind.ROCE else None,
        "PCIe at most": generation_and_width(nic.pcie.max_generation, nic.pcie.max_width),
        "RoCE v2 GID": None if gids is None else "set" if any(gid.kind == _ROCE_V2 for gid in gids) else "not set",
    }


RDMA_PORTS = Family.of(
    "rdma_ports",
    "RDMA ports",
    Condition(
        id="rdma-port-down",
        title="InfiniBand or RoCE port is down (state INIT or DOWN, phys_state Polling)",
        check="nic_state",
        expected="active",
        likely="the cable, transceiver or switch port, or (in state INIT) a missing subnet manager",
        aliases=("nic-down",),
        settles="`ibstat`, and the switch's log",
        command="mlxlink -d DEVICE",
        comment="Check the cable, transceiver and switch port. In state INIT, start a subnet manager.",
        link="https://github.com/areal-project/AReaL/issues/639",
        look=_ports_down,
        in_job=replace(
            Complained(
                r"async (?:error )?event ?: (?:port error|device fatal)|port state is down"
                r"|\bib\w*\d\w*: link (?:is )?down|\b(?:mlx\d|bnxt_re|irdma)_?\w*:? port:? \d+:? link down"
            ),
            refine=_unless_it_came_back,
        ),
        implies=("nics-differ",),
    ),
    Condition(
        id="rdma-port-unused",
        title="A spare InfiniBand or RoCE port is down: the GPUs have enough ports without it",
        check="nic_state",
        expected="active, if it is used",
        likely="a port without a cable, which is normal for an unused port",
        settles="ibstat",
        command="ibstat",
        comment="If the port is unused, NCCL_IB_HCA=^NAME makes NCCL ignore it. Otherwise, check the cable and "
        "the switch port.",
        link="https://github.com/Azure/azurehpc-health-checks",
        look=_ports_unused,
    ),
    Condition(
        id="nic-below-card",
        title="A NIC's port runs at a lower rate than cards of its model can reach",
        check="nic_state",
        likely="a cable, transceiver or switch with a lower rate, or a slower variant of the card",
        settles="ibstat; mlxlink -d DEVICE",
        command="mlxlink -d DEVICE",
        comment="It shows the rates that card, cable and switch port support.",
        link="https://github.com/NVIDIA/nccl/issues/2397",
        look=_find_rates_below_card,
    ),
    Condition(
        id="rdma-port-slow",
        title="InfiniBand or RoCE port runs at a lower rate than its siblings",
        check="nic_state",
        likely="the cable, transceiver or switch port",
        aliases=("nic-rate",),
        settles="ibstat; mlxlink -d DEVICE",
        command="mlxlink -d DEVICE",
        comment="Check the cable, the transceiver and the switch port's configured speed.",
        link="https://github.com/NVIDIA/nccl/issues/2397",
        look=_ports_slow,
    ),
    Condition(
        id="nic-absent",
        title="A GPU has fewer RDMA NICs under its PCIe switch than its siblings",
        check="nic_state",
        likely="a NIC that fell off the bus, is not assigned to this host or container, or has no driver",
        settles="`lspci -tv`, which shows the slot, and `dmesg | grep -e mlx5 -e pciehp -e AER`",
        command="lspci -d 15b3:",
        comment="If the NIC is missing, look at dmesg, then reseat or replace it.",
        link="https://github.com/NVIDIA/nccl/issues/349",
        look=_nics_absent,
        implies=("nics-differ",),
    ),
    Condition(
        id="rdma-port-errors",
        title="InfiniBand port counts link_downed, symbol_error or receive errors",
        settles="`perfquery -x` before and after `gpubench allreduce` over these nodes (growing counters confirm it)",
        check="nic_errors",
        likely="the cable, transceiver or switch port",
        aliases=("nic-errors",),
        command="perfquery -x",
        comment="Run it again after some traffic. Clean or replace the cable and transceiver of any port with "
        "growing counters.",
        link="https://github.com/NVIDIA/nccl-tests/issues/112",
        look=_port_errors,
    ),
    Condition(
        id="roce-mtu-small",
        title="RoCE MTU is 1024 because the interface's MTU is 1500",
        settles="ibv_devinfo | grep active_mtu",
        comment="Set the MTU with `ip link set` to 9000, on the switches too. RoCE MTU 4096 needs an interface "
        "MTU of at least 4200.",
        link="https://github.com/NVIDIA/nccl-tests/issues/112",
        look=_roce_mtu,
    ),
    Condition(
        id="roce-gid-index",
        title="NCCL_IB_GID_INDEX names a GID that is not a RoCE v2 address",
        settles="show_gids",
        command="unset NCCL_IB_GID_INDEX",
        comment="NCCL 2.21 and later finds the address.",
        link="https://github.com/NVIDIA/nccl/issues/426",
        look=_roce_gid,
    ),
    Condition(
        id="nics-differ",
        title="RDMA NICs differ: fewer on one node, or one port unlike its siblings (kind, firmware, MTU, lanes, GID)",
        check="nic_state",
        expected="the same NICs as on most nodes of the job",
        likely="NICs that are missing from the bus or have no driver loaded",
        settles="`mpirun gpubench topo`, which names the odd node",
        command="ibstat",
        comment="Run it and `lspci -d 15b3:` on the node. Remove the node from the job until its ports are up "
        "and alike.",
        link="https://github.com/NVIDIA/nccl/issues/349",
        look=_nics_differ,
    ),
)
