# ruff: noqa: N802, N815 - pynvml's own names
"""A pynvml in which every answer can be replaced. By default it answers for four GPUs behind an NVSwitch."""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

ERRORS = {
    2: "Invalid Argument",
    3: "Not Supported",
    9: "Driver Not Loaded",
    12: "NVML Shared Library Not Found",
    15: "GPU is lost",
    18: "RM has detected an NVML/RM version mismatch.",
    25: "Argument Version Mismatch",
    999: "Unknown Error",
}


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(ERRORS.get(value, f"error {value}"))
        self.value = value


class FabricV1(ctypes.Structure):
    _fields_ = (
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint32),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
    )


class FabricV2(ctypes.Structure):
    _fields_ = (*FabricV1._fields_, ("healthMask", ctypes.c_uint32))


class FabricV3(ctypes.Structure):
    _fields_ = (*FabricV2._fields_, ("healthSummary", ctypes.c_uint8))


class Clique(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint32), ("id", ctypes.c_uint32))


class FabricV4(ctypes.Structure):
    _fields_ = (
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint32),
        ("cliques", Clique * 64),
        ("numCliques", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
        ("healthMask", ctypes.c_uint32),
        ("healthSummary", ctypes.c_uint8),
    )


class Value(ctypes.Union):
    _fields_ = (
        ("dVal", ctypes.c_double),
        ("uiVal", ctypes.c_uint),
        ("ullVal", ctypes.c_ulonglong),
        ("sllVal", ctypes.c_longlong),
    )


UNSIGNED_INT, UNSIGNED_LONG_LONG = 1, 3


def process(pid: int, used: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


def replies(bus: str) -> dict[str, Any]:
    """Return the answers of a healthy H200 by function: a value, an error number, or a function."""
    return {
        "nvmlDeviceGetPciInfo": SimpleNamespace(busId=f"00000000:{bus}:00.0"),
        "nvmlDeviceGetName": b"NVIDIA H200",
        "nvmlDeviceGetUUID": f"GPU-{bus}",
        "nvmlDeviceGetCudaComputeCapability": (9, 0),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=150754820096, used=131072),
        "nvmlDeviceGetMigMode": [0, 1],
        "nvmlDeviceGetEccMode": [1, 1],
        "nvmlDeviceGetPersistenceMode": 1,
        "nvmlDeviceGetCurrPcieLinkGeneration": 1,
        "nvmlDeviceGetMaxPcieLinkGeneration": 5,
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetPcieReplayCounter": 0,
        "nvmlDeviceGetCurrentClocksEventReasons": 1,
        "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
        "nvmlDeviceGetTotalEccErrors": lambda *_: 0,
        "nvmlDeviceGetTemperature": lambda _: 34,
        "nvmlDeviceGetMaxClockInfo": lambda _: 1980,
        "nvmlDeviceGetBAR1MemoryInfo": SimpleNamespace(bar1Total=274877906944),
        "nvmlDeviceGetCpuAffinity": lambda words: [0xFFFFFFFF, 0xF, 0, 0][:words],
        "nvmlDeviceGetComputeRunningProcesses": [],
        "nvmlDeviceGetGraphicsRunningProcesses": [],
        "nvmlDeviceGetMPSComputeRunningProcesses": [],
        "nvmlDeviceGetNvLinkState": lambda link: 1 if link < 18 else 2,
        "nvmlDeviceGetNvLinkVersion": 6,
        "nvmlDeviceGetNvLinkRemoteDeviceType": 2,
        "nvmlDeviceGetNvLinkRemotePciInfo": SimpleNamespace(busId=b"FFFFFFFF:FF:FF.0"),
        "nvmlDeviceGetNvLinkErrorCounter": 7,
        "nvmlDeviceGetTopologyCommonAncestor": 30,
        "nvmlDeviceGetP2PStatus": lambda _, index: [0, 0, 0, 0, 5][index],
    }


def fields(link: int) -> dict[int, int | None]:
    """Return the field values of a link. None is not supported."""
    return {90: None, 91: 18, 164: 26562, 165: 1, 166: 6, 161: 0, 162: 0, 163: 0}


