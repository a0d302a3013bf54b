"""Verdicts, findings, and the exit code they lead to."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from gpubench import errors


class Verdict(StrEnum):
    """The judgement of a subject. ERROR could not be measured, and is never shown as PASS or FAIL."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"
    ERROR = "ERROR"
    INCONCLUSIVE = "INCONCLUSIVE"


WORST_FIRST = (Verdict.FAIL, Verdict.ERROR, Verdict.INCONCLUSIVE, Verdict.WARN, Verdict.PASS, Verdict.SKIP)


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of a whole: any FAIL fails it, else any ERROR, and so on; nothing at all is SKIP."""
    seen = set(verdicts)
    return next((verdict for verdict in WORST_FIRST if verdict in seen), Verdict.SKIP)


def exit_code(verdict: Verdict) -> int:
    """FAIL → 1, ERROR → 3, everything else → 0."""
    if verdict is Verdict.FAIL:
        return errors.JUDGED_AND_FAILED
    return errors.COULD_NOT_MEASURE if verdict is Verdict.ERROR else errors.DONE


WRONG_DATA = "wrong-data"
"""The finding that fails a run whether or not it is strict."""

STRAGGLER = "straggler"
"""The finding that names the rank that the others wait for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something a person should know: a stable id, on what, seen, expected, the likely cause, the next command.

    `subjects` names all it is about where `subject` shortens them.
    """

    id: str
    severity: Verdict
    subject: str
    seen: str
    expected: str
    cause: str
    next_command: str
    subjects: tuple[str, ...] = ()

    def softened(self) -> "Finding":
        """The finding as a warning where it would fail: a benchmark fails by itself only for wrong data."""
        judged_always = self.id == WRONG_DATA
        return replace(self, severity=Verdict.WARN) if self.severity is Verdict.FAIL and not judged_always else self
