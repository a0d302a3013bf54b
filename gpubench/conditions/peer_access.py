"""Peer access between GPUs of a node: refused by chipset, GPU, driver or settings, or granted and not kept."""

import re
from collections.abc import Callable, Sequence

from gpubench.conditions.definition.circumstances import Circumstances, LoggedReason, Staged, remark_in_log
from gpubench.conditions.definition.condition import (
    Condition,
    Family,
    Found,
    Look,
    Sighting,
    complained,
    in_each_node,
    joined,
    nothing_in_facts,
    of_every_node,
    of_gpu,
    of_pairs,
    with_ids,
)
from gpubench.conditions.nvlink import NVLINK
from gpubench.model.paths.evidence import Confidence
from gpubench.model.paths.nccl_log import RemarkKind
from gpubench.model.paths.topology import P2P_STATUS, Refusal, Topology, is_nvlink, is_switched
from gpubench.model.paths.transport import Pair
from gpubench.model.terms.verdict import Verdict

_REFUSED = "peer-access-refused"
_MIB = 2**20


def _of_refusal(seen: str, holds: Callable[[Refusal], bool], *, virtual: bool | None = None) -> Look:
    """For all pairs whose refusal is of some kind; `virtual`: of virtual machines, or of bare metal, alone."""

    @in_each_node
    def look(run: Circumstances) -> Found:
        pairs = [
            pair
            for pair, refusal in run.refusals.items()
            if holds(refusal) and virtual in (None, bool(run.node_of(pair).snapshot.machine.virtual_machine))
        ]
        yield from [of_pairs(run, pairs, seen)] if pairs else []

    return look


def _status(status: str, where: str = "", *, virtual: bool | None = None) -> Look:
    """For what NVML says of pairs that no NVLink joins, in a word."""
    seen = f"NVML says {status}: {P2P_STATUS[status]}{where}"
    return _of_refusal(seen, lambda each: each.status == status and _over_pcie(each), virtual=virtual)


def _over_pcie(refusal: Refusal) -> bool:
    return not (refusal.wired or refusal.mig or refusal.mesh)


_GNS = f"NVML says GNS: {P2P_STATUS['GNS']}"


@in_each_node
def _mig(run: Circumstances) -> Found:
    """A finding of its own where the profile or a sibling has it off; on all GPUs it is how somebody wants the node."""
    for position, node, gpu in run.gpus():
        if gpu.mig:
            profile = run.exact_profile(run.wiring.gpus[position].node)
            sibling = any(each.mig is False for each in node.gpus)
            odd = sibling or (profile is not None and profile.gpu.mig is False)
            expected = f"off, as {'its siblings have' if sibling else 'the profile has'} it"
            severity = None if sibling else Verdict.SKIP
            yield of_gpu(run, position, "MIG is on", quiet=not odd, expected=expected, severity=severity)


def _confidential(node: Topology) -> str:
    computing = node.snapshot.driver_settings.confidential_computing
    bounces = computing is not None and computing.enabled and computing.multi_gpu not in ("protected_pcie", "nvle")
    return "confidential computing is on, without protected PCIe" if bounces else ""


def _registry_key(run: Circumstances) -> Found:
    keys = joined(
        f"{name}={value}"
        for node in run.nodes.values()
        for name, value in (node.snapshot.driver_settings.registry_keys or {}).items()
        if "p2p" in name.lower()
    )
    seen = "NVML says DR: disabled by a driver registry key" + (f" ({keys})" if keys else "")
    return _of_refusal(seen, lambda each: each.status == "DR" and not each.mig)(run)


@in_each_node
def _mixed(run: Circumstances) -> Found:
    """Refused between models, and granted between two of a model."""
    alike = [pair for pair in run.inside if not _models_differ(run, pair)]
    granted = {run.wiring.gpus[pair[0]].node for pair in alike if run.wiring.peer_access(pair).possible}
    pairs = [
        pair
        for pair, refusal in run.refusals.items()
        if _over_pcie(refusal) and run.wiring.gpus[pair[0]].node in granted and _models_differ(run, pair)
    ]
    if pairs:
        seen = "GPUs of different models have no peer access, those of one model have"
        yield of_pairs(run, pairs, seen, Confidence.LIKELY)


