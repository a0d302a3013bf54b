"""Peer access that is granted and not kept, or refused without a reason of its own."""

from collections.abc import Sequence

from gpubench.conditions.definition.circumstances import Circumstances
from gpubench.conditions.definition.complaints import complained
from gpubench.conditions.definition.condition import (
    Condition,
    Family,
    Found,
    Sighting,
    in_each_node,
    joined,
    nothing_in_facts,
    with_ids,
)
from gpubench.conditions.definition.log_evidence import LoggedReason, Staged, remark_in_log
from gpubench.conditions.definition.sightings import of_pairs
from gpubench.conditions.nvlink import NVLINK
from gpubench.conditions.peer_access import PEER_ACCESS
from gpubench.model.paths.evidence import Confidence
from gpubench.model.paths.nccl_log import RemarkKind
from gpubench.model.paths.peer_policy import Refusal, is_switched
from gpubench.model.paths.selection import Pair
from gpubench.model.terms.verdict import Verdict

_REFUSED = "peer-access-refused"
_CUDA_REFUSES = "0"
_SHOWS_REASON = "gpubench topo shows the driver's reason"


@in_each_node
def _disagree(run: Circumstances) -> Found:
    by_reason = dict[str, list[Pair]]()
    for pair in run.inside:
        access = run.wiring.peer_access(pair)
        if access.contradicts:
            by_reason.setdefault(access.reason, []).append(pair)
    for reason, pairs in by_reason.items():
        named = tuple(run.named_pair(pair) for pair in pairs)
        yield of_pairs(run, pairs, reason, Confidence.LIKELY, names=named)


def _corrupts(run: Circumstances) -> Found:
    pairs = frozenset(pair for pair in run.wrong if run.wiring.peer_access(pair).possible)
    if pairs:
        yield of_pairs(run, pairs, "peer access is granted, and wrong data arrived")


def _despite_grant(run: Circumstances) -> Found:
    for pair, shown in (run.copied or {}).items():
        if run.wiring.peer_access(pair).possible:
            seen = f"the driver grants peer access, yet {shown}"
            cure = _cure_by_wiring(run, pair)
            yield of_pairs(run, [pair], seen, Confidence.LIKELY, cure=cure)


def _cure_by_wiring(run: Circumstances, pair: Pair) -> str:
    """What to do where NVLinks join a pair; empty where its way is PCIe, whose cure is the condition's own."""
    node, gpu = run.wiring.nodes.get(run.wiring.gpus[pair[0]].node), run.wiring.gpu(pair[0])
    if node is None or gpu is None or not run.wiring.has_nvlinks(pair):
        return ""
    if not is_switched(node, gpu):
        return "nvidia-smi nvlink -s; dmesg | grep -i Xid"
    where = "" if node.snapshot.nvswitches else "where the switches are managed (the host of a virtual machine): "
    return f"{where}systemctl restart nvidia-fabricmanager; then dmesg | grep -i Xid"


@in_each_node
def _any_refusal(run: Circumstances) -> Found:
    """One for each kind of refusal on a node, with what explains that kind, and its cure."""
    found = dict[tuple[int, Refusal, str], list[Pair]]()
    for pair, refusal in run.refusals.items():
        access = run.wiring.peer_access(pair)
        if not access.contradicts:
            found.setdefault((run.wiring.gpus[pair[0]].node, refusal, access.reason), []).append(pair)
    seen = {each: [it for it in each.look(run) if isinstance(it, Sighting)] for each in _OF_REFUSALS if found}
    touched = {each: _touched(sightings) for each, sightings in seen.items()}
    for (node, refusal, reason), pairs in found.items():
        why = next(
            (each for each, (all_of, of) in touched.items() if all(p in all_of or of & {*p} for p in pairs)), None
        )
        gpus = len(run.gpus_of(node))
        everybody = len(pairs) == gpus * (gpus - 1)
        names = joined(run.pair_name(pair).removeprefix(f"{run.host(node)} ") for pair in pairs)
        said = f"NVML says {refusal.status} ({reason})" if refusal.status else reason
        yield of_pairs(
            run,
            pairs,
            f"no peer access: {said}; copies go through host memory",
            Confidence.LIKELY,
            heading=f"{run.host(node)} {f'all {len(pairs)} GPU pairs' if everybody else names}".strip(),
            severity=Verdict.SKIP if refusal.by_design else Verdict.FAIL if refusal.wired else Verdict.WARN,
            expected="host memory, by design" if refusal.by_design else "peer access",
            likely=why.title if why else "",
            cure=with_ids(why.cure, [name for each in seen[why] for name in each.names]) if why else "",
        )


def _touched(sightings: Sequence[Sighting]) -> tuple[frozenset[Pair], frozenset[int]]:
    """The pairs, and the GPUs with all their pairs, that are touched by what was seen."""
    pairs = frozenset(pair for each in sightings for pair in each.pairs or ())
    return pairs, frozenset(gpu for each in sightings if each.pairs is None for gpu in each.gpus or ())


