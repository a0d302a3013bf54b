"""The machine around the GPUs and the kernel's side of the driver, from /proc and /sys."""

import re
from pathlib import Path

from gpubench.hardware.system_files import exists, names_in, text_of
from gpubench.model.facts.snapshot import DriverFacts, GpuDirectFacts, HostFacts, NumaNode

_DRIVER_VERSION = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", re.ASCII)
_NUMA_NODE = re.compile(r"node(\d+)", re.ASCII)
_PEERMEM = (
    "sys/kernel/mm/memory_peers/nv_mem/version",
    "sys/kernel/mm/memory_peers/nv_mem_nc/version",
    "sys/module/nvidia_peermem/version",
)
"""The files by which NCCL decides whether a NIC can reach GPU memory through nvidia-peermem."""

_EFA_PEERMEM = "sys/module/efa_nv_peermem"


def read_machine(root: Path) -> HostFacts:
    """Processors, memory nodes, kernel and firmware names."""
    text = text_of(root / "proc/cpuinfo") or ""
    models = _values_of_processors("model name", text)
    sockets = set(_values_of_processors("physical id", text))
    names = [text_of(root / "sys/class/dmi/id" / name) for name in ("sys_vendor", "product_name")]
    return HostFacts(
        kernel=text_of(root / "proc/sys/kernel/osrelease"),
        cpu=models[0] if models else None,
        cpus=len(_values_of_processors("processor", text)) or None,
        sockets=len(sockets) or None,
        numa_nodes=_numa_nodes(root / "sys/devices/system/node"),
        virtual_machine=_virtual_machine(root, _values_of_processors("flags", text)),
        product=" ".join(filter(None, names)) or None,
        boot_id=text_of(root / "proc/sys/kernel/random/boot_id"),
    )


def read_kernel_driver(root: Path) -> DriverFacts:
    """The version of the loaded kernel module, which also a driver that no longer answers has written there."""
    text = text_of(root / "proc/driver/nvidia/version")
    if text is None:
        return DriverFacts()
    version = _DRIVER_VERSION.search(text)
    return DriverFacts(version=version[1] if version else None, open_kernel_module="Open Kernel Module" in text)


def read_gpudirect(root: Path) -> GpuDirectFacts:
    """The modules nvidia-peermem and efa_nv_peermem; dma-buf is a fact of CUDA's."""
    absent = False if exists(root / "sys/module") else None
    return GpuDirectFacts(
        peermem=True if any(exists(root / path) for path in _PEERMEM) else absent,
        peermem_registered=_registered(root),
        efa_peermem=True if exists(root / _EFA_PEERMEM) else absent,
    )


def _registered(root: Path) -> bool | None:
    """True where nvidia-peermem holds the RDMA core, whose function it needs; None where either is not loaded.

    The kernel keeps in `holders` who uses a module's functions. Not seen on hardware with InfiniBand.
    """
    if not exists(root / "sys/module/nvidia_peermem") or not exists(root / "sys/module/ib_core/holders"):
        return None
    users = {*names_in(root / "sys/module/ib_core/holders"), *names_in(root / "sys/module/ib_uverbs/holders")}
    return "nvidia_peermem" in users


def _values_of_processors(field: str, text: str) -> list[str]:
    """The values of one name in /proc/cpuinfo, one a processor; names differ between architectures.

    Only what is asked for is taken out of it: the page of four thousand processors has six megabytes.
    """
    return re.findall(rf"^{field}[ \t]*:[ \t]*(.*?)[ \t]*$", text, re.MULTILINE)


def _numa_nodes(folder: Path) -> tuple[NumaNode, ...]:
    numbers = sorted(int(match[1]) for name in names_in(folder) if (match := _NUMA_NODE.fullmatch(name)))
    return tuple(NumaNode(number=each, cpus=text_of(folder / f"node{each}/cpulist") or "") for each in numbers)


def _virtual_machine(root: Path, flags: list[str]) -> bool | None:
    """True where a hypervisor shows itself, None where nothing is known: only x86 has a flag for it."""
    if text_of(root / "sys/hypervisor/type"):
        return True
    return "hypervisor" in flags[0].split() if flags else None
