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
    unset,
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
    judged_errors,
    nodes_with_rdma,
    of_device,
    of_node,
    of_pairs,
    rdma_nics,
    unread,
)
from gpubench.conditions.nccl_settings import blame, in_log
from gpubench.model.facts.health import port_errors
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import RDMA_MTUS, NicFacts, NicKind, roce_mtu_bytes
from gpubench.model.paths.nccl_log import SIGNS_OF_RDMA, RemarkKind
from gpubench.model.paths.topology import UNKNOWN_PATH, Topology, card_gbit_s, is_below_card
from gpubench.model.paths.transport import Confidence, Pair
from gpubench.model.results.report import Effect
from gpubench.model.results.speed import is_slow
from gpubench.model.terms.units import counted

_IB_HCA = "NCCL_IB_HCA"
_NET_LINES = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV gpubench allreduce"
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
    """Devices that NCCL_IB_HCA leaves out although they share a physical port with one that it selects."""
    for number, node, _ in nodes_with_rdma(run):
        nics = rdma_nics(node)
        for value in filter(None, run.values(_IB_HCA)):
            taken = [nic for nic in nics if _matches(value, nic.name)]
            ports = {nic.port for nic in taken if nic.port}
            left = [nic.name for nic in nics if nic.port in ports and nic not in taken]
            if left:
                used = joined([nic.name for nic in taken])
                seen = f"{_IB_HCA}={value} selects {used}, but not {joined(left)}, which uses the same port"
                both = ",".join(nic.name for nic in nics if nic.port in ports)
                yield of_node(run, number, seen, cure=f"export {_IB_HCA}={both}")


def _matches(value: str, nic: str) -> bool:
    """NCCL's filter: ^ excludes, = compares whole names, otherwise prefixes; a colon names a port."""
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
    if without:
        seen = f"{said} for rank {joined(str(each.rank) for each in without)}"
        yield of_node(run, number, seen, Confidence.LIKELY)
    elif not ranks:
        yield Unread(run.on(number), "no process of this node was examined")
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
                seen = f"rank {rank.rank}: libibverbs has drivers for {joined(have)}, but none for {joined(missing)}"
                yield of_node(run, number, seen, Confidence.LIKELY)


def _no_device_files(run: Circumstances) -> Found:
    for number, node, ranks in nodes_with_rdma(run):
        up = {nic.name for nic in rdma_nics(node) if nic.state == "active"}
        files = [port.device_file for port in node.snapshot.rdma_ports if port.device_file and port.nic in up]
        for rank in ranks if files else ():
            if not rank.device_files:
                yield Unread(run.on(number, f"rank {rank.rank}"), "its device files are unknown")
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
        yield from _not_loadable(run, number, ranks, without, f"EFA, but the loader finds no {_PLUGIN}")


def _no_nic(run: Circumstances) -> Found:
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
    "apt install libibverbs1 ibverbs-providers. Install it where the ranks run",
    by_sockets,
    "sockets between nodes: {.text}",
)

_RDMA_INTERFACE = re.compile(r"(?:hsn|ib|efa|mlx|roce|opa)\w*\d", re.ASCII)
"""Interfaces of RDMA networks: HPE Slingshot, IP over InfiniBand, and other usual names."""


def _signs_of_rdma(staged: Staged) -> Iterator[str]:
    for name in staged.interfaces:
        if _RDMA_INTERFACE.match(name):
            yield f"the interface {name} belongs to an RDMA network"
    if staged.plugin:
        yield "an RDMA network plugin is loaded"
    devices = staged.found(*SIGNS_OF_RDMA)
    if devices:
        yield f"the log lists RDMA devices: {devices[0].text}"


