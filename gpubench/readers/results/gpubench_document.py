"""gpubench's JSON document and its JSON Lines as plain data: what stands in them, not yet what it means."""

import json
import re
from collections.abc import Container, Sequence
from typing import Any

from gpubench.errors import UsageError
from gpubench.model.results.alike import ALIKE, HOST_FIELDS, UnfoldedRows
from gpubench.model.results.report import FINDINGS_SECTION, ROWS_SECTION
from gpubench.model.terms.verdict import Finding, Verdict, gravity
from gpubench.readers.documents.characters import check_text
from gpubench.readers.documents.json_lines import load_json
from gpubench.readers.results import limits
from gpubench.readers.results.gpubench_rows import check_version
from gpubench.readers.results.lines_of_text import lines_of

EDITED = "it was edited by hand"
EXPECTED = "what gpubench --output FILE.json or FILE.jsonl writes"

_DOCUMENT = re.compile(r'\s*\{\s*"schema_version"')
_LINES = re.compile(r'\s*\{\s*"kind"\s*:\s*"metadata"')
_OF_REPORT = ("complete", "verdict", "sentence", "duration_s", FINDINGS_SECTION)
_CELLS = {"name", "cells"}


def recognises(text: str) -> bool:
    """True if a text begins as gpubench's JSON document or its JSON Lines do."""
    return _DOCUMENT.match(text) is not None or is_lines(text)


def is_lines(text: str) -> bool:
    """True if a text begins as gpubench's JSON Lines do."""
    return _LINES.match(text) is not None


def document_of(text: str, name: str, sections: Container[str] | None = None) -> dict[str, Any]:
    """The document of a text, or the one that the same run writes of JSON Lines.

    Of lines only those of `sections` are kept, all where that is None, and a last one that was cut off is left out.
    Raises UsageError where it is damaged or of a newer version.
    """
    if is_lines(text):
        return _document_of_lines(text, name, sections)
    document = _loaded(text, name)
    check_version(document.get("schema_version"), name)
    return _unfolded(document, name)


def _unfolded(document: dict[str, Any], name: str) -> dict[str, Any]:
    """The document with the rows that `alike` says in short."""
    alike, found = document.pop(ALIKE, {}), dict[str, UnfoldedRows]()
    if not isinstance(alike, dict) or not alike.keys() <= HOST_FIELDS.keys():
        raise UsageError(f"{name}: {ALIKE} names no sections of nodes", expected=EXPECTED)
    for section, nodes in alike.items():
        for part, where in ((document.get(section), section), (nodes, f"{ALIKE}.{section}")):
            check_text(part, f"{name}: {where}")
        try:
            found[section] = UnfoldedRows(document[section], nodes, HOST_FIELDS[section])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"{name}: {ALIKE}.{section}: {error}", expected=EXPECTED, reason="edited by hand"
            ) from None
    rows = sum(map(len, found.values()))
    if rows > limits.MOST_ALIKE:
        raise UsageError(f"{name} has {rows} rows", expected=f"at most {limits.MOST_ALIKE}")
    return document | found


def _document_of_lines(text: str, name: str, sections: Container[str] | None) -> dict[str, Any]:
    document: dict[str, Any] = {"complete": False}
    lines, found = lines_of(text, name), dict[str, Any]()
    for number, line in enumerate(lines, 1):
        is_cut_off = number == len(lines) and not text.endswith("\n") and not line.rstrip().endswith("}")
        if is_cut_off or not line.strip():
            continue
        record = _loaded(line, f"{name}, line {number}")
        kind = record.pop("kind", None)
        if kind in ("metadata", "report"):
            check_version(record.get("schema_version"), f"{name}, line {number}")
        if kind == "metadata":
            document["metadata"] = record
        elif kind == "report":
            document |= {key: record[key] for key in _OF_REPORT if key in record}
            ordered = record.get("sections", ())
            found = {key: found.get(key, []) for key in (*found.keys() - {*ordered}, *ordered)}
        elif sections is None or kind in sections or kind == "row":
            _add(found, _section(kind, f"{name}, line {number}"), record)
    return document | found


def _section(kind: Any, where: str) -> str:
    if not isinstance(kind, str):
        raise UsageError(f"{where}: its kind is {kind!r}", expected=EXPECTED, reason="the file was edited by hand")
    return ROWS_SECTION if kind == "row" else kind


def _add(found: dict[str, Any], section: str, record: dict[str, Any]) -> None:
    """One more row of a section, or the cells of one row of a matrix."""
    if record.keys() == _CELLS:
        rows = found.setdefault(section, {})
        if isinstance(rows, dict):
            rows[str(record["name"])] = record["cells"]
            return
    found.setdefault(section, []).append(record)


def _loaded(text: str, where: str) -> dict[str, Any]:
    try:
        value = load_json(text)
    except ValueError as error:
        place = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) and error.lineno > 1 else ""
        raise UsageError(
            f"{where}{place}: no JSON ({error})",
            expected=EXPECTED,
            reason="the file was cut off, or edited by hand",
        ) from None
    if not isinstance(value, dict):
        raise UsageError(f"{where}: no JSON object", expected=EXPECTED)
    return value


def check_verdict(verdict: Verdict, sentence: str, findings: Sequence[Finding], name: str) -> None:
    """Refuse a verdict milder than the findings below it, and a last line with another verdict.

    Raises UsageError.
    """
    worst = min((each.severity for each in findings), key=gravity, default=verdict)
    if worst not in (Verdict.PASS, Verdict.SKIP) and gravity(verdict) > gravity(worst):
        ids = ", ".join(dict.fromkeys(each.id for each in findings if each.severity is worst))
        raise UsageError(f"{name}: verdict is {verdict}, and {ids} is {worst}", expected=EXPECTED, reason=EDITED)
    if sentence and not sentence.startswith(f"{verdict}:"):
        raise UsageError(
            f"{name}: verdict is {verdict}, and the sentence is not", expected=f"{verdict}: ...", reason=EDITED
        )
