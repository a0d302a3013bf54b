"""Who hangs: the ranks that keep the others of a group waiting, from dumps of Flight Recorder and answers of RAS."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from statistics import median

from gpubench.model.paths.hang import Hang, HangReason, RankRecord, RasCommunicator, RecordedCall

_ANY_SIZE = ("gather", "scatter", "alltoall", "all_to_all")
"""Operations whose sizes may differ between ranks, by their beginnings."""

_SLOW_SECONDS = 1.0
_TIMES_SLOWER = 10
_FEWEST_BEFORE = 2
_NS = 1e9

Calls = Mapping[int, Mapping[int, RecordedCall]]
"""By rank and sequence number."""


def hangs_of(records: Sequence[RankRecord], ras: Sequence[RasCommunicator]) -> tuple[Hang, ...]:
    """The collectives that did not end, root causes first."""
    answers: dict[str, list[RasCommunicator]] = {}
    for answer in ras:
        answers.setdefault(answer.id, []).append(answer)
    found = [*_in_records(records), *(hang for each in answers.values() for hang in _in_ras(each))]
    return tuple(sorted(found, key=lambda each: each.reason in (HangReason.ELSEWHERE, HangReason.SLOW)))


def _in_records(records: Sequence[RankRecord]) -> Iterator[Hang]:
    by_group: dict[str, dict[int, dict[int, RecordedCall]]] = {}
    for record in records:
        for call in record.calls:
            by_group.setdefault(call.group, {}).setdefault(record.rank, {})[call.sequence] = call
    have_dumps = {record.rank for record in records}
    listed = {name: ranks for record in records for name, ranks in record.groups.items()}
    for number, (group, calls) in enumerate(by_group.items()):
        # The group of all ranks has at least those of which there are dumps, and all numbers between them.
        every = range(max(have_dumps) + 1) if number == 0 and group == "0" else sorted(calls)
        members = listed.get(group, tuple(every))
        hang = _in_group(group, members, calls, have_dumps, by_group)
        if hang is not None:
            yield hang


def _in_group(
    group: str, members: Sequence[int], calls: Calls, have_dumps: set[int], by_group: Mapping[str, Calls]
) -> Hang | None:
    waiting = {
        rank: min(opened)
        for rank, own in calls.items()
        if (opened := [at for at, call in own.items() if not call.done])
    }
    if not waiting:
        return _slowest(group, calls)
    ended = {at for own in calls.values() for at, call in own.items() if call.done}
    # A call that ended on another rank was joined by all.
    first = min(set(waiting.values()) - ended or waiting.values())
    there = {rank: calls[rank][first] for rank in members if first in calls.get(rank, {})}
    shown = _most(there)
    odd = [rank for rank, call in there.items() if _difference(call, shown) is not None]
    absent = [rank for rank in members if rank not in there]
    since = _since(there, waiting, first)

    def hang(reason: HangReason, ranks: Sequence[int], theirs: str) -> Hang:
        return Hang(
            group=group,
            reason=reason,
            ranks=tuple(f"rank {rank}" for rank in ranks),
            waiting=len(set(waiting) - {*ranks}),
            operation=_described(shown),
            place=shown.place,
            theirs=theirs,
            since=since,
        )

    if odd:
        reason = _reason(calls, odd[0], first, shown)
        theirs = "; ".join(dict.fromkeys(f"{_described(there[rank])}{_at(there[rank].place)}" for rank in odd))
        if len(odd) * 2 >= len(there) > 1:
            return hang(HangReason.UNKNOWN, sorted(there), f"half of the ranks called {theirs}")
        return hang(reason, odd, theirs)
    lost = [rank for rank in absent if rank not in have_dumps]
    if lost:
        return hang(HangReason.DEAD, lost, "")
    if not absent:
        others = _elsewhere(group, by_group) if len(there) == 1 else {}
        theirs = "; ".join(f"{_described(call)} of group {call.group}" for call in others.values())
        return hang(
            *((HangReason.ELSEWHERE, sorted(others)) if others else (HangReason.TOGETHER, sorted(waiting))), theirs
        )
    others = _elsewhere(group, by_group)
    elsewhere = [others[rank] for rank in absent if rank in others]
    last = [calls[rank][max(calls[rank])] for rank in absent if calls.get(rank)]
    theirs = f"last called {_described(last[0])}{_at(last[0].place)}" if last else "called nothing of this group"
    if len(elsewhere) == len(absent):
        return hang(HangReason.ELSEWHERE, absent, f"{_described(elsewhere[0])} of group {elsewhere[0].group}")
    return hang(HangReason.ABSENT, absent, theirs)


def _elsewhere(group: str, by_group: Mapping[str, Calls]) -> dict[int, RecordedCall]:
    """What ranks wait for in other groups."""
    return {
        rank: call
        for name, calls in by_group.items()
        if name != group
        for rank, own in calls.items()
        for call in own.values()
        if not call.done
    }


def _signature(call: RecordedCall) -> tuple[object, ...]:
    return call.operation, () if call.operation.startswith(_ANY_SIZE) else call.sizes, call.types


def _most(there: Mapping[int, RecordedCall]) -> RecordedCall:
    """The call that most ranks made."""
    most, _ = Counter(map(_signature, there.values())).most_common(1)[0]
    return next(call for call in there.values() if _signature(call) == most)


def _difference(call: RecordedCall, shown: RecordedCall) -> HangReason | None:
    mine, theirs = _signature(call), _signature(shown)
    reasons = (HangReason.TYPE, HangReason.SIZE, HangReason.DTYPE)
    return next((reason for reason, one, other in zip(reasons, mine, theirs, strict=True) if one != other), None)


def _reason(calls: Calls, rank: int, first: int, shown: RecordedCall) -> HangReason:
    """How the call of a rank differs; it is the order where either makes the other's call next."""
    call = calls[rank][first]
    others_next = [each for at in calls.values() if (each := at.get(first + 1)) is not None]
    own_next = calls[rank].get(first + 1)
    swapped = any(_signature(each) == _signature(call) for each in others_next) or (
        own_next is not None and _signature(own_next) == _signature(shown)
    )
    reason = _difference(call, shown) or HangReason.UNKNOWN
    return HangReason.ORDER if reason is HangReason.TYPE and swapped else reason


