"""Settings of a node's kernel that decide the path of a transfer: IOMMU and boot options."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class IommuFacts:
    """The IOMMU as the kernel uses it. None is unknown, and `unknown` says why, by field.

    `units` are the hardware's (`dmar0`, `ivhd0`, `smmu3.0x...`), empty where the kernel uses none. `group_types` are
    those of the groups that hold a GPU, a NIC or a bridge above one, by the group's number: DMA and DMA-FQ translate,
    identity passes through.
    """

    units: tuple[str, ...] | None = None
    group_types: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSettings:
    """The kernel of a node. None is unknown, and `unknown` says why, by field.

    `options` are the words of the boot command line that bear on PCI, IOMMU, memory nodes and the NVIDIA driver, never
    the whole line. `wsl` is Windows' Linux. `imex` says whether the driver offers IMEX channels, which memory shared
    between nodes needs.
    """

    options: tuple[str, ...] | None = None
    wsl: bool | None = None
    imex: bool | None = None
    iommu: IommuFacts = field(default_factory=IommuFacts)
    unknown: Mapping[str, str] = field(default_factory=dict)
