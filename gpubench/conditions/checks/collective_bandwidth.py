"""Collectives that take longer than on healthy machines."""

from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts, join_subjects
from gpubench.model.profiles.expectation import judge_row
from gpubench.model.results.measurements import Need
from gpubench.model.terms.units import format_size
from gpubench.model.terms.verdict import Finding


def find(facts: Facts) -> Iterator[Finding]:
    """By size, busbw of large ones and time of small ones, against the profile of the first node, else the limit."""
    hosts = tuple(node.snapshot.host for node in facts.nodes)
    profile = facts.profiles[0] if facts.profiles else None
    for row in facts.measurements.collectives:
        judged = judge_row(profile, row)
        if judged is None:
            continue
        verdict, seen, expected = judged
        yield Finding(
            id="collective-slow",
            severity=verdict,
            subject=f"{row.collective} of {format_size(row.size_bytes)} on {row.ranks} ranks of {join_subjects(hosts)}",
            seen=f"{seen}; the last was rank {row.slowest_rank}",
            expected=expected,
            cause="one slow GPU or link slows all of them, or NCCL took another way than on healthy machines",
            next_command=f"gpubench p2p; NCCL_DEBUG=INFO gpubench {row.collective}, then gpubench explain",
            subjects=hosts,
        )


COLLECTIVE_BANDWIDTH = Check(
    "collective_bandwidth", "all-reduce takes as long as on healthy machines", find, Need.ALL_REDUCE, without_gpus=True
)
