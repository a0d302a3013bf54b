"""gpubench's JSON document and its JSON Lines: rows, pairs, evidence, and the metadata that say how they came about."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from gpubench.errors import UsageError
from gpubench.model.results.alike import UnfoldedRows
from gpubench.model.results.report import FINDINGS_SECTION, PAIRS_SECTION, ROWS_SECTION, CollectiveRow, PairRow
from gpubench.model.results.result_file import ResultFile
from gpubench.model.results.rows.checks import CHECKS_SECTION, VERDICTS_SECTION, CheckRow, VerdictRow
from gpubench.model.results.rows.evidence import EVIDENCE_SECTION, EvidenceRow
from gpubench.model.terms.plain import from_plain
from gpubench.model.terms.verdict import Finding, Verdict
from gpubench.readers.documents.characters import check_text
from gpubench.readers.results.gpubench_document import EXPECTED, check_verdict, document_of, is_lines
from gpubench.readers.results.gpubench_document import recognises as recognises
from gpubench.readers.results.gpubench_rows import circumstances, row_from_json

T = TypeVar("T")

_SECTIONS = (ROWS_SECTION, PAIRS_SECTION, EVIDENCE_SECTION, CHECKS_SECTION, VERDICTS_SECTION)
_JUDGES = ("check", "topo")
"""Commands whose findings are the result; of others the rows tell the same."""


def read(text: str, name: str) -> ResultFile:
    """The rows of a document, or of lines, of which a last one that was cut off is left out.

    Raises UsageError where it is damaged, of a newer version, or holds a value that cannot be.
    """
    kind = "gpubench JSON Lines" if is_lines(text) else "gpubench JSON"
    return _result_file(document_of(text, name, _SECTIONS), kind, name)


def _result_file(document: Mapping[str, Any], kind: str, name: str) -> ResultFile:
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        raise UsageError(f"{name} has no metadata", expected=EXPECTED, reason="the file was edited by hand")
    check_text(metadata, f"{name}: metadata")
    complete = document.get("complete") is True
    findings = list(_records(Finding, document, FINDINGS_SECTION, name))
    if document.get("verdict") is not None:
        verdict = from_plain(Verdict, document["verdict"], f"{name}: verdict")
        check_verdict(verdict, from_plain(str, document.get("sentence", ""), f"{name}: sentence"), findings, name)
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
    records: Any = document.get(section, ())
    if not isinstance(records, (list, tuple, UnfoldedRows)):
        raise UsageError(f"{name}: {section} is no list", expected=EXPECTED)
    for number, record in enumerate(records):
        yield record, f"{name}: {section}[{number}]"
