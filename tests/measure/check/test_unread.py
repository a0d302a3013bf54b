"""What the driver did not answer passes no check, whichever answer it is."""

import pytest

from gpubench.conditions.definition.circumstances import Facts
from gpubench.hardware.node.nvml.gpu import read_node
from gpubench.measure.check.health import judge
from gpubench.measure.check.unread import NOT_LOOKED_AT
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.nodes import group
from gpubench.model.paths.topology import Topology
from gpubench.model.results.measurements import QUICK
from gpubench.model.results.report import Report
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.verdict import Verdict
from tests.fakes.nvml import FakeGpu, FakeNvml, NVMLError, replies
from tests.fakes.planted import job_of

BUSES = ("06", "07", "08", "09")
UNKNOWN_ERROR, NOT_SUPPORTED = 999, 3

TELL_NO_HEALTH = {
    *("nvmlDeviceGetUUID", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetPersistenceMode"),
    *("nvmlDeviceGetBAR1MemoryInfo", "nvmlDeviceGetCpuAffinity", "nvmlDeviceGetTopologyCommonAncestor"),
    *("nvmlDeviceGetNvLinkVersion", "nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetNvLinkRemotePciInfo"),
}
"""Names and places, which explain a path and judge nothing."""

ASKED_IN_TURN = {"nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkErrorCounter"}
"""Of which another call, nvmlDeviceGetFieldValues, tells the same."""


def checked(*gpus: FakeGpu) -> Report:
    facts = read_node(FakeNvml(*gpus), cpus=64)
    node = Snapshot(host="n0", origin=Origin.MEASURED, source="", gpus=facts.gpus, pairs=facts.pairs)
    nodes = [Topology(node)]
    return judge(Facts(nodes, group(nodes), job_of(node).ranks, [None], QUICK, False))


def test_a_driver_that_answers_all_passes() -> None:
    assert checked(*map(FakeGpu, BUSES)).verdict is Verdict.PASS


@pytest.mark.parametrize("function", sorted(replies("06").keys() - TELL_NO_HEALTH - ASKED_IN_TURN))
def test_each_answer_that_one_gpu_refuses_is_an_error(function: str) -> None:
    refusing = {function: NVMLError(UNKNOWN_ERROR)}
    report = checked(*(FakeGpu(bus, replies=refusing if bus == "07" else {}) for bus in BUSES))
    assert report.verdict is Verdict.ERROR
    found = [each for each in report.findings if each.id == NOT_LOOKED_AT]
    assert found
    assert all("Unknown Error" in each.seen or "999" in each.seen for each in found)
    assert "GPU1" in found[0].subject


def test_what_a_kind_of_gpu_does_not_have_is_not_missed() -> None:
    """But where a sibling answers, one that does not is odd."""
    without = {name: NVMLError(NOT_SUPPORTED) for name in ("nvmlDeviceGetEccMode", "nvmlDeviceGetMigMode")}
    assert checked(*(FakeGpu(bus, replies=dict(without)) for bus in BUSES)).verdict is Verdict.PASS
    odd = checked(*(FakeGpu(bus, replies=dict(without) if bus == "07" else {}) for bus in BUSES))
    assert {each.subject for each in odd.findings if each.id == NOT_LOOKED_AT} == {"GPU1 (0000:07:00.0)"}


def test_links_of_which_neither_call_tells() -> None:
    silent = {name: NVMLError(UNKNOWN_ERROR) for name in (*ASKED_IN_TURN, "nvmlDeviceGetFieldValues")}
    report = checked(*(FakeGpu(bus, replies=silent if bus == "07" else {}) for bus in BUSES))
    assert NOT_LOOKED_AT in {each.id for each in report.findings}
    assert report.verdict is Verdict.ERROR
