"""Measurements that a check reads from the reports of other commands."""

import json
from typing import Any

from gpubench.measure.check.health import collective_measurements, merge, merge_nodes
from gpubench.model.results.figures import FailedOnNode, Measurements, Need
from gpubench.model.results.speed import TOO_NOISY
from gpubench.model.terms.verdict import Verdict
from tests.cli.running import ROOT

STAGED = ROOT / "tests" / "results" / "h200x8" / "allreduce-p2p-disabled.json"
"""Measured on eight H200s with NCCL_P2P_DISABLE=1 on 2026-11-20. The path of the NCCL library is shortened."""


def test_path_findings_of_a_collective_are_in_a_check() -> None:
    document: dict[str, Any] = json.loads(STAGED.read_text())
    document["findings"][0]["severity"] = "FAIL"
    measured = collective_measurements(document)
    (finding,) = measured.findings
    assert (finding.id, finding.severity) == ("host-staged", Verdict.FAIL)
    assert finding.cause == "NCCL_P2P_DISABLE=1 in the environment"
    assert len(finding.subjects) == 8
    assert len(measured.ranks) == 8
    assert {row.host_staged for row in measured.collectives} == {True}
    assert merge([measured, measured]).findings == (finding,), "what two measurements found is said once"


def test_a_check_judges_noise_itself() -> None:
    document: dict[str, Any] = json.loads(STAGED.read_text())
    noise = {**document["findings"][0], "id": TOO_NOISY, "severity": "INCONCLUSIVE"}
    assert collective_measurements({**document, "findings": [noise]}).findings == ()


def test_a_failure_on_all_nodes_is_one_failure() -> None:
    peer, host, memory = Need.PEER_COPIES, Need.HOST_COPIES, Need.HOST_MEMORY
    found = merge_nodes(
        {
            "n0": Measurements(failed={peer: "late"}, left_out={memory: "off"}),
            "n1": Measurements(failed={peer: "gone"}, left_out={memory: "off", host: "no GPU"}),
            "n2": Measurements(failed={peer: "late", host: "broken"}, left_out={memory: "off"}),
        }
    )
    assert found.failed == {peer: "late; gone"}
    assert found.left_out == {memory: "off"}
    assert found.failed_on == (FailedOnNode(node="n2", need=host, reason="broken"),)
    assert merge_nodes({"n0": Measurements(failed={peer: "late"})}).failed == {peer: "late"}
