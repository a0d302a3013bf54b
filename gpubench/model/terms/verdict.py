"""Verdicts and findings, the exit code they lead to, and the origin of figures."""

import re
from collections.abc import Collection, Iterable
from enum import StrEnum

from gpubench import errors
from gpubench.model.terms.ranks import GPUS_ARE_SPLIT
from gpubench.records import dataclass


class Origin(StrEnum):
    """The origin of a figure or a machine."""

    MEASURED = "measured"
    SIMULATED = "simulated"
    RECORDED = "recorded"


class Verdict(StrEnum):
    """The judgement of a subject. ERROR could not be measured, and is never shown as PASS or FAIL."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"
    ERROR = "ERROR"
    INCONCLUSIVE = "INCONCLUSIVE"


WORST_FIRST = (Verdict.FAIL, Verdict.ERROR, Verdict.INCONCLUSIVE, Verdict.WARN, Verdict.PASS, Verdict.SKIP)
_PLACES: dict[str, int] = {verdict: place for place, verdict in enumerate(WORST_FIRST)}


def gravity(verdict: str) -> int:
    """The place of a verdict among all of them, 0 for the worst."""
    return _PLACES[verdict]


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of a whole: any FAIL fails it, else any ERROR, and so on; nothing at all is SKIP."""
    seen = set(verdicts)
    return next((verdict for verdict in WORST_FIRST if verdict in seen), Verdict.SKIP)


def overall_of_rows(verdicts: Iterable[Verdict]) -> Verdict:
    """As `overall`, but rows that are slow decide before rows that could not be judged."""
    seen = set(verdicts)
    return overall(seen - {Verdict.INCONCLUSIVE} if Verdict.WARN in seen else seen)


def exit_code(verdict: Verdict) -> int:
    """The exit code that a verdict stands for: FAIL → 1, ERROR → 3, everything else → 0."""
    if verdict is Verdict.FAIL:
        return errors.JUDGED_AND_FAILED
    return errors.COULD_NOT_MEASURE if verdict is Verdict.ERROR else errors.DONE


WRONG_DATA = "wrong-data"  # The finding that fails every command, strict or not
HOST_STAGED = "host-staged"  # The finding that transfers go through host memory
SLOW_UNEXPLAINED = "slow-unexplained"  # The finding on figures that are slower than expected, and that nothing explains
STRAGGLER = "straggler"  # The finding that names the rank that the others wait for
_GRAVE = (Verdict.FAIL, Verdict.ERROR)
_MOST_CONSEQUENCES = 3  # Consequences of a finding that people are shown; files have all

FIGURES = (
    *(HOST_STAGED, "p2p-slow", "p2p-asymmetric", "p2p-slower-than-staging", "host-copies-slow"),
    *(SLOW_UNEXPLAINED, "slow-range", STRAGGLER),
)
"""Findings that are figures: the likely reason of one is worth saying, and a condition may explain it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something a person should know: on what, what was seen and expected, the likely cause, what to do next."""

    id: str  #: stable, for machines to match
    severity: Verdict  #: verdict on the subject
    subject: str  #: what it is about, shortened
    seen: str  #: what was seen
    expected: str  #: what was expected
    cause: str  #: the likely reason
    next_command: str  #: what to type next
    subjects: tuple[str, ...] = ()  #: all that the finding is about, where `subject` shortens them
    consequences: tuple[str, ...] = ()  #: what follows from it, a line each
    expected_percent: float | None = None  #: the share of the expected speed that is left, at worst; null if not known

    def __repr__(self) -> str:
        return f"<{self.severity} {self.id}: {self.subject}: {self.seen}>"

    @property
    def details(self) -> tuple[tuple[str, str], ...]:
        """The parts below its first line, each with the label that people read; of many consequences a few."""
        return (
            *(("seen", self.seen), ("expected", self.expected), ("likely", self.cause), ("try", self.next_command)),
            *(("explains", line) for line in _shortened(self.consequences)),
        )


def hosts_in_trouble(findings: Iterable[Finding], hosts: Collection[str]) -> set[str]:
    """The hosts that a FAIL or an ERROR names."""
    named = (subject for each in findings if each.severity in _GRAVE for subject in each.subjects or (each.subject,))
    return {subject.partition(" ")[0].rstrip(",") for subject in named} & {*hosts}


def _shortened(lines: tuple[str, ...]) -> tuple[str, ...]:
    left_out = len(lines) - _MOST_CONSEQUENCES
    return lines if left_out <= 0 else (*lines[:_MOST_CONSEQUENCES], f"and {left_out} more")


DOUBTED_TIMES = 1.5  # A speed so many times what is expected, or so many times less and not slow, fits no expectation
_OF_NICS = " of assumed NICs (--nics tells others)"
_DOUBT = re.compile(rf"[\d.]+ times what .+? expects?\b(?:{re.escape(_OF_NICS)})?|{GPUS_ARE_SPLIT}")
_PROFILE = re.compile(r"profile [^\s,;]+")


def doubt(times: float, source: str) -> str:
    """'2.6 times what profile hgx-b200-8 expects': why a speed is not judged."""
    named = _PROFILE.search(source)
    return f"{times:.1f} times what {named[0] if named else source.partition(';')[0]} expects" + _OF_NICS * (
        "--nics" in source
    )


def doubt_in(note: str | None) -> str:
    """Why the speed of a row is not judged, by its note; empty if the note does not say."""
    found = _DOUBT.search(note or "")
    return found[0] if found else ""
