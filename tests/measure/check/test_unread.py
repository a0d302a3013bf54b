"""A check does not pass if the driver did not return its facts."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.conditions.checks import CHECKS
from gpubench.conditions.circumstances import Facts
from gpubench.machine.gpus import read_node
from gpubench.measure.check.health import judge
from gpubench.measure.check.unread import FACT_NAMES, NOT_LOOKED_AT
from gpubench.model.facts.health import HIDDEN
from gpubench.model.facts.snapshot import (
    AccessControl,
    Fabric,
    GpuFacts,
    HostFacts,
    IommuFacts,
    KernelSettings,
    NicFacts,
    NicKind,
    PciDevice,
    PciKind,
    ProbeFailure,
    Snapshot,
)
from gpubench.model.paths.nodes import group_nodes
from gpubench.model.paths.topology import Topology
from gpubench.model.results.figures import QUICK
from gpubench.model.results.report import CheckRow, Report
from gpubench.model.terms.verdict import Origin, Verdict
from tests.fakes.nvml import FakeGpu, FakeNvml, NVMLError, replies
from tests.fakes.planted import job_of, simulated

TOP = "0000:01:00.0"
BUSES = ("06", "07", "08", "09")
UNKNOWN_ERROR, NOT_SUPPORTED = 999, 3

TELL_NO_HEALTH = {
    *("nvmlDeviceGetUUID", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetPersistenceMode"),
    *("nvmlDeviceGetBAR1MemoryInfo", "nvmlDeviceGetCpuAffinity", "nvmlDeviceGetTopologyCommonAncestor"),
    *("nvmlDeviceGetNvLinkVersion", "nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetNvLinkRemotePciInfo"),
}
"""Names and places, which no check judges."""

ASKED_IN_TURN = {"nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkErrorCounter"}
"""nvmlDeviceGetFieldValues returns the same facts."""


def read(*gpus: FakeGpu, **more: Any) -> Snapshot:
    facts = read_node(FakeNvml(*(gpus or map(FakeGpu, BUSES))), cpus=64)
    return Snapshot(host="n0", origin=Origin.MEASURED, source="", gpus=facts.gpus, pairs=facts.pairs, **more)


def check(*snapshots: Snapshot) -> Report:
    nodes = list(map(Topology, snapshots))
    return judge(Facts(nodes, group_nodes(nodes), job_of(*snapshots).ranks, [None] * len(nodes), QUICK, False))


def checked(*gpus: FakeGpu) -> Report:
    return check(read(*gpus))


@pytest.mark.parametrize("function", sorted(replies("06").keys() - TELL_NO_HEALTH - ASKED_IN_TURN))
def test_each_answer_that_one_gpu_refuses_is_an_error(function: str) -> None:
    refusing = {function: NVMLError(UNKNOWN_ERROR)}
    report = checked(*(FakeGpu(bus, replies=refusing if bus == "07" else {}) for bus in BUSES))
    assert report.verdict is Verdict.ERROR
    found = [finding for finding in report.findings if finding.id == NOT_LOOKED_AT]
    assert found
    assert all("Unknown Error" in each.seen or "999" in each.seen for each in found)
    assert "GPU1" in found[0].subject


def test_facts_that_a_gpu_model_lacks_are_not_missing() -> None:
    without = {name: NVMLError(NOT_SUPPORTED) for name in ("nvmlDeviceGetEccMode", "nvmlDeviceGetMigMode")}
    assert checked(*(FakeGpu(bus, replies=dict(without)) for bus in BUSES)).verdict is Verdict.PASS
    odd = checked(*(FakeGpu(bus, replies=dict(without) if bus == "07" else {}) for bus in BUSES))
    assert {finding.subject for finding in odd.findings if finding.id == NOT_LOOKED_AT} == {"GPU1 (0000:07:00.0)"}


def test_links_that_no_call_returns_are_an_error() -> None:
    silent = {name: NVMLError(UNKNOWN_ERROR) for name in (*ASKED_IN_TURN, "nvmlDeviceGetFieldValues")}
    report = checked(*(FakeGpu(bus, replies=silent if bus == "07" else {}) for bus in BUSES))
    assert NOT_LOOKED_AT in {finding.id for finding in report.findings}
    assert report.verdict is Verdict.ERROR


READ_OF_A_GPU: dict[str, dict[str, Any]] = {
    "nvlink_active": {"nvlinks": None},
    "fabric": {"fabric": None},
    "memory_rows": {"remapped_rows": None},
    "throttle": {"throttle_reasons": None},
    "mig": {"mig": None},
    "ecc": {"memory_errors": None},
    "clocks": {"most_clock_mhz": None},
    "temperature": {"temperature_c": None},
    "gpu_free": {"processes": None},
    "pcie_errors": {"pcie_replays": None},
}
"""A changed fact of a GPU per check, as in a recording without the fact."""


def check_row(node: Snapshot, name: str) -> CheckRow:
    return next(row for row in check(node).rows(CheckRow) if row.check == name)


@pytest.mark.parametrize("name", READ_OF_A_GPU)
def test_a_fact_missing_from_a_recording_passes_no_check(name: str) -> None:
    node = read()
    assert check_row(node, name).verdict is Verdict.PASS
    without = tuple(replace(gpu, **READ_OF_A_GPU[name]) for gpu in node.gpus)
    # NVML reports that NVLinks work, which contradicts a recording without any.
    expected = Verdict.ERROR if name == "nvlink_active" else Verdict.SKIP
    assert check_row(replace(node, gpus=without), name).verdict is expected


WITHOUT_IOMMU = KernelSettings(iommu=IommuFacts(units=()))


def test_an_empty_pci_bus_shows_no_redirection() -> None:
    node = read()
    assert check_row(node, "redirection").note == "no GPU reaches another, or a NIC, over PCIe"
    apart = [replace(pair, pcie_path="PHB") for pair in node.pairs]
    node = replace(node, gpus=tuple(replace(gpu, nvlinks=()) for gpu in node.gpus), pairs=tuple(apart))
    bus = tuple(PciDevice(bus_id=gpu.bus_id or "", kind=PciKind.GPU) for gpu in node.gpus)
    assert check_row(node, "redirection").verdict is Verdict.SKIP
    assert check_row(replace(node, pci_devices=bus), "redirection").verdict is Verdict.SKIP
    node = replace(node, pci_devices=bus, kernel=WITHOUT_IOMMU)
    assert check_row(node, "redirection").verdict is Verdict.PASS
    guest = check_row(replace(node, machine=HostFacts(virtual_machine=True)), "redirection")
    assert (guest.verdict, guest.note) == (
        Verdict.SKIP,
        "n0: a virtual machine does not show its host's ACS and IOMMU settings",
    )


def test_unreadable_access_control_does_not_pass() -> None:
    def below_a_switch(**port: Any) -> Snapshot:
        facts = read()
        root = "0000:00:01.0"
        bus = [
            PciDevice(bus_id=root, kind=PciKind.ROOT_PORT),
            PciDevice(bus_id=TOP, kind=PciKind.UPSTREAM_PORT, above=root),
        ]
        for at, gpu in enumerate(facts.gpus):
            below = f"0000:02:0{at}.0"
            bus.append(PciDevice(bus_id=below, kind=PciKind.DOWNSTREAM_PORT, above=TOP, **port))
            bus.append(PciDevice(bus_id=gpu.bus_id or "", kind=PciKind.GPU, above=below))
        return replace(
            facts,
            gpus=tuple(replace(gpu, nvlinks=()) for gpu in facts.gpus),
            pairs=tuple(replace(pair, pcie_path="PIX") for pair in facts.pairs),
            pci_devices=tuple(bus),
            kernel=WITHOUT_IOMMU,
        )

    closed = {"access_control": "the kernel shows 64 bytes to users"}
    assert check_row(below_a_switch(access_control=AccessControl()), "redirection").verdict is Verdict.PASS
    assert check_row(below_a_switch(unknown=closed), "redirection").verdict is Verdict.SKIP


def test_no_check_passes_without_facts() -> None:
    gpus = tuple(GpuFacts(index=index) for index in range(4))
    nodes = [Topology(Snapshot(host="n0", origin=Origin.RECORDED, source="", gpus=gpus))]
    report = judge(Facts(nodes, group_nodes(nodes), (), [None], QUICK, False))
    passed = [row.check for row in report.rows(CheckRow) if row.verdict == Verdict.PASS]
    assert (passed, report.verdict) == ([], Verdict.SKIP)


def test_facts_missing_on_one_node_are_noted() -> None:
    one = read(errors_grown={})
    fabric = Fabric(state="completed", status="success")
    silent = tuple(replace(gpu, fabric=fabric) for gpu in one.gpus)
    told = tuple(replace(gpu, fabric=replace(fabric, health_mask=0xAA)) for gpu in one.gpus)
    nodes = [replace(one, gpus=told), replace(one, host="n1", gpus=(*told[:3], silent[3]), errors_grown=None)]

    def notes(snapshots: list[Snapshot]) -> dict[str, str | None]:
        return {row.check: row.note for row in check(*snapshots).rows(CheckRow)}

    found = notes(nodes)
    assert found["pcie_errors"] == "totals only on 1 node of 2, because they were not read again under load"
    assert "of every GPU" in str(found["fabric"])
    whole = notes([nodes[0], replace(nodes[0], host="n1")])
    assert (whole["pcie_errors"], whole["fabric"]) == (None, None)


def refused(reason: str) -> Report:
    node = read()
    gpus = [replace(gpu, mig=None, unknown={"mig": reason}) if gpu.index == 1 else gpu for gpu in node.gpus]
    return check(replace(node, gpus=tuple(gpus)))


@pytest.mark.parametrize(
    ("reason", "cure"),
    [
        ("Insufficient Permissions", "sudo nvidia-smi -q -i 0000:07:00.0"),
        ("The operating system has blocked the request.", "sudo nvidia-smi -q -i 0000:07:00.0"),
        ("GPU requires restart", "nvidia-smi --gpu-reset -i 0000:07:00.0"),
        ("RM has detected an NVML/RM version mismatch.", "cat /proc/driver/nvidia/version"),
        ("Corrupted infoROM", "Have the vendor replace the GPU"),
        (
            "Unknown Error",
            "nvidia-smi -q -i 0000:07:00.0. Then look at the kernel log with `dmesg | grep -i -E 'nvrm|xid'`.",
        ),
    ],
)
def test_every_refusal_has_a_cure_that_can_help(reason: str, cure: str) -> None:
    (found,) = refused(reason).findings
    assert (found.id, found.severity) == (NOT_LOOKED_AT, Verdict.ERROR)
    assert cure in found.cure.text


@pytest.mark.parametrize(
    ("reason", "cure"),
    [
        ("CUDA does not list it", "ls -l /dev/nvidia[0-9]*"),
        ("CUDA was not read", "gpubench check"),
        ("CUDA lists 1 of the 2 GPUs that CUDA_VISIBLE_DEVICES names", "unset CUDA_VISIBLE_DEVICES"),
    ],
)
def test_unreadable_facts_of_pairs_have_a_cure(reason: str, cure: str) -> None:
    node = read()
    pairs = tuple(replace(pair, cuda=None, unknown={"cuda": reason}) for pair in node.pairs)
    node = replace(node, pairs=pairs)
    report = judge(Facts([Topology(node)], (), job_of(node).ranks, [None], QUICK, False))
    (found,) = [finding for finding in report.findings if finding.id == NOT_LOOKED_AT]
    assert cure in found.cure.text
    hidden = replace(node, pairs=tuple(replace(pair, unknown={"cuda": HIDDEN}) for pair in pairs))
    row = check_row(hidden, "peer_access")
    assert (row.verdict, row.note) == (Verdict.SKIP, f"peer access by CUDA could not be read ({HIDDEN})")


def test_the_cure_for_a_nic_is_not_nvidia_smi() -> None:
    nic = NicFacts(name="mlx5_0", kind=NicKind.INFINIBAND, unknown={"state": "state is empty"})
    node = Snapshot(host="n0", origin=Origin.MEASURED, source="", nics=(nic,))
    for reason in ("state is empty", "state: Permission denied"):
        nics = (replace(nic, unknown={"state": reason}),)
        report = judge(Facts([Topology(replace(node, nics=nics))], (), (), [None], QUICK, False))
        (found,) = [finding for finding in report.findings if finding.id == NOT_LOOKED_AT]
        assert "infiniband" in found.cure.text
        assert "nvidia" not in found.cure.text
    down = replace(nic, state="down", unknown={"rate_gbit_s": "the port is down"})
    report = judge(Facts([Topology(replace(node, nics=(down,)))], (), (), [None], QUICK, False))
    assert NOT_LOOKED_AT not in {finding.id for finding in report.findings}


def test_a_failed_source_is_reported_once() -> None:
    node = read(failures=(ProbeFailure(stage="cuda", error="no answer", timed_out=True),))
    node = replace(node, pairs=tuple(replace(pair, cuda=None, unknown={"cuda": "no answer"}) for pair in node.pairs))
    report = judge(Facts([Topology(node)], (), job_of(node).ranks, [None], QUICK, False))
    assert (report.verdict, [finding.id for finding in report.findings]) == (Verdict.ERROR, ["driver-silent"])
    assert check_row(node, "peer_access").verdict is Verdict.ERROR


READ_OF_GPUS = sorted(
    {name.removeprefix("gpu.") for check in CHECKS for name in check.reads if name.startswith("gpu.")}
)


@pytest.mark.parametrize("name", READ_OF_GPUS)
def test_a_fact_missing_for_one_gpu_is_an_error(name: str) -> None:
    gpus = simulated("hgx-h100-8").nodes[0].gpus
    node = replace(simulated("hgx-h100-8").nodes[0], gpus=tuple(replace(gpu, most_clock_mhz=1980) for gpu in gpus))
    for one in name.split("|"):
        node = replace(node, gpus=(node.gpus[0], _without(node.gpus[1], one), *node.gpus[2:]))
    found = judged(node)
    assert NOT_LOOKED_AT in {finding.id for finding in found.findings}
    assert found.verdict is not Verdict.PASS


def _without(gpu: GpuFacts, name: str) -> GpuFacts:
    first, _, rest = name.partition(".")
    value = None if not rest or first == "nvlinks" else replace(getattr(gpu, first), **{rest: None})
    changes: dict[str, Any] = {first: value}
    return replace(gpu, **changes)


@pytest.mark.parametrize("kept", [0, 1, 7])
def test_pairs_that_a_recording_lacks_are_an_error(kept: int) -> None:
    node = simulated("hgx-h100-8").nodes[0]
    found = judged(replace(node, pairs=node.pairs[:kept]))
    assert found.verdict is Verdict.ERROR
    assert judged(node).verdict is Verdict.PASS


def judged(node: Snapshot) -> Report:
    nodes = [Topology(node)]
    return judge(Facts(nodes, group_nodes(nodes), (), [None], QUICK, False))


def test_every_fact_of_a_check_has_a_name() -> None:
    read = {name for check in CHECKS for each in check.reads for name in each.partition(".")[2].split("|")}
    assert set(FACT_NAMES) == read
