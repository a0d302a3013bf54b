"""Read a node's GPUs from NVML: identity, state, GPU pairs, NVLinks, and driver settings."""

import contextlib
import ctypes
import uuid
from collections.abc import Mapping
from itertools import permutations
from typing import Any

from msgspec import Struct, field

from gpubench.machine.drivers import INVALID_ARGUMENT, NOT_SUPPORTED, GpuQueries, decode, enum_name, format_version
from gpubench.model.facts import snapshot
from gpubench.model.facts.process import THROTTLE_REASONS, GpuProcess
from gpubench.model.terms.units import format_mask

_COMMON_SPEED = 90
_LINK_COUNT = 91
_SPEED = 164
_STATE = 165
_VERSION = 166
_ERRORS = {"replay": 161, "recovery": 162, "crc_flit": 163}
_ERROR_COUNTERS = {"replay": 0, "recovery": 1, "crc_flit": 2}
"""Field numbers (NVML_FI_DEV_NVLINK_*) and counter numbers (nvmlNvLinkErrorCounter_t) for the same errors.

CRC_DATA and ECC_DATA (counters 3 and 4) are left out. On H200 they count corrected errors, and every healthy link has
hundreds.
"""

_VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}
_PEERS = {0: snapshot.NvlinkPeer.GPU, 1: snapshot.NvlinkPeer.CPU, 2: snapshot.NvlinkPeer.SWITCH}
_HOPPER = (9, 0)


def _read_nvlinks(queries: GpuQueries, capability: tuple[int, int] | None) -> tuple[snapshot.NvLink, ...] | None:
    """Return a GPU's NVLinks. If NVML does not report them, return None and store the reason in `unknown`."""
    common = queries.fields([(_LINK_COUNT, 0), (_COMMON_SPEED, 0)])
    count = common.get((_LINK_COUNT, 0))
    if count is None:
        count = _count_by_asking(queries)
    if not count:
        return None if count is None else ()
    wanted = (_STATE, _SPEED, _VERSION, *_ERRORS.values())
    fields = queries.fields((number, link) for link in range(count) for number in wanted)
    reader = _LinkReader(queries, fields, common.get((_COMMON_SPEED, 0)), capability or (0, 0))
    return tuple(reader.read(link) for link in range(count))


def _count_by_asking(queries: GpuQueries) -> int | None:
    """Count the links by querying one link number after another. NVML rejects the number after the last link."""
    most: int = queries.library.NVML_NVLINK_MAX_LINKS
    for link in range(most):
        reply = queries.call("nvmlDeviceGetNvLinkState", link)
        if reply.code == INVALID_ARGUMENT or (reply.code == NOT_SUPPORTED and link == 0):
            return link
        if reply.value is None and link == 0:
            queries.unknown["nvlinks"] = reply.reason
            return None
    return most


