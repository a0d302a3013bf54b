"""Conditions that end a job: NCCL's log reports them, no fact of a machine shows them.

The forms of NCCL's own diagnostics are those of the text in NCCL 2.32.3; none of them ran here, with NCCL 2.28.9.
"""

import re
from collections.abc import Iterator

from gpubench.conditions.definition.condition import (
    REMOTE,
    Condition,
    Family,
    Sighting,
    complaint,
    joined,
    nothing_in_facts,
)
from gpubench.model.paths.nccl_log import LogFacts
from gpubench.model.terms.units import compress_names
from gpubench.model.terms.verdict import Verdict

_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_TROUBLE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"


def _unfinished(facts: LogFacts) -> Iterator[Sighting]:
    """Communicators whose init began and did not end.

    The job hangs or died there where no other init ended and no ranks were connected, though all have a log; else the
    text may just end here.
    """
    several = [each for each in facts.communicators if (each.size or 0) > 1]
    ended = any(len(each.unfinished_ranks) < len(each.members) for each in several)
    for communicator in several:
        waiting = communicator.unfinished_ranks
        if waiting and not facts.left_out:
            hangs = not ended and not communicator.missing_ranks and not communicator.connections.joins_ranks
            ranks = compress_names([str(rank) for rank in waiting])
            yield Sighting(
                subject=f"communicator {communicator.id}",
                seen=f"rank {ranks} of {communicator.size} began its init and did not end it",
                severity=Verdict.FAIL if hangs else Verdict.WARN,
            )


def _failed(
    id_: str, title: str, pattern: str, cure: str, *, likely: str, seen_as: tuple[str, ...], link: str = _TROUBLE
) -> Condition:
    """A condition that keeps a job from starting."""
    return complaint(
        id_, title, pattern, cure=cure, likely=likely, expected="a job that starts", link=link, seen_as=seen_as
    )


