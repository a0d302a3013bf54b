"""A condition: one thing that can be wrong, with its only detector, its sightings, severity and cure."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpubench.conditions.circumstances import Circumstances, LoggedReason, Staged
from gpubench.conditions.policy import EXPLAINS, NOTHING, SEVERITIES, Explains
from gpubench.model.facts.health import Errors
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import GpuFacts, NicFacts
from gpubench.model.paths.nccl_log import Complaint, FailedCall, LogFacts
from gpubench.model.paths.topology import Device, Topology
from gpubench.model.paths.transport import Confidence, Pair
from gpubench.model.results.report import Effect
from gpubench.model.terms.ranks import DevicePlace
from gpubench.model.terms.verdict import NO_CURE, Cure, Finding, Verdict

BESIDE = (Effect.SLOW, Effect.WRONG, Effect.APPLICATION)  # Reported although they do not explain host staging
NONE_EXPECTED = "none"  # What a condition expects that does not say what is healthy: none of it
_MOST_SUBJECTS = 4
_MOST_SEEN = 3


class Sighting(Struct, frozen=True, kw_only=True):
    """A condition as it was detected in one place.

    `gpus` are the positions of the GPUs whose paths it affects, None for all GPUs of the run; `pairs` are the ordered
    pairs it affects, for conditions of pairs. `names` are the subjects as findings name them, `places` their nodes and
    devices, `heading` stands for all of them. Severity, cure and the other texts are empty where the condition's own
    apply. `expected_percent` is the share of the expected speed that is left, if it is known. A `quiet` sighting
    explains paths and is not a finding.
    """

    subject: str
    seen: str
    confidence: Confidence = Confidence.PROVEN
    gpus: frozenset[int] | None = None
    pairs: frozenset[Pair] | None = None
    names: tuple[str, ...] = ()
    places: tuple[DevicePlace, ...] = ()
    heading: str = ""
    effects: tuple[Effect, ...] = ()
    severity: Verdict | None = None
    expected: str = ""
    likely: str = ""
    cure: Cure = NO_CURE
    expected_percent: float | None = None
    quiet: bool = False

    def touches(self, pair: Pair) -> bool:
        """True if it affects the path of this pair."""
        if self.pairs is not None:
            return pair in self.pairs
        return self.gpus is None or not self.gpus.isdisjoint(pair)


class Unread(Struct, frozen=True):
    """A place where a condition could not be looked for, and the reason."""

    subject: str
    reason: str


Found = Iterator[Sighting | Unread]
Look = Callable[[Circumstances], Found]


def nothing_in_facts(_around: Circumstances) -> Found:
    """Find nothing: the detector of conditions that only a log shows."""
    return iter(())


def single_node(look: Look) -> Look:
    """Try a detector that compares no nodes on the distinct nodes first, and run it on all only if it finds any."""

    def found(run: Circumstances) -> Found:
        return look(run) if any(True for _ in look(run.distinct)) else iter(())

    return found


class Condition(Struct, frozen=True, kw_only=True):
    """One thing that can be wrong with a machine, a setting or a job.

    `title` uses the words that people search for, `cure` has the commands and a comment, `link` is a report of somebody
    who met it, or the source. `aliases` are earlier ids.

    As a check: `check` names the check that reports it, `expected` the healthy state and `likely` the likely reason.
    Its severity is in the policy table. A condition without a check is reported where it affects a path.

    As a cause: the policy table says what it can explain; `settles` says how to confirm it; `in_log` finds it in NCCL's
    log of a pair, `in_job` in the log of a whole job that it ended; `implies` are the ids of its consequences, listed
    below it. `by_design` marks policies and hardware: nothing to repair. `general` marks conditions that are
    reported only if no more specific one is found.
    """

    id: str
    title: str
    cure: Cure
    look: Look
    link: str = ""
    check: str = ""
    expected: str = NONE_EXPECTED
    likely: str = ""
    settles: str = ""
    in_log: Callable[[Staged], LoggedReason | None] | None = None
    in_job: Callable[[LogFacts], Iterator[Sighting]] | None = None
    implies: tuple[str, ...] = ()
    by_design: bool = False
    general: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def severity(self) -> Verdict | None:
        """Severity in every command. None for a cause without a check, which is as severe as its effects."""
        grade = SEVERITIES.get(self.id)
        return None if grade is None else grade.severity

    @property
    def explains(self) -> Explains:
        """What it can explain about paths; NOTHING if it is not a cause."""
        return EXPLAINS.get(self.id, NOTHING)

    @property
    def effects(self) -> tuple[Effect, ...]:
        """What it can explain about paths, in words."""
        return self.explains.effects

    def findings(self, run: Circumstances) -> Iterator[Finding]:
        """Return the findings of this condition."""
        return self.findings_of(self.look(run))

    def findings_of(self, found: Iterable[Sighting | Unread]) -> Iterator[Finding]:
        """Convert sightings that `look` found to findings."""
        return self._as_findings(each for each in found if isinstance(each, Sighting))

    def findings_in_log(self, facts: LogFacts) -> Iterator[Finding]:
        """Return the findings in the log of a job. Without a severity of its own the condition is a FAIL."""
        if self.in_job is not None:
            yield from self._as_findings(
                replace(each, severity=each.severity or self.severity or Verdict.FAIL) for each in self.in_job(facts)
            )

    def _as_findings(self, sightings: Iterable[Sighting]) -> Iterator[Finding]:
        for sighting in sightings:
            severity = sighting.severity or self.severity
            if severity is not None and not sighting.quiet:
                yield Finding(
                    id=self.id,
                    severity=severity,
                    subject=sighting.heading or joined(sighting.names) or sighting.subject,
                    seen=sighting.seen,
                    expected=sighting.expected or self.expected,
                    cause=sighting.likely or self.likely or self.title,
                    cure=sighting.cure or self.cure,
                    subjects=sighting.names or (sighting.subject,),
                    expected_percent=sighting.expected_percent,
                    places=sighting.places,
                )


class Family(Struct, frozen=True):
    """Conditions of one kind, in the order of detection."""

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
        """Create a family; `link` applies to conditions that have none."""
        return cls(name, title, tuple(replace(condition, link=condition.link or link) for condition in conditions))


_PLACEHOLDER = re.compile(r"(?<=-i )GPU\b|(?<=-d )DEVICE\b|(?<=-s )BUS_ID\b")


def fill_ids(cure: Cure, places: Sequence[DevicePlace]) -> Cure:
    """Fill the placeholders of a cure's commands, and say where its ids apply if there are several nodes."""
    filled = Cure(
        tuple(fill_placeholders(command, places) for command in cure.commands), fill_placeholders(cure.comment, places)
    )
    hosts = list(dict.fromkeys(place.node for place in places if place.device))
    if filled == cure or len(hosts) == 1:
        return filled
    return filled.add_comment(f"Run this on {hosts[0]}, and with their own device ids on {joined(hosts[1:])}.")


