"""The verdict on fallback: paths that fare alike in one line, gravest first, with how slow and why."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gpubench.model.paths.transport import Evidence, PathEvidence, State, parse_transport
from gpubench.model.results.fallback import (
    PATH_DISPUTED,
    PATH_UNKNOWN,
    End,
    Explanation,
    KnownPath,
    evidence_rows,
    fallback_rows,
    findings,
    shown,
)
from gpubench.model.terms.verdict import HOST_STAGED, Cure, Verdict, overall

P2P, SHM = parse_transport("P2P/CUMEM"), parse_transport("SHM/direct/direct")
CAUSE = Explanation("environment", "NCCL_P2P_DISABLE=1 in the environment", Cure.of("unset NCCL_P2P_DISABLE"))
YES, NO = State.PRESENT, State.CONTRADICTING

DIRECT = PathEvidence(
    capability=Evidence(YES, "NV18"),
    selection=Evidence(YES, "P2P/CUMEM"),
    measurement=Evidence(YES, "counters moved"),
    correctness=Evidence(YES, "data right"),
)
STAGED = replace(DIRECT, selection=Evidence(NO, "SHM/direct"), measurement=Evidence(NO, "PCIe moved"))
DISPUTED = replace(DIRECT, measurement=Evidence(NO, "counters stood still"))
UNKNOWN = PathEvidence(capability=Evidence(YES, "NV18"), selection=Evidence(seen="WARP/9 is no transport known here"))


def end(rank: int) -> End:
    return End(f"rank {rank}", str(rank), "n0", f"0000:0{rank}:00.0")


def path(source: int, destination: int, evidence: PathEvidence, gb_s: float | None = 340.0) -> KnownPath:
    return KnownPath(
        source=end(source),
        destination=end(destination),
        evidence=evidence,
        transports=(SHM,) if evidence.selection.state is NO else (P2P,),
        path_class="NV18",
        bandwidth_gb_s=gb_s,
        limit_gb_s=450.0,
    )


def cause_of(paths: Sequence[KnownPath]) -> Explanation:
    assert paths
    return CAUSE


def test_direct_paths_are_one_line() -> None:
    rows = fallback_rows([path(0, 1, DIRECT), path(1, 0, DIRECT)], "measured", cause_of)
    (row,) = rows
    assert (row.conclusion, row.verdict, row.confidence) == ("direct", "PASS", "proven")
    assert row.pairs == ("0 → 1", "1 → 0")
    assert (row.transport, row.cause, row.advice) == ("P2P/CUMEM", None, None)
    assert "the figures agree" in row.how
    assert "counters moved" in row.how
    assert findings(rows) == ()


def test_staged_paths_come_first_with_how_slow_and_why() -> None:
    paths = [path(0, 1, DIRECT), path(1, 0, STAGED, 28.9), path(2, 0, STAGED, 30.0)]
    staged, direct = fallback_rows(paths, "measured", cause_of)
    assert direct.pairs == ("0 → 1",)
    assert staged.pairs == ("1 → 0", "2 → 0")
    assert (staged.bandwidth_gb_s, staged.limit_gb_s) == (28.9, 450.0)
    assert staged.times_slower == pytest.approx(15.57, abs=0.01)
    assert (staged.cause, staged.cause_seen, staged.advice) == (CAUSE.id, CAUSE.evidence, CAUSE.cure.text)
    (finding,) = findings([staged, direct])
    assert (finding.id, finding.severity, finding.subjects) == (HOST_STAGED, Verdict.FAIL, staged.pairs)
    assert "28.9 of 450 GB/s, 15.6 times slower" in finding.seen
    assert finding.cause == CAUSE.evidence


def test_what_is_staged_by_design_fails_nobody() -> None:
    paths = [path(0, 1, replace(STAGED, by_design="GPU not supported"), 20.0), path(1, 0, STAGED, 20.0)]
    fault, design = fallback_rows(paths, "measured", cause_of)
    assert (fault.verdict, design.verdict) == ("FAIL", "SKIP")
    assert [each.severity for each in findings([design])] == [Verdict.SKIP]
    assert overall([Verdict.PASS, Verdict.SKIP]) is Verdict.PASS


def test_disputed_paths_are_warnings() -> None:
    rows = fallback_rows([path(0, 1, DISPUTED)], "measured", cause_of)
    assert [(each.id, each.severity) for each in findings(rows)] == [(PATH_DISPUTED, Verdict.WARN)]
    assert "counters stood still" in rows[0].how


def test_unknown_paths_are_doubts() -> None:
    rows = fallback_rows([path(0, 1, UNKNOWN)], "measured", cause_of)
    assert [(each.id, each.severity) for each in findings(rows)] == [(PATH_UNKNOWN, Verdict.WARN)]
    silent = fallback_rows([], "measured", cause_of, "rank 0: NCCL_DEBUG_SUBSYS=COLL leaves INIT out")
    assert [(row.conclusion, row.pairs) for row in silent] == [("unknown", ())]
    assert "leaves INIT out" in silent[0].how
    assert [each.subject for each in findings(silent)] == ["all paths"]
    assert fallback_rows([], "measured", cause_of) == []


def test_a_path_without_a_limit_is_as_slow_as_it_is() -> None:
    slow = replace(path(0, 1, STAGED, 4.5), limit_gb_s=None)
    (row,) = fallback_rows([slow], "measured", cause_of)
    assert row.times_slower is None
    assert findings([row])[0].seen.endswith(": 4.5 GB/s")
    (unmeasured,) = fallback_rows([replace(slow, bandwidth_gb_s=None)], "measured", cause_of)
    assert findings([unmeasured])[0].seen == "SHM/direct through host memory"


def test_of_very_many_paths_those_are_listed_that_matter() -> None:
    paths = [path(0, 1, DIRECT)] * 10_000 + [path(1, 0, STAGED, 28.9)]
    staged, direct = fallback_rows(paths, "measured", cause_of)
    assert (direct.count, len(direct.pairs), staged.count) == (10_000, 1000, 1)
    assert [row.conclusion for row in evidence_rows(paths, "measured")] == ["staged"]
    assert len(evidence_rows(paths[1:], "measured")) == 10_000


def test_of_many_pairs_four_are_named() -> None:
    paths = [path(0, other, STAGED, 28.9) for other in range(1, 7)]
    (row,) = fallback_rows(paths, "measured", cause_of)
    assert shown(row) == "ranks 0 → 1, 0 → 2, 0 → 3, 0 → 4 and 2 more"


def test_only_what_is_not_known_is_for_want_of_observations() -> None:
    paths = [path(0, 1, DIRECT), path(1, 0, UNKNOWN)]
    how = {row.conclusion: row.how for row in fallback_rows(paths, "measured", cause_of, "the log was not read")}
    assert "the log was not read" in how["unknown"]
    assert "the log was not read" not in how["direct"]


def test_a_row_of_evidence_has_all_of_it() -> None:
    row = evidence_rows([path(0, 1, replace(STAGED, by_design="a policy"), 28.9)], "measured")[0]
    assert (row.source, row.destination, row.source_bus_id) == ("rank 0", "rank 1", "0000:00:00.0")
    assert (row.capability, row.selection, row.measurement) == ("present", "contradicting", "contradicting")
    assert (row.selection_seen, row.by_design, row.host_staged) == ("SHM/direct", "a policy", True)
    assert (row.conclusion, row.verdict, row.transport) == ("staged", "SKIP", "SHM/direct")
    assert evidence_rows([path(0, 1, DIRECT)], "measured")[0].host_staged is False
    assert evidence_rows([path(0, 1, UNKNOWN)], "measured")[0].host_staged is None
