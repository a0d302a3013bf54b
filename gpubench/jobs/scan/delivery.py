"""The end of every scan: its report is presented."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from gpubench.errors import naming_output
from gpubench.jobs.metadata import metadata_of
from gpubench.jobs.outputs import presenting
from gpubench.jobs.scan.plan import NAME, ScanPlan
from gpubench.measure.scan.rates import all_rates_known, least_percent
from gpubench.measure.scan.report import ScanResult, report_of
from gpubench.model.results.report import Report
from gpubench.model.results.rows.scan import EXCLUSIONS_SECTION, ExclusionRow, Tool


def deliver(
    plan: ScanPlan,
    arguments: Sequence[str],
    result: ScanResult,
    *,
    backend: str,
    seed: int,
    source: str | None = None,
    profile: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    is_rank: bool = False,
) -> int:
    """Present the report; the exit code. A rank's stdout is never taken for a terminal.

    Raises GpubenchError where an output cannot be written.
    """
    course, fabric = result.course, result.course.fabric
    report = report_of(result, 0 if plan.ranks_as_nodes else fabric.rails)
    metadata = metadata_of(
        arguments,
        NAME,
        origin=result.origin,
        backend=backend,
        hosts=list(fabric.hosts),
        source=source,
        profile=profile,
        environment=environment or {},
        options={
            "quick": plan.quick,
            "strict": plan.strict,
            "seed": seed,
            "rails": fabric.rails,
            "leaves": len(set(filter(None, fabric.leaves))),
            "rounds": len(course.outcomes),
            "seconds": round(sum(each.seconds for each in course.outcomes), 3),
            "noise_percent": 100 * course.yardstick.deviation,
            "sure_loss_percent": result.sure_loss_percent,
            "rates_known": all_rates_known(course),
            "nic_rate_percent": least_percent(course, result.rails_without_level()),
        },
    )
    with presenting(plan.presentation, is_rank=is_rank) as presenter:
        presenter.begin(metadata, ())
        presenter.end(report)
        if plan.hostfile is not None:
            _write_hostfile(plan.hostfile, report)
        return presenter.exit_code


def _write_hostfile(path: Path, report: Report) -> None:
    rows = report.rows(EXCLUSIONS_SECTION, ExclusionRow)
    lines = [f"{row.line}\n" for row in rows if row.tool == Tool.MPIRUN]
    with naming_output(path):
        path.write_text("".join(lines), encoding="utf-8")
