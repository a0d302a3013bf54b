"""What gpubench's commands wrote, as a check takes it."""

import json
from typing import Any

from gpubench.measure.check.documents import of_collective, of_nodes, together
from gpubench.model.results.measurements import FailedOnNode, Measurements, Need
from gpubench.model.terms.verdict import Verdict
from tests.cli.running import ROOT

STAGED = ROOT / "tests" / "results" / "h200x8" / "allreduce-p2p-disabled.json"
"""Of eight H200s with NCCL_P2P_DISABLE=1, measured on 2026-11-20; the path of NCCL's library is shortened."""


def test_a_fallback_that_a_benchmark_warns_of_fails_a_check() -> None:
    document: dict[str, Any] = json.loads(STAGED.read_text())
    assert document["verdict"] == "WARN"
    measured = of_collective(document)
    (finding,) = measured.findings
    assert (finding.id, finding.severity) == ("host-staged", Verdict.FAIL)
    assert finding.cause == "NCCL_P2P_DISABLE=1 in the environment"
    assert len(finding.subjects) == 8
    assert len(measured.ranks) == 8
    assert {row.host_staged for row in measured.collectives} == {True}
    assert together([measured, measured]).findings == (finding,), "what two measurements found is said once"


def test_a_path_that_is_not_known_is_an_error_and_one_that_nobody_watched_nothing() -> None:
    document: dict[str, Any] = json.loads(STAGED.read_text())
    document["findings"] = []
    document["fallback"][0] |= {"conclusion": "unknown", "verdict": "ERROR", "how": "rank 2 wrote nothing"}
    (finding,) = of_collective(document).findings
    assert (finding.id, finding.severity) == ("path-unknown", Verdict.ERROR)
    document["fallback"] = []
    assert of_collective(document).findings == ()


def test_what_some_nodes_lack_is_missing_there_and_what_all_lack_everywhere() -> None:
    peer, host, memory = Need.PEER_COPIES, Need.HOST_COPIES, Need.HOST_MEMORY
    found = of_nodes(
        {
            "n0": Measurements(failed={peer: "late"}, left_out={memory: "off"}),
            "n1": Measurements(failed={peer: "gone"}, left_out={memory: "off", host: "no GPU"}),
            "n2": Measurements(failed={peer: "late", host: "broken"}, left_out={memory: "off"}),
        }
    )
    assert found.failed == {peer: "late; gone"}
    assert found.left_out == {memory: "off"}
    assert found.failed_on == (FailedOnNode(node="n2", need=host, reason="broken"),)
    assert of_nodes({"n0": Measurements(failed={peer: "late"})}).failed == {peer: "late"}
