"""The GPUs of a node and their pairs as NVML describes them. pynvml, or what stands in for it, is an argument."""

import ctypes
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from gpubench.hardware.node.cuda_driver import version_text
from gpubench.hardware.node.nvml.answers import Answers, text, word_of
from gpubench.hardware.node.nvml.nvlink import read_nvlinks
from gpubench.hardware.node.nvml.settings import read_settings
from gpubench.model.facts.driver_settings import DriverSettings
from gpubench.model.facts.gpu_condition import THROTTLE_REASONS
from gpubench.model.facts.gpu_limits import GpuLimits
from gpubench.model.facts.gpu_process import GpuProcess
from gpubench.model.facts.snapshot import (
    DriverFacts,
    Fabric,
    GpuFacts,
    PairFacts,
    PcieLink,
    RemappedRows,
    bus_id,
)
from gpubench.model.terms.cpu_ranges import ranges_of

MEMORY_VERSION = 0x02000028
"""nvmlMemory_v2: it counts what the driver keeps for itself as reserved and not as used, as nvidia-smi does."""

_IDLE = 0x1
_THROTTLE_REASONS = {0x04 << position: word for position, word in enumerate(THROTTLE_REASONS)}
"""nvmlClocksEventReason* in nvml.h. Left out: idle, and clocks that an application or a display asked for."""

_UNCORRECTED, _VOLATILE = 1, 0
"""nvmlMemoryErrorType_t, and nvmlEccCounterType_t: those since the driver was loaded."""

_CHIP, MULTIPROCESSORS = 0, 1
"""nvmlTemperatureSensors_t and nvmlClockType_t, which are enumerations of C."""

_UNICAST_POINTER = 0
"""NVML_GPU_FABRIC_CLIQUE_TYPE_UNICAST_POINTER: what the forms before the fourth call the clique."""

_FABRIC_STATES = ("not_supported", "not_started", "in_progress", "completed")
_BITS_PER_WORD = 64

_P2P_WORDS = ("OK", "CNS", "GNS", "TNS", "DR", "NS", "U")
_P2P_QUESTIONS = {"read": 0, "write": 1, "nvlink": 2, "atomics": 3, "pci": 4}
"""nvmlGpuP2PCapsIndex_t, in numbers: NVML_P2P_CAPS_INDEX_READ of nvidia-ml-py is a tuple."""

_PCIE_PATHS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvmlGpuTopologyLevel_t; 0 is two GPUs on one board, which share that board's switch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlFacts:
    """The node as NVML describes it; a missing driver is in `driver.absent`."""

    driver: DriverFacts = field(default_factory=DriverFacts)
    settings: DriverSettings = field(default_factory=DriverSettings)
    gpus: tuple[GpuFacts, ...] = ()
    pairs: tuple[PairFacts, ...] = ()


def read_node(library: Any, cpus: int) -> NvmlFacts:
    """Driver, GPUs and pairs, from a pynvml that is initialised; `cpus` is how many the machine can have."""
    handles: dict[int, object] = {}
    gone: list[GpuFacts] = []
    for index in range(library.nvmlDeviceGetCount()):
        try:
            handles[index] = library.nvmlDeviceGetHandleByIndex(index)
        except library.NVMLError as error:
            gone.append(GpuFacts(index=index, lost=str(error)))
    gpus = read_gpus(library, handles, cpus)
    alive = {gpu.index: handles[gpu.index] for gpu in gpus if gpu.lost is None}
    return NvmlFacts(
        driver=DriverFacts(
            version=text(library.nvmlSystemGetDriverVersion()),
            cuda=version_text(library.nvmlSystemGetCudaDriverVersion()),
        ),
        settings=read_settings(library, alive),
        gpus=tuple(sorted((*gpus, *gone), key=lambda gpu: gpu.index)),
        pairs=read_pairs(library, alive),
    )


def read_gpus(library: Any, handles: Mapping[int, object], cpus: int) -> tuple[GpuFacts, ...]:
    """The facts of GPUs by their indices. One that does not answer is `lost` and costs none of the others."""
    return tuple(_read_gpu(Answers(library, handle), index, cpus) for index, handle in handles.items())


