"""The file from which NCCL takes a machine's topology, before it looks at the machine itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyFile:
    """Such a file: `by` says who names it (NCCL_TOPO_FILE, or NCCL's default).

    `links` are the PCI devices in it with their links as they are written ('32.0 GT/s PCIe x16'), by bus id: a file of
    another machine names devices that are not there. `numa_nodes` are its memory nodes, -1 for none. `unusable` says
    why it could not be read, which NCCL itself only logs.
    """

    path: str
    by: str
    links: Mapping[str, str] = field(default_factory=dict)
    numa_nodes: tuple[int, ...] = ()
    unusable: str | None = None
