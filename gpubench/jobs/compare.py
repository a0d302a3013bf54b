"""Compare two sets of results, or the dated ones of a folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpubench.formats.presentation import Presentation
from gpubench.jobs.metadata import metadata_of
from gpubench.jobs.outputs import presenting
from gpubench.measure.compare.circumstances import describe_file
from gpubench.measure.compare.history_report import SECTIONS_OF_HISTORY as SECTIONS_OF_HISTORY
from gpubench.measure.compare.history_report import compare_history
from gpubench.measure.compare.judge import Rules
from gpubench.measure.compare.report import SECTIONS as SECTIONS
from gpubench.measure.compare.report import compare
from gpubench.measure.compare.series import choose
from gpubench.model.results.report import Metadata, Report
from gpubench.model.results.result_file import ResultFile, Told
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.units import counted
from gpubench.readers.results.history import list_results
from gpubench.readers.results.registry import read_results

NAME = "compare"

_BYTES_A_SECOND = 6e6
"""Of JSON, read, checked and compared by a core of 2026; tables of text take less time a byte."""

_SECONDS_WORTH_TELLING = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePlan:
    """The files of both sides, or `last` results of a folder, None where files were named.

    `collective` is the one of files that do not name theirs.
    """

    base: tuple[Path, ...]
    new: tuple[Path, ...]
    folder: Path
    last: int | None
    threshold_percent: float | None
    strict: bool
    other_machine: bool
    collective: str | None
    presentation: Presentation

    @property
    def rules(self) -> Rules:
        """The rules that rows are judged by."""
        return Rules(threshold_percent=self.threshold_percent)


def run(plan: ComparePlan, arguments: Sequence[str]) -> int:
    """Read both sides and show what differs; the exit code.

    Raises GpubenchError: a file or folder cannot be read, a file is of another machine, or an output cannot be written.
    """
    if plan.last is not None:
        list_results(plan.folder)
    with presenting(plan.presentation, progress=True) as presenter:
        seconds = sum(map(_size, (*plan.base, *plan.new))) / _BYTES_A_SECOND
        if seconds >= _SECONDS_WORTH_TELLING:
            presenter.waiting(f"reading {counted(len(plan.base) + len(plan.new), 'result')}", seconds)
        sides, report = _of_files(plan) if plan.last is None else _of_folder(plan, plan.last)
        metadata = _metadata(plan, arguments, sides)
        presenter.begin(metadata, ())
        presenter.end(report)
    return presenter.exit_code


def _size(path: Path) -> int:
    """The bytes of a file, 0 of what is none: to read it says why."""
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return 0


@dataclass(frozen=True, slots=True)
class _Sides:
    """The files of a comparison; `series` names it where there are several."""

    series: str | None
    base: Sequence[ResultFile]
    new: Sequence[ResultFile]


def _of_files(plan: ComparePlan) -> tuple[list[_Sides], Report]:
    told = Told(collective=plan.collective)
    base, new = ([read_results(path, told) for path in paths] for paths in (plan.base, plan.new))
    return [_Sides(None, base, new)], compare(base, new, plan.rules, other_machine=plan.other_machine)


def _of_folder(plan: ComparePlan, last: int) -> tuple[list[_Sides], Report]:
    chosen = choose(list_results(plan.folder), last)
    sides = [_Sides(each.name, each.base, [each.new]) for each in chosen.series]
    return sides, compare_history(chosen, plan.folder, plan.rules)


def _metadata(plan: ComparePlan, arguments: Sequence[str], sides: Sequence[_Sides]) -> Metadata:
    files = [file for side in sides for file in (*side.base, *side.new)]
    hosts = dict.fromkeys(host for file in files for host in file.circumstances.hosts)
    origins = {row.origin for file in files for row in file.measured}
    origins |= {file.circumstances.origin for file in files if file.circumstances.origin is not None}
    source = ", ".join(map(str, (*plan.base, *plan.new)))
    return metadata_of(
        arguments,
        NAME,
        origin=Origin.SIMULATED if Origin.SIMULATED in origins else Origin.RECORDED,
        hosts=list(hosts) or ["unknown"],
        options={
            "base": [_described(file, side.series) for side in sides for file in side.base],
            "new": [_described(file, side.series) for side in sides for file in side.new],
            "last": plan.last,
            "threshold": plan.rules.threshold_percent,
            "strict": plan.strict,
            "other_machine": plan.other_machine,
            "collective": plan.collective,
        },
        source=source or str(plan.folder),
    )


def _described(file: ResultFile, series: str | None) -> dict[str, Any]:
    return {
        "file": file.name,
        "kind": file.kind,
        "told": describe_file(file),
        "rows": len(file.measured),
        "complete": file.complete,
        "remarks": list(file.remarks),
        "series": series,
    }
