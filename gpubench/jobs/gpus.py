"""The GPU of every rank: opened, alone or shared, and NCCL asked whether it lets ranks share one."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gpubench.errors import (
    FIRST_NCCL_FOR_SHARED_GPUS,
    SHARED_GPU_VARIABLE,
    UsageError,
    different_nccl,
    nccl_refuses_shared_gpu,
    no_gpu,
    no_gpu_of_its_own,
    shared_gpu,
    shared_gpu_is_not_enabled,
    shared_gpu_without_percentage,
)
from gpubench.hardware.cuda import device as cuda
from gpubench.hardware.node.nvml.library import Driver, read_driver
from gpubench.hardware.process.mps import sm_percent
from gpubench.hardware.process.nccl_settings import nccl_settings
from gpubench.jobs.agreement import agree
from gpubench.model.terms.rank_identity import RankIdentity, by_device
from gpubench.model.terms.units import spans
from gpubench.ports.group import Group

_WHOLE_PERCENT = 100


def open_gpu(
    group: Group, identity: RankIdentity, ranks_on_node: int, driver: Driver, *, shared: bool = False
) -> tuple[cuda.CudaDevice, RankIdentity]:
    """The GPU for this rank, and the rank with it; `shared` where several ranks may have the same.

    Raises AgreedError: a rank gets no GPU, or two the same that may not share it.
    """
    device = agree(
        group,
        lambda: cuda.open_device(identity.local_rank, ranks_on_node, identity.host, driver, shared=shared),
        place=str(identity),
    )
    driving = identify(identity, device.identity)
    all_driving = group.gather(driving)
    if not shared:
        agree(group, lambda: check_one_rank_a_gpu(all_driving, driver.gpus))
    device.sharing = sum(each.device == driving.device for each in all_driving)
    return device, driving


def identify(identity: RankIdentity, gpu: cuda.GpuIdentity) -> RankIdentity:
    """A rank with the GPU it drives."""
    return replace(
        identity,
        gpu=gpu.name,
        gpu_index=gpu.index,
        gpu_bus_id=gpu.bus_id,
        gpu_uuid=gpu.uuid,
        sm_percent=sm_percent(os.environ) if gpu.mps else None,
    )


def check_one_rank_a_gpu(identities: Sequence[RankIdentity], gpus_on_host: int) -> None:
    """Raise UsageError where two ranks drive the same GPU, or a host has more ranks than GPUs."""
    for first, *others in by_device(identities):
        if not others:
            continue
        ranks = sum(each.node == first.node for each in identities)
        if ranks > gpus_on_host:
            raise no_gpu_of_its_own(ranks, gpus_on_host, first.host)
        raise _same_gpu(first, others[0])


class NcclVersion(Protocol):
    """A loaded NCCL: its version in words and as a number, and its file."""

    @property
    def version(self) -> str:
        """'2.28.9'."""

    @property
    def version_code(self) -> int:
        """22809."""

    @property
    def path(self) -> str:
        """The file it was loaded from."""


@dataclass(frozen=True, slots=True)
class RankNccl:
    """A rank and the NCCL that it loaded: version, number and file, and whether ranks may share a GPU with it."""

    rank: RankIdentity
    version: str
    code: int
    path: str
    shares_gpus: bool


def check_nccl_of_ranks(
    group: Group, identity: RankIdentity, library: NcclVersion, driver: Driver, kernels_at_once: int = 1
) -> None:
    """Check that the ranks have one NCCL, and that it lets those share a GPU that do.

    `kernels_at_once` are those of a rank that have to fit on its GPU beside each other.

    Raises AgreedError: ranks have different versions, or share a GPU and this NCCL, its settings or MPS's do not let
    them.
    """
    enabled = nccl_settings(os.environ).get(SHARED_GPU_VARIABLE, "0") not in ("0", "")
    own = RankNccl(identity, library.version, library.version_code, library.path, enabled)
    ranks = group.gather(own)
    agree(group, lambda: check_versions(ranks))
    agree(group, lambda: check_shared_gpus(ranks, driver, kernels_at_once))


def check_versions(ranks: Sequence[RankNccl]) -> None:
    """Raise UsageError where ranks loaded NCCL libraries of different versions."""
    found: dict[str, list[int]] = {}
    for each in ranks:
        found.setdefault(f"{each.version} from {each.path}", []).append(each.rank.rank)
    if len({each.code for each in ranks}) > 1:
        raise different_nccl([f"rank {spans(numbers)} {text}" for text, numbers in found.items()])


def check_shared_gpus(ranks: Sequence[RankNccl], driver: Driver, kernels_at_once: int = 1) -> None:
    """Raise UsageError where ranks share a GPU and NCCL refuses them, or where their kernels may not fit on it.

    NCCL minds ranks that share a GPU inside what it takes for one host; all of them have to fit on it.
    """
    for sharing in by_device([each.rank for each in ranks]):
        total = sum(each.sm_percent or 0 for each in sharing)
        if len(sharing) > 1 and total > _WHOLE_PERCENT / kernels_at_once:
            raise shared_gpu_without_percentage(_who(sharing), total, len(sharing), kernels_at_once)
        theirs = [each for each in ranks if each.rank in sharing]
        for host in dict.fromkeys(each.nccl_host for each in sharing):
            alike = [each for each in theirs if each.rank.nccl_host == host]
            if len(alike) > 1:
                on_node = sum(each.rank.node == sharing[0].node for each in ranks)
                _check_sharing(alike, driver, is_needed=on_node > driver.gpus)


def _check_sharing(ranks: Sequence[RankNccl], driver: Driver, *, is_needed: bool) -> None:
    """Raise UsageError where NCCL refuses ranks of one host on one GPU; `is_needed` where the host has too few GPUs."""
    nccl, members = ranks[0], [each.rank for each in ranks]
    enabled = all(each.shares_gpus for each in ranks)
    if not enabled and not is_needed:
        first, second = members[:2]
        raise _same_gpu(first, second)
    if nccl.code < FIRST_NCCL_FOR_SHARED_GPUS:
        raise nccl_refuses_shared_gpu(_who(members), f"{nccl.version} from {nccl.path}", driver.cuda // 1000)
    if not enabled:
        raise shared_gpu_is_not_enabled(_who(members), len(members))


def _who(ranks: Sequence[RankIdentity]) -> str:
    """'rank 0-3 on node1 share GPU 0000:18:00.0'."""
    numbers = spans([each.rank for each in ranks])
    return f"rank {numbers} on {ranks[0].host} share GPU {ranks[0].gpu_bus_id}"


def _same_gpu(first: RankIdentity, second: RankIdentity) -> UsageError:
    return shared_gpu(f"rank {first.rank}", f"rank {second.rank} on {second.host}", str(second.gpu_bus_id))


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
