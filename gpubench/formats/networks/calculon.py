"""Calculon's `networks`, to be put into a system file (calculon-ai/calculon, calculon/network.py and systems/*.json).

It computes latency + (size · scalar · (1 + offset/n))/(bandwidth · efficiency), so that scalars of 2 and 1 with an
offset of -1 are the bytes of rings. Efficiency is the all-reduce's bus bandwidth over the link's; what other
collectives reach is in their scalars.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gpubench.formats.networks.fabric import DATA, PIPELINE, TENSOR, ExportedFabric, busbw, latency_seconds
from gpubench.model.results.rows.plan import CurveRow

_NAMES = {"reduce_scatter": "reducescatter", "all_gather": "allgather", "all_reduce": "allreduce"}
_SCALARS = {"reduce_scatter": 1.0, "all_gather": 1.0, "all_reduce": 2.0}
_ANY_SIZE = 65536


def text(fabric: ExportedFabric) -> str:
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
