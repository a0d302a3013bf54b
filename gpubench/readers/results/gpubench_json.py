"""Reads gpubench's JSON documents and JSON Lines, from any command."""

import json
import re
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from msgspec import Struct

from gpubench.errors import UPGRADE, UsageError, add_advice
from gpubench.model.results import result_file
from gpubench.model.results.kv import KvRow
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
from gpubench.model.terms.plain import from_plain
from gpubench.model.terms.verdict import Finding, Origin, Verdict, gravity
from gpubench.readers import documents, limits
from gpubench.readers.results import nccl_inspector, nvbandwidth, perftest
from gpubench.readers.results.nccl_tests.json import recognises as is_of_nccl_tests

R = TypeVar("R", bound=Record)

EDITED = "it was edited by hand"
EXPECTED = "the output of gpubench --output FILE.json or FILE.jsonl"

_WORDS: Mapping[str, Sequence[str]] = {
    "origin": tuple(map(str, Origin)),
    "placement": tuple(map(str, Placement)),
    "mode": ("throughput", "latency"),
    "verdict": tuple(map(str, Verdict)),
}
_POSITIVE = ("ranks", "nodes", "size_bytes", "time_us")
_NEVER_NEGATIVE = ("time_us", "latency_us", "_gb_s", "size_bytes", "_gbit_s", "wrong", "batch_cv", "ci95_percent")


def check_version(version: Any, name: str) -> None:
    """Raise UsageError if the schema version is missing, or newer than this gpubench supports."""
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UsageError(f"{name} has no schema_version", expected="a whole number, as in gpubench's output")
    if version > SCHEMA_VERSION:
        raise UsageError(
            f"{name} has schema version {version}",
            expected=f"at most {SCHEMA_VERSION}, which this gpubench supports",
            reason="a newer gpubench wrote it, and its rows may mean something else",
            next_step=UPGRADE,
        )


def recognises(text: str) -> bool:
    """Return True if a text starts like gpubench's JSON document or JSON Lines."""
    return re.match(r'\s*\{\s*"schema_version"', text) is not None or _is_lines(text)


def _is_lines(text: str) -> bool:
    return re.match(r'\s*\{\s*"kind"\s*:\s*"metadata"', text) is not None


_OF_OTHERS = nvbandwidth.is_json, nccl_inspector.recognises, perftest.is_json


def is_stored(text: str) -> bool:
    """Return True if a text may be gpubench's JSON, intact or damaged.

    Return False for the JSON of nccl-tests, nvbandwidth, NCCL's Inspector or perftest.
    """
    is_of_others = is_of_nccl_tests(text) or any(is_json(text) for is_json in _OF_OTHERS)
    return text.lstrip().startswith("{") and not is_of_others


def _document(text: str, name: str, sections: Container[str] | None = None) -> dict[str, Any]:
    """Parse a JSON document, or convert JSON Lines to the document of the same run.

    From JSON Lines, keep only `sections` (None for all), and skip an incomplete last line.

    Raises UsageError if the text is damaged or has a newer schema version.
    """
    if _is_lines(text):
        return _document_of_lines(text, name, sections)
    document = _parsed(text, name)
    check_version(document.get("schema_version"), name)
    nodes_by_section = document.pop(result_file.ALIKE, {})
    if not isinstance(nodes_by_section, dict) or not nodes_by_section.keys() <= result_file.HOST_FIELDS.keys():
        raise UsageError(f"{name}: {result_file.ALIKE} has no sections of nodes", expected=EXPECTED)
    row_count = 0
    for section, nodes in nodes_by_section.items():
        try:
            rows = result_file.UnfoldedRows(document[section], nodes, result_file.HOST_FIELDS[section])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"{name}: {result_file.ALIKE}.{section}: {error}", expected=EXPECTED, reason="edited by hand"
            ) from None
        document[section] = rows
        row_count += len(rows)
    if row_count > limits.MOST_ALIKE:
        raise UsageError(f"{name} has {row_count} rows", expected=f"at most {limits.MOST_ALIKE}")
    return document


