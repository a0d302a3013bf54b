"""A condition: one thing that can be wrong, with its only detector, its sightings, severity and cure."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpubench.conditions.definition.circumstances import Circumstances, LoggedReason, Staged
from gpubench.conditions.definition.policy import EXPLAINS, NOTHING, SEVERITIES, Explains
from gpubench.model.facts.health import Errors
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import GpuFacts, NicFacts
from gpubench.model.paths.evidence import Confidence
from gpubench.model.paths.nccl_log import Complaint, FailedCall, LogFacts
from gpubench.model.paths.topology import Device, Topology
from gpubench.model.paths.transport import Pair
from gpubench.model.results.report import Effect
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


def sureness(errors: Errors) -> Confidence:
    """The confidence that counted errors slow anything down now: totals do not say when they were counted."""
    if not errors.meanwhile:
        return Confidence.WEAK
    return Confidence.PROVEN if errors.grave else Confidence.LIKELY


def of_node(
    run: Circumstances,
    number: int,
    seen: str,
    confidence: Confidence = Confidence.PROVEN,
    *words: str,
    **more: Any,
) -> Sighting:
    """On a node, which touches the paths of all its GPUs; `words` name what on it."""
    more = {"gpus": run.gpus_of(number), "names": () if words else (run.named(number),), **more}
    return Sighting(subject=run.on(number, *words), seen=seen, confidence=confidence, **more)


def of_gpu(
    run: Circumstances, position: int, seen: str, confidence: Confidence = Confidence.PROVEN, **more: Any
) -> Sighting:
    """On one GPU."""
    known, node = run.wiring.gpu(position), run.wiring.gpus[position].node
    names = () if known is None else (run.named(node, known),)
    here = frozenset((position,))
    return Sighting(subject=run.name(position), seen=seen, confidence=confidence, gpus=here, **{"names": names, **more})


def of_every_node(
    seen: Callable[[Topology], str | None], confidence: Confidence = Confidence.PROVEN, unknown: str = ""
) -> Look:
    """A detector that looks at each node by itself: what is seen of it, empty where nothing is; where nothing is, why
    a fact of the driver's settings, or the kernel's, is not known.
    """

    @in_each_node
    def look(run: Circumstances) -> Found:
        for number, node in run.nodes.items():
            found = seen(node)
            if found:
                yield of_node(run, number, found, confidence)
            else:
                reasons = node.snapshot.driver_settings.unknown, node.snapshot.kernel.unknown
                yield from (each for known in reasons for each in unread(run.on(number), known, unknown))

    return look


def of_every_rank(seen: Callable[[RankFacts], str | None], confidence: Confidence = Confidence.PROVEN) -> Look:
    """A detector that looks at each process by itself."""
    return lambda run: (of_ranks(run, [it], found, confidence) for it in run.facts if (found := seen(it)))


def of_every_gpu(seen: Callable[[GpuFacts], str | None], confidence: Confidence = Confidence.PROVEN) -> Look:
    """A detector that looks at each GPU by itself: what is seen of it, empty where nothing is."""
    return in_each_node(
        lambda run: (of_gpu(run, at, found, confidence) for at, _, gpu in run.gpus() if (found := seen(gpu)))
    )


def of_device(
    run: Circumstances,
    number: int,
    device: Device,
    seen: str,
    confidence: Confidence = Confidence.PROVEN,
    **more: Any,
) -> Sighting:
    """On a device of a node: a GPU's trouble is its own, a NIC's is that of all GPUs of the node."""
    gpus = run.gpus_of(number)
    if isinstance(device, GpuFacts):
        gpus = frozenset(each for each in gpus if run.wiring.gpu(each) is device)
    names = (run.named(number, device),)
    subject = run.on(number, device.device)
    return Sighting(subject=subject, seen=seen, confidence=confidence, gpus=gpus, **{"names": names, **more})


def of_pairs(
    run: Circumstances,
    pairs: Collection[Pair],
    seen: str,
    confidence: Confidence = Confidence.PROVEN,
    **more: Any,
) -> Sighting:
    """Between ordered pairs of GPUs."""
    names = tuple(map(run.pair_name, sorted(pairs)))
    return Sighting(
        subject=joined(names), seen=seen, confidence=confidence, pairs=frozenset(pairs), **{"names": names, **more}
    )


def of_ranks(
    run: Circumstances,
    ranks: Sequence[RankFacts],
    seen: str,
    confidence: Confidence = Confidence.PROVEN,
    **more: Any,
) -> Sighting:
    """On ranks of one node."""
    gpus = frozenset(gpu for each in ranks for gpu in run.gpus_of_rank(each))
    subject = run.on(ranks[0].node, rank_names(ranks))
    return Sighting(subject=subject, seen=seen, confidence=confidence, **{"gpus": gpus, **more})


def rank_names(ranks: Sequence[RankFacts]) -> str:
    """'rank 3', 'ranks 0, 1'."""
    return f"rank{'s' if len(ranks) > 1 else ''} {joined(str(each.rank) for each in ranks)}"


def unread(subject: str, known: Mapping[str, str], name: str) -> Iterator[Unread]:
    """The reason why a fact could not be read, where that is known."""
    if known.get(name):
        yield Unread(subject, known[name])


def rdma_nics(node: Topology) -> list[NicFacts]:
    """The NICs of a node that can do RDMA, up or not."""
    return [nic for nic in node.nics if nic.rdma]


def nodes_with_rdma(run: Circumstances) -> Iterator[tuple[int, Topology, list[RankFacts]]]:
    """Nodes with RDMA NICs, and their processes."""
    for number, node in run.nodes.items():
        if rdma_nics(node):
            yield number, node, run.ranks_of(number)


_LONGEST_SEEN = 200

_TAKEN_CARE_OF = re.compile(
    r"gdrwrap|(?:^|/)gdr\w*\.(?:cc|h):|include/net\.h:|ibvwrap|nvmlwrap|net_ib"
    r"|(?:^|/)plugin/|(?:^|/)ras/|socket\.cc:"
)
"""Where errors come from that NCCL may take care of: a plugin, GDRCopy, or verbs that are not there, a socket at the
end. What nobody took care of arrives elsewhere as well.
"""

_RAS = re.compile(r"(?:^|/)ras/")
"""NCCL's own service, which sees peers go when a job ends."""

