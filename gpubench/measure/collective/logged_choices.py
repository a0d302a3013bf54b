"""What the library says it chose, heard from its log while every operation runs once, untimed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from gpubench.collectives.movement import exchanges
from gpubench.measure.collective.cases import Case, SweepRequest
from gpubench.measure.paths.nccl_log_listener import NcclLogListener
from gpubench.model.paths.selection import Selection, Used
from gpubench.model.paths.transport import Tuning
from gpubench.model.results.report import CollectiveRow
from gpubench.model.terms.operation import DataType, ReduceOp
from gpubench.ports.group import Group
from gpubench.ports.library_log import LibraryLog

Key = tuple[DataType, ReduceOp | None, int]
"""What the library chooses by: type, reduction and size."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What it took for an operation: the connections, and the algorithm as it names it, None where it did not say."""

    used: Used
    tuning: Tuning | None

    def told(self, row: CollectiveRow) -> CollectiveRow:
        """A row of that operation, with all this in it."""
        tuning = self.tuning
        return replace(
            row,
            algorithm=None if tuning is None else tuning.algorithm,
            protocol=None if tuning is None else tuning.protocol,
            channels=None if tuning is None else tuning.channels,
            transport=self.used.transport,
            host_staged=self.used.host_staged,
        )


@dataclass(frozen=True, slots=True)
class LoggedChoices:
    """What all ranks heard, as the first rank knows it.

    `no_log` is why a rank heard nothing, `no_tuning` why algorithms are not known.
    """

    choices: Mapping[Key, Choice] = field(default_factory=dict)
    no_log: str = ""
    no_tuning: str = ""


def key_of(case: Case) -> Key:
    """By what the operation of a case is chosen: in place or out of place makes no difference."""
    return case.dtype, case.op, case.size_bytes


def hear(
    request: SweepRequest,
    group: Group,
    nodes: Sequence[int],
    log: LibraryLog,
    cases: Sequence[Case],
    try_once: Callable[[Case], object],
) -> LoggedChoices | None:
    """Try every operation once and gather what was said of it on the first rank; None on the others.

    `nodes` are the ranks' nodes. Connections are made at first use, and algorithms depend on size: only what was tried
    is known.
    """
    ear = NcclLogListener(log)
    ear.listen()
    tunings: dict[Key, Tuning | None] = {}
    for case in cases:
        if key_of(case) not in tunings:
            try_once(case)
            tunings[key_of(case)] = ear.listen()
    collected = group.collect(ear.selection())
    if collected is None:
        return None
    selection = Selection(collected, nodes)
    used = _used_by(selection, _exchanges(request, cases, group.size))
    return LoggedChoices(
        choices={key: Choice(used(None if each is None else each.algorithm), each) for key, each in tunings.items()},
        no_log=selection.no_log,
        no_tuning=log.no_tuning,
    )


def _exchanges(request: SweepRequest, cases: Sequence[Case], ranks: int) -> tuple[tuple[int, int], ...]:
    """Who sends to whom, where the library makes the collective of sends and receives."""
    if not request.collective.point_to_point:
        return ()
    return tuple(exchanges(request.collective, cases[0].layout, ranks, request.root))


def _used_by(selection: Selection, pairs: Sequence[tuple[int, int]]) -> Callable[[str | None], Used]:
    """What an algorithm runs over, or without one the sends between these pairs; found out once."""

    @cache
    def used(algorithm: str | None) -> Used:
        return selection.of_sends(pairs) if algorithm is None and pairs else selection.of_algorithm(algorithm)

    return used


def shared(choices: Mapping[Key, Choice]) -> Iterator[Used]:
    """The distinct ways that operations took."""
    seen: list[Used] = []
    for choice in choices.values():
        if choice.used not in seen:
            seen.append(choice.used)
            yield choice.used
