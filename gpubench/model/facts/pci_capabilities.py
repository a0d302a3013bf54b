"""Access control (ACS) and counted errors (AER) of a PCI device."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

ACCESS_CONTROLS = (
    "source_validation",
    "translation_blocking",
    "request_redirect",
    "completion_redirect",
    "upstream_forwarding",
    "egress_control",
    "direct_translated",
)
"""The bits of ACS' capability and control registers, from bit 0 on (PCI_ACS_* in Linux' pci_regs.h)."""


class PciKind(StrEnum):
    """The kind of a device between a GPU or NIC and the CPU. Ports differ by their place in the tree.

    UNKNOWN is one that somebody lists without its class.
    """

    GPU = "gpu"
    NIC = "nic"
    ROOT_PORT = "root_port"
    UPSTREAM_PORT = "upstream_port"
    DOWNSTREAM_PORT = "downstream_port"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessControl:
    """Access control of a port: which of `ACCESS_CONTROLS` it can do, and which are on; none where it has no ACS.

    Where requests or completions are redirected, or forwarded upstream, traffic between two devices below the same
    switch goes up to the root and back.
    """

    capable: tuple[str, ...] = ()
    enabled: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieErrors:
    """Errors that a device has counted since it was found, in all, and by name those that are not zero.

    Names begin with their severity: 'correctable.BadTLP', 'fatal.ACSViol'. None is a total that could not be read. Not
    seen on hardware.
    """

    correctable: int | None = None
    nonfatal: int | None = None
    fatal: int | None = None
    named: Mapping[str, int] = field(default_factory=dict)
