"""What every cause is: an entry of the catalogue, with the functions that look for it in facts and in NCCL's log."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gpubench.conditions.circumstances import Circumstances
from gpubench.conditions.log_evidence import Reason, Staged
from gpubench.model.paths.evidence import Confidence
from gpubench.model.paths.selection import Pair
from gpubench.model.results.rows.causes import Effect

_MOST_SUBJECTS = 4
_MOST_SEEN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A cause as it was seen somewhere.

    `gpus` are the positions of the GPUs whose paths it touches, None for all of the run; `pairs` the ordered pairs
    alone that it touches, where it is a matter of pairs. `cure` is said where it is more than the catalogue's, and
    `effects` where they are fewer: one port that is down of eight takes no node off its network.
    """

    subject: str
    seen: str
    confidence: Confidence
    gpus: frozenset[int] | None = None
    pairs: frozenset[Pair] | None = None
    cure: str = ""
    effects: tuple[Effect, ...] = ()

    def touches(self, pair: Pair) -> bool:
        """Whether a pair's path is touched."""
        if self.pairs is not None:
            return pair in self.pairs
        return self.gpus is None or not self.gpus.isdisjoint(pair)


@dataclass(frozen=True, slots=True)
class Unread:
    """Why it is not known whether a cause is there: on what, and what could not be read."""

    subject: str
    reason: str


Look = Callable[[Circumstances], Iterator[Sighting | Unread]]


def nothing_in_facts(_around: Circumstances) -> Iterator[Sighting | Unread]:
    """For causes that only a log shows."""
    return iter(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """An entry of the catalogue.

    `title` is in the words that people search for, `seen_as` what programs print where it holds, as people paste it
    into a search; `detection` says what shows it; `settles` what would settle a doubt;
    `cure` is a command or setting; `link` the vendor's page or an issue. `implies` are the ids of causes that follow
    from this one and are listed below it. `by_design` marks policies and hardware: nothing to repair. `general` marks
    what is said where nothing more special is found.
    """

    id: str
    title: str
    effects: tuple[Effect, ...]
    detection: str
    settles: str
    cure: str
    link: str
    look: Look
    seen_as: tuple[str, ...] = ()
    in_log: Callable[[Staged], Reason | None] | None = None
    implies: tuple[str, ...] = ()
    by_design: bool = False
    general: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """Causes of one kind: the module's name, what it is called, and its causes, those to look at first first."""

    name: str
    title: str
    causes: tuple[Cause, ...]


def joined(texts: Sequence[str], most: int = _MOST_SUBJECTS) -> str:
    """The first few of some texts, each once, and how many more there are."""
    distinct = list(dict.fromkeys(filter(None, texts)))
    more = len(distinct) - most
    return ", ".join(distinct[:most]) + (f" and {more} more" if more > 0 else "")


def joined_seen(texts: Sequence[str]) -> str:
    """The same of what was seen, in sentences."""
    distinct = list(dict.fromkeys(filter(None, texts)))
    more = len(distinct) - _MOST_SEEN
    return "; ".join(distinct[:_MOST_SEEN]) + (f"; and {more} more" if more > 0 else "")
