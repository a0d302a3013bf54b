"""Ranks that share a GPU, and hosts as NCCL counts them."""

import pytest

from gpubench.model.terms.ranks import (
    HOSTS_ARE_SPLIT,
    RANKS_SHARE_A_GPU,
    RankIdentity,
    count_nccl_hosts,
    ranks_per_gpu,
    why_not_judged,
)


def rank(number: int, gpu: str | None, node: int = 0, nccl_host: str | None = None) -> RankIdentity:
    return RankIdentity(
        rank=number, host=f"n{node}", node=node, local_rank=0, pid=1, gpu="H100", gpu_uuid=gpu, nccl_host=nccl_host
    )


@pytest.mark.parametrize(
    ("ranks", "per_gpu", "hosts", "why"),
    [
        ([rank(0, None), rank(1, None)], None, 1, ""),
        ([rank(0, "GPU-a"), rank(1, "GPU-b")], 1, 1, ""),
        ([rank(0, "GPU-a"), rank(1, "GPU-a")], 2, 1, RANKS_SHARE_A_GPU),
        ([rank(0, "GPU-a"), rank(1, "GPU-b"), rank(2, "GPU-a")], 2, 1, RANKS_SHARE_A_GPU),
        # The same instance number on two hosts is no shared GPU, and two MIG instances are two devices.
        ([rank(0, "GPU-a"), rank(1, "GPU-a", node=1)], 1, 2, ""),
        ([rank(0, "MIG-a"), rank(1, "MIG-b")], 1, 1, ""),
        ([rank(0, "GPU-a", nccl_host="x"), rank(1, "GPU-b", nccl_host="y")], 1, 2, HOSTS_ARE_SPLIT),
        ([rank(0, "GPU-a", nccl_host="x"), rank(1, "GPU-b", nccl_host="x")], 1, 1, ""),
        ([rank(0, "GPU-a", nccl_host="x"), rank(1, "GPU-b")], 1, 2, HOSTS_ARE_SPLIT),
        ([rank(0, "GPU-a", nccl_host="x"), rank(1, "GPU-a", nccl_host="y")], 2, 2, RANKS_SHARE_A_GPU),
        # One name on two hosts makes one host of them for NCCL: getHostHash takes the name alone.
        ([rank(0, "GPU-a", nccl_host="x"), rank(1, "GPU-b", node=1, nccl_host="x")], 1, 1, ""),
        # MPI on CPU buffers does not read NCCL's variables.
        ([rank(0, None, nccl_host="x"), rank(1, None, nccl_host="y")], None, 1, ""),
    ],
)
def test_ranks_are_counted_by_gpu_and_by_ncclss_host(
    ranks: list[RankIdentity], per_gpu: int | None, hosts: int, why: str
) -> None:
    assert (ranks_per_gpu(ranks), count_nccl_hosts(ranks), why_not_judged(ranks)) == (per_gpu, hosts, why)
