"""Conditions that only a job's log shows: why the job did not start, or what ended it."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace

from gpubench.conditions.circumstances import Sighting, joined, unset
from gpubench.conditions.condition import Condition, Family
from gpubench.conditions.logged import REMOTE, Complained
from gpubench.conditions.nvlink import RESTART_FABRIC
from gpubench.model.paths.nccl_log import LogFacts, RemarkKind
from gpubench.model.terms.units import compress_names
from gpubench.model.terms.verdict import Cure, Verdict

_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_TROUBLE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"


def _unfinished(facts: LogFacts) -> Iterator[Sighting]:
    """Find communicators with ranks that began their initialization but did not finish it.

    The severity is FAIL if no rank finished any initialization, no ranks connected, and every rank has a log. Otherwise
    it is WARN, since the log may be truncated.
    """
    several = [communicator for communicator in facts.communicators if (communicator.size or 0) > 1]
    ended = any(len(communicator.unfinished_ranks) < len(communicator.members) for communicator in several)
    for communicator in several:
        waiting = communicator.unfinished_ranks
        if waiting and not facts.left_out:
            hangs = not ended and not communicator.missing_ranks and not communicator.connections.joins_ranks
            ranks = compress_names([str(rank) for rank in waiting])
            yield Sighting(
                subject=f"communicator {communicator.id}",
                seen=f"rank {ranks} of {communicator.size} began its initialization but did not finish it",
                severity=Verdict.FAIL if hangs else Verdict.WARN,
            )


_PLACE_OF_NIC = re.compile(r"^NET/IB ?: (?:\w+: )?")
_MIXED = "mixed local Net device counts"
_LINK_LAYER = re.compile(r":\d+/(IB|RoCE)\b")


def _devices(facts: LogFacts) -> dict[str, list[str]]:
    lists = [remark for remark in facts.remarks if remark.note.text.startswith("NET/IB") and remark.note.about[:1]]
    return {
        remark.note.about[0].strip(): list(remark.processes)
        for remark in lists
        if remark.note.kind is RemarkKind.RDMA_DEVICES
    }


def _nics_differ(facts: LogFacts) -> Iterator[Sighting]:
    mixed = [remark for remark in facts.remarks if remark.note.kind is RemarkKind.NICS_MIXED]
    warned = [complaint for complaint in facts.complaints if complaint.processes and _MIXED in complaint.text]
    if mixed or warned:
        said = [(remark.processes, remark.note.text) for remark in mixed]
        said += [(complaint.processes, complaint.text) for complaint in warned]
        yield Sighting(subject=joined(said[0][0]), seen=said[0][1])
        return
    found = _devices(facts)
    counts = {devices: len(devices.split()) for devices in found}
    fewer = [devices for devices, count in counts.items() if count < max(counts.values())]
    if fewer:
        most = max(found, key=lambda devices: counts[devices])
        yield Sighting(
            subject=joined(process for devices in fewer for process in found[devices]),
            seen=f"{counts[fewer[0]]} RDMA device ({fewer[0]}), {counts[most]} on {joined(found[most])}"
            if counts[fewer[0]] == 1
            else f"{counts[fewer[0]]} RDMA devices ({fewer[0]}), {counts[most]} on {joined(found[most])}",
        )


def _not_opened(facts: LogFacts) -> Iterator[Sighting]:
    """Find RDMA devices that NCCL could not open. Jobs on one node do not need them."""
    found = [remark for remark in facts.remarks if remark.note.kind is RemarkKind.RDMA_UNOPENED]
    if found and any(communicator.nodes != 1 for communicator in facts.communicators):
        names = joined(remark.note.about[0] for remark in found)
        yield Sighting(
            subject=joined(name for remark in found for name in remark.processes), seen=f"could not open {names}"
        )


def _add_mixed_fabrics(sighting: Sighting, facts: LogFacts) -> Sighting:
    mixed = [devices for devices in _devices(facts) if len(set(_LINK_LAYER.findall(devices))) > 1]
    if not mixed:
        return sighting
    return replace(
        sighting,
        likely=f"InfiniBand and RoCE adapters in one list, which cannot reach each other: {mixed[0]}",
        cure=Cure(comment="Set NCCL_IB_HCA on all ranks to the adapters of one fabric, named as NCCL lists them."),
    )


def _timed_out(sighting: Sighting, facts: LogFacts) -> Sighting:
    """Name the ranks that timed out. If NCCL's RAS reports no late rank, name the network or a GPU as likely."""
    sighting = replace(sighting, seen=re.sub(r"^ProcessGroupNCCL\.cpp:\d+\] ", "", sighting.seen))
    ranks = [f"rank {watchdog.rank}" for watchdog in facts.watchdogs]
    if ranks:
        sighting = replace(sighting, subject=joined(ranks), names=tuple(ranks))
    if not facts.ras or any(hang.group in {answer.id for answer in facts.ras} for hang in facts.hangs):
        return sighting
    return replace(
        sighting,
        likely="the network or a GPU, because NCCL's RAS reports in the same text that all ranks launched the "
        "operation",
        cure=Cure.of("gpubench check", "mpirun gpubench scan", comment="Run them on the nodes of the job."),
    )


