"""All conditions, hardware before settings. If two causes are equally certain, the earlier one in this order is
reported first.
"""

from gpubench.conditions.condition import Condition, Family
from gpubench.conditions.failures import NCCL_START, NCCL_TRANSFERS
from gpubench.conditions.gpu import CONTENTION, GPU
from gpubench.conditions.gpudirect import GPUDIRECT
from gpubench.conditions.hangs import HANGS
from gpubench.conditions.hardware_errors import HARDWARE_ERRORS
from gpubench.conditions.kv import KV
from gpubench.conditions.measured import MEASURED, SWEEP
from gpubench.conditions.mnnvl import MNNVL
from gpubench.conditions.nccl_settings import NCCL_SETTINGS, NCCL_TUNING
from gpubench.conditions.network import NETWORK
from gpubench.conditions.node import DRIVER, NODE
from gpubench.conditions.nvlink import NVLINK
from gpubench.conditions.pcie import PCIE, REDIRECTION
from gpubench.conditions.peer_access import DISPUTED_ACCESS, PEER_ACCESS
from gpubench.conditions.process import CONTAINER, CORES, MPI, PROCESS
from gpubench.conditions.profile import PROFILE
from gpubench.conditions.rdma_ports import RDMA_PORTS

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
    KV,
    MPI,
    MEASURED,
    SWEEP,
    HARDWARE_ERRORS,
    HANGS,
    NCCL_TRANSFERS,
    NCCL_START,
)

CONDITIONS: tuple[Condition, ...] = tuple(condition for family in FAMILIES for condition in family.conditions)

CAUSES: tuple[Condition, ...] = tuple(condition for condition in CONDITIONS if condition.effects)
"""Conditions that have effects in the policy table, such as host-staged paths or slow operations."""

FALLBACK_EXPECTED = "fallback-expected"


def current_ids(old: str) -> tuple[str, ...]:
    """Return the current ids for an id from an earlier version.

    Earlier versions had a single id, fallback-expected, for all causes of host-staged paths.
    """
    return tuple(
        condition.id
        for condition in CONDITIONS
        if old in condition.aliases or (old == FALLBACK_EXPECTED and condition.effects and not condition.check)
    )
