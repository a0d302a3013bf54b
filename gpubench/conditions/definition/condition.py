"""A condition: one thing that can be wrong, with its only detector, severity and cure."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gpubench.conditions.definition.circumstances import Circumstances
from gpubench.conditions.definition.explains import EXPLAINS, NOTHING, Explains
from gpubench.conditions.definition.log_evidence import LoggedReason, Staged
from gpubench.conditions.definition.severity import SEVERITIES
from gpubench.model.paths.evidence import Confidence
from gpubench.model.paths.nccl_log import LogFacts
from gpubench.model.paths.selection import Pair
from gpubench.model.results.rows.causes import Effect
from gpubench.model.terms.verdict import Finding, Verdict

BESIDE = (Effect.SLOW, Effect.WRONG, Effect.APPLICATION)
"""Effects that are worth knowing where they explain no host memory."""


_MOST_SUBJECTS = 4
_MOST_SEEN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A condition as it was met somewhere.

    `gpus` are the positions of the GPUs whose paths it touches, None for all of the run; `pairs` the ordered pairs
    alone that it touches, where it is a matter of pairs. `names` are what it is on, one by one, as findings name it,
    and `heading` what stands for all of them. Cure, severity and so on are said where they are not the condition's:
    a figure that is a little low is a WARN. A `quiet` one explains paths and is no finding of its own.
    """

    subject: str
    seen: str
    confidence: Confidence = Confidence.PROVEN
    gpus: frozenset[int] | None = None
    pairs: frozenset[Pair] | None = None
    names: tuple[str, ...] = ()
    heading: str = ""
    effects: tuple[Effect, ...] = ()
    severity: Verdict | None = None
    expected: str = ""
    likely: str = ""
    cure: str = ""
    quiet: bool = False

    def touches(self, pair: Pair) -> bool:
        """True if a pair's path is touched."""
        if self.pairs is not None:
            return pair in self.pairs
        return self.gpus is None or not self.gpus.isdisjoint(pair)


@dataclass(frozen=True, slots=True)
class Unread:
    """The reason why it is not known whether a condition is there: on what, and what could not be read."""

    subject: str
    reason: str


Found = Iterator[Sighting | Unread]
Look = Callable[[Circumstances], Found]


def nothing_in_facts(_around: Circumstances) -> Found:
    """For conditions that only a log shows."""
    return iter(())


def in_each_node(look: Look) -> Look:
    """A detector that compares no node with another: those with another's facts are looked at where that has it."""

    def found(run: Circumstances) -> Found:
        return look(run) if any(True for _ in look(run.distinct)) else iter(())

    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One thing that can be wrong with a machine, a setting or a job.

    `title` is in the words that people search for, `seen_as` what programs print where it holds; `detection` says what
    `look` looks at; `cure` is a command or setting; `link` the source. `aliases` are ids that it had.

    As a check: `check` is the name of the check that reports it, `expected` what was expected instead and `likely` what
    is behind it; its severity stands in the table of all conditions. Without a check it is told where it stands in the
    way of a path.

    As a cause: what it can explain stands in the table of all causes; `settles` what would settle a doubt; `in_log`
    finds it in NCCL's log of a pair, `in_job` in all that a job logs, where it ended the job; `implies` are the ids of
    those that follow from it and are listed below it. `by_design` marks policies and hardware: nothing to repair.
    `general` marks what is said where nothing more special is found.
    """

    id: str
    title: str
    detection: str
    cure: str
    look: Look
    link: str = ""
    check: str = ""
    expected: str = "none"
    likely: str = ""
    settles: str = ""
    seen_as: tuple[str, ...] = ()
    in_log: Callable[[Staged], LoggedReason | None] | None = None
    in_job: Callable[[LogFacts], Iterator[Sighting]] | None = None
    implies: tuple[str, ...] = ()
    by_design: bool = False
    general: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def severity(self) -> Verdict | None:
        """Its severity in every command; None for a cause alone, which is as grave as its effects."""
        grade = SEVERITIES.get(self.id)
        return None if grade is None else grade.severity

    @property
    def explains(self) -> Explains:
        """What it can explain of paths; nothing where it is no cause."""
        return EXPLAINS.get(self.id, NOTHING)

    @property
    def effects(self) -> tuple[Effect, ...]:
        """The same in words."""
        return self.explains.effects

    def findings(self, run: Circumstances) -> Iterator[Finding]:
        """The findings of this condition's check; a design that somebody may want is none."""
        return self.findings_of(self.look(run))

    def findings_of(self, found: Iterable[Sighting | Unread]) -> Iterator[Finding]:
        """The same of what `look` has found already."""
        return self._told(each for each in found if isinstance(each, Sighting))

    def findings_in_log(self, facts: LogFacts) -> Iterator[Finding]:
        """The findings of this condition in a job's log, where that shows what ended the job.

        What is no finding by itself, as a small /dev/shm, is a FAIL where a job died of it.
        """
        if self.in_job is not None:
            yield from self._told(
                replace(each, severity=each.severity or self.severity or Verdict.FAIL) for each in self.in_job(facts)
            )

    def _told(self, sightings: Iterable[Sighting]) -> Iterator[Finding]:
        for each in sightings:
            severity = each.severity or self.severity
            if severity is not None and not each.quiet:
                yield Finding(
                    id=self.id,
                    severity=severity,
                    subject=each.heading or joined(each.names) or each.subject,
                    seen=each.seen,
                    expected=each.expected or self.expected,
                    cause=each.likely or self.likely or self.title,
                    next_command=each.cure or self.cure,
                    subjects=each.names or (each.subject,),
                )


