"""Read the driver, the GPUs that it shows, and the links' byte counters. Only this module imports pynvml."""

import ctypes
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from gpubench.errors import CouldNotMeasureError
from gpubench.machine.drivers import DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, GpuQueries, decode
from gpubench.ports.copies import LinkBytes

if TYPE_CHECKING:
    from gpubench.machine.gpus import NvmlFacts

_FILE = "libnvidia-ml.so.1"
# The same text as pynvml's message. Importing pynvml to get it would take 20 ms.
_NOT_FOUND = "NVML does not start (NVML Shared Library Not Found)"
_NO_DRIVER = (DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND)


class Driver(Struct, frozen=True):
    """The NVIDIA driver and its GPUs.

    `cuda` is 13000 for version 13.0. `visible` is the number of GPUs that CUDA may use. `absent` is the reason if there
    is no driver.
    """

    version: str = ""
    cuda: int = 0
    gpus: int = 0
    visible: int = 0
    absent: str = ""

    def hidden_gpus(self, root: Path = Path("/")) -> str:
        """Return why this host's GPUs cannot be used. '' if they can be used, or if the host has none."""
        if self.visible:
            return ""
        if self.gpus:
            return f"CUDA_VISIBLE_DEVICES hides the {self.gpus} GPUs of this host"
        return self.absent if (root / "dev/nvidiactl").exists() else ""


def read_driver(environment: Mapping[str, str]) -> Driver:
    """Read the driver, and count the GPUs that a process with this environment may use. Never raises for a missing
    driver.
    """
    if not _is_installed():
        return Driver(absent=_NOT_FOUND)
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Driver(absent=f"NVML does not start ({error})")
    try:
        gpus = pynvml.nvmlDeviceGetCount()
        return Driver(
            version=decode(pynvml.nvmlSystemGetDriverVersion()) or "",
            cuda=pynvml.nvmlSystemGetCudaDriverVersion(),
            gpus=gpus,
            visible=visible_count(gpus, environment.get("CUDA_VISIBLE_DEVICES")),
        )
    except pynvml.NVMLError as error:
        return Driver(absent=f"NVML does not answer ({error})")
    finally:
        pynvml.nvmlShutdown()


def _is_installed() -> bool:
    if "pynvml" in sys.modules:
        return True
    try:
        ctypes.CDLL(_FILE)
    except OSError:
        return False
    return True


def read_nvml() -> "NvmlFacts":
    """Read driver, GPUs and GPU pairs. Raise CouldNotMeasureError if NVML fails although there is a driver."""
    import pynvml

    from gpubench.machine.gpus import NvmlFacts, read_node
    from gpubench.model.facts.snapshot import DriverFacts

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        reason = f"NVML does not start ({error})"
        if error.value in _NO_DRIVER:
            return NvmlFacts(driver=DriverFacts(absent=reason))
        raise CouldNotMeasureError(reason) from error
    try:
        # An affinity mask has a bit for each CPU number, and offline CPUs have numbers too.
        return read_node(pynvml, cpus=os.sysconf("SC_NPROCESSORS_CONF"))
    except pynvml.NVMLError as error:
        raise CouldNotMeasureError(f"NVML does not answer ({error})") from error
    finally:
        pynvml.nvmlShutdown()


def open_library() -> Any | None:
    """Return an initialized pynvml for repeated readings. None without a driver. The caller must call
    `nvmlShutdown`.
    """
    if not _is_installed():
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def read_uuids() -> list[str]:
    """Return the UUIDs of the GPUs in NVML's order, '' for a GPU that does not respond. No GPUs without a driver."""
    library = open_library()
    if library is None:
        return []
    found = []
    for index in range(library.nvmlDeviceGetCount()):
        try:
            found.append(decode(library.nvmlDeviceGetUUID(library.nvmlDeviceGetHandleByIndex(index))) or "")
        except library.NVMLError:
            found.append("")
    library.nvmlShutdown()
    return found


def visible_count(gpus: int, setting: str | None) -> int:
    """Return the number of GPUs that CUDA_VISIBLE_DEVICES leaves. CUDA ignores all entries from the first invalid
    one on.
    """
    if setting is None:
        return gpus
    names = (entry.strip() for entry in setting.split(","))
    known = (name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < gpus) for name in names)
    return min(gpus, sum(takewhile(bool, known)))


class NvmlReader:
    """Keep NVML initialized until `close`. `library` is None without a driver."""

    def __init__(self) -> None:
        self.library: Any | None = open_library()

    def close(self) -> None:
        if self.library is not None:
            self.library.nvmlShutdown()
        self.library = None


ALL_LINKS = 0xFFFFFFFF  # The scope ID with which NVML sums a field over all NVLinks
NVLINK_COUNTERS, PCIE_COUNTERS = ("nvlink_sent", "nvlink_received"), ("pcie_sent", "pcie_received")
_COUNTERS = {
    "nvlink_sent": (138, ALL_LINKS, 1024),
    "nvlink_received": (139, ALL_LINKS, 1024),
    "pcie_sent": (197, 0, 1),
    "pcie_received": (198, 0, 1),
}
"""Field number, scope and bytes per count. NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX count payload only.
NVML_FI_DEV_PCIE_COUNT_TX_BYTES and _RX_BYTES are 32-bit counters that include packet headers.
"""


def read_link_counters(queries: GpuQueries, names: Iterable[str] = tuple(_COUNTERS)) -> dict[str, int]:
    """Read the byte counters of a GPU's links, by counter name. Each counter adds to the time that NVML takes."""
    counters = {name: _COUNTERS[name] for name in names}
    values = queries.fields((number, scope) for number, scope, _ in counters.values())
    return {
        name: values[number, scope] * unit
        for name, (number, scope, unit) in counters.items()
        if (number, scope) in values
    }


class NvmlCounters(NvmlReader):
    """Byte counters for the links of several GPUs, chosen by PCI bus ID. They count from the time the driver was
    loaded.

    On H200, NVLink counters increased by the copied bytes ± 4 KiB. PCIe counters increased by 1.08 to 1.09 times the
    host-staged bytes, and by 0.03 MiB during NVLink copies. Use them only for copies of several megabytes.
    """

    def __init__(self, bus_ids: Sequence[str]) -> None:
        super().__init__()
        self._gpus = [GpuQueries.find(self.library, bus_id) for bus_id in bus_ids]

    def read(self, gpu: int) -> LinkBytes:
        """Read the counters of GPU number `gpu` in the list of bus IDs. Takes half a millisecond."""
        queries = self._gpus[gpu]
        return LinkBytes() if queries is None or self.library is None else LinkBytes(**read_link_counters(queries))
