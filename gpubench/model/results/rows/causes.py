"""The rows of the sections `causes` and `causes_unread`: why bytes travel as they do, and what could not be asked."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from gpubench.model.paths.evidence import Confidence
from gpubench.model.results.report import Record
from gpubench.model.terms.verdict import Verdict

CAUSES_SECTION, UNREAD_SECTION = "causes", "causes_unread"


class Effect(StrEnum):
    """The effect of a cause on a path. The first four are what bytes through host memory look like from outside."""

    STAGED = "host memory inside a node"
    NETWORK_INSIDE = "a network inside a node"
    SOCKETS = "sockets between nodes"
    NO_GPUDIRECT = "RDMA through host memory"
    APPLICATION = "MPI, UCX or a framework copies through host memory"
    WRONG = "wrong data, or a hang"
    SLOW = "a slower path"


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseRow(Record):
    """A cause that holds, those to look at first first. docs/conditions.md has the whole catalogue."""

    id: str  #: stable
    evidence: str  #: what shows it
    advice: str  #: what to do
    paths: int  #: how many it explains
    verdict: Annotated[str, Verdict]  #: SKIP: by design; WARN: it only slows down; ERROR: not known
    hosts: tuple[str, ...]  #: where it was seen
    title: str  #: in the words that people search for
    confidence: Annotated[str, Confidence]  #: proven, likely or weak
    effects: tuple[str, ...]  #: what it does to paths
    subject: str  #: on which GPUs, nodes, ranks or pairs it was seen
    implied_by: str | None  #: the cause that it follows from
    settles: str  #: what would settle a doubt
    link: str  #: the vendor's page, or an issue about it


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadRow(Record):
    """A cause of which it is not known whether it is there."""

    id: str  #: of the cause that could not be looked for
    title: str  #: in words
    subject: str  #: on what
    reason: str  #: why not: needs root, was not read, ...
