"""Bandwidth from size and time, as nccl-tests defines it (its doc/PERFORMANCE.md derives the factors)."""

from gpubench.model.terms.units import BYTES_PER_GB


def algbw_gb_s(size_bytes: int, seconds: float) -> float:
    """Algorithm bandwidth: the printed size over the time, in GB/s of 1e9 bytes."""
    return size_bytes / seconds / BYTES_PER_GB


def ring_allreduce_factor(ranks: int) -> float:
    """2(n−1)/n: every byte is reduced over n−1 links and spread over n−1 links, n at a time."""
    return 2 * (ranks - 1) / ranks


def all_but_own_factor(ranks: int) -> float:
    """(n−1)/n: the block a rank already holds crosses no link."""
    return (ranks - 1) / ranks


def whole_factor(_ranks: int) -> float:
    """1: every byte crosses the busiest link once."""
    return 1.0
