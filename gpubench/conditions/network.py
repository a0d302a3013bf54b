"""Sockets that NCCL uses instead of RDMA, and settings, files or libraries that prevent RDMA. The ports are in
rdma_ports.py.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import islice

from gpubench.conditions.circumstances import Circumstances, Found, Sighting, Unread, joined, rank_names, unset
from gpubench.conditions.condition import Condition, Family, nodes_with_rdma, rdma_nics, unread
from gpubench.conditions.logged import SOCKET, LoggedReason, Staged, remark_detector, uses_sockets
from gpubench.conditions.nccl_settings import blame, in_log
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import NicKind
from gpubench.model.paths.nccl_log import SIGNS_OF_RDMA, RemarkKind
from gpubench.model.paths.nics import port_roles
from gpubench.model.paths.transport import Confidence, Pair
from gpubench.model.terms.verdict import Cure

_IB_HCA = "NCCL_IB_HCA"
_NET_LINES = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV gpubench allreduce"
_VERBS, _PLUGIN = "libibverbs.so.1", "libnccl-net.so"
_PINNED = "A job without RDMA then ends instead of falling back to sockets."
_DRIVER_PROVIDERS = {"mlx5_core": "mlx5", "mlx4_core": "mlx4", "bnxt_en": "bnxt_re", "efa": "efa", "irdma": "irdma"}
"""The libibverbs provider (from rdma-core) for each kernel driver."""


def _disabled(run: Circumstances) -> Found:
    blamed = {"NCCL_IB_DISABLE": run.values("NCCL_IB_DISABLE")} if run.is_on("NCCL_IB_DISABLE") else {}
    networks = tuple(value for value in run.values("NCCL_NET") if value.lower() == "socket")
    blamed |= {"NCCL_NET": networks} if networks else {}
    if blamed and any(rdma_nics(node) for node in run.nodes.values()):
        yield blame(run, dict(blamed), Confidence.PROVEN, frozenset(run.remote_pairs) or None)


def _filtered(run: Circumstances) -> Found:
    for number, node in nodes_with_rdma(run):
        for value in run.values(_IB_HCA):
            names = [nic.name for nic in rdma_nics(node)]
            if value and not any(_matches(value, name) for name in names):
                yield run.node_sighting(number, f"{_IB_HCA}={value} matches none of {joined(names)}")


def _part_of_port(run: Circumstances) -> Found:
    """Find devices that NCCL_IB_HCA does not select although they share a physical port with a selected device."""
    for number, node in nodes_with_rdma(run):
        nics = rdma_nics(node)
        for value in filter(None, run.values(_IB_HCA)):
            taken = [nic for nic in nics if _matches(value, nic.name)]
            ports = {nic.port for nic in taken if nic.port}
            left = [nic.name for nic in nics if nic.port in ports and nic not in taken]
            if left:
                used = joined([nic.name for nic in taken])
                seen = f"{_IB_HCA}={value} selects {used}, but not {joined(left)}, which uses the same port"
                both = ",".join(nic.name for nic in nics if nic.port in ports)
                yield run.node_sighting(number, seen, cure=Cure.of(f"export {_IB_HCA}={both}"))


def _matches(value: str, nic: str) -> bool:
    """Apply NCCL's NIC filter.

    ^ excludes NICs, = compares whole names instead of prefixes, and a colon precedes a port number.
    """
    excluding, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    name, _, port = nic.partition(":")
    found = False
    for entry in value.lstrip("^=").split(","):
        wanted, _, wanted_port = entry.strip().partition(":")
        same = name == wanted if exact else bool(wanted) and name.startswith(wanted)
        found = found or (same and wanted_port in ("", port or "1"))
    return found is not excluding


def _not_loadable(
    run: Circumstances, number: int, ranks: Sequence[RankFacts], without: Sequence[RankFacts], said: str
) -> Found:
    if without:
        seen = f"{said} for rank {joined(str(rank.rank) for rank in without)}"
        yield run.node_sighting(number, seen, Confidence.LIKELY)
    elif not ranks:
        yield Unread(run.subject(number), "no process of this node was examined")
    else:
        yield from islice((why for r in ranks for why in unread(run.subject(number), r.unknown, "loadable")), 1)


def _no_verbs(run: Circumstances) -> Found:
    for number, _ in nodes_with_rdma(run):
        ranks = run.node_ranks(number)
        without = [rank for rank in ranks if _VERBS in rank.loadable and rank.loadable[_VERBS] is None]
        yield from _not_loadable(run, number, ranks, without, f"the dynamic loader finds no {_VERBS}")


def _no_provider(run: Circumstances) -> Found:
    for number, node in nodes_with_rdma(run):
        ranks = run.node_ranks(number)
        wanted = {_DRIVER_PROVIDERS.get(nic.driver or "") for nic in rdma_nics(node)} - {None}
        for rank in ranks:
            have = rank.verbs_providers
            if have is None:
                yield from unread(run.subject(number, f"rank {rank.rank}"), rank.unknown, "verbs_providers")
            missing = sorted(name for name in wanted if name and have is not None and name not in have)
            if have and missing and rank.loadable.get(_VERBS, "unknown") is not None:
                seen = f"rank {rank.rank}: libibverbs has drivers for {joined(have)}, but none for {joined(missing)}"
                yield run.node_sighting(number, seen, Confidence.LIKELY)


def _no_device_files(run: Circumstances) -> Found:
    for number, node in nodes_with_rdma(run):
        ranks = run.node_ranks(number)
        up = {nic.name for nic in rdma_nics(node) if nic.state == "active"}
        files = [port.device_file for port in node.snapshot.rdma_ports if port.device_file and port.nic in up]
        for rank in ranks if files else ():
            if not rank.device_files:
                yield Unread(run.subject(number, f"rank {rank.rank}"), "its device files are unknown")
                continue
            usable = set(rank.device_files) - set(rank.denied_device_files)
            if usable.isdisjoint(files):
                denied = not set(rank.denied_device_files).isdisjoint(files)
                seen = f"rank {rank.rank} {'may not open' if denied else 'has no'} {joined(files)}"
                yield run.node_sighting(number, seen)


def _some_denied(run: Circumstances) -> Found:
    """Find ranks that may not open some RDMA device files, so they use fewer NICs. A missing file may be intended."""
    for number, node in nodes_with_rdma(run):
        ranks = run.node_ranks(number)
        if not any(rank.denied_device_files for rank in ranks):
            continue
        up = {nic.name for nic in port_roles(node).gpu_ports if nic.state == "active"}
        files = {port.device_file for port in node.snapshot.rdma_ports if port.device_file and port.nic in up}
        by_files: dict[tuple[str, ...], list[RankFacts]] = {}
        for rank in ranks:
            denied = tuple(sorted(files.intersection(rank.denied_device_files)))
            if denied and not files <= set(denied):
                by_files.setdefault(denied, []).append(rank)
        for denied, having in by_files.items():
            yield run.rank_sighting(
                having, f"may not open {joined(denied)}", names=(run.subject(number, rank_names(having)),)
            )


def _efa(run: Circumstances) -> Found:
    for number, node in nodes_with_rdma(run):
        ranks = run.node_ranks(number)
        if not any(nic.kind is NicKind.EFA for nic in node.nics):
            continue
        without = [
            rank
            for rank in ranks
            if _PLUGIN in rank.loadable
            and not any(name.startswith("libnccl-net") and path for name, path in rank.loadable.items())
            and not any(name.startswith("libnccl-net") for name in rank.libraries)
        ]
        yield from _not_loadable(run, number, ranks, without, f"EFA, but the dynamic loader finds no {_PLUGIN}")


def _no_nic(run: Circumstances) -> Found:
    bare = {number for number, node in run.nodes.items() if not rdma_nics(node)}
    pairs = frozenset(pair for pair in run.remote_pairs if bare & {run.wiring.gpus[gpu].node for gpu in pair})
    if pairs:
        hosts = joined([run.subject(number) for number in sorted(bare)])
        places = tuple(place for number in sorted(bare) for place in run.places(number))
        yield Sighting(subject=hosts, seen=f"no RDMA NIC is active on {hosts}", pairs=pairs, places=places)


def _despite(run: Circumstances) -> Found:
    by_nic = dict[str, list[Pair]]()
    for pair in run.remote_pairs:
        nics = [nic.name for gpu in pair for nic in run.wiring.rdma_nics(gpu)]
        if nics and any(transport.network == SOCKET for transport in (run.staged or {}).get(pair, ())):
            by_nic.setdefault(nics[0], []).append(pair)
    for name, pairs in by_nic.items():
        yield run.pair_sighting(pairs, f"sockets between the nodes, although {name} is up", Confidence.WEAK)


def _log_disabled(staged: Staged) -> LoggedReason | None:
    if not uses_sockets(staged):
        return None
    found = [("NCCL_IB_DISABLE", value) for value in staged.settings("NCCL_IB_DISABLE") if value not in ("", "0")]
    found += [("NCCL_NET", value) for value in staged.settings("NCCL_NET") if value.lower() == "socket"]
    return in_log(found)


def _log_filtered(staged: Staged) -> LoggedReason | None:
    if not uses_sockets(staged) or not staged.find_notes(RemarkKind.NO_RDMA_DEVICE):
        return None
    return in_log((_IB_HCA, value) for value in staged.settings(_IB_HCA) if value)


_log_no_verbs = remark_detector(
    RemarkKind.NO_VERBS_LIBRARY,
    Cure.of("apt install libibverbs1 ibverbs-providers", comment="Install it where the ranks run."),
    uses_sockets,
    "sockets between nodes: {.text}",
)

_RDMA_INTERFACE = re.compile(r"(?:hsn|ib|efa|mlx|roce|opa)\w*\d", re.ASCII)
"""Usual names of RDMA network interfaces, including HPE Slingshot (hsn) and IP over InfiniBand (ib)."""


def _signs_of_rdma(staged: Staged) -> Iterator[str]:
    for name in staged.interfaces:
        if _RDMA_INTERFACE.match(name):
            yield f"the interface {name} belongs to an RDMA network"
    if staged.plugin:
        yield "an RDMA network plugin is loaded"
    devices = staged.find_notes(*SIGNS_OF_RDMA)
    if devices:
        yield f"the log lists RDMA devices: {devices[0].text}"


def _log_no_nic(staged: Staged) -> LoggedReason | None:
    if not uses_sockets(staged) or staged.rdma or staged.find_notes(RemarkKind.NO_VERBS_LIBRARY):
        return None
    processes = [process for process in (staged.source, staged.destination) if process.notes]
    if not processes or any(_signs_of_rdma(staged)):
        return None
    if not all(any(note.kind is RemarkKind.NO_RDMA_DEVICE for note in process.notes) for process in processes):
        return None
    return LoggedReason(
        "sockets between nodes without an RDMA device, or in containers without /dev/infiniband",
        Cure.of(
            "ls /sys/class/infiniband",
            comment="If it is empty on the nodes, there is nothing to repair. Otherwise, give the container "
            "/dev/infiniband.",
        ),
        is_proven=False,
    )


def _log_despite(staged: Staged) -> LoggedReason | None:
    if not uses_sockets(staged):
        return None
    sign = next(_signs_of_rdma(staged), None)
    if sign is not None:
        return LoggedReason(
            f"sockets between nodes, although {sign}",
            Cure.of(
                _NET_LINES,
                comment="The log shows why NCCL does not use it. The container may lack /dev/infiniband, "
                "libibverbs or the network plugin. Once it works, export NCCL_NET=IB (EFA: NCCL_NET='AWS "
                f"Libfabric'). {_PINNED}",
            ),
        )
    if staged.rdma:
        return LoggedReason(
            "sockets between nodes without an RDMA device, although other nodes of the job have one",
            Cure.of(
                "gpubench topo",
                comment="Check that the ports of these nodes are up and that their containers have /dev/infiniband.",
            ),
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
        settles="`gpubench allreduce` over two nodes, with and without these variables",
        command=unset("NCCL_IB_DISABLE", "NCCL_NET"),
        link="https://github.com/NVIDIA/nccl-tests/issues/188",
        look=_disabled,
        in_log=_log_disabled,
        implies=("sockets-despite-rdma",),
    ),
    Condition(
        id="nccl-ib-hca",
        title="NCCL_IB_HCA matches no device: NET/IB : No device found, network Socket",
        settles="ibdev2netdev; ls /sys/class/infiniband",
        command="unset NCCL_IB_HCA",
        comment="Or set it to devices of this node, which `ls /sys/class/infiniband` lists.",
        link="https://github.com/NVIDIA/nccl-tests/issues/78",
        look=_filtered,
        in_log=_log_filtered,
        implies=("sockets-despite-rdma",),
    ),
    Condition(
        id="nccl-ib-hca-half-port",
        title="NCCL_IB_HCA selects one of two devices of a port: half of the port's rate (12 to 13 GB/s on DGX Spark)",
        settles="`ibdev2netdev`, and `gpubench allreduce` with both devices and with one",
        command="ibdev2netdev",
        comment="Name both devices of the port in NCCL_IB_HCA.",
        link="https://github.com/NVIDIA/dgx-spark-playbooks/issues/102",
        look=_part_of_port,
    ),
    Condition(
        id="libibverbs-missing",
        title="Failed to open libibverbs.so: NCCL uses network Socket (rdma-core is not in the container)",
        settles="`ldconfig -p | grep libibverbs` inside the container",
        command="apt install libibverbs1 ibverbs-providers",
        comment="Install it where the ranks run. On RPM systems, run `dnf install rdma-core`.",
        link="https://github.com/NVIDIA/nccl/issues/489",
        look=_no_verbs,
        in_log=_log_no_verbs,
        implies=("verbs-provider-missing", "sockets-despite-rdma"),
    ),
    Condition(
        id="verbs-provider-missing",
        title="libibverbs: no userspace device-specific driver found for the NIC (ibverbs-providers)",
        settles="`ibv_devices` inside the container",
        command="apt install ibverbs-providers",
        comment="Install it where the ranks run.",
        link="https://github.com/NVIDIA/nccl/issues/465",
        look=_no_provider,
        implies=("sockets-despite-rdma",),
    ),
    Condition(
        id="infiniband-files-missing",
        title="No /dev/infiniband/uverbs in the container: NET/IB : No device found, network Socket",
        settles="`ls -l /dev/infiniband` inside the container",
        comment="Start the container with `docker run --device=/dev/infiniband --ulimit memlock=-1`. In "
        "Kubernetes, use the RDMA device plugin.",
        link=_AREAL,
        look=_no_device_files,
        implies=("sockets-despite-rdma",),
    ),
    Condition(
        id="rdma-file-denied",
        title="A rank cannot open some /dev/infiniband/uverbs files, so it uses fewer NICs than the node has",
        settles="`ls -l /dev/infiniband` inside the container",
        check="ranks_alike",
        expected="device files that every rank can open",
        likely="the file's mode, or the device list of the container or control group",
        command="ls -l /dev/infiniband",
        comment="Give the container all of /dev/infiniband. With Slurm, check cgroup.conf.",
        link=_AREAL,
        look=_some_denied,
    ),
    Condition(
        id="efa-plugin-missing",
        title="EFA without the aws-ofi-nccl plugin: NCCL uses network Socket on AWS",
        settles=f"`{_NET_LINES}`, which logs `NET/OFI Selected Provider is efa`",
        command="FI_PROVIDER=efa gpubench allreduce",
        comment="Install aws-ofi-nccl and add it to LD_LIBRARY_PATH. The run verifies the data. Then export "
        f"NCCL_NET='AWS Libfabric'. {_PINNED}",
        link="https://github.com/aws/aws-ofi-nccl",
        look=_efa,
        implies=("sockets-despite-rdma",),
    ),
    Condition(
        id="no-rdma-nic",
        title="No RDMA NIC (InfiniBand, RoCE, EFA): NCCL uses network Socket between nodes",
        settles="ls /sys/class/infiniband; lspci | grep -i mellanox",
        comment="Nothing to repair, unless the nodes have InfiniBand or RoCE. Sockets may be faster with "
        "NCCL_SOCKET_NTHREADS=4 and NCCL_NSOCKS_PERTHREAD=4. Compare `gpubench allreduce` with and "
        "without them.",
        look=_no_nic,
        in_log=_log_no_nic,
        by_design=True,
    ),
    Condition(
        id="sockets-despite-rdma",
        title="NCCL uses network Socket although there are RDMA devices",
        settles=_NET_LINES,
        command=_NET_LINES,
        comment="The log shows why: libibverbs or /dev/infiniband may be missing.",
        link=_AREAL,
        look=_despite,
        in_log=_log_despite,
        general=True,
    ),
    link=_ENV,
)
