"""NVLinks between nodes (MNNVL) that exist but are not used."""

from collections.abc import Iterator, Sequence

from gpubench.conditions.circumstances import (
    Circumstances,
    Found,
    Sighting,
    Unread,
    joined,
    removal,
    setting_places,
    unset,
)
from gpubench.conditions.condition import Condition, Family, unread
from gpubench.conditions.logged import doubted, remark_detector
from gpubench.model.facts.snapshot import GpuFacts, NvlinkPeer
from gpubench.model.paths.nccl_log import LogFacts, RemarkKind
from gpubench.model.paths.topology import active_links
from gpubench.model.paths.transport import Confidence
from gpubench.model.paths.wiring import find_network, most_busbw_gb_s
from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.speed import LARGE_BYTES, is_slow
from gpubench.model.terms.ranks import DevicePlace
from gpubench.model.terms.units import format_bandwidth, plural
from gpubench.model.terms.verdict import Cure, Verdict

_IMEX = "nvidia-imex"
# GPU models of NVL72 racks. GB200 NVL4 boards have these GPUs too, but no NVLinks to NVSwitches.
_OF_RACKS = ("GB200", "GB300")
_UNUSED = "mnnvl-unused"
_EXPECTED = "P2P/MNNVL between nodes of one NVLink domain"


def _clusters(run: Circumstances) -> dict[str, dict[int, set[int | None]]]:
    """Return NVLink clusters that span several nodes, as clique ids by cluster UUID and node number."""
    found: dict[str, dict[int, set[int | None]]] = {}
    for number, node in run.nodes.items():
        for gpu in node.gpus:
            domain = None if gpu.fabric is None else gpu.fabric.domain
            if domain is not None:
                found.setdefault(domain[0], {}).setdefault(number, set()).add(domain[1])
    return {uuid: nodes for uuid, nodes in found.items() if len(nodes) > 1}


def _domains(run: Circumstances) -> dict[tuple[str, int | None], list[int]]:
    found: dict[tuple[str, int | None], list[int]] = {}
    for uuid, nodes in _clusters(run).items():
        for number, cliques in nodes.items():
            for clique in cliques:
                found.setdefault((uuid, clique), []).append(number)
    return found


def _clustered_nodes(run: Circumstances) -> list[int]:
    return sorted({number for nodes in _clusters(run).values() for number in nodes})


def _imex_channel(run: Circumstances) -> Found:
    for number in _clustered_nodes(run):
        for rank in run.node_ranks(number):
            if rank.imex_channels == () or (rank.imex_channels is None and "imex_channels" in rank.unknown):
                seen = f"rank {rank.rank} has no channel below /dev/nvidia-caps-imex-channels"
                yield run.node_sighting(number, seen, Confidence.LIKELY)


def _imex_service(run: Circumstances) -> Found:
    for number in _clustered_nodes(run):
        settings = run.nodes[number].snapshot.driver_settings
        service = settings.services.get(_IMEX)
        if service is not None and service.running is False:
            yield run.node_sighting(number, "nvidia-imex does not run", Confidence.LIKELY)
        elif service is None or service.running is None:
            yield from unread(run.subject(number), settings.unknown, f"services.{_IMEX}.running")


def _cliques(run: Circumstances) -> Found:
    """Find clusters whose nodes are in different cliques. Partitions of equal size may be intended."""
    for uuid, nodes in _clusters(run).items():
        sizes = {clique: len(members) for (cluster, clique), members in _domains(run).items() if cluster == uuid}
        if len(sizes) > 1:
            gpus = frozenset(gpu for number in nodes for gpu in run.node_gpus(number))
            least = min(sizes.values())
            small = [number for number, found in nodes.items() if any(sizes[clique] == least for clique in found)]
            parts = ", ".join(f"{plural(size, 'node')} in clique {clique}" for clique, size in sizes.items())
            even = len(set(sizes.values())) == 1 and least > 1
            yield run.nodes_sighting(
                nodes if even else small,
                f"cliques of cluster {uuid} differ: {parts}",
                Confidence.LIKELY,
                gpus=gpus,
                likely=_PARTITIONS if even else "",
                severity=Verdict.WARN if even else None,
            )


_PARTITIONS = "a rack with two or more partitions (NCCL uses NVLink inside a partition, and the network between them)"


