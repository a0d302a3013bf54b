"""Documents for machines: JUnit, Prometheus, Markdown, GitHub annotations; every one of them parsed again."""

import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpubench.formats.registry import Format, Presentation, Target
from gpubench.model.results.report import COLLECTIVE_COLUMNS, Report, Row
from gpubench.model.terms.verdict import Verdict
from tests.cli.running import gpubench
from tests.formats.sample import FINDING, GITHUB, JUNIT, METADATA, PROMETHEUS, REPORT, ROW, ROWS

SAMPLE = re.compile(r'(?P<name>[a-z_]+)\{(?P<labels>(?:[a-z_]+="(?:[^"\\\n]|\\[\\n"])*",?)*)\} (?P<value>[-+.e0-9]+)')


def written(format_: Format, report: Report = REPORT, rows: tuple[Row, ...] = ROWS) -> str:
    stream = io.StringIO()
    writer = format_.writer(Target(stream=stream), Presentation())
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


@given(st.text())
def test_labels_of_prometheus_hold_anything(text: str) -> None:
    found = samples(written(PROMETHEUS, rows=(replace(ROW, group=text),)))
    assert any(name == "gpubench_collective_time_seconds" for name, _ in found)


def test_a_textfile_is_replaced_only_by_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "gpubench.prom"
    path.write_text("of the run before\n")
    writer = PROMETHEUS.writer(Target(path=path), Presentation())
    writer.begin(METADATA, COLLECTIVE_COLUMNS)
    writer.row(ROW)
    assert path.read_text() == "of the run before\n"
    writer.end(REPORT)
    assert samples(path.read_text())
    assert list(tmp_path.iterdir()) == [path]


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
