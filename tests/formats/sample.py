"""Rows and metadata to write."""

from msgspec.structs import replace

from gpubench.formats.registry import FORMATS
from gpubench.model.results.report import CollectiveRow, Metadata, PairRow, Report
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.units import DroppedSize
from gpubench.model.terms.verdict import Cure, Finding, Verdict

_NAMED = {each.name: each for each in FORMATS}
JSON, JSONL, JUNIT = _NAMED["json"], _NAMED["jsonl"], _NAMED["junit"]
PROMETHEUS, MARKDOWN, GITHUB, HTML = (_NAMED[name] for name in ("prometheus", "markdown", "github", "html"))

ROW = CollectiveRow(
    collective="allreduce",
    backend="nccl",
    origin="measured",
    ranks=2,
    nodes=1,
    size_bytes=1024,
    count=256,
    dtype="float32",
    op="sum",
    root=None,
    placement="out_of_place",
    mode="throughput",
    graph=0,
    iterations=20,
    time_us=9.81,
    time_us_fastest_rank=9.7,
    time_us_slowest_rank=10.0,
    slowest_rank=1,
    algbw_gb_s=0.1,
    busbw_gb_s=0.15,
    wrong=0,
    verified="last",
    verdict="PASS",
)
IN_PLACE = replace(ROW, placement="in_place", verified="repeat", time_us=9.5)
LARGE = replace(
    ROW, size_bytes=2**30, count=2**28, time_us=4547.85, algbw_gb_s=236.1, busbw_gb_s=354.15, wrong=3, verdict="FAIL"
)
LARGE_IN_PLACE = replace(LARGE, placement="in_place", wrong=0, verdict="PASS", busbw_gb_s=353.46)
PAIR = PairRow(
    source="GPU0",
    destination="GPU1",
    source_bus_id="0000:00:00.0",
    destination_bus_id="0000:01:00.0",
    source_node="n1",
    destination_node="n1",
    origin="measured",
    direction="write",
    engine="ce",
    peer="on",
    size_bytes=2**28,
    bandwidth_gb_s=390.0,
    latency_us=700.0,
    limit_gb_s=450.0,
    path_class="NV18",
)
ROWS = (ROW, IN_PLACE, LARGE, LARGE_IN_PLACE)

METADATA = Metadata(
    gpubench_version="0.1.0",
    run_id="00000000-0000-0000-0000-000000000000",
    started_at="2026-11-20T08:00:00+00:00",
    command=("gpubench", "allreduce"),
    subject="allreduce",
    hosts=("n1",),
    collective="allreduce",
    backend="nccl",
    origin="measured",
    ranks=tuple(
        RankIdentity(
            rank=rank,
            host="n1",
            node=0,
            local_rank=rank,
            pid=100 + rank,
            gpu="NVIDIA H200",
            gpu_index=rank,
            gpu_bus_id=f"0000:0{rank}:00.0",
            gpu_uuid=f"GPU-{rank}",
        )
        for rank in range(2)
    ),
    libraries={"NCCL": "2.28.9 from /lib/libnccl.so.2", "MPI": "Open MPI v5.0.11"},
    environment={"NCCL_ALGO": "Ring"},
    options={
        "sizes": [1024, 2**30],
        "dtypes": ["float32"],
        "ops": ["sum"],
        "root": None,
        "placements": ["out_of_place", "in_place"],
        "iters": 20,
        "warmup": 5,
        "graph": 0,
        "check": True,
        "allocator": "cuda",
    },
    dropped_sizes=(DroppedSize(2**33, "2 buffers of that size do not fit"),),
)
FINDING = Finding(
    id="wrong-data",
    severity=Verdict.FAIL,
    subject="rank 1 on n1 (GPU 1, 0000:01:00.0)",
    seen="3 wrong elements in 1 rows",
    expected="every element as computed",
    cause="data damaged on the way",
    cure=Cure.of("gpubench allreduce"),
)
REPORT = Report(verdict=Verdict.FAIL, complete=True, findings=(FINDING,))
