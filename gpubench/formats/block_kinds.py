"""The kinds of blocks that a page is made of, and how values become words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpubench.model.terms.units import some_of
from gpubench.model.terms.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Listing:
    """A table of words. `verdicts` has one a line, None where nothing was judged; `left_out` counts further lines."""

    title: str
    heads: Sequence[str]
    lines: Sequence[Sequence[str]]
    verdicts: Sequence[Verdict | None]
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class GridCell:
    """A cell: its words, how near it is to what is expected or to the best of its grid (0 to 1, None where it is no
    number), its verdict.
    """

    text: str
    share: float | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """A matrix between devices."""

    title: str
    corner: str
    columns: Sequence[str]
    lines: Mapping[str, Mapping[str, GridCell]]


def word(value: Any) -> str:
    """A value as a person reads it: four digits, nothing for what is unknown."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if value < 10_000 else f"{value:.0f}"
    if isinstance(value, (list, tuple)):
        return some_of([word(each) for each in value], 8)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {word(each)}" for key, each in value.items())
    return str(value)


def verdict_of(text: str | None) -> Verdict | None:
    """The verdict that a row has as a word; None where nothing was judged."""
    return None if text is None else Verdict(text)


def without_empty(listing: Listing) -> Listing:
    """Without the columns in which nothing is known."""
    kept = [number for number in range(len(listing.heads)) if any(line[number] for line in listing.lines)]
    return Listing(
        listing.title,
        [listing.heads[number] for number in kept],
        [[line[number] for number in kept] for line in listing.lines],
        listing.verdicts,
        listing.left_out,
    )
