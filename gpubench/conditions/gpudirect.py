"""RDMA through host memory, because the NICs cannot reach the GPUs' memory."""

import re
from collections.abc import Callable, Iterator

from gpubench.conditions.definition import circumstances, condition
from gpubench.conditions.nccl_settings import blame, in_log
from gpubench.model.facts.snapshot import GpuFacts
from gpubench.model.paths.nccl_log import RemarkKind
from gpubench.model.paths.topology import DEFAULT_LEVEL, Topology, allows, is_within, level, nccl_type
from gpubench.model.paths.transport import Confidence, Pair, State
from gpubench.model.terms.verdict import Cure

_LEVEL, _READ, _DMABUF = "NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_READ", "NCCL_DMABUF_ENABLE"
_C2C = "NCCL_NET_GDR_C2C"
_DENIES = "2"

_COHERENT = ("GH200", "GB200", "GB300")  # NVLink-C2C to a Grace CPU: NCCL 2.27 reaches its NICs with GPUDirect RDMA


def _nodes(run: circumstances.Circumstances) -> Iterator[tuple[int, Topology, dict[str, tuple[bool | None, str]]]]:
    for number, node in run.nodes.items():
        if node.gpus and condition.rdma_nics(node):
            yield number, node, {nic.name: node.gpudirect(nic) for nic in node.nics if nic.rdma}


def _is_low(value: str) -> bool:
    limit = level(value)
    return limit is not None and limit != DEFAULT_LEVEL and is_within(limit)


def _is_off(value: str) -> bool:
    return level(value) == "LOC"


def _set(name: str, wrong: Callable[[str], bool], *, without_module: bool = False) -> condition.Look:
    """Finds a variable whose value keeps RDMA off GPU memory; with `without_module` only on nodes without the kernel
    module, where dma-buf is the only other way.
    """

    def look(run: circumstances.Circumstances) -> condition.Found:
        values = [value for value in run.values(name) if wrong(value)]
        facts = (node.snapshot.gpudirect for _, node, _ in _nodes(run))
        if values and any(not (without_module and (each.peermem or each.efa_peermem)) for each in facts):
            yield blame(run, {name: values}, Confidence.PROVEN, frozenset(run.across) or None)

    return look


def _override(run: circumstances.Circumstances) -> condition.Found:
    for number, node, _ in _nodes(run):
        settings = node.snapshot.driver_settings
        if (settings.parameters or {}).get("GrdmaPciTopoCheckOverride") == _DENIES:
            yield condition.of_node(run, number, "GrdmaPciTopoCheckOverride: 2 in the driver's parameters")
        else:
            yield from condition.unread(run.on(number), settings.unknown, "parameters")


def _not_registered(run: circumstances.Circumstances) -> condition.Found:
    for number, node, _ in _nodes(run):
        facts = node.snapshot.gpudirect
        if facts.peermem and facts.peermem_registered is False and not facts.dma_buf:
            seen = "nvidia-peermem is loaded but not registered with the RDMA core"
            yield condition.of_node(run, number, seen, Confidence.LIKELY)


def _no_module(run: circumstances.Circumstances) -> condition.Found:
    for number, node, answers in _nodes(run):
        if node.gpus and all(_GB10 in (gpu.name or "") for gpu in node.gpus):
            continue
        refused = {name: reason for name, (possible, reason) in answers.items() if possible is False}
        if node.snapshot.gpudirect.peermem:
            continue  # peermem-not-registered reports it
        if refused:
            names = tuple(" ".join(filter(None, (run.host(number), name))) for name in refused)
            heading = " ".join(filter(None, (run.host(number), ", ".join(refused))))
            yield condition.of_node(run, number, condition.joined(refused.values()), names=names, heading=heading)
        elif all(possible is None for possible, _ in answers.values()):
            yield condition.Unread(run.on(number), condition.joined(reason for _, reason in answers.values()))


def _is_coherent(gpu: GpuFacts) -> bool:
    return any(model in (gpu.name or "") for model in _COHERENT)


def _no_c2c(run: circumstances.Circumstances) -> condition.Found:
    values = [value for value in run.values(_C2C) if value == "0"]
    if values and any(_is_coherent(gpu) for _, node, _ in _nodes(run) for gpu in node.gpus):
        yield blame(run, {_C2C: values}, Confidence.PROVEN, frozenset(run.across) or None)


