"""The sentence of a watch where nothing is wrong: what every job did, longest first."""

from gpubench.model.facts.idle_gpu import FOREIGN_GB_S
from gpubench.model.results.report import Report
from gpubench.model.results.rows.watch import JOBS_SECTION, JobRow, Way
from gpubench.model.terms.grouping import grouped
from gpubench.model.terms.units import compress_names, some_of
from gpubench.model.terms.verdict import Verdict

_MOST_JOBS = 3


def watch_sentence(report: Report) -> str:
    """'torch 127.0.0.1:29500 on node0 is direct for 28 s, NVLink 78.1 GB/s'; why nothing was judged else."""
    rows = report.rows(JOBS_SECTION, JobRow)
    main: dict[tuple[str, str], JobRow] = {}
    for row in rows:
        main.setdefault((row.node, row.job), row)
    busy = sorted((row for row in main.values() if row.way != Way.IDLE), key=lambda row: -row.seconds)
    told = [_told(alike) for alike in grouped(busy, lambda row: (row.job, row.way)).values()]
    if told:
        unjudged = "" if report.verdict is Verdict.PASS else "no path between GPUs was seen: "
        return unjudged + some_of(told, _MOST_JOBS)
    if not rows:
        return "no process uses a GPU: nothing was seen"
    return "no bytes between GPUs were seen: all jobs are idle"


def _told(rows: list[JobRow]) -> str:
    """What a job does, on all nodes on which it does the same."""
    first = rows[0]
    job = f"{first.job} on {compress_names([row.node for row in rows])}"
    rates = [row.nvlink_gb_s for row in rows if row.nvlink_gb_s is not None]
    if first.way == Way.NOT_TOLD:
        return f"counters do not tell the way of {job}, and a healthy job shows the same"
    if first.way != Way.DIRECT or not rates:
        return f"{job} shows {first.way} for {first.seconds:.0f} s"
    each = " a node" if len(rows) > 1 else ""
    by_rdma = min(first.network_gb_s or 0.0, first.pcie_sent_gb_s or 0.0) >= FOREIGN_GB_S
    beside = ", not judged between nodes" if by_rdma else ""
    return f"{job} is direct for {first.seconds:.0f} s, NVLink {sum(rates) / len(rates):.1f} GB/s{each}{beside}"
