"""Figures well above what links carry: the facts that the limit is made of are wrong, or the measurement is."""

from dataclasses import replace
from typing import TypeVar

from gpubench.model.results.report import CollectiveRow, PairRow
from gpubench.model.terms.managed import ManagedWay
from gpubench.model.terms.verdict import Verdict, overall

MOST_PERCENT = 110.0
"""Of the limit. NVLink carries 25 GB/s of data a link at a signalling rate of 26.56, which is 106 %; clocks of hosts
and GPUs differ by less than 1 %. No figure of a healthy machine in tests/results or tests/published is above 100 %."""

ABOVE_LIMIT = "above-limit"
"""The finding on such figures."""

_NOTE = "above the limit: a fact of the links or the time is wrong"

Row = TypeVar("Row", CollectiveRow, PairRow)


def times_limit(row: CollectiveRow | PairRow) -> float | None:
    """How many times its limit a figure is, where that is well above it; None where it is not, or has no limit.

    Of a collective the low end of the 95 % interval counts. Switches that reduce (SHARP) double what a node's NICs
    allow: an all-reduce between nodes whose algorithm is not known has no limit here. Managed memory moves to the GPU
    that reads it, and is read there.
    """
    if isinstance(row, CollectiveRow):
        may_be_in_switches = row.algorithm is None and row.nodes > 1 and row.collective == "allreduce"
        gb_s = None if may_be_in_switches else row.reached_gb_s / (1 + (row.ci95_percent or 0.0) / 100)
    else:
        gb_s = None if row.engine in _MANAGED else row.bandwidth_gb_s
    if gb_s is None or not row.limit_gb_s:
        return None
    return gb_s / row.limit_gb_s if 100 * gb_s > MOST_PERCENT * row.limit_gb_s else None


_MANAGED = frozenset(each.value for each in ManagedWay if each.is_managed)


def refused_above_limit(row: Row) -> Row:
    """The row as an ERROR where its figure is well above its limit: it says nothing of the links; wrong data stay."""
    if times_limit(row) is None:
        return row
    verdicts = [Verdict.ERROR, *([] if row.verdict is None else [Verdict(row.verdict)])]
    return replace(row, verdict=overall(verdicts), note="; ".join(filter(None, (row.note, _NOTE))))
