"""How a run ends: its exit code, which follows from verdict, command and --strict, and its last line."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpubench import errors
from gpubench.model.paths.transport import Conclusion
from gpubench.model.results.compare import MachineRow
from gpubench.model.results.fallback import PATH_UNKNOWN
from gpubench.model.results.report import FallbackRow, Metadata, Report
from gpubench.model.results.speed import TOO_NOISY
from gpubench.model.results.topo import GpuRow
from gpubench.model.terms.verdict import Origin, Verdict, exit_code
from gpubench.records import dataclass

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
    return errors.DONE if not strict and _only_paths_unknown(metadata, report) else exit_code(verdict)


def _is_gate(metadata: Metadata, report: Report) -> bool:
    """A comparison of different machines is a table, and so are ten lines about a machine without GPUs."""
    is_table = MachineRow.section in report.sections or (is_brief(metadata.options) and not report.rows(GpuRow))
    return metadata.of_command.is_gate and not is_table


def _only_paths_unknown(metadata: Metadata, report: Report) -> bool:
    """True if a benchmark measured everything, and no evidence shows which way the bytes went."""
    failed = {each.id for each in report.findings if each.severity is Verdict.ERROR}
    return report.verdict is Verdict.ERROR and failed == {PATH_UNKNOWN} and not metadata.of_command.is_gate


def gated(metadata: Metadata, report: Report, figures: "SpeedFigures", *, exit_style: bool) -> Report:
    """The report as it is told: a gate passes nothing whose speed nobody judged, no part of a log, and no machine whose
    paths were not seen: SKIP. So is a speed far above what is expected, in every command.
    """
    doubts = [each for each in report.findings if each.severity not in (Verdict.PASS, Verdict.SKIP)]
    is_noise = report.verdict is Verdict.INCONCLUSIVE and all(each.id == TOO_NOISY for each in doubts)
    if not report.complete or not (report.verdict is Verdict.PASS or is_noise):
        return report
    is_asked = exit_style or is_strict(metadata.options)
    is_part = any(each.id == EXCERPT for each in report.findings)
    unseen = any(row.conclusion == Conclusion.UNKNOWN for row in report.rows(FallbackRow))
    unjudged = (is_asked or metadata.of_command.is_gate) and (figures.is_unjudged or unseen)
    return replace(report, verdict=Verdict.SKIP) if figures.doubt or unjudged or (is_asked and is_part) else report


MOST_CHARACTERS = 160  # What a terminal, a chat and a monitoring system show of a line without cutting it
ALWAYS, SOON, LATER, LAST = range(4)  # Importance: always said, before the command, after it


@dataclass(frozen=True, slots=True)
class LinePart:
    """A part of the line: its wordings, the fullest first, and how important it is."""

    wordings: tuple[str, ...]
    importance: int = ALWAYS


def part(*wordings: str, importance: int = ALWAYS) -> LinePart:
    """A part with these wordings; those that are empty count for nothing."""
    clean = (" ".join(each.replace("; ", ", ").split()).rstrip(".,:; ") for each in wordings)
    return LinePart(tuple(filter(None, clean)), importance)


def last_line(verdict: Verdict, origin: str, parts: Sequence[LinePart], command: str = "") -> str:
    """The line of these parts, in their order.

    A part has its fullest wording that fits, the most important part first. What does not fit is left out: no part and
    no command is cut, except a first part that is too long by itself, which ends after a word.
    """
    head = f"{verdict} (simulated)" if origin == Origin.SIMULATED else str(verdict)
    parts = [each for each in parts if each.wordings]
    chosen = {index: each.wordings[-1] for index, each in enumerate(parts) if each.importance == ALWAYS}

    def line(chosen: dict[int, str]) -> str:
        said = ", ".join(chosen[index] for index in sorted(chosen))
        end = "" if said.endswith("…") else "."
        return f"{head}: {said}" + (f"{end} Try: {command}" if command else "") if said else head

    if len(line(chosen)) > MOST_CHARACTERS:
        command = ""
    for index in sorted(range(len(parts)), key=lambda each: parts[each].importance):
        for wording in parts[index].wordings:
            if len(line({**chosen, index: wording})) <= MOST_CHARACTERS:
                chosen[index] = wording
                break
    return _shortened(line(chosen))


def _shortened(line: str) -> str:
    if len(line) <= MOST_CHARACTERS:
        return line
    return line[: MOST_CHARACTERS - 1].rpartition(" ")[0].rstrip(",:") + " …"


_PLACEHOLDER = re.compile(
    r"\b(PID|BUSID|BUS_ID|GPU|DEVICE|INTERFACE|DIR|DIRECTORY|FILE|HOST|NAME|PROGRAM|RESULT|LOG|OLD|NEW|I-J\S*)(?![-\w])"
    r"|\.\.\.|…"
)
_PROSE = re.compile(r"[A-Z](?![A-Z0-9_]*=)")
_NEXT_SENTENCE = re.compile(r"\. (?=[^a-z])")


def first_command(advice: str) -> str:
    """The command that an advice begins with; empty where it has none, or one that nobody can type as it stands.

    Advice is a command, or a command and sentences after it, or sentences alone: those begin with a capital letter.
    """
    if _PROSE.match(advice):
        return ""
    command = _NEXT_SENTENCE.split(advice, maxsplit=1)[0].rstrip(".")
    return "" if _PLACEHOLDER.search(command) else command
