"""Peer access between GPUs of a node: refused by chipset, GPU, driver or settings, or granted but not working."""

import re
from collections.abc import Callable, Sequence

from gpubench.conditions.circumstances import VERIFIED_COPIES, Circumstances, Found, Sighting, joined
from gpubench.conditions.condition import Condition, Family, Look, fill_ids, node_detector, single_node
from gpubench.conditions.logged import Complained, LoggedReason, Staged, remark_detector
from gpubench.conditions.nvlink import NVLINK, RESTART_FABRIC
from gpubench.model.paths.nccl_log import RemarkKind
from gpubench.model.paths.topology import P2P_STATUS, ROCM, Refusal, Topology, is_nvlink, is_switched
from gpubench.model.paths.transport import Confidence, Pair
from gpubench.model.terms.verdict import NO_CURE, Cure, Verdict

_REFUSED = "peer-access-refused"
_KV = "kv-no-peer-access"
_MIB = 2**20


def _refusal_detector(seen: str, holds: Callable[[Refusal], bool], *, virtual: bool | None = None) -> Look:

    @single_node
    def look(run: Circumstances) -> Found:
        pairs = [
            pair
            for pair, refusal in run.refusals.items()
            if holds(refusal) and virtual in (None, bool(run.pair_node(pair).snapshot.machine.virtual_machine))
        ]
        yield from [run.pair_sighting(pairs, seen)] if pairs else []

    return look


def _status(status: str, where: str = "", *, virtual: bool | None = None) -> Look:
    seen = f"NVML reports {status}: {P2P_STATUS[status]}{where}"
    return _refusal_detector(
        seen, lambda refusal: refusal.status == status and _is_pcie_refusal(refusal), virtual=virtual
    )


def _is_pcie_refusal(refusal: Refusal) -> bool:
    return not (refusal.wired or refusal.mig or refusal.mesh)


_GNS = f"NVML reports GNS: {P2P_STATUS['GNS']}"


@single_node
def _mig(run: Circumstances) -> Found:
    """Find GPUs that are split by MIG.

    MIG is usually intended, so it is reported only if siblings or the profile have it off.
    """
    for position, node, gpu in run.gpus():
        if gpu.mig:
            profile = run.exact_profile(run.wiring.gpus[position].node)
            sibling = any(other.mig is False for other in node.gpus)
            odd = sibling or (profile is not None and profile.gpu.mig is False)
            expected = f"MIG off, {'like its siblings' if sibling else 'as in the profile'}"
            severity = None if sibling and run.profile_asked_for else Verdict.SKIP
            yield run.gpu_sighting(position, "MIG is on", quiet=not odd, expected=expected, severity=severity)


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
    seen = "NVML reports DR: disabled by a driver registry key" + (f" ({keys})" if keys else "")
    return _refusal_detector(seen, lambda refusal: refusal.status == "DR" and not refusal.mig)(run)


@single_node
def _mixed(run: Circumstances) -> Found:
    alike = [pair for pair in run.local_pairs if not _models_differ(run, pair)]
    granted = {run.wiring.gpus[pair[0]].node for pair in alike if run.wiring.peer_access(pair).possible}
    pairs = [
        pair
        for pair, refusal in run.refusals.items()
        if _is_pcie_refusal(refusal) and run.wiring.gpus[pair[0]].node in granted and _models_differ(run, pair)
    ]
    if pairs:
        seen = "no peer access between GPUs of different models, but GPUs of the same model have it"
        yield run.pair_sighting(pairs, seen, Confidence.LIKELY)


def _models_differ(run: Circumstances, pair: Pair) -> bool:
    one, other = (run.wiring.gpu(gpu) for gpu in pair)
    return one is not None and other is not None and None not in (one.name, other.name) and one.name != other.name