def _drop_peer_access(sighting: Sighting, facts: LogFacts) -> Sighting:
    """Replace peer access as the likely reason if it is switched off, or if no node has two ranks of a communicator."""
    several = [communicator for communicator in facts.communicators if (communicator.size or 0) > 1]
    nodes = [[member.node for member in communicator.members] for communicator in several]
    is_off = any(setting.name == "NCCL_P2P_DISABLE" and setting.value != "0" for setting in facts.settings)
    if not is_off and (not several or any(len(set(names)) < len(names) for names in nodes)):
        return sighting
    return replace(
        sighting,
        likely="a rank that ended, a network that hangs, or a truncated text",
        cure=Cure(comment="`py-spy dump` with the process id of a rank that still runs shows the line where it is."),
    )


def logged_condition(
    id_: str,
    title: str,
    pattern: str,
    likely: str,
    command: str | tuple[str, ...],
    comment: str,
    *,
    codes: tuple[int, ...] = (),
    severity: Verdict | None = None,
    of_programs: bool = False,
    refine: Callable[[Sighting, LogFacts], Sighting] | None = None,
    preferred: str = "",
    **more: Any,
) -> Condition:
    """Return a condition that is detected in a job's log.

    It is detected if a complaint matches `pattern`, or if an NCCL call returned one of the error `codes`.
    """
    found = Complained(pattern, frozenset(codes), severity, of_programs, refine, preferred)
    more = {"link": _TROUBLE, **more}
    return Condition(id=id_, title=title, likely=likely, command=command, comment=comment, in_job=found, **more)


_start = partial(logged_condition, expected="a job that starts")