NCCL_START = Family.of(
    "nccl_start",
    "Jobs that NCCL does not start",
    _failed(
        "nccl-version-mismatch",
        "Mismatched NCCL version: ranks of one job have loaded different releases of NCCL",
        r"mismatched NCCL version|NCCL version mismatch|XML (?:Topology|Graph) has wrong version",
        "use one image or environment for all ranks; NCCL_DEBUG=VERSION shows what each rank loads",
        likely="an LD_LIBRARY_PATH or an image that differs between nodes",
        seen_as=("Mismatched NCCL version detected",),
    ),
    _failed(
        "nccl-duplicate-gpu",
        "Duplicate GPU detected: two ranks of one communicator are on the same GPU",
        r"duplicate GPU|multiple ranks are using the same GPU",
        "give each rank a GPU of its own: torch.cuda.set_device(local_rank), or CUDA_VISIBLE_DEVICES by rank",
        likely="more ranks than GPUs, or no device set by local rank",
        seen_as=("Duplicate GPU detected",),
    ),
    _failed(
        "cuda-device-missing",
        "CUDA error: invalid device ordinal: a rank asks for a GPU that it does not have",
        r"invalid device ordinal",
        "start as many ranks as there are GPUs, times -g or devices of each; CUDA_VISIBLE_DEVICES shows a rank its own",
        likely="more ranks or GPUs per rank than the node has, or one visible GPU and local_rank as the device",
        seen_as=("Test CUDA failure common.cu:963 'invalid device ordinal'",),
    ),
    _failed(
        "nccl-no-socket-interface",
        "Bootstrap : no socket interface found: NCCL has no network to meet over",
        r"no (?:usable )?(?:socket |listening |IP )?interface found|no interface found",
        "ip -br addr; NCCL_SOCKET_IFNAME names an interface that this node has",
        likely="NCCL_SOCKET_IFNAME matches no interface of this node, or its only one is lo or docker's",
        seen_as=("Bootstrap : no socket interface found",),
        link=_ENV,
    ),
    _failed(
        "nccl-connect-failed",
        "A rank cannot connect to another: refused, no route, timed out",
        r"connect(?: to .*)? (?:failed|returned)\b|wrong type\b|connection (?:refused|timed out)|socketStartConnect"
        r"|DistNetworkError|RendezvousConnectionError|exceeded timeouts|no route to host|network is unreachable"
        r"|exceeded error retry count",
        "nc -vz HOST PORT from that node; NCCL_SOCKET_IFNAME chooses an interface that all nodes reach",
        likely="a firewall between the nodes, an interface that the others do not reach (docker0), or a rank that died",
        seen_as=("Call to connect returned Connection refused", "Connection timed out"),
        link=_ENV,
    ),
    _failed(
        "nccl-no-transport",
        "No transport found for a pair of ranks: every one was refused or switched off",
        r"no transport found|has no transport for",
        "unset NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_NET_DISABLE_INTRA; gpubench topo shows peer access",
        likely="variables or a topology file that leave no way between two ranks",
        seen_as=("No transport found for rank",),
        link=_ENV,
    ),
    _failed(
        "cuda-out-of-memory",
        "CUDA out of memory while NCCL sets up its buffers",
        r"(?:cuda failure|OutOfMemoryError|^CUDA).*out of memory|failed to CUDA (?:host )?(?:c|m)?alloc",
        "nvidia-smi: end what else holds memory, give the program less; NCCL_BUFFSIZE takes less for NCCL",
        likely="the program, or another one, holds nearly all of the GPU's memory",
        seen_as=("Cuda failure 'out of memory'",),
    ),
    _failed(
        "nvls-setup-failed",
        "NVLink SHARP (NVLS) cannot bind its multicast memory",
        r"NVLink SHARP|NVLS\b.*fail|multicast.*(?:fail|error)|cuda failure .* in \S*nvls\.cc",
        "systemctl restart nvidia-fabricmanager; NCCL_NVLS_ENABLE=0 runs without, until it works",
        likely="the fabric manager was restarted under a running driver, or a container may not use the fabric",
        seen_as=("Failed to bind NVLink SHARP (NVLS) Multicast memory", "transport/nvls.cc:254 NCCL WARN Cuda failure"),
        link="https://github.com/NVIDIA/nccl/issues/976",
    ),
    _failed(
        "nccl-cuda-call-failed",
        "A call of CUDA's failed inside NCCL",
        r"\bcuda (?:failure|error: (?!no error)|driver error)|unhandled cuda error|ncclUnhandledCudaError"
        r"|cudaIpc\w+ failed|illegal memory|failed to open libnvidia-ml|nvml\w* failed",
        "dmesg | grep -i xid; compute-sanitizer on the program; a driver at least as new as NCCL's CUDA",
        likely="an error of a kernel before, a GPU that fell off the bus, or a driver that is too old",
        seen_as=("Cuda failure", "unhandled cuda error"),
    ),
    _failed(
        "nccl-invalid-usage",
        "The program calls NCCL wrongly: ranks that disagree on sizes or operations, invalid arguments",
        r"invalid (?:usage|root|type|rank)|nccl\b.*invalid argument|message truncated|mismatch in info"
        r"|is not a valid pointer|rank \d+ of \d+ ranks has already checked in",
        "NCCL_DEBUG_SUBSYS=COLL shows every rank's calls; TORCH_DISTRIBUTED_DEBUG=DETAIL has PyTorch compare them",
        likely="ranks that call different collectives or sizes, or the same rank started twice",
        seen_as=("unhandled invalid usage", "Message truncated"),
    ),
    Condition(
        id="nccl-init-unfinished",
        title="The init of a communicator began and did not end: the job hangs or died there",
        seen_as=("Init START",),
        detection="`Init START` without `Init COMPLETE` in NCCL's log, of all ranks or of some",
        expected="Init COMPLETE on every rank",
        likely="a rank that never came, a network that lets nothing through, or a log that was taken too early",
        cure="py-spy dump --pid PID where ranks wait; NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,NET shows how far they came",
        link=_TROUBLE,
        look=nothing_in_facts,
        in_job=_unfinished,
        general=True,
    ),
)


_RESULTS = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html"

_DIAGNOSTICS = "NCCL DIAG "
"""What NCCL's own checks only remark on."""