def _document_of_lines(text: str, name: str, sections: Container[str] | None) -> dict[str, Any]:
    document: dict[str, Any] = {"complete": False}
    lines, rows_by_section = documents.split_lines(text, name), dict[str, Any]()
    for number, line in enumerate(lines, 1):
        where = f"{name}, line {number}"
        is_cut_off = number == len(lines) and not text.endswith("\n") and not line.rstrip().endswith("}")
        if is_cut_off or not line.strip():
            continue
        record = _parsed(line, where)
        kind = record.pop("kind", None)
        if kind in ("metadata", "report"):
            check_version(record.get("schema_version"), where)
        if kind == "metadata":
            _check_one_run(document.setdefault("metadata", record), record, where)
        elif kind == "report":
            report_keys = ("complete", "verdict", "sentence", "duration_s", FINDINGS_SECTION)
            document |= {key: record[key] for key in report_keys if key in record}
            ordered = record.get("sections", ())
            keys = (*rows_by_section.keys() - {*ordered}, *ordered)
            rows_by_section = {key: rows_by_section.get(key, []) for key in keys}
        elif sections is None or kind in sections or kind == "row":
            if not isinstance(kind, str):
                raise UsageError(f"{where}: its kind is {kind!r}", expected=EXPECTED, reason=EDITED)
            section = CollectiveRow.section if kind == "row" else kind
            is_matrix = record.keys() == {"name", "cells"}
            rows = rows_by_section.setdefault(section, {} if is_matrix else [])
            if is_matrix and isinstance(rows, dict):
                rows[str(record["name"])] = record["cells"]
            else:
                rows.append(record)
    return document | rows_by_section


def _check_one_run(first: dict[str, Any], record: dict[str, Any], where: str) -> None:
    if first.get("run_id") != record.get("run_id"):
        raise UsageError(
            f"{where}: another run begins, {record.get('run_id')} after {first.get('run_id')}",
            expected="the lines of one run",
            reason="several runs were kept in one file",
            next_step="one file per run. Split it before the lines of kind metadata",
        )


def _parsed(text: str, where: str) -> dict[str, Any]:
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
        raise UsageError(f"{where}: not a JSON object", expected=EXPECTED)
    return value


def read(text: str, name: str) -> result_file.ResultFile:
    """Read the rows that `compare` needs. An incomplete last line is skipped.

    Raises UsageError if the text is damaged, has a newer schema version, or contains an impossible value.
    """
    document = _document(text, name, ("rows", "pairs", "evidence", "checks", "verdicts"))
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        raise UsageError(f"{name} has no metadata", expected=EXPECTED, reason="the file was edited by hand")
    complete = document.get("complete") is True
    findings = _rows(Finding, FINDINGS_SECTION, document, name)
    if document.get("verdict") is not None:
        _read_verdict(document, findings, name)
    command = find_command(str(metadata.get("subject")), metadata.get("collective"))
    return result_file.ResultFile(
        name=name,
        kind="gpubench JSON Lines" if _is_lines(text) else "gpubench JSON",
        circumstances=_circumstances(metadata, _records("gpus", document, name), name),
        rows=tuple(_rows(CollectiveRow, CollectiveRow.section, document, name)),
        pairs=_rows_by_column(PairRow, document, name),
        evidence=tuple(_rows(EvidenceRow, EvidenceRow.section, document, name)),
        findings=tuple(findings) if command.findings_only else None,
        stored=tuple(findings),
        checks={row.check: row.verdict for row in _rows(CheckRow, CheckRow.section, document, name)},
        devices=tuple(row for row in _rows_by_column(VerdictRow, document, name) if row.scope in ("gpu", "nic")),
        complete=complete,
        verdict=document.get("verdict"),
        remarks=() if complete else ("the run was cut short",),
    )


def _circumstances(metadata: Mapping[str, Any], gpus: Sequence[Any], name: str) -> result_file.FileCircumstances:
    """Read the machine, libraries and settings. Unknown fields are ignored, unlike unknown fields of rows."""
    try:
        models = [str(rank["gpu"]) for rank in metadata["ranks"] if rank["gpu"]]
        options = metadata["options"]
        # p2p and check store models by device, but watch stores numbers under the same name
        named = options.get("gpus")
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
            expected="metadata as in gpubench's output",
            reason="the file was edited by hand",
        ) from None