def _read_gpu(answers: Answers, index: int, cpus: int) -> GpuFacts:
    pci = answers.ask("bus_id", "nvmlDeviceGetPciInfo")
    capability = answers.ask("compute_capability", "nvmlDeviceGetCudaComputeCapability")
    memory = answers.ask_in_turn(
        "memory_bytes", ("nvmlDeviceGetMemoryInfo", MEMORY_VERSION), ("nvmlDeviceGetMemoryInfo",)
    )
    reasons = read_clock_reasons(answers)
    bar1 = answers.ask("bar1_bytes", "nvmlDeviceGetBAR1MemoryInfo")
    # The arguments are evaluated in this order: `lost` and `unknown` are complete when their turn comes.
    return GpuFacts(
        index=index,
        bus_id=bus_id(text(pci.busId) or "") if pci is not None else None,
        name=text(answers.ask("name", "nvmlDeviceGetName")),
        uuid=text(answers.ask("uuid", "nvmlDeviceGetUUID")),
        compute_capability=f"{capability[0]}.{capability[1]}" if capability is not None else None,
        memory_bytes=memory.total if memory is not None else None,
        memory_used_bytes=memory.used if memory is not None else None,
        mig=_current(answers.ask("mig", "nvmlDeviceGetMigMode")),
        ecc=_current(answers.ask("ecc", "nvmlDeviceGetEccMode")),
        persistence=_current([answers.ask("persistence", "nvmlDeviceGetPersistenceMode")]),
        idle=is_idle(reasons),
        throttle_reasons=throttle_reasons(reasons),
        remapped_rows=_remapped_rows(answers),
        retirement_pending=_current([answers.call("nvmlDeviceGetRetiredPagesPendingStatus").value]),
        memory_errors=read_memory_errors(answers),
        temperature_c=answers.ask("temperature_c", "nvmlDeviceGetTemperature", _CHIP),
        most_clock_mhz=answers.ask("most_clock_mhz", "nvmlDeviceGetMaxClockInfo", MULTIPROCESSORS),
        limits=_limits(answers),
        pcie=_pcie(answers),
        pcie_replays=answers.ask("pcie_replays", "nvmlDeviceGetPcieReplayCounter"),
        cpu_affinity=_cpu_affinity(answers, cpus),
        nvlinks=read_nvlinks(answers, capability),
        fabric=_fabric(answers),
        bar1_bytes=bar1.bar1Total if bar1 is not None else None,
        processes=read_processes(answers),
        lost=answers.lost,
        unknown=answers.unknown,
    )


def _limits(answers: Answers) -> GpuLimits:
    """NVML answers milliwatts."""
    power = answers.call("nvmlDeviceGetPowerManagementLimit").value
    default_power = answers.call("nvmlDeviceGetPowerManagementDefaultLimit").value
    return GpuLimits(
        clock_mhz=answers.call("nvmlDeviceGetApplicationsClock", MULTIPROCESSORS).value,
        default_clock_mhz=answers.call("nvmlDeviceGetDefaultApplicationsClock", MULTIPROCESSORS).value,
        power_w=None if power is None else power / 1000,
        default_power_w=None if default_power is None else default_power / 1000,
    )


def _current(modes: list[int | None] | None) -> bool | None:
    """The first of a current and a pending mode."""
    return None if modes is None or modes[0] is None else bool(modes[0])


def read_clock_reasons(answers: Answers) -> int | None:
    """NVML's bits for the reasons of the current clocks."""
    return answers.ask_in_turn(  # type: ignore[no-any-return]
        "throttle_reasons", ("nvmlDeviceGetCurrentClocksEventReasons",), ("nvmlDeviceGetCurrentClocksThrottleReasons",)
    )


def read_memory_errors(answers: Answers) -> int | None:
    """Uncorrectable errors since the driver was loaded."""
    return answers.ask(  # type: ignore[no-any-return]
        "memory_errors", "nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE
    )


def is_idle(reasons: int | None) -> bool | None:
    """True where clocks are low because nothing runs."""
    return bool(reasons & _IDLE) if reasons is not None else None


def throttle_reasons(reasons: int | None) -> tuple[str, ...] | None:
    """The words for what lowers clocks, of NVML's bits."""
    return None if reasons is None else tuple(word for bit, word in _THROTTLE_REASONS.items() if reasons & bit)


def _remapped_rows(answers: Answers) -> RemappedRows | None:
    rows = answers.ask("remapped_rows", "nvmlDeviceGetRemappedRows")
    if rows is None:
        return None
    return RemappedRows(correctable=rows[0], uncorrectable=rows[1], pending=bool(rows[2]), failure=bool(rows[3]))


