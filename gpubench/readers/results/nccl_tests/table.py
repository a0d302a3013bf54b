"""The table in the text of nccl-tests: the columns that its header names, and the cells of a row.

Before 2.11 a column was printed only by programs that need it: no root without a root, no redop where data are only
moved. 1.x counted milliseconds. rccl-tests can leave one placement out (-O).
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from gpubench.model.terms.operation import Placement
from gpubench.readers.documents.launcher_tags import behind_prefix, prefix_shape
from gpubench.readers.results.nccl_tests.names import ELEMENT_TYPES, REDUCTIONS, OutputLine, PerIteration, Placed

HEADER = re.compile(r"(?:^|[#\s])(?P<size>size|bytes)\s+(?:count|N)\s+type\s(?P<others>.*)")
ROW = re.compile(
    r"(?<![\w.])(?P<size>\d{1,18})\s+(?P<count>\d{1,18})\s+"
    rf"(?P<type>{'|'.join(sorted(ELEMENT_TYPES, key=len, reverse=True))})(?P<rest>(?:\s.*)?)$"
)
_VALUE = re.compile(r"(?:\d{1,15}(?:\.\d{1,6})?(?:e[+-]?\d{1,3})?|N/A|-?inf|-?nan)\*?")
"""rccl-tests marks an error beyond its threshold with an asterisk."""

_RANK_TAG = re.compile(r"\[\d{1,7}\]")
"""What MPICH's -prepend-rank and Intel MPI's -l put before every piece of output, also inside a row."""

_ROOT = re.compile(r"-1|\d{1,7}")
_TIMESTAMP = re.compile(r"\s+\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\s*$")
_US_PER_MS = 1e3
_FIGURES, _STATISTICS = 4, 4
"""Columns of a placement: time, algbw, busbw, #wrong; and with -I smallest, largest, 99th percentile and variation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of a table. `largest_error`: the last one is the largest error, which rounding makes too."""

    reduction: bool = True
    root: bool = True
    placements: tuple[Placement, ...] = tuple(Placement)
    statistics: bool = False
    milliseconds: bool = False
    cpu_time: bool = False
    largest_error: bool = False

    @classmethod
    def of(cls, header: re.Match[str], line_above: str) -> Self:
        """Those that a header names; of a single placement the line above says which."""
        words = header["others"].split()
        only = Placement.OUT_OF_PLACE if "out-of-place" in line_above else Placement.IN_PLACE
        return cls(
            reduction="redop" in words or "op" in words,
            root="root" in words,
            placements=tuple(Placement) if words.count("time") + words.count("cputime") > 1 else (only,),
            statistics="i_min" in words,
            milliseconds=header["size"] == "bytes",
            cpu_time="cputime" in words,
            largest_error="#wrong" not in words,
        )

    @classmethod
    def guessed(cls, row: re.Match[str]) -> Self:
        """Those of a row whose header was cut off: whether it has a root, and in its last column the largest error."""
        words = _words(row["rest"])
        reduction = bool(words) and words[0] in REDUCTIONS
        words = words[reduction:]
        has_root = len(words) % _FIGURES == 1 and _ROOT.fullmatch(words[0]) is not None
        last = words[has_root:][_FIGURES - 1 :: _FIGURES]
        return cls(reduction=reduction, root=has_root or not words, largest_error=any("e" in word for word in last))

    @property
    def each(self) -> int:
        """Values of one placement."""
        return _FIGURES + _STATISTICS * self.statistics