_HARMLESS = re.compile(
    r"^(?:Failed to open lib(?:ibverbs|mlx5)|NET/Plugin|TUNER/Plugin|PROFILER/Plugin|Could not find: lib"
    r"|Could not find real path of|Missing \"?(?:iommu=pt|amd_iommu)|NUMA auto balancing|NET/IB ?: No device found"
    r"|NET/IB : Unable to (?:open|query)|(?:\S+ )?lib wrapper not initialized|Cannot initialize CollNet"
    r"|NET/OFI (?:Only \w+ provider|Failed to initialize|Could not find ncclGetVersion|aws-ofi-nccl init)"
    r"|NET/OFI (?:Initializing plugin failed|No eligible)|SHARP .*datatypes? not supported"
    r"|NET/IB ?: (?:\S+ )?Got (?:non-fatal )?async event ?: (?:communication established|send queue drained|last WQE"
    r"|path migrated\b|port active|LID change|P_Key change|SM change|client reregistration|GID table change|SRQ limit)"
    r"|NET/IB : \S+ GID table changed"
    r"|(?:RMA|GIN)/Socket : \w+ requires GDRCopy"
    r"|NET/Socket : NCCL_\w+ is greater|NCCL_\w+ (?:is|environment variable is) deprecated|ignoring\b"
    r"|\w*: wrong magic|unknown CPU|Attribute \w+ of node nic not found|(?:Call to )?ibv_open_device failed"
    r"|NCCL_IB_\w+ is set|(?:Linux )?kernel version)",
    re.ASCII | re.IGNORECASE,
)
"""Warnings after which NCCL goes on, another way or just so: by their beginnings, since the same words end others.

NCCL 2.32 tries one-sided operations over sockets whenever it has no other network, and warns where GDRCopy is not
installed (its ncclRmaSocketProxyInit); collectives do not need them.
"""


def _unknown_warnings(facts: LogFacts) -> Iterator[Sighting]:
    """Warnings that are none of the others, nor harmless."""
    found = [each for each in facts.complaints if each.processes and not _HARMLESS.search(each.text)]
    found = [each for each in found if not each.text.startswith(_DIAGNOSTICS)]
    if found:
        more = f"; and of {len(found) - 1} more" if len(found) > 1 else ""
        yield Sighting(subject=joined(found[0].processes), seen=f"NCCL warns: {found[0].text}{more}")