def _too_far(run: circumstances.Circumstances) -> condition.Found:
    """GPUs whose nearest RDMA NIC is beyond NCCL's default level, in jobs on several nodes."""
    levels = run.values(_LEVEL)
    over_c2c = "0" not in run.values(_C2C)
    ends = {gpu for pair in run.across for gpu in pair}
    for position, node, gpu in run.gpus():
        paths = [node.path(gpu, nic) for nic in node.nics if nic.rdma]
        types = [each for each in map(nccl_type, paths) if each is not None]
        taken = any(is_within(each) for each in types) or any(allows(value, path) for value in levels for path in paths)
        if types and len(types) == len(paths) and not taken and position in ends:
            nearest = min(paths, key=lambda path: ("PHB", "NODE", "SYS").index(path))
            if over_c2c and nearest != "SYS" and _is_coherent(gpu):
                continue
            yield condition.of_gpu(run, position, f"its nearest RDMA NIC is {nearest} away", Confidence.LIKELY)


def _one_side(run: circumstances.Circumstances) -> condition.Found:
    able = {number: any(possible for possible, _ in answers.values()) for number, _, answers in _nodes(run)}
    for number, possible in able.items() if len(set(able.values())) > 1 else ():
        if not possible:
            seen = "GPUDirect RDMA is possible on other nodes, but not known to be possible here"
            yield condition.of_node(run, number, seen, Confidence.LIKELY)


def _any_refusal(run: circumstances.Circumstances) -> condition.Found:
    by_reason = dict[str, list[Pair]]()
    for pair in run.across:
        capability = run.wiring.capability(pair)
        if capability.state is State.CONTRADICTING and all(map(run.wiring.rdma_nics, pair)):
            by_reason.setdefault(capability.seen, []).append(pair)
    for reason, pairs in by_reason.items():
        yield condition.of_pairs(run, pairs, reason, Confidence.LIKELY)


def _log_setting(
    name: str, wrong: Callable[[str], bool]
) -> Callable[[circumstances.Staged], circumstances.LoggedReason | None]:

    def find(staged: circumstances.Staged) -> circumstances.LoggedReason | None:
        return (
            in_log((name, each) for each in staged.settings(name) if wrong(each))
            if circumstances.by_rdma(staged)
            else None
        )

    return find


def _log_far(staged: circumstances.Staged) -> circumstances.LoggedReason | None:
    near = {note.about[0] for note in staged.notes if note.kind is RemarkKind.GDR_NEAR}
    far = [note for note in staged.notes if note.kind is RemarkKind.GDR_FAR and note.about[0] not in near]
    far += staged.found(RemarkKind.GDR_DISTANT)
    if not circumstances.by_rdma(staged) or not far or staged.found(RemarkKind.GDR_DISABLED):
        return None
    return circumstances.LoggedReason(
        f"NICs too far from the GPUs for NCCL to use GPUDirect RDMA {far[0].text[far[0].text.find('(') :]}",
        Cure.of(
            "NCCL_NET_GDR_LEVEL=SYS gpubench allreduce",
            comment="It uses GPUDirect RDMA over any path, and verifies the data: compare with a run without "
            "it; better, use a NIC behind the GPU's PCIe switch.",
        ),
        is_proven=False,
    )


_GB10 = "GB10"
_GB10_BUS_ID = "000f:01:00.0"  # Bus id of the only GPU in machines with NVIDIA's GB10 chip (DGX Spark and siblings)
_GB10_NIC = re.compile(
    r"\b(?:roce|en)P2p1s0f[01]"
)  # Second half of their ConnectX-7, named by Linux after its PCI slot


def _log_gb10(staged: circumstances.Staged) -> circumstances.LoggedReason | None:
    by_model = bool(staged.models) and all(_GB10 in model for model in staged.models)
    by_place = not staged.models and set(staged.bus_ids) == {_GB10_BUS_ID}
    if circumstances.by_rdma(staged) and not (by_model or by_place or staged.models) and staged.one_per_host:
        return _log_gb10_nic(staged)
    if not circumstances.by_rdma(staged) or not (by_model or by_place):
        return None
    return circumstances.LoggedReason(
        f"GB10 has no GPUDirect RDMA ({_GB10 if by_model else f'the GPU is at {_GB10_BUS_ID}, as in these'})",
        Cure(comment="Nothing to repair: GPU and processor share one memory."),
    )


_NAMING_NICS = (RemarkKind.RDMA_DEVICES, RemarkKind.GDR_ENABLED, RemarkKind.GDR_DISABLED)