def _described(call: RecordedCall) -> str:
    size = ", ".join("×".join(map(str, each)) or "1" for each in call.sizes)
    return (
        f"{call.operation} number {call.sequence} of {size or 'no'} {'/'.join(dict.fromkeys(call.types)) or 'elements'}"
    )


def _at(place: str) -> str:
    return f" at {place}" if place else ""


def _since(there: Mapping[int, RecordedCall], waiting: Mapping[int, int], first: int) -> str:
    times = [call.called_ns for rank, call in there.items() if waiting.get(rank) == first and call.called_ns]
    return "" if not times else datetime.fromtimestamp(min(times) / _NS, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _slowest(group: str, calls: Calls) -> Hang | None:
    """The rank that came much later to the last collective than to those before, where all came to its end.

    Clocks of ranks differ: a rank's lateness is held against its own before.
    """
    common = sorted(set.intersection(*(set(each) for each in calls.values())))[-8:]
    if len(calls) < _FEWEST_BEFORE or len(common) <= _FEWEST_BEFORE:
        return None
    late: dict[int, float] = {}
    usual: list[float] = []
    for rank, own in calls.items():
        offsets = [(own[at].called_ns - median(each[at].called_ns for each in calls.values())) / _NS for at in common]
        late[rank] = offsets[-1] - median(offsets[:-1])
        usual += [abs(each - median(offsets[:-1])) for each in offsets[:-1]]
    slowest = max(late, key=lambda rank: late[rank])
    if late[slowest] < max(_SLOW_SECONDS, _TIMES_SLOWER * median(usual)):
        return None
    call = calls[slowest][common[-1]]
    return Hang(
        group=group,
        reason=HangReason.SLOW,
        ranks=(f"rank {slowest}",),
        waiting=len(calls) - 1,
        operation=_described(call),
        place=call.place,
        theirs=f"came {late[slowest]:.1f} s after the others",
    )


def _in_ras(answers: Sequence[RasCommunicator]) -> Iterator[Hang]:
    """Ranks of a communicator that are missing, left, or launched fewer operations than the others.

    Fewer operations, and ranks that leave, are sure where two answers agree; where counts differ there is progress.
    """
    communicator = answers[-1]
    if len(answers) > 1 and any(each.ranks != communicator.ranks for each in answers):
        return
    is_sure = len(answers) > 1
    size = communicator.size or len(communicator.ranks) + 1
    for reason, ranks in (
        (HangReason.DEAD, [each for each in communicator.ranks if each.dead]),
        (HangReason.SILENT, [each for each in communicator.ranks if each.silent and not each.dead]),
        (HangReason.LEFT, [each for each in communicator.ranks if each.left and not each.dead]),
    ):
        if ranks and len(ranks) < size:
            names = [_named(each.rank, each.host, each.pid) for each in ranks]
            yield _of_ras(communicator, reason, names, is_sure=is_sure or reason is not HangReason.LEFT)
    names = sorted({name for each in communicator.ranks for name in each.counts})
    for name in names:
        launched = [each for each in communicator.ranks if name in each.counts]
        most = max(each.counts[name] for each in launched)
        behind = [each for each in launched if each.counts[name] < most and each.rank >= 0]
        if behind:
            theirs = f"launched {min(each.counts[name] for each in behind)}"
            operation = f"{name} number {most}"
            late = [_named(each.rank, each.host, each.pid) for each in behind]
            yield _of_ras(communicator, HangReason.ABSENT, late, operation, theirs, is_sure=is_sure)


def _named(rank: int, host: str, pid: int | None) -> str:
    return f"rank {rank}" + (f" ({host}:{pid})" if pid is not None else "")


def _of_ras(
    communicator: RasCommunicator,
    reason: HangReason,
    names: Sequence[str],
    operation: str = "",
    theirs: str = "",
    *,
    is_sure: bool,
) -> Hang:
    return Hang(
        group=communicator.id,
        reason=reason,
        ranks=tuple(dict.fromkeys(names)),
        waiting=max((communicator.size or 0) - len(set(names)), 0),
        operation=operation,
        theirs=theirs,
        is_sure=is_sure,
    )
