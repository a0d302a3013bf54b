"""Measurements of machines for checks to judge: rows, paths, and what could not be measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from gpubench.model.results.report import CollectiveRow, PairRow
from gpubench.model.results.rows.evidence import EvidenceRow
from gpubench.model.terms.grouping import grouped
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.model.terms.verdict import Finding


class Need(StrEnum):
    """The input of a check: facts alone, or something that has to be measured."""

    FACTS = "facts"
    PEER_COPIES = "peer copies"
    HOST_COPIES = "host copies"
    HOST_MEMORY = "host memory"
    ALL_REDUCE = "all-reduce"
    VERIFIED_DATA = "verified data"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedOnNode:
    """Something that could not be measured on one node of several, and why."""

    node: str
    need: Need
    reason: str


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """The measurements of a run. `findings` are what measuring itself found out: wrong data, copies that failed,
    host-staged paths with their causes.

    `left_out` says why something was not to be measured (--quick, a single GPU), `failed` why it could not be;
    `failed_on` the same where other nodes were measured.
    """

    pairs: tuple[PairRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    ranks: tuple[RankIdentity, ...] = ()
    evidence: tuple[EvidenceRow, ...] = ()
    findings: tuple[Finding, ...] = ()
    left_out: Mapping[Need, str] = field(default_factory=dict)
    failed: Mapping[Need, str] = field(default_factory=dict)
    failed_on: tuple[FailedOnNode, ...] = ()

    def pairs_from(self, host: str) -> Sequence[PairRow]:
        """The copies out of a node, within it or to another: each of many nodes asks several times."""
        return self._pairs_by_node.get(host, ())

    @cached_property
    def _pairs_by_node(self) -> Mapping[str, Sequence[PairRow]]:
        return grouped(self.pairs, lambda row: row.source_node)

    @cached_property
    def staged(self) -> frozenset[tuple[str, str | None, str | None]]:
        """Pairs that go through host memory: node, and the bus ids of both ends."""
        return frozenset(
            (row.source_node, row.source_bus_id, row.destination_bus_id) for row in self.evidence if row.host_staged
        )


QUICK = Measurements(left_out=dict.fromkeys([need for need in Need if need is not Need.FACTS], "--quick"))
"""Nothing was measured, on purpose."""
