"""Verdicts: the worst of several, and exit codes."""

from gpubench.model.terms.verdict import Verdict, exit_code, gravity, worst_verdict


def test_the_worst_verdict_is_that_of_the_whole() -> None:
    worst_first = ["FAIL", "ERROR", "INCONCLUSIVE", "WARN", "PASS", "SKIP"]
    assert sorted(Verdict, key=gravity) == worst_first
    for number, verdict in enumerate(worst_first):
        assert worst_verdict(map(Verdict, reversed(worst_first[number:]))) == verdict
    assert worst_verdict([]) is Verdict.SKIP


def test_exit_codes() -> None:
    assert {verdict.value: exit_code(verdict) for verdict in Verdict if exit_code(verdict)} == {"FAIL": 1, "ERROR": 3}
