"""Every condition: a new family is one module and one line here.

They are in the order in which to look at them where they are equally sure: what the machine cannot do comes before what
somebody set, since a setting is often somebody's answer to it.
"""

from gpubench.conditions.container import CONTAINER
from gpubench.conditions.contention import CONTENTION
from gpubench.conditions.cores import CORES
from gpubench.conditions.definition.condition import Condition, Family
from gpubench.conditions.disputed_access import DISPUTED_ACCESS
from gpubench.conditions.driver import DRIVER
from gpubench.conditions.failures.hardware_errors import HARDWARE_ERRORS
from gpubench.conditions.failures.nccl_diagnostics import NCCL_DIAGNOSTICS
from gpubench.conditions.failures.nccl_start import NCCL_START
from gpubench.conditions.failures.nccl_transfers import NCCL_TRANSFERS
from gpubench.conditions.gpu import GPU
from gpubench.conditions.gpudirect import GPUDIRECT
from gpubench.conditions.measured import MEASURED
from gpubench.conditions.mnnvl import MNNVL
from gpubench.conditions.mpi import MPI
from gpubench.conditions.nccl_settings import NCCL_SETTINGS
from gpubench.conditions.nccl_tuning import NCCL_TUNING
from gpubench.conditions.network import NETWORK
from gpubench.conditions.node import NODE
from gpubench.conditions.nvlink import NVLINK
from gpubench.conditions.pcie import PCIE
from gpubench.conditions.peer_access import PEER_ACCESS
from gpubench.conditions.process import PROCESS
from gpubench.conditions.profile import PROFILE
from gpubench.conditions.rdma_ports import RDMA_PORTS
from gpubench.conditions.redirection import REDIRECTION

FAMILIES: tuple[Family, ...] = (
    DRIVER,
    NODE,
    GPU,
    CONTENTION,
    PROFILE,
    PEER_ACCESS,
    NVLINK,
    DISPUTED_ACCESS,
    NCCL_SETTINGS,
    NCCL_TUNING,
    PROCESS,
    CORES,
    CONTAINER,
    MNNVL,
    NETWORK,
    RDMA_PORTS,
    GPUDIRECT,
    REDIRECTION,
    PCIE,
    MPI,
    MEASURED,
    NCCL_DIAGNOSTICS,
    HARDWARE_ERRORS,
    NCCL_TRANSFERS,
    NCCL_START,
)

CONDITIONS: tuple[Condition, ...] = tuple(condition for family in FAMILIES for condition in family.conditions)

CAUSES: tuple[Condition, ...] = tuple(condition for condition in CONDITIONS if condition.effects)
"""Those that explain what paths do."""

FALLBACK_EXPECTED = "fallback-expected"


def ids_now(old: str) -> tuple[str, ...]:
    """The ids that a finding of an earlier version may have now: what stood in the way of paths had one for all."""
    return tuple(
        each.id
        for each in CONDITIONS
        if old in each.aliases or (old == FALLBACK_EXPECTED and each.effects and not each.check)
    )
