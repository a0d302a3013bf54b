"""gpubench's JSON document and its JSON Lines: rows, sections, evidence, and whole results of any command."""

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

from msgspec import Struct

from gpubench.errors import UsageError, add_advice
from gpubench.model.results import result_file
from gpubench.model.results.overlap import OverlapRow
from gpubench.model.results.report import (
    COLLECTIVE_COLUMNS,
    FINDINGS_SECTION,
    OVERLAP_SECTION,
    PAIR_COLUMNS,
    SCHEMA_VERSION,
    TRAFFIC_SECTION,
    CheckRow,
    CollectiveRow,
    EvidenceRow,
    Matrix,
    Metadata,
    PairRow,
    Record,
    Report,
    Row,
    RowsByColumn,
    Section,
    Table,
    VerdictRow,
)
from gpubench.model.results.watch import TrafficRow
from gpubench.model.terms.commands import find_command
from gpubench.model.terms.operation import Placement
from gpubench.model.terms.plain import field_names, from_plain, types_as_is
from gpubench.model.terms.verdict import Finding, Origin, Verdict, gravity
from gpubench.readers import documents, limits
from gpubench.readers.results import nccl_inspector, nvbandwidth
from gpubench.readers.results.nccl_tests.json import recognises as is_of_nccl_tests

R = TypeVar("R", bound=CollectiveRow | PairRow)

_WORDS: Mapping[str, Sequence[str]] = {
    "origin": tuple(map(str, Origin)),
    "placement": tuple(map(str, Placement)),
    "mode": ("throughput", "latency"),
    "verdict": tuple(map(str, Verdict)),
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


def _row_from_json(kind: type[R], record: Any, where: str) -> R:
    """A row of a JSON file; `where` names file and place.

    Raises UsageError for a field that is unknown, missing or of another type, or a value that cannot be.
    """
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
    optional = isinstance(declared, UnionType)
    kind = next(arg for arg in get_args(declared) if arg is not type(None)) if optional else declared
    if text == "":
        return None if optional else _unfit(where, column, text, "a value: this column has no unknown ones")
    if kind is str:
        return text
    if kind is bool:
        return _TRUTH[text] if text in _TRUTH else _unfit(where, column, text, "true, false or nothing")
    try:
        return documents.whole(text) if kind is int else documents.finite(text)
    except ValueError:
        return _unfit(where, column, text, "a whole number" if kind is int else "a number with a decimal point")


def _problems(row: CollectiveRow | PairRow) -> Iterator[tuple[str, str]]:
    kind: Any = type(row)
    for name in _bounded_columns(kind):
        value = getattr(row, name)
        if value is None:
            continue
        if name in _WORDS:
            if value not in _WORDS[name]:
                yield name, f"one of {', '.join(_WORDS[name])}"
        elif name in _POSITIVE and value <= 0:
            yield name, "a number above 0"
        elif name in _NOT_NEGATIVE and value < 0:
            yield name, "a number of at least 0"


@cache
def _bounded_columns(kind: type[CollectiveRow | PairRow]) -> tuple[str, ...]:
    bounded = {*_WORDS, *_POSITIVE, *_NOT_NEGATIVE}
    return tuple(name for name in kind.columns() if name in bounded)


def _unfit(where: str, column: str, text: str, expected: str) -> NoReturn:
    raise UsageError(
        f"{where}, column {column}: {text!r}",
        expected=expected,
        reason="the file was edited by hand, or by a spreadsheet",
        next_step="compare the file that gpubench wrote; --output FILE.json keeps more than a csv",
    )


def circumstances(metadata: Mapping[str, Any], gpus: Sequence[Any], name: str) -> result_file.FileCircumstances:
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
        return result_file.FileCircumstances(
            tool=f"gpubench {metadata['gpubench_version']}",
            hosts=tuple(map(str, metadata["hosts"])),
            gpus=tuple(models),
            models=tuple(map(str, options.get(result_file.MODELS, ()))),
            origin=str(metadata["origin"]),
            started_at=str(metadata["started_at"]),
            libraries={str(key): str(value) for key, value in metadata["libraries"].items()},
            environment={str(key): str(value) for key, value in metadata["environment"].items()},
            options={key: str(value) for key, value in options.items() if key not in result_file.SHOWN_BY_ROWS},
            topology=None if metadata["topology"] is None else str(metadata["topology"]),
            profile=None if profile is None else f"{profile['name']} ({profile['sha256']})",
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{name}: its metadata are damaged: {error}",
            expected="metadata as gpubench writes them",
            reason="the file was edited by hand",
        ) from None


EDITED = "it was edited by hand"
EXPECTED = "what gpubench --output FILE.json or FILE.jsonl writes"

_DOCUMENT = re.compile(r'\s*\{\s*"schema_version"')
_LINES = re.compile(r'\s*\{\s*"kind"\s*:\s*"metadata"')
_OF_REPORT = ("complete", "verdict", "sentence", "duration_s", FINDINGS_SECTION)
_CELLS = {"name", "cells"}


def recognises(text: str) -> bool:
    """True if a text begins as gpubench's JSON document or its JSON Lines do."""
    return _DOCUMENT.match(text) is not None or _is_lines(text)


def _is_lines(text: str) -> bool:
    return _LINES.match(text) is not None


def document_of(text: str, name: str, sections: Container[str] | None = None) -> dict[str, Any]:
    """The document of a text, or the one that the same run writes of JSON Lines.

    Of lines only those of `sections` are kept, all where that is None, and a last one that was cut off is left out.
    Raises UsageError where it is damaged or of a newer version.
    """
    if _is_lines(text):
        return _document_of_lines(text, name, sections)
    document = _loaded(text, name)
    check_version(document.get("schema_version"), name)
    return _unfolded(document, name)


def _unfolded(document: dict[str, Any], name: str) -> dict[str, Any]:
    alike, found = document.pop(result_file.ALIKE, {}), dict[str, result_file.UnfoldedRows]()
    if not isinstance(alike, dict) or not alike.keys() <= result_file.HOST_FIELDS.keys():
        raise UsageError(f"{name}: {result_file.ALIKE} names no sections of nodes", expected=EXPECTED)
    for section, nodes in alike.items():
        try:
            found[section] = result_file.UnfoldedRows(document[section], nodes, result_file.HOST_FIELDS[section])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"{name}: {result_file.ALIKE}.{section}: {error}", expected=EXPECTED, reason="edited by hand"
            ) from None
    rows = sum(map(len, found.values()))
    if rows > limits.MOST_ALIKE:
        raise UsageError(f"{name} has {rows} rows", expected=f"at most {limits.MOST_ALIKE}")
    return document | found


