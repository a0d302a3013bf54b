"""The verdict on fallback: paths that fare alike in one line, gravest first, with how slow and why."""

from collections.abc import Sequence

from msgspec.structs import replace

from gpubench.model.paths.transport import Evidence, PathEvidence, State, parse_transport
from gpubench.model.results.fallback import (
    PATH_UNKNOWN,
    End,
    Explanation,
    KnownPath,
    evidence_rows,
    fallback_rows,
    make_findings,
)
from gpubench.model.terms.verdict import Cure, Verdict, worst_verdict

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


def test_what_is_staged_by_design_fails_nobody() -> None:
    paths = [path(0, 1, replace(STAGED, by_design="GPU not supported"), 20.0), path(1, 0, STAGED, 20.0)]
    fault, design = fallback_rows(paths, "measured", cause_of)
    assert (fault.verdict, design.verdict) == ("FAIL", "SKIP")
    assert [finding.severity for finding in make_findings([design])] == [Verdict.SKIP]
    assert worst_verdict([Verdict.PASS, Verdict.SKIP]) is Verdict.PASS


def test_unknown_paths_are_doubts() -> None:
    rows = fallback_rows([path(0, 1, UNKNOWN)], "measured", cause_of)
    assert [(finding.id, finding.severity) for finding in make_findings(rows)] == [(PATH_UNKNOWN, Verdict.WARN)]
    silent = fallback_rows([], "measured", cause_of, "rank 0: NCCL_DEBUG_SUBSYS=COLL leaves INIT out")
    assert [(row.conclusion, row.pairs) for row in silent] == [("unknown", ())]
    assert "leaves INIT out" in silent[0].how
    assert [finding.subject for finding in make_findings(silent)] == ["all paths"]
    assert fallback_rows([], "measured", cause_of) == []


def test_of_very_many_paths_those_are_listed_that_matter() -> None:
    paths = [path(0, 1, DIRECT)] * 10_000 + [path(1, 0, STAGED, 28.9)]
    staged, direct = fallback_rows(paths, "measured", cause_of)
    assert (direct.count, len(direct.pairs), staged.count) == (10_000, 1000, 1)
    assert [row.conclusion for row in evidence_rows(paths, "measured")] == ["staged"]
    assert len(evidence_rows(paths[1:], "measured")) == 10_000


def test_only_what_is_not_known_is_for_want_of_observations() -> None:
    paths = [path(0, 1, DIRECT), path(1, 0, UNKNOWN)]
    how = {row.conclusion: row.how for row in fallback_rows(paths, "measured", cause_of, "the log was not read")}
    assert "the log was not read" in how["unknown"]
    assert "the log was not read" not in how["direct"]
