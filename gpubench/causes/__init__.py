"""Why transfers go through host memory or are slow: the catalogue. A new family is one file and one line here.

`CAUSES` are in the order in which to look at them where they are equally sure: what the machine cannot do comes before
what somebody set, since a setting is often somebody's answer to it.
"""

from gpubench.causes.cause import Cause, Family
from gpubench.causes.container import CONTAINER
from gpubench.causes.disputed_access import DISPUTED_ACCESS
from gpubench.causes.gpudirect import GPUDIRECT
from gpubench.causes.machine import MACHINE
from gpubench.causes.mnnvl import MNNVL
from gpubench.causes.mpi import MPI
from gpubench.causes.nccl_settings import NCCL_SETTINGS
from gpubench.causes.network import NETWORK
from gpubench.causes.nvlink import NVLINK
from gpubench.causes.pcie import PCIE
from gpubench.causes.peer_access import PEER_ACCESS
from gpubench.causes.programs import PROGRAMS
from gpubench.causes.rdma_ports import RDMA_PORTS
from gpubench.causes.together import TOGETHER

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
