"""Diagnosis: sorts the causes that were found by likelihood, and assigns consequences to them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf, log
from operator import itemgetter

from msgspec import Struct
from msgspec.structs import replace

from gpubench.conditions.circumstances import Circumstances, Sighting, Unread, joined
from gpubench.conditions.condition import BESIDE, Condition, fill_ids, fill_placeholders
from gpubench.conditions.logged import SOCKET, Staged
from gpubench.conditions.policy import Medium, PathKind, Relation, Slowed
from gpubench.model.paths.transport import Confidence, Pair, Transport, TransportKind
from gpubench.model.paths.wiring import Wiring
from gpubench.model.results.fallback import Explanation
from gpubench.model.results.report import Effect
from gpubench.model.terms.ranks import DevicePlace
from gpubench.model.terms.verdict import Cure, Finding, Verdict, merge_cures, worst_verdict

UNKNOWN = Explanation(
    "unknown",
    "no known cause was found",
    Cure.of(
        "gpubench topo --causes",
        comment="It shows facts that could not be read. NCCL_DEBUG=INFO makes NCCL log its choices.",
    ),
)
"""Explanation for paths and slow results for which no cause was found."""

_MOST_CURES = _MOST_SEEN = 3  # Maximum number of cures, and of observations, shown for one cause
MOST_TIMES = 2.0
"""A cause explains a slow collective only if it leaves at most this many times the measured share of the bandwidth.

