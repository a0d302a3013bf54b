"""Verdicts and findings, their exit codes, and the origin of values."""

import re
from collections.abc import Collection, Iterable
from enum import StrEnum
from typing import Any, NamedTuple

from msgspec.structs import asdict

from gpubench import errors
from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.plain import from_plain
from gpubench.model.terms.ranks import GPUS_ARE_SPLIT, DevicePlace


class Origin(StrEnum):
    """Whether a value or a machine was measured, simulated, or read from a recording."""

    MEASURED = "measured"
    SIMULATED = "simulated"
    RECORDED = "recorded"


class Verdict(StrEnum):
    """The judgement of a subject. ERROR means that the subject could not be measured, so it is neither PASS nor
    FAIL.
    """

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"
    ERROR = "ERROR"
    INCONCLUSIVE = "INCONCLUSIVE"


WORST_FIRST = (Verdict.FAIL, Verdict.ERROR, Verdict.INCONCLUSIVE, Verdict.WARN, Verdict.PASS, Verdict.SKIP)
_PLACES: dict[str, int] = {verdict: place for place, verdict in enumerate(WORST_FIRST)}


def gravity(verdict: str) -> int:
    """Return the position of a verdict from worst to best. The worst verdict, FAIL, has position 0."""
    return _PLACES[verdict]


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst verdict, in the order of `WORST_FIRST`. SKIP if there are no verdicts."""
    seen = set(verdicts)
    return next((verdict for verdict in WORST_FIRST if verdict in seen), Verdict.SKIP)


def worst_row_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst verdict of rows. If any row is slow (WARN), ignore rows that are INCONCLUSIVE."""
    seen = set(verdicts)
    return worst_verdict(seen - {Verdict.INCONCLUSIVE} if Verdict.WARN in seen else seen)


def exit_code(verdict: Verdict) -> int:
    """Return the exit code for a verdict: 1 for FAIL, 3 for ERROR, 0 for everything else."""
    if verdict is Verdict.FAIL:
        return errors.JUDGED_AND_FAILED
    return errors.COULD_NOT_MEASURE if verdict is Verdict.ERROR else errors.DONE


WRONG_DATA = "wrong-data"
HOST_STAGED = "host-staged"
SLOW_UNEXPLAINED = "slow-unexplained"
STRAGGLER = "straggler"
PATH_REQUIRED = "path-required"
_MOST_CONSEQUENCES = 3  # Maximum number of consequences in reports for people. Result files contain all of them.

FIGURES = (
    *(HOST_STAGED, "p2p-slow", "p2p-asymmetric", "p2p-slower-than-staging", "host-copies-slow"),
    *(SLOW_UNEXPLAINED, "slow-range", STRAGGLER),
)
"""Ids of findings about measured values. A finding about a setting or a device may explain them."""


class Cure(Struct, frozen=True):
    """What to do about a finding: commands to paste, in this order, and one or two sentences about them.

    Some cures have only a comment. For example, no command replaces a broken cable.
    """

    commands: tuple[str, ...] = ()
    comment: str = ""

    @classmethod
    def of(cls, *commands: str, comment: str = "") -> "Cure":
        return cls(commands, comment)

    @property
    def details(self) -> "tuple[Detail, ...]":
        """The commands and the comment of the cure, one per line."""
        commands = [Detail("try", command, is_command=True) for command in self.commands]
        return (*commands, *([Detail("try", self.comment)] if self.comment else []))

    @property
    def text_lines(self) -> tuple[str, ...]:
        """The lines of the cure as text. The first line starts with `try:`."""
        return tuple(detail.text if number else f"try: {detail.text}" for number, detail in enumerate(self.details))

    @property
    def text(self) -> str:
        """The commands and the comment of the cure as one text, for formats with a single column."""
        return ". ".join(filter(None, ("; ".join(self.commands), self.comment)))

    def add_comment(self, comment: str) -> "Cure":
        return Cure(self.commands, f"{self.comment} {comment}".strip())

    def __bool__(self) -> bool:
        return bool(self.commands or self.comment)


NO_CURE = Cure()


def merge_cures(cures: Iterable[Cure]) -> Cure:
    """Combine cures into one. Drop duplicate commands and comments."""
    cures = tuple(cures)
    commands = dict.fromkeys(command for cure in cures for command in cure.commands)
    comments = dict.fromkeys(cure.comment for cure in cures if cure.comment)
    return Cure(tuple(commands), " ".join(comments))


class Detail(NamedTuple):
    """A labelled line below the first line of a finding in a report."""

    label: str
    text: str
    is_command: bool = False