class _LinkReader(Struct):
    queries: GpuQueries
    fields: dict[tuple[int, int], int]
    common_speed_mb_s: int | None
    capability: tuple[int, int]
    counters: dict[str, int] = field(default_factory=_ERROR_COUNTERS.copy)

    def read(self, link: int) -> snapshot.NvLink:
        """Read one link. Values that NVML does not report for an inactive link are None."""
        state = self._state(link)
        speed_mb_s = self.fields.get((_SPEED, link), self.common_speed_mb_s)
        version = self.fields.get((_VERSION, link))
        if version is None:
            version = self.queries.read("nvlinks.version", "nvmlDeviceGetNvLinkVersion", link)
        peer = self.queries.read("nvlinks.peer", "nvmlDeviceGetNvLinkRemoteDeviceType", link)
        return snapshot.NvLink(
            number=link,
            active=None if state is None else bool(state),
            version=_VERSIONS.get(version) if version is not None else None,
            raw_gb_s=speed_mb_s / 1000 if speed_mb_s else None,
            peer=_PEERS.get(peer) if peer is not None else None,
            peer_bus_id=self._peer_bus_id(link),
            errors=self._errors(link),
        )

    def _state(self, link: int) -> int | None:
        state = self.fields.get((_STATE, link))
        # Like NCCL, use the NVML field on Hopper and later GPUs, and the NVML function on older ones.
        if self.capability >= _HOPPER and state is not None:
            return state
        reply = self.queries.call("nvmlDeviceGetNvLinkState", link)
        state = state if reply.value is None else reply.value
        if state is None:
            self.queries.unknown.setdefault("nvlinks.active", reply.reason)
        return state

    def _peer_bus_id(self, link: int) -> str | None:
        """Return the bus ID of the device at the other end. Virtual machines hide it behind an address of ones."""
        remote = self.queries.read("nvlinks.peer_bus_id", "nvmlDeviceGetNvLinkRemotePciInfo", link)
        address = snapshot.normalize_bus_id(decode(remote.busId) or "") if remote is not None else ""
        if address.startswith("ffffffff:"):
            self.queries.unknown.setdefault("nvlinks.peer_bus_id", "this virtual machine hides it")
        return address if address and not address.startswith("ffffffff:") else None

    def _errors(self, link: int) -> dict[str, int]:
        """Return the error counters that can be read. Skip a counter on later links after NVML fails to read it."""
        counts = {}
        for name, number in _ERRORS.items():
            count = self.fields.get((number, link))
            if count is None and name in self.counters:
                reply = self.queries.call("nvmlDeviceGetNvLinkErrorCounter", link, self.counters[name])
                count = reply.value
                if count is None:
                    del self.counters[name]
                    self.queries.unknown.setdefault(f"nvlinks.errors.{name}", reply.reason)
            if count is not None:
                counts[name] = count
        return counts


_ENVIRONMENTS = ("unavailable", "simulation", "production")
_MULTI_GPU = ("none", "protected_pcie", "nvle")
_BANDWIDTH_MODES = ("full", "off", "min", "half", "3quarter")
"""Names of NVML_CC_SYSTEM_ENVIRONMENT_*, NVML_CC_SYSTEM_MULTIGPU_* and NVML_GPU_NVLINK_BW_MODE_* in nvml.h, by
value.
"""

_UNKNOWN_TO_PYNVML = "this nvidia-ml-py does not support it"


def read_settings(library: Any, handles: Mapping[int, object]) -> snapshot.DriverSettings:
    """Read the driver settings from an initialized pynvml. `handles` are the responding GPUs by index."""
    unknown: dict[str, str] = {}
    mode = _read_setting(library, "nvmlSystemGetNvlinkBwMode", "nvlink_bandwidth_mode", unknown)
    mode_name = enum_name(_BANDWIDTH_MODES, mode)
    if mode is not None and mode_name is None:
        unknown["nvlink_bandwidth_mode"] = f"NVML returns {mode}, which nvml.h does not define"
    return snapshot.DriverSettings(
        confidential_computing=_confidential_computing(library, unknown),
        nvlink_bandwidth_mode=mode_name,
        nvlink_bandwidth_reduced=_bandwidth_reduced(library, handles, unknown),
        unknown=unknown,
    )


def _confidential_computing(library: Any, unknown: dict[str, str]) -> snapshot.ConfidentialComputing | None:
    """Read the confidential-computing settings. Older drivers report only the state, without multi-GPU mode."""
    state = None
    with contextlib.suppress(AttributeError, library.NVMLError):
        settings = library.c_nvmlSystemConfComputeSettings_v1_t()
        state = settings if library.nvmlSystemGetConfComputeSettings(ctypes.byref(settings)) == 0 else None
    if state is None:
        state = _read_setting(library, "nvmlSystemGetConfComputeState", "confidential_computing", unknown)
    if state is None:
        return None
    return snapshot.ConfidentialComputing(
        enabled=state.ccFeature == 1,
        developer_tools=state.devToolsMode == 1,
        environment=enum_name(_ENVIRONMENTS, state.environment),
        multi_gpu=enum_name(_MULTI_GPU, getattr(state, "multiGpuMode", None)),
    )