@dataclass
class FakeGpu:
    bus: str = "06"
    handle_error: int = 0
    replies: dict[str, Any] = field(default_factory=dict)
    fields: Callable[[int], dict[int, int | None]] = fields
    fabric: Mapping[str, Any] = field(default_factory=lambda: {"state": 3, "status": 0, "cliqueId": 0})

    def __post_init__(self) -> None:
        self.replies = replies(self.bus) | self.replies


class FakeNvml:
    """The module. `missing` functions do not exist, as in an old nvidia-ml-py. `calls` records all calls."""

    NVMLError = NVMLError
    NVML_NVLINK_MAX_LINKS = 36
    c_nvmlGpuFabricInfo_t = FabricV1
    c_nvmlGpuFabricInfo_v2_t = FabricV2
    c_nvmlGpuFabricInfo_v3_t = FabricV3
    c_nvmlGpuFabricInfo_v4_t: type[ctypes.Structure] | None = None

    def __init__(self, *gpus: FakeGpu, missing: tuple[str, ...] = (), start_error: int = 0) -> None:
        self.gpus = gpus or tuple(FakeGpu(bus) for bus in ("06", "07", "08", "09"))
        self.missing = missing
        self.start_error = start_error
        self.calls: list[str] = []
        self.newest_fabric: type[ctypes.Structure] = FabricV3
        self.names: dict[int, bytes] = {}

    def __getattr__(self, name: str) -> Any:
        if name in self.missing or not name.startswith("nvmlDevice"):
            raise AttributeError(name)
        if not any(name in gpu.replies for gpu in self.gpus):
            raise AttributeError(name)

        def ask(gpu: FakeGpu, *arguments: Any) -> Any:
            self.calls.append(name)
            reply = gpu.replies.get(name, NVMLError(3))
            if callable(reply):
                reply = reply(*arguments)
                if name == "nvmlDeviceGetNvLinkState" and reply not in (0, 1):
                    reply = NVMLError(reply)
            if isinstance(reply, NVMLError):
                raise reply
            return reply

        return ask

    def nvmlInit(self) -> None:
        self._fail(self.start_error)

    def nvmlShutdown(self) -> None:
        self.calls.append("nvmlShutdown")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        self._fail(self.gpus[index].handle_error)
        return self.gpus[index]

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.04"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13000

    def nvmlSystemGetProcessName(self, pid: int) -> bytes:
        if pid not in self.names:
            raise NVMLError(3)
        return self.names[pid]

    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, wanted: list[tuple[int, int]]) -> list[SimpleNamespace]:
        self.calls.append("nvmlDeviceGetFieldValues")
        reply = gpu.replies.get("nvmlDeviceGetFieldValues")
        if isinstance(reply, NVMLError):
            raise reply
        answers = []
        for number, scope in wanted:
            value = gpu.fields(scope).get(number)
            wide = number in (161, 162, 163)
            kind = UNSIGNED_LONG_LONG if wide else UNSIGNED_INT
            union = Value(ullVal=value or 0) if wide else Value(uiVal=value or 0)
            answers.append(SimpleNamespace(nvmlReturn=3 if value is None else 0, valueType=kind, value=union))
        return answers

    def nvmlDeviceGetGpuFabricInfoV(self, gpu: FakeGpu, reference: Any) -> int:
        info = reference._obj
        if not isinstance(info, self.newest_fabric):
            raise NVMLError(25)
        return self._fill_fabric(gpu, info)

    def nvmlDeviceGetGpuFabricInfo_v4(self, gpu: FakeGpu, reference: Any) -> int:
        return self._fill_fabric(gpu, reference._obj)

    def nvmlDeviceGetGpuFabricInfo(self, gpu: FakeGpu, reference: Any) -> int:
        return self._fill_fabric(gpu, reference._obj)

    def _fill_fabric(self, gpu: FakeGpu, info: Any) -> int:
        if gpu.replies.get("nvmlDeviceGetGpuFabricInfoV") is not None:
            raise NVMLError(3)
        for name, value in gpu.fabric.items():
            if hasattr(info, name):
                setattr(info, name, value)
        return 0

    def _fail(self, code: int) -> None:
        if code:
            raise NVMLError(code)