def _is_of_rack(gpu: GpuFacts) -> bool:
    """True for a GPU of an NVL72 rack. On boards without NVSwitches, NVLinks lead directly to other GPUs."""
    to_gpus = any(link.peer is NvlinkPeer.GPU for link in gpu.nvlinks or ())
    return not to_gpus and any(model in (gpu.name or "") for model in _OF_RACKS)


def _no_domain(run: Circumstances) -> Found:
    """Find nodes with GPUs of NVL72 racks for which NVML reports no NVLink cluster."""
    without = [
        number
        for number, node in run.nodes.items()
        if node.gpus and all(gpu.fabric is not None and gpu.fabric.domain is None for gpu in node.gpus)
    ]
    bare = [number for number in without if all(map(_is_of_rack, run.nodes[number].gpus))]
    for number in without if len(without) > 1 else ():
        if any(gpu.name is None for gpu in run.nodes[number].gpus):
            yield Unread(run.subject(number), "gpu.name was not read")
    if len(bare) > 1:
        seen = "the fabric information of its GPUs names no cluster (UUID 0)"
        yield run.nodes_sighting(bare, seen, Confidence.LIKELY, severity=Verdict.WARN)


def _unused(run: Circumstances) -> Found:
    """Find slow results inside an NVLink domain that used a network.

    Evidence is NCCL's log, or a bandwidth that the NICs alone could reach.
    """
    rows = [*run.slow, *filter(is_slow, run.measurements.collectives)]
    large = [row for row in rows if row.nodes > 1 and row.size_bytes >= LARGE_BYTES]
    for nodes in _domains(run).values() if large else ():
        if len(nodes) > 1:
            row = max(large, key=lambda row: row.size_bytes)
            if row.nodes > len(nodes):
                continue  # The operation leaves the domain, so it has to use the network
            network = find_network(run.wiring, nodes, row.ranks)
            logged = (row.transport or "").startswith("NET")
            as_network = network is not None and row.reached_gb_s <= most_busbw_gb_s(row, network)
            if not logged and (not as_network or _is_slowed_by_links(run, nodes, row)):
                continue
            nics = "" if network is None else f"; their NICs carry {format_bandwidth(network.node_gb_s, 4)} per node"
            way = f"over {row.transport}" if logged else "as over the network"
            seen = f"{row.collective} reaches {format_bandwidth(row.reached_gb_s, 4)}, {way}{nics}"
            yield run.nodes_sighting(nodes, seen, Confidence.PROVEN if logged else Confidence.LIKELY)


def _is_slowed_by_links(run: Circumstances, nodes: Sequence[int], row: CollectiveRow) -> bool:
    """True if missing NVLinks, rather than the network, explain the low bandwidth."""
    counts = [active_links(gpu) or 0 for number in nodes for gpu in run.nodes[number].gpus]
    due = row.expected_gb_s or row.limit_gb_s
    return min(counts) < max(counts) and due is not None and due * min(counts) / max(counts) < 1.5 * row.reached_gb_s


def _switched_off(run: Circumstances) -> Found:
    for variable in ("NCCL_MNNVL_ENABLE", "NCCL_CUMEM_ENABLE"):
        places = setting_places((variable,), run.facts)
        for number in _clustered_nodes(run) if "0" in run.values(variable) else ():
            yield Sighting(
                subject=run.subject(number),
                seen=f"{variable}=0 in {' and '.join(places)}",
                gpus=run.node_gpus(number),
                places=run.places(number),
                cure=removal((variable,), places),
            )


_NO_CLUSTER = "0.0"


def _unused_in_log(facts: LogFacts) -> Iterator[Sighting]:
    """Find ranks of one clique on several hosts that connect to each other only over a network."""
    domain_of = {
        process: remark.note.about
        for remark in facts.remarks
        if remark.note.kind is RemarkKind.FABRIC and remark.note.about[0] != _NO_CLUSTER
        for process in remark.processes
    }
    for communicator in facts.communicators if domain_of else ():
        members = {member.rank: member for member in communicator.members if member.process in domain_of}
        transports: dict[str, None] = {}
        hosts: dict[str, None] = {}
        for source, peers in communicator.connections.routes_by_source():
            for destination, pair in peers.items():
                ends = [members[rank] for rank in (source, destination) if rank in members]
                of_both = {end.host for end in ends}
                if len(of_both) < 2 or len({domain_of[end.process] for end in ends}) > 1:
                    continue
                hosts.update(dict.fromkeys(sorted(of_both)))
                transports.update(dict.fromkeys(route.transport.name for route in pair.routes))
        if hosts and all(transport.startswith("NET") for transport in transports):
            yield Sighting(
                subject=joined(sorted(hosts)),
                names=tuple(sorted(hosts)),
                places=tuple(map(DevicePlace, sorted(hosts))),
                seen=f"{', '.join(sorted(transports)[:2])} between hosts of one NVLink domain",
            )


