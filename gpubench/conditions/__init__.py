"""Why transfers go through host memory or are slow: the catalogue. A new family is one file and one line here.

`CAUSES` are in the order in which to look at them where they are equally sure: what the machine cannot do comes before
what somebody set, since a setting is often somebody's answer to it.
"""

from gpubench.conditions.cause import Cause, Family
from gpubench.conditions.container import CONTAINER
from gpubench.conditions.disputed_access import DISPUTED_ACCESS
from gpubench.conditions.gpudirect import GPUDIRECT
from gpubench.conditions.machine import MACHINE
from gpubench.conditions.mnnvl import MNNVL
from gpubench.conditions.mpi import MPI
from gpubench.conditions.nccl_settings import NCCL_SETTINGS
from gpubench.conditions.network import NETWORK
from gpubench.conditions.nvlink import NVLINK
from gpubench.conditions.pcie import PCIE
from gpubench.conditions.peer_access import PEER_ACCESS
from gpubench.conditions.programs import PROGRAMS
from gpubench.conditions.rdma_ports import RDMA_PORTS
from gpubench.conditions.together import TOGETHER

__all__ = ["CAUSES", "FAMILIES", "Cause", "Family"]

FAMILIES: tuple[Family, ...] = (
    MACHINE,
    PEER_ACCESS,
    NVLINK,
    DISPUTED_ACCESS,
    NCCL_SETTINGS,
    CONTAINER,
    MNNVL,
    NETWORK,
    RDMA_PORTS,
    GPUDIRECT,
    PCIE,
    TOGETHER,
    MPI,
    PROGRAMS,
)

CAUSES: tuple[Cause, ...] = tuple(cause for family in FAMILIES for cause in family.causes)
