"""Ranks that need longer than the others for the same collective."""

from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.results.measurements import Need
from gpubench.model.terms.units import format_size
from gpubench.model.terms.verdict import STRAGGLER, Finding, Verdict

LATE_SHARE = 1.2
"""Ranks of a collective wait for each other: on H200 the slowest takes 1 % longer than the fastest."""

_JUDGED_FROM_BYTES = 16 * 2**20


def find(facts: Facts) -> Iterator[Finding]:
    """A warning for the slowest rank, where it took a fifth longer than the fastest."""
    ranks = {each.rank: str(each) for each in facts.measurements.ranks}
    for row in facts.measurements.collectives:
        slowest, fastest, rank = row.time_us_slowest_rank, row.time_us_fastest_rank, row.slowest_rank
        if slowest is None or not fastest or rank is None:
            continue
        late = slowest / fastest
        if row.size_bytes >= _JUDGED_FROM_BYTES and late > LATE_SHARE:
            yield Finding(
                id=STRAGGLER,
                severity=Verdict.WARN,
                subject=ranks.get(rank, f"rank {rank}"),
                seen=f"{late:.2f} times as long as the fastest rank, {row.collective} of {format_size(row.size_bytes)}",
                expected=f"at most {LATE_SHARE:g} times",
                cause="its process is held up: CPUs shared with others, clocks held down, a busy GPU",
                next_command="top and nvidia-smi on that host; mpirun --bind-to numa",
            )


STRAGGLERS = Check("stragglers", "no rank takes longer than the others", find, Need.ALL_REDUCE, without_gpus=True)