NCCL_TRANSFERS = Family.of(
    "nccl_transfers",
    "Jobs that NCCL ends",
    complaint(
        "rdma-registration-failed",
        "Call to ibv_reg_mr failed: memory cannot be registered for RDMA",
        r"ibv_(?:reg|create|alloc)\w* failed|regMr failed|unable to register memory|register(?:ing)? memory.*fail",
        expected="memory that the NIC may use",
        likely="the limit of locked memory (ulimit -l) in the container, or nvidia-peermem for memory of a GPU",
        cure="docker run --ulimit memlock=-1, IPC_LOCK in Kubernetes; for `Bad address`: modprobe nvidia-peermem",
        link=_TROUBLE,
        seen_as=("Call to ibv_reg_mr failed", "Cannot allocate memory"),
        detection="the warning in NCCL's log",
    ),
    complaint(
        "network-plugin-failed",
        "A call of the network plugin failed (NET/OFI, aws-ofi-nccl): RC: -22 and others",
        r"NET/\w+ .*\bRC: -?[1-9]\d*|unresponsive receiver|NET/OFI Creating .* failed: "
        r"|NET/OFI (?:Couldn't|Unable to) (?:open|create|enable|bind|allocate|register)\b",
        expected="a plugin that works",
        likely="a plugin that does not fit libfabric, NCCL or the instance, or a security group that blocks",
        cure="FI_LOG_LEVEL=warn; fi_info -p efa; take plugin, libfabric and NCCL from one release of EFA's installer",
        link="https://github.com/aws/aws-ofi-nccl",
        seen_as=("NET/OFI", "RC: -22"),
        detection="a return code in the plugin's warning in NCCL's log",
    ),
    complaint(
        "rdma-connect-failed",
        "Call to ibv_modify_qp failed: two NICs cannot be connected for RDMA",
        r"ibv_(?:modify_qp|query_gid|create_ah)\w* failed",
        expected="queue pairs that connect",
        likely="a wrong GID index or no RoCE route between the nodes (error 110, 113, 22), or MTUs that differ",
        cure="show_gids on both nodes, then NCCL_IB_GID_INDEX of the RoCE v2 address; ib_write_bw between the two",
        link="https://github.com/NVIDIA/nccl/issues/426",
        seen_as=("Call to ibv_modify_qp failed with error Connection timed out",),
        detection="the warning in NCCL's log",
    ),
    complaint(
        "nccl-tests-wrong-data",
        "nccl-tests counted wrong elements: Out of bounds values ... FAILED, or a row whose #wrong is not 0",
        r"^out of bounds values|^wrong data in a row of nccl-tests",
        expected="data that arrive as they were sent",
        likely="peer access that corrupts data, or a GPU, link or NIC that does",
        cure="gpubench p2p names the pair; NCCL_P2P_DISABLE=1 gpubench allreduce says whether peer access is to blame",
        link="https://github.com/NVIDIA/nccl/issues/2335",
        seen_as=("Out of bounds values : 8 FAILED",),
        detection="nccl-tests' rows and last lines in the same text",
    ),
    complaint(
        "rdma-retry-exceeded",
        "Got completion with error 12: the other side did not answer over RDMA (IBV_WC_RETRY_EXC_ERR)",
        r"got completion .*(?:error|status)[= ](?:\w+\()?12\b|RETRY_EXC"
        r"|transport retry count\w* exceeded|^failed status 12: wr_id",
        expected="completions without an error",
        likely="a wrong GID index on RoCE, a port or cable that is down, a fabric that drops (no PFC or ECN), or a "
        "rank that died",
        cure="show_gids, then NCCL_IB_GID_INDEX of the RoCE v2 address; ib_write_bw between the two; "
        "NCCL_IB_TIMEOUT=22 outlasts congestion",
        link="https://github.com/NVIDIA/nccl/issues/426",
        seen_as=("Got completion with error 12", "status=12", "vendor err 129"),
        detection="completion status 12 in NCCL's log",
    ),
    complaint(
        "rdma-completion-error",
        "Got completion with an error: an RDMA operation failed",
        r"got completion .*(?:error|status)|^failed status \d+: wr_id|async fatal event|ibv_get_async_event failed"
        r"|async event ?: (?:.*work queue|.*catastrophic|CQ error)",
        expected="completions without an error",
        likely="4, 10, 11: memory or addresses (ACS or an IOMMU that redirects RDMA to GPUs, driver, nvidia-peermem); "
        "5: flushed after another error; 13: a receiver that was not ready",
        cure="look at the first error of all ranks' logs; dmesg and the ports' counters on both nodes; of 4, 10, 11: "
        "NCCL_NET_GDR_LEVEL=LOC works where GPUDirect RDMA is to blame, and gpubench check --quick looks for ACS",
        link=_TROUBLE,
        seen_as=("Got completion with error", "Got completion from peer"),
        detection="a completion with another status in NCCL's log",
    ),
    complaint(
        "collective-timed-out",
        "Watchdog caught collective operation timeout: a collective did not end",
        r"watchdog caught|timed? ?out",
        expected="collectives that end",
        likely="a rank that died, stopped, or called something else; seldom the network",
        cure="TORCH_NCCL_DUMP_ON_TIMEOUT=1 with TORCH_NCCL_TRACE_BUFFER_SIZE=2000 names the rank that is behind",
        link="https://pytorch.org/docs/stable/torch_nccl_environment_variables.html",
        seen_as=("Watchdog caught collective operation timeout",),
        detection="PyTorch's watchdog, or a time-out in NCCL's log",
        general=True,
    ),
    complaint(
        "remote-process-exited",
        "Connection closed by remote peer, ncclRemoteError: another rank went away",
        r"remote (?:peer|process)|closed by (?:remote )?peer|connection reset|broken pipe|ncclRemoteError"
        r"|could not receive type from localRank|peer .* (?:closed|exited)",
        expected="ranks that stay until the end",
        likely="that rank died first: its own log and the program's output say of what",
        cure="look for the first error of all ranks; dmesg -T | grep -i -E 'oom|xid' on its node",
        link=_RESULTS,
        seen_as=("Connection closed by remote peer", "remote process exited or there was a network error"),
        detection="the warning, or the error code 6, in NCCL's log before communicators are closed",
        codes=(REMOTE,),
        general=True,
    ),
    complaint(
        "nccl-call-failed",
        "A call of NCCL's failed: unhandled system error, internal error",
        r"unhandled|failed to execute operation \w+ .*retcode [1-9]|NCCL (?:failure|error|operation)"
        r"|nccl\w+Error|NcclError|NCCL:",
        expected="calls that return",
        likely="what the warning before it says; without one NCCL_DEBUG=WARN shows it",
        cure="NCCL_DEBUG=INFO on all ranks: the first warning of any rank is the reason",
        link=_RESULTS,
        seen_as=("unhandled system error", "ncclInternalError", "NCCL failure"),
        detection="`file.cc:123 -> 2` in NCCL's log, or the error that the program reports",
        codes=(1, 2, 3, 4, 5),
        general=True,
    ),
    complaint(
        "program-failed",
        "The program that uses NCCL ended with an error",
        r"^a process ended: |^Test |^Failed: |terminate called|Fatal Python|ChildFailedError|exitcode|death signal"
        r"|MPI_ABORT|Process received|died|Killed|Aborted|Segmentation fault|Bus error"
        r"|\*\*\* SIG|Fatal error in|An error occurred in MPI|MPI_ERRORS"
        r"|Caught signal|Assertion|double free|^(?:free|malloc|realloc)\(\)"
        r"|SignalException|ProcessGroupNCCL|OutOfMemoryError|out of memory|NCCL",
        expected="ranks that stay until the end",
        likely="a fault of the program, or of a GPU; a bus error is often a full /dev/shm",
        cure="look for the first error of all ranks; dmesg -T | grep -i -E 'oom|xid' on its node",
        link=_TROUBLE,
        seen_as=("Test CUDA failure", "exited on signal", "ChildFailedError"),
        detection="a rank, task or process that died, was killed or exited with a code that is not 0, in the same text",
        of_programs=True,
        general=True,
    ),
    complaint(
        "program-exception",
        "The program that uses NCCL printed an exception",
        r"(?:Error|Exception)\w*: |^a Traceback of Python",
        expected="none",
        likely="it ended with it, or went on after it: the text does not say",
        cure="look whether every rank came to its end",
        link=_TROUBLE,
        seen_as=("RuntimeError:",),
        detection="the last line of a traceback in the same text",
        of_programs=True,
        general=True,
    ),
    complaint(
        "nccl-tests-apart",
        "Several runs of nccl-tests at once, each by itself: its processes never met",
        r"^\d+ runs of nccl-tests at once",
        expected="one run with all ranks: one list of devices, one Avg bus bandwidth",
        likely="nccl-tests that was compiled without MPI=1, or for another MPI than the mpirun that started it; or "
        "runs side by side, as somebody wanted",
        cure="make clean; make MPI=1 MPI_HOME=... with the MPI of that mpirun; gpubench allreduce says so and stops",
        link="https://github.com/NVIDIA/nccl-tests/issues/27",
        seen_as=("#  Rank  0 Group  0", "# nThread 1 nGpus 8 minBytes 8"),
        detection="nccl-tests' headers and last lines in the same text: several headers before the first end",
        of_programs=True,
    ),
    complaint(
        "nccl-tests-unfinished",
        "nccl-tests began and did not come to its last line: it hung or died, or the text ends before",
        r"^no line of Avg bus bandwidth",
        expected="Avg bus bandwidth, and Out of bounds values : 0 OK",
        likely="without any row: peer access that hangs, as by an IOMMU or ACS; else a rank that died, or a cut text",
        cure="again with NCCL_P2P_DISABLE=1: what ends with it hangs by peer access; then gpubench check --quick",
        link="https://github.com/NVIDIA/nccl/issues/606",
        seen_as=("# nThread 1 nGpus 8 minBytes 8",),
        detection="nccl-tests' headers in the same text, without its last lines",
        of_programs=True,
        general=True,
    ),
    Condition(
        id="nccl-warning",
        title="NCCL warns of something that gpubench does not know",
        detection="any other warning in NCCL's log; those after which it goes on as well are left out",
        expected="no warnings",
        likely="see the words",
        cure="search for the warning's words in NVIDIA/nccl's issues",
        link="https://github.com/NVIDIA/nccl",
        look=nothing_in_facts,
        in_job=_unknown_warnings,
        general=True,
    ),
)