def _log_no_nic(staged: Staged) -> LoggedReason | None:
    if not by_sockets(staged) or staged.rdma or staged.found(RemarkKind.NO_VERBS_LIBRARY):
        return None
    processes = [each for each in (staged.source, staged.destination) if each.notes]
    if not processes or any(_signs_of_rdma(staged)):
        return None
    if not all(any(note.kind is RemarkKind.NO_RDMA_DEVICE for note in process.notes) for process in processes):
        return None
    return LoggedReason(
        "sockets between nodes without an RDMA device, or in containers without /dev/infiniband",
        "ls /sys/class/infiniband. If it is empty on the nodes, there is nothing to repair; otherwise give the "
        "container /dev/infiniband",
        is_proven=False,
    )


def _log_despite(staged: Staged) -> LoggedReason | None:
    if not by_sockets(staged):
        return None
    sign = next(_signs_of_rdma(staged), None)
    if sign is not None:
        return LoggedReason(
            f"sockets between nodes, although {sign}",
            f"{_NET_LINES}. The log shows why NCCL does not use it: /dev/infiniband in the container, libibverbs, or "
            "the network's plugin may be missing",
        )
    if staged.rdma:
        return LoggedReason(
            "sockets between nodes without an RDMA device, although other nodes of the job have one",
            "gpubench topo. Check that the ports of these nodes are up and that their containers have /dev/infiniband",
        )
    return None


_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_AREAL = "https://github.com/areal-project/AReaL/issues/639"

NETWORK = Family.of(
    "network",
    "Networks between nodes",
    Condition(
        id="nccl-ib-disabled",
        title="NCCL_IB_DISABLE=1 or NCCL_NET=Socket: NCCL uses network Socket although there is InfiniBand or RoCE",
        detection="the variables of every rank and of NCCL's files, on nodes with RDMA NICs; NCCL's log",
        settles="gpubench allreduce over two nodes, with and without these variables",
        cure=unset("NCCL_IB_DISABLE", "NCCL_NET"),
        look=_disabled,
        in_log=_log_disabled,
        implies=("sockets-despite-rdma",),
    ),
    Condition(
        id="nccl-ib-hca",
        title="NCCL_IB_HCA matches no device: NET/IB : No device found, network Socket",
        detection="NCCL_IB_HCA (^ excludes, = is exact, otherwise prefixes) against the RDMA devices of every node",
        settles="ibdev2netdev; ls /sys/class/infiniband",
        cure="unset NCCL_IB_HCA. Or set it to devices of this node (ls /sys/class/infiniband)",
        look=_filtered,
        in_log=_log_filtered,
        implies=("sockets-despite-rdma",),
    ),
    Condition(
        id="nccl-ib-hca-half-port",
        title="NCCL_IB_HCA selects one of two devices of a port: half of the port's rate (12 to 13 GB/s on DGX Spark)",
        detection="NCCL_IB_HCA against the RDMA devices that share a physical port (sys_image_guid, phys_port_name)",
        settles="ibdev2netdev; gpubench allreduce with both devices and with one",
        cure="ibdev2netdev. Name both devices of the port in NCCL_IB_HCA",
        link="https://github.com/NVIDIA/dgx-spark-playbooks/issues/102",
        look=_part_of_port,
    ),
    Condition(
        id="libibverbs-missing",
        title="Failed to open libibverbs.so: NCCL uses network Socket (rdma-core is not in the container)",
        detection="whether the loader finds libibverbs.so.1, for every rank on a node with RDMA NICs; NCCL's log",
        settles="ldconfig -p | grep libibverbs inside the container",
        cure="apt install libibverbs1 ibverbs-providers. Install it where the ranks run; on RPM systems: dnf install "
        "rdma-core",
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
        cure="apt install ibverbs-providers. Install it where the ranks run",
        link="https://github.com/NVIDIA/nccl/issues/465",
        look=_no_provider,
        implies=("sockets-despite-rdma",),
    ),
    Condition(
        id="infiniband-files-missing",
        title="No /dev/infiniband/uverbs in the container: NET/IB : No device found, network Socket",
        seen_as=("NET/IB : No device found.", "Using network Socket"),
        detection="the device file of every active port against the files that a rank has and may open",
        settles="ls -l /dev/infiniband inside the container",
        cure="docker run --device=/dev/infiniband --ulimit memlock=-1. In Kubernetes use the RDMA device plugin",
        link=_AREAL,
        look=_no_device_files,
        implies=("sockets-despite-rdma",),
    ),
    Condition(
        id="efa-plugin-missing",
        title="EFA without the aws-ofi-nccl plugin: NCCL uses network Socket on AWS",
        detection="EFA devices, but no libnccl-net.so that the loader finds",
        settles=f"{_NET_LINES}: `NET/OFI Selected Provider is efa`",
        cure="FI_PROVIDER=efa gpubench allreduce. Install aws-ofi-nccl and add it to LD_LIBRARY_PATH; the run "
        "verifies the data",
        link="https://github.com/aws/aws-ofi-nccl",
        look=_efa,
        implies=("sockets-despite-rdma",),
    ),
    Condition(
        id="no-rdma-nic",
        title="No RDMA NIC (InfiniBand, RoCE, EFA): NCCL uses network Socket between nodes",
        detection="no active RDMA device on one of several nodes; `NET/IB : No device found` on both in NCCL's log",
        settles="ls /sys/class/infiniband; lspci | grep -i mellanox",
        cure="Nothing to repair, unless the nodes have InfiniBand or RoCE. Sockets may be faster with "
        "NCCL_SOCKET_NTHREADS=4 and NCCL_NSOCKS_PERTHREAD=4: compare gpubench allreduce with and without them",
        look=_no_nic,
        in_log=_log_no_nic,
        by_design=True,
    ),
    Condition(
        id="sockets-despite-rdma",
        title="NCCL uses network Socket although there are RDMA devices",
        detection="`via NET/Socket` between nodes whose RDMA NICs are up, or listed in NCCL's log",
        settles=_NET_LINES,
        cure=f"{_NET_LINES}. The log shows why: libibverbs or /dev/infiniband may be missing",
        link=_AREAL,
        look=_despite,
        in_log=_log_despite,
        general=True,
    ),
    link=_ENV,
)

