"""Driver and GPUs from NVML. The only importer of pynvml."""

import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpubench.errors import CouldNotMeasureError
from gpubench.hardware.node.nvml.answers import DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, text

if TYPE_CHECKING:
    from gpubench.hardware.node.nvml.gpu import NvmlFacts

_FILE = "libnvidia-ml.so.1"
_NOT_FOUND = "NVML does not start (NVML Shared Library Not Found)"
"""As pynvml says it, which takes 20 ms to import, in every process that asks whether there are GPUs."""

_NO_DRIVER = (DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND)


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver of this host.

    `gpus` are all it has, `visible` those that CUDA_VISIBLE_DEVICES leaves; `cuda` is the newest CUDA version it runs,
    as CUDA encodes versions (13000 is 13.0). Without a driver, all is 0 and `absent` says why.
    """

    version: str = ""
    cuda: int = 0
    gpus: int = 0
    visible: int = 0
    absent: str = ""

    def hidden_gpus(self, root: Path = Path("/")) -> str:
        """The reason why GPUs that this host seems to have cannot be used; empty where it has none, or where they can.

        `root` is where /dev is found.
        """
        if self.visible:
            return ""
        if self.gpus:
            return f"CUDA_VISIBLE_DEVICES hides the {self.gpus} GPUs of this host"
        return self.absent if (root / "dev/nvidiactl").exists() else ""


def read_driver(environment: Mapping[str, str]) -> Driver:
    """The driver, and the GPUs that a process with this environment may use; never raises for a missing driver."""
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
    """True where NVML can be loaded, or pynvml, which loads it, is there already."""
    if "pynvml" in sys.modules:
        return True
    try:
        ctypes.CDLL(_FILE)
    except OSError:
        return False
    return True


def read_nvml() -> "NvmlFacts":
    """Driver, GPUs and pairs; a host without a driver has none, and says so in `driver.absent`.

    Raises CouldNotMeasureError where there is a driver and it does not answer, or not this library.
    """
    import pynvml

    from gpubench.hardware.node.nvml.gpu import NvmlFacts, read_node
    from gpubench.model.facts.snapshot import DriverFacts

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        reason = f"NVML does not start ({error})"
        if error.value in _NO_DRIVER:
            return NvmlFacts(driver=DriverFacts(absent=reason))
        raise CouldNotMeasureError(reason) from error
    try:
        # Affinity masks are indexed by CPU number, and processors that are off have numbers too.
        return read_node(pynvml, cpus=os.sysconf("SC_NPROCESSORS_CONF"))
    except pynvml.NVMLError as error:
        raise CouldNotMeasureError(f"NVML does not answer ({error})") from error
    finally:
        pynvml.nvmlShutdown()


def open_library() -> Any | None:
    """The initialised library, for repeated readings that end with its `nvmlShutdown`; None without a driver."""
    if not _is_installed():
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def visible_count(gpus: int, setting: str | None) -> int:
    """The number of GPUs that CUDA_VISIBLE_DEVICES leaves: CUDA reads it up to the first entry it does not know."""
    if setting is None:
        return gpus
    names = (entry.strip() for entry in setting.split(","))
    known = (name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < gpus) for name in names)
    return min(gpus, sum(takewhile(bool, known)))