NCCL_START = Family.of(
    "nccl_start",
    "Jobs that NCCL does not start",
    _start(
        "nccl-version-mismatch",
        "Mismatched NCCL version: ranks of one job load different NCCL releases",
        r"mismatched NCCL version|NCCL version mismatch|XML (?:Topology|Graph) has wrong version",
        "an LD_LIBRARY_PATH or an image that differs between nodes",
        "export NCCL_DEBUG=VERSION",
        "It shows the version that each rank loads. Use one image or environment for all ranks.",
    ),
    _start(
        "nccl-duplicate-gpu",
        "Duplicate GPU detected: two ranks of one communicator are on the same GPU",
        r"duplicate GPU|multiple ranks are using the same GPU",
        "more ranks than GPUs, or no device set by local rank",
        "nvidia-smi -L",
        "Give each rank its own GPU: torch.cuda.set_device(local_rank), or CUDA_VISIBLE_DEVICES by rank.",
        link="https://github.com/NVIDIA/nccl/issues/1241",
    ),
    _start(
        "cuda-device-missing",
        "CUDA error: invalid device ordinal: a rank asks for a GPU that it does not have",
        r"invalid device ordinal",
        "the job asks for more GPUs than the node has, or each rank sees one GPU but selects device number local_rank",
        "nvidia-smi -L",
        "The number of ranks, times GPUs per rank (-g), must not exceed the number of GPUs.",
        link="https://github.com/NVIDIA/nccl-tests/issues/323",
    ),
    _start(
        "nccl-no-socket-interface",
        "Bootstrap : no socket interface found: NCCL finds no network to connect its ranks",
        r"no (?:usable )?(?:socket |listening |IP )?interface found|no interface found",
        "NCCL_SOCKET_IFNAME matches no interface of this node, or the node has only lo and Docker's interface",
        "ip -br addr",
        "Set NCCL_SOCKET_IFNAME to an interface of this node.",
        link="https://github.com/NVIDIA/nccl/issues/1837",
    ),
    _start(
        "nccl-connect-failed",
        "A rank cannot connect to another: refused, no route, timed out",
        r"connect(?: to .*)? (?:failed|returned)\b|wrong type\b|connection (?:refused|timed out)|socketStartConnect"
        r"|DistNetworkError|RendezvousConnectionError|exceeded timeouts|no route to host|network is unreachable"
        r"|exceeded error retry count",
        "a firewall between the nodes, an interface that the others cannot reach (docker0), or a rank that ended",
        "",
        "Test the address in the line with `nc -vz` on that node. Set NCCL_SOCKET_IFNAME to an "
        "interface that all nodes reach.",
        link="https://github.com/espnet/espnet/issues/1940",
    ),
    _start(
        "nccl-no-transport",
        "No transport found for a pair of ranks: every transport is refused or switched off",
        r"no transport found|has no transport for",
        "NCCL variables or a topology file that rule out every path between two ranks",
        unset("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NET_DISABLE_INTRA"),
        "`gpubench topo` shows peer access.",
        link=_ENV,
    ),
    _start(
        "cuda-out-of-memory",
        "CUDA out of memory while NCCL sets up its buffers",
        r"(?:cuda failure|OutOfMemoryError|^CUDA)(?!.*nvls\.cc).*out of memory|failed to CUDA (?:host )?(?:c|m)?alloc",
        "the program or another process uses nearly all of the GPU's memory",
        "nvidia-smi",
        "End other processes that use GPU memory, or use less in the program. A smaller NCCL_BUFFSIZE reduces "
        "NCCL's share.",
    ),
    _start(
        "nvls-slots-used-up",
        "NVLink SHARP (NVLS) has no multicast group left: CUDA error 2, out of memory, in nvls.cc",
        r"multicast.*CUDA error 2\b|cuda failure (?:2\b)?.*out of memory.* in \S*nvls\.cc",
        "communicators of this job or other jobs use all multicast groups of the NVSwitches (rarely GPU memory, "
        "and not the fabric manager)",
        "export NCCL_NVLS_ENABLE=0",
        "Set it for communicators that do not need NVLS, end other jobs of this NVLink domain, or create fewer "
        "communicators.",
        link="https://github.com/NVIDIA/nccl/issues/2077",
    ),
    _start(
        "nvls-setup-failed",
        "NVLink SHARP (NVLS) cannot bind its multicast memory",
        r"NVLink SHARP|NVLS\b.*fail|multicast.*(?:fail|error)|cuda failure .* in \S*nvls\.cc",
        "the fabric manager was restarted under a running driver, or a container may not use the fabric",
        "systemctl status nvidia-fabricmanager",
        f"{RESTART_FABRIC} Until it works, run with NCCL_NVLS_ENABLE=0.",
        link="https://github.com/NVIDIA/nccl/issues/976",
    ),
    _start(
        "nccl-cuda-call-failed",
        "A CUDA call failed inside NCCL",
        r"\bcuda (?:failure|error(?:: (?!no error)| /)|driver error)|unhandled cuda error|ncclUnhandledCudaError"
        r"|cudaIpc\w+ failed|illegal memory|failed to open libnvidia-ml|nvml\w* failed",
        "an error of an earlier kernel, a GPU that fell off the bus, or a driver that is too old",
        "dmesg | grep -i xid",
        "Run the program under compute-sanitizer. Use a driver that is at least as new as NCCL's CUDA version.",
    ),
    _start(
        "nccl-invalid-usage",
        "The program calls NCCL wrongly: ranks disagree on sizes or operations, or an argument is invalid",
        r"invalid (?:usage|root|type|rank)|nccl\b.*invalid argument|message truncated|mismatch in info"
        r"|is not a valid pointer|rank \d+ of \d+ ranks has already checked in",
        "ranks that call different collectives or sizes, or the same rank started twice",
        "export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=COLL",
        "It logs every rank's calls. TORCH_DISTRIBUTED_DEBUG=DETAIL makes PyTorch compare them.",
        link="https://github.com/NVIDIA/nccl/issues/268",
    ),
    Condition(
        id="nccl-init-unfinished",
        title="The initialization of a communicator did not finish: the job hangs or ended there",
        expected="Init COMPLETE on every rank",
        likely="a rank that never started, a blocked network, or a log that ends too early",
        comment="`py-spy dump` with the process id of a waiting rank shows the line where it is. "
        "NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,NET makes NCCL log the progress.",
        link=_TROUBLE,
        in_job=_unfinished,
        general=True,
    ),
    Condition(
        id="nccl-nics-differ",
        title="Ranks of one job found different numbers of RDMA devices: NCCL may hang or use fewer of them",
        expected="the same number of RDMA devices for every rank",
        likely="a port that is down on some nodes, or NCCL_IB_HCA that differs between ranks",
        command="ibstat",
        comment="Compare the nodes named here. Set the same NCCL_IB_HCA on all ranks.",
        link="https://github.com/NVIDIA/nccl/issues/2428",
        in_job=_nics_differ,
        general=True,
    ),
    Condition(
        id="rdma-nic-not-opened",
        title="NET/IB : Unable to open device: an RDMA device exists, but NCCL cannot use it",
        expected="RDMA devices that NCCL can open",
        likely="a container without /dev/infiniband/uverbs of this device, or a device that its driver reset",
        command="ibv_devinfo",
        comment="Run it where the rank runs. Give the container all of /dev/infiniband.",
        link="https://github.com/NVIDIA/nccl/issues/451",
        in_job=_not_opened,
        general=True,
    ),
)