@single_node
def _bar1(run: Circumstances) -> Found:
    ends = {gpu for pair, refusal in run.refusals.items() if _is_pcie_refusal(refusal) for gpu in pair}
    for position, _, gpu in run.gpus():
        device = run.pci_devices[run.wiring.gpus[position].node].get(gpu.bus_id or "")
        window = gpu.bar1_bytes or (device.bar1_bytes if device else None)
        most = device.bar1_most_bytes if device else None
        if position in ends and window and gpu.memory_bytes and window < gpu.memory_bytes:
            could = f"; it could be {most // _MIB:,} MiB" if most and most > window else ""
            seen = f"BAR 1 is {window // _MIB:,} MiB for {gpu.memory_bytes // _MIB:,} MiB of memory{could}"
            yield run.gpu_sighting(position, seen, Confidence.LIKELY if could else Confidence.WEAK)


_WITHOUT_PEER_ACCESS = re.compile(r"RTX [2345]0\d\d\b|GTX 16\d\d\b|TITAN RTX")
"""GPUs for which the driver grants no peer access over PCIe. Earlier generations had it."""

_NEVER_WITH_PEER_ACCESS = re.compile(r"GeForce RTX [345]0\d\d")  # Peer access over PCIe needs a patched driver
_GRANTED = "1"

_WITH_NVLINKS = re.compile(r"SXM|DGXS|\bNVL\b|\bH[12]00\b(?! PCIe)|\bH20\b|\bH800\b(?! PCIe)|\bB[23]00\b|\bGB[23]00\b")
"""GPUs on boards with NVLinks between all GPUs."""


def has_nvlinks(staged: Staged) -> bool:
    """True if the log shows that the GPUs have NVLinks."""
    switched = any(note.about[0] == "" for note in staged.find_notes(RemarkKind.MULTICAST))
    refused = bool(staged.find_notes(RemarkKind.NVLINK_REFUSED))
    by_model = any(map(_WITH_NVLINKS.search, (*staged.models, *staged.listed_models)))
    return staged.nvlinks or switched or refused or by_model or is_nvlink(staged.path)


def _log_without_nvlinks(staged: Staged) -> LoggedReason | None:
    refused = [note for note in staged.notes if note.kind is RemarkKind.DRIVER_REFUSED]
    if not staged.through_shm or has_nvlinks(staged):
        return None
    models = ", ".join(staged.models)
    if not refused:
        granted = any(note.about[1] == _GRANTED for note in staged.find_notes(RemarkKind.P2P_TYPE))
        never = bool(models) and all(map(_NEVER_WITH_PEER_ACCESS.search, staged.models))
        seen = f"{models}: no peer access over PCIe"
        return LoggedReason(seen, Cure(comment="Nothing to repair.")) if never and not granted else None
    known = bool(models) and all(map(_WITHOUT_PEER_ACCESS.search, staged.models))
    seen = f"the driver refuses peer access between these GPUs: {refused[0].gist}"
    if known and not staged.is_virtual:
        return LoggedReason(f"{seen}; {models}: no peer access over PCIe", Cure(comment="Nothing to repair."))
    unknown = (
        "in a virtual machine the hypervisor may be the reason"
        if staged.is_virtual
        else "for other GPUs this is a fault"
    )
    return LoggedReason(
        f"{seen}; GeForce GPUs have no peer access over PCIe; {unknown}",
        Cure.of("gpubench topo", comment="It shows the GPUs' model and the driver's reason."),
        is_proven=False,
    )


_WAIVED = "https://github.com/NVIDIA/nvbandwidth/issues/13"

