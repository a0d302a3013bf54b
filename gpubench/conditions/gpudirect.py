"""RDMA that is staged in host memory because the NICs cannot reach GPU memory."""

import re
from collections.abc import Iterator

from gpubench.conditions.circumstances import VERIFIED_COPIES, Circumstances, Found, Unread, joined, unset
from gpubench.conditions.condition import Condition, Family, rdma_nics
from gpubench.conditions.logged import LoggedReason, Staged, remark_detector, uses_rdma
from gpubench.conditions.nccl_settings import blame, in_log
from gpubench.model.facts.snapshot import GpuFacts
from gpubench.model.paths.nccl_log import RemarkKind
from gpubench.model.paths.topology import DEFAULT_LEVEL, Topology, is_within, level_allows, nccl_path_type, parse_level
from gpubench.model.paths.transport import Confidence, Pair, State
from gpubench.model.terms.verdict import Cure

_LEVEL, _READ, _DMABUF, _C2C = "NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_READ", "NCCL_DMABUF_ENABLE", "NCCL_NET_GDR_C2C"

# Connected to a Grace CPU by NVLink-C2C, over which NCCL 2.27 uses GPUDirect RDMA
_COHERENT = ("GH200", "GB200", "GB300")


def _nodes(run: Circumstances) -> Iterator[tuple[int, Topology, dict[str, tuple[bool | None, str]]]]:
    for number, node in run.nodes.items():
        if node.gpus and rdma_nics(node):
            yield number, node, {nic.name: node.gpudirect(nic) for nic in node.nics if nic.rdma}


def _switched_off(run: Circumstances) -> Found:
    """Find variables that prevent GPUDirect RDMA.

    NCCL_DMABUF_ENABLE matters only without the peer memory module, and NCCL_NET_GDR_C2C only on Grace nodes.
    """
    facts = [node.snapshot.gpudirect for _, node, _ in _nodes(run)]
    levels = [value for value in run.values(_LEVEL) if parse_level(value) == "LOC"]
    off = {_LEVEL: levels} if levels and facts else {}
    able = {
        _READ: bool(facts),
        _DMABUF: any(not (fact.peermem or fact.efa_peermem) for fact in facts),
        _C2C: any(_is_coherent(gpu) for _, node, _ in _nodes(run) for gpu in node.gpus),
    }
    off |= {name: ["0"] for name, matters in able.items() if matters and "0" in run.values(name)}
    for name, values in off.items():
        yield blame(run, {name: values}, Confidence.PROVEN, frozenset(run.remote_pairs) or None)


def _not_registered(run: Circumstances) -> Found:
    for number, node, _ in _nodes(run):
        facts = node.snapshot.gpudirect
        if facts.peermem and facts.peermem_registered is False and not facts.dma_buf:
            seen = "nvidia-peermem is loaded but not registered with the RDMA core"
            yield run.node_sighting(number, seen, Confidence.LIKELY)


def _no_module(run: Circumstances) -> Found:
    for number, node, answers in _nodes(run):
        if node.gpus and all(_GB10 in (gpu.name or "") for gpu in node.gpus):
            continue
        refused = {name: reason for name, (possible, reason) in answers.items() if possible is False}
        if node.snapshot.gpudirect.peermem:
            continue  # If the module is not registered, the condition peermem-not-registered reports it
        if refused:
            names = tuple(" ".join(filter(None, (run.host(number), name))) for name in refused)
            heading = " ".join(filter(None, (run.host(number), ", ".join(refused))))
            yield run.node_sighting(number, joined(refused.values()), names=names, heading=heading)
        elif all(possible is None for possible, _ in answers.values()):
            yield Unread(run.subject(number), joined(reason for _, reason in answers.values()))


def _is_coherent(gpu: GpuFacts) -> bool:
    return any(model in (gpu.name or "") for model in _COHERENT)


def _too_far(run: Circumstances) -> Found:
    """Find GPUs without an RDMA NIC within NCCL's default distance for GPUDirect RDMA, in jobs on several nodes."""
    levels = run.values(_LEVEL)
    ends = {gpu for pair in run.remote_pairs for gpu in pair}
    for position, node, gpu in run.gpus():
        paths = [node.path(gpu, nic) for nic in node.nics if nic.rdma]
        types = [type_ for type_ in map(nccl_path_type, paths) if type_ is not None]
        taken = any(is_within(type_) for type_ in types) or any(
            level_allows(value, path) for value in levels for path in paths
        )
        if types and len(types) == len(paths) and not taken and position in ends:
            nearest = min(paths, key=lambda path: ("PHB", "NODE", "SYS").index(path))
            if nearest != "SYS" and _is_coherent(gpu):
                # NCCL uses C2C here, unless a variable forbids it. The condition nccl-gdr-disabled reports such a
                # variable.
                continue
            yield run.gpu_sighting(position, f"the path to its nearest RDMA NIC is {nearest}", Confidence.LIKELY)


