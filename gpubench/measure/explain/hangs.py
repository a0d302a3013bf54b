"""Find the ranks that keep a job waiting, from Flight Recorder dumps, RAS answers and the log of PyTorch's watchdog."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from statistics import median, median_low

from msgspec import Struct
from msgspec.structs import replace

from gpubench.model.paths.hang import Hang, HangReason, ProcessStack, RankRecord, RasCommunicator, RasRank, RecordedCall
from gpubench.model.paths.nccl_log import InspectedOperation, LogFacts
from gpubench.model.terms.units import plural

_ANY_SIZE = ("gather", "scatter", "alltoall", "all_to_all")
"""Prefixes of operations whose sizes may differ between ranks."""

_ALL_RANKS = "0"
"""PyTorch's name for the group of all ranks."""

_NOT_NAMED = "operation"
"""The operation's name if the watchdog prints only its number."""

_NEED_ALL_RANKS = (_NOT_NAMED, "all", "_all", "barrier", "reduce_scatter", "_reduce_scatter", "reducescatter")
"""Prefixes of operations that no rank can finish before every rank has joined."""

_MOST_NAMED = 8
_SLOW_SECONDS = 1.0
_TIMES_SLOWER = 10
_LAST_CALLS, _FEWEST_LATE = 8, 3
_FEWEST_BEFORE = 2
_NS = 1e9

Calls = Mapping[int, Mapping[int, RecordedCall]]
"""Recorded calls by rank, then by sequence number."""


def find_hangs(records: Sequence[RankRecord], ras: Sequence[RasCommunicator]) -> tuple[Hang, ...]:
    """Return the collectives that did not finish, root causes first.

    A rank that waits in another group is named only if nothing else explains the hang.
    """
    answers: dict[str, list[RasCommunicator]] = {}
    for answer in ras:
        answers.setdefault(answer.id, []).append(answer)
    recorded = tuple(_find_in_records(records)) or _find_missing_dumps(records)
    found = [*recorded, *(hang for answer in answers.values() for hang in _find_in_ras(answer))]
    if any(hang.reason not in (HangReason.ELSEWHERE, HangReason.SLOW) for hang in found):
        found = [hang for hang in found if hang.reason is not HangReason.ELSEWHERE]
    return tuple(sorted(found, key=lambda hang: hang.reason in (HangReason.ELSEWHERE, HangReason.SLOW)))


def find_hangs_in_log(facts: LogFacts) -> tuple[Hang, ...]:
    """Return the hangs in dumps and RAS answers. If there are no dumps, parse the watchdog lines too."""
    sizes = [communicator.size for communicator in facts.communicators if communicator.size]
    printed = () if facts.records else _find_in_watchdog_lines(facts.watchdogs, max(sizes, default=None))
    missed = [
        Hang(
            group="default",
            reason=HangReason.ABSENT,
            ranks=tuple(f"rank {rank}" for rank in facts.missed_barrier),
            waiting=max(max(sizes, default=0) - len(facts.missed_barrier), 0),
            operation="monitoredBarrier",
        )
    ]
    found = (
        *find_hangs(facts.records, facts.ras),
        *printed,
        *(missed if facts.missed_barrier else ()),
        *_find_stragglers(facts.inspected),
    )
    return tuple(replace(hang, now=_current_frame(hang, facts.stacks)) for hang in found)


def _current_frame(hang: Hang, stacks: Sequence[ProcessStack]) -> str:
    """Return the innermost stack frames of the first suspect that py-spy inspected, or an empty string."""
    process = None if hang.process is None else hang.process[1]
    ranks = [name.partition(" (")[0] for name in hang.ranks]
    for stack in stacks:
        if stack.pid == process or (process is None and stack.rank is not None and f"rank {stack.rank}" in ranks):
            name = "" if len(ranks) == 1 else f"{next(iter(ranks))} "
            return f"{name}is at {', called from '.join(stack.places)}" if stack.places else ""
    return ""


def _find_in_watchdog_lines(records: Sequence[RankRecord], size: int | None) -> Iterator[Hang]:
    """Find hangs in the lines of PyTorch's watchdog.

    Each line reports one rank, and other ranks may use other log files.
    """
    for hang in sorted(_find_in_records(records), key=lambda hang: hang.reason is HangReason.ELSEWHERE):
        if hang.reason is HangReason.NO_DUMP:
            yield replace(hang, reason=HangReason.ABSENT, theirs="its watchdog logged nothing here", is_sure=False)
        elif hang.reason is HangReason.TOGETHER:
            is_whole = hang.ranks == tuple(f"rank {rank}" for rank in range(len(hang.ranks)))
            if is_whole and len(hang.ranks) > 1 and size in (None, len(hang.ranks)):
                yield replace(hang, theirs="" if size else "all ranks in this log", is_sure=size is not None)
        else:
            yield hang


