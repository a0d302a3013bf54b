"""The library's choice for every operation, read from its log while each runs once, untimed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from gpubench.collectives.movement import exchanges
from gpubench.collectives.request import SweepRequest
from gpubench.measure.collective.cases import Case
from gpubench.measure.paths.nccl_log_listener import NcclLogListener
from gpubench.model.paths.selection import Selection, Used
from gpubench.model.paths.transport import Tuning
from gpubench.model.results.report import CollectiveRow
from gpubench.model.terms.operation import DataType, ReduceOp
from gpubench.ports.group import Group
from gpubench.ports.library_log import LibraryLog

OperationKey = tuple[DataType, ReduceOp | None, int]
"""The type, reduction and size that the library chooses by."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The connections of an operation, and its algorithm and protocol, None where the library does not log them."""

    used: Used
    tuning: Tuning | None

    def in_row(self, row: CollectiveRow) -> CollectiveRow:
        """A row of that operation with the choice filled in."""
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
    """The choices that all ranks' logs show together, as the first rank knows them.

    `no_log` is why a rank's log cannot be read, `no_tuning` why algorithms are not known.
    """

    by_operation: Mapping[OperationKey, Choice] = field(default_factory=dict)
    no_log: str = ""
    no_tuning: str = ""


def key_of(case: Case) -> OperationKey:
    """The key of a case's operation: in place or out of place makes no difference."""
    return case.dtype, case.op, case.size_bytes


def read_choices(
    request: SweepRequest,
    group: Group,
    nodes: Sequence[int],
    log: LibraryLog,
    cases: Sequence[Case],
    try_once: Callable[[Case], object],
) -> LoggedChoices | None:
    """Run every operation once and gather what is logged of it on the first rank; None on the others.

    `nodes` are the ranks' nodes. Connections are made at first use, and algorithms depend on size: only what was tried
    is known.
    """
    listener = NcclLogListener(log)
    listener.listen()
    tunings: dict[OperationKey, Tuning | None] = {}
    for case in cases:
        if key_of(case) not in tunings:
            try_once(case)
            tunings[key_of(case)] = listener.listen()
    collected = group.collect(listener.selection())
    if collected is None:
        return None
    selection = Selection(collected, nodes)
    pairs = exchanges(request.collective, cases[0].layout, group.size, request.root)
    used = _used_by(selection, tuple(pairs) if request.collective.point_to_point else ())
    return LoggedChoices(
        by_operation={
            key: Choice(used(None if each is None else each.algorithm), each) for key, each in tunings.items()
        },
        no_log=selection.no_log,
        no_tuning=log.no_tuning,
    )


def _used_by(selection: Selection, pairs: Sequence[tuple[int, int]]) -> Callable[[str | None], Used]:
    """The connections of an algorithm, or without one of the sends between these pairs; each found once."""

    @cache
    def used(algorithm: str | None) -> Used:
        return selection.of_sends(pairs) if algorithm is None and pairs else selection.of_algorithm(algorithm)

    return used


def distinct_uses(choices: LoggedChoices) -> Iterator[Used]:
    """The different connections that operations use."""
    seen: list[Used] = []
    for choice in choices.by_operation.values():
        if choice.used not in seen:
            seen.append(choice.used)
            yield choice.used