_XID = "https://docs.nvidia.com/deploy/xid-errors/index.html"
_AER = "https://docs.kernel.org/PCI/pcieaer-howto.html"

_OF_HARDWARE = "46|48|54|62|64|74|79|94|95|109|110|119|120|136|140|143|151|156|158|167|169|171|172"
"""Numbers of Xid that NVIDIA's catalogue answers with a reset of the GPU, a restart of the machine or a look at its
connectors; 94, which ends the application alone for an error of memory; and those from 167 on that are fatal by name.

Source: docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, of Ampere and newer, read in 2026."""

_OF_NVLINK = r"14[4-9]|150|155"
"""Of these the line says whether they are fatal."""

_RECOVERY = r"154, .* to 0x\w+ \((?!None)"
"""What the driver wants done for another Xid: reset, reboot, drain."""

HARDWARE_ERRORS = Family.of(
    "hardware_errors",
    "Hardware errors in the text of a job",
    complaint(
        "gpu-xid",
        "The kernel reports an error of a GPU, an NVLink or an NVSwitch: Xid, SXid, fallen off the bus",
        rf"NVRM: Xid [^:]*[^)]*\): (?:(?:{_OF_HARDWARE})\b|(?:{_OF_NVLINK}), (?!.*non-?fatal)|{_RECOVERY})"
        rf"|caused by previous Xid (?:{_OF_HARDWARE}|{_OF_NVLINK})\b|SXid [^)]*\): \d+, Fatal|fallen off the bus",
        expected="no Xid",
        likely="the GPU or link that the line names; what follows from it on other GPUs are Xid 45 and CUDA errors",
        cure="nvidia-smi -q -i BUSID; nvidia-smi nvlink -e; NVIDIA's catalogue says by number: reset, or replace",
        link=_XID,
        seen_as=("NVRM: Xid (PCI:0000:1b:00): 79", "NVRM: Xid (PCI:0000:1b:00): 149, NETIR_LINK_EVT Fatal"),
        detection="the kernel's lines in the same text",
    ),
    complaint(
        "gpu-xid-doubt",
        "The kernel reports an Xid that a program may be the reason of, or one that is not fatal",
        r"NVRM: Xid |SXid \(PCI",
        expected="no Xid",
        likely="13, 31, 43: a kernel of the program; 45: another Xid ended it; 63, 92, 121: errors corrected",
        cure="look whether the process that the line names is of this job; compute-sanitizer on the program",
        link=_XID,
        seen_as=("NVRM: Xid (PCI:0000:1b:00): 31",),
        detection="the kernel's lines in the same text",
        general=True,
    ),
    complaint(
        "pcie-fatal-error",
        "The kernel reports a fatal PCIe error (AER), or that it took a link out of service for one (DPC)",
        r"severity=uncorrect\w+ \(fatal\)|uncorrect\w+ \(fatal\) error|DPC: containment event",
        expected="no fatal errors of PCIe",
        likely="a GPU, NIC, switch or riser below the port that the line names: what is behind it was reset",
        cure="lspci -tv shows what is below that port; dmesg -T | grep -E 'AER|DPC'; reseat or replace what errs again",
        link=_AER,
        seen_as=("PCIe Bus Error: severity=Uncorrected (Fatal)", "AER: Uncorrectable (Fatal) error message"),
        detection="the kernel's lines in the same text",
        of_programs=True,
    ),
    complaint(
        "pcie-error-doubt",
        "The kernel reports PCIe errors that it corrected, or that were not fatal (AER)",
        r"PCIe Bus Error: severity=|AER: (?:multiple )?(?:un)?correct\w+ ",
        expected="no errors of PCIe",
        likely="a link that repeats packets, which slows it; or a device that has nothing to do with this job",
        cure="lspci -tv shows what is below that port; gpubench topo shows replays and widths of the GPUs' links",
        link=_AER,
        seen_as=("AER: Corrected error received: 0000:1b:00.0",),
        detection="the kernel's lines in the same text",
        general=True,
        of_programs=True,
    ),
    complaint(
        "network-link-down",
        "The kernel reports a network interface that lost its link, or a cable with an error",
        r"mlx5_core .*link down|port module event\[error\]|link is down",
        expected="links that stay up",
        likely="cable, transceiver or switch port of that interface; one that is not used is harmless",
        cure="ibstat, or ethtool INTERFACE, on that node; gpubench check --quick shows the ports' errors and rates",
        link="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
        seen_as=("mlx5_core 0000:5e:00.0 ens1np0: Link down",),
        detection="the kernel's lines in the same text",
        of_programs=True,
    ),
    complaint(
        "nvlink-uncorrectable",
        "CUDA error: uncorrectable NVLink error detected during the execution",
        r"uncorrectable NVLink error",
        expected="links without errors",
        likely="a link, bridge or switch of the GPU on which it was seen, or of the one that it talked to",
        cure="dmesg -T | grep -i -E 'xid|sxid'; nvidia-smi nvlink -e on that node: errors that grow name the link",
        link=_XID,
        seen_as=("uncorrectable NVLink error detected during the execution",),
    ),
    complaint(
        "ecc-uncorrectable",
        "CUDA error: uncorrectable ECC error encountered",
        r"uncorrectable ECC error",
        expected="memory without uncorrectable errors",
        likely="the memory of the GPU on which it was seen",
        cure="nvidia-smi -q -d ECC,ROW_REMAPPER on that node; reset the GPU, replace it where the errors come back",
        link="https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html",
        seen_as=("uncorrectable ECC error encountered",),
    ),
)