def _document_of_lines(text: str, name: str, sections: Container[str] | None) -> dict[str, Any]:
    document: dict[str, Any] = {"complete": False}
    lines, found = documents.lines_of(text, name), dict[str, Any]()
    for number, line in enumerate(lines, 1):
        is_cut_off = number == len(lines) and not text.endswith("\n") and not line.rstrip().endswith("}")
        if is_cut_off or not line.strip():
            continue
        record = _loaded(line, f"{name}, line {number}")
        kind = record.pop("kind", None)
        if kind in ("metadata", "report"):
            check_version(record.get("schema_version"), f"{name}, line {number}")
        if kind == "metadata":
            document["metadata"] = _check_one_run(document.get("metadata"), record, f"{name}, line {number}")
        elif kind == "report":
            document |= {key: record[key] for key in _OF_REPORT if key in record}
            ordered = record.get("sections", ())
            found = {key: found.get(key, []) for key in (*found.keys() - {*ordered}, *ordered)}
        elif sections is None or kind in sections or kind == "row":
            _add(found, _section(kind, f"{name}, line {number}"), record)
    return document | found


def _check_one_run(before: dict[str, Any] | None, record: dict[str, Any], where: str) -> dict[str, Any]:
    """The metadata of a run; UsageError if lines before are of another run, whose rows and verdict would be lost."""
    if before is not None and before.get("run_id") != record.get("run_id"):
        raise UsageError(
            f"{where}: another run begins, {record.get('run_id')} behind {before.get('run_id')}",
            expected="the lines of one run",
            reason="several runs were kept in one file",
            next_step="a file a run: split it before the lines of kind metadata",
        )
    return record


def _section(kind: Any, where: str) -> str:
    if not isinstance(kind, str):
        raise UsageError(f"{where}: its kind is {kind!r}", expected=EXPECTED, reason="the file was edited by hand")
    return CollectiveRow.section if kind == "row" else kind


