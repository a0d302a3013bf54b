"""The sentence of a watch where nothing is wrong: what every job did, longest first."""

from gpubench.model.results.report import Report
from gpubench.model.results.rows.watch import JOBS_SECTION, JobRow, Way
from gpubench.model.terms.units import some_of
from gpubench.model.terms.verdict import Verdict

_MOST_JOBS = 3


def watch_sentence(report: Report) -> str:
    """'torch 127.0.0.1:29500 on node0 is direct for 28 s, NVLink 78.1 GB/s'; why nothing was judged else."""
    rows = report.rows(JOBS_SECTION, JobRow)
    main: dict[tuple[str, str], JobRow] = {}
    for row in rows:
        main.setdefault((row.node, row.job), row)
    told = [_told(row) for row in sorted(main.values(), key=lambda row: -row.seconds) if row.way != Way.IDLE]
    if told:
        unjudged = "" if report.verdict is Verdict.PASS else "no path between GPUs was seen: "
        return unjudged + some_of(told, _MOST_JOBS)
    if not rows:
        return "no process uses a GPU: nothing was seen"
    return "no bytes between GPUs were seen: all jobs are idle"


def _told(row: JobRow) -> str:
    rate = f", NVLink {row.nvlink_gb_s:.1f} GB/s" if row.way == Way.DIRECT and row.nvlink_gb_s is not None else ""
    verb = f"is {row.way}" if row.way == Way.DIRECT else f"shows {row.way}"
    return f"{row.job} on {row.node} {verb} for {row.seconds:.0f} s{rate}"
