"""Low-level access to the drivers: GPUs and peer access from the CUDA driver through ctypes, and single NVML calls."""

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import permutations
from typing import Any, NamedTuple
from uuid import UUID

from msgspec import Struct, field

_LIBRARY = "libcuda.so.1"
_NO_DEVICE = 100
_BUS_ID_BYTES, _UUID_BYTES = 32, 16
_MULTIPROCESSORS = 16
_DMA_BUF_SUPPORTED = 124
MPS_ENABLED = 133
"""CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED and CU_DEVICE_ATTRIBUTE_MPS_ENABLED
in cuda.h."""

_FEATURES = {"virtual_memory": 102, "gpu_direct_rdma": 116, "cuda_ipc": 125, "fabric_handles": 128, "multicast": 132}
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED and similar attributes, which libraries check before they
share memory. CUDA documents 125 (IPC_EVENT_SUPPORTED) as the test for all of legacy CUDA IPC.
"""


class CudaUnavailableError(Exception):
    """CUDA cannot be used. `absent` is true if the library is missing or CUDA may not use any GPU."""

    def __init__(self, reason: str, *, absent: bool = False) -> None:
        super().__init__(reason)
        self.absent = absent


class CudaGpu(Struct, frozen=True, kw_only=True):
    """A GPU as CUDA presents it to this process."""

    index: int
    bus_id: str
    multiprocessors: int | None = None
    dma_buf: bool | None = None
    features: Mapping[str, bool] = field(default_factory=dict)


class CudaFacts(Struct, frozen=True, kw_only=True):
    """The GPUs that CUDA lists, and peer access by source and destination bus ID. `absent` is the reason if CUDA is
    unavailable.
    """

    gpus: tuple[CudaGpu, ...] = ()
    peers: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    visible_devices: str | None = None
    absent: str | None = None


def format_version(encoded: int) -> str:
    """Decode a version number from `cudaDriverGetVersion`, such as 13000 for '13.0'."""
    return f"{encoded // 1000}.{encoded % 1000 // 10}"


def load_cuda() -> Any:
    """Load the CUDA driver library. Raise CudaUnavailableError if this host has none."""
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise CudaUnavailableError(f"{_LIBRARY} cannot be loaded ({error})", absent=True) from error


def device_uuid(library: Any, index: int) -> str:
    """Return the UUID of a GPU ('GPU-…') or MIG instance ('MIG-…') by CUDA index.

    Raise CudaUnavailableError if a CUDA call fails.
    """
    _check(library, "cuInit", 0)
    device = _integer(library, "cuDeviceGet", index)
    board = _uuid(library, "cuDeviceGetUuid", device)
    with suppress(CudaUnavailableError, AttributeError):
        instance = _uuid(library, "cuDeviceGetUuid_v2", device)
        if instance != board:
            return f"MIG-{instance}"
    return f"GPU-{board}"


def _uuid(library: Any, function: str, device: int) -> UUID:
    found = ctypes.create_string_buffer(_UUID_BYTES)
    _check(library, function, found, device)
    return UUID(bytes=found.raw)


def read_cuda(library: Any, visible_devices: str | None = None) -> CudaFacts:
    """Read the GPUs that CUDA lists, and the peer access between them. Raise CudaUnavailableError if a CUDA call
    fails.
    """
    _check(library, "cuInit", 0)
    devices = [_integer(library, "cuDeviceGet", ordinal) for ordinal in range(_integer(library, "cuDeviceGetCount"))]
    gpus = tuple(_read_gpu(library, index, device) for index, device in enumerate(devices))
    peers: dict[str, dict[str, bool]] = {}
    for source, destination in permutations(gpus, 2):
        access = _optional(library, "cuDeviceCanAccessPeer", devices[source.index], devices[destination.index])
        if access is not None:
            peers.setdefault(source.bus_id, {})[destination.bus_id] = bool(access)
    return CudaFacts(gpus=gpus, peers=peers, visible_devices=visible_devices)


def read_attribute(library: Any, attribute: int, ordinal: int) -> int | None:
    """Read a device attribute by its number in cuda.h. None if the driver does not support the attribute."""
    device = _optional(library, "cuDeviceGet", ordinal)
    return None if device is None else _optional(library, "cuDeviceGetAttribute", attribute, device)


def _read_gpu(library: Any, index: int, device: int) -> CudaGpu:
    # This import takes 15 ms, during which CUDA can initialize.
    from gpubench.model.facts.snapshot import normalize_bus_id

    address = ctypes.create_string_buffer(_BUS_ID_BYTES)
    _check(library, "cuDeviceGetPCIBusId", address, _BUS_ID_BYTES, device)
    dma_buf = _optional(library, "cuDeviceGetAttribute", _DMA_BUF_SUPPORTED, device)
    features = {name: _optional(library, "cuDeviceGetAttribute", number, device) for name, number in _FEATURES.items()}
    return CudaGpu(
        index=index,
        bus_id=normalize_bus_id(address.value.decode()),
        multiprocessors=_optional(library, "cuDeviceGetAttribute", _MULTIPROCESSORS, device),
        dma_buf=None if dma_buf is None else bool(dma_buf),
        features={name: bool(answer) for name, answer in features.items() if answer is not None},
    )


def _integer(library: Any, function: str, *arguments: object) -> int:
    value = ctypes.c_int()
    _check(library, function, ctypes.byref(value), *arguments)
    return value.value


def _optional(library: Any, function: str, *arguments: object) -> int | None:
    """Call a CUDA function that returns an integer. None if the call fails, as for attributes that older drivers
    lack.
    """
    try:
        return _integer(library, function, *arguments)
    except CudaUnavailableError:
        return None


def _check(library: Any, function: str, *arguments: object) -> None:
    call: Callable[..., int] = getattr(library, function)
    status = call(*arguments)
    if not status:
        return
    name = ctypes.c_char_p()
    error = f"error {status}"
    if library.cuGetErrorName(status, ctypes.byref(name)) == 0 and name.value is not None:
        error = f"{name.value.decode()} ({status})"
    raise CudaUnavailableError(f"{function} answered {error}", absent=status == _NO_DEVICE)


INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
GPU_IS_LOST = 15  # Error codes from nvmlReturn_t in nvml.h
_VALUE_BY_TYPE = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""The member of the nvmlValue_t union that holds a field's value, indexed by `nvmlValueType_t`."""