def _add(found: dict[str, Any], section: str, record: dict[str, Any]) -> None:
    if record.keys() == _CELLS:
        rows = found.setdefault(section, {})
        if isinstance(rows, dict):
            rows[str(record["name"])] = record["cells"]
            return
    found.setdefault(section, []).append(record)


def _loaded(text: str, where: str) -> dict[str, Any]:
    try:
        value = documents.load_json(text)
    except ValueError as error:
        place = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) and error.lineno > 1 else ""
        raise UsageError(
            f"{where}{place}: no JSON ({error})",
            expected=EXPECTED,
            reason="the file was cut off, or edited by hand",
        ) from None
    if not isinstance(value, dict):
        raise UsageError(f"{where}: no JSON object", expected=EXPECTED)
    if documents.may_hold_half_characters(text):
        documents.check_text(value, where)
    return value


def _check_verdict(verdict: Verdict, sentence: str, findings: Sequence[Finding], name: str) -> None:
    """Refuse a verdict milder than the findings below it, and a last line with another verdict.

    Raises UsageError.
    """
    worst = min((finding.severity for finding in findings), key=gravity, default=verdict)
    if worst not in (Verdict.PASS, Verdict.SKIP) and gravity(verdict) > gravity(worst):
        ids = ", ".join(dict.fromkeys(finding.id for finding in findings if finding.severity is worst))
        raise UsageError(f"{name}: verdict is {verdict}, and {ids} is {worst}", expected=EXPECTED, reason=EDITED)
    if sentence and not sentence.startswith((f"{verdict}:", f"{verdict} (simulated):")):
        raise UsageError(
            f"{name}: verdict is {verdict}, and the sentence is not", expected=f"{verdict}: ...", reason=EDITED
        )


Kind = TypeVar("Kind", bound=Record)
_Make = Callable[[type[Kind], Any, str], Kind]

_SECTIONS = ("rows", "pairs", "evidence", "checks", "verdicts")


def read(text: str, name: str) -> result_file.ResultFile:
    """The rows of a document, or of lines, of which a last one that was cut off is left out.

    Raises UsageError where it is damaged, of a newer version, or holds a value that cannot be.
    """
    kind = "gpubench JSON Lines" if _is_lines(text) else "gpubench JSON"
    return _result_file(document_of(text, name, _SECTIONS), kind, name)


def _result_file(document: Mapping[str, Any], kind: str, name: str) -> result_file.ResultFile:
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        raise UsageError(f"{name} has no metadata", expected=EXPECTED, reason="the file was edited by hand")
    complete = document.get("complete") is True
    findings = [from_plain(Finding, each, where) for each, where in _each(document, FINDINGS_SECTION, name)]
    if document.get("verdict") is not None:
        verdict = from_plain(Verdict, document["verdict"], f"{name}: verdict")
        _check_verdict(verdict, from_plain(str, document.get("sentence", ""), f"{name}: sentence"), findings, name)
    verdicts = _rows_from_json(VerdictRow, document, name, from_plain)
    command = find_command(str(metadata.get("subject")), metadata.get("collective"))
    return result_file.ResultFile(
        name=name,
        kind=kind,
        circumstances=circumstances(metadata, [gpu for gpu, _ in _each(document, "gpus", name)], name),
        rows=tuple(_rows_from_json(CollectiveRow, document, name, _row_from_json)),
        pairs=_rows_from_json(PairRow, document, name, _row_from_json),
        evidence=tuple(_records(EvidenceRow, document, name)),
        findings=tuple(findings) if command.findings_only else None,
        stored=tuple(findings),
        checks={row.check: row.verdict for row in _records(CheckRow, document, name)},
        devices=tuple(row for row in verdicts if row.scope in ("gpu", "nic")),
        complete=complete,
        verdict=document.get("verdict"),
        remarks=() if complete else ("the run was cut short",),
    )


