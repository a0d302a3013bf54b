"""What every check is: a pure function of facts and measurements that yields findings."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.paths.nodes import MachineKind
from gpubench.model.paths.topology import Device, Topology
from gpubench.model.profiles.profile import Profile
from gpubench.model.results.measurements import QUICK, Measurements, Need
from gpubench.model.terms.verdict import Finding

_MOST_SUBJECTS = 4


@dataclass(frozen=True, slots=True)
class Facts:
    """What checks look at: every node, the kinds they form, every rank, and the profile that each node matches.

    `asked` says that somebody named the profile: then the machine has to be the profile's in everything.
    """

    nodes: Sequence[Topology]
    kinds: Sequence[MachineKind] = ()
    ranks: Sequence[RankFacts] = ()
    profiles: Sequence[Profile | None] = ()
    measurements: Measurements = QUICK
    asked: bool = False

    def profile(self, node: Topology) -> Profile | None:
        """The profile of a node."""
        found = zip(self.nodes, self.profiles, strict=False)
        return next((profile for each, profile in found if each is node), None)

    def subject(self, node: Topology, *devices: Device) -> str:
        """Devices with their bus ids, and their host where there are several."""
        named = " → ".join(f"{each.device} ({each.bus_id})" if each.bus_id else each.device for each in devices)
        return " ".join(filter(None, (node.snapshot.host if len(self.nodes) > 1 or not devices else "", named)))


@dataclass(frozen=True, slots=True)
class Check:
    """A check: its name, what it looks for, the function, what has to be measured for it, and whether it says something
    of machines without GPUs too.
    """

    name: str
    summary: str
    find: Callable[[Facts], Iterator[Finding]]
    needs: Need = Need.FACTS
    without_gpus: bool = False


def run(checks: Sequence[Check], facts: Facts) -> tuple[Finding, ...]:
    """The findings of all checks; those that say the same of several subjects become one."""
    return merged(finding for check in checks for finding in check.find(facts))


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings in which those that say the same of several subjects became one."""
    same: dict[Finding, list[Finding]] = {}
    for finding in findings:
        same.setdefault(replace(finding, subject="", subjects=()), []).append(finding)
    return tuple(
        replace(
            finding,
            subject=join_subjects([each.subject for each in found]),
            subjects=tuple(subject for each in found for subject in each.subjects or (each.subject,)),
        )
        for finding, found in same.items()
    )


def join_subjects(subjects: Sequence[str]) -> str:
    """The first few of many, and how many more there are."""
    shown = ", ".join(subjects[:_MOST_SUBJECTS])
    return shown + (f" and {len(subjects) - _MOST_SUBJECTS} more" if len(subjects) > _MOST_SUBJECTS else "")
