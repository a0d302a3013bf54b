"""One snapshot from what the kernel, NVML and CUDA each say of a node. The bus id is what joins them."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import permutations

from gpubench import __version__
from gpubench.hardware.node.cuda_driver import CudaFacts, CudaGpu
from gpubench.hardware.node.nvml.gpu import NvmlFacts
from gpubench.hardware.node.nvml.library import visible_count
from gpubench.hardware.node.sysfs import SysfsFacts
from gpubench.model.facts.driver_settings import DriverSettings
from gpubench.model.facts.snapshot import DriverFacts, GpuFacts, PairFacts, PcieLink, ProbeFailure, Snapshot
from gpubench.model.facts.visible_gpus import HIDDEN
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.units import counted

NVML_ALONE = ("confidential_computing", "nvlink_bandwidth_mode", "nvlink_bandwidth_reduced")
"""Of the driver's settings, those that no file tells."""

UNLISTED = "on the PCI bus, but the driver does not list it"
_NVIDIA_DRIVER = "nvidia"


def merge(
    host: str,
    sysfs: SysfsFacts | None,
    nvml: NvmlFacts | None,
    cuda: CudaFacts | None,
    failures: Sequence[ProbeFailure] = (),
) -> Snapshot:
    """The snapshot of a node. None is a source that gave nothing, of which `failures` says why."""
    kernel = sysfs or SysfsFacts()
    listed = _gpus(kernel, nvml)
    unseen = _why_unseen(len(listed), cuda)
    gpus = tuple(_with_cuda(gpu, cuda, unseen) for gpu in listed)
    all_failures = (*failures, *_cuda_failure(gpus, nvml, cuda))
    driver = nvml.driver if nvml is not None else DriverFacts()
    shown = {gpu.bus_id for gpu in gpus}
    dma_buf = [gpu.dma_buf for gpu in (cuda.gpus if cuda is not None else ()) if gpu.dma_buf is not None]
    return Snapshot(
        host=host,
        origin=Origin.MEASURED,
        source=f"gpubench {__version__}",
        taken_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=kernel.machine,
        # The kernel names the version of a driver that does not answer, and alone knows which module it is.
        driver=replace(
            driver,
            version=driver.version or kernel.driver.version,
            open_kernel_module=kernel.driver.open_kernel_module,
        ),
        driver_settings=_driver_settings(kernel.driver_settings, nvml, failures),
        gpudirect=replace(kernel.gpudirect, dma_buf=all(dma_buf) if dma_buf else None),
        gpus=gpus,
        gpus_of_others=sum(gpu.bus_id not in shown for gpu in kernel.gpus),
        nics=kernel.nics,
        switches=kernel.switches,
        pci_devices=kernel.pci_devices,
        rdma_ports=kernel.rdma_ports,
        kernel=kernel.kernel,
        nvswitches=kernel.nvswitches,
        pairs=tuple(_pairs(gpus, nvml, cuda, all_failures, unseen)),
        failures=all_failures,
    )


def _driver_settings(
    kernel: DriverSettings, nvml: NvmlFacts | None, failures: Sequence[ProbeFailure]
) -> DriverSettings:
    """The settings in the kernel's files, with those that NVML alone knows."""
    settings = nvml.settings if nvml is not None else DriverSettings()
    reason = next((failure.error for failure in failures if failure.stage == "nvml"), "NVML was not asked")
    if nvml is not None:
        reason = nvml.driver.absent or reason
    values = {name: getattr(settings, name) for name in NVML_ALONE}
    unknown = {name: settings.unknown.get(name, reason) for name, value in values.items() if value is None}
    return replace(kernel, **values, unknown={**kernel.unknown, **unknown})


def _gpus(kernel: SysfsFacts, nvml: NvmlFacts | None) -> list[GpuFacts]:
    """NVML's GPUs with what the kernel knows of them, then those that the driver should have and does not list."""
    if nvml is None or nvml.driver.absent is not None:
        return list(kernel.gpus)
    on_bus = {gpu.bus_id: gpu for gpu in kernel.gpus}
    listed = {gpu.bus_id for gpu in nvml.gpus if gpu.bus_id is not None}
    unlisted = [gpu for gpu in kernel.gpus if gpu.bus_id not in listed]
    nameless = [gpu for gpu in nvml.gpus if gpu.bus_id is None]
    names: dict[int, str | None] = {}
    if nameless and len(nameless) == len(unlisted):
        # NVML counts GPUs in the order of their bus ids, also those that it lost before it could name them.
        names.update((gpu.index, other.bus_id) for gpu, other in zip(nameless, unlisted, strict=True))
        unlisted = []
    gpus = [_with_place(replace(gpu, bus_id=gpu.bus_id or names.get(gpu.index)), on_bus) for gpu in nvml.gpus]
    following = max((gpu.index for gpu in gpus), default=-1) + 1
    lost = [gpu for gpu in unlisted if not _belongs_to_others(gpu, kernel, listed=len(nvml.gpus))]
    return [*gpus, *(replace(gpu, index=following + i, lost=UNLISTED) for i, gpu in enumerate(lost))]


