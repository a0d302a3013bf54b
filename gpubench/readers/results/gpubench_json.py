"""gpubench's JSON document and its JSON Lines: rows, pairs, evidence, and the metadata that say how they came about."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from gpubench.errors import UsageError
from gpubench.model.results.report import FINDINGS_SECTION, PAIRS_SECTION, ROWS_SECTION, CollectiveRow, PairRow
from gpubench.model.results.result_file import ResultFile
from gpubench.model.results.rows.checks import CHECKS_SECTION, VERDICTS_SECTION, CheckRow, VerdictRow
from gpubench.model.results.rows.evidence import EVIDENCE_SECTION, EvidenceRow
from gpubench.model.terms.plain import from_plain
from gpubench.model.terms.verdict import Finding
from gpubench.readers.documents.characters import check_text
from gpubench.readers.documents.json_lines import load_json
from gpubench.readers.results.gpubench_rows import check_version, circumstances, row_from_json
from gpubench.readers.results.lines_of_text import lines_of

T = TypeVar("T")

_SECTIONS = (ROWS_SECTION, PAIRS_SECTION, EVIDENCE_SECTION, CHECKS_SECTION, VERDICTS_SECTION)
_JUDGES = ("check", "topo")
"""Commands whose findings are the result; of others the rows tell the same."""

_DOCUMENT = re.compile(r'\s*\{\s*"schema_version"')
_LINES = re.compile(r'\s*\{\s*"kind"\s*:\s*"metadata"')
_EXPECTED = "what gpubench --output FILE.json or FILE.jsonl writes"


def recognises(text: str) -> bool:
    """True if a text begins as gpubench's JSON document or its JSON Lines do."""
    return _DOCUMENT.match(text) is not None or _LINES.match(text) is not None


def read(text: str, name: str) -> ResultFile:
    """The rows of a document, or of lines, of which a last one that was cut off is left out.

    Raises UsageError where it is damaged, of a newer version, or holds a value that cannot be.
    """
    if _LINES.match(text):
        return _result_file(_document_of_lines(text, name), "gpubench JSON Lines", name)
    document = _loaded(text, name)
    check_version(document.get("schema_version"), name)
    return _result_file(document, "gpubench JSON", name)


def _document_of_lines(text: str, name: str) -> dict[str, Any]:
    """The lines put together as the document that the same run writes."""
    document: dict[str, Any] = {"complete": False, **{section: [] for section in _SECTIONS}}
    lines = lines_of(text, name)
    for number, line in enumerate(lines, 1):
        is_cut_off = number == len(lines) and not text.endswith("\n") and not line.rstrip().endswith("}")
        if is_cut_off or not line.strip():
            continue
        record = _loaded(line, f"{name}, line {number}")
        kind = record.pop("kind", None)
        section = ROWS_SECTION if kind == "row" else kind
        if kind in ("metadata", "report"):
            check_version(record.get("schema_version"), f"{name}, line {number}")
        if kind == "metadata":
            document["metadata"] = record
        elif kind == "report":
            document |= {"complete": record.get("complete", False), "verdict": record.get("verdict")}
            document[FINDINGS_SECTION] = record.get(FINDINGS_SECTION, [])
        elif section in _SECTIONS:
            document[section].append(record)
    return document


def _loaded(text: str, where: str) -> dict[str, Any]:
    try:
        value = load_json(text)
    except ValueError as error:
        place = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) and error.lineno > 1 else ""
        raise UsageError(
            f"{where}{place}: no JSON ({error})",
            expected=_EXPECTED,
            reason="the file was cut off, or edited by hand",
        ) from None
    if not isinstance(value, dict):
        raise UsageError(f"{where}: no JSON object", expected=_EXPECTED)
    return value


def _result_file(document: Mapping[str, Any], kind: str, name: str) -> ResultFile:
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        raise UsageError(f"{name} has no metadata", expected=_EXPECTED, reason="the file was edited by hand")
    check_text(metadata, f"{name}: metadata")
    complete = document.get("complete") is True
    findings = _records(Finding, document, FINDINGS_SECTION, name)
    verdicts = _records(VerdictRow, document, VERDICTS_SECTION, name)
    return ResultFile(
        name=name,
        kind=kind,
        circumstances=circumstances(metadata, [gpu for gpu, _ in _each(document, "gpus", name)], name),
        rows=tuple(row_from_json(CollectiveRow, each, where) for each, where in _each(document, ROWS_SECTION, name)),
        pairs=tuple(row_from_json(PairRow, each, where) for each, where in _each(document, PAIRS_SECTION, name)),
        evidence=tuple(_records(EvidenceRow, document, EVIDENCE_SECTION, name)),
        findings=tuple(findings) if metadata.get("subject") in _JUDGES else None,
        checks={row.check: row.verdict for row in _records(CheckRow, document, CHECKS_SECTION, name)},
        devices=tuple(row for row in verdicts if row.scope in ("gpu", "nic")),
        complete=complete,
        verdict=document.get("verdict"),
        remarks=() if complete else ("the run was cut short",),
    )


def _records(kind: type[T], document: Mapping[str, Any], section: str, name: str) -> Iterator[T]:
    for each, where in _each(document, section, name):
        check_text(each, where)
        yield from_plain(kind, each, where)


def _each(document: Mapping[str, Any], section: str, name: str) -> Iterator[tuple[Any, str]]:
    """The records of a section, each with where it stands."""
    records: Sequence[Any] = document.get(section, ())
    if not isinstance(records, (list, tuple)):
        raise UsageError(f"{name}: {section} is no list", expected=_EXPECTED)
    for number, record in enumerate(records):
        yield record, f"{name}: {section}[{number}]"
