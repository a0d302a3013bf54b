"""The values of a scan: who takes part, what a round is to measure, and what it measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

EXCHANGED_BYTES = 256 * 2**20
"""What GPUs send each way, and reduce: on H200 NVLinks and on networks of 400 Gbit/s larger ones are no faster."""

BOTH_WAYS = 2
"""A figure of a pair is of what passes in both directions at once, together."""


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


WRONG_DATA_ARRIVED = "wrong data arrived"
"""How the failure of a pair begins whose data were verified and not as they were sent."""


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
