"""The end of a run: its exit code, the rules for gates, and the composition of its last line.

A gate is a command that never exits 0 if it judged nothing.
"""

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


EXCERPT = "excerpt"  # ID of the finding that only part of a log was judged
JOB_INTERRUPTED = "job-interrupted"  # ID of the finding that a signal ended the job of `gpubench run`
NOTHING_TO_CONNECT = "nothing-to-connect"  # ID of the finding that all communicators in a log have a single rank
_DOUBTS = (Verdict.WARN, Verdict.INCONCLUSIVE)
_STRICT, _BRIEF = "strict", "brief"


def is_strict(options: Mapping[str, Any]) -> bool:
    return options.get(_STRICT) is True


def is_brief(options: Mapping[str, Any]) -> bool:
    """Return whether this is the check that `gpubench` runs without a command, which prints ten lines."""
    return options.get(_BRIEF) is True


def compute_exit_code(metadata: Metadata, report: Report) -> int:
    """Return the exit code: 1 for FAIL and 3 for ERROR in every command, and 3 for a gate that judged nothing.

    With --strict, WARN and INCONCLUSIVE return 1, and a run that judged nothing returns 3.
    """
    strict, verdict = is_strict(metadata.options), report.verdict
    nothing_judged = verdict is Verdict.SKIP or (verdict is Verdict.INCONCLUSIVE and metadata.subject == "scan")
    if nothing_judged:
        # imported here, because ranks compute exit codes and do not need facts
        from gpubench.model.results.topo import GpuRow

        # A comparison of different machines, or a short check without GPUs, only prints a table and never fails
        is_table = MachineRow.section in report.sections or (is_brief(metadata.options) and not report.rows(GpuRow))
        is_gate = metadata.command_record.is_gate and not is_table
        return errors.COULD_NOT_MEASURE if strict or is_gate else errors.DONE
    if verdict in _DOUBTS and strict:
        return errors.JUDGED_AND_FAILED
    return exit_code(verdict)


def apply_gate(metadata: Metadata, report: Report, figures: "SpeedFigures", *, exit_style: bool) -> Report:
    """Return the report to present. Replace PASS with SKIP if a gate must not pass.

    A gate does not pass if no speed was judged, if only part of a log was read, or if some paths are unknown. No
    command passes with a speed far above the expected one.
    """
    doubts = [finding for finding in report.findings if finding.severity not in (Verdict.PASS, Verdict.SKIP)]
    is_noise = report.verdict is Verdict.INCONCLUSIVE and all(doubt.id == TOO_NOISY for doubt in doubts)
    is_unseen = report.verdict in _DOUBTS and any(doubt.id == PATH_UNKNOWN for doubt in doubts)
    passes = (
        report.verdict is Verdict.PASS or is_noise or (is_unseen and (exit_style or metadata.command_record.is_gate))
    )
    if not report.complete or not passes:
        return report
    is_asked = exit_style or is_strict(metadata.options)
    is_part = any(finding.id == EXCERPT for finding in report.findings)
    unseen = is_unseen or any(row.conclusion == Conclusion.UNKNOWN for row in report.rows(FallbackRow))
    unjudged = (is_asked or metadata.command_record.is_gate) and (figures.is_unjudged or unseen)
    return replace(report, verdict=Verdict.SKIP) if figures.doubt or unjudged or (is_asked and is_part) else report


MOST_CHARACTERS = 160  # Terminals, chats and monitoring systems show this many characters in one line
ALWAYS, NEXT, SOON, LATER, LAST = range(5)
"""Importance of a part. ALWAYS parts are kept. NEXT parts are added if their shortest wording fits together with
the command. The others are added in this order if they fit.
"""


class LinePart(Struct, frozen=True):
    """A part of the last line: its importance, and its wordings from longest to shortest."""

    wordings: tuple[str, ...]
    importance: int = ALWAYS


def part(*wordings: str, importance: int = ALWAYS) -> LinePart:
    """Make a part from wordings. Ignore empty wordings."""
    clean = (" ".join(wording.replace("; ", ", ").split()).rstrip(".,:; ") for wording in wordings)
    return LinePart(tuple(filter(None, clean)), importance)


def last_line(
    verdict: Verdict, origin: str, parts: Sequence[LinePart], ends: Sequence[str] = (), most: int | None = None
) -> str:
    """Compose the last line from its parts, in the order of `parts`.

    The most important part is placed first, with its longest wording that fits. Parts that do not fit are omitted.
    Parts and commands are never cut, except that a first part that is too long is cut after a word. The first of `ends`
    that fits is appended.
    """
    head = f"{verdict} (simulated)" if origin == Origin.SIMULATED else str(verdict)
    parts = [part for part in parts if part.wordings]
    chosen = {index: part.wordings[-1] for index, part in enumerate(parts) if part.importance == ALWAYS}

    def line(chosen: dict[int, str], action: str) -> str:
        said = ", ".join(chosen[index] for index in sorted(chosen))
        end = "" if said.endswith("…") else "."
        return f"{head}: {said}" + (f"{end} {action}" if action else "") if said else head

    most = most or MOST_CHARACTERS
    action = next((end for end in ends if end and len(line(chosen, end)) <= most), "")
    for index, part in enumerate(parts):
        if part.importance == NEXT and len(line({**chosen, index: part.wordings[-1]}, action)) <= most:
            chosen[index] = part.wordings[-1]
    for index in sorted(range(len(parts)), key=lambda index: parts[index].importance):
        for wording in parts[index].wordings:
            if len(line({**chosen, index: wording}, action)) <= most:
                chosen[index] = wording
                break
    text = line(chosen, action)
    return text if len(text) <= most else text[: most - 1].rpartition(" ")[0].rstrip(",:") + " …"
