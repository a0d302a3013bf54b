"""The choice of dated results that are compared: the newest of each kind and those before it, and why not others."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gpubench.errors import UsageError
from gpubench.model.results.history import CUT_SHORT, DatedName, ResultHead
from gpubench.model.results.result_file import ResultFile
from gpubench.model.results.rows.comparison import HistoryRow, Use
from gpubench.model.terms.verdict import Verdict, gravity
from gpubench.readers.results.history import Kept, read_head
from gpubench.readers.results.registry import read_results

MOST_LOOKED_AT = 5000
"""Results whose beginnings are read, the newest: a second or two."""

MOST_SERIES = 64
"""Kinds of results that are compared: more are those of a cluster, which needs a folder a machine."""

_MEASURES_NOTHING = ("compare", "explain")


@dataclass(frozen=True, slots=True)
class ResultSeries:
    """The newest result of a kind, and those before it, the oldest first. `name` is the newest's."""

    name: str
    base: tuple[ResultFile, ...]
    new: ResultFile


@dataclass(frozen=True, slots=True)
class HistorySelection:
    """The outcome of the choice: comparisons, every file that was looked at, the newest first, and doubts.

    A doubt is a result that a person would expect to have been compared, with why it was not.
    """

    series: tuple[ResultSeries, ...]
    files: tuple[HistoryRow, ...]
    doubts: tuple[tuple[str, str], ...]


Kind = list[tuple[DatedName, ResultHead]]
"""Results of one kind, the newest first."""


@dataclass(slots=True)
class _Folder:
    """The state of the choice, file by file."""

    kept: Kept
    heads: dict[DatedName, ResultHead] = field(default_factory=dict)
    uses: dict[DatedName, HistoryRow] = field(default_factory=dict)
    unfit: dict[DatedName, str] = field(default_factory=dict)
    doubts: list[tuple[str, str]] = field(default_factory=list)

    def note(self, name: DatedName, use: Use, series: str | None = None, reason: str | None = None) -> None:
        head = self.heads.get(name)
        self.uses[name] = HistoryRow(
            file=str(name),
            started_at=head.started_at if head else None,
            command=name.command,
            host=name.host,
            run_verdict=head.verdict if head else None,
            use=use,
            series=series,
            reason=reason,
        )

    def leave_out(self, name: DatedName, reason: str) -> None:
        self.note(name, Use.LEFT_OUT, reason=reason)

    def reject(self, name: DatedName, reason: str) -> None:
        """Leave out a result that is not as it should be."""
        self.unfit[name] = reason
        self.leave_out(name, reason)


def choose(kept: Kept, last: int) -> HistorySelection:
    """The newest result of every kind in a folder, and the `last` before it; files that cannot be used are left out."""
    folder = _Folder(kept)
    kinds = _kinds(folder)
    series = tuple(_series(folder, kinds, last))
    _doubt_unfit(folder)
    dated = [folder.uses[name] for name in sorted(folder.uses, reverse=True)]
    others = [HistoryRow(file=name, use=Use.LEFT_OUT, reason="no name of a dated result") for name in kept.others]
    return HistorySelection(series, (*dated, *others), tuple(folder.doubts))


def _kinds(folder: _Folder) -> list[Kind]:
    """Results that may be compared with each other, by kind; the kind with the newest result first."""
    kinds: dict[object, Kind] = {}
    for number, name in enumerate(folder.kept.names):
        if name.command in _MEASURES_NOTHING:
            folder.leave_out(name, f"{name.command} measures nothing")
        elif number >= MOST_LOOKED_AT:
            folder.leave_out(name, f"older than the newest {MOST_LOOKED_AT}, and not opened")
        else:
            head = _head(folder, name)
            if head is not None:
                kinds.setdefault(head.kind, []).append((name, head))
    return list(kinds.values())


def _head(folder: _Folder, name: DatedName) -> ResultHead | None:
    """The metadata of a result; None where it may not be compared."""
    try:
        head = folder.heads[name] = read_head(folder.kept.path(name))
    except UsageError as error:
        folder.reject(name, _without_folder(folder, error))
        return None
    if not head.complete:
        folder.reject(name, CUT_SHORT)
        return None
    return head