def _read_verdict(document: Mapping[str, Any], findings: Sequence[Finding], name: str) -> tuple[Verdict, str]:
    """Read the verdict and the sentence that ends the report.

    Raises UsageError if a finding is more severe than the verdict, or if the sentence has another verdict.
    """
    verdict = from_plain(Verdict, document.get("verdict", Verdict.ERROR.value), f"{name}: verdict")
    sentence = from_plain(str, document.get("sentence", ""), f"{name}: sentence")
    worst = min((finding.severity for finding in findings), key=gravity, default=verdict)
    if worst not in (Verdict.PASS, Verdict.SKIP) and gravity(verdict) > gravity(worst):
        ids = ", ".join(dict.fromkeys(finding.id for finding in findings if finding.severity is worst))
        raise UsageError(f"{name}: verdict is {verdict}, but {ids} is {worst}", expected=EXPECTED, reason=EDITED)
    if sentence and not sentence.startswith((f"{verdict}:", f"{verdict} (simulated):")):
        raise UsageError(
            f"{name}: verdict is {verdict}, but the sentence is not", expected=f"{verdict}: ...", reason=EDITED
        )
    return verdict, sentence


def _records(section: str, document: Mapping[str, Any], name: str) -> Any:
    records = document.get(section, ())
    if not isinstance(records, (list, tuple, result_file.UnfoldedRows)):
        raise UsageError(f"{name}: {section} is not a list", expected=EXPECTED)
    return records


def _rows(kind: Any, section: str, document: Mapping[str, Any], name: str) -> list[Any]:
    return [
        _read_row(kind, record, f"{name}: {section}[{number}]")
        for number, record in enumerate(_records(section, document, name))
    ]


def _read_row(kind: Any, record: Any, where: str) -> Any:
    row = Finding.from_record(record, where) if kind is Finding else from_plain(kind, record, where)
    for column, problem in problems(row):
        raise UsageError(f"{where}.{column} is {getattr(row, column)!r}", expected=problem, reason=EDITED)
    return row


def problems(row: Any) -> Iterator[tuple[str, str]]:
    """Yield each column of a row that has an impossible value, with a description of valid values."""
    kind: Any = type(row)
    for column in _checked_columns(kind):
        if problem := _problem(kind, column, getattr(row, column)):
            yield column, problem


@cache
def _checked_columns(kind: Any) -> tuple[str, ...]:
    checked = (*_WORDS, *_POSITIVE) if kind in (CollectiveRow, PairRow) else ()
    return tuple(name for name in kind.__struct_fields__ if name in checked or name.endswith(_NEVER_NEGATIVE))


def _problem(kind: Any, column: str, value: Any) -> str:
    if value is None:
        return ""
    if kind in (CollectiveRow, PairRow):
        if column in _WORDS:
            return "" if value in _WORDS[column] else f"one of {', '.join(_WORDS[column])}"
        if column in _POSITIVE:
            return "" if value > 0 else "a number above 0"
    return "a number of at least 0" if isinstance(value, int | float) and value < 0 else ""


def _rows_by_column(kind: type[R], document: Mapping[str, Any], name: str) -> Collection[R]:
    """Read a section that can have very many rows. Nodes with identical columns share one copy of them."""
    records = _records(kind.section, document, name)
    if not isinstance(records, result_file.UnfoldedRows):
        return _rows(kind, kind.section, document, name)
    types = get_type_hints(kind)
    shared: dict[int, Mapping[str, Sequence[Any]]] = {}
    pieces, first = [], 0
    for node, written, differing in records.pieces:
        if id(written) not in shared:
            rows = _rows(kind, kind.section, {kind.section: written}, name)
            shared[id(written)] = RowsByColumn.of(kind, rows).columns
        columns = {**shared[id(written)], **dict.fromkeys(records.hosts, [node] * len(written))}
        for column, cells in differing.items():
            columns[column] = [
                _cell(kind, column, types[column], cell, f"{name}: {kind.section}[{number}].{column}")
                for number, cell in enumerate(cells, first)
            ]
        pieces.append((len(written), columns))
        first += len(written)
    return RowsByColumn(kind, pieces)


def _cell(kind: type[Record], column: str, declared: Any, cell: Any, where: str) -> Any:
    value = from_plain(declared, cell, where)
    if problem := _problem(kind, column, value):
        raise UsageError(f"{where} is {value!r}", expected=problem, reason=EDITED)
    return value