PEER_ACCESS = Family.of(
    "peer_access",
    "Peer access",
    Condition(
        id="mig-on",
        title="MIG is enabled, so GPUs have no peer-to-peer (P2P) access over PCIe or NVLink",
        settles="nvidia-smi -q | grep -A 3 'MIG Mode'",
        check="mig",
        likely="the GPU was split into MIG instances, which reach other GPUs only through host memory",
        command="nvidia-smi mig -lgi -i GPU",
        comment="It lists the instances. If they are intended, there is nothing to repair. Otherwise `nvidia-smi "
        "-mig 0 -i GPU` removes them and restores peer access, which `gpubench p2p` verifies.",
        link="https://github.com/NVIDIA/nccl/issues/1716",
        look=_mig,
        implies=("cuda-nvml-disagree", _REFUSED, _KV),
        by_design=True,
    ),
    Condition(
        id="confidential-computing",
        title="Confidential computing (CC) is on: P2P is off, and transfers use encrypted buffers in host memory",
        settles="nvidia-smi conf-compute -f; nvidia-smi topo -p2p r",
        command="nvidia-smi conf-compute -f",
        comment="If nothing confidential runs here, switch CC off. Otherwise, use protected PCIe mode (PPCIE), "
        "with all GPUs of the board in one confidential VM. Then verify the data with `gpubench p2p`.",
        link="https://github.com/NVIDIA/nvtrust/issues/22",
        look=node_detector(_confidential, Confidence.LIKELY, "confidential_computing"),
        in_log=remark_detector(
            RemarkKind.CONFIDENTIAL, Cure(comment="Confidential computing encrypts transfers through host memory.")
        ),
        implies=(_REFUSED,),
    ),
    Condition(
        id="gpu-without-pcie-p2p",
        title="GNS: this GPU model has no P2P over PCIe (GeForce RTX 4090, 5090, most 30xx)",
        settles="nvidia-smi topo -p2p r",
        comment="Nothing to repair: these GPUs use shared memory. With a patched open kernel module, run "
        "`gpubench p2p` before and after to compare speed and to verify the data.",
        link="https://github.com/tinygrad/open-gpu-kernel-modules/issues/44",
        look=_refusal_detector(
            _GNS, lambda refusal: refusal.status == "GNS" and _is_pcie_refusal(refusal) and not refusal.odd
        ),
        in_log=_log_without_nvlinks,
        implies=("cuda-nvml-disagree", "bar1-small", _REFUSED),
        by_design=True,
    ),
    Condition(
        id="nvlink-mesh",
        title="TNS between GPUs whose NVLinks lead to other GPUs (DGX-1, hybrid cube mesh): no direct path",
        settles="nvidia-smi topo -m",
        comment="Nothing to repair: NCCL uses NVLinks through a third GPU. To see their effect, run "
        "`gpubench alltoall` with and without NCCL_NVB_DISABLE=1.",
        link="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
        look=_refusal_detector(
            "NVML reports TNS, and the NVLinks of both GPUs lead to other GPUs",
            lambda refusal: refusal.mesh and not refusal.wired and not refusal.mig,
        ),
        implies=("cuda-nvml-disagree", _REFUSED),
        by_design=True,
    ),
    Condition(
        id="p2p-registry-key",
        title="DR: a driver registry key disables P2P (ForceP2P, RMForceP2PType, NVreg_RegistryDwords)",
        settles="grep RegistryDwords /proc/driver/nvidia/params /etc/modprobe.d/*",
        command="grep RegistryDwords /etc/modprobe.d/*",
        comment="Remove the key from the file and reboot. Before running any jobs, verify the data with "
        "`gpubench p2p`, because the key may be there to avoid wrong peer copies.",
        link="https://github.com/noonghunna/club-3090/pull/926",
        look=_registry_key,
        implies=("fabric-not-ready", "cuda-nvml-disagree", "bar1-small", _REFUSED),
    ),
    Condition(
        id="p2p-virtual-machine",
        title="CNS in a virtual machine: the hypervisor does not declare P2P between the GPUs (no P2P clique)",
        settles="`nvidia-smi topo -p2p r` in the guest and on the host",
        command="nvidia-smi topo -p2p r",
        comment="In QEMU, set x-nv-gpudirect-clique=0 on each vfio-pci GPU that shares a PCIe switch on "
        "the host. Before running any jobs, verify the data with `gpubench p2p`.",
        link="https://github.com/cloud-hypervisor/cloud-hypervisor/pull/6235",
        look=_status("CNS", " in a virtual machine", virtual=True),
        implies=("cuda-nvml-disagree", "mixed-gpu-models", "bar1-small", _REFUSED),
    ),
    Condition(
        id="p2p-chipset",
        title="CNS: chipset not supported for P2P, no common PCIe switch",
        settles="`nvidia-smi topo -p2p r`, and `lspci -tv` for the bridges between them",
        command="lspci -tv",
        comment="Move the GPUs to slots under one PCIe switch, or of one CPU that the driver supports. "
        "Then verify the data with `gpubench p2p`.",
        link=_WAIVED,
        look=_status("CNS", virtual=False),
        implies=("cuda-nvml-disagree", "mixed-gpu-models", "bar1-small", _REFUSED),
    ),
    Condition(
        id="p2p-across-sockets",
        title="TNS: P2P topology not supported, GPUs on different sockets or I/O hubs",
        settles="`nvidia-smi topo -m`, which shows SYS between them",
        command="nvidia-smi topo -m",
        comment="Move the cards to slots of one socket, then verify the data with `gpubench p2p`.",
        link="https://github.com/NVIDIA/nvbandwidth/issues/45",
        look=_status("TNS"),
        implies=("cuda-nvml-disagree", "mixed-gpu-models", "bar1-small", _REFUSED),
    ),
    Condition(
        id="mixed-gpu-models",
        title="No P2P between GPUs of different models or generations",
        settles="nvidia-smi topo -p2p r",
        command="nvidia-smi -L",
        comment="Run each job on GPUs of one model, selected with CUDA_VISIBLE_DEVICES.",
        link="https://github.com/aikitoria/open-gpu-kernel-modules/issues/13",
        look=_mixed,
        implies=("bar1-small", _REFUSED),
    ),
    Condition(
        id="bar1-small",
        title="BAR1 is smaller than the GPU's memory: Resizable BAR or Above 4G Decoding is off",
        settles="`nvidia-smi -q | grep -A 3 BAR1` (for a virtual machine, on the host)",
        command="nvidia-smi -q | grep -A 3 BAR1",
        comment="Switch on Resizable BAR and Above 4G Decoding in the BIOS. Before running any jobs, verify the "
        "data with `gpubench p2p`.",
        link="https://github.com/tinygrad/open-gpu-kernel-modules/pull/22",
        look=_bar1,
        implies=(_REFUSED,),
    ),
)

