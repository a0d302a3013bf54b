"""The `Condition` class: one thing that can be wrong, with its detector and its cure. Helpers build common
detectors.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpubench.conditions.circumstances import Circumstances, Found, Sighting, Unread, joined
from gpubench.conditions.logged import LoggedReason, Staged
from gpubench.conditions.policy import EXPLAINS, NOTHING, SEVERITIES, Explains
from gpubench.model.facts.health import Errors
from gpubench.model.facts.snapshot import GpuFacts, NicFacts
from gpubench.model.paths.nccl_log import LogFacts
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.transport import Confidence
from gpubench.model.results.report import Effect
from gpubench.model.terms.ranks import DevicePlace
from gpubench.model.terms.verdict import Cure, Finding, Verdict

# Effects that are reported although they do not explain host staging
BESIDE = (Effect.SLOW, Effect.WRONG, Effect.APPLICATION)
NONE_EXPECTED = "none"  # Expected state of conditions that do not name a healthy state

Look = Callable[[Circumstances], Found]


def nothing_in_facts(_run: Circumstances) -> Found:
    """Return no sightings. Conditions that only a log can show use this detector."""
    return iter(())


def single_node(look: Look) -> Look:
    """Decorate a detector that examines each node separately.

    The detector runs on the distinct nodes first, and on all nodes only if it finds something there. So a large job
    with equal, healthy nodes costs little time.
    """

    def found(run: Circumstances) -> Found:
        return look(run) if any(True for _ in look(run.distinct)) else iter(())

    return found


class Condition(Struct, frozen=True, kw_only=True):
    """One thing that can be wrong with a machine, a setting or a job.

    If `check` is set, that check of `gpubench check` reports the condition. Severities and possible effects are in
    policy.py.
    """

    id: str
    title: str  # Uses the words that people search for, such as error messages
    look: Look = nothing_in_facts
    command: str | tuple[str, ...] = ""  # Commands that fix or further diagnose the condition
    comment: str = ""
    link: str = ""  # A public report of this condition, or the source for it
    check: str = ""
    expected: str = NONE_EXPECTED  # The healthy state, as shown in findings
    likely: str = ""  # The most likely reason for the condition
    settles: str = ""  # Command that confirms that this condition causes a host-staged path or a slow operation
    # Finds the condition in NCCL's log lines about two ranks
    in_log: Callable[[Staged], LoggedReason | None] | None = None
    # Finds the condition in a job's log, if it ended or prevented the job
    in_job: Callable[[LogFacts], Iterator[Sighting]] | None = None
    implies: tuple[str, ...] = ()  # Ids of conditions that follow from this one and are listed below it
    by_design: bool = False  # NCCL's policy or the hardware's design, so there is nothing to repair
    general: bool = False  # Reported only if no more specific condition applies
    aliases: tuple[str, ...] = ()  # Ids that earlier versions used

    @property
    def cure(self) -> Cure:
        commands = (self.command,) if isinstance(self.command, str) else self.command
        return Cure(tuple(filter(None, commands)), self.comment)

    @property
    def severity(self) -> Verdict | None:
        """Severity from the policy table. None for causes without a row, whose severity follows from their effects."""
        grade = SEVERITIES.get(self.id)
        return None if grade is None else grade.severity

    @property
    def explains(self) -> Explains:
        """Host-staged paths and slow operations that the condition can explain. NOTHING if it is not a cause."""
        return EXPLAINS.get(self.id, NOTHING)

    @property
    def effects(self) -> tuple[Effect, ...]:
        """Effects of the condition, such as host memory inside a node or a slower path."""
        return self.explains.effects

    def findings(self, run: Circumstances) -> Iterator[Finding]:
        """Run the detector and convert its sightings to findings."""
        return self.to_findings(self.look(run))

    def findings_in_log(self, facts: LogFacts) -> Iterator[Finding]:
        """Return findings from a job's log. The severity is FAIL if the policy table has none."""
        sightings = () if self.in_job is None else self.in_job(facts)
        return self.to_findings(sightings, self.severity or Verdict.FAIL)

    def to_findings(self, found: Iterable[Sighting | Unread], default: Verdict | None = None) -> Iterator[Finding]:
        """Convert sightings to findings. Quiet sightings, and sightings without any severity, are skipped."""
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
    """A group of related conditions, in the order in which they are detected."""

    name: str
    title: str
    conditions: tuple[Condition, ...]

    @classmethod
    def of(cls, name: str, title: str, *conditions: Condition, link: str = "") -> "Family":
        """Create a family. Conditions without a link of their own get `link`."""
        return cls(name, title, tuple(replace(condition, link=condition.link or link) for condition in conditions))


