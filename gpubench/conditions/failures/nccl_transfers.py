"""Jobs that NCCL ended while data moved: RDMA that failed, ranks that died, calls that returned errors."""

import re
from collections.abc import Iterator

from gpubench.conditions.definition.complaints import REMOTE, complaint
from gpubench.conditions.definition.condition import Condition, Family, Sighting, joined, nothing_in_facts
from gpubench.model.paths.nccl_log import LogFacts

_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_TROUBLE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
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
