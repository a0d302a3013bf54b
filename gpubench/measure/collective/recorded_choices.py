"""A library's choices in the form of a recording, in which operations share their connections.

Of a thousand ranks that send to each other there are a million pairs. Fields are named as in files.
"""

from dataclasses import dataclass

from gpubench.measure.collective.logged_choices import Choice, LoggedChoices, distinct_uses
from gpubench.model.paths.selection import Pair, Used
from gpubench.model.paths.transport import Transport, Tuning
from gpubench.model.terms.operation import DataType, ReduceOp


@dataclass(frozen=True, slots=True)
class RecordedPairs:
    """The ordered pairs of ranks that are connected alike."""

    transports: tuple[Transport, ...]
    pairs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RecordedUse:
    """The connections of operations."""

    connections: tuple[RecordedPairs, ...]
    unheard: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedChoice:
    """The choice for an operation; `use` is the place of its connections in `uses`."""

    dtype: DataType
    op: ReduceOp | None
    size_bytes: int
    use: int
    tuning: Tuning | None = None


@dataclass(frozen=True, slots=True)
class RecordedLoggedChoices:
    """All choices. `silence` is why a rank's log cannot be read."""

    uses: tuple[RecordedUse, ...] = ()
    choices: tuple[RecordedChoice, ...] = ()
    silence: str = ""
    no_tuning: str = ""

    @classmethod
    def of(cls, logged: LoggedChoices) -> "RecordedLoggedChoices":
        """The choices to be written; `restored` is the inverse."""
        uses = list(distinct_uses(logged))
        choices = (
            RecordedChoice(dtype, op, size_bytes, uses.index(choice.used), choice.tuning)
            for (dtype, op, size_bytes), choice in logged.by_operation.items()
        )
        return cls(tuple(map(_recorded, uses)), tuple(choices), logged.no_log, logged.no_tuning)

    def restored(self) -> LoggedChoices:
        """The choices as they were."""
        uses = [_used(each) for each in self.uses]
        choices = {(each.dtype, each.op, each.size_bytes): Choice(uses[each.use], each.tuning) for each in self.choices}
        return LoggedChoices(choices, self.silence, self.no_tuning)

    def is_of(self, ranks: int) -> bool:
        """True if these can be the choices of so many ranks."""
        pairs = [pair for each in self.uses for alike in each.connections for pair in alike.pairs]
        named = [rank for each in (*pairs, *(use.unheard for use in self.uses)) for rank in each]
        return (
            all(0 <= rank < ranks for rank in named)
            and all(len(pair) == 2 for pair in pairs)
            and all(0 <= each.use < len(self.uses) for each in self.choices)
        )


def _recorded(used: Used) -> RecordedUse:
    alike: dict[tuple[Transport, ...], list[Pair]] = {}
    for pair, transports in used.pairs.items():
        alike.setdefault(transports, []).append(pair)
    return RecordedUse(tuple(RecordedPairs(each, tuple(pairs)) for each, pairs in alike.items()), used.unconnected)


def _used(recorded: RecordedUse) -> Used:
    pairs = {
        (source, destination): each.transports for each in recorded.connections for source, destination in each.pairs
    }
    return Used({pair: pairs[pair] for pair in sorted(pairs)}, recorded.unheard)