def _belongs_to_others(gpu: GpuFacts, kernel: SysfsFacts, *, listed: int) -> bool:
    """True where a GPU that the driver does not list belongs to another virtual machine or container, and is not lost.

    A virtual machine's has another driver. A container sees every GPU on the bus but has device files for its own only,
    whereas a GPU that was lost has left its device file behind.
    """
    driver = kernel.gpu_drivers.get(gpu.bus_id or "")
    return driver is not None and (driver != _NVIDIA_DRIVER or 0 < kernel.device_files <= listed)


def _with_place(gpu: GpuFacts, on_bus: dict[str | None, GpuFacts]) -> GpuFacts:
    other = on_bus.get(gpu.bus_id)
    if gpu.bus_id is None or other is None:
        return gpu
    links = asdict(gpu.pcie), asdict(other.pcie)
    pcie = PcieLink(**{name: value or links[1][name] for name, value in links[0].items()})
    return replace(gpu, name=gpu.name or other.name, uuid=gpu.uuid or other.uuid, place=other.place, pcie=pcie)


def _with_cuda(gpu: GpuFacts, cuda: CudaFacts | None, unseen: str) -> GpuFacts:
    found = _in_cuda(gpu, cuda)
    if found is None:
        return replace(gpu, unknown={**gpu.unknown, "cuda_index": unseen}) if unseen and not gpu.lost else gpu
    gpu = replace(gpu, cuda_index=found.index, cuda_features=found.features)
    if gpu.mig:
        return replace(gpu, unknown={**gpu.unknown, "multiprocessors": "under MIG CUDA counts those of an instance"})
    return replace(gpu, multiprocessors=found.multiprocessors)


def _why_unseen(gpus: int, cuda: CudaFacts | None) -> str:
    """Why CUDA shows fewer GPUs than the driver's `gpus`; '' where nothing asked for it.

    Of the MIG instances that a setting names CUDA shows one.
    """
    if cuda is None or cuda.visible_devices is None:
        return ""
    named = visible_count(gpus, cuda.visible_devices)
    if len(cuda.gpus) >= named or (cuda.gpus and "MIG-" in cuda.visible_devices):
        return HIDDEN
    return f"CUDA lists {len(cuda.gpus)} of the {counted(named, 'GPU')} that CUDA_VISIBLE_DEVICES names"


def _in_cuda(gpu: GpuFacts, cuda: CudaFacts | None) -> CudaGpu | None:
    """CUDA's view of a GPU: the first where it is split into MIG instances, which share a bus id."""
    if cuda is None or gpu.bus_id is None:
        return None
    return next((each for each in cuda.gpus if each.bus_id == gpu.bus_id), None)


def _pairs(
    gpus: Sequence[GpuFacts],
    nvml: NvmlFacts | None,
    cuda: CudaFacts | None,
    failures: Sequence[ProbeFailure],
    unseen: str,
) -> Iterator[PairFacts]:
    """Every ordered pair of GPUs of which NVML or CUDA knows something."""
    by_names = {(pair.source, pair.destination): pair for pair in nvml.pairs} if nvml is not None else {}
    for source, destination in permutations(gpus, 2):
        names = source.device, destination.device
        access = None
        if cuda is not None and source.bus_id is not None and destination.bus_id is not None:
            access = cuda.peers.get(source.bus_id, {}).get(destination.bus_id)
        if access is None and names not in by_names:
            continue
        pair = by_names.get(names, PairFacts(source=names[0], destination=names[1]))
        if access is None:
            shown = _in_cuda(source, cuda) is not None and _in_cuda(destination, cuda) is not None
            reason = "" if shown else unseen
            if cuda is not None and cuda.absent is None and (source.mig or destination.mig):
                reason = reason or "under MIG CUDA shows one instance"
            reason = reason or _why_not_in_cuda(cuda, failures)
            yield replace(pair, unknown={**pair.unknown, "cuda": reason})
        else:
            yield replace(pair, cuda=access)


def _why_not_in_cuda(cuda: CudaFacts | None, failures: Sequence[ProbeFailure]) -> str:
    if cuda is None:
        return next((failure.error for failure in failures if failure.stage == "cuda"), "CUDA was not asked")
    return cuda.absent or "CUDA does not list it"


def _cuda_failure(gpus: Sequence[GpuFacts], nvml: NvmlFacts | None, cuda: CudaFacts | None) -> tuple[ProbeFailure, ...]:
    """No CUDA is a failure where the driver has GPUs, unless CUDA_VISIBLE_DEVICES asked for it."""
    if cuda is None or cuda.absent is None or _why_unseen(len(gpus), cuda) == HIDDEN:
        return ()
    if nvml is None or nvml.driver.absent is not None or not gpus:
        return ()
    return (ProbeFailure(stage="cuda", error=cuda.absent),)
