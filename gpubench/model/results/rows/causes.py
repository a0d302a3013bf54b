"""The rows of the sections `causes` and `causes_unread`: why bytes travel as they do, and what could not be asked."""

from dataclasses import dataclass
from enum import StrEnum

from gpubench.model.results.report import Record

CAUSES_SECTION, UNREAD_SECTION = "causes", "causes_unread"


class Effect(StrEnum):
    """What a cause does to a path. The first four are what bytes through host memory look like from outside."""

    STAGED = "host memory inside a node"
    NETWORK_INSIDE = "a network inside a node"
    SOCKETS = "sockets between nodes"
    NO_GPUDIRECT = "RDMA through host memory"
    APPLICATION = "MPI, UCX or a framework copies through host memory"
    WRONG = "wrong data, or a hang"
    SLOW = "a slower path"


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseRow(Record):
    """A cause that holds, those to look at first first: what shows it, what to do, how many paths it explains.

    `paths` counts those that were seen to go through host memory; 0 where it explains none of them and may slow others
    down, or where nothing was sent. `verdict` is SKIP by design, else how grave the condition is. `subject` is on what;
    `implied_by` the id of the cause that it follows from; `settles` what would settle a doubt. docs/conditions.md has
    the whole catalogue.
    """

    id: str
    evidence: str
    advice: str
    paths: int
    verdict: str
    hosts: tuple[str, ...]
    title: str
    confidence: str
    effects: tuple[str, ...]
    subject: str
    implied_by: str | None
    settles: str
    link: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadRow(Record):
    """Why it is not known whether a cause is there."""

    id: str
    title: str
    subject: str
    reason: str