def _pcie(answers: Answers) -> PcieLink:
    """NVML answers 0 for what it does not know of a link."""
    return PcieLink(
        generation=answers.ask("pcie.generation", "nvmlDeviceGetCurrPcieLinkGeneration") or None,
        width=answers.ask("pcie.width", "nvmlDeviceGetCurrPcieLinkWidth") or None,
        max_generation=answers.ask("pcie.max_generation", "nvmlDeviceGetMaxPcieLinkGeneration") or None,
        max_width=answers.ask("pcie.max_width", "nvmlDeviceGetMaxPcieLinkWidth") or None,
    )


def _cpu_affinity(answers: Answers, cpus: int) -> str | None:
    words = answers.ask("cpu_affinity", "nvmlDeviceGetCpuAffinity", -(-cpus // _BITS_PER_WORD))
    mask = sum(int(word) << _BITS_PER_WORD * position for position, word in enumerate(words or ()))
    return ranges_of(mask) or None


def _fabric(answers: Answers) -> Fabric | None:
    """The registration with the NVLink fabric, in the newest form that the driver knows.

    nvml.h: the status is to be looked at only where the state is completed.
    """
    for structure, function in (
        ("c_nvmlGpuFabricInfo_v4_t", "nvmlDeviceGetGpuFabricInfo_v4"),
        ("c_nvmlGpuFabricInfo_v3_t", "nvmlDeviceGetGpuFabricInfoV"),
        ("c_nvmlGpuFabricInfo_v2_t", "nvmlDeviceGetGpuFabricInfoV"),
        ("c_nvmlGpuFabricInfo_t", "nvmlDeviceGetGpuFabricInfo"),
    ):
        form = getattr(answers.library, structure, None)
        info = None if form is None else form()
        if info is not None and answers.ask("fabric", function, ctypes.byref(info)) is not None:
            answers.unknown.pop("fabric", None)
            break
    else:
        answers.unknown.setdefault("fabric", "this nvidia-ml-py does not know of it")
        return None
    state = word_of(_FABRIC_STATES, info.state)
    if state != "completed":
        return Fabric(state=state)
    return Fabric(
        state=state,
        status="success" if info.status == 0 else str(answers.library.NVMLError(info.status)),
        clique=_clique(info),
        cluster_uuid=str(uuid.UUID(bytes=bytes(info.clusterUuid))),
        health_mask=getattr(info, "healthMask", None),
    )


def _clique(info: Any) -> int | None:
    """The clique in which GPUs address each other's memory; None where the fourth form lists no such clique."""
    if not hasattr(info, "cliques"):
        return int(info.cliqueId)
    listed = info.cliques[: info.numCliques]
    return next((int(each.id) for each in listed if each.type == _UNICAST_POINTER), None)


def read_processes(answers: Answers) -> tuple[GpuProcess, ...] | None:
    """The processes with a context on the GPU, each once, though it may compute, draw and run under MPS."""
    computing = answers.ask("processes", "nvmlDeviceGetComputeRunningProcesses")
    if computing is None:
        return None
    drawing, under_mps = (
        answers.ask("processes", f"nvmlDeviceGet{kind}RunningProcesses") or () for kind in ("Graphics", "MPSCompute")
    )
    found = {each.pid: each for each in (*under_mps, *drawing, *computing)}
    clients = {each.pid for each in under_mps}
    return tuple(
        GpuProcess(
            pid=pid,
            name=_process_name(answers.library, pid),
            memory_bytes=found[pid].usedGpuMemory,
            mps=pid in clients,
        )
        for pid in sorted(found)
    )


def _process_name(library: Any, pid: int) -> str | None:
    try:
        return text(library.nvmlSystemGetProcessName(pid)) or None
    except library.NVMLError:
        return None


def read_pairs(library: Any, handles: Mapping[int, object]) -> tuple[PairFacts, ...]:
    """NVML's facts of every ordered pair of GPUs, by their indices."""
    paths: dict[frozenset[int], str | None] = {}
    pairs = []
    for source, destination in permutations(handles, 2):
        answers = Answers(library, handles[source])
        both = frozenset((source, destination))
        if both not in paths:
            level = answers.ask("pcie_path", "nvmlDeviceGetTopologyCommonAncestor", handles[destination])
            paths[both] = _PCIE_PATHS.get(level)
        words: dict[str, Any] = {
            name: word_of(_P2P_WORDS, answers.ask(name, "nvmlDeviceGetP2PStatus", handles[destination], number))
            for name, number in _P2P_QUESTIONS.items()
        }
        words |= {"source": f"GPU{source}", "destination": f"GPU{destination}", "pcie_path": paths[both]}
        pairs.append(PairFacts(**words, unknown=answers.unknown))
    return tuple(pairs)