class TableRow:
    """A row while it is read, for other lines may stand in the middle of it."""

    def __init__(self, found: re.Match[str], columns: Columns) -> None:
        self._cells = found.groupdict()
        self._columns = columns
        self._values: list[str] = []
        self._prefix = prefix_shape(found.string[: found.start()])
        words = _words(found["rest"])
        self._cells["redop"] = words.pop(0) if columns.reduction and words and words[0] in REDUCTIONS else "none"
        self._cells["root"] = -1
        self.is_damaged = columns.root and not (words and _ROOT.fullmatch(words[0]))
        if columns.root and not self.is_damaged:
            self._cells["root"] = words.pop(0)
        self._take(words)

    @property
    def is_whole(self) -> bool:
        """True when no value is missing."""
        return len(self._values) == self._columns.each * len(self._columns.placements)

    def goes_on(self, text: str) -> bool:
        """True if a line goes on with this row: behind the same prefix it has values, and nothing else."""
        values = behind_prefix(_TIMESTAMP.sub("", text), self._prefix)
        if not values or not all(map(_VALUE.fullmatch, values)):
            return False
        self._take(values)
        return True

    def _take(self, values: Sequence[str]) -> None:
        self._values += values
        most = self._columns.each * len(self._columns.placements)
        self.is_damaged = self.is_damaged or len(self._values) > most or not all(map(_VALUE.fullmatch, values))

    def line(self, iterations: int | None) -> OutputLine | None:
        """The row; None where its numbers are none, as of a time of zero, or where nothing was timed."""
        placed = tuple(self._placed(iterations))
        return self._line_of(placed) if len(placed) == len(self._columns.placements) else None

    def first_half(self, iterations: int | None) -> OutputLine | None:
        """The row's first placement, where that and no value more was printed."""
        whole = not self.is_damaged and len(self._values) == self._columns.each
        placed = tuple(self._placed(iterations)) if whole else ()
        return self._line_of(placed) if placed else None

    def _line_of(self, placed: tuple[Placed, ...]) -> OutputLine:
        line = OutputLine.of(self._cells, placed)
        return replace(line, names_reduction=self._columns.reduction, names_root=self._columns.root)

    def _placed(self, iterations: int | None) -> Iterator[Placed]:
        each, factor = self._columns.each, _US_PER_MS if self._columns.milliseconds else 1.0
        for number, placement in enumerate(self._columns.placements):
            own = [_number(value) for value in self._values[number * each : (number + 1) * each]]
            if not own:
                return
            time, algbw, busbw, wrong, *statistics = own
            if time is None or algbw is None or busbw is None or time <= 0:
                return
            if wrong is not None and not self._columns.largest_error and not wrong.is_integer():
                # A number of elements is whole: this one is a value of another column.
                return
            yield Placed(
                placement=placement,
                time_us=time * factor,
                algbw_gb_s=algbw,
                busbw_gb_s=busbw,
                wrong=None if wrong is None or (wrong and self._columns.largest_error) else int(wrong),
                per_iteration=PerIteration(p99_us=statistics[2], cv_percent=statistics[3], samples=iterations)
                if statistics
                else None,
            )


def wrong_data_in(line: str) -> str | None:
    """A row that counts wrong elements, read without its header, as people paste and cut tables; None of other lines.

    Before 2.12 the same column was the largest error: of 1 and more it is beyond what nccl-tests allows of any type.
    """
    found = ROW.search(line)
    if found is None:
        return None
    words = _words(found["rest"])
    if words and words[0] in REDUCTIONS:
        del words[0]
    if len(words) % _FIGURES == 1 and _ROOT.fullmatch(words[0]):
        del words[0]
    each = _FIGURES + _STATISTICS if len(words) == 2 * (_FIGURES + _STATISTICS) else _FIGURES
    if len(words) not in (each, 2 * each) or not all(map(_VALUE.fullmatch, words)):
        return None
    counts = [_number(word) for word in words[_FIGURES - 1 :: each]]
    wrong = any(count is not None and count >= 1 for count in counts)
    return " ".join(line[found.start() :].split()) if wrong else None


def _words(text: str) -> list[str]:
    return _TIMESTAMP.sub("", _RANK_TAG.sub(" ", text)).split()


def _number(text: str) -> float | None:
    """A value; None where it is 'N/A', or no number at all."""
    plain = text.rstrip("*")
    value = None if plain == "N/A" else float(plain)
    return value if value is not None and math.isfinite(value) else None
