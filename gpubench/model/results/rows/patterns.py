"""The rows of the section `patterns`: copies of several pairs at once."""

from dataclasses import dataclass
from typing import Annotated

from gpubench.model.results.report import Record
from gpubench.model.terms.origin import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternRow(Record):
    """Several pairs at once, and what they reach one at a time."""

    pattern: str  #: ring, all to one, one to all, bisection, all to all
    direction: str  #: write or read
    gpus: int  #: that take part
    pairs: int  #: that copy at once
    size_bytes: int  #: bytes of a copy
    total_gb_s: float | None  #: GB/s of all together
    parts_gb_s: float | None  #: GB/s of the same pairs one at a time, summed
    share_percent: float | None  #: together over summed
    wrong: int | None  #: elements that were wrong
    origin: Annotated[str, Origin]  #: measured, simulated or recorded
    note: str | None  #: what else has to be said