_SYMMETRIC = ("allreduce", "allgather", "reducescatter")
_FEWEST_OPERATIONS = 20
_LAST_SHARE, _TIMES_CHANCE = 0.5, 3
"""A rank is a straggler if it comes last in this share of operations, and this many times as often as by chance."""

_WAITED_SHARE, _WAITED_US = 0.2, 20.0
"""A straggler is reported if the median rank waits for this share of the total time, and this many µs per operation."""


def _find_stragglers(operations: Sequence[InspectedOperation]) -> Iterator[Hang]:
    """Find the rank for which the others repeatedly wait. Its kernels are the shortest, because it arrives last."""
    by_communicator: dict[str, list[InspectedOperation]] = {}
    for operation in operations:
        if operation.collective in _SYMMETRIC and len(operation.times) == operation.ranks > 1:
            by_communicator.setdefault(operation.communicator, []).append(operation)
    for name, calls in by_communicator.items():
        waits = [call for call in calls if median(call.times.values()) - min(call.times.values()) >= _WAITED_US]
        last = Counter(_last_rank(wait) for wait in waits).most_common(1)
        slow, times = last[0] if last else (0, 0)
        waited = [median(wait.times.values()) - wait.times[slow] for wait in waits if _last_rank(wait) == slow]
        share, lost = times / max(len(waits), 1), sum(waited) / sum(median(call.times.values()) for call in calls)
        least_share = min(max(_LAST_SHARE, _TIMES_CHANCE / calls[0].ranks), 0.9)
        if times >= _FEWEST_OPERATIONS and share >= least_share and lost >= _WAITED_SHARE:
            yield Hang(
                group=name,
                reason=HangReason.SLOW,
                ranks=(f"rank {slow}",),
                waiting=calls[0].ranks - 1,
                operation="",
                theirs=f"came last in {times} of {len(calls)} operations, {median(waited):.0f} µs after the others "
                f"(median): {100 * lost:.0f} % of the time of all operations",
            )


def _last_rank(operation: InspectedOperation) -> int:
    return min(operation.times, key=lambda rank: operation.times[rank])


def _find_in_records(records: Sequence[RankRecord]) -> Iterator[Hang]:
    by_group: dict[str, dict[int, dict[int, RecordedCall]]] = {}
    for record in records:
        for call in record.calls:
            by_group.setdefault(call.group, {}).setdefault(record.rank, {})[call.sequence] = call
    have_dumps = {record.rank for record in records}
    listed = {name: ranks for record in records for name, ranks in record.groups.items()}
    for number, (group, calls) in enumerate(by_group.items()):
        # The group of all ranks contains at least the ranks with a dump, and all ranks between them.
        every = range(max(have_dumps) + 1) if number == 0 and group == _ALL_RANKS else sorted(calls)
        members = listed.get(group, tuple(every))
        hang = _find_in_group(group, members, calls, have_dumps, by_group)
        if hang is not None and hang.reason is HangReason.TOGETHER and group not in listed:
            several = len(hang.ranks) > 1
            theirs = "all ranks with a dump (the total is unknown)"
            hang = replace(hang, theirs=theirs, is_sure=False) if several else None
        if hang is not None:
            yield hang


def _find_missing_dumps(records: Sequence[RankRecord]) -> Iterator[Hang]:
    """Find ranks without a dump although the others do not wait in any collective. The missing ranks may have died."""
    have = {record.rank for record in records}
    lost = [rank for rank in range(max(have, default=0)) if rank not in have]
    if lost and len(have) > 1 and any(call.group == _ALL_RANKS for record in records for call in record.calls):
        yield Hang(
            group=_ALL_RANKS,
            reason=HangReason.NO_DUMP,
            ranks=tuple(f"rank {rank}" for rank in lost),
            waiting=0,
            operation="",
            theirs="the others do not wait in a collective",
            is_sure=False,
        )