def _log_refused(staged: Staged) -> LoggedReason | None:
    """Access that the driver or CUDA refuses although the GPUs could have it."""
    if not staged.inside or staged.network is not None:
        return None
    kinds = (RemarkKind.DRIVER_REFUSED, RemarkKind.PEER_ACCESS_REFUSED, RemarkKind.PEER_QUERY_FAILED)
    for note in staged.found(*kinds):
        return LoggedReason(f"NCCL says: {note.gist}", _SHOWS_REASON)
    for note in staged.found(RemarkKind.P2P_TYPE):
        if note.about[1] == _CUDA_REFUSES:
            return LoggedReason(
                f"CUDA refuses peer access between GPUs of the node: {note.text}",
                "gpubench topo shows which, and the driver's reason",
            )
    return None


_OF_REFUSALS = (*PEER_ACCESS.conditions, *(each for each in NVLINK.conditions if each.id == "fabric-not-ready"))

_WAIVED = "https://github.com/NVIDIA/nvbandwidth/issues/13"


DISPUTED_ACCESS = Family.of(
    "disputed_access",
    "Peer access that is in dispute",
    Condition(
        id="cuda-nvml-disagree",
        title="cudaDeviceCanAccessPeer and nvidia-smi topo -p2p disagree about P2P",
        detection="cuDeviceCanAccessPeer against nvmlDeviceGetP2PStatus for every ordered pair",
        settles="gpubench p2p on these GPUs: it verifies every byte, and reads the counters",
        check="peer_access",
        expected="CUDA and NVML agree",
        likely="a container or virtual machine shows another topology than the driver has, a fabric that is not "
        "ready, or a driver bug: believe neither before data has arrived",
        aliases=("peer-access-contradiction",),
        cure="look for another driver inside the container, for a fabric that is not ready, for MIG; restart the "
        "container after the driver changed",
        link="https://github.com/pytorch/pytorch/issues/84803",
        look=_disagree,
        implies=(_REFUSED,),
    ),
    Condition(
        id="peer-access-corrupts",
        title="P2P is granted and data arrive wrong, as NaN or zeros, or NCCL hangs (passthrough, IOMMU, ACS)",
        seen_as=("AMD-Vi: Event logged [IO_PAGE_FAULT]",),
        detection="the destination compared what arrived, between GPUs with peer access",
        settles="NCCL_P2P_DISABLE=1 gpubench allreduce: clean without peer access, wrong with it",
        cure="NCCL_P2P_DISABLE=1 until iommu=pt or off is booted, ACS redirection is off, or the hypervisor's P2P "
        "clique is right",
        link="https://github.com/NVIDIA/nccl/issues/2335",
        look=_corrupts,
    ),
    Condition(
        id="cuda-ipc-refused",
        title="Legacy CUDA IPC not supported (WSL, containers): cudaIpcOpenMemHandle fails",
        seen_as=(
            "Legacy IPC not supported",
            "CUDA error 101",
            "CUDA error 201",
            "CUDA error 217",
            "failed to open CUDA IPC handle",
        ),
        detection="`Legacy IPC not supported` in NCCL's log, or a handle that could not be opened, which ends the job",
        expected="handles that open",
        likely="WSL, containers without a common IPC namespace, or GPUs without peer access that "
        "CUDA_VISIBLE_DEVICES hides from each other, so that NCCL does not see it",
        settles="mpirun -n 2 gpubench p2p opens handles between two processes",
        cure="unset NCCL_CUMEM_ENABLE, or use a newer NCCL, which needs no legacy IPC; docker run --ipc=host; "
        "all GPUs visible to every rank",
        link="https://github.com/NVIDIA/TensorRT-LLM/pull/17034",
        look=nothing_in_facts,
        in_log=remark_in_log(
            RemarkKind.LEGACY_IPC_REFUSED,
            "CUDA IPC does not work here: unset NCCL_CUMEM_ENABLE, or use a newer NCCL",
        ),
        in_job=complained(r"open CUDA IPC handle|cudaIpcOpenMemHandle|peer access is not supported between"),
    ),
    Condition(
        id="staged-despite-grant",
        title="cudaMemcpyPeer as slow as without P2P although peer access is granted",
        detection="NVLink counters that stand still, or bandwidth and latency with peer access on as with it off",
        settles="nvidia-smi topo -p2p n; gpubench p2p --pairs on these GPUs",
        cure="dmesg | grep -i -E 'Xid|IO_PAGE_FAULT|DMAR'; lspci -vvv | grep -i acsctl (as root)",
        link="https://github.com/NVIDIA/nccl/issues/814",
        look=_despite_grant,
        general=True,
    ),
    Condition(
        id=_REFUSED,
        title="P2P access is refused (cudaDeviceCanAccessPeer = 0): copies go through host memory",
        seen_as=(
            "P2P is disabled between connected GPUs",
            "peer access is not supported between these two devices",
            "cudaErrorPeerAccessUnsupported",
        ),
        detection="cuDeviceCanAccessPeer and nvmlDeviceGetP2PStatus; `P2P is disabled between connected GPUs`, "
        "`Could not enable P2P`, `peer query failed` in NCCL's log",
        settles="nvidia-smi topo -p2p r",
        check="peer_access",
        likely="the driver supports it for none of these GPUs, or gives no reason",
        cure="nvidia-smi topo -p2p r; nvidia-smi -q | grep -A 3 MIG; nvidia-smi -q | grep -A 12 Fabric",
        link=_WAIVED,
        look=_any_refusal,
        in_log=_log_refused,
        general=True,
    ),
)
