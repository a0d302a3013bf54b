"""Peer access that is granted and not kept, or refused without a reason of its own."""

from collections.abc import Callable, Iterator

from gpubench.conditions.cause import Cause, Family, Sighting, Unread, joined, nothing_in_facts
from gpubench.conditions.circumstances import Circumstances
from gpubench.conditions.log_evidence import Reason, Staged
from gpubench.conditions.sightings import of_pairs
from gpubench.model.paths.evidence import Confidence
from gpubench.model.paths.nccl_log import RemarkKind
from gpubench.model.paths.peer_policy import Refusal
from gpubench.model.paths.selection import Pair
from gpubench.model.results.rows.causes import Effect

_REFUSED = "peer-access-refused"

_CUDA_REFUSES = "0"

_SHOWS_REASON = "gpubench topo shows the driver's reason"


def _disagree(around: Circumstances) -> Iterator[Sighting | Unread]:
    pairs = frozenset(pair for pair in around.inside if around.wiring.peer_access(pair).contradicts)
    if pairs:
        yield of_pairs(
            around, pairs, joined([around.wiring.peer_access(pair).reason for pair in sorted(pairs)]), Confidence.LIKELY
        )


def _corrupts(around: Circumstances) -> Iterator[Sighting | Unread]:
    pairs = frozenset(pair for pair in around.wrong if around.wiring.peer_access(pair).possible)
    if pairs:
        yield of_pairs(around, pairs, "peer access is granted, and wrong data arrived", Confidence.PROVEN)


def _despite_grant(around: Circumstances) -> Iterator[Sighting | Unread]:
    for pair, shown in (around.copied or {}).items():
        if around.wiring.peer_access(pair).possible:
            yield of_pairs(around, [pair], f"the driver grants peer access, yet {shown}", Confidence.LIKELY)


def _any_refusal(around: Circumstances) -> Iterator[Sighting | Unread]:
    by_reason = dict[tuple[str, Refusal], set[Pair]]()
    for pair, refusal in around.refusals.items():
        by_reason.setdefault((around.wiring.peer_access(pair).reason, refusal), set()).add(pair)
    for (reason, _), pairs in by_reason.items():
        yield of_pairs(around, pairs, f"no peer access: {reason}", Confidence.LIKELY)


def _log_remark(kind: RemarkKind, advice: str) -> Callable[[Staged], Reason | None]:
    def find(staged: Staged) -> Reason | None:
        found = staged.found(kind)
        if not staged.inside or staged.network is not None or not found:
            return None
        return f"NCCL says: {found[0].gist}", advice

    return find


def _log_refused(staged: Staged) -> Reason | None:
    """What the driver or CUDA refuses although the GPUs could have it."""
    if not staged.inside or staged.network is not None:
        return None
    kinds = (RemarkKind.DRIVER_REFUSED, RemarkKind.PEER_ACCESS_REFUSED, RemarkKind.PEER_QUERY_FAILED)
    for note in staged.found(*kinds):
        return f"NCCL says: {note.gist}", _SHOWS_REASON
    for note in staged.found(RemarkKind.P2P_TYPE):
        if note.about[1] == _CUDA_REFUSES:
            return (
                f"CUDA refuses peer access between GPUs of the node: {note.text}",
                "gpubench topo shows which, and the driver's reason",
            )
    return None


_OF_PAIRS = (Effect.STAGED,)

_WAIVED = "https://github.com/NVIDIA/nvbandwidth/issues/13"


DISPUTED_ACCESS = Family(
    "disputed_access",
    "Peer access that is in dispute",
    (
        Cause(
            id="cuda-nvml-disagree",
            title="cudaDeviceCanAccessPeer and nvidia-smi topo -p2p disagree about P2P",
            effects=_OF_PAIRS,
            detection="cuDeviceCanAccessPeer against nvmlDeviceGetP2PStatus for every ordered pair",
            settles="gpubench p2p on these GPUs: it verifies every byte, and reads the counters",
            cure="look for another driver inside the container, for a fabric that is not ready, for MIG; restart the "
            "container after the driver changed",
            link="https://github.com/pytorch/pytorch/issues/84803",
            look=_disagree,
            implies=(_REFUSED,),
        ),
        Cause(
            id="peer-access-corrupts",
            title="P2P is granted and data arrive wrong, as NaN or zeros, or NCCL hangs (passthrough, IOMMU, ACS)",
            seen_as=("AMD-Vi: Event logged [IO_PAGE_FAULT]",),
            effects=(Effect.WRONG,),
            detection="the destination compared what arrived, between GPUs with peer access",
            settles="NCCL_P2P_DISABLE=1 gpubench allreduce: clean without peer access, wrong with it",
            cure="NCCL_P2P_DISABLE=1 until iommu=pt or off is booted, ACS redirection is off, or the hypervisor's P2P "
            "clique is right",
            link="https://github.com/NVIDIA/nccl/issues/2335",
            look=_corrupts,
        ),
        Cause(
            id="cuda-ipc-refused",
            title="Legacy CUDA IPC not supported (WSL, containers): cudaIpcOpenMemHandle fails",
            seen_as=("Legacy IPC not supported", "CUDA error 101", "CUDA error 201", "CUDA error 217"),
            effects=_OF_PAIRS,
            detection="`Legacy IPC not supported` in NCCL's log",
            settles="mpirun -n 2 gpubench p2p opens handles between two processes",
            cure="unset NCCL_CUMEM_ENABLE, or use a newer NCCL, which needs no legacy IPC",
            link="https://github.com/NVIDIA/TensorRT-LLM/pull/17034",
            look=nothing_in_facts,
            in_log=_log_remark(
                RemarkKind.LEGACY_IPC_REFUSED,
                "CUDA IPC does not work here: unset NCCL_CUMEM_ENABLE, or use a newer NCCL",
            ),
        ),
        Cause(
            id="staged-despite-grant",
            title="cudaMemcpyPeer as slow as without P2P although peer access is granted",
            effects=_OF_PAIRS,
            detection="NVLink counters that stand still, or bandwidth and latency with peer access on as with it off",
            settles="nvidia-smi topo -p2p n; gpubench p2p --pairs on these GPUs",
            cure="restart the fabric manager: systemctl restart nvidia-fabricmanager; then dmesg | grep -i Xid",
            link="https://github.com/NVIDIA/nccl/issues/814",
            look=_despite_grant,
            general=True,
        ),
        Cause(
            id=_REFUSED,
            title="P2P access is refused (cudaDeviceCanAccessPeer = 0): copies go through host memory",
            seen_as=(
                "P2P is disabled between connected GPUs",
                "peer access is not supported between these two devices",
                "cudaErrorPeerAccessUnsupported",
            ),
            effects=_OF_PAIRS,
            detection="cuDeviceCanAccessPeer and nvmlDeviceGetP2PStatus; `P2P is disabled between connected GPUs`, "
            "`Could not enable P2P`, `peer query failed` in NCCL's log",
            settles="nvidia-smi topo -p2p r",
            cure="nvidia-smi topo -p2p r; nvidia-smi -q | grep -A 3 MIG; nvidia-smi -q | grep -A 12 Fabric",
            link=_WAIVED,
            look=_any_refusal,
            in_log=_log_refused,
            general=True,
        ),
    ),
)
