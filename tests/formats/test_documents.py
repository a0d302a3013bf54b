"""Documents for machines: JUnit, Prometheus, Markdown, GitHub annotations; every one of them parsed again."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.formats.registry import Format, Style, Target
from gpubench.model.results.report import COLLECTIVE_COLUMNS, CheckRow, Report, Row
from gpubench.model.results.sentence import JudgedCase, cases, worst_first
from gpubench.model.terms.verdict import Verdict
from tests.cli.running import gpubench
from tests.formats.sample import FINDING, GITHUB, JUNIT, MARKDOWN, METADATA, PROMETHEUS, REPORT, ROW, ROWS

SAMPLE = re.compile(r'(?P<name>[a-z_]+)\{(?P<labels>(?:[a-z_]+="(?:[^"\\\n]|\\[\\n"])*",?)*)\} (?P<value>[-+.e0-9]+)')


def written(format_: Format, report: Report = REPORT, rows: tuple[Row, ...] = ROWS) -> str:
    stream = io.StringIO()
    writer = format_.writer(Target(stream=stream), Style())
    writer.begin(METADATA, COLLECTIVE_COLUMNS)
    for row in rows:
        writer.row(row)
    writer.end(report)
    return stream.getvalue()


def samples(text: str) -> dict[tuple[str, str], float]:
    """What a scraper would read; fails on a line that it would refuse."""
    found: dict[tuple[str, str], float] = {}
    declared: set[str] = set()
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            assert kind == "gauge"
            assert name not in declared, "a metric's samples stand together"
            declared.add(name)
        elif not line.startswith("# HELP "):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert match["name"] in declared
            key = match["name"], match["labels"]
            assert key not in found
            found[key] = float(match["value"])
    return found


def test_junit_counts_what_it_holds() -> None:
    suite = ElementTree.fromstring(written(JUNIT))[0]
    found = suite.findall("testcase")
    assert int(suite.attrib["tests"]) == len(found) == len(ROWS) + 2
    assert int(suite.attrib["failures"]) == len(suite.findall("testcase/failure")) == 1, "one finding, one failure"
    folded = [case.find("skipped") for case in found if case.attrib["classname"] == "gpubench.allreduce.rows"]
    texts = [each.attrib["message"] for each in folded if each is not None]
    assert texts.count("FAIL, counted with its finding") == sum(row.verdict == "FAIL" for row in ROWS) > 0
    failure = next(case for case in found if case.attrib["classname"] == "gpubench.allreduce.findings").find("failure")
    assert failure is not None
    assert failure.attrib["message"] == "seen: 3 wrong elements in 1 rows"


@pytest.mark.parametrize(
    ("verdict", "element"),
    [
        (Verdict.FAIL, "failure"),
        (Verdict.ERROR, "error"),
        (Verdict.SKIP, "skipped"),
        (Verdict.INCONCLUSIVE, "skipped"),
        (Verdict.WARN, "system-out"),
        (Verdict.PASS, None),
    ],
)
def test_junit_keeps_could_not_measure_apart_from_failed(verdict: Verdict, element: str | None) -> None:
    finding = replace(FINDING, severity=verdict, subjects=("GPU0", "GPU1"))
    suite = ElementTree.fromstring(written(JUNIT, Report(verdict=verdict, complete=True, findings=(finding,)), ()))[0]
    found = [case for case in suite.findall("testcase") if case.attrib["classname"].endswith("findings")]
    assert [case.attrib["name"] for case in found] == ["wrong-data: rank 1 on n1 (GPU 1, 0000:01:00.0)"]
    assert [[child.tag for child in case] for case in found] == [[element] if element else []]


def test_what_is_cut_short_is_an_error_in_junit() -> None:
    suite = ElementTree.fromstring(written(JUNIT, Report(verdict=Verdict.ERROR, complete=False), ()))[0]
    assert suite.attrib["errors"] == "1"
    assert "cut short" in ElementTree.tostring(suite, encoding="unicode")


@given(st.text())
def test_junit_is_xml_whatever_was_seen(text: str) -> None:
    finding = replace(FINDING, subject=text, seen=text, cause=text)
    ElementTree.fromstring(written(JUNIT, replace(REPORT, findings=(finding,))).encode("utf-8", "surrogatepass"))


def test_a_row_that_only_strict_would_judge_fails_no_case() -> None:
    """Whoever counts cases comes to the same end as who reads the exit code."""
    softened = Report(verdict=Verdict.WARN, complete=True)
    found = list(cases(METADATA, [replace(ROW, verdict="FAIL")], softened))
    assert [case.verdict for case in found] == [Verdict.WARN, Verdict.PASS]
    unexplained = list(cases(METADATA, [], Report(verdict=Verdict.FAIL, complete=True)))
    assert [case.verdict for case in unexplained] == [Verdict.FAIL]


def both_of(folder: Path, *command: str) -> tuple[Any, ElementTree.Element]:
    """The document of a run, and its suite of cases."""
    gpubench(*command, "--output", str(folder / "run.json"), "--output", str(folder / "run.xml"))
    return json.loads((folder / "run.json").read_text()), ElementTree.parse(folder / "run.xml").getroot()[0]


def test_a_verdict_is_the_same_as_a_case_and_what_failed_comes_first(tmp_path: Path) -> None:
    """One fault is one failure; a check that fails with it neither passes nor is counted again."""
    run, suite = both_of(tmp_path, "check", "--simulate", "hgx-h100-8*2", "--fault", "node1.gpu5:nvlink=12")
    found = suite.findall("testcase")
    judged = {section: [row["verdict"] for row in run[section]] for section in ("checks", "verdicts", "rows")}
    for section, verdicts in judged.items():
        own = [case for case in found if case.attrib["classname"].endswith(f".{section}")]
        skipped = [element.attrib["message"] for case in own if (element := case.find("skipped")) is not None]
        assert sum(text == "FAIL, counted with its finding" for text in skipped) == verdicts.count("FAIL"), section
        assert len(own) == len(verdicts)
    failed = [case.find("failure") is not None for case in found]
    assert failed == sorted(failed, reverse=True)
    assert failed.count(True) == sum(each["severity"] == "FAIL" for each in run["findings"]) == 1
    assert found[0].attrib["classname"] == "gpubench.check.findings"


def test_cases_of_copies_name_their_nodes_and_none_is_of_a_copy_that_nobody_judges(tmp_path: Path) -> None:
    run, suite = both_of(tmp_path, "check", "--simulate", "hgx-h100-8*2")
    pairs = run["pairs"]
    own = [each for each in suite.findall("testcase") if each.attrib["classname"].endswith(".pairs")]
    assert len(own) == sum(row["verdict"] is not None for row in pairs)
    assert {each.attrib["name"].split(" ")[0] for each in own} == {"node0", "node1"}
    assert not [each for each in own if each.attrib["name"].endswith(")")], "numbers behind names that are alike"


def test_what_was_not_judged_says_so() -> None:
    rows = [replace(ROW, verdict=verdict, size_bytes=0) for verdict in (None, "PASS")]
    unjudged, passed, _ = cases(METADATA, rows, Report(verdict=Verdict.PASS, complete=True))
    assert unjudged.verdict is Verdict.SKIP
    assert unjudged.name.startswith("0, allreduce")
    assert "not judged" not in " ".join(passed.lines)
    check = CheckRow(check="ecc", verdict="PASS", findings=0, looks_for="", note=None, origin="measured")
    (case, _) = cases(METADATA, [check], Report(verdict=Verdict.PASS, complete=True))
    assert case.lines == []


def test_the_gravest_cases_come_first_and_what_is_well_is_left_out() -> None:
    found = [JudgedCase("g", verdict, verdict, ()) for verdict in reversed(Verdict)]
    assert [case.verdict for case in worst_first(found)] == ["FAIL", "ERROR", "INCONCLUSIVE", "WARN"]


def test_cases_have_names_of_their_own() -> None:
    found = list(cases(METADATA, [ROW, ROW], REPORT))
    assert len({(case.group, case.name) for case in found}) == len(found)


def test_prometheus_has_base_units_and_no_timestamps() -> None:
    found = samples(written(PROMETHEUS))
    by_name = {name: value for (name, labels), value in found.items() if 'size_bytes="1073741824"' in labels}
    assert by_name["gpubench_collective_busbw_bytes_per_second"] == pytest.approx(353.46e9)
    assert by_name["gpubench_collective_time_seconds"] == pytest.approx(4547.85e-6)
    common = 'command="allreduce",origin="measured"'
    assert found["gpubench_last_run_timestamp_seconds", common] == 1795161600.0
    assert found["gpubench_last_run_exit_code", common] == 1
    assert found["gpubench_last_run_verdict", f'{common},verdict="FAIL"'] == 1
    assert found["gpubench_findings", f'{common},id="wrong-data",severity="FAIL"'] == 1
    assert not any(name == "gpubench_collective_limit_bytes_per_second" for name, _ in found)


def test_prometheus_has_what_is_expected() -> None:
    expected = replace(ROW, expected_gb_s=0.3, expected_us=4.9, expected_percent=50.0)
    values = {name: value for (name, _), value in samples(written(PROMETHEUS, rows=(expected,))).items()}
    assert values["gpubench_collective_expected_bytes_per_second"] == pytest.approx(3e8)
    assert values["gpubench_collective_expected_seconds"] == pytest.approx(4.9e-6)
    assert values["gpubench_collective_expected_ratio"] == pytest.approx(0.5)


def test_pages_say_how_much_of_what_is_expected_was_reached() -> None:
    expected = replace(ROW, expected_gb_s=0.3, expected_percent=50.0, expected_source="profile hgx-h200-4")
    text = written(MARKDOWN, rows=(expected,))
    assert "Every row; expected: profile hgx-h200-4" in text
    head, line = (next(line for line in text.splitlines() if start in line) for start in ("% exp |", "| 1K |"))
    cells = dict(zip(*(map(str.strip, each.split("|")) for each in (head, line)), strict=True))
    assert (cells["% exp"], cells["expected GB/s"]) == ("50", "0.30")
    assert "count" not in cells


@given(st.text())
def test_labels_of_prometheus_hold_anything(text: str) -> None:
    found = samples(written(PROMETHEUS, rows=(replace(ROW, group=text),)))
    assert any(name == "gpubench_collective_time_seconds" for name, _ in found)


def test_a_textfile_is_replaced_only_by_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "gpubench.prom"
    path.write_text("of the run before\n")
    writer = PROMETHEUS.writer(Target(path=path), Style())
    writer.begin(METADATA, COLLECTIVE_COLUMNS)
    writer.row(ROW)
    assert path.read_text() == "of the run before\n"
    writer.end(REPORT)
    assert samples(path.read_text())
    assert list(tmp_path.iterdir()) == [path]


def test_a_document_of_a_run_that_was_killed_says_so(tmp_path: Path) -> None:
    for format_ in (JUNIT, MARKDOWN):
        path = tmp_path / f"result{format_.suffix}"
        path.write_text("PASS")
        format_.writer(Target(path=path), Style()).begin(METADATA, COLLECTIVE_COLUMNS)
        assert "ERROR" in path.read_text()


def test_markdown_tables_are_tables() -> None:
    finding = replace(FINDING, seen="a | b\n<script>")
    text = written(MARKDOWN, replace(REPORT, findings=(finding,)))
    assert text.startswith("# gpubench allreduce: ❌ FAIL\n")
    assert "a \\| b\\\\n&lt;script&gt;" in text
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_github_shows_the_worst_ten_and_counts_the_rest() -> None:
    warnings = tuple(replace(FINDING, id=f"warn-{number}", severity=Verdict.WARN) for number in range(12))
    report = replace(REPORT, findings=(*warnings, replace(FINDING, seen="100% wrong,\nreally")))
    lines = written(GITHUB, report).splitlines()
    assert len(lines) == 11
    assert lines[0].startswith(
        "::error title=gpubench allreduce%3A wrong-data%3A rank 1 on n1 (GPU 1%2C 0000%3A01%3A00.0)::"
    )
    assert "100%25 wrong,\\nreally" in lines[0]
    assert all(line.startswith("::warning title=") for line in lines[1:10])
    assert lines[10].startswith("::notice title=gpubench allreduce::FAIL%0A3 WARN more than")