def _find_in_group(
    group: str, members: Sequence[int], calls: Calls, have_dumps: set[int], by_group: Mapping[str, Calls]
) -> Hang | None:
    waiting = {
        rank: min(opened)
        for rank, rank_calls in calls.items()
        if (opened := [at for at, call in rank_calls.items() if not call.done])
    }
    if not waiting:
        return _slowest(group, calls)
    first = _first_difference(calls, _first_unfinished(calls, waiting))
    there = {rank: calls[rank][first] for rank in members if first in calls.get(rank, {})}
    named = {rank: call for rank, call in there.items() if call.operation != _NOT_NAMED}
    most_common, _ = Counter(map(_signature, (named or there).values())).most_common(1)[0]
    shown = next(call for call in (named or there).values() if _signature(call) == most_common)
    odd = [rank for rank, call in named.items() if _difference(call, shown) is not None]
    absent = [rank for rank in members if rank not in there]

    def hang(reason: HangReason, ranks: Sequence[int], theirs: str) -> Hang:
        return Hang(
            group=group,
            reason=reason,
            ranks=tuple(f"rank {rank}" for rank in ranks),
            waiting=len(waiting) if reason is HangReason.TOGETHER else len(set(waiting) - {*ranks}),
            operation=_call_text(shown),
            place=shown.place,
            theirs=theirs,
            since=_since(there, waiting, first),
        )

    if odd:
        if len(odd) * 2 >= len(named) > 1:
            texts = [f"rank {rank} in {_call_text(named[rank])}" for rank in sorted(named)[:_MOST_NAMED]]
            return replace(hang(HangReason.UNKNOWN, sorted(named), "; ".join(texts)), operation="")
        theirs = "; ".join(dict.fromkeys(f"{_call_text(there[rank])}{_place_text(there[rank].place)}" for rank in odd))
        return hang(_odd_reason(calls, odd[0], first, shown), odd, theirs)
    lost = [rank for rank in absent if rank not in have_dumps]
    if lost:
        return hang(HangReason.NO_DUMP, lost, "")
    if not absent:
        others = _waiting_elsewhere(group, by_group) if len(there) == 1 else {}
        # If no dump lists the group's members, ranks that wait in the group of all ranks are probably not members.
        others = {rank: call for rank, call in others.items() if call.group != _ALL_RANKS}
        theirs = "; ".join(f"{_call_text(call)} of group {call.group}" for call in others.values())
        return hang(
            *((HangReason.ELSEWHERE, sorted(others)) if others else (HangReason.TOGETHER, sorted(waiting))), theirs
        )
    others = _waiting_elsewhere(group, by_group)
    # Blame ranks that wait nowhere rather than ranks that wait in another group.
    absent = [rank for rank in absent if rank not in others] or absent
    elsewhere = [others[rank] for rank in absent if rank in others]
    last = [calls[rank][max(calls[rank])] for rank in absent if calls.get(rank)]
    theirs = (
        f"last called {_call_text(last[0])}{_place_text(last[0].place)}"
        if last
        else "called no operation of this group"
    )
    if len(elsewhere) == len(absent):
        return hang(HangReason.ELSEWHERE, absent, f"{_call_text(elsewhere[0])} of group {elsewhere[0].group}")
    return hang(HangReason.ABSENT, absent, theirs)


def _first_unfinished(calls: Calls, waiting: Mapping[int, int]) -> int:
    """Return the number of the first unfinished call in which a rank waits.

    If a rank has finished an operation that needs all ranks, its number does not count, unless there is no other.
    """
    joined_by_all = {
        number
        for rank_calls in calls.values()
        for number, call in rank_calls.items()
        if call.done and call.operation.startswith(_NEED_ALL_RANKS)
    }
    return min(set(waiting.values()) - joined_by_all or waiting.values())


def _first_difference(calls: Calls, waited: int) -> int:
    """Return the number of the first call in which ranks called different operations, or `waited` if there is none.

    A gather, scatter or broadcast can finish on some ranks even though other ranks called something else.
    """
    numbers = sorted({number for rank_calls in calls.values() for number in rank_calls if number < waited})
    for number in numbers:
        operations = {rank_calls[number].operation for rank_calls in calls.values() if number in rank_calls}
        if len(operations - {_NOT_NAMED}) > 1:
            return number
    return waited


def _waiting_elsewhere(group: str, by_group: Mapping[str, Calls]) -> dict[int, RecordedCall]:
    """Return, by rank, the unfinished calls in other groups."""
    return {
        rank: call
        for name, calls in by_group.items()
        if name != group
        for rank, rank_calls in calls.items()
        for call in rank_calls.values()
        if not call.done
    }


def _signature(call: RecordedCall) -> tuple[object, ...]:
    return call.operation, () if call.operation.startswith(_ANY_SIZE) else call.sizes, call.types