def _rows_from_json(kind: type[Kind], document: Mapping[str, Any], name: str, make: _Make[Kind]) -> RowsByColumn[Kind]:
    """The rows of a section by column; of nodes that have another's rows only the columns that differ are checked."""
    section, records = kind.section, _section_of(document, kind.section, name)
    where = f"{name}: {section}"
    if not isinstance(records, result_file.UnfoldedRows):
        return RowsByColumn(kind, [(len(records), _columns(kind, records, 0, where, make))])
    known: dict[int, dict[str, list[Any]]] = {}
    pieces: list[tuple[int, Mapping[str, Sequence[Any]]]] = []
    number = 0
    for node, rows, values in records.pieces:
        if id(rows) not in known:
            known[id(rows)] = _columns(kind, rows, number, where, make)
        columns = known[id(rows)] | dict.fromkeys(records.hosts, [node] * len(rows))
        if all(_are_possible(kind, column, cells) for column, cells in values.items()):
            pieces.append((len(rows), {**columns, **values}))
        else:
            own = list(records.records(node, rows, values))
            pieces.append((len(rows), _columns(kind, own, number, where, make)))
        number += len(rows)
    return RowsByColumn(kind, pieces)


def _columns(
    kind: type[Kind], records: Sequence[Any], first: int, where: str, make: _Make[Kind]
) -> dict[str, list[Any]]:
    """The columns of records, of which the first one is number `first` of its section.

    They are checked column by column; where one is not as it should be, row by row by `make`, whose error names a row.
    """
    names = records[0].keys() if records and isinstance(records[0], dict) else ()
    known, required = field_names(kind)
    if required <= {*names} <= known and all(isinstance(record, dict) and record.keys() == names for record in records):
        columns = {name: [record[name] for record in records] for name in names}
        if all(_are_possible(kind, name, cells) for name, cells in columns.items()):
            return columns
    made = [make(kind, each, f"{where}[{number}]") for number, each in enumerate(records, first)]
    return {name: [getattr(row, name) for row in made] for name in kind.columns()}


def _are_possible(kind: Any, column: str, cells: Sequence[Any]) -> bool:
    """True where no cell of a column has a type that needs to be looked at, or a value that `_problems` would name."""
    if not types_as_is(kind)[column].issuperset(map(type, cells)):
        return False
    known = [cell for cell in cells if cell is not None]
    if column in _WORDS:
        return set(known) <= set(_WORDS[column])
    least = min(known, default=1) if column in (*_POSITIVE, *_NOT_NEGATIVE) else 1
    return bool(least >= 0 if column in _NOT_NEGATIVE else least > 0)


def _records(kind: type[Kind], document: Mapping[str, Any], name: str) -> Iterator[Kind]:
    for each, where in _each(document, kind.section, name):
        yield from_plain(kind, each, where)


def _each(document: Mapping[str, Any], section: str, name: str) -> Iterator[tuple[Any, str]]:
    for number, record in enumerate(_section_of(document, section, name)):
        yield record, f"{name}: {section}[{number}]"


def _section_of(document: Mapping[str, Any], section: str, name: str) -> Sequence[Any] | result_file.UnfoldedRows:
    records: Any = document.get(section, ())
    if not isinstance(records, (list, tuple, result_file.UnfoldedRows)):
        raise UsageError(f"{name}: {section} is no list", expected=EXPECTED)
    return records


_WANTED = documents.Wanted(
    kinds="a result of gpubench's, .json or .jsonl, of any command",
    how_to_make_one="gpubench allreduce --output result.json",
    most_bytes=limits.MOST_RESULT_BYTES,
    example="result.json",
)
_NEVER_NEGATIVE = ("time_us", "latency_us", "_gb_s", "size_bytes", "_gbit_s")
_HEAD = ("schema_version", "complete", "verdict", "sentence", "duration_s", "metadata", FINDINGS_SECTION)
_STREAMED: Mapping[str, Sequence[str]] = {
    CollectiveRow.section: COLLECTIVE_COLUMNS,
    PairRow.section: PAIR_COLUMNS,
    TRAFFIC_SECTION: TrafficRow.columns(),
    OVERLAP_SECTION: OverlapRow.columns(),
}


class StoredRun(Struct, frozen=True):
    """What a run wrote: `rows` with `columns` came one by one, none where all came with the report."""

    metadata: Metadata
    columns: Sequence[str]
    rows: Sequence[Row]
    report: Report

    @property
    def sections(self) -> tuple[str, ...]:
        """The sections that there are."""
        streamed = (self.metadata.rows_section,) if self.columns else ()
        return (*streamed, *self.report.sections, FINDINGS_SECTION)