def fill_placeholders(text: str, places: Sequence[DevicePlace]) -> str:
    """Fill the placeholders of a command with ids: all GPUs of the first node, or its first device."""
    devices = [place for place in places if place.device]
    if not devices or not _PLACEHOLDER.search(text):
        return text
    here = [device for device in devices if device.node == devices[0].node]
    gpus = dict.fromkeys(each.bus_id or str(each.device).removeprefix("GPU") for each in here)
    ids = {"GPU": ",".join(gpus), "DEVICE": here[0].device, "BUS_ID": here[0].bus_id}
    return _PLACEHOLDER.sub(lambda found: ids[found[0]] or found[0], text)


def joined(texts: Iterable[str], most: int = _MOST_SUBJECTS) -> str:
    """Join the first few distinct texts, and count the rest."""
    distinct = list(dict.fromkeys(filter(None, texts)))
    rest = len(distinct) - most
    return ", ".join(distinct[:most]) + (f" and {rest} more" if rest > 0 else "")


def join_seen(texts: Sequence[str]) -> str:
    """Join the first few distinct observations, and count the rest."""
    distinct = list(dict.fromkeys(filter(None, texts)))
    more = len(distinct) - _MOST_SEEN
    return "; ".join(distinct[:_MOST_SEEN]) + (f"; and {more} more" if more > 0 else "")


def error_severity(errors: Errors) -> dict[str, Any]:
    """Return confidence, severity and expectation of counted errors. A total alone does not say when they occurred."""
    confidence = Confidence.PROVEN if errors.grave else Confidence.LIKELY
    if not errors.meanwhile:
        return {"confidence": Confidence.WEAK, "expected": errors.expected}
    return {"confidence": confidence, "severity": Verdict.FAIL, "expected": errors.expected}


def node_sighting(
    run: Circumstances,
    number: int,
    seen: str,
    confidence: Confidence = Confidence.PROVEN,
    *words: str,
    **more: Any,
) -> Sighting:
    """Return a sighting on a node, which affects the paths of all its GPUs. `words` name the part of the node."""
    places = run.places(number, *(nic for nic in run.nodes[number].nics if nic.name in words))
    more = {"gpus": run.gpus_of(number), "names": () if words else (run.named(number),), "places": places, **more}
    return Sighting(subject=run.on(number, *words), seen=seen, confidence=confidence, **more)