class StoredRun(Struct, frozen=True):
    """A stored run.

    `rows` are the rows that were written one by one during the run, with `columns`. Both are empty for commands that
    write all rows with the report.
    """

    metadata: Metadata
    columns: Sequence[str]
    rows: Sequence[Row]
    report: Report

    @property
    def sections(self) -> tuple[str, ...]:
        streamed = (self.metadata.rows_section,) if self.columns else ()
        return (*streamed, *self.report.sections, FINDINGS_SECTION)


_WANTED = documents.Wanted(
    kinds="a gpubench result (.json or .jsonl) of any command",
    how_to_make_one="gpubench allreduce --output result.json",
    most_bytes=limits.MOST_RESULT_BYTES,
    example="result.json",
)
_HEAD = ("schema_version", "complete", "verdict", "sentence", "duration_s", "metadata", FINDINGS_SECTION)
_STREAMED: Mapping[str, Sequence[str]] = {
    CollectiveRow.section: COLLECTIVE_COLUMNS,
    PairRow.section: PAIR_COLUMNS,
    TRAFFIC_SECTION: TrafficRow.columns(),
    OVERLAP_SECTION: OverlapRow.columns(),
    KvRow.section: KvRow.columns(),
}


def read_stored(path: Path) -> StoredRun:
    """Read a whole run from a file.

    Raises UsageError if the file cannot be read, is damaged, is not a gpubench result, or has a newer schema version.
    """
    return parse_stored(documents.read_text(path, _WANTED), str(path))


def parse_stored(text: str, name: str) -> StoredRun:
    """Read a whole run from a text. `name` is for error messages. Raises the same errors as `read_stored`."""
    if not text.lstrip().startswith("{"):
        raise _no_result(name, text)
    with add_advice(
        reason="the file was cut off, or edited by hand", next_step="the same command again, with --output"
    ):
        document = {} if not _is_lines(text) and '"schema_version"' not in text else _document(text, name)
        if not isinstance(document.get("metadata"), dict):
            raise _no_result(name, text)
        return _run(document, name)


def _no_result(name: str, text: str) -> UsageError:
    is_csv = text.startswith(("collective,", "source,"))
    return _WANTED.unfit(
        f"{name} is not a gpubench result that can be shown again",
        reason="a csv has only one section, without the machine and the verdict"
        if is_csv
        else "another program wrote it",
        next_step=f"gpubench compare {name} new.json reads more kinds of files",
    )


def _run(document: Mapping[str, Any], name: str) -> StoredRun:
    metadata = from_plain(Metadata, document["metadata"], f"{name}: metadata")
    command = metadata.command_record
    sections = {key: _section(key, document, name) for key in document if key not in _HEAD}
    streamed = sections.pop(command.streamed_section, None) if command.streamed_section else None
    findings = _rows(Finding, FINDINGS_SECTION, document, name)
    verdict, sentence = _read_verdict(document, findings, name)
    return StoredRun(
        metadata=metadata,
        columns=_STREAMED[command.streamed_section] if command.streamed_section else (),
        rows=[*streamed.rows()] if isinstance(streamed, Table) else [],
        report=Report(
            verdict=verdict,
            complete=document.get("complete") is True,
            findings=findings,
            sections=sections,
            main=command.main_section,
            sentence=sentence,
            duration_s=from_plain(float | None, document.get("duration_s"), f"{name}: duration_s"),  # type: ignore[arg-type]
        ),
    )


def _section(key: str, document: Mapping[str, Any], name: str) -> Section:
    value = document[key]
    if key in result_file.MATRICES:
        # In JSON Lines, the value of a section without rows is an empty list.
        return from_plain(Matrix, {"cells": value or {}}, f"{name}: {key}")
    if key not in result_file.TABLES:
        raise UsageError(f"{name} has an unknown section {key}", expected=EXPECTED, reason="a newer gpubench wrote it")
    kind = result_file.TABLES[key]
    if isinstance(value, result_file.UnfoldedRows):
        parts = list(value.parts(lambda record: _read_row(kind, record, f"{name}: {key}")))
        return Table.of_nodes(kind.__struct_fields__, lambda: parts)
    rows = _rows(kind, key, document, name)
    return Table(kind.__struct_fields__, lambda: rows)
