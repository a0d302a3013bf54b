"""Reads gpubench's CSV files, which contain the rows of a collective, or pairs, but no metadata."""

import csv
import re
from collections.abc import Mapping
from types import UnionType
from typing import Any, NoReturn, get_args, get_type_hints

from gpubench.errors import UsageError
from gpubench.model.results.report import CollectiveRow, PairRow
from gpubench.model.results.result_file import WIDE_COLUMNS, FileCircumstances, ResultFile, unmark_text
from gpubench.readers import documents, limits
from gpubench.readers.results.gpubench_json import problems

_REQUIRED = {
    CollectiveRow: ("collective", "backend", "ranks", "size_bytes", "dtype", "placement", "time_us"),
    PairRow: ("source", "destination", "source_node", "destination_node"),
}


def recognises(text: str) -> bool:
    """Return True if a text starts with the column names of rows or pairs, with any separator."""
    return re.match(r'\s*"?(?:collective"?[,;\t]"?backend|source"?[,;\t]"?destination)\b', text) is not None


def read(text: str, name: str) -> ResultFile:
    """Read the rows of a CSV text.

    Raises UsageError for an unknown, missing or duplicate column, a line with too many or too few cells, or an invalid
    cell.
    """
    header, *lines = _cells(text, name)
    kind: type[CollectiveRow] | type[PairRow] = CollectiveRow if "collective" in header else PairRow
    _check_header(header, kind, name)
    remarks = []
    if lines and len(lines[-1]) < len(header) and not text.endswith(("\n", "\r")):
        lines.pop()
        remarks = ["its last line was cut off and is left out"]
    rows: list[CollectiveRow | PairRow] = []
    for number, cells in enumerate(lines, 2):
        where = f"{name}, line {number}"
        if not any(cells):
            continue
        if len(cells) != len(header):
            raise UsageError(
                f"{where}: {len(cells)} cells",
                expected=f"{len(header)}, as the first line has",
                reason="the file was edited by hand: a comma too many or too few",
            )
        # Files from older versions have fewer columns.
        by_column = dict.fromkeys(kind.columns(), "") | dict(zip(header, cells, strict=True))
        rows.append(_read_row(kind, {name: by_column[name] for name in kind.columns()}, where))
    return ResultFile(
        name=name,
        kind="gpubench CSV",
        circumstances=FileCircumstances(tool="gpubench"),
        rows=tuple(row for row in rows if isinstance(row, CollectiveRow)),
        pairs=tuple(row for row in rows if isinstance(row, PairRow)),
        complete=not remarks,
        remarks=tuple(remarks),
    )


def _cells(text: str, name: str) -> list[list[str]]:
    columns, cells = text.partition("\n")[0].count(",") + 1, text.count(",") + text.count("\n")
    for count, most, what in ((columns, limits.MOST_COLUMNS, "columns"), (cells, limits.MOST_CELLS, "cells")):
        if count > most:
            raise UsageError(f"{name} has {count} {what}", expected=f"at most {most}, as gpubench writes them")
    try:
        rows = list(csv.reader(text.lstrip("\n\r").splitlines(), strict=True))
        if not rows:
            raise UsageError(f"{name} is empty", expected="the columns that gpubench writes, with rows")
        return [list(map(unmark_text, line)) for line in rows]
    except csv.Error as error:
        raise UsageError(f"{name}: no CSV ({error})", reason="the file was edited by hand, or cut off") from None


def _check_header(header: list[str], kind: type[CollectiveRow] | type[PairRow], name: str) -> None:
    where = f"{name}, line 1"
    if len(header) == 1:
        raise UsageError(
            f"{where}: its columns are not separated by commas",
            reason="a spreadsheet with another language setting wrote it",
            next_step="compare the file that gpubench wrote",
        )
    unknown = [column for column in header if column not in (*kind.columns(), *WIDE_COLUMNS)]
    if unknown:
        raise UsageError(
            f"{where}: column {unknown[0]!r} is not known",
            expected=f"columns among {', '.join(kind.columns())}",
            reason="a newer gpubench wrote the file, or it was edited by hand",
        )
    missing = [column for column in _REQUIRED[kind] if column not in header]
    if missing or len(set(header)) < len(header):
        what = f"no column {missing[0]}" if missing else "a column twice"
        raise UsageError(f"{where}: {what}", expected="the columns that gpubench writes, each once")


_TYPES = {kind: get_type_hints(kind) for kind in (CollectiveRow, PairRow)}
_TRUTH = {"true": True, "false": False}


def _read_row(
    kind: type[CollectiveRow] | type[PairRow], cells: Mapping[str, str], where: str
) -> CollectiveRow | PairRow:
    row = kind(**{name: _value(text, _TYPES[kind][name], name, where) for name, text in cells.items()})
    for column, problem in problems(row):
        _refuse(where, column, cells[column], problem)
    return row


def _value(text: str, declared: Any, column: str, where: str) -> Any:
    optional = isinstance(declared, UnionType)
    kind = next(arg for arg in get_args(declared) if arg is not type(None)) if optional else declared
    if text == "":
        return None if optional else _refuse(where, column, text, "a value, because this column is never empty")
    if kind is str:
        return text
    if kind is bool:
        return _TRUTH[text] if text in _TRUTH else _refuse(where, column, text, "true, false or nothing")
    try:
        return documents.parse_whole(text) if kind is int else documents.parse_finite(text)
    except ValueError:
        return _refuse(where, column, text, "a whole number" if kind is int else "a number with a decimal point")


def _refuse(where: str, column: str, text: str, expected: str) -> NoReturn:
    raise UsageError(
        f"{where}, column {column}: {text!r}",
        expected=expected,
        reason="the file was edited by hand, or by a spreadsheet",
        next_step="compare the file that gpubench wrote. --output FILE.json has more than a csv",
    )