def _read_setting(library: Any, function: str, setting: str, unknown: dict[str, str]) -> Any:
    try:
        return getattr(library, function)()
    except AttributeError:
        unknown[setting] = _UNKNOWN_TO_PYNVML
    except library.NVMLError as error:
        unknown[setting] = str(error)
    return None


def _bandwidth_reduced(library: Any, handles: Mapping[int, object], unknown: dict[str, str]) -> tuple[str, ...] | None:
    """Return the GPUs whose NVLink bandwidth mode is reduced. None if no GPU has a mode (before Blackwell)."""
    structure = getattr(library, "c_nvmlNvlinkGetBwMode_v1_t", None)
    if structure is None:
        unknown["nvlink_bandwidth_reduced"] = _UNKNOWN_TO_PYNVML
        return None
    is_best: dict[int, bool] = {}
    reason = "there is no GPU that answers"
    for index, handle in handles.items():
        mode = structure()
        reply = GpuQueries(library, handle).call("nvmlDeviceGetNvlinkBwMode", ctypes.byref(mode))
        if reply.value is None:
            reason = reply.reason
        else:
            is_best[index] = bool(mode.bIsBest)
    if not is_best:
        unknown["nvlink_bandwidth_reduced"] = reason
        return None
    return tuple(f"GPU{index}" for index, best in is_best.items() if not best)


_MEMORY_VERSION = 0x02000028
"""nvmlMemory_v2, which counts the driver's own memory as reserved rather than used, as nvidia-smi does."""

_IDLE = 0x1
_LOWEST_STATE = 15  # NVML_PSTATE_15. NVML_PSTATE_UNKNOWN is 32
_THROTTLE_REASONS = {0x04 << position: reason for position, reason in enumerate(THROTTLE_REASONS)}
"""nvmlClocksEventReason* in nvml.h, except idle and clocks that an application or display requested."""

# Values of nvmlMemoryErrorType_t, and of nvmlEccCounterType_t for errors since the driver was loaded.
_UNCORRECTED, _VOLATILE = 1, 0
_CHIP, MULTIPROCESSORS = 0, 1  # Values of nvmlTemperatureSensors_t and nvmlClockType_t
_SLOWDOWN = 1  # NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
# NVML_GPU_FABRIC_CLIQUE_TYPE_UNICAST_POINTER. Before structure version 4, this clique is the only one
_UNICAST_POINTER = 0
_FABRIC_STATES = ("not_supported", "not_started", "in_progress", "completed")

_P2P_WORDS = ("OK", "CNS", "GNS", "TNS", "DR", "NS", "U")
_P2P_QUESTIONS = {"read": 0, "write": 1, "nvlink": 2, "atomics": 3, "pci": 4}
"""Values of nvmlGpuP2PCapsIndex_t, as numbers because NVML_P2P_CAPS_INDEX_READ is a tuple in nvidia-ml-py."""

_PCIE_PATHS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""Path types by nvmlGpuTopologyLevel_t. Level 0 means two GPUs on one board, which share the board's PCIe switch."""


class NvmlFacts(Struct, frozen=True, kw_only=True):
    """A node's facts from NVML. `driver.absent` is the reason if there is no driver."""

    driver: snapshot.DriverFacts = field(default_factory=snapshot.DriverFacts)
    settings: snapshot.DriverSettings = field(default_factory=snapshot.DriverSettings)
    gpus: tuple[snapshot.GpuFacts, ...] = ()
    pairs: tuple[snapshot.PairFacts, ...] = ()


