"""Lines that PyTorch prints of collectives that did not end: of its watchdog, its wrapper, and a monitored barrier."""

import re
from collections.abc import Iterator
from dataclasses import replace

from gpubench.model.paths.hang import RankRecord, RecordedCall

_RANK = re.compile(rb"\[rank(\d{1,7})\]:|\[(?:PG [^\]]{1,80} )?Rank (\d{1,7})\]", re.ASCII)
_CAUGHT = re.compile(
    rb"Watchdog caught collective operation timeout: WorkNCCL"
    rb"\(SeqNum=(\d{1,12}), OpType=(\w{1,40}), NumelIn=(\d{1,20})",
    re.ASCII,
)
_GROUP = re.compile(rb"\[PG (?:ID \d+ PG GUID )?([^\]]{1,60}?) Rank \d{1,7}\]", re.ASCII)
_STATUS = re.compile(
    rb"(?:at work(?: sequence id)?: |Timeout at NCCL work: |dump signal)(\d{1,12})?\b.{0,200}?"
    rb"last enqueued (?:NCCL )?work: (-?\d{1,12}), last completed (?:NCCL )?work: (-?\d{1,12})",
    re.ASCII | re.IGNORECASE,
)
_FINGERPRINT = re.compile(
    rb"Rank (\d{1,7}) is running collective: CollectiveFingerPrint\((?:SequenceNumber=(\d{1,12}), ?)?OpType=(\w{1,40})"
    rb"(?:, TensorShape=\[([\d, ]{0,200})\], TensorDtypes=(\w{1,40}))?",
    re.ASCII,
)
_BARRIER = re.compile(rb"Ranks? ([\d, ]{1,200}) failed to pass monitoredBarrier", re.ASCII)
_FEWEST_DIGITS_OF_NONE = 18
"""2**64 - 1 elements are none: of several operations together the watchdog knows no size."""

_BETWEEN_TWO = ("SEND", "RECV")
_DEFAULT = ("0", "0(default_pg)", "0(default)", "default_pg")
WRAPPER, BARRIER = "wrapper", "monitoredBarrier"
"""Groups of lines that name none."""


class WatchdogLines:
    """Collects such lines by rank."""

    def __init__(self) -> None:
        self._caught: dict[tuple[int, int], RecordedCall] = {}
        self._status: dict[tuple[int, str], tuple[int | None, int, int]] = {}
        self._fingerprints: dict[int, RecordedCall] = {}
        self.missed_barrier: dict[int, None] = {}

    def add(self, line: bytes) -> None:
        """Take a line, if it is one of them."""
        if missed := _BARRIER.search(line):
            self.missed_barrier |= {int(each): None for each in missed[1].replace(b",", b" ").split()}
        for found in _FINGERPRINT.finditer(line):
            shape = () if found[4] is None else (tuple(int(each) for each in found[4].split(b",") if each.strip()),)
            self._fingerprints[int(found[1])] = RecordedCall(
                WRAPPER,
                int(found[2] or 0),
                found[3].decode().lower(),
                shape,
                () if found[5] is None else (found[5].decode(),),
            )
        named = _RANK.search(line)
        if named is None:
            return
        rank = int(named[1] or named[2])
        if caught := _CAUGHT.search(line):
            sizes = ((int(caught[3]),),) if len(caught[3]) < _FEWEST_DIGITS_OF_NONE else ()
            self._caught[rank, int(caught[1])] = RecordedCall(
                "", int(caught[1]), caught[2].decode().lstrip("_").lower(), sizes
            )
        elif (status := _STATUS.search(line)) and (group := _GROUP.search(line)):
            place = rank, group[1].decode()
            waits = None if status[1] is None else int(status[1])
            self._status.setdefault(place, (waits, int(status[2]), int(status[3])))

    def records(self) -> tuple[RankRecord, ...]:
        """What each rank waits in, and the last that it completed. Groups have the ranks that said something of them.

        The default group has all ranks up to the highest where few of them said nothing.
        """
        calls: dict[int, list[RecordedCall]] = {}
        members: dict[str, set[int]] = {}
        for (rank, group), (waits, enqueued, completed) in self._status.items():
            own = list(self._calls(rank, group, waits, enqueued, completed))
            if all(each.operation.upper() not in _BETWEEN_TWO for each in own):
                calls.setdefault(rank, []).extend(own)
                members.setdefault(group, set()).add(rank)
        for group, ranks in members.items():
            waited = {each.sequence for rank in ranks for each in calls[rank] if each.group == group and not each.done}
            for rank in ranks:
                # A rank that completed a later one has passed those that others wait in.
                passed = [number for number in waited if number < self._status[rank, group][2]]
                calls[rank] += [RecordedCall(group, number, "operation", done=True) for number in passed]
        if not self._status and len({number for _, number in self._caught}) == 1:
            # PyTorch before 2.3 names no group.
            for (rank, _), call in self._caught.items():
                calls.setdefault(rank, []).append(replace(call, group=_DEFAULT[0]))
                members.setdefault(_DEFAULT[0], set()).add(rank)
        for rank, call in self._fingerprints.items():
            calls.setdefault(rank, []).append(call)
            members.setdefault(WRAPPER, set()).add(rank)
        for group in _DEFAULT:
            spoke = members.get(group, set())
            silent = set(range(max(spoke, default=0))) - spoke
            if len(silent) * 2 < len(spoke):
                members[group] = spoke | silent
        groups = {group: tuple(sorted(ranks)) for group, ranks in members.items()}
        return tuple(RankRecord(rank, tuple(own), groups) for rank, own in sorted(calls.items()))

    def _calls(self, rank: int, group: str, waits: int | None, enqueued: int, completed: int) -> Iterator[RecordedCall]:
        if completed > 0:
            yield RecordedCall(group, completed, "operation", done=True)
        first = waits if waits is not None else completed + 1
        if first <= enqueued:
            seen = self._caught.get((rank, first))
            yield RecordedCall(group, first, seen.operation if seen else "operation", seen.sizes if seen else ())