def _difference(call: RecordedCall, shown: RecordedCall) -> HangReason | None:
    mine, theirs = _signature(call), _signature(shown)
    reasons = (HangReason.TYPE, HangReason.SIZE, HangReason.DTYPE)
    return next((reason for reason, one, other in zip(reasons, mine, theirs, strict=True) if one != other), None)


def _odd_reason(calls: Calls, rank: int, first: int, shown: RecordedCall) -> HangReason:
    """Return how the call of one rank differs from the calls of the others.

    The ranks call in a different order if one side makes the other side's call next, or made it just before.
    """
    call = calls[rank][first]
    others_next = [other for rank_calls in calls.values() if (other := rank_calls.get(first + 1)) is not None]
    own_next = calls[rank].get(first + 1)
    followed = any(
        _signature(earlier) == _signature(shown)
        and number < first
        and _signature(rank_calls[number + 1]) == _signature(call)
        for rank_calls in calls.values()
        for number, earlier in rank_calls.items()
        if number + 1 in rank_calls
    )
    swapped = any(_signature(other) == _signature(call) for other in others_next) or (
        own_next is not None and _signature(own_next) == _signature(shown)
    )
    return HangReason.ORDER if swapped or followed else _difference(call, shown) or HangReason.UNKNOWN


def _call_text(call: RecordedCall) -> str:
    shapes = ", ".join("×".join(map(str, shape)) or "1" for shape in call.sizes)
    size = f" of {shapes} {'/'.join(dict.fromkeys(call.types)) or 'elements'}" if shapes else ""
    return f"{call.operation} number {call.sequence}{size}"


def _place_text(place: str) -> str:
    return f" at {place}" if place else ""


def _since(there: Mapping[int, RecordedCall], waiting: Mapping[int, int], first: int) -> str:
    times = [call.called_ns for rank, call in there.items() if waiting.get(rank) == first and call.called_ns]
    return _utc(min(times) / _NS) if times else ""


def _slowest(group: str, calls: Calls) -> Hang | None:
    """Find the rank that repeatedly reaches the last collectives much later than the others.

    A single delay does not show a slow rank, because a checkpoint looks the same. Clocks differ between ranks, so each
    delay is measured from the rank's own most punctual call.
    """
    common = sorted(set.intersection(*(set(numbers) for numbers in calls.values())))
    if len(calls) < _FEWEST_BEFORE or len(common) <= _FEWEST_BEFORE:
        return None
    punctual = {number: median_low(rank_calls[number].called_ns for rank_calls in calls.values()) for number in common}
    late: dict[int, list[float]] = {}
    for rank, rank_calls in calls.items():
        offsets = [(rank_calls[number].called_ns - punctual[number]) / _NS for number in common]
        late[rank] = [offset - min(offsets) for offset in offsets][-_LAST_CALLS:]
    slowest = max(late, key=lambda rank: median(late[rank]))
    others = [seconds for rank in late if rank != slowest for seconds in late[rank]]
    delays = late[slowest]
    times = sum(1 for seconds in delays if seconds >= _SLOW_SECONDS)
    if times < _FEWEST_LATE or times * 2 <= len(delays) or median(delays) < _TIMES_SLOWER * median(others):
        return None
    call = calls[slowest][common[-1]]
    return Hang(
        group=group,
        reason=HangReason.SLOW,
        ranks=(f"rank {slowest}",),
        waiting=len(calls) - 1,
        operation=_call_text(call),
        place=call.place,
        theirs=f"came {median(delays):.1f} s after the others (median) to {times} of the last {len(delays)} calls",
    )


