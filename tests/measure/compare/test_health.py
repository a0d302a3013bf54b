"""Comparison of the findings of two checks."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.measure.compare.report import compare
from gpubench.model.results.compare import FindingChangeRow
from gpubench.model.results.report import Report, VerdictRow
from gpubench.model.results.result_file import FileCircumstances, ResultFile
from gpubench.model.terms.verdict import Cure, Finding, Verdict

ECC = Finding(
    id="ecc-off",
    severity=Verdict.FAIL,
    subject="GPU3 (0000:09:00.0)",
    seen="ECC is off",
    expected="on",
    cause="somebody switched it off",
    cure=Cure.of("nvidia-smi -e 1"),
)
HOT = replace(ECC, id="gpu-hot", severity=Verdict.WARN, seen="85 °C")


def gpu(number: int, bus: int, node: str = "n1") -> VerdictRow:
    name = f"GPU{number} (0000:{bus:02x}:00.0)"
    return VerdictRow(scope="gpu", node=node, subject=name, verdict="PASS", findings=(), origin="measured")


def checked(*findings: Finding, checks: Mapping[str, str] | None = None, **changes: Any) -> ResultFile:
    told = FileCircumstances(tool="", hosts=("n1",), models=("H200",), origin="measured")
    file = ResultFile(name="f", kind="made", circumstances=told, findings=findings, checks=checks or {})
    return replace(file, **changes)


def rows_of(report: Report) -> list[FindingChangeRow]:
    return report.rows(FindingChangeRow)


def ids(report: Report) -> list[tuple[str, str]]:
    return [(finding.id, finding.severity.value) for finding in report.findings]


@pytest.mark.parametrize(
    ("before", "after", "status", "verdict", "said"),
    [
        ((), (ECC,), "new", Verdict.FAIL, [("new-finding", "FAIL")]),
        ((ECC,), (ECC,), "same", Verdict.PASS, []),
        ((ECC,), (), "gone", Verdict.PASS, []),
        ((), (HOT,), "new", Verdict.WARN, [("new-finding", "WARN")]),
        ((HOT,), (replace(HOT, severity=Verdict.FAIL),), "graver", Verdict.FAIL, [("graver-finding", "FAIL")]),
        ((replace(HOT, severity=Verdict.FAIL),), (HOT,), "milder", Verdict.PASS, []),
        ((), (replace(HOT, severity=Verdict.ERROR),), "new", Verdict.ERROR, [("new-finding", "ERROR")]),
        ((), (replace(HOT, severity=Verdict.SKIP),), "new", Verdict.PASS, []),
    ],
)
def test_what_a_finding_makes_of_a_comparison(
    before: tuple[Finding, ...], after: tuple[Finding, ...], status: str, verdict: Verdict, said: list[tuple[str, str]]
) -> None:
    report = compare([checked(*before)], [checked(*after)])
    assert (report.verdict, ids(report)) == (verdict, said)
    assert [(row.status, row.verdict) for row in rows_of(report)] == [(status, verdict)]


def test_gpus_that_are_counted_anew_keep_their_findings_and_the_one_that_is_gone_fails() -> None:
    before = checked(ECC, devices=(gpu(2, 8), gpu(3, 9)))
    after = checked(replace(ECC, subject="GPU2 (0000:09:00.0)"), devices=(gpu(2, 9),))
    report = compare([before], [after])
    assert [row.status for row in rows_of(report)] == ["same"]
    assert ids(report) == [("device-gone", "FAIL")]
    assert report.findings[0].subject == "GPU2 (0000:08:00.0)"
    assert compare([after], [before]).verdict is Verdict.PASS


def test_devices_of_another_host_are_not_gone() -> None:
    one, other = checked(devices=(gpu(2, 8),)), checked(devices=(gpu(2, 8, "n2"),))
    other = replace(other, circumstances=replace(other.circumstances, hosts=("n2",)))
    assert compare([one], [other]).verdict is Verdict.PASS


def test_what_is_not_looked_at_any_more_is_a_doubt() -> None:
    report = compare([checked(checks={"ecc": "PASS"})], [checked(checks={"ecc": "SKIP", "mig": "PASS"})])
    assert ids(report) == [("not-looked-at", "WARN")]
    assert report.findings[0].subject == "ecc"
    assert ids(compare([checked(checks={"ecc": "PASS"})], [checked()])) == [("not-looked-at", "WARN")]


def test_another_model_and_a_simulation_are_refused() -> None:
    other = checked()
    for change in ({"models": ("H100",)}, {"origin": "simulated"}):
        with pytest.raises(UsageError, match="from a different machine"):
            compare([checked()], [replace(other, circumstances=replace(other.circumstances, **change))])


FINDINGS = st.lists(
    st.builds(
        replace,
        st.just(ECC),
        id=st.sampled_from(("a", "b")),
        severity=st.sampled_from(list(Verdict)),
        subject=st.sampled_from(("GPU0", "n1")),
    ),
    max_size=6,
)


@given(FINDINGS)
def test_nothing_is_worse_than_itself(findings: list[Finding]) -> None:
    report = compare([checked(*findings)], [checked(*findings)])
    assert (report.verdict, report.findings) == (Verdict.PASS, [])


@given(FINDINGS, FINDINGS)
def test_what_is_new_one_way_is_gone_the_other(before: list[Finding], after: list[Finding]) -> None:
    def statuses(one: list[Finding], other: list[Finding], status: str) -> set[tuple[str, str]]:
        rows = rows_of(compare([checked(*one)], [checked(*other)]))
        return {(row.finding, row.subject) for row in rows if row.status == status}

    assert statuses(before, after, "new") == statuses(after, before, "gone")
    assert statuses(before, after, "graver") == statuses(after, before, "milder")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("nic-down", "rdma-port-down"),
        ("acs-redirects", "acs-nic-redirect"),
        ("fallback-expected", "nccl-p2p-disabled"),
        ("nvlink-down", "nvlinks-all-down"),
    ],
)
def test_a_condition_that_had_another_id_is_the_same_condition(old: str, new: str) -> None:
    found = compare([checked(replace(HOT, id=old))], [checked(replace(HOT, id=new))])
    assert [(row.finding, row.status, row.verdict) for row in rows_of(found)] == [(new, "same", Verdict.PASS)]
    elsewhere = replace(HOT, id=new, subject="GPU4 (0000:0a:00.0)")
    found = compare([checked(replace(HOT, id=old))], [checked(elsewhere)])
    assert {(row.finding, row.status) for row in rows_of(found)} == {(new, "new"), (old, "gone")}
