"""The backend of a collective on one rank, opened together with what observes it."""

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from gpubench.hardware.node.nvml.library import Driver, read_driver
from gpubench.hardware.registry import backend_named, default_backend
from gpubench.jobs.agreement import agree
from gpubench.jobs.collective.opened import Opened, Rank, open_kind, read_machines
from gpubench.jobs.collective.plan import CollectivePlan

if TYPE_CHECKING:
    from gpubench.hardware.node.nvml.gpu_use import NvmlUse


def open_backend(rank: Rank, plan: CollectivePlan, stack: ExitStack) -> Opened:
    """The backend asked for, else nccl where any rank sees a GPU, so that a node without one is not passed over.

    What is begun beside it ends with `stack`. Raises AgreedError where a rank cannot.
    """
    driver = read_driver(os.environ)
    # Before any rank has a context: the gather below makes sure of that.
    use = _use_of_gpus(driver, stack)
    sees_gpus = any(rank.group.gather(driver.visible > 0))
    asked = plan.backend
    kind = default_backend(gpus=sees_gpus) if asked is None else agree(rank.group, lambda: backend_named(asked))
    if kind.needs_gpus:
        from gpubench.jobs.collective.opening_gpu import open_on_gpu

        return open_on_gpu(kind, rank, plan, driver, use, stack)
    agree(rank.group, lambda: plan.refuse_gpu_options("no rank sees one"))
    machines = read_machines(rank, plan)
    return Opened(backend=open_kind(kind, rank, plan), identity=rank.identity, machines=lambda: machines)


def _use_of_gpus(driver: Driver, stack: ExitStack) -> "NvmlUse | None":
    """Who uses the GPUs of this host already, until `stack` ends; None where the driver lists none."""
    if not driver.gpus:
        return None
    from gpubench.hardware.node.nvml.gpu_use import NvmlUse

    use = NvmlUse()
    stack.callback(use.close)
    return use