def _find_in_ras(answers: Sequence[RasCommunicator]) -> Iterator[Hang]:
    """Find ranks of a communicator that are missing, have left, or launched fewer operations than the others.

    Ranks that made progress between the last two answers are skipped. With only one answer, a rank that is behind or
    has left is reported as not sure.
    """
    communicator = answers[-1]
    before = {rank.rank: rank for rank in answers[-2].ranks} if len(answers) > 1 else None
    still = [rank for rank in communicator.ranks if before is None or _is_same(rank, before.get(rank.rank))]
    size = communicator.size or len(communicator.ranks) + 1

    def found(reason: HangReason, ranks: Sequence[RasRank]) -> Iterator[Hang]:
        if 0 < len(ranks) < size:
            is_sure = before is not None or reason not in (HangReason.LEFT, HangReason.STARTING)
            theirs = "; ".join(dict.fromkeys(rank.error for rank in ranks if rank.error))
            yield _ras_hang(communicator, reason, ranks, theirs=theirs, is_sure=is_sure)

    gone = [
        *found(HangReason.DEAD, [rank for rank in still if rank.dead]),
        *found(HangReason.SILENT, [rank for rank in still if rank.silent and not rank.dead]),
    ]
    # After a rank dies, the others fail, leave, or stop at arbitrary operations.
    left = [
        *found(HangReason.ERROR, [rank for rank in still if rank.error and not rank.left]),
        *found(HangReason.LEFT, [rank for rank in still if rank.left]),
    ]
    starting = [rank for rank in still if rank.status == "INIT"]
    others = "; ".join(remark for remark in communicator.remarks if " have status " in remark)
    behind = gone or left or [*_behind(communicator, {rank.rank for rank in still}, is_sure=before is not None)]
    hangs = behind or [replace(hang, theirs=others) for hang in found(HangReason.STARTING, starting)]
    yield from hangs
    if not hangs and communicator.remarks and (before is None or not communicator.ranks):
        # The answer reports problems, but does not name the ranks that have them.
        statuses = [f"{_rank_name(rank)} has status {rank.status}" for rank in communicator.ranks if rank.status]
        theirs = "; ".join((*communicator.remarks, *statuses))
        hang = _ras_hang(communicator, HangReason.NOT_NAMED, (), theirs=theirs, is_sure=False)
        yield replace(hang, ranks=(f"ranks of {communicator.id}" if communicator.size else "ranks of the job",))


def _is_same(now: RasRank, before: RasRank | None) -> bool:
    """True if a rank made no progress between two answers. RAS reports a silent rank as dead after a minute."""
    return before == now or (before is not None and before.silent and now.silent)