def gpu_sighting(
    run: Circumstances, position: int, seen: str, confidence: Confidence = Confidence.PROVEN, **more: Any
) -> Sighting:
    """Return a sighting on one GPU."""
    known, node = run.wiring.gpu(position), run.wiring.gpus[position].node
    names = () if known is None else (run.named(node, known),)
    more = {"gpus": frozenset((position,)), "names": names, "places": run.places_of_gpus((position,)), **more}
    return Sighting(subject=run.name(position), seen=seen, confidence=confidence, **more)


def node_detector(
    seen: Callable[[Topology], str | None], confidence: Confidence = Confidence.PROVEN, unknown: str = ""
) -> Look:
    """Return a detector that examines nodes one by one.

    `seen` returns what is wrong, or an empty text. `unknown` names a fact of the driver or the kernel that it needs. If
    that fact could not be read, the detector yields the reason.
    """

    @single_node
    def look(run: Circumstances) -> Found:
        for number, node in run.nodes.items():
            found = seen(node)
            if found:
                yield node_sighting(run, number, found, confidence)
            else:
                reasons = node.snapshot.driver_settings.unknown, node.snapshot.kernel.unknown
                yield from (each for known in reasons for each in unread(run.on(number), known, unknown))

    return look


def rank_detector(seen: Callable[[RankFacts], str | None], confidence: Confidence = Confidence.PROVEN) -> Look:
    """Return a detector that examines processes one by one."""
    return lambda run: (rank_sighting(run, [rank], found, confidence) for rank in run.facts if (found := seen(rank)))


def gpu_detector(seen: Callable[[GpuFacts], str | None], confidence: Confidence = Confidence.PROVEN) -> Look:
    """Return a detector that examines GPUs one by one; `seen` returns what is wrong, or an empty text."""
    return single_node(
        lambda run: (gpu_sighting(run, at, found, confidence) for at, _, gpu in run.gpus() if (found := seen(gpu)))
    )


def device_sighting(
    run: Circumstances,
    number: int,
    device: Device,
    seen: str,
    confidence: Confidence = Confidence.PROVEN,
    **more: Any,
) -> Sighting:
    """Return a sighting on a device. A GPU affects its own paths, a NIC those of all GPUs of the node."""
    gpus = run.gpus_of(number)
    if isinstance(device, GpuFacts):
        gpus = frozenset(each for each in gpus if run.wiring.gpu(each) is device)
    more = {"gpus": gpus, "names": (run.named(number, device),), "places": run.places(number, device), **more}
    return Sighting(subject=run.on(number, device.device), seen=seen, confidence=confidence, **more)


def pair_sighting(
    run: Circumstances,
    pairs: Collection[Pair],
    seen: str,
    confidence: Confidence = Confidence.PROVEN,
    **more: Any,
) -> Sighting:
    """Return a sighting on ordered pairs of GPUs."""
    names = tuple(map(run.pair_name, sorted(pairs)))
    more = {"names": names, "places": run.places_of_gpus(chain.from_iterable(sorted(pairs))), **more}
    return Sighting(subject=joined(names), seen=seen, confidence=confidence, pairs=frozenset(pairs), **more)


def rank_sighting(
    run: Circumstances,
    ranks: Sequence[RankFacts],
    seen: str,
    confidence: Confidence = Confidence.PROVEN,
    **more: Any,
) -> Sighting:
    """Return a sighting on ranks of one node."""
    gpus = frozenset(gpu for rank in ranks for gpu in run.gpus_of_rank(rank))
    more = {"gpus": gpus, "places": run.places_of_ranks(ranks), **more}
    return Sighting(subject=run.on(ranks[0].node, rank_names(ranks)), seen=seen, confidence=confidence, **more)


def rank_names(ranks: Sequence[RankFacts]) -> str:
    """Return 'rank 3' or 'ranks 0, 1'."""
    return f"rank{'s' if len(ranks) > 1 else ''} {joined(str(rank.rank) for rank in ranks)}"


def unread(subject: str, known: Mapping[str, str], name: str) -> Iterator[Unread]:
    """Yield the reason why a fact could not be read, if it is known."""
    if known.get(name):
        yield Unread(subject, known[name])