@dataclass(frozen=True, slots=True)
class Family:
    """Conditions of one kind: the module's name, its title, and its conditions, those to look at first first."""

    name: str
    title: str
    conditions: tuple[Condition, ...]

    @classmethod
    def of(
        cls,
        name: str,
        title: str,
        *conditions: Condition,
        link: str = "",
    ) -> "Family":
        """A family of some conditions: the link is that of all that name none of their own."""
        return cls(name, title, tuple(replace(each, link=each.link or link) for each in conditions))


_PLACEHOLDER = re.compile(r"(?<=-i )GPU\b|(?<=-d )DEVICE\b|(?<=-s )BUS_ID\b")
_NAMED = re.compile(
    r"(?:(?P<host>\S+) )?(?:GPU(?P<index>\d+)|(?P<device>\S+|the uplink of switch) "
    r"\(?(?P<bus_id>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\)?)"
)


def with_ids(command: str, subjects: Iterable[str]) -> str:
    """A command with the ids of the devices it is for: all GPUs of one node, or one device where it takes only one."""
    if not _PLACEHOLDER.search(command):
        return command
    devices = [named for each in subjects for end in _ends(each) if (named := _NAMED.fullmatch(end))]
    if not devices:
        return command
    hosts = list(dict.fromkeys(each["host"] for each in devices))
    gpus = ",".join(dict.fromkeys(each["bus_id"] or each["index"] for each in devices if each["host"] == hosts[0]))
    ids = {"GPU": gpus, "DEVICE": devices[0]["device"], "BUS_ID": devices[0]["bus_id"]}
    filled = _PLACEHOLDER.sub(lambda found: ids[found[0]] or found[0], command)
    return f"on {hosts[0]}: {filled}; likewise on {joined(filter(None, hosts[1:]))}" if len(hosts) > 1 else filled


def _ends(subject: str) -> list[str]:
    """Both GPUs of a pair, each with the host that leads the first; of anything else the subject itself."""
    first, *others = subject.split(" → ")
    host = first.rpartition(" GPU")[0]
    return [first, *(f"{host} {each}".strip() for each in others)]


def joined(texts: Iterable[str], most: int = _MOST_SUBJECTS) -> str:
    """The first few of some texts, each once, and how many more there are."""
    distinct = list(dict.fromkeys(filter(None, texts)))
    rest = len(distinct) - most
    return ", ".join(distinct[:most]) + (f" and {rest} more" if rest > 0 else "")


def joined_seen(texts: Sequence[str]) -> str:
    """The same of what was seen, in sentences."""
    distinct = list(dict.fromkeys(filter(None, texts)))
    more = len(distinct) - _MOST_SEEN
    return "; ".join(distinct[:_MOST_SEEN]) + (f"; and {more} more" if more > 0 else "")
