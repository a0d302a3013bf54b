"""What gpubench's commands wrote, as a check takes it."""

import json
from typing import Any

from gpubench.measure.check.documents import of_collective, together
from gpubench.model.terms.verdict import Verdict
from tests.cli.running import ROOT

STAGED = ROOT / "tests" / "results" / "h200x8" / "allreduce-p2p-disabled.json"
"""Of eight H200s with NCCL_P2P_DISABLE=1, measured on 2026-11-20; the path of NCCL's library is shortened."""


def test_what_a_benchmark_found_of_paths_is_found_by_a_check() -> None:
    document: dict[str, Any] = json.loads(STAGED.read_text())
    document["findings"][0]["severity"] = "FAIL"  # as every command says since then
    measured = of_collective(document)
    (finding,) = measured.findings
    assert (finding.id, finding.severity) == ("host-staged", Verdict.FAIL)
    assert finding.cause == "NCCL_P2P_DISABLE=1 in the environment"
    assert len(finding.subjects) == 8
    assert len(measured.ranks) == 8
    assert {row.host_staged for row in measured.collectives} == {True}
    assert together([measured, measured]).findings == (finding,), "what two measurements found is said once"