def _one_side(run: Circumstances) -> Found:
    able = {number: any(possible for possible, _ in answers.values()) for number, _, answers in _nodes(run)}
    for number, possible in able.items() if len(set(able.values())) > 1 else ():
        if not possible:
            seen = "GPUDirect RDMA is possible on other nodes, but not known to be possible here"
            yield run.node_sighting(number, seen, Confidence.LIKELY)


def _any_refusal(run: Circumstances) -> Found:
    by_reason = dict[str, list[Pair]]()
    for pair in run.remote_pairs:
        capability = run.wiring.capability(pair)
        if capability.state is State.CONTRADICTING and all(map(run.wiring.rdma_nics, pair)):
            by_reason.setdefault(capability.seen, []).append(pair)
    for reason, pairs in by_reason.items():
        yield run.pair_sighting(pairs, reason, Confidence.LIKELY)


def _log_switched_off(staged: Staged) -> LoggedReason | None:
    if not uses_rdma(staged):
        return None
    levels = {value: parse_level(value) for value in staged.settings(_LEVEL)}
    low = [(_LEVEL, value) for value, limit in levels.items() if limit and limit != DEFAULT_LEVEL and is_within(limit)]
    return in_log(low + [(name, "0") for name in (_READ, _DMABUF) if "0" in staged.settings(name)])


def _log_far(staged: Staged) -> LoggedReason | None:
    near = {note.about[0] for note in staged.notes if note.kind is RemarkKind.GDR_NEAR}
    far = [note for note in staged.notes if note.kind is RemarkKind.GDR_FAR and note.about[0] not in near]
    far += staged.find_notes(RemarkKind.GDR_DISTANT)
    if not uses_rdma(staged) or not far or staged.find_notes(RemarkKind.GDR_DISABLED):
        return None
    return LoggedReason(
        f"NICs too far from the GPUs for NCCL to use GPUDirect RDMA {far[0].text[far[0].text.find('(') :]}",
        Cure.of(
            "NCCL_NET_GDR_LEVEL=SYS gpubench allreduce",
            comment="It uses GPUDirect RDMA over any path, and verifies the data. Compare it with a run without "
            "the variable. A NIC behind the GPU's PCIe switch is better.",
        ),
        is_proven=False,
    )


_GB10 = "GB10"
_GB10_BUS_ID = "000f:01:00.0"  # Bus id of the only GPU in machines with NVIDIA's GB10 chip, such as DGX Spark
_GB10_NIC = re.compile(
    r"\b(?:roce|en)P2p1s0f[01]"
)  # The second half of the machine's ConnectX-7. Linux names its interfaces by PCI slot.


def _log_gb10(staged: Staged) -> LoggedReason | None:
    by_model = bool(staged.models) and all(_GB10 in model for model in staged.models)
    by_place = not staged.models and set(staged.bus_ids) == {_GB10_BUS_ID}
    if uses_rdma(staged) and not (by_model or by_place or staged.models) and staged.one_per_host:
        return _log_gb10_nic(staged)
    if not uses_rdma(staged) or not (by_model or by_place):
        return None
    return LoggedReason(
        f"GB10 has no GPUDirect RDMA ({_GB10 if by_model else f'the GPU is at {_GB10_BUS_ID}, as in these'})",
        Cure(comment="Nothing to repair: GPU and processor share one memory."),
    )


_NAMING_NICS = (RemarkKind.RDMA_DEVICES, RemarkKind.GDR_ENABLED, RemarkKind.GDR_DISABLED)


def _log_gb10_nic(staged: Staged) -> LoggedReason | None:
    texts = (*staged.interfaces, *(note.text for note in staged.find_notes(*_NAMING_NICS)))
    name = next((found[0] for text in texts if (found := _GB10_NIC.search(text))), None)
    if name is None or set(staged.bus_ids) - {_GB10_BUS_ID}:
        return None
    return LoggedReason(
        f"the NIC {name} and one GPU per host are typical of a GB10 (DGX Spark), which has no GPUDirect RDMA",
        Cure.of(
            "nvidia-smi -L",
            comment="If it shows a GB10, there is nothing to repair: GPU and processor share one memory.",
        ),
        is_proven=False,
    )


def _gb10(run: Circumstances) -> Found:
    models = {position: gpu.name or "" for position, _, gpu in run.gpus()}
    pairs = [pair for pair in run.remote_pairs if all(_GB10 in models.get(gpu, "") for gpu in pair)]
    if pairs:
        yield run.pair_sighting(pairs, "GB10 has no GPUDirect RDMA")


_LOAD = f"{VERIFIED_COPIES} && modprobe nvidia-peermem"
_TRY_RDMA = "Before running any jobs, verify the data with `gpubench allreduce` over two nodes."
_OR_DMABUF = f"Or use the driver's open kernel modules. `gpubench topo` shows what is missing. {_TRY_RDMA}"

