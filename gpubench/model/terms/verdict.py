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
    """The origin of a value or a machine."""

    MEASURED = "measured"
    SIMULATED = "simulated"
    RECORDED = "recorded"


class Verdict(StrEnum):
    """The judgement of a subject. ERROR means that it could not be measured, which is neither PASS nor FAIL."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"
    ERROR = "ERROR"
    INCONCLUSIVE = "INCONCLUSIVE"


WORST_FIRST = (Verdict.FAIL, Verdict.ERROR, Verdict.INCONCLUSIVE, Verdict.WARN, Verdict.PASS, Verdict.SKIP)
_PLACES: dict[str, int] = {verdict: place for place, verdict in enumerate(WORST_FIRST)}


def gravity(verdict: str) -> int:
    """Return the rank of a verdict by severity, 0 for the worst."""
    return _PLACES[verdict]


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst verdict: FAIL, else ERROR, and so on. SKIP if there is none."""
    seen = set(verdicts)
    return next((verdict for verdict in WORST_FIRST if verdict in seen), Verdict.SKIP)


def worst_row_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst verdict, but let slow rows decide before rows that could not be judged."""
    seen = set(verdicts)
    return worst_verdict(seen - {Verdict.INCONCLUSIVE} if Verdict.WARN in seen else seen)


def exit_code(verdict: Verdict) -> int:
    """Return the exit code of a verdict: FAIL → 1, ERROR → 3, everything else → 0."""
    if verdict is Verdict.FAIL:
        return errors.JUDGED_AND_FAILED
    return errors.COULD_NOT_MEASURE if verdict is Verdict.ERROR else errors.DONE


WRONG_DATA = "wrong-data"
HOST_STAGED = "host-staged"
SLOW_UNEXPLAINED = "slow-unexplained"
STRAGGLER = "straggler"
_MOST_CONSEQUENCES = 3  # Shown to people. Files have all.

FIGURES = (
    *(HOST_STAGED, "p2p-slow", "p2p-asymmetric", "p2p-slower-than-staging", "host-copies-slow"),
    *(SLOW_UNEXPLAINED, "slow-range", STRAGGLER),
)
"""Findings about measured values. A condition may explain them."""


class Cure(Struct, frozen=True):
    """What to do: commands to paste in this order, and one or two sentences about them.

    The cure of a broken cable, for example, has no command, only a comment.
    """

    commands: tuple[str, ...] = ()
    comment: str = ""

    @classmethod
    def of(cls, *commands: str, comment: str = "") -> "Cure":
        return cls(commands, comment)

    @property
    def details(self) -> "tuple[Detail, ...]":
        """The commands and the comment, one per line."""
        commands = [Detail("try", command, is_command=True) for command in self.commands]
        return (*commands, *([Detail("try", self.comment)] if self.comment else []))

    @property
    def text_lines(self) -> tuple[str, ...]:
        """Its lines, the first of which starts with `try:`."""
        return tuple(detail.text if number else f"try: {detail.text}" for number, detail in enumerate(self.details))

    @property
    def text(self) -> str:
        """Commands and comment in one text, for a single column."""
        return ". ".join(filter(None, ("; ".join(self.commands), self.comment)))

    def add_comment(self, comment: str) -> "Cure":
        return Cure(self.commands, f"{self.comment} {comment}".strip())

    def __bool__(self) -> bool:
        return bool(self.commands or self.comment)


NO_CURE = Cure()


def merge_cures(cures: Iterable[Cure]) -> Cure:
    """Merge cures without duplicate commands and comments."""
    cures = tuple(cures)
    commands = dict.fromkeys(command for cure in cures for command in cure.commands)
    comments = dict.fromkeys(cure.comment for cure in cures if cure.comment)
    return Cure(tuple(commands), " ".join(comments))


class Detail(NamedTuple):
    """A labelled line below the first line of a finding."""

    label: str
    text: str
    is_command: bool = False


class Finding(Struct, frozen=True):
    """One thing to report: its subject, what was seen and expected, the likely cause, and the cure."""

    id: str  #: stable, for machines to match
    severity: Verdict  #: verdict on the subject
    subject: str  #: what it is about, shortened
    seen: str  #: what was seen
    expected: str  #: what was expected
    cause: str  #: the likely reason
    cure: Cure
    subjects: tuple[str, ...] = ()  #: all that the finding is about, where `subject` shortens them
    consequences: tuple[str, ...] = ()  #: what follows from it, a line each
    expected_percent: float | None = None  #: the share of the expected speed that is left, at worst; null if not known
    places: tuple[DevicePlace, ...] = ()  #: nodes and devices that it is about

    def __repr__(self) -> str:
        return f"<{self.severity} {self.id}: {self.subject}: {self.seen}>"

    @property
    def commands(self) -> tuple[str, ...]:
        """Commands to run, in this order; each can be pasted as it stands."""
        return self.cure.commands

    @property
    def comment(self) -> str:
        """What to know about the commands, or what to do if there is no command."""
        return self.cure.comment

    @property
    def next_command(self) -> str:
        """The first of `commands`; empty if there is none."""
        return self.commands[0] if self.commands else ""

    @property
    def node(self) -> str | None:
        """Host name of the node; null if the finding is about several nodes or about none."""
        nodes = {place.node for place in self.places}
        return nodes.pop() if len(nodes) == 1 else None

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices, such as GPU5; two of a pair; `places` has their bus ids."""
        return tuple(dict.fromkeys(place.device for place in self.places if place.device))

    @property
    def details(self) -> tuple[Detail, ...]:
        """The lines below its first one, with at most three consequences."""
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
        """The lines below its first one as text, with all consequences."""
        told = [f"{detail.label}: {detail.text}" for detail in self.details if detail.label not in ("try", "explains")]
        return [*told, *self.cure.text_lines, *(f"explains: {line}" for line in self.consequences)]

    def to_record(self) -> dict[str, Any]:
        """Convert to plain data, with the columns in FINDING_COLUMNS."""
        record = {name: getattr(self, name) for name in FINDING_COLUMNS} | {"places": map(asdict, self.places)}
        return {name: list(value) if isinstance(value, (tuple, map)) else value for name, value in record.items()}

    @classmethod
    def from_record(cls, record: Any, where: str = "") -> "Finding":
        """Convert the result of `to_record` back, also of versions that had one text instead of commands and comment.

        Raises UsageError that begins with `where`.
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
    """Return the hosts with a FAIL or an ERROR."""
    failed = [finding for finding in findings if finding.severity in (Verdict.FAIL, Verdict.ERROR)]
    return {place.node for finding in failed for place in finding.places} & {*hosts}


DOUBTED_FACTOR = 1.5  # If a speed differs from its expectation by this factor and is not slow, doubt the expectation
_OF_NICS = " of assumed NICs (--nics tells others)"
_DOUBT = re.compile(rf"[\d.]+ times what .+? expects?\b(?:{re.escape(_OF_NICS)})?|{GPUS_ARE_SPLIT}")
_PROFILE = re.compile(r"profile [^\s,;]+")


def describe_doubt(times: float, source: str) -> str:
    """Return why a speed is not judged: '2.6 times what profile hgx-b200-8 expects'."""
    named = _PROFILE.search(source)
    expecting = named[0] if named else source.partition(";")[0]
    return f"{times:.1f} times what {expecting} expects{_OF_NICS if '--nics' in source else ''}"


def parse_doubt(note: str | None) -> str:
    """Return why a row's speed is not judged, from its note, or ''."""
    found = _DOUBT.search(note or "")
    return found[0] if found else ""