def read_node(library: Any, cpus: int) -> NvmlFacts:
    """Read driver, GPUs and GPU pairs from an initialized pynvml. `cpus` is the number of configured CPUs."""
    handles: dict[int, object] = {}
    gone: list[snapshot.GpuFacts] = []
    for index in range(library.nvmlDeviceGetCount()):
        try:
            handles[index] = library.nvmlDeviceGetHandleByIndex(index)
        except library.NVMLError as error:
            gone.append(snapshot.GpuFacts(index=index, lost=str(error)))
    gpus = tuple(_read_gpu(GpuQueries(library, handle), index, cpus) for index, handle in handles.items())
    alive = {gpu.index: handles[gpu.index] for gpu in gpus if gpu.lost is None}
    return NvmlFacts(
        driver=snapshot.DriverFacts(
            version=decode(library.nvmlSystemGetDriverVersion()),
            cuda=format_version(library.nvmlSystemGetCudaDriverVersion()),
        ),
        settings=read_settings(library, alive),
        gpus=tuple(sorted((*gpus, *gone), key=lambda gpu: gpu.index)),
        pairs=_read_pairs(library, alive),
    )


def _read_gpu(queries: GpuQueries, index: int, cpus: int) -> snapshot.GpuFacts:
    pci = queries.read("bus_id", "nvmlDeviceGetPciInfo")
    capability = queries.read("compute_capability", "nvmlDeviceGetCudaComputeCapability")
    memory = read_memory(queries)
    reasons = read_clock_reasons(queries)
    bar1 = queries.read("bar1_bytes", "nvmlDeviceGetBAR1MemoryInfo")
    state = queries.call("nvmlDeviceGetPerformanceState").value
    utilization = queries.call("nvmlDeviceGetUtilizationRates").value
    # NVML returns the CPU mask in 64-bit words
    affinity = queries.read("cpu_affinity", "nvmlDeviceGetCpuAffinity", -(-cpus // 64))
    # Python evaluates arguments in order. `lost` and `unknown` come last, so that they include every query.
    return snapshot.GpuFacts(
        index=index,
        bus_id=snapshot.normalize_bus_id(decode(pci.busId) or "") if pci is not None else None,
        name=decode(queries.read("name", "nvmlDeviceGetName")),
        uuid=decode(queries.read("uuid", "nvmlDeviceGetUUID")),
        compute_capability=f"{capability[0]}.{capability[1]}" if capability is not None else None,
        memory_bytes=memory.total if memory is not None else None,
        memory_used_bytes=memory.used if memory is not None else None,
        mig=_current(queries.read("mig", "nvmlDeviceGetMigMode")),
        ecc=_current(queries.read("ecc", "nvmlDeviceGetEccMode")),
        persistence=_current([queries.read("persistence", "nvmlDeviceGetPersistenceMode")]),
        idle=is_idle(reasons),
        utilization_percent=None if utilization is None else utilization.gpu,
        performance_state=state if state is not None and state <= _LOWEST_STATE else None,
        throttle_reasons=throttle_reasons(reasons),
        remapped_rows=_remapped_rows(queries),
        retirement_pending=_current([queries.call("nvmlDeviceGetRetiredPagesPendingStatus").value]),
        memory_errors=read_memory_errors(queries),
        temperature_c=queries.read("temperature_c", "nvmlDeviceGetTemperature", _CHIP),
        slowdown_margin_c=_slowdown_margin(queries),
        most_clock_mhz=queries.read("most_clock_mhz", "nvmlDeviceGetMaxClockInfo", MULTIPROCESSORS),
        limits=_limits(queries),
        pcie=_pcie(queries),
        pcie_replays=queries.read("pcie_replays", "nvmlDeviceGetPcieReplayCounter"),
        cpu_affinity=format_mask(sum(int(word) << 64 * i for i, word in enumerate(affinity or ()))) or None,
        nvlinks=_read_nvlinks(queries, capability),
        fabric=_fabric(queries),
        bar1_bytes=bar1.bar1Total if bar1 is not None else None,
        processes=read_processes(queries),
        lost=queries.lost,
        unknown=queries.unknown,
    )


def _limits(queries: GpuQueries) -> snapshot.GpuLimits:
    """Read the clock and power limits. NVML reports power in milliwatts."""
    power_mw = queries.call("nvmlDeviceGetPowerManagementLimit").value
    default_power_mw = queries.call("nvmlDeviceGetPowerManagementDefaultLimit").value
    return snapshot.GpuLimits(
        clock_mhz=queries.call("nvmlDeviceGetApplicationsClock", MULTIPROCESSORS).value,
        default_clock_mhz=queries.call("nvmlDeviceGetDefaultApplicationsClock", MULTIPROCESSORS).value,
        power_w=None if power_mw is None else power_mw / 1000,
        default_power_w=None if default_power_mw is None else default_power_mw / 1000,
    )


def _slowdown_margin(queries: GpuQueries) -> int | None:
    """Return the temperature margin before the GPU slows down, in °C.

    That is NVML's T.Limit on Hopper and later, and slowdown temperature minus current temperature on older GPUs.
    """
    margin: int | None = queries.call("nvmlDeviceGetMarginTemperature").value
    if margin is not None:
        return margin
    slowdown = queries.call("nvmlDeviceGetTemperatureThreshold", _SLOWDOWN).value
    temperature = queries.call("nvmlDeviceGetTemperature", _CHIP).value if slowdown else None
    return None if temperature is None else slowdown - temperature


def _current(modes: list[int | None] | None) -> bool | None:
    return None if modes is None or modes[0] is None else bool(modes[0])


def read_memory(queries: GpuQueries) -> Any:
    """Return NVML's memory information, with `total` and `used` in bytes."""
    function = "nvmlDeviceGetMemoryInfo"
    return queries.read_first("memory_bytes", (function, _MEMORY_VERSION), (function,))


def read_clock_reasons(queries: GpuQueries) -> int | None:
    """Return NVML's bit mask of reasons for the current clocks."""
    return queries.read_first(  # type: ignore[no-any-return]
        "throttle_reasons", ("nvmlDeviceGetCurrentClocksEventReasons",), ("nvmlDeviceGetCurrentClocksThrottleReasons",)
    )


def read_memory_errors(queries: GpuQueries) -> int | None:
    """Return the number of uncorrectable memory errors since the driver was loaded."""
    return queries.read(  # type: ignore[no-any-return]
        "memory_errors", "nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE
    )


def is_idle(reasons: int | None) -> bool | None:
    """True if the clocks are low because the GPU is idle."""
    return bool(reasons & _IDLE) if reasons is not None else None


def throttle_reasons(reasons: int | None) -> tuple[str, ...] | None:
    """Return the names of the throttle reasons that are set in NVML's bit mask."""
    return None if reasons is None else tuple(reason for bit, reason in _THROTTLE_REASONS.items() if reasons & bit)


def _remapped_rows(queries: GpuQueries) -> snapshot.RemappedRows | None:
    rows = queries.read("remapped_rows", "nvmlDeviceGetRemappedRows")
    if rows is None:
        return None
    correctable, uncorrectable, pending, failure = rows
    spares = queries.call("nvmlDeviceGetRowRemapperHistogram").value
    return snapshot.RemappedRows(
        correctable=correctable,
        uncorrectable=uncorrectable,
        pending=bool(pending),
        failure=bool(failure),
        banks_without_spares=None if spares is None else int(spares.none),
    )


_PCIE = {
    "generation": "nvmlDeviceGetCurrPcieLinkGeneration",
    "width": "nvmlDeviceGetCurrPcieLinkWidth",
    "max_generation": "nvmlDeviceGetMaxPcieLinkGeneration",
    "max_width": "nvmlDeviceGetMaxPcieLinkWidth",
}


def _pcie(queries: GpuQueries) -> snapshot.PcieLink:
    """Read the PCIe link. NVML reports unknown values as 0."""
    values = {name: queries.read(f"pcie.{name}", function) or None for name, function in _PCIE.items()}
    return snapshot.PcieLink(**values)


def _fabric(queries: GpuQueries) -> snapshot.Fabric | None:
    """Read the GPU's registration with the NVLink fabric, in the newest structure that both driver and pynvml
    support.
    """
    for structure, function in (
        ("c_nvmlGpuFabricInfo_v4_t", "nvmlDeviceGetGpuFabricInfo_v4"),
        ("c_nvmlGpuFabricInfo_v3_t", "nvmlDeviceGetGpuFabricInfoV"),
        ("c_nvmlGpuFabricInfo_v2_t", "nvmlDeviceGetGpuFabricInfoV"),
        ("c_nvmlGpuFabricInfo_t", "nvmlDeviceGetGpuFabricInfo"),
    ):
        form = getattr(queries.library, structure, None)
        info = None if form is None else form()
        if info is not None and queries.read("fabric", function, ctypes.byref(info)) is not None:
            queries.unknown.pop("fabric", None)
            break
    else:
        queries.unknown.setdefault("fabric", _UNKNOWN_TO_PYNVML)
        return None
    state = enum_name(_FABRIC_STATES, info.state)
    if state != "completed":
        return snapshot.Fabric(state=state)
    return snapshot.Fabric(
        state=state,
        status="success" if info.status == 0 else str(queries.library.NVMLError(info.status)),
        clique=_clique(info),
        cluster_uuid=str(uuid.UUID(bytes=bytes(info.clusterUuid))),
        health_mask=getattr(info, "healthMask", None),
    )


def _clique(info: Any) -> int | None:
    """Return the clique of GPUs that can address each other's memory. None if structure version 4 lists no such
    clique.
    """
    if not hasattr(info, "cliques"):
        return int(info.cliqueId)
    cliques = info.cliques[: info.numCliques]
    return next((int(clique.id) for clique in cliques if clique.type == _UNICAST_POINTER), None)


def read_processes(queries: GpuQueries) -> tuple[GpuProcess, ...] | None:
    """Return the processes with a context on the GPU. A process is listed once, even if it is both a compute and an
    MPS client.
    """
    kinds = ("Compute", "Graphics", "MPSCompute")
    compute, graphics, mps = (queries.read("processes", f"nvmlDeviceGet{kind}RunningProcesses") for kind in kinds)
    if compute is None:
        return None
    found = {process.pid: process for process in (*(mps or ()), *(graphics or ()), *compute)}
    mps_pids = {process.pid for process in mps or ()}
    return tuple(
        GpuProcess(
            pid=pid,
            name=_process_name(queries.library, pid),
            memory_bytes=found[pid].usedGpuMemory,
            mps=pid in mps_pids,
        )
        for pid in sorted(found)
    )


def _process_name(library: Any, pid: int) -> str | None:
    try:
        return decode(library.nvmlSystemGetProcessName(pid)) or None
    except library.NVMLError:
        return None


def _read_pairs(library: Any, handles: Mapping[int, object]) -> tuple[snapshot.PairFacts, ...]:
    paths: dict[frozenset[int], str | None] = {}
    pairs = []
    for source, destination in permutations(handles, 2):
        queries = GpuQueries(library, handles[source])
        both = frozenset((source, destination))
        if both not in paths:
            level = queries.read("pcie_path", "nvmlDeviceGetTopologyCommonAncestor", handles[destination])
            paths[both] = _PCIE_PATHS.get(level)
        words: dict[str, Any] = {
            name: enum_name(_P2P_WORDS, queries.read(name, "nvmlDeviceGetP2PStatus", handles[destination], number))
            for name, number in _P2P_QUESTIONS.items()
        }
        words |= {"source": f"GPU{source}", "destination": f"GPU{destination}", "pcie_path": paths[both]}
        pairs.append(snapshot.PairFacts(**words, unknown=queries.unknown))
    return tuple(pairs)
