"""A result that is kept under a name: the JSON document, once it is whole, so that half a run spoils no good one."""

from gpubench.formats.json import JsonWriter
from gpubench.model.results.report import Report
from gpubench.model.terms.verdict import Verdict


class BaselineWriter(JsonWriter):
    """The JSON format; the file of before stays until there is a result to take its place."""

    def _replace_file(self, report: Report) -> None:
        if is_kept(report):
            super()._replace_file(report)


def is_kept(report: Report) -> bool:
    """True for a result that others can be held against: of a whole run, that could be measured."""
    return report.complete and report.verdict is not Verdict.ERROR


def fate(report: Report) -> str:
    """'is kept', or why not; of a run that failed it is said that others are then held against that."""
    if not is_kept(report):
        return f"is not kept: {report.verdict}"
    return "is kept" if report.verdict is not Verdict.FAIL else "is kept, though the run is FAIL: it is no healthy one"
