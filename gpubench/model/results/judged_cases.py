"""Everything that a run judged, one by one, for formats that count: test cases, metrics, annotations."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpubench.model.results.report import FINDINGS_SECTION, Metadata, Report, Row, Table
from gpubench.model.results.rows.evidence import EVIDENCE_SECTION
from gpubench.model.results.rows.explain import PATHS_SECTION
from gpubench.model.terms.copies import HostMemory
from gpubench.model.terms.overlap.asked import cap_name
from gpubench.model.terms.units import format_size
from gpubench.model.terms.verdict import Verdict, exit_code, gravity

RUN = "run"
_CONDENSED_ELSEWHERE = (EVIDENCE_SECTION, PATHS_SECTION)
"""Of these there may be a million; `fallback` and `transports` say the same of all that fare alike."""

_SIZES_AND_NAMES = (
    *("collective", "dtype", "op", "placement", "setting", "group"),
    *("scope", "transport", "conclusion", "direction"),
)
_NOT_JUDGED = "not judged"


@dataclass(frozen=True, slots=True)
class JudgedCase:
    """One thing that was judged: the section it stands in, its name (unique in the section), and what was seen.

    A line may have line ends of its own, which others wrote.
    """

    group: str
    name: str
    verdict: Verdict
    lines: Sequence[str]


def cases(metadata: Metadata, rows: Iterable[Row], report: Report) -> Iterator[JudgedCase]:
    """Every row, every condensed section, every finding, what failed first; last the run itself.

    Each has the verdict that it has everywhere, but where the run does not fail no case does. The run itself fails, or
    could not be measured, where it was cut short or no other case says so.
    """
    found = [*_of_rows(metadata.rows_section, (row.to_record() for row in rows)), *_of_report(report)]
    if report.verdict is not Verdict.FAIL:
        found = [replace(case, verdict=Verdict.WARN) if case.verdict is Verdict.FAIL else case for case in found]
    found.sort(key=lambda case: (min(gravity(case.verdict), gravity(Verdict.PASS)), case.group != FINDINGS_SECTION))
    yield from _with_own_names(found)
    yield _run(metadata, report, found)


def worst_first(found: Iterable[JudgedCase]) -> list[JudgedCase]:
    """The cases that went wrong, the gravest first, in their order otherwise."""
    wrong = (each for each in found if gravity(each.verdict) < gravity(Verdict.PASS))
    return sorted(wrong, key=lambda each: gravity(each.verdict))


def _of_report(report: Report) -> Iterator[JudgedCase]:
    for name, section in report.sections.items():
        if isinstance(section, Table) and "verdict" in section.columns and name not in _CONDENSED_ELSEWHERE:
            yield from _of_rows(name, (row.to_record() for row in section.rows()))
    for finding in report.findings:
        lines = [f"{label}: {words}" for label, words in finding.details if words and label != "explains"]
        lines += [f"explains: {line}" for line in finding.consequences]
        yield JudgedCase(FINDINGS_SECTION, f"{finding.id}: {finding.subject}", finding.severity, lines)


def _of_rows(group: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[JudgedCase]:
    """Copies that nobody judges, such as those with peer access off, are no cases where others are judged."""
    records = list(rows)
    some_judged = any(record.get("verdict") for record in records)
    for record in records:
        if "verdict" not in record:
            continue  # what a watch saw in one interval: its jobs are judged
        is_unjudged_pair = "path_class" in record and record["verdict"] is None
        if is_unjudged_pair and (some_judged or record.get("bandwidth_gb_s") is None):
            continue  # `topo` judges none
        verdict = Verdict.SKIP if record["verdict"] is None else Verdict(record["verdict"])
        seen = _seen(record) or ("" if record["verdict"] else _NOT_JUDGED)
        yield JudgedCase(group, _name(record), verdict, [seen] if seen else [])


def _name(record: Mapping[str, Any]) -> str:
    naming: Sequence[Callable[[], str]] = (
        lambda: _of_what(record),
        lambda: _ends(record),
        lambda: format_size(record["size_bytes"]) if record.get("size_bytes") is not None else "",
        lambda: " ".join(str(record[name]) for name in _SIZES_AND_NAMES if record.get(name) is not None),
        lambda: f"beside {record['partner']}, {cap_name(record['ctas'])}" if record.get("partner") else "",
        lambda: str(record["engine"]) if record.get("engine") else "",
        lambda: f"peer access {record['peer']}" if record.get("peer") else "",
        lambda: str(record["note"]) if HostMemory.of_note(record.get("note")) else "",
        lambda: ", ".join(map(str, record["pairs"][:4])) if isinstance(record.get("pairs"), (list, tuple)) else "",
    )
    return ", ".join(filter(None, (name() for name in naming)))


def _of_what(record: Mapping[str, Any]) -> str:
    """The node once, also where the name of what is on it begins with it."""
    words = [str(record[name]) for name in ("node", "check", "id", "subject", "job", "way") if record.get(name)]
    return " ".join(words[1:] if len(words) > 1 and words[1].split(" ")[0] == words[0] else words)


def _ends(record: Mapping[str, Any]) -> str:
    """Both ends of a copy or a path, with their nodes."""
    if not record.get("source"):
        return ""
    source, destination = (str(record[name]) for name in ("source", "destination"))
    nodes = [record.get(f"{name}_node") for name in ("source", "destination")]
    if None in nodes:
        return f"{source} → {destination}"
    there = destination if nodes[0] == nodes[1] else f"{nodes[1]} {destination}"
    return f"{nodes[0]} {source} → {there}"


def _seen(record: Mapping[str, Any]) -> str:
    figures = (
        *(("busbw_gb_s", "GB/s busbw"), ("bandwidth_gb_s", "GB/s"), ("limit_gb_s", "GB/s limit")),
        ("step_us", "µs a step"),
    )
    words = [f"{record[name]:g} {unit}" for name, unit in figures if record.get(name) is not None]
    if isinstance(record.get("findings"), (list, tuple)):
        words.append(", ".join(map(str, record["findings"])))
    if record.get("wrong"):
        words.append(f"{record['wrong']} wrong elements")
    remarks = (
        str(record[name]) for name in ("how", "seen", "cause_seen", "advice", "note", "meaning") if record.get(name)
    )
    return "; ".join(filter(None, (*words, *remarks)))


def _with_own_names(found: Iterable[JudgedCase]) -> Iterator[JudgedCase]:
    seen: Counter[tuple[str, str]] = Counter()
    for case in found:
        seen[case.group, case.name] += 1
        number = seen[case.group, case.name]
        yield case if number == 1 else replace(case, name=f"{case.name} ({number})")


def _run(metadata: Metadata, report: Report, found: Sequence[JudgedCase]) -> JudgedCase:
    if not report.complete:
        return JudgedCase(RUN, metadata.subject, report.verdict, [report.sentence or "the run was cut short"])
    in_a_case = exit_code(report.verdict) in {0, *(exit_code(case.verdict) for case in found)}
    verdict = Verdict.PASS if in_a_case else report.verdict
    return JudgedCase(RUN, metadata.subject, verdict, [report.sentence or f"verdict: {report.verdict}"])