_PEERMEM = "https://github.com/NVIDIA/nccl/issues/1537"
_COMPARE = "`ib_write_bw` with and without `--use_cuda`, or /GDRDMA in NCCL's log"
_MODULES = "cat /sys/module/nvidia_peermem/version; cat /proc/driver/nvidia/version"
_REFUSED, _ONE_SIDE = "gpudirect-refused", "gpudirect-one-side"

GPUDIRECT = Family.of(
    "gpudirect",
    "GPUDirect RDMA",
    Condition(
        id="nccl-gdr-disabled",
        title="NCCL_NET_GDR_LEVEL=LOC (or 0), NCCL_NET_GDR_READ=0, NCCL_DMABUF_ENABLE=0 without nvidia-peermem, or "
        "NCCL_NET_GDR_C2C=0 on a Grace node: no /GDRDMA in NCCL's log",
        settles="`gpubench allreduce` over two nodes, with and without this variable",
        command=unset(_LEVEL, _READ, _DMABUF, _C2C),
        link="https://github.com/awslabs/awsome-distributed-ai/issues/1106",
        look=_switched_off,
        in_log=_log_switched_off,
        aliases=("nccl-gdr-read", "nccl-gdr-c2c-disabled", "nccl-dmabuf-disabled"),
    ),
    Condition(
        id="gpudirect-module-missing",
        title="GPU Direct RDMA Disabled for HCA: nvidia-peermem is not loaded, and dma-buf is not available",
        check="gpudirect",
        expected="nvidia-peermem, or dma-buf",
        likely="nvidia-peermem was not loaded after the network driver, or the closed kernel module is in use",
        aliases=("gpudirect-rdma-unavailable",),
        settles=_MODULES,
        command=_LOAD,
        comment="Load it after the network driver, or use the driver's open kernel modules, which "
        f"support dma-buf. {_TRY_RDMA}",
        link=_PEERMEM,
        look=_no_module,
        implies=(_ONE_SIDE, _REFUSED),
    ),
    Condition(
        id="peermem-not-registered",
        title="nvidia-peermem is loaded but has no effect: built without the RDMA core's symbols (MLNX_OFED)",
        check="gpudirect",
        expected="nvidia-peermem registered with the RDMA core, or dma-buf",
        likely="the driver was built before the network driver, without the RDMA core's symbols",
        settles="lsmod | grep peermem; dmesg | grep -i peermem",
        command="lsmod | grep peermem",
        comment="Install the driver again after MLNX_OFED or DOCA, then modprobe nvidia-peermem. Or use the open "
        f"kernel modules. {_TRY_RDMA}",
        link="https://github.com/NVIDIA/nccl/issues/1939",
        look=_not_registered,
        implies=("gpudirect-module-missing", _ONE_SIDE, _REFUSED),
    ),
    Condition(
        id="gb10-no-gpudirect",
        title="GB10 (DGX Spark) has no GPUDirect RDMA: GPU Direct RDMA Disabled for HCA, NET/IB without /GDRDMA",
        settles="nvidia-smi -L",
        comment="Nothing to repair: GPU and processor share one memory.",
        link="https://forums.developer.nvidia.com/t/dgx-spark-gpudirect-rdma/348787",
        look=_gb10,
        in_log=_log_gb10,
        implies=("gpudirect-module-missing", _REFUSED),
        by_design=True,
    ),
    Condition(
        id="gpudirect-too-far",
        title="GPU Direct RDMA Disabled for GPU / HCA (distance): the NIC is PHB, NODE or SYS away",
        settles="the matrix of GPUs and NICs in `gpubench topo`",
        command="NCCL_NET_GDR_LEVEL=SYS gpubench allreduce",
        comment="There is nothing to repair. Keep this setting if the run is faster than without it and its data "
        "are right. A NIC under the same PCIe switch as the GPU is better.",
        link="https://github.com/NVIDIA/nccl/issues/897",
        look=_too_far,
        in_log=_log_far,
        by_design=True,
    ),
    Condition(
        id=_ONE_SIDE,
        title="GPUDirect RDMA on one side only: one node lacks nvidia-peermem or dma-buf",
        settles="`/GDRDMA` on only one end of a connection in NCCL's log",
        command=_LOAD,
        comment=f"Load it on the reported node, so that it is like the others. {_TRY_RDMA}",
        link="https://github.com/NVIDIA/nccl/issues/897",
        look=_one_side,
        implies=(_REFUSED,),
    ),
    Condition(
        id=_REFUSED,
        title="RDMA without GPUDirect: NET/IB without /GDRDMA",
        settles=_COMPARE,
        command=_LOAD,
        comment=_OR_DMABUF,
        link="https://github.com/NVIDIA/nccl/issues/1510",
        look=_any_refusal,
        in_log=remark_detector(
            RemarkKind.GDR_DISABLED, Cure.of(_LOAD, comment=_OR_DMABUF), uses_rdma, "NCCL's log: {.text}"
        ),
        general=True,
    ),
)
