"""The fabric of a plan as the network files of other programs: Calculon, ASTRA-sim, SimAI.

Bandwidth is what a GPU sends, GB/s: the all-reduce's bus bandwidth. Latency is that of one step, in ns: the smallest
all-reduce over the 2(n - 1) steps of a ring.

It computes latency + (size · scalar · (1 + offset/n))/(bandwidth · efficiency), so that scalars of 2 and 1 with an
offset of -1 are the bytes of rings. Efficiency is the all-reduce's bus bandwidth over the link's; what other
collectives reach is in their scalars.

Its reader passes over the first line, and takes what stands before the comma of a key.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpubench.collectives.registry import collective_named
from gpubench.model.results.plan import CurveRow
from gpubench.model.terms.operation import algbw_gb_s
from gpubench.model.terms.units import printable_line

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


_NANOSECONDS = 1e9


def astra_sim_text(fabric: ExportedFabric) -> str:
    """A YAML document of one or two dimensions."""
    roles = [TENSOR] if fabric.nodes == 1 else [TENSOR, DATA]
    counts = [fabric.gpus_per_node] if fabric.nodes == 1 else [fabric.gpus_per_node, fabric.nodes]
    reduces = [fabric.curves[role]["allreduce"] for role in roles]
    bandwidths = [busbw(rows) for rows in reduces]
    latencies = [latency_seconds(rows) / (2 * (rows[0].ranks - 1)) * _NANOSECONDS for rows in reduces]
    comments = [f"# {printable_line(each)}" for each in sources(fabric)]
    return "\n".join(
        [
            *comments,
            f"topology: [ {', '.join('Switch' for _ in roles)} ]",
            f"npus_count: [ {', '.join(map(str, counts))} ]",
            f"bandwidth: [ {', '.join(f'{each:.2f}' for each in bandwidths)} ]  # GB/s",
            f"latency: [ {', '.join(f'{each:.2f}' for each in latencies)} ]  # ns",
            "",
        ]
    )


_NAMES = {"reduce_scatter": "reducescatter", "all_gather": "allgather", "all_reduce": "allreduce"}
_SCALARS = {"reduce_scatter": 1.0, "all_gather": 1.0, "all_reduce": 2.0}
_ANY_SIZE = 65536


def calculon_text(fabric: ExportedFabric) -> str:
    """A JSON document with `networks`, the one within nodes first."""
    networks = [_network(fabric, fabric.curves[TENSOR], fabric.link_gb_s, size=fabric.gpus_per_node, inner=True)]
    if fabric.nodes > 1 and fabric.nic_gb_s:
        networks.append(_network(fabric, fabric.curves[DATA], fabric.nic_gb_s, size=_ANY_SIZE, inner=False))
    return json.dumps({"networks": networks}, indent=2) + "\n"


def _network(
    fabric: ExportedFabric, curves: Mapping[str, Sequence[CurveRow]], link_gb_s: float, *, size: int, inner: bool
) -> dict[str, Any]:
    reached = busbw(curves["allreduce"])
    sends = curves.get("sendrecv") or fabric.curves.get(PIPELINE, {}).get("sendrecv")
    ops: dict[str, Any] = {"p2p": [round(reached / busbw(sends), 4) if sends else 1.0, None]}
    for name, own in _NAMES.items():
        ops[name] = [round(_SCALARS[name] * reached / busbw(curves[own]), 4), -1]
    return {
        "bandwidth": link_gb_s,
        "efficiency": round(min(1.0, reached / link_gb_s), 4),
        "size": size,
        "latency": latency_seconds(curves["allreduce"]),
        "ops": ops,
        "must_be_filled": inner,
        "processor_usage": round(fabric.processor_usage, 4) if inner else 0.0,
    }


_KINDS = {"TP": TENSOR, "DP": DATA, "EP": EXPERT}
_COLLECTIVES = ("allreduce", "allgather", "reducescatter", "alltoall")


def simai_text(fabric: ExportedFabric) -> str:
    """The lines of the file."""
    return "\n".join(_lines(fabric)) + "\n"


def _lines(fabric: ExportedFabric) -> Iterator[str]:
    yield "gpubench"
    for kind, role in _KINDS.items():
        yield f"{kind}:"
        for name in _COLLECTIVES:
            rows = fabric.curves.get(role, {}).get(name)
            yield f"{name},: {busbw(rows):.2f}" if rows else f"{name},: null"
    yield "PP:"
    rows = fabric.curves.get(PIPELINE, {}).get("sendrecv")
    yield f"busbw: {busbw(rows):.2f}" if rows else "busbw: null"


NETWORKS = {"calculon": calculon_text, "astra-sim": astra_sim_text, "simai": simai_text}
"""The module of each, by the name that --export takes."""

SUFFIXES = {"calculon": ".json", "astra-sim": ".yml", "simai": ".yaml"}


def network_text(name: str, fabric: "ExportedFabric") -> str:
    """The file for that program."""
    return NETWORKS[name](fabric)