def read_stored(path: Path) -> StoredRun:
    """The run that a file is of.

    Raises UsageError where it cannot be read, is no result of gpubench's, is damaged, or of a newer version.
    """
    return stored_of(documents.read_text(path, _WANTED), str(path))


def stored_of(text: str, name: str) -> StoredRun:
    """The run that a text is of, as `read_stored` reads it from a file; `name` is for errors, which are the same."""
    if not text.lstrip().startswith("{"):
        raise _no_result(name, text)
    with add_advice(
        reason="the file was cut off, or edited by hand", next_step="the same command again, with --output"
    ):
        document = {} if not _is_lines(text) and '"schema_version"' not in text else document_of(text, name)
        if not isinstance(document.get("metadata"), dict):
            raise _no_result(name, text)
        return _run(document, name)


def is_stored(text: str) -> bool:
    """True of a text that is gpubench's JSON, whole or damaged; nccl-tests, nvbandwidth and NCCL write JSON too."""
    is_of_others = is_of_nccl_tests(text) or nvbandwidth.is_json(text) or nccl_inspector.recognises(text)
    return text.lstrip().startswith("{") and not is_of_others


def _no_result(name: str, text: str) -> UsageError:
    is_csv = text.startswith(("collective,", "source,"))
    return _WANTED.unfit(
        f"{name} is no result of gpubench's that can be shown again",
        reason="a csv holds one section, without the machine and the verdict" if is_csv else "another program wrote it",
        next_step=f"gpubench compare {name} new.json reads more kinds of files",
    )


def _run(document: Mapping[str, Any], name: str) -> StoredRun:
    metadata = from_plain(Metadata, document["metadata"], f"{name}: metadata")
    command = metadata.of_command
    streamed = {command.streamed_section: _STREAMED[command.streamed_section]} if command.streamed_section else {}
    sections = {key: _stored_section(key, value, name) for key, value in document.items() if key not in _HEAD}
    tables = [sections.pop(each) for each in streamed if each in sections]
    findings = _rows(FINDINGS_SECTION, Finding, document.get(FINDINGS_SECTION, []), name)
    duration = document.get("duration_s")
    verdict = from_plain(Verdict, document.get("verdict", Verdict.ERROR.value), f"{name}: verdict")
    sentence = from_plain(str, document.get("sentence", ""), f"{name}: sentence")
    _check_verdict(verdict, sentence, findings, name)
    return StoredRun(
        metadata=metadata,
        columns=next(iter(streamed.values()), ()),
        rows=[row for table in tables if isinstance(table, Table) for row in table.rows()],
        report=Report(
            verdict=verdict,
            complete=document.get("complete") is True,
            findings=findings,
            sections=sections,
            main=command.main_section,
            sentence=sentence,
            duration_s=None if duration is None else from_plain(float, duration, f"{name}: duration_s"),
        ),
    )


def _stored_section(key: str, value: Any, name: str) -> Section:
    if key in result_file.MATRICES:
        value = value or {}  # of lines that name sections without a row
        return from_plain(Matrix, {"cells": value}, f"{name}: {key}")
    if key not in result_file.TABLES:
        raise UsageError(f"{name} has an unknown section {key}", expected=EXPECTED, reason="a newer gpubench wrote it")
    columns = result_file.TABLES[key].__struct_fields__
    if isinstance(value, result_file.UnfoldedRows):
        parts = list(value.parts(lambda record: _row(result_file.TABLES[key], record, f"{name}: {key}")))
        return Table.of_nodes(columns, lambda: parts)
    rows = _rows(key, result_file.TABLES[key], value, name)
    return Table(columns, lambda: rows)


def _row(kind: type, record: Any, where: str) -> Any:
    row: Any = from_plain(kind, record, where)
    for column in row.__struct_fields__:
        value = getattr(row, column)
        if isinstance(value, int | float) and value < 0 and column.endswith(_NEVER_NEGATIVE):
            raise UsageError(f"{where}.{column} is {value}", expected="0 or more", reason=EDITED)
    return row


def _rows(key: str, kind: type, value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise UsageError(f"{name}: {key} is no list", expected=EXPECTED)
    return [_row(kind, each, f"{name}: {key}[{number}]") for number, each in enumerate(value)]
