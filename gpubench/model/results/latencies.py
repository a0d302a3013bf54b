"""What other programs say of a collective that leave out what a row of gpubench's own always has."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyRow:
    """The time of one size of a collective, as a program prints it that may say neither ranks nor bandwidth.

    `size_bytes` is nccl-tests' size; where it depends on ranks, and nothing says how many, that of one rank's block.
    `busbw_gb_s` is computed from size and time, null without ranks. `wrong` is 1 of a verification that failed, the
    least that it can be.
    """

    collective: str
    backend: str
    origin: str
    ranks: int | None
    size_bytes: int
    dtype: str
    op: str | None
    root: int | None
    placement: str
    mode: str
    iterations: int | None
    time_us: float
    time_us_fastest_rank: float | None
    time_us_slowest_rank: float | None
    busbw_gb_s: float | None
    wrong: int | None
    verified: str
    note: str | None