A collective reaches at least half the share of its slowest path. For example, 8 H100s with one host-staged pair reach 6
%, and the pair reaches 10 %.
"""

SUREST_FIRST = (Confidence.PROVEN, Confidence.LIKELY, Confidence.WEAK, Confidence.NONE)


def distance(cause_percent: float | None, figure_percent: float | None, most_times: float = MOST_TIMES) -> float | None:
    """Return the absolute log ratio between the bandwidth that a cause leaves and the measured one.

    Both are in percent of the expected bandwidth. The result is infinite if one is unknown, and None if the cause
    leaves too much to explain the measured value. A ring or copy is as slow as its slowest path, so a cause that leaves
    50 % does not explain 6 %.
    """
    if cause_percent is None or figure_percent is None:
        return inf
    if cause_percent > most_times * figure_percent:
        return None
    return abs(log(max(cause_percent, 1.0) / max(figure_percent, 1.0)))


class Named(Struct, frozen=True):
    """A cause that was found, with its evidence (sightings) and the causes that it implies."""

    cause: Condition
    sightings: tuple[Sighting, ...]
    implied: "tuple[Named, ...]" = ()

    @property
    def confidence(self) -> Confidence:
        """Highest confidence of the sightings."""
        return min((sighting.confidence for sighting in self.sightings), key=SUREST_FIRST.index)

    @property
    def effects(self) -> tuple[Effect, ...]:
        """Effects of all sightings, in the order of the policy table."""
        found = {effect for sighting in self.sightings for effect in sighting.effects or self.cause.effects}
        return tuple(effect for effect in self.cause.effects if effect in found)

    @property
    def gravity(self) -> Verdict:
        """Worst severity of the sightings. Without one, the severity follows from the effects."""
        if self.cause.by_design:
            return Verdict.SKIP
        said = [sighting.severity or self.cause.severity for sighting in self.sightings]
        by_effects = Verdict.WARN if set(self.effects) <= set(BESIDE) else Verdict.FAIL
        return worst_verdict(severity or by_effects for severity in said)

    @property
    def expected_percent(self) -> float | None:
        """Smallest remaining bandwidth of the sightings, in percent of the expected one. None if unknown."""
        return min(
            (sighting.expected_percent for sighting in self.sightings if sighting.expected_percent), default=None
        )

    @property
    def seen(self) -> str:
        distinct = list(dict.fromkeys(sighting.seen for sighting in self.sightings if sighting.seen))
        more = len(distinct) - _MOST_SEEN
        return "; ".join(distinct[:_MOST_SEEN]) + (f"; and {more} more" if more > 0 else "")

    @property
    def subject(self) -> str:
        return joined([sighting.subject for sighting in self.sightings])

    @property
    def cure(self) -> Cure:
        """The cure, with the ids of the affected devices filled in."""
        own = dict.fromkeys(sighting.cure for sighting in self.sightings if sighting.cure)
        return fill_ids(merge_cures([*own][:_MOST_CURES]) or self.cause.cure, self.places)

    @property
    def names(self) -> list[str]:
        return list(
            dict.fromkeys(name for sighting in self.sightings for name in sighting.names or (sighting.subject,))
        )

    def findings(self) -> Iterator[Finding]:
        """Convert all sightings, including quiet ones, to findings."""
        sightings = (
            replace(sighting, severity=sighting.severity or self.gravity, quiet=False) for sighting in self.sightings
        )
        return self.cause.to_findings(sightings)

    @property
    def settles(self) -> str:
        """The command that confirms or excludes this cause, with the ids of the affected devices.

        It is empty for AMD GPUs, because the commands of all causes are NVIDIA's.
        """
        if any(command.startswith("amd-smi") for command in self.cure.commands):
            return ""
        return fill_placeholders(self.cause.settles, self.places)

    @property
    def places(self) -> tuple[DevicePlace, ...]:
        return tuple(dict.fromkeys(place for sighting in self.sightings for place in sighting.places))

    @property
    def explanation(self) -> Explanation:
        return Explanation(self.cause.id, self.seen, self.cure, self.cause.by_design)

    def touching(self, pairs: Iterable[Pair]) -> "Named | None":
        """Return this cause with only the sightings that affect any of these pairs. Return None if there are none."""
        wanted = tuple(pairs)
        touching = tuple(sighting for sighting in self.sightings if any(map(sighting.touches, wanted)))
        implied = tuple(named for named in (below.touching(wanted) for below in self.implied) if named is not None)
        return replace(self, sightings=touching, implied=implied) if touching else None


class Diagnosis(Struct, frozen=True):
    """The causes that were found, most likely first. `unread` has the reasons why other causes could not be checked."""

    named: tuple[Named, ...]
    unread: Mapping[str, tuple[Unread, ...]]

    def explaining(self, paths: Mapping[Pair, PathKind]) -> tuple[Named, ...]:
        """Return causes that can explain the paths of these pairs, most likely first.

        Causes by design (NCCL's policy or the hardware) come first if they explain all pairs, and last otherwise.
        """
        able = [named for named in self.named if not named.cause.explains.paths.isdisjoint(paths.values())]
        found = [(touching, len(pairs)) for touching, pairs in (_explained(named, paths) for named in able) if touching]

        def order(candidate: tuple[Named, int]) -> tuple[int, int, bool, int]:
            named, pairs = candidate
            design = 1 if not named.cause.by_design else 0 if pairs == len(paths) else 2
            return design, *_surest(named), -pairs

        return tuple(named for named, _ in sorted(found, key=order))

    def by_cause(self, paths: Mapping[Pair, PathKind]) -> dict[Pair, str]:
        """Return the id of the most likely cause of each pair. Pairs without a cause are left out."""
        found: dict[Pair, str] = {}
        while rest := {pair: kind for pair, kind in paths.items() if pair not in found}:
            named = next(iter(self.explaining(rest)), None)
            if named is None:
                break
            found |= dict.fromkeys(_explained(named, rest)[1], named.cause.id)
        return found

    def slowing(self, *slowed: Slowed, percent: float | None = None) -> tuple[Named, ...]:
        """Return causes of a slow operation, most likely first.

        `slowed` are the parts of the operation that are slow, most important first. `percent` is the measured bandwidth
        relative to the expected one. Causes that leave much more than that are left out.
        """

        def place(named: Named) -> int:
            slows = named.cause.explains.slows
            return min((number for number, part in enumerate(slowed) if not slows or part in slows), default=-1)

        slow = self.of_effect(Effect.SLOW)
        found = [(named, place(named), distance(named.expected_percent, percent)) for named in slow]
        ranked = [
            ((named.confidence is Confidence.WEAK, number, *_surest(named), far), named)
            for named, number, far in found
            if number >= 0 and far is not None
        ]
        return tuple(named for _, named in sorted(ranked, key=itemgetter(0)))

    def fill_ids(self, explanation: Explanation) -> Explanation:
        """Return the explanation with device ids filled into its cure, if its cause is part of this diagnosis."""
        found = (named for named in self.named if named.cause.id == explanation.id)
        return next(
            (replace(explanation, cure=fill_ids(explanation.cure, named.places)) for named in found), explanation
        )

    def of_effect(self, *effects: Effect) -> tuple[Named, ...]:
        """Return causes with at least one of these effects."""
        return tuple(named for named in self.named if set(effects) & set(named.effects))


def _explained(named: Named, paths: Mapping[Pair, PathKind]) -> tuple[Named | None, list[Pair]]:
    able = [
        sighting for sighting in named.sightings if not sighting.effects or not set(sighting.effects) <= set(BESIDE)
    ]
    pairs = [
        pair
        for pair, kind in paths.items()
        if kind in named.cause.explains.paths and any(sighting.touches(pair) for sighting in able)
    ]
    return (named.touching(pairs) if pairs else None), pairs


def _surest(named: Named) -> tuple[int, bool]:
    return SUREST_FIRST.index(named.confidence), named.cause.general


def diagnose(causes: Iterable[Condition], run: Circumstances) -> Diagnosis:
    """Run the detectors of all causes. Sort the causes by confidence, then by their order in the registry."""
    seen: dict[Condition, list[Sighting]] = {}
    unread: dict[str, tuple[Unread, ...]] = {}
    for cause in causes:
        found = list(cause.look(run))
        sightings = [result for result in found if isinstance(result, Sighting)]
        if sightings:
            seen[cause] = sightings
        elif found:
            unread[cause.id] = tuple(result for result in found if isinstance(result, Unread))
    below = _take_implied(seen)
    named = [Named(cause, tuple(sightings), tuple(below.get(cause, ()))) for cause, sightings in seen.items()]
    return Diagnosis(tuple(sorted((cause for cause in named if cause.sightings), key=_surest)), unread)


def _take_implied(seen: Mapping[Condition, list[Sighting]]) -> dict[Condition, list[Named]]:
    below: dict[Condition, list[Named]] = {}
    by_id = {cause.id: cause for cause in seen}
    for cause, sightings in seen.items():
        for other in (by_id[name] for name in cause.implies if name in by_id):
            covered = [sighting for sighting in seen[other] if _covered(sighting, sightings)]
            if covered:
                below.setdefault(cause, []).append(Named(other, tuple(covered)))
                seen[other][:] = [sighting for sighting in seen[other] if sighting not in covered]
    return below


def _covered(other: Sighting, by: Sequence[Sighting]) -> bool:
    if other.pairs is not None:
        return all(any(mine.touches(pair) for mine in by) for pair in other.pairs)
    wide = [sighting for sighting in by if sighting.pairs is None]
    if any(sighting.gpus is None for sighting in wide):
        return True
    return other.gpus is not None and other.gpus <= frozenset[int]().union(*(sighting.gpus or () for sighting in wide))


def path_kinds(wiring: Wiring, staged: Mapping[Pair, Sequence[Transport]]) -> dict[Pair, PathKind]:
    """Return the class of each host-staged path, by pair."""
    return {pair: PathKind(relation(wiring, pair), _medium(transports)) for pair, transports in staged.items()}


def relation(wiring: Wiring, pair: Pair) -> Relation:
    """Return whether the pair's two ends share a GPU, a node or an NVLink domain."""
    if wiring.share_gpu(pair):
        return Relation.ONE_GPU
    if wiring.share_node(pair):
        return Relation.ONE_NODE
    return Relation.ONE_DOMAIN if wiring.share_domain(pair) else Relation.TWO_NODES


def _medium(transports: Sequence[Transport]) -> Medium:
    networks = [transport.network for transport in transports if transport.network is not None]
    if networks:
        return Medium.SOCKET if SOCKET in networks else Medium.RDMA
    return Medium.SHM if any(transport.kind is TransportKind.SHM for transport in transports) else Medium.HOST_MEMORY


def explain(causes: Iterable[Condition], staged: Staged) -> Explanation | None:
    """Return the first cause that NCCL's log shows for a host-staged path. Specific causes come before general ones."""
    able = [cause for cause in causes if not cause.explains.paths.isdisjoint(staged.kinds)]
    for cause in sorted(able, key=lambda cause: cause.general):
        reason = None if cause.in_log is None else cause.in_log(staged)
        if reason is not None:
            return Explanation(
                cause.id,
                reason.evidence,
                reason.cure,
                by_design=(cause.by_design or reason.by_design) and reason.is_proven,
                in_doubt=cause.by_design and not reason.is_proven,
            )
    return None