_GID_INDEX = "NCCL_IB_GID_INDEX"
_NOT_ACTIVE = ("down", "init", "armed", "defer", "nop")  # Names of states without data (Linux, infiniband/core/sysfs.c)
_ROCE_V2 = "RoCE v2"
_VIRTUAL = "Virtual Function"
_FAR_BELOW_CARD = 0.25  # A ConnectX-7 on a 100 Gb/s switch may be intended; less is two generations apart
_BELOW_ITS_SWITCH = ("PIX", "PXB")
_OTHER_MACHINE = frozenset(("GPU models", "product", "CPU"))  # Traits of another machine, which may have other NICs
_MOST_ODD = 0.25  # Share of a node's GPUs: if more have fewer NICs than the rest, the node may be built so


@in_each_node
def _ports_down(run: Circumstances) -> Found:
    for number, node, _ in nodes_with_rdma(run):
        states = [(nic, nic.state) for nic in rdma_nics(node)]
        down = [nic for nic, state in states if state in _NOT_ACTIVE]
        odd = [f"{nic.name} is {state!r}" for nic, state in states if state not in (*_NOT_ACTIVE, "active", None)]
        if odd and not down:
            yield Unread(run.on(number), f"unknown port state: {joined(odd)}")
        every = len(down) == len(states)
        for nic in down:
            if not _is_spare(node, nic):
                seen = f"port is {nic.state}" + (", like all ports of the node" if every and len(down) > 1 else "")
                confidence = Confidence.PROVEN if every else Confidence.LIKELY
                yield of_device(run, number, nic, seen, confidence, effects=() if every else (Effect.SLOW,))