REMOTE = 6
"""The error code of a remote process that went away, which is none of this one's."""

_CODES = {
    1: "a call of CUDA's failed",
    2: "a call of the system failed",
    3: "an internal check failed",
    4: "an argument is invalid",
    5: "the program calls it wrongly",
    REMOTE: "a remote process exited, or the network to it failed",
}
"""ncclResult_t, as NCCL's functions hand it on."""


@dataclass(frozen=True, slots=True)
class Complained:
    """Finds the complaints that `form` matches, and calls that returned one of `codes`; all are one sighting.

    `of_programs` are those alone that NCCL did not write.
    """

    form: re.Pattern[str]
    codes: frozenset[int] = frozenset()
    severity: Verdict | None = None
    of_programs: bool = False

    def __call__(self, facts: LogFacts) -> Iterator[Sighting]:
        """The sighting in a job's log, where there is one."""
        found = [each for each in facts.complaints if self._is_one(each)]
        calls = self._calls(facts)
        if not found and not calls:
            return
        writers = [*(each.processes for each in found), *(each.processes for each in calls)]
        who = joined(name for names in writers for name in names) or "a program that uses NCCL"
        if found:
            count = sum(each.count for each in found)
            seen = found[0].text[:_LONGEST_SEEN] + (f" ({count} times, or alike)" if count > 1 else "")
        else:
            seen = f"{calls[0].place} -> {calls[0].code}: {_CODES.get(calls[0].code, 'it failed')}"
        yield Sighting(subject=who, seen=seen, severity=self.severity)

    def _calls(self, facts: LogFacts) -> list[FailedCall]:
        """The calls with these codes that somebody has to hear of."""
        calls = [each for each in facts.failed_calls if each.code in self.codes]
        by_ras = any(_RAS.search(each.place) for each in calls)
        if all(_TAKEN_CARE_OF.search(each.place) for each in calls) and (by_ras or REMOTE not in self.codes):
            return []
        return calls

    def without(self, facts: LogFacts) -> LogFacts:
        """The same log without these complaints, which are explained."""
        return replace(facts, complaints=tuple(each for each in facts.complaints if not self._is_one(each)))

    def _is_one(self, complaint: Complaint) -> bool:
        is_of_nccl = bool(complaint.processes)
        return not (self.of_programs and is_of_nccl) and self.form.search(complaint.text) is not None


def complained(pattern: str, codes: Iterable[int] = ()) -> Complained:
    """For complaints in some words, in upper or lower case, and for error codes."""
    return Complained(re.compile(pattern, re.ASCII | re.IGNORECASE), frozenset(codes))


def doubted(pattern: str) -> Complained:
    """For warnings after which some releases go on and others give up."""
    return replace(complained(pattern), severity=Verdict.WARN)


def complaint(
    id_: str,
    title: str,
    pattern: str,
    *,
    cure: str,
    likely: str,
    expected: str,
    link: str,
    seen_as: tuple[str, ...],
    codes: Iterable[int] = (),
    detection: str = "NCCL's log, or the error that the program reports",
    general: bool = False,
    of_programs: bool = False,
) -> Condition:
    """A condition that shows in complaints of some words, or in error codes, and in no fact of a machine."""
    return Condition(
        id=id_,
        title=title,
        seen_as=seen_as,
        detection=detection,
        expected=expected,
        likely=likely,
        cure=cure,
        link=link,
        look=nothing_in_facts,
        in_job=replace(complained(pattern, codes), of_programs=of_programs),
        general=general,
    )