def _log_gb10_nic(staged: circumstances.Staged) -> circumstances.LoggedReason | None:
    texts = (*staged.interfaces, *(note.text for note in staged.found(*_NAMING_NICS)))
    name = next((found[0] for text in texts if (found := _GB10_NIC.search(text))), None)
    if name is None or set(staged.bus_ids) - {_GB10_BUS_ID}:
        return None
    return circumstances.LoggedReason(
        f"the NIC {name} and one GPU per host are those of a GB10 (DGX Spark), which has no GPUDirect RDMA",
        Cure.of(
            "nvidia-smi -L",
            comment="If it shows a GB10, there is nothing to repair: GPU and processor share one memory.",
        ),
        is_proven=False,
    )


def _gb10(run: circumstances.Circumstances) -> condition.Found:
    pairs = [
        pair
        for pair in run.across
        if all((gpu := run.wiring.gpu(each)) is not None and _GB10 in (gpu.name or "") for each in pair)
    ]
    if pairs:
        yield condition.of_pairs(run, pairs, "GB10 has no GPUDirect RDMA")


_LOAD = f"{circumstances.VERIFIED_COPIES} && modprobe nvidia-peermem"
_TRY_RDMA = "Before any job, verify the data with `gpubench allreduce` over two nodes."
_OR_DMABUF = Cure.of(
    _LOAD, comment=f"Or use the driver's open kernel modules; `gpubench topo` shows what is missing. {_TRY_RDMA}"
)
_log_refused = circumstances.remark_in_log(
    RemarkKind.GDR_DISABLED,
    _OR_DMABUF,
    circumstances.by_rdma,
    "NCCL's log: {.text}",
)

_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_PEERMEM = "https://github.com/NVIDIA/nccl/issues/1537"
_COMPARE = "ib_write_bw with and without --use_cuda; /GDRDMA in NCCL's log"
_MODULES = "cat /sys/module/nvidia_peermem/version; cat /proc/driver/nvidia/version"
_UNSET = "gpubench allreduce over two nodes, with and without this variable"
_REFUSED, _ONE_SIDE = "gpudirect-refused", "gpudirect-one-side"

