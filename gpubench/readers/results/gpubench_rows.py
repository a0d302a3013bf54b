"""Rows that gpubench wrote, from JSON or from cells of CSV, checked as what a person may have edited."""

from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

from gpubench.errors import UsageError
from gpubench.model.results.report import SCHEMA_VERSION, CollectiveRow, PairRow
from gpubench.model.results.result_file import MODELS, SHOWN_BY_ROWS, FileCircumstances
from gpubench.model.terms.operation import Placement
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.plain import from_plain
from gpubench.model.terms.verdict import Verdict
from gpubench.readers.documents.characters import check_text
from gpubench.readers.documents.json_lines import finite, whole

R = TypeVar("R", bound=CollectiveRow | PairRow)

_WORDS: Mapping[str, Sequence[str]] = {
    "origin": tuple(Origin),
    "placement": tuple(Placement),
    "mode": ("throughput", "latency"),
    "verdict": tuple(Verdict),
}
_POSITIVE = ("ranks", "nodes", "size_bytes", "time_us")
_NOT_NEGATIVE = ("bandwidth_gb_s", "latency_us", "wrong", "batch_cv", "ci95_percent")
_TRUTH = {"true": True, "false": False}


def check_version(version: Any, name: str) -> None:
    """Raise UsageError where a file is of a schema that this gpubench does not know."""
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UsageError(f"{name} has no schema_version", expected="a whole number, as gpubench writes it")
    if version > SCHEMA_VERSION:
        raise UsageError(
            f"{name} is of schema version {version}",
            expected=f"{SCHEMA_VERSION} at most, which is what this gpubench knows",
            reason="a newer gpubench wrote it, and its rows may mean something else",
            next_step="pip install --upgrade gpubench",
        )


def row_from_json(kind: type[R], record: Any, where: str) -> R:
    """A row of a JSON file; `where` names file and place.

    Raises UsageError for a field that is unknown, missing or of another type, or a value that cannot be.
    """
    check_text(record, where)
    row = from_plain(kind, record, where)
    for name, problem in _problems(row):
        raise UsageError(f"{where}.{name} is {getattr(row, name)!r}", expected=problem, reason="edited by hand")
    return row


def row_from_cells(kind: type[R], cells: Mapping[str, str], where: str) -> R:
    """A row of a CSV file, of its cells by column; `where` names file and line.

    Raises UsageError for a cell that its column cannot have; the column is named.
    """
    values = {name: _value(text, _TYPES[kind][name], name, where) for name, text in cells.items()}
    row = kind(**values)
    for name, problem in _problems(row):
        _unfit(where, name, cells[name], problem)
    return row


_TYPES: dict[type, dict[str, Any]] = {kind: get_type_hints(kind) for kind in (CollectiveRow, PairRow)}


def _value(text: str, declared: Any, column: str, where: str) -> Any:
    """The value of a cell: None of an empty one, where the column allows that."""
    optional = isinstance(declared, UnionType)
    kind = next(each for each in get_args(declared) if each is not type(None)) if optional else declared
    if text == "":
        return None if optional else _unfit(where, column, text, "a value: this column has no unknown ones")
    if kind is str:
        return text
    if kind is bool:
        return _TRUTH[text] if text in _TRUTH else _unfit(where, column, text, "true, false or nothing")
    try:
        return whole(text) if kind is int else finite(text)
    except ValueError:
        return _unfit(where, column, text, "a whole number" if kind is int else "a number with a decimal point")


def _problems(row: CollectiveRow | PairRow) -> Iterator[tuple[str, str]]:
    """Columns whose value no row can have, with what is expected."""
    for name in row.columns():
        value = getattr(row, name)
        if value is None:
            continue
        if name in _WORDS and value not in _WORDS[name]:
            yield name, f"one of {', '.join(_WORDS[name])}"
        elif name in _POSITIVE and value <= 0:
            yield name, "a number above 0"
        elif name in _NOT_NEGATIVE and value < 0:
            yield name, "a number of at least 0"


def _unfit(where: str, column: str, text: str, expected: str) -> NoReturn:
    raise UsageError(
        f"{where}, column {column}: {text!r}",
        expected=expected,
        reason="the file was edited by hand, or by a spreadsheet",
        next_step="compare the file that gpubench wrote; --output FILE.json keeps more than a csv",
    )


def circumstances(metadata: Mapping[str, Any], gpus: Sequence[Any], name: str) -> FileCircumstances:
    """The machine, libraries and settings in a file's metadata; `gpus` is its section of GPUs, as `topo` writes one.

    Raises UsageError where they are not as gpubench writes them.
    """
    try:
        models = [str(rank["gpu"]) for rank in metadata["ranks"] if rank["gpu"]]
        options = metadata["options"]
        named = options.get("gpus")  # of p2p and check; the numbers that a watch was asked for name no model
        models = models or [str(text).partition(" ")[2] for text in (named.values() if isinstance(named, dict) else ())]
        models = models or [str(row["name"]) for row in gpus if row["name"]]
        profile = metadata["profile"]
        return FileCircumstances(
            tool=f"gpubench {metadata['gpubench_version']}",
            hosts=tuple(map(str, metadata["hosts"])),
            gpus=tuple(models),
            models=tuple(map(str, options.get(MODELS, ()))),
            origin=str(metadata["origin"]),
            started_at=str(metadata["started_at"]),
            libraries={str(key): str(value) for key, value in metadata["libraries"].items()},
            environment={str(key): str(value) for key, value in metadata["environment"].items()},
            options={key: str(value) for key, value in options.items() if key not in SHOWN_BY_ROWS},
            topology=None if metadata["topology"] is None else str(metadata["topology"]),
            profile=None if profile is None else f"{profile['name']} ({profile['sha256']})",
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{name}: its metadata are damaged: {error}",
            expected="metadata as gpubench writes them",
            reason="the file was edited by hand",
        ) from None
