"""What is looked for in the facts of machines. A new check is one file and one line here."""

from gpubench.checks.check import Check, Facts, run
from gpubench.checks.driver import DRIVER
from gpubench.checks.fabric import FABRIC
from gpubench.checks.gpu_present import GPU_PRESENT
from gpubench.checks.gpudirect import GPUDIRECT
from gpubench.checks.memory_rows import MEMORY_ROWS
from gpubench.checks.nic_state import NIC_STATE
from gpubench.checks.nodes_alike import NODES_ALIKE
from gpubench.checks.nvlink_active import NVLINK_ACTIVE
from gpubench.checks.nvlink_errors import NVLINK_ERRORS
from gpubench.checks.pcie_link import PCIE_LINK
from gpubench.checks.peer_access import PEER_ACCESS
from gpubench.checks.profile import PROFILE
from gpubench.checks.ranks_alike import RANKS_ALIKE
from gpubench.checks.throttle import THROTTLE

__all__ = ["CHECKS", "Check", "Facts", "run"]

CHECKS: tuple[Check, ...] = (
    DRIVER,
    GPU_PRESENT,
    NVLINK_ACTIVE,
    NVLINK_ERRORS,
    FABRIC,
    PEER_ACCESS,
    PCIE_LINK,
    PROFILE,
    MEMORY_ROWS,
    THROTTLE,
    NIC_STATE,
    GPUDIRECT,
    NODES_ALIKE,
    RANKS_ALIKE,
)
