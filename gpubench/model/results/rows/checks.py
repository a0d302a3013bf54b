"""The rows of the sections `checks` and `verdicts`: what was looked for, and how each node, GPU and link fared."""

from dataclasses import dataclass

from gpubench.model.results.report import Record

CHECKS_SECTION, VERDICTS_SECTION = "checks", "verdicts"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow(Record):
    """One check: its verdict, how many findings it has, and why it was left out where it was."""

    check: str
    verdict: str
    findings: int
    looks_for: str
    note: str | None
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRow(Record):
    """How one subject fared: `scope` is node, gpu, nic or link; `findings` are the ids of those that name it."""

    scope: str
    node: str
    subject: str
    verdict: str
    findings: tuple[str, ...]
    origin: str
