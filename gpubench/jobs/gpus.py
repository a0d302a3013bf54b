"""The GPU of every rank: opened, and no GPU by two of them."""

import os
from collections.abc import Sequence
from dataclasses import replace

from gpubench.errors import more_ranks_than_gpus, no_gpu, shared_gpu
from gpubench.hardware.cuda import device as cuda
from gpubench.hardware.node.nvml.library import Driver, read_driver
from gpubench.jobs.agreement import agree
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.ports.group import Group


def open_gpu(
    group: Group, identity: RankIdentity, ranks_on_node: int, driver: Driver
) -> tuple[cuda.CudaDevice, RankIdentity]:
    """The GPU for this rank, and the rank with it, once every rank has one of its own.

    Raises AgreedError: a rank gets no GPU, or two the same.
    """
    device = agree(
        group,
        lambda: cuda.open_device(identity.local_rank, ranks_on_node, identity.host, driver),
        place=str(identity),
    )
    driving = identify(identity, device.identity)
    agree(group, lambda: check_one_rank_a_gpu(group.gather(driving), driver.gpus))
    return device, driving


def identify(identity: RankIdentity, gpu: cuda.GpuIdentity) -> RankIdentity:
    """A rank with the GPU it drives."""
    return replace(identity, gpu=gpu.name, gpu_index=gpu.index, gpu_bus_id=gpu.bus_id, gpu_uuid=gpu.uuid)


def check_one_rank_a_gpu(identities: Sequence[RankIdentity], gpus_on_host: int) -> None:
    """Raise UsageError where two ranks drive the same GPU, or a host has more ranks than GPUs."""
    owners: dict[tuple[int, str | None], RankIdentity] = {}
    for identity in identities:
        owner = owners.setdefault((identity.node, identity.gpu_uuid), identity)
        if owner is identity:
            continue
        ranks = sum(each.node == identity.node for each in identities)
        if ranks > gpus_on_host:
            raise more_ranks_than_gpus(ranks, gpus_on_host, identity.host)
        raise shared_gpu(f"rank {owner.rank}", f"rank {identity.rank} on {identity.host}", str(identity.gpu_bus_id))


def usable_driver(for_what: str) -> Driver:
    """The driver of this host.

    Raises:
        CouldNotMeasureError: no GPU is visible, or what is needed to use one is not installed.
    """
    from gpubench.hardware.cuda.device import check_installed

    driver = read_driver(os.environ)
    if not driver.visible:
        raise no_gpu(driver.hidden_gpus() or driver.absent or "the driver finds none on this host", for_what=for_what)
    check_installed(driver)
    return driver
