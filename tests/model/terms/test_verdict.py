"""Verdicts: the worst of several, exit codes, and what is softened."""

import pytest

from gpubench.model.terms.verdict import WRONG_DATA, Finding, Verdict, exit_code, gravity, overall


def test_the_worst_verdict_is_that_of_the_whole() -> None:
    worst_first = ["FAIL", "ERROR", "INCONCLUSIVE", "WARN", "PASS", "SKIP"]
    assert sorted(Verdict, key=gravity) == worst_first
    for number, verdict in enumerate(worst_first):
        assert overall(map(Verdict, reversed(worst_first[number:]))) == verdict
    assert overall([]) is Verdict.SKIP


def test_exit_codes() -> None:
    assert {verdict.value: exit_code(verdict) for verdict in Verdict if exit_code(verdict)} == {"FAIL": 1, "ERROR": 3}


@pytest.mark.parametrize("verdict", Verdict)
@pytest.mark.parametrize("name", ["slow", WRONG_DATA])
def test_a_benchmark_warns_where_a_gate_would_fail_but_for_wrong_data(verdict: Verdict, name: str) -> None:
    softened = Finding(name, verdict, "", "", "", "", "").softened()
    assert softened.severity == ("WARN" if verdict == "FAIL" and name == "slow" else verdict)