_RESULTS = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html"

_DIAGNOSTICS = "NCCL DIAG "
"""Prefix of log lines from NCCL's built-in checks."""

_EVENTS = (
    r"communication established|send queue drained|last WQE|path migrated\b|port active|LID change|P_Key change"
    r"|SM change|client reregistration|GID table change|SRQ limit"
)
_OF_OFI = (
    r"Only \w+ provider|Failed to initialize|Could not find ncclGetVersion|aws-ofi-nccl init"
    r"|Initializing plugin failed|No eligible"
)
HARMLESS: tuple[tuple[str, str], ...] = (
    (r"Failed to open lib(?:ibverbs|mlx5)", "src/misc/ibvwrap.cc:63 of 2.10.3; 2.3 to 2.10, later an INFO"),
    (r"(?:NET|TUNER|PROFILER)/Plugin|Could not find: lib", "src/net.cc:438 of 2.22.3: its own follow"),
    (r"Could not find real path of", "src/graph/xml.cc:403 of 2.22.3; 2.3 to 2.30: the device stays unplaced"),
    (r"Attribute \w+ of node nic not found", "src/graph/xml.h:101 of 2.22.3; 2.6 to 2.30"),
    (r"unknown CPU", ""),
    (r"(?:NUMA auto balancing|Missing \"?(?:iommu=pt|amd_iommu))", "src/init.cc:142 and 163 of RCCL: advice"),
    (r"MSCCL\+\+: Cannot enable", "src/init.cc:2065 of RCCL: collectives go without MSCCL++"),
    (r"(?:Linux )?kernel version", ""),
    (r"NET/IB ?: No device found", "src/transport/net_ib/init.cc:470 of 2.30.7: the next network is tried"),
    (r"NET/IB : Unable to (?:open|query)", "src/transport/net_ib.cc:463 of 2.22.3; 2.3 to 2.30: it is left out"),
    (r"(?:Call to )?ibv_open_device failed", "src/misc/ibvwrap.cc:131 of 2.30.7: the device is left out"),
    (r"(?:\S+ )?lib wrapper not initialized", "src/misc/gdrwrap.cc:106 of 2.22.3; 2.3 to 2.30: GDRCopy is not used"),
    (
        rf"NET/IB ?: (?:\S+ )?Got (?:non-fatal )?async event ?: (?:{_EVENTS})",
        "src/transport/net_ib.cc:103 of 2.22.3; 2.3 to 2.30: events that end nothing, by their names",
    ),
    (r"NET/IB : \S+ GID table changed", "src/transport/net_ib/common.cc:153 of 2.30.7; 2.28 to 2.30"),
    (r"Warning: remote FLID configured as zero", "src/transport/net_ib.cc:996 of 2.22.3; 2.22 to 2.30: DLID instead"),
    (r"NCCL_IB_\w+ is set", ""),
    (r"Detected mixed local Net device counts", "src/init.cc:1339 of 2.30.7; nccl-nics-differ tells of it"),
    (
        r"(?:RMA|GIN)/Socket : \w+ requires GDRCopy",
        "ncclRmaSocketProxyInit of 2.32.3: tried wherever there is no other network; collectives do not need it",
    ),
    (r"NET/Socket : NCCL_\w+ is greater", "src/transport/net_socket.cc:241 of 2.22.3; 2.4 to 2.30: the most it allows"),
    (r"\w*: wrong magic", "src/misc/socket.cc:484 of 2.26.6; 2.16 to 2.26: a stranger's connection is closed"),
    (r"Cannot initialize CollNet", "src/transport.cc:360 of 2.22.3; 2.6 to 2.30: point to point instead"),
    (r"CollNet is not supported or fails to initialize, ignoring", "src/graph/tuning.cc:276 of 2.19.4; 2.8 to 2.19"),
    (r"SHARP .*datatypes? not supported", "src/sharp_plugin.c:457 of nccl-rdma-sharp-plugins: NCCL reduces them"),
    (
        rf"NET/OFI (?:{_OF_OFI})",
        "src/nccl_ofi_net.cpp:271 and src/nccl_ofi_api.cpp:79 of aws-ofi-nccl of 2026: NCCL takes its next network",
    ),
    (r"NCCL_WORK_FIFO_\w+=\d+ is being ignored", "src/init.cc:434 of 2.22.3; 2.13 to 2.30: the default size"),
    (r"graphStreamOrdering=0 with graphUsageMode=2", "src/init.cc:2460 of 2.30.7: it is taken for 1"),
    (r"NCCL_DEVICE_UNPACK plugin has incompatible version", "src/net.cc:558 of 2.22.3; 2.19 to 2.30: not used"),
    (r"ignoring\b", "src/transport/shm.cc:298 of 2.30.7"),
    (r"NCCL_\w+ (?:is|environment variable is) deprecated", ""),
)
"""Beginnings of warnings after which NCCL continues, each with the source line (of NCCL, or of RCCL from 2024) that
shows it.

If the second text is empty, the evidence is logs of jobs that continued. Only beginnings are matched, since other
warnings end with the same words.
"""