class RasCourse:
    """Collects RAS answers from one or several jobs over time, and finds hangs in them."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[RasCommunicator, ...]] = {}
        self._seen: dict[str, dict[int, tuple[RasRank, float]]] = {}
        self._jobs: list[_Job] = []
        self._silent = 0
        self.asked = 0

    def add(self, answer: Sequence[RasCommunicator] | None, now: float) -> None:
        """Add a RAS answer received at the Unix time `now`, or None if a process listens but did not reply."""
        self.asked += 1
        self._silent = self._silent + 1 if answer is None else 0
        for communicator in answer or ():
            self._answers[communicator.id] = (*self._answers.get(communicator.id, ())[-1:], communicator)
            seen = self._seen.get(communicator.id, {})
            before = {rank.rank: seen.get(rank.rank, (rank, now)) for rank in communicator.ranks}
            self._seen[communicator.id] = {
                rank.rank: (rank, since if _is_same(rank, was) else now)
                for rank in communicator.ranks
                for was, since in [before[rank.rank]]
            }
        counts = {
            communicator.id: [rank.counts for rank in communicator.ranks]
            for communicator in answer or ()
            if any(r.counts for r in communicator.ranks)
        }
        if counts:
            job = next((job for job in self._jobs if not job.counts.keys().isdisjoint(counts)), None)
            if job is None:
                self._jobs.append(job := _Job(counts, now, now))
            job.moved |= job.counts != counts
            job.since = now if job.counts != counts else job.since
            job.counts, job.until = counts, now

    @property
    def communicators(self) -> tuple[RasCommunicator, ...]:
        """The latest state of each communicator."""
        return tuple(answer[-1] for answer in self._answers.values())

    @property
    def is_judged(self) -> bool:
        """True if at least one job launched operations between two answers."""
        return any(job.moved for job in self._jobs)

    def hangs(self) -> tuple[Hang, ...]:
        """Return the hangs in the last two answers, then the jobs that launch no operations."""
        last_two = [answer for answers in self._answers.values() if len(answers) > 1 for answer in answers]
        found = []
        for hang in find_hangs((), last_two):
            if hang.is_sure:
                seen = self._seen[hang.group].values()
                since = min(since for rank, since in seen if _rank_name(rank) in hang.ranks)
                found.append(replace(hang, since=_utc(since)))
        hanging = {hang.group for hang in found}
        idle = [job for job in self._jobs if job.since < job.until and hanging.isdisjoint(job.counts)]
        found += [self._idle_hang(job) for job in idle]
        if self._silent > 1:
            found.append(
                Hang(
                    group="-",
                    reason=HangReason.SILENT,
                    ranks=("every process that RAS asked",),
                    waiting=0,
                    operation="",
                    is_sure=False,
                )
            )
        return tuple(found)

    def _idle_hang(self, job: "_Job") -> Hang:
        largest = max(
            (self._answers[name][-1] for name in job.counts), key=lambda communicator: len(communicator.ranks)
        )
        counts = {name: count for rank in largest.ranks for name, count in rank.counts.items() if count}
        last = ", ".join(f"{name} number {count}" for name, count in counts.items())
        return Hang(
            group=largest.id,
            reason=HangReason.IDLE,
            ranks=(plural(len(largest.ranks), "rank"),),
            waiting=0,
            operation="",
            theirs=f"all ranks wait in the last one ({last or 'none yet'}), compute, are idle, or replay CUDA graphs",
            since=_utc(job.since),
            is_sure=False,
        )


class _Job(Struct):
    """Communicators that one answer lists together, with their operation counts.

    `since` is the Unix time of the last change of the counts, and `until` the time of the last answer.
    """

    counts: Mapping[str, Sequence[Mapping[str, int]]]
    since: float
    until: float
    moved: bool = False


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


_UNNAMED_RANKS = -1
"""Stands for all ranks that an answer does not list separately."""

_MOST_OPERATIONS = 3


def _behind(communicator: RasCommunicator, still: set[int], *, is_sure: bool) -> Iterator[Hang]:
    """Find the ranks with the lowest count for every operation whose counts differ.

    Ranks may run ahead of each other. A rank with fewer calls of one operation and more calls of another called
    something else.
    """
    named = {rank.rank: rank for rank in communicator.ranks if not rank.left}
    least: dict[str, set[int]] = {}
    most: dict[str, set[int]] = {}
    fewest: dict[str, int] = {}
    for name in sorted({name for rank in named.values() for name in rank.counts}):
        others = communicator.unnamed.get(name, ())[:1]
        counts = dict.fromkeys([*named, _UNNAMED_RANKS], others[0]) if others else {}
        counts |= {number: rank.counts[name] for number, rank in named.items() if name in rank.counts}
        low, high = min(counts.values()), max(counts.values())
        if low < high:
            fewest[name] = low
            least[name] = {number for number, count in counts.items() if count == low}
            most[name] = {number for number, count in counts.items() if count == high}
    if not fewest:
        return
    behind = set.intersection(*least.values())
    if behind:
        operations = [f"{name} number {low + 1}" for name, low in fewest.items()][:_MOST_OPERATIONS]
        theirs = f"launched {', '.join(f'{fewest[name]} {name}' for name in fewest)}"
        yield from _blame(
            communicator, HangReason.ABSENT, behind & still, ", ".join(operations), theirs, is_sure=is_sure
        )
        return
    lacked = min(least, key=lambda name: len(least[name]))
    odd = least[lacked]
    called = [name for name in most if most[name] == odd]
    if called and _UNNAMED_RANKS not in odd and len(odd) * 2 < (communicator.size or len(named)):
        theirs = f"{', '.join(called)} instead"
        operation = f"{lacked} number {fewest[lacked] + 1}"
        yield from _blame(communicator, HangReason.TYPE, odd & still, operation, theirs, is_sure=is_sure)
    elif still >= set(named):
        theirs = f"different numbers of {', '.join(fewest)}"
        yield from _blame(communicator, HangReason.UNKNOWN, set(named), "", theirs, is_sure=is_sure)


def _blame(
    communicator: RasCommunicator, reason: HangReason, ranks: set[int], operation: str, theirs: str, *, is_sure: bool
) -> Iterator[Hang]:
    found = [rank for rank in communicator.ranks if rank.rank in ranks]
    if found:
        yield _ras_hang(communicator, reason, found, operation, theirs, is_sure=is_sure)


def _rank_name(rank: RasRank) -> str:
    return f"rank {rank.rank}" + (f" ({rank.host}:{rank.pid})" if rank.pid is not None else "")


def _ras_hang(
    communicator: RasCommunicator,
    reason: HangReason,
    ranks: Sequence[RasRank],
    operation: str = "",
    theirs: str = "",
    *,
    is_sure: bool,
) -> Hang:
    return Hang(
        group=communicator.id,
        reason=reason,
        ranks=tuple(map(_rank_name, ranks)),
        waiting=max((communicator.size or 0) - len(ranks), 0),
        operation=operation,
        theirs=theirs,
        is_sure=is_sure,
        process=(ranks[0].host, ranks[0].pid) if ranks and ranks[0].pid is not None else None,
    )