_GUIDE = "https://github.com/NVIDIA/nccl"


def _reported(id_: str, title: str, pattern: str, *, expected: str, likely: str, cure: str) -> Condition:
    """A condition that NCCL's checks report in some words."""
    return complaint(
        id_,
        title,
        rf"^NCCL DIAG \[INFO\] {pattern}",
        cure=cure,
        likely=likely,
        expected=expected,
        link=_GUIDE,
        seen_as=("NCCL DIAG [INFO]",),
        detection="`NCCL DIAG [INFO]` lines of NCCL 2.31 and later",
    )


NCCL_DIAGNOSTICS = Family.of(
    "nccl_diagnostics",
    "What NCCL's own checks report",
    _reported(
        "nccl-diag-p2p",
        "NCCL's P2P check: peer access between GPUs does not work, or data arrive wrong",
        r"p2p: (?:only \d|read mismatch|write mismatch|peer-memory import failed|launch/check failed"
        r"|topology check failed|destination buffer unavailable|local CUDA setup failed)",
        expected="every peer access passes verification",
        likely="a link, an IOMMU or ACS that redirects, a fabric that is not ready, or a container that parts the GPUs",
        cure="gpubench p2p on these GPUs: it verifies every byte; gpubench topo --causes; dmesg | grep -i xid",
    ),
    _reported(
        "nccl-diag-hardware",
        "NCCL's RAS check: ECC errors, or NVLinks that are not active",
        r"(?:ECC|NVLink): (?!.*(?:unavailable|incomplete|not supported))",
        expected="no uncorrected errors, all links active",
        likely="a GPU or link that is about to fail",
        cure="nvidia-smi -q -d ECC; nvidia-smi nvlink -s; gpubench check on that node",
    ),
    _reported(
        "nccl-diag-network",
        "NCCL's network check: ranks whose bandwidth is more than 30 % off the median, or runs that failed",
        r"net bw: (?:.*off median|.*failed|.*timed out|.*cannot|.*unable|.*missing|mode=)",
        expected="all ranks within 30 % of the median",
        likely="a slow NIC, port or cable where it is below; perftest that is not installed where it could not run",
        cure="ib_write_bw between the nodes named; gpubench p2p under mpirun over these nodes",
    ),
    _reported(
        "nccl-diag-ranks-differ",
        "NCCL's RAS check: GPUs, drivers or NCCL_* variables differ between ranks",
        r"(?:GPU inventory|CUDA driver version|NCCL environment): ",
        expected="the same on all ranks",
        likely="an image, a driver or a launcher's environment that differs between nodes",
        cure="make the ranks named like the others",
    ),
)