def _models_differ(run: Circumstances, pair: Pair) -> bool:
    one, other = (run.wiring.gpu(gpu) for gpu in pair)
    return one is not None and other is not None and None not in (one.name, other.name) and one.name != other.name


@in_each_node
def _bar1(run: Circumstances) -> Found:
    ends = {gpu for pair, refusal in run.refusals.items() if _over_pcie(refusal) for gpu in pair}
    for position, _, gpu in run.gpus():
        device = run.pci_devices[run.wiring.gpus[position].node].get(gpu.bus_id or "")
        window = gpu.bar1_bytes or (device.bar1_bytes if device else None)
        most = device.bar1_most_bytes if device else None
        if position in ends and window and gpu.memory_bytes and window < gpu.memory_bytes:
            could = f", and could be {most // _MIB:,} MiB" if most and most > window else ""
            seen = f"BAR 1 shows {window // _MIB:,} MiB of {gpu.memory_bytes // _MIB:,} MiB of memory{could}"
            yield of_gpu(run, position, seen, Confidence.LIKELY if could else Confidence.WEAK)


_WITHOUT_PEER_ACCESS = re.compile(r"RTX [2345]0\d\d\b|GTX 16\d\d\b|TITAN RTX")
"""GPUs of which the driver gives none peer access over PCIe; those before had it."""

_NEVER_WITH_PEER_ACCESS = re.compile(r"GeForce RTX [345]0\d\d")
"""Those of which no driver of NVIDIA's ever gave any; CUDA grants it where somebody patched the driver."""

_GRANTED = "1"

_WITH_NVLINKS = re.compile(r"SXM|DGXS|\bNVL\b|\bH[12]00\b(?! PCIe)|\bH20\b|\bH800\b(?! PCIe)|\bB[23]00\b|\bGB[23]00\b")
"""GPUs on boards whose NVLinks join all of them."""


def has_nvlinks(staged: Staged) -> bool:
    """True if anything in the log shows that the GPUs have NVLinks."""
    switched = any(note.about[0] == "" for note in staged.found(RemarkKind.MULTICAST))
    refused = bool(staged.found(RemarkKind.NVLINK_REFUSED))
    by_model = any(map(_WITH_NVLINKS.search, (*staged.models, *staged.listed_models)))
    return staged.nvlinks or switched or refused or by_model or is_nvlink(staged.path)


def _log_without_nvlinks(staged: Staged) -> LoggedReason | None:
    """GPUs on PCIe that the driver gives none; where there are NVLinks, that is a fault."""
    refused = [note for note in staged.notes if note.kind is RemarkKind.DRIVER_REFUSED]
    if not staged.inside or staged.network is not None or has_nvlinks(staged):
        return None
    models = ", ".join(staged.models)
    if not refused:
        granted = any(note.about[1] == _GRANTED for note in staged.found(RemarkKind.P2P_TYPE))
        never = bool(models) and all(map(_NEVER_WITH_PEER_ACCESS.search, staged.models))
        seen = f"{models} have no peer access over PCIe"
        return LoggedReason(seen, "nothing to repair") if never and not granted else None
    known = bool(models) and all(map(_WITHOUT_PEER_ACCESS.search, staged.models))
    seen = f"the driver gives these GPUs no peer access: {refused[0].gist}"
    if known and not staged.virtual:
        return LoggedReason(f"{seen}; {models} have none over PCIe", "nothing to repair")
    unknown = "in a virtual machine the hypervisor may be the reason" if staged.virtual else "of others it is a fault"
    return LoggedReason(
        f"{seen}; GeForce GPUs have none over PCIe, {unknown}",
        "gpubench topo shows the GPUs' model and the driver's reason",
        is_proven=False,
    )


_WAIVED = "https://github.com/NVIDIA/nvbandwidth/issues/13"