_CUDA_REFUSES = "0"
_SHOWS_ACCESS = Cure.of("amd-smi topology", comment="On a healthy machine, its access table shows ENABLED everywhere.")
_SHOWS_REASON = Cure.of("gpubench topo", comment="It shows the driver's reason.")


@single_node
def _disagree(run: Circumstances) -> Found:
    by_reason = dict[str, list[Pair]]()
    for pair in run.local_pairs:
        access = run.wiring.peer_access(pair)
        if access.contradicts:
            by_reason.setdefault(access.reason, []).append(pair)
    for reason, pairs in by_reason.items():
        named = tuple(run.pair_with_ids(pair) for pair in pairs)
        yield run.pair_sighting(pairs, reason, Confidence.LIKELY, names=named)


def _corrupts(run: Circumstances) -> Found:
    pairs = frozenset(pair for pair in run.wrong if run.wiring.peer_access(pair).possible)
    if pairs:
        yield run.pair_sighting(pairs, "peer access is granted, but wrong data arrived")


def _despite_grant(run: Circumstances) -> Found:
    for pair, shown in (run.copied or {}).items():
        if run.wiring.peer_access(pair).possible:
            seen = f"the driver grants peer access, but {shown}"
            cure = _cure_by_wiring(run, pair)
            yield run.pair_sighting([pair], seen, Confidence.LIKELY, cure=cure)


