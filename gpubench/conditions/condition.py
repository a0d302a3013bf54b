"""A condition: one thing that can be wrong, with its only detector and its cure."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpubench.conditions.circumstances import Circumstances, Found, Sighting, Unread, joined
from gpubench.conditions.logged import LoggedReason, Staged
from gpubench.conditions.policy import EXPLAINS, NOTHING, SEVERITIES, Explains
from gpubench.model.facts.health import Errors
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import GpuFacts, NicFacts
from gpubench.model.paths.nccl_log import LogFacts
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.transport import Confidence
from gpubench.model.results.report import Effect
from gpubench.model.terms.ranks import DevicePlace
from gpubench.model.terms.verdict import Cure, Finding, Verdict

BESIDE = (Effect.SLOW, Effect.WRONG, Effect.APPLICATION)  # Reported although they do not explain host staging
NONE_EXPECTED = "none"  # Expected state if the condition names no healthy one

Look = Callable[[Circumstances], Found]


def nothing_in_facts(_run: Circumstances) -> Found:
    """Find nothing: the detector of conditions that only a log shows."""
    return iter(())


def single_node(look: Look) -> Look:
    """Try a detector that compares no nodes on the distinct nodes first, and run it on all only if it finds any."""

    def found(run: Circumstances) -> Found:
        return look(run) if any(True for _ in look(run.distinct)) else iter(())

    return found


class Condition(Struct, frozen=True, kw_only=True):
    """One thing that can be wrong with a machine, a setting or a job.

    With `check` it is reported by that check of `gpubench check`. What it explains, and its severity, are in policy.py.
    """

    id: str
    title: str  # In the words that people search for
    look: Look = nothing_in_facts
    command: str | tuple[str, ...] = ""  # The cure, with a comment
    comment: str = ""
    link: str = ""  # A report of somebody who met it, or the source
    check: str = ""
    expected: str = NONE_EXPECTED  # The healthy state
    likely: str = ""  # The likely reason
    settles: str = ""  # Command that confirms it as the cause of a path or of a slow operation
    in_log: Callable[[Staged], LoggedReason | None] | None = None  # Finds it in NCCL's log of a pair
    in_job: Callable[[LogFacts], Iterator[Sighting]] | None = None  # Finds it in the log of a job that it ended
    implies: tuple[str, ...] = ()  # Ids of its consequences, listed below it
    by_design: bool = False  # A policy or the hardware: nothing to repair
    general: bool = False  # Reported only if no more specific condition is found
    aliases: tuple[str, ...] = ()  # Earlier ids

    @property
    def cure(self) -> Cure:
        """Commands and comment."""
        commands = (self.command,) if isinstance(self.command, str) else self.command
        return Cure(tuple(filter(None, commands)), self.comment)

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
        """Look for the condition and return its findings."""
        return self.to_findings(self.look(run))

    def findings_in_log(self, facts: LogFacts) -> Iterator[Finding]:
        """Return the findings in the log of a job: FAIL, if the policy table has no severity."""
        sightings = () if self.in_job is None else self.in_job(facts)
        return self.to_findings(sightings, self.severity or Verdict.FAIL)

    def to_findings(self, found: Iterable[Sighting | Unread], default: Verdict | None = None) -> Iterator[Finding]:
        """Convert sightings to findings. Quiet ones, and those without any severity, are left out."""
        for sighting in found:
            if not isinstance(sighting, Sighting) or sighting.quiet:
                continue
            severity = sighting.severity or default or self.severity
            if severity is not None:
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
    def of(cls, name: str, title: str, *conditions: Condition, link: str = "") -> "Family":
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
    gpus = dict.fromkeys(place.bus_id or str(place.device).removeprefix("GPU") for place in here)
    ids = {"GPU": ",".join(gpus), "DEVICE": here[0].device, "BUS_ID": here[0].bus_id}
    return _PLACEHOLDER.sub(lambda found: ids[found[0]] or found[0], text)


def error_severity(errors: Errors) -> dict[str, Any]:
    """Return confidence, severity and expectation of counted errors. A total alone does not say when they occurred."""
    confidence = Confidence.PROVEN if errors.grave else Confidence.LIKELY
    if not errors.meanwhile:
        return {"confidence": Confidence.WEAK, "expected": errors.expected}
    return {"confidence": confidence, "severity": Verdict.FAIL, "expected": errors.expected}


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
                yield run.node_sighting(number, found, confidence)
            else:
                reasons = node.snapshot.driver_settings.unknown, node.snapshot.kernel.unknown
                yield from (result for known in reasons for result in unread(run.subject(number), known, unknown))

    return look


def rank_detector(seen: Callable[[RankFacts], str | None], confidence: Confidence = Confidence.PROVEN) -> Look:
    """Return a detector that examines processes one by one."""
    return lambda run: (run.rank_sighting([rank], found, confidence) for rank in run.facts if (found := seen(rank)))


def gpu_detector(seen: Callable[[GpuFacts], str | None], confidence: Confidence = Confidence.PROVEN) -> Look:
    """Return a detector that examines GPUs one by one; `seen` returns what is wrong, or an empty text."""
    return single_node(
        lambda run: (run.gpu_sighting(at, found, confidence) for at, _, gpu in run.gpus() if (found := seen(gpu)))
    )


def unread(subject: str, known: Mapping[str, str], name: str) -> Iterator[Unread]:
    """Yield the reason why a fact could not be read, if it is known."""
    if known.get(name):
        yield Unread(subject, known[name])


def rdma_nics(node: Topology) -> list[NicFacts]:
    """Return the NICs of a node that can do RDMA, whether they are up or down."""
    return [nic for nic in node.nics if nic.rdma]


def nodes_with_rdma(run: Circumstances) -> Iterator[tuple[int, Topology]]:
    """Iterate over nodes with RDMA NICs."""
    return ((number, node) for number, node in run.nodes.items() if rdma_nics(node))
