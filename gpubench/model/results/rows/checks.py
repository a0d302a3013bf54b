"""The rows of the sections `checks` and `verdicts`: what was looked for, and how each node, GPU and link fared."""

from dataclasses import dataclass
from typing import Annotated

from gpubench.model.results.report import Record
from gpubench.model.terms.verdict import Verdict

CHECKS_SECTION, VERDICTS_SECTION = "checks", "verdicts"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow(Record):
    """One check of `check`: its verdict, how many findings it has, and why it was left out where it was."""

    check: str  #: what was looked for, by the name of its file
    verdict: Annotated[str, Verdict]  #: the worst of its findings; SKIP where it was left out
    findings: int  #: how many
    looks_for: str  #: in words
    note: str | None  #: why it was left out
    origin: str  #: measured, simulated or recorded
    nodes_in_error: tuple[str, ...] = ()  #: hosts that it could not look at; the verdict is of the others


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRow(Record):
    """The verdict of `check` on a node, GPU, NIC or link, and the ids of the findings that name it."""

    scope: Annotated[str, ("node", "gpu", "nic", "link")]  #: what is judged
    node: str  #: host
    subject: str  #: the node, GPU, NIC or link
    verdict: Annotated[str, Verdict]  #: the worst of the findings that name it
    findings: tuple[str, ...]  #: ids of those
    origin: str  #: measured, simulated or recorded