class Finding(Struct, frozen=True):
    """One problem or remark: the subject, the observed and the expected state, the likely cause, and the cure."""

    id: str  #: stable identifier, for programs that read results
    severity: Verdict  #: verdict on the subject
    subject: str  #: devices, ranks or settings with the problem (long lists are shortened)
    seen: str  #: the observed state or value
    expected: str  #: the expected state or value
    cause: str  #: the likely cause
    cure: Cure
    subjects: tuple[str, ...] = ()  #: all devices, ranks or settings with the problem, if `subject` is shortened
    consequences: tuple[str, ...] = ()  #: effects of the problem, one line each
    expected_percent: float | None = None  #: lowest remaining speed in percent of the expected speed; null if unknown
    places: tuple[DevicePlace, ...] = ()  #: the nodes and devices with the problem

    def __repr__(self) -> str:
        return f"<{self.severity} {self.id}: {self.subject}: {self.seen}>"

    @property
    def commands(self) -> tuple[str, ...]:
        """Commands that fix or narrow down the problem, in this order; each can be pasted unchanged."""
        return self.cure.commands

    @property
    def comment(self) -> str:
        """Advice about the commands, or what to do if no command helps."""
        return self.cure.comment

    @property
    def next_command(self) -> str:
        """The first command in `commands`, or empty if there is none."""
        return self.commands[0] if self.commands else ""

    @property
    def node(self) -> str | None:
        """Host name of the affected node; null if several nodes or none are affected."""
        nodes = {place.node for place in self.places}
        return nodes.pop() if len(nodes) == 1 else None

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the affected devices, such as GPU5, or both GPUs of a pair; `places` has their PCI bus ids."""
        return tuple(dict.fromkeys(place.device for place in self.places if place.device))

    @property
    def details(self) -> tuple[Detail, ...]:
        """The lines below the first line of the finding, with at most three consequences."""
        left_out = len(self.consequences) - _MOST_CONSEQUENCES
        consequences = self.consequences[:_MOST_CONSEQUENCES] + ((f"and {left_out} more",) if left_out > 0 else ())
        parts = (("seen", self.seen), ("expected", self.expected), ("likely", self.cause))
        return (
            *(Detail(label, text) for label, text in parts if text),
            *self.cure.details,
            *(Detail("explains", line) for line in consequences),
        )

    @property
    def lines(self) -> list[str]:
        """The lines below the first line of the finding as text, with all consequences."""
        told = [f"{detail.label}: {detail.text}" for detail in self.details if detail.label not in ("try", "explains")]
        return [*told, *self.cure.text_lines, *(f"explains: {line}" for line in self.consequences)]

    def to_record(self) -> dict[str, Any]:
        """Convert the finding to plain data with the columns in FINDING_COLUMNS."""
        record = {name: getattr(self, name) for name in FINDING_COLUMNS} | {"places": map(asdict, self.places)}
        return {name: list(value) if isinstance(value, (tuple, map)) else value for name, value in record.items()}

    @classmethod
    def from_record(cls, record: Any, where: str = "") -> "Finding":
        """Convert plain data from `to_record` back to a finding.

        Older versions wrote one text instead of commands and a comment. Raises UsageError with a message that starts
        with `where`.
        """
        if isinstance(record, dict) and "cure" not in record:
            cure = {name: record[name] for name in ("commands", "comment") if name in record}
            fields = {name: value for name, value in record.items() if name not in _DERIVED}
            record = fields | {"cure": cure or {"comment": record.get("next_command", "")}}
        return from_plain(cls, record, where)


_DERIVED = ("next_command", "commands", "comment", "node", "devices")
FINDING_COLUMNS = (
    *("id", "severity", "subject", "seen", "expected", "cause", "next_command", "subjects", "consequences"),
    *("commands", "comment", "node", "devices", "places", "expected_percent"),
)


def failing_hosts(findings: Iterable[Finding], hosts: Collection[str]) -> set[str]:
    """Return the hosts that have a finding with FAIL or ERROR."""
    failed = [finding for finding in findings if finding.severity in (Verdict.FAIL, Verdict.ERROR)]
    return {place.node for finding in failed for place in finding.places} & {*hosts}


DOUBTED_FACTOR = 1.5  # If a speed exceeds its expected value by this factor, the expected value is probably wrong.
_OF_NICS = " of assumed NICs (set others with --nics)"
# Notes of earlier versions end with "--nics tells others".
_DOUBT = re.compile(rf"[\d.]+ times what .+? expects?\b(?: of assumed NICs \([^()]*\))?|{GPUS_ARE_SPLIT}")
_PROFILE = re.compile(r"profile [^\s,;]+")


def describe_doubt(times: float, source: str) -> str:
    """Return the reason why a speed is not judged: '2.6 times what profile hgx-b200-8 expects'."""
    named = _PROFILE.search(source)
    expecting = named[0] if named else source.partition(";")[0]
    return f"{times:.1f} times what {expecting} expects{_OF_NICS if '--nics' in source else ''}"


def parse_doubt(note: str | None) -> str:
    """Return the reason in a row's note why its speed is not judged. '' if the note has none."""
    found = _DOUBT.search(note or "")
    return found[0] if found else ""
