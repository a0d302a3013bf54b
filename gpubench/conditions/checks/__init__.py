"""What is looked for in the facts of machines, and in what was measured. A new check is one file and one line here."""

from gpubench.conditions.checks.check import Check, Facts, merged, run
from gpubench.conditions.checks.clocks import CLOCKS
from gpubench.conditions.checks.collective_bandwidth import COLLECTIVE_BANDWIDTH
from gpubench.conditions.checks.data_correct import DATA_CORRECT
from gpubench.conditions.checks.driver import DRIVER
from gpubench.conditions.checks.ecc import ECC
from gpubench.conditions.checks.fabric import FABRIC
from gpubench.conditions.checks.gpu_free import GPU_FREE
from gpubench.conditions.checks.gpu_model import GPU_MODEL
from gpubench.conditions.checks.gpu_present import GPU_PRESENT
from gpubench.conditions.checks.gpudirect import GPUDIRECT
from gpubench.conditions.checks.host_bandwidth import HOST_BANDWIDTH
from gpubench.conditions.checks.host_memory import HOST_MEMORY
from gpubench.conditions.checks.measured import MEASURED
from gpubench.conditions.checks.memory_rows import MEMORY_ROWS
from gpubench.conditions.checks.mig import MIG
from gpubench.conditions.checks.nic_errors import NIC_ERRORS
from gpubench.conditions.checks.nic_profile import NIC_PROFILE
from gpubench.conditions.checks.nic_state import NIC_STATE
from gpubench.conditions.checks.nodes_alike import NODES_ALIKE
from gpubench.conditions.checks.nvlink_active import NVLINK_ACTIVE
from gpubench.conditions.checks.nvlink_errors import NVLINK_ERRORS
from gpubench.conditions.checks.p2p_bandwidth import P2P_BANDWIDTH
from gpubench.conditions.checks.p2p_symmetry import P2P_SYMMETRY
from gpubench.conditions.checks.paths import PATHS
from gpubench.conditions.checks.pcie_errors import PCIE_ERRORS
from gpubench.conditions.checks.pcie_link import PCIE_LINK
from gpubench.conditions.checks.peer_access import PEER_ACCESS
from gpubench.conditions.checks.profile import PROFILE
from gpubench.conditions.checks.ranks_alike import RANKS_ALIKE
from gpubench.conditions.checks.redirection import REDIRECTION
from gpubench.conditions.checks.stragglers import STRAGGLERS
from gpubench.conditions.checks.temperature import TEMPERATURE
from gpubench.conditions.checks.throttle import THROTTLE
from gpubench.conditions.checks.versions import VERSIONS

__all__ = ["CHECKS", "WIRING", "Check", "Facts", "merged", "run"]

WIRING: tuple[Check, ...] = (
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
"""What `gpubench topo` says beside the wiring it shows."""

CHECKS: tuple[Check, ...] = (
    *WIRING,
    GPU_MODEL,
    MIG,
    ECC,
    CLOCKS,
    TEMPERATURE,
    GPU_FREE,
    PCIE_ERRORS,
    NIC_ERRORS,
    NIC_PROFILE,
    REDIRECTION,
    VERSIONS,
    PATHS,
    P2P_BANDWIDTH,
    P2P_SYMMETRY,
    HOST_BANDWIDTH,
    HOST_MEMORY,
    COLLECTIVE_BANDWIDTH,
    DATA_CORRECT,
    STRAGGLERS,
    MEASURED,
)
"""What `gpubench check` looks for."""