class Reply(NamedTuple):
    """The result of an NVML call: a value, or else the reason for its absence and the error code."""

    value: Any
    reason: str = ""
    code: int = 0


class GpuQueries:
    """NVML queries about one GPU. `unknown` maps each missing fact to a reason. If the GPU is `lost`, no more calls
    are made.
    """

    def __init__(self, library: Any, handle: object) -> None:
        self.library = library
        self.unknown: dict[str, str] = {}
        self.lost: str | None = None
        self._handle = handle

    @classmethod
    def find(cls, library: Any, bus_id: str) -> "GpuQueries | None":
        """Find a GPU by PCI bus ID. None if there is no NVML library or no such GPU."""
        if library is None:
            return None
        try:
            return cls(library, library.nvmlDeviceGetHandleByPciBusId(bus_id))
        except library.NVMLError:
            return None

    def call(self, function: str, *arguments: object) -> Reply:
        """Call an NVML function. Return errors as a Reply too, even if pynvml lacks the function."""
        if self.lost is not None:
            return Reply(None, self.lost, GPU_IS_LOST)
        method = getattr(self.library, function, None)
        if method is None:
            return Reply(None, f"this nvidia-ml-py has no {function}")
        try:
            return Reply(method(self._handle, *arguments))
        except self.library.NVMLError as error:
            code = getattr(error, "value", 0)
            if code == GPU_IS_LOST:
                self.lost = str(error)
            return Reply(None, str(error), code)

    def read(self, fact: str, function: str, *arguments: object) -> Any:
        """Call an NVML function and return its value. If the call fails, store the reason under `fact` and return
        None.
        """
        return self.read_first(fact, (function, *arguments))

    def read_first(self, fact: str, *calls: tuple[Any, ...]) -> Any:
        """Make several calls, each a function name with arguments, and return the first value.

        If all calls fail, store the first reason under `fact` and return None.
        """
        replies = (self.call(function, *arguments) for function, *arguments in calls)
        reasons = []
        for reply in replies:
            if reply.value is not None:
                return reply.value
            reasons.append(reply.reason)
        self.unknown.setdefault(fact, next(filter(None, reasons), ""))
        return None

    def fields(self, wanted: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
        """Read several NVML fields in one call, by field number and scope. Leave out fields that NVML does not
        support.
        """
        keys = list(wanted)
        values = self.call("nvmlDeviceGetFieldValues", keys).value or ()
        return {
            key: int(getattr(field.value, _VALUE_BY_TYPE[field.valueType]))
            for key, field in zip(keys, values, strict=False)
            if field.nvmlReturn == 0 and field.valueType < len(_VALUE_BY_TYPE)
        }


def enum_name(names: Sequence[str], number: int | None) -> str | None:
    """Return the name for a value of an NVML enum that starts at 0. None if the value has no name."""
    return names[number] if number is not None and 0 <= number < len(names) else None


def decode(text: str | bytes | None) -> str | None:
    """Decode a string from NVML, because older pynvml versions return bytes."""
    return text.decode(errors="replace") if isinstance(text, bytes) else text
