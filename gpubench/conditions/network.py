"""Networks between nodes: RDMA ports that are down, slow or set up for less, and sockets used in place of RDMA."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from gpubench.conditions.definition.circumstances import (
    SOCKET,
    Circumstances,
    LoggedReason,
    Staged,
    by_sockets,
    remark_in_log,
)
from gpubench.conditions.definition.condition import (
    Condition,
    Family,
    Found,
    Sighting,
    Unread,
    doubted,
    in_each_node,
    joined,
    nodes_with_rdma,
    of_device,
    of_node,
    of_pairs,
    rdma_nics,
    sureness,
    unread,
)
from gpubench.conditions.nccl_settings import blame, in_log
from gpubench.model.facts.health import port_errors
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import RDMA_MTUS, NicFacts, NicKind, roce_mtu_bytes
from gpubench.model.paths.evidence import Confidence
from gpubench.model.paths.nccl_log import RemarkKind
from gpubench.model.paths.topology import Topology, card_gbit_s, is_below_card
from gpubench.model.paths.transport import Pair
from gpubench.model.results.report import Effect
from gpubench.model.results.speed import is_slow
from gpubench.model.terms.units import counted

_IB_HCA = "NCCL_IB_HCA"
_VERBS, _PLUGIN = "libibverbs.so.1", "libnccl-net.so"
_DRIVER_PROVIDERS = {"mlx5_core": "mlx5", "mlx4_core": "mlx4", "bnxt_en": "bnxt_re", "efa": "efa", "irdma": "irdma"}
"""The driver in libibverbs that serves a NIC of a kernel driver (rdma-core's providers)."""


def _disabled(run: Circumstances) -> Found:
    blamed = {"NCCL_IB_DISABLE": run.values("NCCL_IB_DISABLE")} if run.switched_on("NCCL_IB_DISABLE") else {}
    networks = tuple(value for value in run.values("NCCL_NET") if value.lower() == "socket")
    blamed |= {"NCCL_NET": networks} if networks else {}
    if blamed and any(rdma_nics(node) for node in run.nodes.values()):
        yield blame(run, dict(blamed), Confidence.PROVEN, frozenset(run.across) or None)


def _filtered(run: Circumstances) -> Found:
    for number, node, _ in nodes_with_rdma(run):
        for value in run.values(_IB_HCA):
            names = [nic.name for nic in rdma_nics(node)]
            if value and not any(_matches(value, name) for name in names):
                yield of_node(run, number, f"{_IB_HCA}={value} matches none of {joined(names)}")


def _part_of_port(run: Circumstances) -> Found:
    """Devices that NCCL_IB_HCA leaves out, and that share a physical port with one that it takes."""
    for number, node, _ in nodes_with_rdma(run):
        nics = rdma_nics(node)
        for value in filter(None, run.values(_IB_HCA)):
            taken = [nic for nic in nics if _matches(value, nic.name)]
            ports = {nic.port for nic in taken if nic.port}
            left = [nic.name for nic in nics if nic.port in ports and nic not in taken]
            if left:
                used = joined([nic.name for nic in taken])
                seen = f"{_IB_HCA}={value} takes {used}, and not {joined(left)}, which reaches the same port"
                both = ",".join(nic.name for nic in nics if nic.port in ports)
                yield of_node(run, number, seen, cure=f"export {_IB_HCA}={both}")


def _matches(value: str, nic: str) -> bool:
    """NCCL's filter: ^ excludes, = compares whole names, else prefixes; a colon names a port."""
    excluding, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    name, _, port = nic.partition(":")
    found = False
    for each in value.lstrip("^=").split(","):
        wanted, _, wanted_port = each.strip().partition(":")
        same = name == wanted if exact else bool(wanted) and name.startswith(wanted)
        found = found or (same and wanted_port in ("", port or "1"))
    return found is not excluding


def _not_loadable(
    run: Circumstances, number: int, ranks: Sequence[RankFacts], without: Sequence[RankFacts], said: str
) -> Found:
    """Of processes of a node, for some of which the loader does not find a library."""
    if without:
        seen = f"{said} for rank {joined(str(each.rank) for each in without)}"
        yield of_node(run, number, seen, Confidence.LIKELY)
    elif not ranks:
        yield Unread(run.on(number), "no process of this node was looked at")
    else:
        yield from islice((why for r in ranks for why in unread(run.on(number), r.unknown, "loadable")), 1)


def _no_verbs(run: Circumstances) -> Found:
    for number, _, ranks in nodes_with_rdma(run):
        without = [each for each in ranks if _VERBS in each.loadable and each.loadable[_VERBS] is None]
        yield from _not_loadable(run, number, ranks, without, f"the loader finds no {_VERBS}")


def _no_provider(run: Circumstances) -> Found:
    for number, node, ranks in nodes_with_rdma(run):
        wanted = {_DRIVER_PROVIDERS.get(nic.driver or "") for nic in rdma_nics(node)} - {None}
        for rank in ranks:
            have = rank.verbs_providers
            if have is None:
                yield from unread(run.on(number, f"rank {rank.rank}"), rank.unknown, "verbs_providers")
            missing = sorted(each for each in wanted if each and have is not None and each not in have)
            if have and missing and rank.loadable.get(_VERBS, "unknown") is not None:
                seen = f"rank {rank.rank}: libibverbs has drivers for {joined(have)}, and none for {joined(missing)}"
                yield of_node(run, number, seen, Confidence.LIKELY)


def _no_device_files(run: Circumstances) -> Found:
    for number, node, ranks in nodes_with_rdma(run):
        up = {nic.name for nic in rdma_nics(node) if nic.state == "active"}
        files = [port.device_file for port in node.snapshot.rdma_ports if port.device_file and port.nic in up]
        for rank in ranks if files else ():
            if not rank.device_files:
                yield Unread(run.on(number, f"rank {rank.rank}"), "no device file of it is known, not even a GPU's")
                continue
            usable = set(rank.device_files) - set(rank.denied_device_files)
            if usable.isdisjoint(files):
                denied = not set(rank.denied_device_files).isdisjoint(files)
                seen = f"rank {rank.rank} {'may not open' if denied else 'has no'} {joined(files)}"
                yield of_node(run, number, seen)


def _efa(run: Circumstances) -> Found:
    for number, node, ranks in nodes_with_rdma(run):
        if not any(nic.kind is NicKind.EFA for nic in node.nics):
            continue
        without = [
            each
            for each in ranks
            if _PLUGIN in each.loadable
            and not any(name.startswith("libnccl-net") and path for name, path in each.loadable.items())
            and not any(name.startswith("libnccl-net") for name in each.libraries)
        ]
        yield from _not_loadable(run, number, ranks, without, f"EFA, and the loader finds no {_PLUGIN}")


def _no_nic(run: Circumstances) -> Found:
    """Of nodes that have to do with others."""
    bare = {number for number, node in run.nodes.items() if not rdma_nics(node)}
    pairs = frozenset(pair for pair in run.across if bare & {run.wiring.gpus[gpu].node for gpu in pair})
    if pairs:
        hosts = joined([run.on(number) for number in sorted(bare)])
        yield Sighting(subject=hosts, seen=f"no RDMA NIC is active on {hosts}", pairs=pairs)


def _despite(run: Circumstances) -> Found:
    by_nic = dict[str, list[Pair]]()
    for pair in run.across:
        nics = [nic.name for gpu in pair for nic in run.wiring.rdma_nics(gpu)]
        if nics and any(each.network == SOCKET for each in (run.staged or {}).get(pair, ())):
            by_nic.setdefault(nics[0], []).append(pair)
    for name, pairs in by_nic.items():
        yield of_pairs(run, pairs, f"sockets between the nodes, although {name} is up", Confidence.WEAK)


def _log_disabled(staged: Staged) -> LoggedReason | None:
    if not by_sockets(staged):
        return None
    found = [("NCCL_IB_DISABLE", value) for value in staged.settings("NCCL_IB_DISABLE") if value not in ("", "0")]
    found += [("NCCL_NET", value) for value in staged.settings("NCCL_NET") if value.lower() == "socket"]
    return in_log(found)


def _log_filtered(staged: Staged) -> LoggedReason | None:
    if not by_sockets(staged) or not staged.found(RemarkKind.NO_RDMA_DEVICE):
        return None
    return in_log((_IB_HCA, value) for value in staged.settings(_IB_HCA) if value)


_log_no_verbs = remark_in_log(
    RemarkKind.NO_VERBS_LIBRARY,
    "install libibverbs (rdma-core) where the ranks run",
    by_sockets,
    "sockets between nodes: {.text}",
)


_RDMA_INTERFACE = re.compile(r"(?:hsn|ib|efa|mlx|roce|opa)\w*\d", re.ASCII)
"""Interfaces of networks for RDMA: HPE Slingshot's, IP over InfiniBand, and those that people name so."""


def _signs_of_rdma(staged: Staged) -> Iterator[str]:
    """What shows that there is a network for RDMA although NCCL found no device of it."""
    for name in staged.interfaces:
        if _RDMA_INTERFACE.match(name):
            yield f"the interface {name} is one of a network for RDMA"
    if staged.plugin:
        yield "a plugin for such a network is loaded"
    devices = staged.found(RemarkKind.RDMA_DEVICES)
    if devices:
        yield f"there are RDMA devices: {devices[0].text}"


def _log_no_nic(staged: Staged) -> LoggedReason | None:
    """No RDMA device anywhere in the job, which is also what a container without /dev/infiniband prints."""
    if not by_sockets(staged) or staged.rdma or staged.found(RemarkKind.NO_VERBS_LIBRARY):
        return None
    processes = [each for each in (staged.source, staged.destination) if each.notes]
    if not processes or any(_signs_of_rdma(staged)):
        return None
    if not all(any(note.kind is RemarkKind.NO_RDMA_DEVICE for note in process.notes) for process in processes):
        return None
    return LoggedReason(
        "sockets between nodes on which NCCL found no RDMA device, as in a container without /dev/infiniband",
        "ls /sys/class/infiniband on the nodes: where it is empty there is nothing to repair, else give the container "
        "/dev/infiniband",
        is_proven=False,
    )


def _log_despite(staged: Staged) -> LoggedReason | None:
    if not by_sockets(staged):
        return None
    sign = next(_signs_of_rdma(staged), None)
    if sign is not None:
        return LoggedReason(
            f"sockets between nodes, although {sign}",
            "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV shows why NCCL does not use it: /dev/infiniband in the "
            "container, libibverbs, or the network's plugin may be missing",
        )
    if staged.rdma:
        return LoggedReason(
            "sockets between nodes that found no RDMA device, in a job in which others did",
            "see that these nodes' ports are up (gpubench topo), and that their containers have /dev/infiniband",
        )
    return None


_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_AREAL = "https://github.com/areal-project/AReaL/issues/639"
_NET_LINES = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV gpubench allreduce"


NETWORK = Family.of(
    "network",
    "Networks between nodes",
    Condition(
        id="nccl-ib-disabled",
        title="NCCL_IB_DISABLE=1 or NCCL_NET=Socket: NCCL uses network Socket although InfiniBand or RoCE is there",
        detection="the variables of every rank and of NCCL's files, on nodes with RDMA NICs; NCCL's log",
        settles="gpubench allreduce over two nodes, and the same with them unset",
        cure="unset NCCL_IB_DISABLE NCCL_NET",
        look=_disabled,
        in_log=_log_disabled,
        implies=("sockets-despite-rdma",),
    ),
    Condition(
        id="nccl-ib-hca",
        title="NCCL_IB_HCA matches no device: NET/IB : No device found, network Socket",
        detection="NCCL_IB_HCA (^ excludes, = is exact, else prefixes) against the RDMA devices of every node",
        settles="ibdev2netdev; ls /sys/class/infiniband",
        cure="unset NCCL_IB_HCA, or name devices that this node has",
        look=_filtered,
        in_log=_log_filtered,
        implies=("sockets-despite-rdma",),
    ),
    Condition(
        id="nccl-ib-hca-half-port",
        title="NCCL_IB_HCA takes one of two devices behind one port: half of its rate (12 to 13 GB/s on DGX Spark)",
        detection="NCCL_IB_HCA against the RDMA devices that share a physical port (sys_image_guid, phys_port_name)",
        settles="ibdev2netdev; gpubench allreduce with both devices, and with one",
        cure="name both devices of the port in NCCL_IB_HCA",
        link="https://github.com/NVIDIA/dgx-spark-playbooks/issues/102",
        look=_part_of_port,
    ),
    Condition(
        id="libibverbs-missing",
        title="Failed to open libibverbs.so: NCCL uses network Socket (rdma-core is not in the container)",
        detection="where the loader would find libibverbs.so.1, of every rank on a node with RDMA NICs; NCCL's log",
        settles="ldconfig -p | grep libibverbs inside the container",
        cure="apt install libibverbs1 ibverbs-providers, or dnf install rdma-core, where the ranks run",
        link="https://github.com/NVIDIA/nccl/issues/489",
        look=_no_verbs,
        in_log=_log_no_verbs,
        implies=("verbs-provider-missing", "sockets-despite-rdma"),
    ),
    Condition(
        id="verbs-provider-missing",
        title="libibverbs: no userspace device-specific driver found for the NIC (ibverbs-providers)",
        seen_as=("libibverbs: Warning: couldn't load driver", "no userspace device-specific driver found"),
        detection="/etc/libibverbs.d of every rank against the kernel drivers of the RDMA NICs",
        settles="ibv_devices inside the container",
        cure="apt install ibverbs-providers where the ranks run",
        link="https://github.com/NVIDIA/nccl/issues/465",
        look=_no_provider,
        implies=("sockets-despite-rdma",),
    ),
    Condition(
        id="infiniband-files-missing",
        title="No /dev/infiniband/uverbs in the container: NET/IB : No device found, network Socket",
        seen_as=("NET/IB : No device found.", "Using network Socket"),
        detection="the device file of every active port against those that a rank has and may open",
        settles="ls -l /dev/infiniband inside the container",
        cure="docker run --device=/dev/infiniband --ulimit memlock=-1; in Kubernetes the RDMA device plugin",
        link=_AREAL,
        look=_no_device_files,
        implies=("sockets-despite-rdma",),
    ),
    Condition(
        id="efa-plugin-missing",
        title="EFA without the aws-ofi-nccl plugin: NCCL uses network Socket on AWS",
        detection="EFA devices, and no libnccl-net.so that the loader finds",
        settles=f"{_NET_LINES}: `NET/OFI Selected Provider is efa`",
        cure="install aws-ofi-nccl and put it into LD_LIBRARY_PATH; FI_PROVIDER=efa",
        link="https://github.com/aws/aws-ofi-nccl",
        look=_efa,
        implies=("sockets-despite-rdma",),
    ),
    Condition(
        id="no-rdma-nic",
        title="No RDMA NIC (InfiniBand, RoCE, EFA): NCCL uses network Socket between nodes",
        detection="no active RDMA device on a node of several; `NET/IB : No device found` on both in NCCL's log",
        settles="ls /sys/class/infiniband; lspci | grep -i mellanox",
        cure="nothing to repair, unless the nodes have InfiniBand or RoCE. Sockets do better with "
        "NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD: gpubench allreduce with 4 and without says whether",
        look=_no_nic,
        in_log=_log_no_nic,
        by_design=True,
    ),
    Condition(
        id="sockets-despite-rdma",
        title="NCCL uses network Socket although RDMA devices are there",
        detection="`via NET/Socket` between nodes whose RDMA NICs are up, or that NCCL's log lists",
        settles=_NET_LINES,
        cure="NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET shows why: libibverbs or /dev/infiniband may be missing",
        link=_AREAL,
        look=_despite,
        in_log=_log_despite,
        general=True,
    ),
    link=_ENV,
)


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