_HARMLESS = re.compile("^(?:" + "|".join(form for form, _ in HARMLESS) + ")", re.ASCII | re.IGNORECASE)


def _unknown_warnings(facts: LogFacts) -> Iterator[Sighting]:
    found = [
        complaint
        for complaint in facts.complaints
        if complaint.processes and not complaint.text.startswith(_DIAGNOSTICS) and not _HARMLESS.search(complaint.text)
    ]
    if found:
        more = f"; and {len(found) - 1} more warnings" if len(found) > 1 else ""
        yield Sighting(subject=joined(found[0].processes), seen=f"NCCL warns: {found[0].text}{more}")


_HOW_IT_ENDED = (
    r"(?:exit|return)[ _-]?(?:code|status|value|string)|exit(?:s|ed|ing)? (?:with|on)|(?<!closing )signal:? \w*\d"
    r"|received by PID|time limit|node failure|oom|memory|killed|cancelled at|segmentation|\bdied"
    r"|\bsig(?:segv|bus|kill)\b|task [\d,-]+.*: \w"
)
"""Lines that show how a process ended. They are preferred over lines about the launcher's reaction."""

_AROUND_ENDING = re.compile(
    r"^a process ended: (?:\d+: |\[[^\]]*\] ?|(?:slurmstepd|srun|error|\w+Error): |\*\*\* |=\s+)*"
    r"| of binary: \S+|(?<=\d) \*\*\*"
)
"""Parts to remove from a line about the end of a process: the name of the program that wrote it, and words without
information.
"""

