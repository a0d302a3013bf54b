"""The backend of a collective on one rank, opened together with what observes it."""

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from gpubench.hardware.node.nvml.library import Driver, read_driver
from gpubench.jobs.agreement import agree
from gpubench.jobs.collective.opened import Opened, Rank, open_kind, read_machines
from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.model.terms.hang import Phase

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
    kinds = agree(rank.group, lambda: plan.kinds(gpus=sees_gpus))
    if any(kind.takes_gpus(seen=sees_gpus) for kind in kinds):
        from gpubench.jobs.collective.opening_gpu import open_on_gpu

        return open_on_gpu(kinds, rank, plan, driver, use, stack)
    agree(rank.group, lambda: plan.refuse_gpu_options("no rank sees one"))
    machines = read_machines(rank, plan)
    rank.progress.enter(Phase.OPENING)
    agree(rank.group, lambda: [kind.load(0) for kind in kinds], place=str(rank.identity))
    backend = open_kind(kinds[0], rank, plan)
    return Opened(kind=kinds[0], backend=backend, identity=rank.identity, machines=lambda: machines)


def _use_of_gpus(driver: Driver, stack: ExitStack) -> "NvmlUse | None":
    """Who uses the GPUs of this host already, until `stack` ends; None where the driver lists none."""
    if not driver.gpus:
        return None
    from gpubench.hardware.node.nvml.gpu_use import NvmlUse

    use = NvmlUse()
    stack.callback(use.close)
    return use