GPUDIRECT = condition.Family.of(
    "gpudirect",
    "GPUDirect RDMA",
    condition.Condition(
        id="nccl-gdr-disabled",
        title="NCCL_NET_GDR_LEVEL=LOC (or 0) switches off GPUDirect RDMA: no /GDRDMA in NCCL's log",
        detection="the variable of every rank and of NCCL's files, on nodes with RDMA NICs; NCCL's log",
        settles=_UNSET,
        cure=circumstances.unset(_LEVEL),
        link="https://github.com/awslabs/awsome-distributed-ai/issues/1106",
        look=_set(_LEVEL, _is_off),
        in_log=_log_setting(_LEVEL, _is_low),
    ),
    condition.Condition(
        id="nccl-gdr-read",
        title="NCCL_NET_GDR_READ=0: sends go through host memory, receives use GPUDirect RDMA",
        detection="the variable of every rank, or in NCCL's log",
        settles=_UNSET,
        cure=circumstances.unset(_READ),
        link=_ENV,
        look=_set(_READ, "0".__eq__),
        in_log=_log_setting(_READ, "0".__eq__),
    ),
    condition.Condition(
        id="nccl-gdr-c2c-disabled",
        title="NCCL_NET_GDR_C2C=0: GPUs of a Grace node reach the NICs of their CPU through host memory",
        detection="the variable of ranks on GH200, GB200 or GB300 nodes with RDMA NICs",
        settles=_UNSET,
        cure=circumstances.unset(_C2C),
        link=_ENV,
        look=_no_c2c,
        implies=("gpudirect-too-far",),
    ),
    condition.Condition(
        id="nccl-dmabuf-disabled",
        title="NCCL_DMABUF_ENABLE=0 without nvidia-peermem: GPU Direct RDMA Disabled",
        detection="the variable of every rank, on nodes without nvidia-peermem loaded; or in NCCL's log",
        settles=_MODULES,
        cure=circumstances.unset(_DMABUF),
        link=_ENV,
        look=_set(_DMABUF, "0".__eq__, without_module=True),
        in_log=_log_setting(_DMABUF, "0".__eq__),
    ),
    condition.Condition(
        id="gpudirect-module-missing",
        title="GPU Direct RDMA Disabled for HCA: nvidia-peermem is not loaded, and dma-buf is not available",
        seen_as=("GPU Direct RDMA Disabled for HCA",),
        detection="/sys/module/nvidia_peermem, /sys/kernel/mm/memory_peers, CUDA's DMA_BUF_SUPPORTED attribute",
        check="gpudirect",
        expected="nvidia-peermem, or dma-buf",
        likely="the module was not loaded after the network driver, or the closed kernel module is in use",
        aliases=("gpudirect-rdma-unavailable",),
        settles=_MODULES,
        cure=Cure.of(
            _LOAD,
            comment="Load it after the network driver, or use the driver's open kernel modules, which "
            f"support dma-buf. {_TRY_RDMA}",
        ),
        link=_PEERMEM,
        look=_no_module,
        implies=(_ONE_SIDE, _REFUSED),
    ),
    condition.Condition(
        id="peermem-not-registered",
        title="nvidia-peermem is loaded but has no effect: built without the RDMA core's symbols (MLNX_OFED)",
        seen_as=("modprobe: ERROR: could not insert 'nvidia_peermem': Invalid argument",),
        detection="nvidia-peermem is loaded, but ib_core does not list it as a user",
        check="gpudirect",
        expected="nvidia-peermem registered with the RDMA core, or dma-buf",
        likely="the driver was built before the network driver, without the RDMA core's symbols",
        settles="lsmod | grep peermem; dmesg | grep -i peermem",
        cure=Cure.of(
            "lsmod | grep peermem",
            comment="Install the driver again after MLNX_OFED or DOCA, then modprobe nvidia-peermem; or use "
            f"the open kernel modules. {_TRY_RDMA}",
        ),
        link="https://github.com/NVIDIA/nccl/issues/1939",
        look=_not_registered,
        implies=("gpudirect-module-missing", _ONE_SIDE, _REFUSED),
    ),
    condition.Condition(
        id="grdma-override",
        title="NVreg_GrdmaPciTopoCheckOverride=2 denies GPUDirect RDMA",
        detection="/proc/driver/nvidia/params, on nodes with RDMA NICs",
        settles=_COMPARE,
        cure=Cure.of(
            "grep GrdmaPciTopoCheckOverride /etc/modprobe.d/*",
            comment=f"Remove the setting from the file and reload the driver. {_TRY_RDMA}",
        ),
        link="https://github.com/NVIDIA/open-gpu-kernel-modules",
        look=_override,
        implies=(_ONE_SIDE,),
    ),
    condition.Condition(
        id="gb10-no-gpudirect",
        title="GB10 (DGX Spark) has no GPUDirect RDMA: GPU Direct RDMA Disabled for HCA, NET/IB without /GDRDMA",
        detection="the GPUs' model, or their only bus id in NCCL's log; names of NICs there leave a doubt",
        settles="nvidia-smi -L",
        cure=Cure(comment="Nothing to repair: GPU and processor share one memory."),
        link="https://forums.developer.nvidia.com/t/dgx-spark-gpudirect-rdma/348787",
        look=_gb10,
        in_log=_log_gb10,
        implies=("gpudirect-module-missing", _REFUSED),
        by_design=True,
    ),
    condition.Condition(
        id="gpudirect-too-far",
        title="GPU Direct RDMA Disabled for GPU / HCA (distance): the NIC is PHB, NODE or SYS away",
        detection="a path class beyond PXB from a GPU to its nearest RDMA NIC; `distance` in NCCL's log",
        settles="gpubench topo: the matrix of GPUs and NICs",
        cure=Cure.of(
            "NCCL_NET_GDR_LEVEL=SYS gpubench allreduce",
            comment="There is nothing to repair; keep this setting if the run is faster than without it and "
            "its data are right, or use a NIC below the GPU's switch.",
        ),
        link="https://github.com/NVIDIA/nccl/issues/897",
        look=_too_far,
        in_log=_log_far,
        by_design=True,
    ),
    condition.Condition(
        id=_ONE_SIDE,
        title="GPUDirect RDMA on one side only: one node lacks nvidia-peermem or dma-buf",
        detection="GPUDirect RDMA is possible on some nodes of the job but not on others",
        settles="NCCL's log: `/GDRDMA` on only one end of a connection",
        cure=Cure.of(_LOAD, comment=f"Load it on the reported node, so that it is like the others. {_TRY_RDMA}"),
        link="https://github.com/NVIDIA/nccl/issues/897",
        look=_one_side,
        implies=(_REFUSED,),
    ),
    condition.Condition(
        id=_REFUSED,
        title="RDMA without GPUDirect: NET/IB without /GDRDMA",
        detection="`GPU Direct RDMA Disabled for HCA` in NCCL's log; or one of two nodes does not support it",
        settles=_COMPARE,
        cure=_OR_DMABUF,
        link="https://github.com/NVIDIA/nccl/issues/1510",
        look=_any_refusal,
        in_log=_log_refused,
        general=True,
    ),
)