def _cure_by_wiring(run: Circumstances, pair: Pair) -> Cure:
    """Return a cure for pairs that NVLinks join. For other pairs it is empty, so the condition's cure applies."""
    node, gpu = run.wiring.nodes.get(run.wiring.gpus[pair[0]].node), run.wiring.gpu(pair[0])
    if node is None or gpu is None or not run.wiring.has_nvlinks(pair):
        return NO_CURE
    if not is_switched(node, gpu):
        return Cure.of("nvidia-smi nvlink -s", comment="Look for Xid errors in dmesg too.")
    where = "" if node.snapshot.nvswitches else " on the machine that manages the switches (the virtual machine's host)"
    comment = f"Run it{where}, and look for Xid errors in dmesg. {RESTART_FABRIC}"
    return Cure.of("systemctl status nvidia-fabricmanager", comment=comment)


@single_node
def _any_refusal(run: Circumstances) -> Found:
    found = dict[tuple[int, Refusal, str], list[Pair]]()
    for pair, refusal in run.refusals.items():
        access = run.wiring.peer_access(pair)
        if not access.contradicts:
            found.setdefault((run.wiring.gpus[pair[0]].node, refusal, access.reason), []).append(pair)
    seen = {
        rule: [sighting for sighting in rule.look(run) if isinstance(sighting, Sighting)]
        for rule in _OF_REFUSALS
        if found
    }
    touched = {rule: _touched(sightings) for rule, sightings in seen.items()}
    for (node, refusal, reason), pairs in found.items():
        why = next(
            (rule for rule, (all_of, of) in touched.items() if all(p in all_of or of & {*p} for p in pairs)), None
        )
        gpus = len(run.node_gpus(node))
        is_every_pair = len(pairs) == gpus * (gpus - 1)
        names = joined(run.pair_name(pair).removeprefix(f"{run.host(node)} ") for pair in pairs)
        cure = _SHOWS_ACCESS if ROCM in reason else NO_CURE
        by_driver = f"NVML reports {refusal.status} ({reason})" if refusal.status else reason
        yield run.pair_sighting(
            pairs,
            f"no peer access{f': {by_driver}' if by_driver else ''}; copies go through host memory",
            Confidence.LIKELY,
            heading=f"{run.host(node)} {f'all {len(pairs)} GPU pairs' if is_every_pair else names}".strip(),
            severity=refusal.severity,
            expected="host memory, by design" if refusal.is_by_design else "peer access",
            likely=why.title if why else "",
            cure=fill_ids(why.cure, [place for sighting in seen[why] for place in sighting.places]) if why else cure,
        )


def _touched(sightings: Sequence[Sighting]) -> tuple[frozenset[Pair], frozenset[int]]:
    pairs = frozenset(pair for sighting in sightings for pair in sighting.pairs or ())
    return pairs, frozenset(gpu for sighting in sightings if sighting.pairs is None for gpu in sighting.gpus or ())


def _log_refused(staged: Staged) -> LoggedReason | None:
    if not staged.through_shm:
        return None
    kinds = (RemarkKind.DRIVER_REFUSED, RemarkKind.PEER_ACCESS_REFUSED, RemarkKind.PEER_QUERY_FAILED)
    for note in staged.find_notes(*kinds):
        return LoggedReason(f"NCCL's log: {note.gist}", _SHOWS_REASON)
    for note in staged.find_notes(RemarkKind.P2P_TYPE):
        if note.about[1] == _CUDA_REFUSES:
            return LoggedReason(
                f"CUDA refuses peer access between GPUs of the node: {note.text}",
                Cure.of("gpubench topo", comment="It shows which GPUs, and the driver's reason."),
            )
    return None


_OF_REFUSALS = (
    *PEER_ACCESS.conditions,
    *(condition for condition in NVLINK.conditions if condition.id == "fabric-not-ready"),
)

