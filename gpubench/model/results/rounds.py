"""The rounds of a scan: participants, the measurements planned and made, and their form on disk."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import Annotated, NamedTuple

from gpubench.errors import UsageError
from gpubench.model.terms.plain import Rate, Seconds, Within
from gpubench.model.terms.verdict import Finding
from gpubench.records import dataclass

EXCHANGED_BYTES = 256 * 2**20  # Each way and reduced: on H200 and 400 Gbit/s larger ones are no faster
BOTH_WAYS = 2  # A figure of a pair is of what passes in both directions at once, together


class ScanPhase(StrEnum):
    """The phases of a scan, in order. Rounds belong to the three in the middle."""

    LOCAL = "local"
    SCREENING = "screening"
    SUSPECTS = "suspects"
    CONFIRMATION = "confirmation"
    COLLECTIVE = "collective"


ROUNDS: Mapping[ScanPhase, int] = {ScanPhase.SCREENING: 3, ScanPhase.SUSPECTS: 3, ScanPhase.CONFIRMATION: 5}
"""Rounds of a phase, whatever the number of nodes."""


class NodeRail(NamedTuple):
    """One rail of one node: a GPU with the NIC that it uses."""

    node: int
    rail: int


class NodePair(NamedTuple):
    """Two nodes that measure each other in a round, on all their rails at once."""

    first: int
    second: int


RANK_OF_HOST = ":rank"  # Between a host and the rank that stands for a node, where ranks are taken for nodes


def login_name(node: str) -> str:
    """The host of a node as an argument of `ssh`."""
    return shlex.quote(node.partition(RANK_OF_HOST)[0])


@dataclass(frozen=True, slots=True)
class ScanFabric:
    """The nodes of a scan. `leaves` are names by node, None where it is not known; `nics` names by rail.

    `rates` are what the NICs of a rail carry, GB/s each way; none where it is not known, or no NIC moves the data.

    A rail is the position of a GPU in its node, with the NIC that it uses; rails may share a NIC.
    """

    hosts: tuple[str, ...]
    rails: int
    leaves: tuple[str | None, ...]
    nics: tuple[str | None, ...] = ()
    rates: tuple[float | None, ...] = ()

    def inside(self, first: int, second: int) -> bool:
        """True where both nodes are known to hang on the same leaf."""
        leaf = self.leaves[first]
        return leaf is not None and leaf == self.leaves[second]

    def nic(self, rail: int) -> str | None:
        """The NIC of a rail, where it is known."""
        return self.nics[rail] if rail < len(self.nics) else None


class PairSample(NamedTuple):
    """What one rail of a pair delivered in a round: GB/s both ways together, or why there is no figure.

    `culprit` is the node whose own supervisor saw its worker stop or die; None where nobody knows.
    """

    first: int
    second: int
    rail: int
    gb_s: float
    failure: str = ""
    culprit: int | None = None

    def partner(self, node: int) -> int:
        """The other node."""
        return self.second if node == self.first else self.first


@dataclass(frozen=True, slots=True)
class PlannedRound:
    """A round that is to be measured; `number` counts from 1 over all phases. `retired` cells take no part."""

    number: int
    phase: ScanPhase
    pairs: tuple[NodePair, ...]
    retired: frozenset[NodeRail] = frozenset()


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """A round that was measured; `gone` are nodes that stopped answering in it, and what was seen of that."""

    number: int
    phase: ScanPhase
    samples: tuple[PairSample, ...]
    seconds: float
    gone: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BeforeRounds:
    """What did not work in phase 0: nodes that are gone, rails whose worker died or hung, and what was seen of them."""

    gone: Mapping[int, str] = field(default_factory=dict)
    failed: Mapping[NodeRail, str] = field(default_factory=dict)

    def without(self, known: "BeforeRounds") -> "BeforeRounds":
        """What is not known yet."""
        failed = {cell: seen for cell, seen in self.failed.items() if cell not in known.failed}
        return BeforeRounds({node: seen for node, seen in self.gone.items() if node not in known.gone}, failed)

    def beside(self, known: "BeforeRounds") -> "BeforeRounds":
        """This and what is known already, as it was seen first."""
        return BeforeRounds({**self.gone, **known.gone}, {**self.failed, **known.failed})


WRONG_DATA_ARRIVED = "wrong data arrived"  # Begins the failure of a pair with wrong verified data


class LocalQuantity(StrEnum):
    """What a node measures by itself in phase 0."""

    PAIR = "copies inside the node"
    ALL_REDUCE = "all-reduce inside the node"
    TO_HOST = "copies to host memory"
    FROM_HOST = "copies from host memory"
    MEMORY = "copies in its memory"


class LocalFigure(NamedTuple):
    """GB/s that a node measured by itself, of one of its GPUs (or, without GPUs, ranks).

    Copies between two of them are both ways together, and `partner` is the other one; the busbw of an all-reduce is of
    GPU 0. `failure` says why there is no figure.
    """

    node: int
    gpu: int
    quantity: LocalQuantity
    gb_s: float
    partner: int | None = None
    failure: str = ""

    @property
    def place(self) -> tuple[int, int, LocalQuantity, int | None]:
        """Node, GPU, quantity and partner: what two measurements of the same have in common."""
        return self.node, self.gpu, self.quantity, self.partner


class RingFailure(NamedTuple):
    """Why a ring has no figure: what was seen at a node, and whether its own side is to blame."""

    node: int
    seen: str
    is_own: bool


@dataclass(frozen=True, slots=True)
class RingOutcome:
    """What a ring of rails delivered: GB/s of its slowest, or the failures by rail."""

    gb_s: float
    failures: Mapping[NodeRail, RingFailure] = field(default_factory=dict)


MOST_NODES, MOST_RAILS = 65_536, 64

_EXPECTED = f"rounds as gpubench scan kept them, of {MOST_NODES} nodes and {MOST_RAILS} rails at most, each node once"


@dataclass(frozen=True, slots=True)
class StoredFabric:
    """The nodes of a scan, its seed, and what moved the data."""

    hosts: tuple[str, ...]
    rails: Annotated[int, Within(1, MOST_RAILS)]
    leaves: tuple[str | None, ...]
    nics: tuple[str | None, ...]
    seed: int
    backend: str
    origin: str
    rates: tuple[float | None, ...] = ()

    @classmethod
    def of(cls, fabric: ScanFabric, seed: int, backend: str, origin: str) -> "StoredFabric":
        """To keep."""
        return cls(fabric.hosts, fabric.rails, fabric.leaves, fabric.nics, seed, backend, origin, fabric.rates)

    def fabric(self) -> ScanFabric:
        """As it was. Raises UsageError for one that cannot be."""
        fits = len(self.leaves) == len(self.hosts) == len(set(self.hosts)) <= MOST_NODES
        if not self.hosts or not fits:
            raise UsageError(f"{len(self.hosts)} nodes with {len(self.leaves)} leaves", expected=_EXPECTED)
        return ScanFabric(self.hosts, self.rails, self.leaves, self.nics, self.rates[: self.rails])


@dataclass(frozen=True, slots=True)
class StoredLocal:
    """The figures of phase 0: node and GPU (two, of a pair), quantity, GB/s of each; by place why there is none.

    `findings` are what facts, clocks and profiles showed of the nodes, None of an older gpubench.
    """

    places: tuple[tuple[int, ...], ...]
    quantities: tuple[LocalQuantity, ...]
    gb_s: tuple[Rate, ...]
    failures: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] | None = None

    @classmethod
    def of(cls, figures: Sequence[LocalFigure], findings: Sequence[Finding] = ()) -> "StoredLocal":
        """To keep."""
        return cls(
            tuple(
                (each.node, each.gpu) if each.partner is None else (each.node, each.gpu, each.partner)
                for each in figures
            ),
            tuple(each.quantity for each in figures),
            tuple(each.gb_s for each in figures),
            {str(n): each.failure for n, each in enumerate(figures) if each.failure},
            tuple(findings),
        )

    def figures(self, fabric: ScanFabric) -> list[LocalFigure]:
        """As they were. Raises UsageError for nodes that are not there."""
        figures = []
        for number, (place, quantity, gb_s) in enumerate(zip(self.places, self.quantities, self.gb_s, strict=False)):
            node, gpu = _checked(place[:2], 2, fabric)
            partner = _checked((node, *place[2:]), 2, fabric)[1] if len(place) > 2 else None
            failure = self.failures.get(str(number), "")
            figures.append(LocalFigure(node, gpu, quantity, gb_s, partner, failure))
        return figures


@dataclass(frozen=True, slots=True)
class StoredRound:
    """A round: nodes and rail of every figure, its GB/s, and by place in these lists why there is none."""

    number: Annotated[int, Within(1)]
    phase: ScanPhase
    seconds: Seconds
    places: tuple[tuple[int, ...], ...]
    gb_s: tuple[Rate, ...]
    failures: Mapping[str, str] = field(default_factory=dict)
    culprits: Mapping[str, int] = field(default_factory=dict)
    gone: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, outcome: RoundOutcome) -> "StoredRound":
        """To keep."""
        samples = outcome.samples
        return cls(
            outcome.number,
            outcome.phase,
            outcome.seconds,
            tuple(each[:3] for each in samples),
            tuple(each.gb_s for each in samples),
            {str(n): each.failure for n, each in enumerate(samples) if each.failure},
            {str(n): each.culprit for n, each in enumerate(samples) if each.culprit is not None},
            {str(node): seen for node, seen in outcome.gone.items()},
        )

    def outcome(self, fabric: ScanFabric) -> RoundOutcome:
        """As it was. Raises UsageError for nodes or rails that are not there."""
        samples = []
        for number, (place, gb_s) in enumerate(zip(self.places, self.gb_s, strict=False)):
            first, second, rail = _checked(place, 3, fabric)
            failure, culprit = self.failures.get(str(number), ""), self.culprits.get(str(number))
            samples.append(PairSample(first, second, rail, gb_s, failure, culprit))
        numbers = {str(node): node for node in range(len(fabric.hosts))}
        gone = {numbers[node]: seen for node, seen in self.gone.items() if node in numbers}
        return RoundOutcome(self.number, self.phase, tuple(samples), self.seconds, gone)


@dataclass(frozen=True, slots=True)
class StoredAbsent:
    """The nodes that were gone in phase 0, or not in the job that went on, and why, by number.

    `failed` are rails whose worker died or hung in phase 0, by node and rail: '3/1'.
    """

    absent: Mapping[str, str]
    failed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, found: BeforeRounds) -> "StoredAbsent":
        """To keep."""
        return cls(
            {str(node): seen for node, seen in found.gone.items()},
            {f"{node}/{rail}": seen for (node, rail), seen in found.failed.items()},
        )

    def rails(self, fabric: ScanFabric) -> dict[NodeRail, str]:
        """The rails that failed. Raises UsageError for some that are not there."""
        found = {}
        for place, seen in self.failed.items():
            numbers = [int(each) if each.isdecimal() else -1 for each in place.split("/")]
            node, rail = _checked(numbers, 2, fabric)
            found[NodeRail(node, rail)] = seen
        return found

    def nodes(self, fabric: ScanFabric) -> dict[int, str]:
        """As they are numbered in the scan."""
        numbers = {str(node): node for node in range(len(fabric.hosts))}
        return {numbers[node]: seen for node, seen in self.absent.items() if node in numbers}


def _checked(place: Sequence[int], count: int, fabric: ScanFabric) -> Sequence[int]:
    nodes, rail = place[: max(1, count - 1)], place[-1] if place else -1
    fits = len(place) == count and all(0 <= node < len(fabric.hosts) for node in nodes)
    if not fits or not 0 <= rail < max(fabric.rails, 1):
        raise UsageError(f"a figure of {list(place)[:4]}", expected=f"{_EXPECTED}, of {len(fabric.hosts)} nodes")
    return place
