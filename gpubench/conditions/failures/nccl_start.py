"""Jobs that NCCL did not start: ranks that do not find each other, do not fit together, or get no resources."""

from collections.abc import Iterator

from gpubench.conditions.definition.complaints import complaint
from gpubench.conditions.definition.condition import Condition, Family, Sighting, nothing_in_facts
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