@in_each_node
def _ports_unused(run: Circumstances) -> Found:
    for number, node, _ in nodes_with_rdma(run):
        for nic in rdma_nics(node):
            if nic.state in _NOT_ACTIVE and _is_spare(node, nic):
                yield of_device(run, number, nic, f"port is {nic.state}; it may be unused", Confidence.WEAK)


def _is_spare(node: Topology, nic: NicFacts) -> bool:
    """True if a port that is down may be unused: another port of its card is up; or ports of other models are up and it
    is near no GPU; or it is the only port of the node and not InfiniBand.
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
    return nic.bus_id.rpartition(".")[0] if nic.bus_id else nic.name.partition(":")[0]


@in_each_node
def _below_card(run: Circumstances) -> Found:
    """Negotiated rates against the cards' rates. A finding if the rate is far below, if something is slow, or if the
    profile of this very machine has a higher rate (on bare metal only: virtual machines have other NICs).
    """
    slow = len(run.nodes) > 1 and any(map(is_slow, run.measurements.collectives))
    for number, node, _ in nodes_with_rdma(run):
        may_differ = run.profile_asked_for or node.snapshot.machine.virtual_machine is not False
        profile = None if may_differ else run.exact_profile(number)
        usual = min((nic.rate_gbit_s or 0.0 for nic in profile.nic), default=0.0) if profile is not None else 0.0
        best = max((nic.rate_gbit_s or 0.0 for nic in rdma_nics(node) if nic.state == "active"), default=0.0)
        for nic in rdma_nics(node):
            most, rate = card_gbit_s(nic), nic.rate_gbit_s
            if most is not None and rate is not None and nic.state == "active" and is_below_card(nic):
                seen = f"the port runs at {rate:g} Gb/s; {nic.model} cards reach up to {most:g}"
                far = rate < _FAR_BELOW_CARD * most
                expected = f"up to {most:g} Gb/s, if the switch and this variant of the card support it"
                expected += f"; {usual:g} in profile {profile.name}" if profile is not None and rate < usual else ""
                quiet = not far and not slow and not rate == best < usual  # rdma-port-slow reports ports below siblings
                yield of_device(run, number, nic, seen, Confidence.LIKELY, expected=expected, quiet=quiet)


@in_each_node
def _ports_slow(run: Circumstances) -> Found:
    """Compared with active ports of the same model: ports that are down report no rate, or their lowest."""
    for number, node, _ in nodes_with_rdma(run):
        rates: dict[tuple[str | None, NicKind], Counter[float]] = {}
        active = [nic for nic in rdma_nics(node) if nic.rate_gbit_s and nic.state == "active"]
        for nic in active:
            rates.setdefault((nic.model, nic.kind), Counter())[nic.rate_gbit_s or 0.0] += 1
        for nic in active:
            siblings = rates[nic.model, nic.kind]
            usual = max(siblings, key=lambda rate: (siblings[rate], rate))
            if (nic.rate_gbit_s or 0.0) < usual:
                expected = f"{usual:g} Gb/s, like its siblings"
                yield of_device(run, number, nic, f"{nic.rate_gbit_s:g} Gb/s", expected=expected)


@in_each_node
def _port_errors(run: Circumstances) -> Found:
    for number, node, _ in nodes_with_rdma(run):
        nics = {nic.name: nic for nic in node.nics}
        for errors in port_errors(node.snapshot):
            if errors.device in nics:
                yield of_device(run, number, nics[errors.device], errors.seen, **judged_errors(errors))


@in_each_node
def _roce_mtu(run: Circumstances) -> Found:
    for number, node, _ in nodes_with_rdma(run):
        for nic in rdma_nics(node):
            size = roce_mtu_bytes(nic.mtu) if nic.kind is NicKind.ROCE and nic.mtu else None
            if size is not None and size < RDMA_MTUS[-1]:
                seen = f"interface MTU {nic.mtu} limits the RoCE MTU to {size} of {RDMA_MTUS[-1]} bytes"
                interface = next(iter(nic.interfaces), f"$(ls /sys/class/infiniband/{nic.name}/device/net)")
                cure = f"ip link set {interface} mtu 9000. Set it on switches too; RoCE MTU 4096 needs at least 4200"
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
                    seen = f"{_GID_INDEX}={index} is {kinds.get(index, 'not set')} on {port.nic}"
                    yield of_node(run, number, seen, Confidence.PROVEN, port.nic)


def _nics_below(node: Topology) -> dict[str, int | None]:
    nics = [nic for nic in rdma_nics(node) if _VIRTUAL not in (nic.model or "")]
    paths = {gpu.device: [node.matrix[gpu.device][nic.device] for nic in nics] for gpu in node.gpus}
    return {
        name: None if UNKNOWN_PATH in known else sum(path in _BELOW_ITS_SWITCH for path in known)
        for name, known in paths.items()
    }


def _with_fewer_nics(node: Topology) -> dict[str, str]:
    """GPUs with fewer RDMA NICs below their PCIe switch than most GPUs of the node, and the usual number."""
    below = {name: count for name, count in _nics_below(node).items() if count is not None}
    counts = Counter(below.values())
    usual = max(counts, key=lambda count: (counts[count], count), default=0)
    fewer = [name for name, count in below.items() if count < usual]
    few = len(fewer) <= _MOST_ODD * len(below)
    return dict.fromkeys(fewer, f"{usual}, like {counts[usual]} of its siblings") if few else {}


@in_each_node
def _nics_absent(run: Circumstances) -> Found:
    """A missing NIC shows only as a GPU with fewer NICs below its PCIe switch than its siblings."""
    for number, node, _ in nodes_with_rdma(run):
        below = _nics_below(node)
        for name, expected in _with_fewer_nics(node).items():
            seen = f"{counted(below[name] or 0, 'RDMA NIC')} below its PCIe switch"
            yield of_node(run, number, seen, Confidence.LIKELY, name, expected=expected)
        if None in below.values() and len(below) * _MOST_ODD >= 1:
            yield Unread(run.on(number), "paths between GPUs and NICs are unknown, so a missing NIC cannot be detected")


def _nics_differ(run: Circumstances) -> Found:
    """A finding if the node is otherwise the same machine as most others and no other condition names the missing NIC;
    else only a cause.
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
            seen = f"{count} RDMA NICs are up; other nodes have {most}"
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
        likely="the cable, transceiver or switch port; in state INIT, a missing subnet manager",
        aliases=("nic-down",),
        settles="ibstat; the switch's log",
        cure="mlxlink -d DEVICE. Check the cable, transceiver and switch port; in state INIT, start a subnet manager",
        link=_AREAL,
        look=_ports_down,
        in_job=doubted(r"async event ?: port error"),
        implies=("nics-differ",),
    ),
    Condition(
        id="rdma-port-unused",
        title="A spare InfiniBand or RoCE port is down: another port of its card is up, or no port of its model is",
        detection="ports that are down although another port of the card is up, or that are of another model than the "
        "active ports and far from GPUs",
        check="nic_state",
        expected="active, if it is used",
        likely="a port without a cable, which is normal for an unused port",
        settles="ibstat",
        cure="ibstat. If the port is unused, NCCL_IB_HCA=^NAME keeps NCCL off it; else check cable and switch port",
        link="https://github.com/Azure/azurehpc-health-checks",
        look=_ports_unused,
    ),
    Condition(
        id="nic-below-card",
        title="A NIC's port runs at a lower rate than cards of its model reach",
        detection="the negotiated rate against the highest rate of the model, limited by the slot; a finding below "
        f"{_FAR_BELOW_CARD:.0%}, or if all ports are below the profile on bare metal; else only a cause",
        check="nic_state",
        likely="a cable, transceiver or switch with a lower rate, or a slower variant of the card",
        settles="ibstat; mlxlink -d DEVICE",
        cure="mlxlink -d DEVICE. It shows the rates that card, cable and switch port support",
        link="https://github.com/NVIDIA/nccl/issues/2397",
        look=_below_card,
    ),
    Condition(
        id="rdma-port-slow",
        title="InfiniBand or RoCE port runs at a lower rate than its siblings",
        detection="/sys/class/infiniband/*/ports/*/rate against active ports of the same model on the node",
        check="nic_state",
        likely="the cable, transceiver or switch port",
        aliases=("nic-rate",),
        settles="ibstat; mlxlink -d DEVICE",
        cure="mlxlink -d DEVICE. Check the cable, the transceiver and the switch port's configured speed",
        link="https://github.com/NVIDIA/nccl/issues/2397",
        look=_ports_slow,
    ),
    Condition(
        id="nic-absent",
        title="A GPU has fewer RDMA NICs below its PCIe switch than its siblings",
        detection="InfiniBand, RoCE and EFA devices at PIX or PXB of every GPU; reported if at most a quarter of the "
        "node's GPUs have fewer",
        check="nic_state",
        likely="a NIC that fell off the bus, is not assigned to this host or container, or has no driver",
        settles="lspci -tv shows the slot; dmesg | grep -e mlx5 -e pciehp -e AER",
        cure="lspci -d 15b3:. If the NIC is missing, look at dmesg, then reseat or replace it",
        link="https://github.com/NVIDIA/nccl/issues/349",
        look=_nics_absent,
        implies=("nics-differ",),
    ),
    Condition(
        id="rdma-port-errors",
        title="InfiniBand port counts link_downed, symbol_error or receive errors",
        detection="/sys/class/infiniband/*/ports/*/counters: errors counted while p2p or check runs; if the counters "
        "were read only once, large totals (weak evidence)",
        settles="perfquery -x before and after gpubench allreduce over these nodes: growing counters confirm it",
        check="nic_errors",
        likely="the cable, transceiver or switch port",
        aliases=("nic-errors",),
        cure="perfquery -x. Run it again after some traffic; clean or replace cable and transceiver of a port whose "
        "counters grow",
        link="https://github.com/NVIDIA/nccl-tests/issues/112",
        look=_port_errors,
    ),
    Condition(
        id="roce-mtu-small",
        title="RoCE MTU is 1024 because the interface's MTU is 1500",
        detection="the MTU of a RoCE port's interface: RoCE uses the largest of 256 to 4096 that fits with headers",
        settles="ibv_devinfo | grep active_mtu",
        cure="ip link set INTERFACE mtu 9000. Set it on switches too; RoCE MTU 4096 needs at least 4200",
        link="https://github.com/NVIDIA/nccl-tests/issues/112",
        look=_roce_mtu,
    ),
    Condition(
        id="roce-gid-index",
        title="NCCL_IB_GID_INDEX names a GID that is not a RoCE v2 address",
        seen_as=("Got completion with error 12, opcode 0, len 0, vendor err 129", "Call to ibv_modify_qp failed"),
        detection="NCCL_IB_GID_INDEX against gid_attrs/types of every RoCE port",
        settles="show_gids",
        cure="unset NCCL_IB_GID_INDEX. NCCL 2.21 and later finds the address",
        link=_ENV,
        look=_roce_gid,
    ),
    Condition(
        id="nics-differ",
        title="One node has fewer active RDMA NICs than the others",
        detection="active RDMA NICs of every node; a finding if most nodes of the same model and GPUs have more",
        check="nic_state",
        expected="the same number as on most nodes of the job",
        likely="NICs that are missing from the bus or have no driver loaded",
        settles="mpirun gpubench topo names the odd node",
        cure="ibstat. Run it and `lspci -d 15b3:` on the node; remove the node from the job until its ports are up",
        link="https://github.com/NVIDIA/nccl/issues/349",
        look=_nics_differ,
    ),
)
