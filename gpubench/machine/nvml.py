"""Imports pynvml, the only module that does: the driver, its visible GPUs, and byte counters of links."""

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from gpubench.errors import CouldNotMeasureError
from gpubench.machine.drivers import DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, Answers, text
from gpubench.ports.copies import LinkBytes

if TYPE_CHECKING:
    from gpubench.machine.gpus import NvmlFacts

_FILE = "libnvidia-ml.so.1"
# pynvml's message. Importing pynvml would take 20 ms
_NOT_FOUND = "NVML does not start (NVML Shared Library Not Found)"
_NO_DRIVER = (DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND)


class Driver(Struct, frozen=True):
    """The NVIDIA driver: all `gpus`, those `visible` to CUDA, and `cuda` as 13000 for 13.0. `absent` says why it is
    missing.
    """

    version: str = ""
    cuda: int = 0
    gpus: int = 0
    visible: int = 0
    absent: str = ""

    def hidden_gpus(self, root: Path = Path("/")) -> str:
        """Return why GPUs in `root`/dev cannot be used, or '' if there are none or they can."""
        if self.visible:
            return ""
        if self.gpus:
            return f"CUDA_VISIBLE_DEVICES hides the {self.gpus} GPUs of this host"
        return self.absent if (root / "dev/nvidiactl").exists() else ""


def read_driver(environment: Mapping[str, str]) -> Driver:
    """Read the driver and the GPUs that a process with this environment may use. Never raises for a missing driver."""
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
            version=text(pynvml.nvmlSystemGetDriverVersion()) or "",
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
    """Read driver, GPUs and pairs. Raises CouldNotMeasureError if the driver does not answer this library."""
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
        # Affinity masks are indexed by CPU number, and offline CPUs have numbers too.
        return read_node(pynvml, cpus=os.sysconf("SC_NPROCESSORS_CONF"))
    except pynvml.NVMLError as error:
        raise CouldNotMeasureError(f"NVML does not answer ({error})") from error
    finally:
        pynvml.nvmlShutdown()


def open_library() -> Any | None:
    """Return an initialized library for repeated readings. The caller calls `nvmlShutdown`. None without a driver."""
    if not _is_installed():
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def visible_count(gpus: int, setting: str | None) -> int:
    """Return how many GPUs CUDA_VISIBLE_DEVICES leaves. CUDA stops at the first unknown entry."""
    if setting is None:
        return gpus
    names = (entry.strip() for entry in setting.split(","))
    known = (name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < gpus) for name in names)
    return min(gpus, sum(takewhile(bool, known)))


_SENT = 138
_RECEIVED = 139  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX: KiB of payload without protocol overhead
_PCIE_SENT = 197
_PCIE_RECEIVED = 198  # NVML_FI_DEV_PCIE_COUNT_TX_BYTES and _RX_BYTES: 32 bits, including headers
_ALL_LINKS = 0xFFFFFFFF
_NO_SCOPE = 0
_KIB = 1024


def read_link_bytes(answers: Answers, *, nvlink_only: bool = False, pcie_only: bool = False) -> LinkBytes:
    """Read the counters of one GPU. Reading only one kind of link costs less."""
    nvlink = [] if pcie_only else [(each, _ALL_LINKS) for each in (_SENT, _RECEIVED)]
    pcie = [] if nvlink_only else [(each, _NO_SCOPE) for each in (_PCIE_SENT, _PCIE_RECEIVED)]
    values = answers.fields(nvlink + pcie)
    counts = [None if values.get(each) is None else values[each] * _KIB for each in nvlink] or [None, None]
    counts += [values.get(each) for each in pcie] or [None, None]
    return LinkBytes(*counts)


class NvmlCounters:
    """Link counters of the GPUs with these PCI bus ids since the driver was loaded.

    On H200, NVLink counters moved by the copied bytes ± 4 KiB, PCIe counters by 1.08 to 1.09 of host-staged bytes and
    by 0.03 MiB during NVLink copies. Judge only copies of megabytes.
    """

    def __init__(self, bus_ids: Sequence[str]) -> None:
        self._library = open_library()
        self._gpus = [Answers.of_gpu(self._library, each) for each in bus_ids]

    def read(self, gpu: int) -> LinkBytes:
        """Read the counters of the GPU at a position, in half a millisecond."""
        answers = self._gpus[gpu]
        if answers is None:
            return LinkBytes()
        return read_link_bytes(answers)

    def close(self) -> None:
        """Shut NVML down."""
        if self._library is not None:
            self._library.nvmlShutdown()
        self._library, self._gpus = None, [None] * len(self._gpus)