NCCL_TRANSFERS = Family.of(
    "nccl_transfers",
    "Jobs that NCCL ends",
    logged_condition(
        "nccl-ranks-disagree",
        "NET/IB: collective mismatch error: two ranks disagree on a call, its size, or NCCL_* settings",
        r"collective mismatch error",
        "ranks that call different collectives or sizes, or NCCL_ALGO, NCCL_PROTO, NCCL_BUFFSIZE or "
        "NCCL_*CHANNELS that differ between nodes",
        "env | grep NCCL_",
        "Run it on both nodes. If the variables are equal, compare the ranks' calls with NCCL_DEBUG_SUBSYS=COLL.",
        expected="the same call, size and NCCL_* variables on both ranks",
        link="https://github.com/NVIDIA/nccl/issues/626",
    ),
    logged_condition(
        "rdma-registration-failed",
        "Call to ibv_reg_mr failed: memory cannot be registered for RDMA",
        r"ibv_(?:reg|create|alloc)\w* failed|regMr failed|unable to register memory|register(?:ing)? memory.*fail",
        "a low limit of locked memory (ulimit -l) in the container, or (for GPU memory) a missing nvidia-peermem",
        "",
        "Start the container with `docker run --ulimit memlock=-1`. In Kubernetes, add IPC_LOCK. For `Bad address`, "
        "load nvidia-peermem. Before running any jobs, verify the data with `gpubench allreduce` over two nodes.",
        expected="memory that the NIC can register",
        link="https://github.com/NVIDIA/nccl-tests/issues/206",
    ),
    logged_condition(
        "network-plugin-failed",
        "A call of the network plugin failed (NET/OFI, aws-ofi-nccl), for example with RC: -22",
        r"NET/\w+ .*\bRC: -?[1-9]\d*|unresponsive receiver|NET/OFI Creating .* failed: "
        r"|NET/OFI (?:Couldn't|Unable to) (?:open|create|enable|bind|allocate|register)\b",
        "a plugin that does not match libfabric, NCCL or the instance, or a security group that blocks traffic",
        "fi_info -p efa",
        "Use the plugin, libfabric and NCCL from one release of EFA's installer. FI_LOG_LEVEL=warn logs more.",
        expected="a plugin that works",
        link="https://github.com/aws/aws-ofi-nccl",
    ),
    logged_condition(
        "rdma-connect-failed",
        "Call to ibv_modify_qp failed: two NICs cannot be connected for RDMA",
        r"ibv_(?:modify_qp|query_gid|create_ah)\w* failed",
        "a wrong GID index or no RoCE route between the nodes (error 110, 113, 22), or MTUs that differ",
        "show_gids",
        "Run it on both nodes and set NCCL_IB_GID_INDEX to the RoCE v2 address. Test with ib_write_bw.",
        expected="queue pairs that connect",
        link="https://github.com/NVIDIA/nccl/issues/426",
    ),
    logged_condition(
        "nccl-tests-wrong-data",
        "nccl-tests counted wrong elements: Out of bounds values ... FAILED, or a row whose #wrong is not 0",
        r"^out of bounds values|^wrong data in a row of nccl-tests",
        "peer access, a GPU, a link or a NIC that corrupts data",
        "gpubench p2p",
        "It shows the faulty pair. `NCCL_P2P_DISABLE=1 gpubench allreduce` shows whether peer access is at fault.",
        expected="received data equal to sent data",
        link="https://github.com/NVIDIA/nccl/issues/2335",
    ),
    logged_condition(
        "rdma-retry-exceeded",
        "Got completion with error 12: the other side did not answer over RDMA (IBV_WC_RETRY_EXC_ERR)",
        r"got completion .*(?:error|status)[= ](?:\w+\()?12\b|RETRY_EXC"
        r"|transport retry count\w* exceeded|^failed status 12: wr_id",
        "a wrong RoCE GID index, a port or cable that is down, a fabric that drops packets (no PFC or ECN), or a "
        "rank that ended",
        "show_gids",
        "Set NCCL_IB_GID_INDEX to the RoCE v2 address and test with ib_write_bw between the two nodes. "
        "NCCL_IB_TIMEOUT=22 tolerates congestion.",
        expected="completions without an error",
        link="https://github.com/NVIDIA/nccl/issues/426",
        refine=_add_mixed_fabrics,
    ),
    logged_condition(
        "kv-transfer-failed",
        "NIXL_ERR_BACKEND, NIXL_ERR_REMOTE_DISCONNECT, cannot find remote protocol: a transfer of GPU memory failed",
        r"NIXL_ERR_(?:BACKEND|REMOTE_DISCONNECT|CANCELED|UNKNOWN)|UCX +ERROR (?:cannot find remote protocol"
        r"|No zero-copy protocol found)|Unexpected UCX error|ucx send failed|UCX +DIAG .* will not be handled",
        "UCX has no protocol for the memory, or its connection to the peer broke",
        "export UCX_PROTO_INFO=y UCX_LOG_LEVEL=info",
        "Start both processes again. The last lines before the error name the transport and the memory.",
        expected="transfers without an error",
        link="https://github.com/ai-dynamo/nixl/issues/1614",
        refine=lambda sighting, _facts: replace(sighting, subject="a transfer by UCX or NIXL"),
    ),
    logged_condition(
        "kv-mnnvl-refused",
        "multi-node NVLINK support is requested but not supported: UCX continues without it",
        r"multi-node NVLINK support is requested but not supported",
        "UCX_CUDA_IPC_ENABLE_MNNVL=y on GPUs without multi-node NVLink, or without an IMEX channel",
        "unset UCX_CUDA_IPC_ENABLE_MNNVL",
        "UCX then uses multi-node NVLink if it is available.",
        expected="UCX_CUDA_IPC_ENABLE_MNNVL=try, the default",
        link="https://github.com/openucx/ucx/pull/10285",
        severity=Verdict.WARN,
        refine=lambda sighting, _facts: replace(sighting, subject="UCX"),
    ),
    logged_condition(
        "nic-failed-over",
        "A NIC failed, and NCCL continues more slowly with another one, perhaps until the job ends",
        r"NET/IB: .*\b(?:marked as failed|failed devices?)\b|resiliency .*outstanding recovery",
        "a faulty cable, port or switch (NCCL gives up the recovery after "
        "NCCL_IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX attempts)",
        "ibstat",
        "Look at the ports of this host and at dmesg. Once they are up, restart the job, because it may stay "
        "slow otherwise.",
        expected="NICs that do not fail",
        link="https://github.com/NVIDIA/nccl/issues/2157",
        refine=lambda seen, _: replace(seen, seen=_PLACE_OF_NIC.sub("", seen.seen)),
    ),
    logged_condition(
        "gin-not-enabled",
        "GPU-initiated networking (GIN) was requested, but NCCL cannot enable it",
        r"\bGIN (?:is disabled|not supported|\w+ signals are required)|GIN-capable|support GIN|(?:use|requested) GIN",
        "NCCL_GIN_ENABLE=0, no RDMA NIC or plugin with GIN on some ranks, neither nvidia-peermem nor DMA-BUF, or "
        "GPUs that only NVLink connects",
        "export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV",
        "The GIN/Plugin lines then show which plugin NCCL excludes, and why. NCCL_GIN_TYPE=2 sends through the CPU.",
        expected="GIN on all ranks, or a program that does not need it",
        link="https://github.com/NVIDIA/nccl/issues/2237",
    ),
    logged_condition(
        "collnet-not-used",
        "CollNet (SHARP) was requested but cannot be set up, so NCCL reduces in the GPUs instead of the switches",
        r"SHARP coll \w+ error|Cannot create SHArP job|sharp_create_job failed|\(sharp_am\)",
        "no Aggregation Manager (sharp_am) in the subnet, or no switch resources left for this job",
        "systemctl status sharp_am",
        "Run it on the subnet manager's host. With NCCL_COLLNET_ENABLE=0, NCCL does not request SHARP.",
        expected="SHARP, as NCCL_COLLNET_ENABLE=1 requests",
        link="https://github.com/NVIDIA/nccl/issues/1050",
        severity=Verdict.WARN,
    ),
    logged_condition(
        "communicators-aborted",
        "A process aborted its communicators, as PyTorch does if a program ends without destroy_process_group()",
        r"\[Service thread\] (?:Accept failed|could not receive type from localRank -?\d+, res=3, closed=0)"
        r"|operation Close from rank \d+, retcode 3",
        "a program that ended without destroy_process_group(), or the error before these lines",
        "",
        "Call torch.distributed.destroy_process_group() at the end of the program.",
        expected="communicators destroyed before the program ends",
        link="https://github.com/NVIDIA/nccl/issues/1610",
        severity=Verdict.WARN,
        general=True,
    ),
    logged_condition(
        "rdma-completion-error",
        "Got completion with an error: an RDMA operation failed",
        r"got completion .*(?:error|status)|^failed status \d+: wr_id|async fatal event|ibv_get_async_event failed"
        r"|async event ?: (?:.*work queue|.*catastrophic|CQ error)",
        "memory or addresses (errors 4, 10 and 11: ACS, IOMMU, driver or nvidia-peermem), an earlier error (5), "
        "or a receiver that was not ready (13)",
        "gpubench check --quick",
        "It checks ACS. Also look at dmesg and at the first error in all ranks' logs. For errors 4, 10 and 11, "
        "NCCL_NET_GDR_LEVEL=LOC shows whether GPUDirect RDMA is at fault.",
        expected="completions without an error",
        link="https://github.com/NVIDIA/nccl/issues/214",
    ),
    logged_condition(
        "collective-timed-out",
        "Watchdog caught collective operation timeout: a collective did not finish",
        r"watchdog caught|timed? ?out|raised from checkTimeout|::checkTimeout|failed collective",
        "a rank that ended, stopped, or called another operation (rarely the network)",
        "export TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_NCCL_TRACE_BUFFER_SIZE=2000",
        "The dump shows which rank lags behind.",
        expected="collectives that finish",
        link="https://pytorch.org/docs/stable/torch_nccl_environment_variables.html",
        refine=_timed_out,
        general=True,
    ),
    logged_condition(
        "remote-process-exited",
        "Connection closed by remote peer, ncclRemoteError: another rank exited",
        r"remote (?:peer|process)|closed by (?:remote )?peer|connection reset|broken pipe|ncclRemoteError"
        r"|could not receive type from localRank \d+, res=(?!3, closed=0)|peer .* (?:closed|exited)",
        "the other rank ended first, for a reason in its log or in the program's output",
        "dmesg -T | grep -i -E 'oom|xid'",
        "Run it on the node of the rank with the first error.",
        expected="ranks that run until the end",
        link=_RESULTS,
        codes=(REMOTE,),
        general=True,
    ),
    logged_condition(
        "nccl-call-failed",
        "An NCCL call failed: unhandled system error, internal error",
        r"unhandled|failed to execute operation (?!Close from rank \d+, retcode 3)\w+ .*retcode [1-9]"
        r"|NCCL (?:failure|error|operation)"
        r"|nccl\w+Error|NcclError|NCCL:",
        "the reason in the warning before it, which NCCL prints if NCCL_DEBUG=WARN is set",
        "export NCCL_DEBUG=INFO",
        "Set it on all ranks. The first warning is the reason.",
        expected="calls that succeed",
        link=_RESULTS,
        codes=(1, 2, 3, 4, 5),
        general=True,
    ),
    logged_condition(
        "program-failed",
        "A program of the job ended with an error",
        r"^a process ended: |^Test |^Failed: |terminate called|Fatal Python|ChildFailedError|exitcode|death signal"
        r"|MPI_ABORT|Process received|died|Killed|Aborted|Segmentation fault|Bus error"
        r"|\*\*\* SIG|Fatal error in|An error occurred in MPI|MPI_ERRORS"
        r"|Caught signal|Assertion|double free|^(?:free|malloc|realloc)\(\)"
        r"|munmap_chunk|stack smashing|^corrupted |floating point exception|illegal instruction|breakpoint trap"
        r"|bad system call|symbol lookup error|Execution of replica|DeepEP|nvshmem|non-?zero status: "
        r"|SignalException|ProcessGroupNCCL|Default process group has not been|OutOfMemoryError|out of memory|NCCL",
        "a bug in the program, a faulty GPU, or (for a bus error) a full /dev/shm",
        "dmesg -T | grep -i -E 'oom|xid'",
        "Run it on the node of the rank with the first error.",
        expected="ranks that run until the end",
        preferred=_HOW_IT_ENDED,
        refine=lambda seen, _: replace(seen, seen=_AROUND_ENDING.sub("", seen.seen)),
        of_programs=True,
        general=True,
    ),
    logged_condition(
        "program-exception",
        "A program of the job printed an exception",
        r"(?:Error|Exception)\w*: |^a Traceback of Python|UCX +ERROR|NIXL_ERR_|\[ERROR\]"
        r"|shared memory broadcast block",
        "an error that may have ended the program (the text does not show whether it continued)",
        "",
        "Check whether every rank finished.",
        expected="none",
        of_programs=True,
        general=True,
    ),
    logged_condition(
        "nccl-tests-apart",
        "Several separate runs of nccl-tests at once: the processes did not connect",
        r"^\d+ runs of nccl-tests at once",
        "nccl-tests compiled without MPI=1, or with a different MPI than this mpirun, or parallel runs on purpose",
        ("make clean", "make MPI=1"),
        "Run them in the folder of nccl-tests. Set MPI_HOME to the MPI of this mpirun.",
        expected="one run with all ranks: one list of devices, one Avg bus bandwidth",
        link="https://github.com/NVIDIA/nccl-tests/issues/27",
        of_programs=True,
    ),
    logged_condition(
        "nccl-tests-unfinished",
        "nccl-tests did not print its last line: it hung or ended early, or the text is truncated",
        r"^no line of Avg bus bandwidth",
        "peer access that hangs because of an IOMMU or ACS (if the text has no rows), a rank that ended, or a "
        "truncated text",
        "export NCCL_P2P_DISABLE=1",
        "If the run then finishes, peer access hangs. In that case, run `gpubench check --quick`.",
        expected="Avg bus bandwidth, and Out of bounds values : 0 OK",
        link="https://github.com/NVIDIA/nccl/issues/606",
        refine=_drop_peer_access,
        of_programs=True,
        general=True,
    ),
    Condition(
        id="nccl-warning",
        title="NCCL prints a warning that gpubench does not know",
        expected="no warnings",
        likely="the reason in the warning's text",
        comment="Search the issues of NVIDIA/nccl for this warning.",
        link="https://github.com/NVIDIA/nccl",
        in_job=_unknown_warnings,
        general=True,
    ),
)