DISPUTED_ACCESS = Family.of(
    "disputed_access",
    "Contradictory or broken peer access",
    Condition(
        id="cuda-nvml-disagree",
        title="cudaDeviceCanAccessPeer and nvidia-smi topo -p2p disagree about P2P",
        settles="`gpubench p2p` on these GPUs, which verifies every byte and reads the counters",
        check="peer_access",
        expected="CUDA and NVML agree",
        likely="a container or virtual machine with a different topology than the driver's, a fabric that is not "
        "ready, MIG, or a driver bug",
        aliases=("peer-access-contradiction",),
        command="gpubench p2p",
        comment="It shows which answer is right. If the driver was updated, restart the container.",
        link="https://github.com/pytorch/pytorch/issues/84803",
        look=_disagree,
        implies=(_REFUSED, _KV),
    ),
    Condition(
        id="peer-access-corrupts",
        title="P2P is granted but data arrive wrong (NaN or zeros), or NCCL hangs (passthrough, IOMMU, ACS)",
        settles="`NCCL_P2P_DISABLE=1 gpubench allreduce`, if its data are right, and wrong without the variable",
        command="export NCCL_P2P_DISABLE=1",
        comment="Then boot with iommu=pt or no IOMMU, switch ACS redirection off, or correct the hypervisor's "
        "P2P clique. Remove the variable once `gpubench p2p` finds the data right. For llama.cpp, unset "
        "GGML_CUDA_P2P (0 switches it on).",
        link="https://github.com/NVIDIA/nccl/issues/2335",
        look=_corrupts,
    ),
    Condition(
        id="cuda-ipc-refused",
        title="Legacy CUDA IPC not supported (WSL, containers): cudaIpcOpenMemHandle fails",
        expected="CUDA IPC handles that can be opened",
        likely="WSL, containers with separate IPC namespaces, or GPUs without peer access that "
        "CUDA_VISIBLE_DEVICES hides from each other",
        settles="`mpirun -n 2 gpubench p2p`, which opens handles between two processes",
        command=f"{VERIFIED_COPIES} && unset NCCL_CUMEM_ENABLE",
        comment="Otherwise use a newer NCCL, start containers with --ipc=host, and make all GPUs visible "
        "to every rank.",
        link="https://github.com/NVIDIA/TensorRT-LLM/pull/17034",
        in_log=remark_detector(
            RemarkKind.LEGACY_IPC_REFUSED,
            Cure.of(
                f"{VERIFIED_COPIES} && unset NCCL_CUMEM_ENABLE", comment="A newer NCCL does not need legacy CUDA IPC."
            ),
        ),
        in_job=Complained(r"open CUDA IPC handle|cudaIpcOpenMemHandle|peer access is not supported between"),
    ),
    Condition(
        id="staged-despite-grant",
        title="cudaMemcpyPeer is as slow as without P2P although peer access is granted",
        settles="`nvidia-smi topo -p2p n`, and `gpubench p2p --pairs` on these GPUs",
        command="dmesg | grep -i -E 'Xid|IO_PAGE_FAULT|DMAR'",
        comment="Then run `lspci -vvv | grep -i acsctl` as root.",
        link="https://github.com/NVIDIA/nccl/issues/814",
        look=_despite_grant,
        general=True,
    ),
    Condition(
        id=_REFUSED,
        title="P2P access is refused (cudaDeviceCanAccessPeer = 0): copies go through host memory",
        settles="nvidia-smi topo -p2p r",
        check="peer_access",
        likely="the driver does not support peer access between these GPUs, or reports no reason",
        command="nvidia-smi topo -p2p r",
        comment="It shows the driver's reason. `nvidia-smi -q` shows the MIG mode and the fabric state.",
        link=_WAIVED,
        look=_any_refusal,
        implies=(_KV,),
        in_log=_log_refused,
        general=True,
    ),
)
