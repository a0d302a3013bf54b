"""The kernel's settings, from files that everyone may read: IOMMU, boot options, IMEX channels.

IMEX channels were not seen on hardware: /proc/devices is read as the driver's documentation has it.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from gpubench.hardware.system_files import UnknownFields, exists, names_in, printable
from gpubench.model.facts.kernel_settings import IommuFacts, KernelSettings
from gpubench.model.facts.snapshot import PciDevice

_OPTIONS = (
    *("iommu=", "iommu.", "intel_iommu=", "amd_iommu=", "arm-smmu", "pcie_acs_override=", "pcie_aspm=", "pcie_ports="),
    *("pcie_port_pm=", "swiotlb=", "numa=", "numa_balancing=", "mem_encrypt=", "nvidia.", "nvidia_peermem."),
)
_PCI_OPTIONS = (
    *("disable_acs_redir", "config_acs", "noaer", "nommconf", "realloc", "noats", "pcie_bus_", "resource_alignment"),
    *("nocrs", "assign-busses", "big_root_window"),
)
"""Of pci=, which holds several, with commas between them (the kernel's Documentation/admin-guide/kernel-parameters)."""

_IMEX = "nvidia-caps-imex-channels"
_RELEASE = re.compile(r"Linux version (\S+)", re.ASCII)
_MICROSOFT = re.compile(r"microsoft", re.IGNORECASE)


def read_kernel_settings(root: Path, devices: Iterable[PciDevice]) -> KernelSettings:
    """The settings below `root`, with the types of the IOMMU groups of these devices."""
    unknown = UnknownFields()
    return KernelSettings(
        options=_options(unknown.text("options", root / "proc/cmdline")),
        wsl=_wsl(root, unknown),
        imex=_imex(unknown.text("imex", root / "proc/devices")),
        iommu=_iommu(root, {each.iommu_group for each in devices if each.iommu_group is not None}),
        unknown=unknown.reasons,
    )


def _options(line: str | None) -> tuple[str, ...] | None:
    """The words that count, each cut to a length that can be shown; a line can hold secrets in others."""
    if line is None:
        return None
    found = []
    for word in line.split():
        if word.startswith("pci="):
            inner = [each for each in word.removeprefix("pci=").split(",") if each.startswith(_PCI_OPTIONS)]
            found += [f"pci={','.join(inner)}"] if inner else []
        elif word.startswith(_OPTIONS):
            found.append(word)
    return tuple(map(printable, found))


def _wsl(root: Path, unknown: UnknownFields) -> bool | None:
    """Windows' Linux names Microsoft in its release, and has the device through which it reaches the GPU."""
    if exists(root / "dev/dxg"):
        return True
    release = _RELEASE.match(unknown.text("wsl", root / "proc/version") or "")
    if release is None:
        unknown.reasons.setdefault("wsl", "version names no release")
        return None
    return _MICROSOFT.search(release[1]) is not None


def _imex(devices: str | None) -> bool | None:
    return None if devices is None else any(line.split()[1:] == [_IMEX] for line in devices.splitlines())


def _iommu(root: Path, groups: Iterable[int]) -> IommuFacts:
    unknown = UnknownFields()
    folder = root / "sys/class/iommu"
    units = tuple(map(printable, names_in(folder))) if exists(folder) else None
    if units is None:
        unknown.reasons["units"] = "sys/class/iommu is not there"
    types = {}
    for group in sorted(groups):
        kind = unknown.text("group_types", root / f"sys/kernel/iommu_groups/{group}/type")
        if kind is not None:
            types[str(group)] = printable(kind)
    return IommuFacts(units=units, group_types=types, unknown=unknown.reasons)
