"""What network files are made of: the curves of the groups of ranks of a layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpubench.collectives.registry import collective_named
from gpubench.model.results.rows.plan import CurveRow
from gpubench.model.terms.bandwidth import algbw_gb_s

TENSOR, DATA, EXPERT, PIPELINE = "tensor", "data", "expert", "pipeline"

_MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFabric:
    """Curves by role (tensor, data, expert, pipeline) and collective, in the order of sizes.

    `link_gb_s` is the most that a GPU can send within a node; `nic_gb_s` that of a GPU's share of the NICs, None
    where there is one node. `processor_usage` is the share of the multiprocessors that communication takes.
    """

    curves: Mapping[str, Mapping[str, Sequence[CurveRow]]]
    link_gb_s: float
    gpus_per_node: int
    nodes: int
    processor_usage: float
    nic_gb_s: float | None = None
    notes: Sequence[str] = field(default=())


def busbw(rows: Sequence[CurveRow]) -> float:
    """Bus bandwidth of the largest size, GB/s, as nccl-tests defines it."""
    last = rows[-1]
    factor = collective_named(last.collective).busbw_factor(last.ranks)
    return algbw_gb_s(last.size_bytes, last.time_us / _MICROSECONDS) * factor


def latency_seconds(rows: Sequence[CurveRow]) -> float:
    """Seconds of the smallest size."""
    return rows[0].time_us / _MICROSECONDS


def sources(fabric: ExportedFabric) -> list[str]:
    """Where the curves come from, each once."""
    found = (f"{row.origin}: {row.source}" for role in fabric.curves.values() for rows in role.values() for row in rows)
    return list(dict.fromkeys(found))
