"""Read logs of NCCL, UCX and NIXL, and report what they show."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gpubench.backends.timing import no_garbage_collection
from gpubench.jobs.failed_runs import drop_prose
from gpubench.jobs.metadata import build_metadata
from gpubench.jobs.plans import ExplainPlan
from gpubench.jobs.runner import presenting
from gpubench.measure.explain.report import SECTIONS as SECTIONS
from gpubench.measure.explain.report import explain
from gpubench.measure.explain.required_path import require_logged_paths
from gpubench.model.paths.nccl_log import LogFacts
from gpubench.model.results.ending import JOB_INTERRUPTED
from gpubench.model.results.report import Metadata, Report
from gpubench.model.terms.verdict import Finding, Origin, Verdict
from gpubench.readers.nccl_log.files import STDIN, LogFile, ReadSoFar, read_logs
from gpubench.readers.nccl_log.stream import NcclLogReader
from gpubench.readers.registry import PROSE, STANDARD_INPUT, other_text

if TYPE_CHECKING:
    from gpubench.formats.presenter import Presenter

NAME = "explain"

_MOST_NAMES = 4
_MIB = 2**20
_LONG_BYTES = 2**26
"""Show progress for logs of this total size or more. Reading 64 MiB takes half a second."""

_PARTS = 100


def run(plan: ExplainPlan, arguments: Sequence[str]) -> int:
    """Read the logs, present the report and return the exit code.

    Raises GpubenchError if a log cannot be read, or an output cannot be written.
    """
    return present(plan, arguments).exit_code


def present(plan: ExplainPlan, arguments: Sequence[str], ending: Finding | None = None) -> "Presenter":
    """Read the logs, present the report, and return the presenter.

    `ending` is set if the job did not end well. A plan without logs needs it, because nothing else is reported.
    Raises GpubenchError if a log cannot be read, or an output cannot be written.
    """
    # Reading logs creates no reference cycles. Searching a million pairs for cycles takes a sixth of the time.
    with presenting(plan.presentation, progress=True) as presenter, no_garbage_collection():
        reader = NcclLogReader()
        files = read_logs(plan.logs, reader, sys.stdin.buffer, _telling(presenter))
        facts = reader.facts(tuple(file.name for file in files if file.is_damaged))
        others = [] if reader.nccl_lines else [other_text(each.beginning, _name(each.name)) for each in files]
        if others and all(other is not None and other.what == PROSE for other in others):
            facts = drop_prose(facts)
        metadata = _metadata(plan, arguments, facts, files)
        report = Report(verdict=Verdict.ERROR, complete=True)
        if plan.logs:
            report = explain(facts, _names(plan.logs), list(filter(None, others)))
        if ending is not None:
            report = _add_ending(report, ending)
        if plan.require_path:
            report = require_logged_paths(facts, report, plan.require_path)
        presenter.begin(metadata, ())
        presenter.end(report)
    return presenter


def _add_ending(report: Report, ending: Finding) -> Report:
    """Add how the job ended. A failure in the logs explains a failed job better, and an interruption proves nothing."""
    if ending.id != JOB_INTERRUPTED:
        return report if report.verdict is Verdict.FAIL else report.add_findings((ending,))
    ended = report.add_findings(last=(ending,))
    return replace(ended, complete=False, verdict=Verdict.SKIP if report.verdict is Verdict.SKIP else ended.verdict)


def _telling(presenter: "Presenter") -> ReadSoFar:
    last = 0

    def tell(done: int, total: int, name: str) -> None:
        nonlocal last
        if total >= _LONG_BYTES and done - last >= total // _PARTS:
            last = done
            presenter.progress(done // _MIB, total // _MIB, f"MiB of logs read, now {name}")

    return tell


def _metadata(plan: ExplainPlan, arguments: Sequence[str], facts: LogFacts, files: Sequence[LogFile]) -> Metadata:
    hosts = dict.fromkeys(member.host for communicator in facts.communicators for member in communicator.members)
    values: dict[str, dict[str, None]] = {}
    for setting in facts.settings:
        values.setdefault(setting.name, {})[setting.value] = None
    return build_metadata(
        arguments,
        NAME,
        origin=Origin.RECORDED,
        hosts=list(hosts) or ["unknown"],
        libraries={
            name: ", ".join(found)
            for name, found in (("NCCL", facts.versions), ("network", facts.networks), ("UCX", facts.ucx.releases))
            if found
        },
        environment={name: " or ".join(found) for name, found in values.items()},
        options={
            "strict": plan.strict,
            "files": len(files),
            "files_without_nccl": sum(not file.nccl_lines for file in files),
            "lines": facts.lines,
            "nccl_lines": facts.nccl_lines,
            "ucx_lines": facts.ucx.lines + len(facts.ucx.tables),
            "dumps": len(facts.records),
            "ras": len({each.id for each in facts.ras}),
            "warnings": {complaint.text: complaint.count for complaint in facts.complaints if complaint.processes},
        },
        source=", ".join(_names(plan.logs)),
    )


def _name(log: str) -> str:
    return STANDARD_INPUT if log == STDIN else log


def _names(logs: Sequence[str]) -> list[str]:
    names = [_name(log) for log in logs]
    more = len(names) - _MOST_NAMES
    return names[:_MOST_NAMES] + ([f"{more} more"] if more > 0 else [])
