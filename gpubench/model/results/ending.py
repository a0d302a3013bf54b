"""How a run ends: its exit code, which follows from verdict, command and --strict, and its last line."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from gpubench import errors
from gpubench.model.paths.transport import Conclusion
from gpubench.model.results.compare import MachineRow
from gpubench.model.results.fallback import PATH_UNKNOWN
from gpubench.model.results.report import FallbackRow, Metadata, Report
from gpubench.model.results.speed import TOO_NOISY
from gpubench.model.terms.verdict import Origin, Verdict, exit_code

if TYPE_CHECKING:
    from gpubench.model.results.figures import SpeedFigures


EXCERPT = "excerpt"  # A log that is a part of one was judged, and nothing is said of the rest
NOTHING_TO_CONNECT = "nothing-to-connect"  # The finding that a log is of ranks that are alone
_DOUBTS = (Verdict.WARN, Verdict.INCONCLUSIVE)
_STRICT, _BRIEF = "strict", "brief"


def is_strict(options: Mapping[str, Any]) -> bool:
    """True if the options of a run say --strict."""
    return options.get(_STRICT) is True


def is_brief(options: Mapping[str, Any]) -> bool:
    """True if a check was one of ten lines, that of `gpubench` alone."""
    return options.get(_BRIEF) is True


def exit_code_of(metadata: Metadata, report: Report) -> int:
    """Return the exit code: 1 for FAIL, 3 for ERROR, in every command; 3 too if a gate judged nothing.

    With --strict a doubt is 1, and nothing judged is 3.
    """
    strict, verdict = is_strict(metadata.options), report.verdict
    nothing_judged = verdict is Verdict.SKIP or (verdict is Verdict.INCONCLUSIVE and metadata.subject == "scan")
    if nothing_judged:
        return errors.COULD_NOT_MEASURE if strict or _is_gate(metadata, report) else errors.DONE
    if verdict in _DOUBTS and strict:
        return errors.JUDGED_AND_FAILED
    return exit_code(verdict)


def _is_gate(metadata: Metadata, report: Report) -> bool:
    """A comparison of different machines is a table, and so are ten lines about a machine without GPUs."""
    is_table = MachineRow.section in report.sections or (is_brief(metadata.options) and not _has_gpus(report))
    return metadata.of_command.is_gate and not is_table


def _has_gpus(report: Report) -> bool:
    from gpubench.model.results.topo import GpuRow  # ranks compute exit codes too, and have no facts to describe

    return bool(report.rows(GpuRow))


def gated(metadata: Metadata, report: Report, figures: "SpeedFigures", *, exit_style: bool) -> Report:
    """The report as it is told: a gate passes nothing whose speed nobody judged, no part of a log, and no machine whose
    paths were not seen: SKIP. So is a speed far above what is expected, in every command.
    """
    doubts = [finding for finding in report.findings if finding.severity not in (Verdict.PASS, Verdict.SKIP)]
    is_noise = report.verdict is Verdict.INCONCLUSIVE and all(doubt.id == TOO_NOISY for doubt in doubts)
    is_unseen = report.verdict in _DOUBTS and any(doubt.id == PATH_UNKNOWN for doubt in doubts)
    passes = report.verdict is Verdict.PASS or is_noise or (is_unseen and (exit_style or metadata.of_command.is_gate))
    if not report.complete or not passes:
        return report
    is_asked = exit_style or is_strict(metadata.options)
    is_part = any(finding.id == EXCERPT for finding in report.findings)
    unseen = is_unseen or any(row.conclusion == Conclusion.UNKNOWN for row in report.rows(FallbackRow))
    unjudged = (is_asked or metadata.of_command.is_gate) and (figures.is_unjudged or unseen)
    return replace(report, verdict=Verdict.SKIP) if figures.doubt or unjudged or (is_asked and is_part) else report


MOST_CHARACTERS = 160  # What a terminal, a chat and a monitoring system show of a line without cutting it
ALWAYS, NEXT, SOON, LATER, LAST = range(5)
"""Importance: always said; said wherever there is room beside the shortest wordings and the command; the rest."""


class LinePart(Struct, frozen=True):
    """A part of the line: its wordings, the fullest first, and how important it is."""

    wordings: tuple[str, ...]
    importance: int = ALWAYS


def part(*wordings: str, importance: int = ALWAYS) -> LinePart:
    """A part with these wordings; those that are empty count for nothing."""
    clean = (" ".join(wording.replace("; ", ", ").split()).rstrip(".,:; ") for wording in wordings)
    return LinePart(tuple(filter(None, clean)), importance)


def last_line(
    verdict: Verdict, origin: str, parts: Sequence[LinePart], ends: Sequence[str] = (), most: int | None = None
) -> str:
    """The line of these parts, in their order.

    A part has its fullest wording that fits, the most important part first. What does not fit is left out: no part and
    no command is cut, except a first part that is too long by itself, which ends after a word. `ends` say what to do:
    the line has the first one that fits.
    """
    head = f"{verdict} (simulated)" if origin == Origin.SIMULATED else str(verdict)
    parts = [each for each in parts if each.wordings]
    chosen = {index: each.wordings[-1] for index, each in enumerate(parts) if each.importance == ALWAYS}

    def line(chosen: dict[int, str], action: str) -> str:
        said = ", ".join(chosen[index] for index in sorted(chosen))
        end = "" if said.endswith("…") else "."
        return f"{head}: {said}" + (f"{end} {action}" if action else "") if said else head

    most = most or MOST_CHARACTERS
    action = next((each for each in ends if each and len(line(chosen, each)) <= most), "")
    for index, each in enumerate(parts):
        if each.importance == NEXT and len(line({**chosen, index: each.wordings[-1]}, action)) <= most:
            chosen[index] = each.wordings[-1]
    for index in sorted(range(len(parts)), key=lambda each: parts[each].importance):
        for wording in parts[index].wordings:
            if len(line({**chosen, index: wording}, action)) <= most:
                chosen[index] = wording
                break
    return _shortened(line(chosen, action), most)


def _shortened(line: str, most: int) -> str:
    if len(line) <= most:
        return line
    return line[: most - 1].rpartition(" ")[0].rstrip(",:") + " …"
