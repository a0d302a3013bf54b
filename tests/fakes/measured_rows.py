"""Rows as a measurement makes them."""

from typing import Any

from msgspec.structs import replace

from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.results.report import CollectiveRow, PairRow
from gpubench.model.results.speed import MEASURED, ExpectedTime, judge_row


def pair(node: Snapshot, source: int, destination: int, gb_s: float | None, **changes: Any) -> PairRow:
    """Return a large copy between GPUs of a node, written by the source."""
    ends = node.gpus[source], node.gpus[destination]
    made = PairRow(
        source=ends[0].device,
        destination=ends[1].device,
        source_bus_id=ends[0].bus_id,
        destination_bus_id=ends[1].bus_id,
        source_node=node.host,
        destination_node=node.host,
        scope="process",
        origin="measured",
        direction="write",
        engine="ce",
        peer="on",
        size_bytes=2**28,
        bandwidth_gb_s=gb_s,
        limit_gb_s=450.0,
        path_class="NV18",
    )
    return replace(made, **changes)


def host_copies(node: Snapshot, gb_s: float) -> tuple[PairRow, ...]:
    """Return copies of all GPUs of a node from and to pinned host memory."""
    found = []
    for gpu in range(len(node.gpus)):
        out = replace(pair(node, gpu, gpu, gb_s, note="pinned host memory", peer=None), destination="host")
        found.append(replace(out, destination_bus_id=None))
        found.append(replace(out, source="host", source_bus_id=None, destination=out.source))
    return tuple(found)


def row(size_bytes: int, time_us: float, busbw: float, **changes: Any) -> CollectiveRow:
    """Return an all-reduce on eight ranks."""
    made = CollectiveRow(
        collective="allreduce",
        backend="nccl",
        origin="measured",
        ranks=8,
        nodes=1,
        size_bytes=size_bytes,
        count=1,
        dtype="float32",
        op="sum",
        root=None,
        placement="out_of_place",
        mode="throughput",
        graph=0,
        iterations=20,
        time_us=time_us,
        time_us_fastest_rank=time_us,
        time_us_slowest_rank=time_us,
        slowest_rank=3,
        algbw_gb_s=1.0,
        busbw_gb_s=busbw,
        limit_gb_s=450.0,
        wrong=0,
        verified="last",
        verdict="PASS",
    )
    return replace(made, **changes)


def slow_row(size_bytes: int, time_us: float, busbw: float) -> CollectiveRow:
    """Return an all-reduce that takes ten times as long as expected."""
    return judge_row(row(size_bytes, time_us, busbw), ExpectedTime(time_us / 10, "profile hgx-h200-8", MEASURED))
