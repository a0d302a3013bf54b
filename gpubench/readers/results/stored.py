"""A whole result of gpubench's, of any command, as it was handed to the formats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gpubench.errors import UsageError, advising
from gpubench.model.results.alike import UnfoldedRows
from gpubench.model.results.all_sections import MAIN_SECTIONS, MATRICES, TABLES
from gpubench.model.results.report import (
    COLLECTIVE_COLUMNS,
    FINDINGS_SECTION,
    OVERLAP_SECTION,
    PAIR_COLUMNS,
    ROWS_SECTION,
    Matrix,
    Metadata,
    Report,
    Row,
    Section,
    Table,
)
from gpubench.model.results.rows.overlap import OverlapRow
from gpubench.model.results.rows.watch import TrafficRow
from gpubench.model.terms.plain import from_plain
from gpubench.model.terms.verdict import Finding, Verdict
from gpubench.readers.documents.characters import check_text
from gpubench.readers.documents.text_files import Wanted, read_text
from gpubench.readers.results import limits, nvbandwidth
from gpubench.readers.results.gpubench_document import EDITED, EXPECTED, check_verdict, document_of, is_lines
from gpubench.readers.results.nccl_tests.json import recognises as is_of_nccl_tests

_WANTED = Wanted(
    kinds="a result of gpubench's, .json or .jsonl, of any command",
    how_to_make_one="gpubench allreduce --output result.json",
    most_bytes=limits.MOST_BYTES,
    example="result.json",
)
_NEVER_NEGATIVE = ("time_us", "latency_us", "_gb_s", "size_bytes", "_gbit_s")
_HEAD = ("schema_version", "complete", "verdict", "sentence", "duration_s", "metadata", FINDINGS_SECTION)
_P2P, _WATCH = "p2p", "watch"


@dataclass(frozen=True, slots=True)
class StoredRun:
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
    return stored_of(read_text(path, _WANTED), str(path))


def stored_of(text: str, name: str) -> StoredRun:
    """The run that a text is of, as `read_stored` reads it from a file; `name` is for errors, which are the same."""
    if not text.lstrip().startswith("{"):
        raise _no_result(name, text)
    with advising(reason="the file was cut off, or edited by hand", next_step="the same command again, with --output"):
        document = {} if not is_lines(text) and '"schema_version"' not in text else document_of(text, name)
        if not isinstance(document.get("metadata"), dict):
            raise _no_result(name, text)
        check_text(document, name)
        return _run(document, name)


def is_stored(text: str) -> bool:
    """True of a text that is gpubench's JSON, whole or damaged; nccl-tests and nvbandwidth write JSON too."""
    return text.lstrip().startswith("{") and not (is_of_nccl_tests(text) or nvbandwidth.is_json(text))


def _no_result(name: str, text: str) -> UsageError:
    is_csv = text.startswith(("collective,", "source,"))
    return _WANTED.unfit(
        f"{name} is no result of gpubench's that can be shown again",
        reason="a csv holds one section, without the machine and the verdict" if is_csv else "another program wrote it",
        next_step=f"gpubench compare {name} new.json reads more kinds of files",
    )


def _run(document: Mapping[str, Any], name: str) -> StoredRun:
    metadata = from_plain(Metadata, document["metadata"], f"{name}: metadata")
    streamed = {ROWS_SECTION: COLLECTIVE_COLUMNS} if metadata.collective is not None else {}
    if metadata.subject == _P2P:
        streamed = {metadata.rows_section: PAIR_COLUMNS}
    if metadata.subject == _WATCH:
        streamed = {metadata.rows_section: TrafficRow.columns()}
    if metadata.subject == OVERLAP_SECTION:
        streamed = {OVERLAP_SECTION: OverlapRow.columns()}
    sections = {key: _section(key, value, name) for key, value in document.items() if key not in _HEAD}
    tables = [sections.pop(each) for each in streamed if each in sections]
    findings = _rows(FINDINGS_SECTION, Finding, document.get(FINDINGS_SECTION, []), name)
    duration = document.get("duration_s")
    verdict = from_plain(Verdict, document.get("verdict", Verdict.ERROR.value), f"{name}: verdict")
    sentence = from_plain(str, document.get("sentence", ""), f"{name}: sentence")
    check_verdict(verdict, sentence, findings, name)
    return StoredRun(
        metadata=metadata,
        columns=next(iter(streamed.values()), ()),
        rows=[row for table in tables if isinstance(table, Table) for row in table.rows()],
        report=Report(
            verdict=verdict,
            complete=document.get("complete") is True,
            findings=findings,
            sections=sections,
            main=MAIN_SECTIONS.get(metadata.subject, ROWS_SECTION),
            sentence=sentence,
            duration_s=None if duration is None else from_plain(float, duration, f"{name}: duration_s"),
        ),
    )


def _check_figures(row: Any, where: str) -> None:
    """Refuse times, rates and sizes below 0."""
    for each in fields(row):
        value = getattr(row, each.name)
        if isinstance(value, int | float) and value < 0 and each.name.endswith(_NEVER_NEGATIVE):
            raise UsageError(f"{where}.{each.name} is {value}", expected="0 or more", reason=EDITED)


def _section(key: str, value: Any, name: str) -> Section:
    if key in MATRICES:
        value = value or {}  # of lines that name sections without a row
        return from_plain(Matrix, {"cells": value}, f"{name}: {key}")
    if key not in TABLES:
        raise UsageError(f"{name} has an unknown section {key}", expected=EXPECTED, reason="a newer gpubench wrote it")
    columns = [each.name for each in fields(TABLES[key])]
    if isinstance(value, UnfoldedRows):
        parts = list(value.parts(lambda record: _row(TABLES[key], record, f"{name}: {key}")))
        return Table.of_nodes(columns, lambda: parts)
    rows = _rows(key, TABLES[key], value, name)
    return Table(columns, lambda: rows)


def _row(kind: type, record: Any, where: str) -> Any:
    row: Any = from_plain(kind, record, where)
    _check_figures(row, where)
    return row


def _rows(key: str, kind: type, value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise UsageError(f"{name}: {key} is no list", expected=EXPECTED)
    return [_row(kind, each, f"{name}: {key}[{number}]") for number, each in enumerate(value)]