_AZURE = "https://github.com/Azure/azhpc-images/pull/506"

MNNVL = Family.of(
    "mnnvl",
    "NVLinks between nodes",
    Condition(
        id="imex-service-stopped",
        title="MNNVL is not used between nodes: the nvidia-imex service is down or not working",
        settles="nvidia-imex-ctl -N",
        command="systemctl enable --now nvidia-imex",
        comment="Run it on every node, with all nodes in nodes_config.cfg.",
        link=_AZURE,
        look=_imex_service,
        expected=_EXPECTED,
        in_log=remark_detector(
            RemarkKind.MNNVL_BROKEN,
            Cure.of("nvidia-imex-ctl -N", comment="It shows the IMEX service of every node."),
            lambda staged: not staged.is_local,
            "NCCL's log: {.text}",
        ),
        in_job=doubted(r"MNNVL .*is available but not working"),
        implies=("imex-channel-missing", _UNUSED),
    ),
    Condition(
        id="imex-channel-missing",
        title="No IMEX channel in the container: CUDA_ERROR_NOT_PERMITTED for fabric handles, MNNVL 0",
        settles="ls /dev/nvidia-caps-imex-channels; grep imex /proc/devices",
        command="nvidia-modprobe -c 0 -s",
        comment="Then give the container /dev/nvidia-caps-imex-channels/channel0.",
        link="https://github.com/NVIDIA/nvbandwidth/issues/39",
        look=_imex_channel,
        expected=_EXPECTED,
        implies=(_UNUSED,),
    ),
    Condition(
        id="mnnvl-clique-differs",
        title="Nodes of one NVLink cluster have different clique ids, so NCCL uses the network (MNNVL 0)",
        settles="`nvidia-smi -q | grep -E 'CliqueId|ClusterUUID'` on every node",
        command="nvidia-smi -q | grep -E 'CliqueId|ClusterUUID'",
        comment="Put the nodes into one partition (nvlsm, or the provider's tool), or run the job inside one clique.",
        link=_AZURE,
        look=_cliques,
        expected=_EXPECTED,
        implies=(_UNUSED,),
    ),
    Condition(
        id="nccl-mnnvl-disabled",
        title="NCCL_MNNVL_ENABLE=0 or NCCL_CUMEM_ENABLE=0 switches off NVLinks between nodes (MNNVL 0)",
        settles="P2P/MNNVL in NCCL's log of a run with both variables unset",
        command=unset("NCCL_MNNVL_ENABLE", "NCCL_CUMEM_ENABLE"),
        link="https://github.com/NVIDIA/nccl/issues/2186",
        look=_switched_off,
        expected=_EXPECTED,
        implies=(_UNUSED,),
        aliases=("nccl-cumem-disabled",),
    ),
    Condition(
        id="mnnvl-no-domain",
        title="GPUs of an NVL72 rack without a cluster UUID: the rack's NVLinks between nodes are not set up",
        settles="`nvidia-smi -q | grep -E 'CliqueId|ClusterUUID'` on every node",
        command="nvidia-smi -q | grep ClusterUUID",
        comment="Start NMX-C or the fabric manager of the rack's NVLink switches, then run it again.",
        link=_AZURE,
        look=_no_domain,
        check="fabric",
        expected="the cluster and clique of its rack",
    ),
    Condition(
        id=_UNUSED,
        title="NCCL uses the network between nodes that NVLinks connect (MNNVL 0)",
        settles="`MNNVL 1` and P2P/MNNVL in NCCL's log (NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT)",
        command="nvidia-imex-ctl -N",
        comment="Then check /dev/nvidia-caps-imex-channels in the container, NCCL_MNNVL_ENABLE and NCCL_CUMEM_ENABLE.",
        link="https://github.com/coreweave/nccl-tests/issues/43",
        look=_unused,
        in_job=_unused_in_log,
        check="collective_bandwidth",
        expected=_EXPECTED,
        likely="IMEX is not running on a node, a container lacks /dev/nvidia-caps-imex-channels, or a setting "
        "forbids it",
        general=True,
    ),
)