PEER_ACCESS = Family.of(
    "peer_access",
    "Peer access",
    Condition(
        id="mig-on",
        title="MIG is enabled, so GPUs have no peer-to-peer (P2P) access by PCIe or NVLink",
        seen_as=("MIG Mode : Current : Enabled",),
        detection="nvmlDeviceGetMigMode",
        settles="nvidia-smi -q | grep -A 3 'MIG Mode'",
        check="mig",
        likely="somebody split it; its instances reach no other GPU but through host memory",
        cure="nothing to repair; nvidia-smi -i GPU -mig 0 gives peer access back, and takes the instances away",
        link="https://github.com/NVIDIA/nccl/issues/1716",
        look=_mig,
        implies=("cuda-nvml-disagree", _REFUSED),
        by_design=True,
    ),
    Condition(
        id="confidential-computing",
        title="Confidential computing (CC) is on: transfers go through encrypted bounce buffers, P2P is off",
        detection="nvmlSystemGetConfComputeSettings; `CC On` in NCCL's log",
        settles="nvidia-smi conf-compute -f; nvidia-smi topo -p2p r",
        cure="protected PCIe mode (PPCIE) gives all GPUs of a board to one confidential VM; else switch CC off",
        link="https://github.com/NVIDIA/open-gpu-kernel-modules",
        look=of_every_node(_confidential, Confidence.LIKELY, "confidential_computing"),
        in_log=remark_in_log(RemarkKind.CONFIDENTIAL, "confidential computing encrypts transfers through host memory"),
        implies=(_REFUSED,),
    ),
    Condition(
        id="gpu-without-pcie-p2p",
        title="GNS: this GPU model has no P2P over PCIe (GeForce RTX 4090, 5090, most 30xx)",
        seen_as=("GNS = GPU not supported", "Device=0 CANNOT Access Peer Device=1"),
        detection="nvmlDeviceGetP2PStatus says GNS (GPU not supported) for GPUs without NVLinks, and no two of the "
        "same models have P2P; or NCCL's log has the driver's refusal for GPUs on PCIe",
        settles="nvidia-smi topo -p2p r",
        cure="nothing to repair: shared memory is the way here. A patched open kernel module exists; if you try "
        "it, `gpubench p2p` before and after says whether it is faster, and whether the data are right",
        link="https://github.com/tinygrad/open-gpu-kernel-modules/issues/44",
        look=_of_refusal(_GNS, lambda each: each.status == "GNS" and _over_pcie(each) and not each.odd),
        in_log=_log_without_nvlinks,
        implies=("cuda-nvml-disagree", "bar1-small", _REFUSED),
        by_design=True,
    ),
    Condition(
        id="p2p-of-some-alike",
        title="GNS between some GPUs, while others of the same models have P2P",
        seen_as=("GNS = GPU not supported",),
        detection="nvmlDeviceGetP2PStatus says GNS for GPUs without NVLinks, and OK for two others of the same models",
        settles="nvidia-smi topo -p2p r; nvidia-smi -q of both: VBIOS, virtualization mode, MIG",
        likely="a GPU with another VBIOS or setting than its siblings, or one that is failing",
        cure="compare VBIOS and virtualization mode in nvidia-smi -q; where they are alike, reboot the node",
        link="https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html",
        look=_of_refusal(
            f"{_GNS}, as no two of these models would have it, and others have",
            lambda each: each.odd and _over_pcie(each),
        ),
        implies=("cuda-nvml-disagree", "mixed-gpu-models", "bar1-small", _REFUSED),
    ),
    Condition(
        id="nvlink-mesh",
        title="TNS between GPUs that NVLinks join to others (DGX-1, hybrid cube mesh): no direct path",
        detection="nvmlDeviceGetP2PStatus says TNS, both GPUs have active NVLinks to other GPUs",
        settles="nvidia-smi topo -m",
        cure="nothing to repair: NCCL takes the NVLinks of a GPU between. NCCL_NVB_DISABLE=1 gpubench alltoall, "
        "and without, shows what they are worth",
        link="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
        look=_of_refusal(
            "NVML says TNS, and NVLinks join each of these GPUs to others",
            lambda each: each.mesh and not each.wired and not each.mig,
        ),
        implies=("cuda-nvml-disagree", _REFUSED),
        by_design=True,
    ),
    Condition(
        id="p2p-registry-key",
        title="DR: a driver registry key disables P2P (ForceP2P, RMForceP2PType, NVreg_RegistryDwords)",
        detection="nvmlDeviceGetP2PStatus says DR; RegistryDwords in /proc/driver/nvidia/params",
        settles="grep RegistryDwords /proc/driver/nvidia/params /etc/modprobe.d/*",
        cure="take the key out of /etc/modprobe.d, then rmmod nvidia and modprobe nvidia, or reboot",
        link="https://github.com/noonghunna/club-3090/pull/926",
        look=_registry_key,
        implies=("fabric-not-ready", "cuda-nvml-disagree", "bar1-small", _REFUSED),
    ),
    Condition(
        id="p2p-virtual-machine",
        title="CNS in a virtual machine: the hypervisor does not say that GPUs may reach each other (P2P clique)",
        seen_as=("CNS = Chipset not supported", "Device=0 CANNOT Access Peer Device=1"),
        detection="nvmlDeviceGetP2PStatus says CNS, and the CPU has the hypervisor flag",
        settles="nvidia-smi topo -p2p r in the guest and on the host",
        cure="QEMU: x-nv-gpudirect-clique=0 for each vfio-pci GPU that shares a PCIe switch on the host",
        link="https://github.com/cloud-hypervisor/cloud-hypervisor/pull/6235",
        look=_status("CNS", " in a virtual machine", virtual=True),
        implies=("cuda-nvml-disagree", "mixed-gpu-models", "bar1-small", _REFUSED),
    ),
    Condition(
        id="p2p-chipset",
        title="CNS: chipset not supported for P2P, no common PCIe switch",
        seen_as=("CNS = Chipset not supported", "Device=0 CANNOT Access Peer Device=1"),
        detection="nvmlDeviceGetP2PStatus says CNS on bare metal",
        settles="nvidia-smi topo -p2p r; lspci -tv shows what is between them",
        cure="put the GPUs under one PCIe switch, or into slots of one CPU that the driver knows",
        link=_WAIVED,
        look=_status("CNS", virtual=False),
        implies=("cuda-nvml-disagree", "mixed-gpu-models", "bar1-small", _REFUSED),
    ),
    Condition(
        id="p2p-across-sockets",
        title="TNS: P2P topology not supported, GPUs on different sockets or I/O hubs",
        detection="nvmlDeviceGetP2PStatus says TNS for GPUs without NVLinks",
        settles="nvidia-smi topo -m: SYS between them",
        cure="move the cards to one socket",
        link="https://github.com/NVIDIA/nvbandwidth/issues/45",
        look=_status("TNS"),
        implies=("cuda-nvml-disagree", "mixed-gpu-models", "bar1-small", _REFUSED),
    ),
    Condition(
        id="mixed-gpu-models",
        title="GPUs of different models or generations have no P2P with each other",
        detection="pairs of different models are refused, pairs of one model on the node are not",
        settles="nvidia-smi topo -p2p r",
        cure="group ranks by model: CUDA_VISIBLE_DEVICES with GPUs of one model",
        link="https://github.com/NVIDIA/open-gpu-kernel-modules",
        look=_mixed,
        implies=("bar1-small", _REFUSED),
    ),
    Condition(
        id="bar1-small",
        title="BAR1 is smaller than the GPU's memory: Resizable BAR or Above 4G Decoding is off",
        detection="BAR 1 (NVML, or /sys resource) against memory, of GPUs whose P2P over PCIe is refused; "
        "resource1_resize says how large it could be",
        settles="nvidia-smi -q | grep -A 3 BAR1; in a guest the host's reading counts",
        cure="switch on Resizable BAR and Above 4G Decoding in the BIOS",
        link="https://github.com/NVIDIA/open-gpu-kernel-modules",
        look=_bar1,
        implies=(_REFUSED,),
    ),
)


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