def _without_folder(folder: _Folder, error: UsageError) -> str:
    """An error about a file, without the path of the file, which stands beside it."""
    return error.seen.removeprefix(f"{folder.kept.folder}/").partition(" ")[2]


def _series(folder: _Folder, kinds: Sequence[Kind], last: int) -> Iterator[ResultSeries]:
    """The kinds with two results or more."""
    several = [kind for kind in kinds if len(kind) > 1]
    for kind in kinds:
        if len(kind) == 1:
            _leave_out_single(folder, kind[0], kinds)
    for kind in several[MOST_SERIES:]:
        for name, _ in kind:
            folder.leave_out(name, f"not of the newest {MOST_SERIES} kinds: keep a folder a machine")
    for kind in several[:MOST_SERIES]:
        files = _readable(folder, _with_usual_verdict(folder, kind, last), last + 1)
        if len(files) > 1:
            (newest, new), *before = files
            series = str(newest).removesuffix(".json")
            folder.note(newest, Use.NEW, series)
            for name, _ in before:
                folder.note(name, Use.BASE, series)
            yield ResultSeries(series, tuple(file for _, file in reversed(before)), new)
        elif files:
            folder.leave_out(files[0][0], "nothing before it can be read")


def _with_usual_verdict(folder: _Folder, kind: Kind, last: int) -> Kind:
    """The newest result, and those before it that ended no worse than most of them did.

    One bad night among few would make a baseline in which everything is noise.
    """
    newest, *before = kind
    goodness = sorted(_verdict_place(head) for _, head in before[: 2 * last + 1])
    usual = goodness[len(goodness) // 2]
    for name, head in before:
        if _verdict_place(head) < usual:
            folder.leave_out(name, f"its run ended with {head.verdict}, and most with better")
    return [newest, *(each for each in before if _verdict_place(each[1]) >= usual)]


def _verdict_place(head: ResultHead) -> int:
    """The place of a run's verdict, the worst first; where nothing was judged it is as good as PASS."""
    return min(gravity(head.verdict), gravity(Verdict.PASS))


def _readable(folder: _Folder, kind: Kind, count: int) -> list[tuple[DatedName, ResultFile]]:
    """The newest `count` results of a kind that have rows."""
    files: list[tuple[DatedName, ResultFile]] = []
    for name, _ in kind:
        if len(files) == count:
            folder.leave_out(name, f"older than the last {count - 1}")
            continue
        try:
            file = read_results(folder.kept.path(name))
        except UsageError as error:
            folder.reject(name, _without_folder(folder, error))
            continue
        if file.rows or file.pairs or file.findings is not None:
            files.append((name, file))
        else:
            folder.leave_out(name, "has no rows to compare")
    return files


def _leave_out_single(folder: _Folder, alone: tuple[DatedName, ResultHead], kinds: Sequence[Kind]) -> None:
    """A result that has nothing to be compared with: say in what it differs from the one that is nearest to it.

    Where its own machine ran the same command before, something changed, which is a doubt.
    """
    name, head = alone
    others = [each for kind in kinds for other, each in kind if other != name and each.command == head.command]
    nearest = min(others, key=lambda each: (each.machine != head.machine, each.models != head.models), default=None)
    if nearest is None:
        folder.leave_out(name, f"the only result of {head.command}")
        return
    reason = "; ".join(head.differences_from(nearest))
    folder.leave_out(name, reason)
    same = [each for each in others if each.machine == head.machine]
    if same and all(each.started_at < head.started_at for each in same):
        folder.doubts.append((str(name), reason))


def _doubt_unfit(folder: _Folder) -> None:
    """Files that cannot be used, and are newer than all of their command and host that can: the newest is missing."""
    usable = {name for name, row in folder.uses.items() if name not in folder.unfit and row.run_verdict is not None}
    for name, reason in folder.unfit.items():
        if all(each < name for each in usable if (each.command, each.host) == (name.command, name.host)):
            folder.doubts.append((str(name), reason))