_PLACEHOLDER = re.compile(r"(?<=-i )GPU\b|(?<=-d )DEVICE\b|(?<=-s )BUS_ID\b")


def fill_ids(cure: Cure, places: Sequence[DevicePlace]) -> Cure:
    """Fill the placeholders in a cure with device ids. If several nodes are affected, name the node of these ids."""
    filled = Cure(
        tuple(fill_placeholders(command, places) for command in cure.commands), fill_placeholders(cure.comment, places)
    )
    hosts = list(dict.fromkeys(place.node for place in places if place.device))
    if filled == cure or len(hosts) == 1:
        return filled
    return filled.add_comment(f"Run this on {hosts[0]}. On {joined(hosts[1:])}, use the device IDs of that node.")


def fill_placeholders(text: str, places: Sequence[DevicePlace]) -> str:
    """Replace GPU, DEVICE and BUS_ID in a command with ids from the first node.

    GPU becomes a list of all affected GPUs. DEVICE and BUS_ID become the first affected device.
    """
    devices = [place for place in places if place.device]
    if not devices or not _PLACEHOLDER.search(text):
        return text
    here = [device for device in devices if device.node == devices[0].node]
    gpus = dict.fromkeys(place.bus_id or str(place.device).removeprefix("GPU") for place in here)
    ids = {"GPU": ",".join(gpus), "DEVICE": here[0].device, "BUS_ID": here[0].bus_id}
    return _PLACEHOLDER.sub(lambda found: ids[found[0]] or found[0], text)


def error_severity(errors: Errors) -> dict[str, Any]:
    """Return the confidence, severity and expected value for a sighting of counted errors.

    A total since boot is only weak evidence, because it does not show when the errors occurred.
    """
    confidence = Confidence.PROVEN if errors.grave else Confidence.LIKELY
    if not errors.meanwhile:
        return {"confidence": Confidence.WEAK, "expected": errors.expected}
    return {"confidence": confidence, "severity": Verdict.FAIL, "expected": errors.expected}


def node_detector(
    seen: Callable[[Topology], str | None], confidence: Confidence = Confidence.PROVEN, unknown: str = ""
) -> Look:
    """Return a detector that examines each node separately.

    `seen` returns a description of the problem, or an empty text. `unknown` names a driver or kernel fact that `seen`
    needs. If that fact could not be read, the detector yields the reason.
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


def gpu_detector(seen: Callable[[GpuFacts], str | None], confidence: Confidence = Confidence.PROVEN) -> Look:
    """Return a detector that examines each GPU separately. `seen` describes the problem, or returns an empty text."""
    return single_node(
        lambda run: (run.gpu_sighting(at, found, confidence) for at, _, gpu in run.gpus() if (found := seen(gpu)))
    )


def unread(subject: str, known: Mapping[str, str], name: str) -> Iterator[Unread]:
    """Yield the reason why the fact `name` could not be read, if `known` has one."""
    if known.get(name):
        yield Unread(subject, known[name])


def rdma_nics(node: Topology) -> list[NicFacts]:
    """Return the node's RDMA-capable NICs, including ports that are down."""
    return [nic for nic in node.nics if nic.rdma]


def nodes_with_rdma(run: Circumstances) -> Iterator[tuple[int, Topology]]:
    """Yield the number and topology of each node that has RDMA NICs."""
    return ((number, node) for number, node in run.nodes.items() if rdma_nics(node))
