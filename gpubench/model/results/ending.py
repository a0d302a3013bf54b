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
from gpubench.model.terms.verdict import WRONG_DATA, Origin, Verdict, exit_code
from gpubench.records import dataclass

if TYPE_CHECKING:
    from gpubench.model.results.figures import SpeedFigures


EXCERPT = "excerpt"  # A log that is a part of one was judged, and nothing is said of the rest
NOTHING_TO_CONNECT = "nothing-to-connect"  # The finding that a log is of ranks that are alone
_DOUBTS = (Verdict.WARN, Verdict.INCONCLUSIVE)
_STRICT, _BRIEF = "strict", "brief"
RUN_FAILED = "run_failed"  # The option in the metadata of a table whose text says that its run failed


def is_strict(options: Mapping[str, Any]) -> bool:
    """True if the options of a run say --strict."""
    return options.get(_STRICT) is True


def is_brief(options: Mapping[str, Any]) -> bool:
    """True if a check was one of ten lines, that of `gpubench` alone."""
    return options.get(_BRIEF) is True


def exit_code_of(metadata: Metadata, report: Report) -> int:
    """The exit code of a run. With --strict every doubt is 1, and nothing judged is 3.

    Without, a benchmark and `topo` end with 1 for wrong data and a failed run alone, and with 3 for what could not be
    measured.
    """
    strict, verdict = is_strict(metadata.options), report.verdict
    judges = metadata.of_command.judges and MachineRow.section not in report.sections
    if verdict is Verdict.SKIP and is_brief(metadata.options) and not strict:
        return errors.DONE  # a look is no gate: a machine without GPUs has been looked at
    if verdict is Verdict.SKIP:
        return errors.COULD_NOT_MEASURE if strict or judges else errors.DONE
    if verdict is Verdict.INCONCLUSIVE and metadata.subject == "scan":
        return errors.COULD_NOT_MEASURE  # too noisy to say anything of any node
    if verdict in _DOUBTS:
        return errors.JUDGED_AND_FAILED if strict else errors.DONE
    if strict or judges or not report.complete or metadata.options.get(RUN_FAILED) is True:
        return exit_code(verdict)
    return _code_of_measuring(report)


def gated(metadata: Metadata, report: Report, figures: "SpeedFigures", *, exit_style: bool) -> Report:
    """The report as it is told: a gate passes nothing whose speed nobody judged, no part of a log, and no machine whose
    paths were not seen: SKIP. So is a speed far above what is expected, in every command.
    """
    doubts = [each for each in report.findings if each.severity not in (Verdict.PASS, Verdict.SKIP)]
    is_noise = report.verdict is Verdict.INCONCLUSIVE and all(each.id == TOO_NOISY for each in doubts)
    if not report.complete or not (report.verdict is Verdict.PASS or is_noise):
        return report
    is_gate = exit_style or is_strict(metadata.options) or metadata.of_command.is_gate
    is_part = any(each.id == EXCERPT for each in report.findings)
    unseen = any(row.conclusion == Conclusion.UNKNOWN for row in report.rows(FallbackRow))
    if figures.doubt or (is_gate and (figures.is_unjudged or is_part or unseen)):
        return replace(report, verdict=Verdict.SKIP)
    return report


def _code_of_measuring(report: Report) -> int:
    if any(each.id == WRONG_DATA and each.severity is Verdict.FAIL for each in report.findings):
        return errors.JUDGED_AND_FAILED
    failed = [each for each in report.findings if each.severity is Verdict.ERROR]
    if any(each.id != PATH_UNKNOWN for each in failed) or (report.verdict is Verdict.ERROR and not failed):
        return errors.COULD_NOT_MEASURE
    return errors.DONE


def remark_on_code(metadata: Metadata, report: Report) -> str:
    """'exit code 0 without --strict' where the code is not what the word says; else nothing."""
    code = exit_code_of(metadata, report)
    if code == exit_code(report.verdict):
        return ""
    if code == errors.DONE:
        return f"exit code {code} without --strict"
    return f"exit code {code} with --strict" if is_strict(metadata.options) else f"exit code {code}"


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
