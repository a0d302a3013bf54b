"""The rules that a recorded collective keeps beyond the types of its fields; a replay relies on them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from gpubench.collectives.record import Collective
from gpubench.collectives.request import Asked
from gpubench.errors import UsageError
from gpubench.measure.collective.cases import Case, cases, without_data
from gpubench.measure.collective.described import VERSION
from gpubench.measure.collective.recording import RecordedCollective, RecordedObservations, RecordedRow
from gpubench.measure.collective.row_collector import Answer
from gpubench.model.facts.idle_gpu import IdleGpu
from gpubench.model.terms.operation import Placement
from gpubench.model.terms.plain import to_plain
from gpubench.model.terms.split import RankGroup
from gpubench.model.terms.sweep import MOST_SIZES
from gpubench.readers.documents.characters import leaves

_MOST_BYTES = 2**60
_LEAST_SECONDS, _MOST_SECONDS = 1e-12, 1e9
_MOST = 1e15
"""Of any number with a fraction, so that nothing made of it is infinite."""

_MOST_WHOLE = 2**63

_WHITE = str.maketrans("", "", "\n\t")
"""White space that libraries have in their texts."""

CasesByGroup = Mapping[str | None, frozenset[Case]]
"""The cases that each group can have measured; None is all ranks together."""


def check_recorded(found: RecordedCollective, collective: Collective, where: str) -> CasesByGroup:
    """Refuse a first line that no run can have had; the cases of which there can be rows.

    Raises UsageError: it is a newer one's or another collective's, or contradicts itself.
    """
    if found.schema_version != VERSION:
        raise UsageError(
            f"{where}: schema_version {found.schema_version}",
            expected=f"{VERSION}, which this gpubench reads",
            reason="a newer gpubench recorded it",
            next_step="pip install --upgrade gpubench",
        )
    if found.collective != collective.name:
        raise UsageError(f"{where}: samples of {found.collective[:40]!a}", expected=f"those of {collective.name}")
    _check_values(found, where, but=("environment", "testimony"))
    if found.testimony is not None:
        _check_values(found.testimony, where, but=("settings",))
    _check_ranks(found, where)
    _check_asked(found.asked, collective, min(len(found.ranks_of(part)) for part in found.groups), where)
    _check_paths(found, where)
    request = found.asked.request(collective)
    by_group = {}
    for part in found.groups:
        ranks = len(found.ranks_of(part))
        if without_data(request, request.sizes, ranks):
            raise UsageError(f"{where}: a size of which {ranks} ranks have no share each", expected="sizes with data")
        by_group[None if part is None else part.name] = frozenset(cases(request, ranks))
    return by_group


def check_row(row: RecordedRow, found: RecordedCollective, by_group: CasesByGroup, where: str) -> None:
    """Refuse a row that cannot be one of this run.

    Raises UsageError: it is of another group or size, of other ranks, or its figures are none.
    """
    _check_values(row, where)
    if row.group not in by_group:
        raise UsageError(f"{where}: a row of the group {row.group!a}", expected="a group that the first line names")
    case = row.case
    if replace(case, setting=None) not in by_group[row.group]:
        raise UsageError(f"{where}: a row that was not asked for", expected="sizes, types and placements of line 1")
    part = next((each for each in found.parts if each.name == row.group), None)
    ranks = len(found.ranks_of(part))
    if len(row.sample.answers) != ranks:
        raise UsageError(f"{where}: answers of {len(row.sample.answers)} ranks", expected=f"{ranks} ranks")
    for answer in row.sample.answers:
        _check_answer(answer, where)
    if row.sample.own.iterations < 1:
        raise UsageError(f"{where}: {row.sample.own.iterations} iterations", expected="at least 1")


def check_idle(idle: Sequence[IdleGpu], found: RecordedCollective, where: str) -> None:
    """Refuse GPUs after the last row that are not those of the ranks.

    Raises UsageError: they are of other ranks, or were not looked at before the first row.
    """
    for each in idle:
        _check_values(each, where)
    if idle and (found.testimony is None or len(idle) != len(found.ranks)):
        raise UsageError(f"{where}: {len(idle)} GPUs after the last row", expected=_OF_RANKS)


def _check_values(value: object, where: str, but: Collection[str] = ()) -> None:
    """Refuse numbers so large that results would overflow, and texts that no output can show.

    Of the fields of `but`, which hold what a user has set, texts may be any.
    """
    plain = {name: held for name, held in to_plain(value).items() if name not in but}
    for _, each in leaves(plain, where):
        if isinstance(each, str):
            if not each.translate(_WHITE).isprintable():
                raise UsageError(f"{where}: {each[:40]!a}", expected="printable characters")
        elif each is not None and abs(each) > (_MOST if isinstance(each, float) else _MOST_WHOLE):
            raise UsageError(f"{where}: a number beyond {_MOST:g}", expected="a figure that a machine can have")


def _check_ranks(found: RecordedCollective, where: str) -> None:
    count = len(found.ranks)
    if not count or [each.rank for each in found.ranks] != list(range(count)):
        raise UsageError(f"{where}: ranks that are not counted from 0", expected="every rank of the job, in order")
    if not found.hosts or not all(0 <= each.node < len(found.hosts) for each in found.ranks):
        raise UsageError(f"{where}: ranks on more nodes than {len(found.hosts)}", expected="a host for each")
    if found.parts and not _are_all(found.parts, count):
        raise UsageError(f"{where}: groups that are not made of {count} ranks", expected="every rank in one group")


def _are_all(parts: Sequence[RankGroup], count: int) -> bool:
    """True if groups have every rank once, and names of their own."""
    ranks = sorted(rank for part in parts for rank in part.ranks)
    names = {part.name for part in parts}
    return ranks == list(range(count)) and all(part.ranks for part in parts) and len(names) == len(parts)


def _check_asked(asked: Asked, collective: Collective, ranks: int, where: str) -> None:
    if not 1 <= len(asked.sizes) <= MOST_SIZES or not all(1 <= size <= _MOST_BYTES for size in asked.sizes):
        raise UsageError(f"{where}: sizes that no sweep has", expected=f"1 to {MOST_SIZES:,} sizes of at least a byte")
    for words in (asked.dtypes, asked.ops, asked.placements):
        if not words or len(set(words)) < len(words):
            raise UsageError(f"{where}: {', '.join(words) or 'nothing'} asked for", expected="words, each once")
    if Placement.IN_PLACE in asked.placements and not collective.in_place:
        raise UsageError(f"{where}: {collective.name} in place", expected="out of place: it has no other form")
    if not 0 <= asked.root < ranks:
        raise UsageError(f"{where}: root {asked.root} of {ranks} ranks", expected="a rank")
    if asked.sampling.least_iterations < 1 or min(asked.warmup, asked.graph_replays) < 0:
        raise UsageError(f"{where}: fewer operations than none", expected="at least 1 that is timed")


def _check_paths(found: RecordedCollective, where: str) -> None:
    ranks = len(found.ranks)
    known = found.testimony
    if known is not None and (found.parts or found.model is not None or not _is_of(known, ranks)):
        raise UsageError(f"{where}: what was found out of paths is not that of {ranks} ranks", expected=_OF_RANKS)
    for pair in () if found.model is None else found.model.staged:
        if len(pair) != 2 or pair[0] == pair[1] or not all(0 <= rank < ranks for rank in pair):
            raise UsageError(f"{where}: the pair {list(pair)}", expected=f"two different of {ranks} ranks")


_OF_RANKS = "pairs, bytes and counts of the ranks of the job"


def _is_of(known: RecordedObservations, ranks: int) -> bool:
    return (
        len(known.due) == len(known.traffic) == ranks
        and len(known.idle) in (0, ranks)
        and all(len(each) == 2 and min(each) >= 0 for each in known.due)
        and all(heard.is_of(ranks) for heard in (known.heard, *known.under.values()))
    )


def _check_answer(answer: Answer, where: str) -> None:
    issued = answer.issue_seconds or 0.0
    if not _LEAST_SECONDS <= answer.seconds <= _MOST_SECONDS or answer.wrong < 0 or not 0 <= issued <= _MOST_SECONDS:
        raise UsageError(
            f"{where}: an operation of {answer.seconds:g} s with {answer.wrong} wrong elements",
            expected="a time above 0, and no fewer than 0 elements",
        )
    entries = answer.entries
    if entries is not None and not (
        0 <= entries.last <= entries.operations > 0
        and min(entries.late_seconds, entries.uncertainty) >= 0
        and max(entries.late_seconds, entries.uncertainty) <= _MOST_SECONDS
    ):
        raise UsageError(f"{where}: a rank that was last in {entries.last} of {entries.operations}", expected="a part")