def rdma_nics(node: Topology) -> list[NicFacts]:
    """Return the NICs of a node that can do RDMA, whether they are up or down."""
    return [nic for nic in node.nics if nic.rdma]


def nodes_with_rdma(run: Circumstances) -> Iterator[tuple[int, Topology, list[RankFacts]]]:
    """Iterate over nodes with RDMA NICs, and their processes."""
    for number, node in run.nodes.items():
        if rdma_nics(node):
            yield number, node, run.ranks_of(number)


_LONGEST_SEEN = 200

_TAKEN_CARE_OF = re.compile(
    r"gdrwrap|(?:^|/)gdr\w*\.(?:cc|h):|include/net\.h:|ibvwrap|nvmlwrap|net_ib"
    r"|(?:^|/)plugin/|(?:^|/)ras/|socket\.cc:"
)
"""Sources of errors that NCCL may handle itself: plugins, GDRCopy, missing verbs, sockets at the job's end. Unhandled
errors appear in other places of the log as well.
"""

_RAS = re.compile(r"(?:^|/)ras/")  # NCCL's RAS service, which notices exiting peers when a job ends
REMOTE = 6  # The error code for a remote process that exited: the fault is not in this process
_CODES = {
    1: "a CUDA call failed",
    2: "a system call failed",
    3: "an internal check failed",
    4: "an argument is invalid",
    5: "the program calls NCCL wrongly",
    REMOTE: "a remote process exited, or the network to it failed",
}
"""Meanings of ncclResult_t."""


class Complained(Struct, frozen=True):
    """Finds complaints that match the pattern `form` and calls that returned one of `codes`, as one sighting.

    With `of_programs` only complaints that NCCL did not write count. Those that match `telling` are shown rather than
    what comes before them. `refined` adds to the sighting what else the log has. Patterns are compiled when they are
    first used: every start imports all conditions, and few starts read a log.
    """

    form: str
    codes: frozenset[int] = frozenset()
    severity: Verdict | None = None
    of_programs: bool = False
    refined: Callable[[Sighting, LogFacts], Sighting] | None = None
    telling: str = ""

    def __call__(self, facts: LogFacts) -> Iterator[Sighting]:
        """Yield one sighting if a job's log has matching complaints or calls."""
        found = [complaint for complaint in facts.complaints if self._is_one(complaint)]
        calls = self._calls(facts)
        if not found and not calls:
            return
        writers = [*(each.processes for each in found), *(each.processes for each in calls)]
        who = joined(name for names in writers for name in names) or "a program that uses NCCL"
        if found:
            count = sum(each.count for each in found)
            telling = (each for each in found if self.telling and re.search(self.telling, each.text, re.IGNORECASE))
            shown = next(telling, found[0])
            seen = shown.text[:_LONGEST_SEEN] + (f" ({count} lines like this)" if count > 1 else "")
        else:
            call = calls[0]
            meaning = call.warning[:_LONGEST_SEEN] or _CODES.get(call.code, "the call failed")
            seen = (
                f"{meaning} ({call.place} -> {call.code})"
                if call.warning
                else f"{call.place} -> {call.code}: {meaning}"
            )
        sighting = Sighting(subject=who, seen=seen, severity=self.severity)
        yield sighting if self.refined is None else self.refined(sighting, facts)

    def _calls(self, facts: LogFacts) -> list[FailedCall]:
        """Return calls with these codes, unless NCCL handled them itself."""
        calls = [call for call in facts.failed_calls if call.code in self.codes]
        by_ras = any(_RAS.search(call.place) for call in calls)
        if all(_TAKEN_CARE_OF.search(call.place) for call in calls) and (by_ras or REMOTE not in self.codes):
            return []
        return calls

    def without(self, facts: LogFacts) -> LogFacts:
        """Return the log without the complaints that match."""
        return replace(
            facts, complaints=tuple(complaint for complaint in facts.complaints if not self._is_one(complaint))
        )

    def _is_one(self, complaint: Complaint) -> bool:
        is_of_nccl = bool(complaint.processes)
        if self.of_programs and is_of_nccl:
            return False
        return re.search(self.form, complaint.text, re.ASCII | re.IGNORECASE) is not None


def complained(pattern: str, codes: Iterable[int] = ()) -> Complained:
    """Find complaints by a pattern (case is ignored), or failed calls by their error codes."""
    return Complained(pattern, frozenset(codes))


def doubted(pattern: str) -> Complained:
    """Find warnings after which some NCCL releases continue and others end the job. The result is a WARN."""
    return replace(complained(pattern), severity=Verdict.WARN)
