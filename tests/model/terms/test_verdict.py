"""Verdicts: the worst of several, and exit codes."""

import pytest

from gpubench.model.terms.verdict import Verdict, describe_doubt, exit_code, gravity, parse_doubt, worst_verdict


def test_the_worst_verdict_is_that_of_the_whole() -> None:
    worst_first = ["FAIL", "ERROR", "INCONCLUSIVE", "WARN", "PASS", "SKIP"]
    assert sorted(Verdict, key=gravity) == worst_first
    for number, verdict in enumerate(worst_first):
        assert worst_verdict(map(Verdict, reversed(worst_first[number:]))) == verdict
    assert worst_verdict([]) is Verdict.SKIP


def test_exit_codes() -> None:
    assert {verdict.value: exit_code(verdict) for verdict in Verdict if exit_code(verdict)} == {"FAIL": 1, "ERROR": 3}


@pytest.mark.parametrize(
    "source",
    ["profile hgx-b200-8", "profile hgx-a100-4-40gb, tree assumed; NICs assumed (set others with --nics)", "past runs"],
)
def test_a_doubt_is_found_again_in_a_note(source: str) -> None:
    doubt = describe_doubt(2.6, source)
    assert parse_doubt(f"NCCL chose Ring; {doubt}; one more remark") == doubt


def test_a_doubt_in_results_of_earlier_versions_is_found() -> None:
    doubt = "2.6 times what profile hgx-b200-8 expects of assumed NICs (--nics tells others)"
    assert parse_doubt(f"speed not judged: {doubt}") == doubt
    assert parse_doubt("measured once") == parse_doubt(None) == ""
