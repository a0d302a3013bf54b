"""Published false alarms and missed faults of `gpubench check`, and a test of every check."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench import profiles
from gpubench.conditions.checks import CHECKS
from gpubench.conditions.circumstances import Facts
from gpubench.errors import UsageError
from gpubench.measure.check.health import judge
from gpubench.model.facts.process import GpuProcess, RankFacts
from gpubench.model.facts.snapshot import NvLink, PcieLink, Snapshot
from gpubench.model.paths.nodes import group_nodes
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.profile import Profile
from gpubench.model.results.figures import QUICK, FailedOnNode, Measurements, Need, host_copy_row
from gpubench.model.results.report import CheckRow, PairRow, Report, Table, VerdictRow
from gpubench.model.results.speed import MEASURED, ExpectedTime, judge_row
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.verdict import WRONG_DATA, Cure, Finding, Verdict, exit_code
from tests.conditions.test_checks import machine
from tests.fakes.measured_rows import host_copies, pair, row

H100 = profiles.load("hgx-h100-8")


def report(
    nodes: Sequence[Snapshot],
    profile: Profile | None = H100,
    measurements: Measurements = QUICK,
    *,
    ranks: Sequence[RankFacts] = (),
    asked: bool = False,
) -> Report:
    shown = [Topology(node) for node in nodes]
    facts = Facts(shown, group_nodes(shown), ranks, [profile] * len(nodes), measurements, asked)
    return judge(facts)


def ids(found: Report) -> list[tuple[str, str]]:
    return [(each.id, each.severity.value) for each in found.findings]


def changed(node: Snapshot, index: int | None = None, **facts: Any) -> Snapshot:
    """Change these facts of one GPU, or of all."""
    return replace(node, gpus=tuple(replace(gpu, **facts) if index in (None, gpu.index) else gpu for gpu in node.gpus))


EXPECTED = ExpectedTime(1357.0, "profile ours", MEASURED)
HEALTHY = machine("hgx-h100-8")[0]


def test_h100_nvl_has_12_of_18_links_and_that_is_all_of_them() -> None:
    profile = profiles.load("h100-nvl-2")
    (node,) = machine("h100-nvl-2")
    absent = tuple(NvLink(number=number, active=False) for number in range(12, 18))
    with_absent = replace(node, gpus=tuple(replace(gpu, nvlinks=(*(gpu.nvlinks or ()), *absent)) for gpu in node.gpus))
    assert ids(report([with_absent], profile)) == []
    fewer = changed(node, 1, nvlinks=(node.gpus[1].nvlinks or ())[:10])
    assert ("nvlink-down", "FAIL") in ids(report([fewer], profile))


@pytest.mark.parametrize(
    ("state", "idle", "found"),
    [(None, True, []), (None, False, []), (8, False, []), (5, False, []), (0, False, [("pcie-generation", "WARN")])],
)
def test_a_gpu_at_rest_lowers_its_pcie_generation_and_one_at_work_must_not(
    state: int | None, found: list[tuple[str, str]], *, idle: bool
) -> None:
    """Clocks do not show that a Blackwell GPU at P8, or one with a desktop, is idle."""
    low = PcieLink(generation=1, width=16, max_generation=5, max_width=16)
    assert ids(report([changed(HEALTHY, 2, pcie=low, idle=idle, performance_state=state)])) == found


def test_a_limit_that_cannot_fail_or_cannot_pass_is_no_profile() -> None:
    text = (profiles.folder() / "hgx-h200-8.toml").read_text()
    assert "value = 395.1" in text
    with pytest.raises(UsageError, match=r"value is 0\.3951 GB/s") as caught:
        profiles.read_profile(text.replace("value = 395.1", "value = 0.3951").encode(), "mine")
    assert "a value that no machine can miss, or a unit other" in caught.value.reason
    nvl = (profiles.folder() / "h100-nvl-2.toml").read_text()
    with pytest.raises(UsageError, match="value is 335 GB/s"):
        profiles.read_profile(nvl.replace("value = 256.6", "value = 335.0").encode(), "mine")
    slow = (profiles.folder() / "hgx-a100-8-40gb.toml").read_text()
    with pytest.raises(UsageError, match="value is 900 GB/s"):
        profiles.read_profile(slow.replace("value = 57.2", "value = 900.0").encode(), "mine")


def test_an_unknown_gpu_is_said_to_be_that_and_still_has_siblings() -> None:
    node = changed(HEALTHY, name="NVIDIA X999")
    match = profiles.match_machine(["NVIDIA X999"], 8, switched=True, joined=True)
    assert match is not None
    assert match.profile.name == "generic-nvlink"
    assert ids(report([node], match.profile)) == [("profile-unknown", "SKIP")]
    assert report([node], match.profile).verdict is Verdict.PASS
    odd = changed(node, 5, nvlinks=(node.gpus[5].nvlinks or ())[:12])
    assert ids(report([odd], match.profile)) == [("nvlink-down", "FAIL"), ("profile-unknown", "SKIP")]
    cards = profiles.match_machine(["NVIDIA X999"], 8, switched=None, joined=False)
    assert cards is not None
    assert cards.profile.name == "generic-pcie"


@pytest.mark.parametrize(("others", "odd"), [(1, ["GPU0"]), (4, []), (7, ["GPU7"])])
def test_the_odd_model_is_named_and_of_half_and_half_none(others: int, odd: list[str]) -> None:
    models = ["NVIDIA H200"] * others + [HEALTHY.gpus[0].name] * (8 - others)
    gpus = tuple(replace(gpu, name=name) for gpu, name in zip(HEALTHY.gpus, models, strict=True))
    found = report([replace(HEALTHY, gpus=gpus)]).findings
    assert [each.subject.split()[0] for each in found if each.id == "gpu-model"] == odd


@pytest.mark.parametrize("stage", ["nvml", "cuda", "sysfs"])
def test_a_time_out_is_neither_healthy_nor_faulty(stage: str) -> None:
    found = report(machine("hgx-h100-8", f"node0:silent={stage}"))
    assert ("driver-silent", "ERROR") in ids(found)
    assert found.verdict is Verdict.ERROR
    assert exit_code(found.verdict) == 3


@pytest.mark.parametrize(("stage", "nics"), [("nvml", {"nic": "PASS"}), ("cuda", {"nic": "PASS"}), ("sysfs", {})])
def test_a_silent_node_is_an_error_by_name_and_the_others_are_judged(stage: str, nics: dict[str, str]) -> None:
    found = report(machine("hgx-h100-8*3", f"node1:silent={stage}", "node2.gpu3:nvlink=12"))
    checks = {row.check: row for row in rows(found, CheckRow)}
    assert (checks["ecc"].verdict, checks["ecc"].nodes_in_error) == ("PASS", ("node1",))
    assert (checks["nvlink_active"].verdict, checks["nvlink_active"].nodes_in_error) == ("FAIL", ("node1",))
    assert (checks["driver"].verdict, checks["driver"].nodes_in_error) == ("ERROR", ())
    verdicts = rows(found, VerdictRow)
    silent = {row.scope: row.verdict for row in verdicts if row.node == "node1"}
    assert silent == {"node": "ERROR", "gpu": "ERROR", **nics}
    assert {row.verdict for row in verdicts if row.node == "node0"} == {"PASS"}
    assert sum(row.verdict == "ERROR" for row in verdicts if row.scope == "gpu") == 8


def test_where_all_nodes_are_silent_no_check_is_judged() -> None:
    found = report(machine("hgx-h100-8*2", "node0:silent=nvml", "node1:silent=nvml"))
    checks = {row.check: row for row in rows(found, CheckRow)}
    assert (checks["ecc"].verdict, checks["ecc"].note) == ("ERROR", "the driver did not report it")


def test_what_one_node_could_not_measure_is_an_error_there_alone() -> None:
    broken = FailedOnNode(node="node1", need=Need.HOST_COPIES, reason="did not end within 120 s")
    nodes = machine("hgx-h100-8*2")
    found = report(nodes, measurements=Measurements(failed_on=(broken,), pairs=host_copies(nodes[0], 55.0)))
    assert [(each.id, each.subject) for each in found.findings] == [("not-measured", "node1, host copies")]
    (check,) = (row for row in rows(found, CheckRow) if row.check == "host_bandwidth")
    assert (check.verdict, check.nodes_in_error) == ("PASS", ("node1",))
    judged = {row.node: row.verdict for row in rows(found, VerdictRow) if row.scope == "node"}
    assert judged == {"node0": "PASS", "node1": "ERROR"}


@pytest.mark.parametrize("need", [Need.PEER_COPIES, Need.HOST_COPIES, Need.ALL_REDUCE])
def test_what_was_not_measured_is_an_error_of_every_check_that_needs_it(need: Need) -> None:
    found = report([HEALTHY], measurements=Measurements(failed={need: "did not end within 120 s"}))
    assert ids(found) == [("not-measured", "ERROR")]
    errors = [row.check for row in rows(found, CheckRow) if row.verdict == "ERROR"]
    assert set(errors) == {check.name for check in CHECKS if check.needs is need} | {"measured"}


def test_what_was_left_out_on_purpose_is_skipped_and_says_so() -> None:
    skipped = [row for row in rows(report([HEALTHY]), CheckRow) if row.verdict == "SKIP"]
    left_out = {row.check for row in skipped if row.note == "--quick"}
    assert left_out == {check.name for check in CHECKS if check.needs is not Need.FACTS} | {"measured"}
    assert {row.check: row.note for row in skipped if row.check not in left_out} == {
        "clocks": "highest clock could not be read",
        "nodes_alike": "needs several nodes to compare",
        "ranks_alike": "needs a job with several ranks",
        "versions": "needs a job with several ranks",
        "nic_profile": "needs --profile, because machines of one type can have different NICs",
    }


def rows(found: Report, kind: type[Any]) -> list[Any]:
    table = found.sections[kind.section]
    assert isinstance(table, Table)
    return [row for row in table.rows() if isinstance(row, kind)]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"ecc": False}, ("ecc-off", "WARN")),
        ({"memory_errors": 3}, ("memory-errors", "FAIL")),
        ({"retirement_pending": True}, ("row-remap-pending", "FAIL")),
        ({"temperature_c": 88}, ("gpu-hot", "WARN")),
        ({"pcie_replays": 1000}, ("pcie-errors", "WARN")),
        ({"memory_used_bytes": 4 * 2**30}, ("memory-in-use", "WARN")),
        ({"processes": (GpuProcess(pid=7, name="python"),), "idle": False}, ("gpu-in-use", "WARN")),
        ({"name": "NVIDIA H200"}, ("gpu-model", "WARN")),
    ],
)
def test_the_odd_gpu_is_named(facts: dict[str, Any], expected: tuple[str, str]) -> None:
    base = changed(HEALTHY, most_clock_mhz=1980)
    found = report([changed(base, 6, **facts)])
    assert expected in ids(found)
    (named,) = [each for each in found.findings if each.id == expected[0]]
    assert named.subject.startswith("GPU6 (")
    verdicts = {row.subject[:4]: row.verdict for row in rows(found, VerdictRow) if row.scope == "gpu"}
    assert verdicts.pop("GPU6") == expected[1]
    assert set(verdicts.values()) == {"PASS"}


def test_mig_is_a_finding_where_somebody_wants_it_off() -> None:
    assert ids(report([changed(HEALTHY, mig=True)], None)) == []
    assert set(ids(report([changed(HEALTHY, mig=True)]))) == {("mig-on", "SKIP")}


def test_ecc_off_on_all_is_found_by_the_profile_alone() -> None:
    off = changed(HEALTHY, ecc=False)
    assert ids(report([off])) == [("ecc-off", "WARN")]
    assert ids(report([off], profiles.load("generic-nvlink"), asked=True)) == []


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("node0:acs=on", ("acs-nic-redirect", "WARN")),
        ("node0:iommu=on", ("iommu-translating", "WARN")),
        ("nic3:errors=5000", ("rdma-port-errors", "WARN")),
    ],
)
def test_what_lies_around_the_gpus_is_looked_at(fault: str, expected: tuple[str, str]) -> None:
    node = machine("hgx-h100-8", fault)[0]
    assert ids(report([node])) == [expected]
    virtual = replace(node, machine=replace(node.machine, virtual_machine=True))
    if fault.startswith("node0"):
        assert ids(report([virtual])) == []


def test_fatal_pcie_errors_name_the_device() -> None:
    device = HEALTHY.pci_devices[0]
    assert device.errors is not None
    broken = replace(device, errors=replace(device.errors, fatal=2, named={"fatal.ACSViol": 2}))
    (found,) = report([replace(HEALTHY, pci_devices=(broken, *HEALTHY.pci_devices[1:]))]).findings
    assert (found.id, found.seen) == ("pcie-errors", "2 fatal.ACSViol since boot, at unknown times")
    assert device.bus_id in found.subject


def test_of_two_hosts_the_one_with_the_older_driver_is_named() -> None:
    found = report(machine("hgx-h100-8*2", "node1:driver=570.86.10"))
    (named,) = [each for each in found.findings if each.id == "driver-differs"]
    assert (named.subject, named.severity, named.seen) == ("node1", Verdict.FAIL, "driver 570.86.10")
    nodes = {row.subject: row.verdict for row in rows(found, VerdictRow) if row.scope == "node"}
    assert nodes["node1"] == "FAIL"
    assert nodes["node0"] != "FAIL"


def test_a_rank_with_another_library_is_named() -> None:
    def rank(number: int, file: str) -> RankFacts:
        return RankFacts(
            rank=number, host=f"n{number}", node=number, local_rank=0, pid=1, shm_device=1, libraries={"nccl": file}
        )

    ranks = [rank(0, "/usr/lib/libnccl.so.2.28.9"), rank(1, "/usr/lib/libnccl.so.2.28.9"), rank(2, "/opt/old.so")]
    found = report(machine("hgx-h100-8*3"), ranks=ranks)
    assert [(each.id, each.subject) for each in found.findings] == [("library-differs", "rank 2 on n2")]


def test_a_profile_that_was_asked_for_is_taken_at_its_word() -> None:
    seven = machine("hgx-h100-8", "gpu7:missing=yes", "nic7:missing=yes")
    without_switches = [replace(seven[0], nvswitches=())]
    assert ids(report(without_switches)) == []
    found = report(without_switches, asked=True)
    assert ids(found) == [("gpu-missing", "FAIL"), ("nic-below-profile", "FAIL")]
    assert ids(report(machine("hgx-h200-8"), asked=True)) == [("gpu-model", "FAIL")]
    slow = machine("hgx-h100-8", *(f"nic{number}:rate=200" for number in range(8)))
    assert ids(report(slow, asked=True)) == [("nic-below-profile", "FAIL")]


def copies(figures: dict[tuple[int, int], float], usual: float = 376.0) -> Measurements:
    every = [(one, other) for one in range(8) for other in range(8) if one != other]
    return Measurements(pairs=tuple(pair(HEALTHY, *ends, figures.get(ends, usual)) for ends in every))


def test_one_slow_gpu_is_named_and_not_its_56_pairs() -> None:
    slow = {ends: 200.0 for one in range(8) if one != 3 for ends in ((3, one), (one, 3))}
    found = report([HEALTHY], measurements=copies(slow))
    assert [(each.id, each.severity, each.subject) for each in found.findings] == [
        ("p2p-slow", Verdict.FAIL, f"GPU3 ({HEALTHY.gpus[3].bus_id})")
    ]


def test_two_gpus_without_siblings_are_compared_with_each_other_and_the_profile() -> None:
    among = tuple(each for each in HEALTHY.pairs if {each.source, each.destination} <= {"GPU0", "GPU1"})
    node = replace(HEALTHY, gpus=HEALTHY.gpus[:2], pairs=among, nvswitches=(), pci_devices=())
    one_way = Measurements(pairs=(pair(HEALTHY, 0, 1, 376.0), pair(HEALTHY, 1, 0, 300.0)))
    assert "p2p-slow" in dict(ids(report([node], measurements=one_way)))
    both = Measurements(pairs=(pair(HEALTHY, 0, 1, 250.0), pair(HEALTHY, 1, 0, 250.0)))
    assert ids(report([node], measurements=both)) == [("p2p-slow", "FAIL")]
    assert ids(report([node], None, measurements=both)) == [("p2p-slow", "WARN")]


def test_a_derived_figure_judges_as_p2p_does() -> None:
    profile = profiles.load("hgx-b200-8")
    (node,) = machine("hgx-b200-8")

    def measured(gb_s: float) -> Measurements:
        ends = [(one, other) for one in node.gpus for other in node.gpus if one is not other]
        found = [
            pair(HEALTHY, 0, 1, gb_s, source_bus_id=a.bus_id, destination_bus_id=b.bus_id, limit_gb_s=900.0)
            for a, b in ends
        ]
        return Measurements(pairs=tuple(found))

    assert ids(report([node], profile, measured(747.0))) == []
    assert ids(report([node], profile, measured(600.0))) == [("p2p-slow", "WARN")]
    assert ids(report([node], profile, measured(500.0))) == [("p2p-slow", "FAIL")]
    assert ids(report([node], profile, measured(300.0))) == [("p2p-slow", "FAIL")]


def test_a_gpu_that_somebody_uses_is_not_judged_by_its_figures() -> None:
    busy = changed(HEALTHY, 3, processes=(GpuProcess(pid=7),), idle=False)
    slow = {ends: 200.0 for one in range(8) if one != 3 for ends in ((3, one), (one, 3))}
    assert ids(report([busy], measurements=copies(slow))) == [("gpu-in-use", "WARN")]


@pytest.mark.parametrize(("percent", "found"), [(0, [("p2p-slow", "FAIL")]), (3, [("gpu-in-use", "WARN")])])
def test_a_process_that_runs_nothing_is_no_user_of_a_gpu(percent: int, found: list[tuple[str, str]]) -> None:
    """As on an H200: an idle context keeps it at 1980 MHz, and kernels that run 0.1 % of the time read 3 %."""
    held = changed(HEALTHY, 3, processes=(GpuProcess(pid=7),), idle=False, utilization_percent=percent)
    slow = {ends: 200.0 for one in range(8) if one != 3 for ends in ((3, one), (one, 3))}
    assert ids(report([held], measurements=copies(slow))) == found


def to_host(index: int, gb_s: float) -> PairRow:
    copied = pair(HEALTHY, index, (index + 1) % 8, gb_s, size_bytes=2**26, note="pinned host memory", peer=None)
    return replace(copied, destination="host", destination_bus_id=None)


def test_slow_host_copies_are_found_by_siblings_and_by_the_profile() -> None:
    odd = Measurements(pairs=tuple(to_host(index, 26.0 if index == 2 else 52.0) for index in range(8)))
    found = report([HEALTHY], measurements=odd)
    assert [(each.id, each.severity, each.subject[:4]) for each in found.findings] == [
        ("host-copies-slow", Verdict.FAIL, "GPU2")
    ]
    all_slow = Measurements(pairs=tuple(to_host(index, 26.0) for index in range(8)))
    (finding,) = report([HEALTHY], measurements=all_slow).findings
    assert len(finding.subjects) == 8


def test_collectives_are_slow_where_their_rows_say_so_each_once() -> None:
    fast, slow = judge_row(row(2**28, 1357.0, 346.1), EXPECTED), judge_row(row(2**28, 13570.0, 34.6), EXPECTED)
    assert ids(report(machine("hgx-h200-8"), measurements=Measurements(collectives=(fast,)))) == []
    sizes = (slow, replace(slow, size_bytes=2**30), replace(slow, collective="gather"))
    found = report(machine("hgx-h200-8"), measurements=Measurements(collectives=sizes))
    assert ids(found) == [("slow-unexplained", "FAIL")] * 2
    assert found.findings[0].subject.startswith("allreduce of 256M to 1G, 8 ranks on ")
    assert found.findings[0].expected.endswith("profile ours")
    warned = judge_row(row(2**28, 1550.0, 300.0), EXPECTED)
    assert ids(report(machine("hgx-h200-8"), measurements=Measurements(collectives=(warned,)))) == [
        ("slow-unexplained", "WARN")
    ]


def test_a_straggler_is_named_as_rank_host_and_gpu() -> None:
    late = row(2**28, 1357.0, 346.1, time_us_slowest_rank=1700.0)
    rank = RankIdentity(rank=3, host="n1", node=0, local_rank=3, pid=1, gpu_index=3, gpu_bus_id="0000:09:00.0")
    found = report(machine("hgx-h200-8"), profiles.load("hgx-h200-8"), Measurements(collectives=(late,), ranks=(rank,)))
    assert [(each.id, each.subject) for each in found.findings] == [("straggler", str(rank))]


def test_wrong_data_fail_however_fast_they_were() -> None:
    found = report([HEALTHY], measurements=Measurements(collectives=(row(2**28, 1.0, 480.0, wrong=7),)))
    assert ids(found) == [(WRONG_DATA, "FAIL")]


def finding(name: str, severity: Verdict) -> Finding:
    return Finding(name, severity, "GPU0 → GPU1", "seen", "expected", "cause", Cure.of("next"))


def test_what_measuring_found_out_is_said_by_the_check_it_belongs_to() -> None:
    found_out = (
        finding(WRONG_DATA, Verdict.FAIL),
        finding("host-staged", Verdict.FAIL),
        finding("copy-failed", Verdict.ERROR),
    )
    found = report([HEALTHY], measurements=Measurements(findings=found_out))
    assert ids(found) == [("host-staged", "FAIL"), (WRONG_DATA, "FAIL"), ("copy-failed", "ERROR")]
    verdicts = {each.check: each.verdict for each in rows(found, CheckRow)}
    assert (verdicts["paths"], verdicts["data_correct"], verdicts["measured"]) == ("FAIL", "FAIL", "ERROR")


def test_settings_that_will_keep_nccl_off_direct_paths_fail_the_check() -> None:
    rank = RankFacts(
        rank=0, host="node0", node=0, local_rank=0, pid=1, shm_device=1, environment={"NCCL_P2P_DISABLE": "1"}
    )
    found = report([HEALTHY], ranks=[rank])
    assert ids(found) == [("nccl-p2p-disabled", "FAIL")]
    assert "NCCL_P2P_DISABLE=1" in found.findings[0].seen


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((1.0, 1.0, 1.3, 1.0), []),
        ((1.0, 1.0, 1.4, 1.0), [("host-memory-slow", "WARN")]),
        ((1.0, 1.0, 2.1, 1.0), [("host-memory-slow", "FAIL")]),
        ((2.1, 1.0), [("host-memory-slow", "FAIL")]),
    ],
)
def test_a_host_with_slow_memory_is_found_by_the_other_hosts(
    seconds: tuple[float, ...], expected: list[tuple[str, str]]
) -> None:
    nodes = machine(f"hgx-h100-8*{len(seconds)}")
    rows = tuple(host_copy_row(node.host, 2**26, each) for node, each in zip(nodes, seconds, strict=True))
    found = report(nodes, measurements=replace(QUICK, pairs=rows))
    assert ids(found) == expected
    slowest = nodes[seconds.index(max(seconds))].host
    assert all(each.subject == slowest for each in found.findings)


def test_memory_is_compared_between_hosts_with_the_same_cpu() -> None:
    one, other = machine("hgx-h100-8*2")
    rows = (host_copy_row(one.host, 2**26, 1.0), host_copy_row(other.host, 2**26, 3.0))
    older = replace(other, machine=replace(other.machine, cpu="an older one"))
    found = report([one, older], measurements=replace(QUICK, pairs=rows))
    assert "host-memory-slow" not in {each.id for each in found.findings}


def test_a_node_whose_driver_is_not_loaded_is_an_error_with_all_its_gpus() -> None:
    found = report(machine("hgx-h100-8*2", "node1:driver_missing=yes"))
    assert ("driver-missing", "ERROR") in ids(found)
    checks = {row.check: row for row in rows(found, CheckRow)}
    assert (checks["ecc"].verdict, checks["ecc"].nodes_in_error) == ("PASS", ("node1",))
    gpus = [row for row in rows(found, VerdictRow) if row.scope == "gpu"]
    assert [row.verdict for row in gpus] == ["PASS"] * 8 + ["ERROR"] * 8
    assert {row.findings for row in gpus} == {(), ("driver-missing",)}


def test_a_gpu_that_can_only_do_generation_3_is_below_its_profile() -> None:
    """DCGM asks for generation 3 of most GPUs, H100 and H200 among them."""
    low = PcieLink(generation=3, width=16, max_generation=3, max_width=16)
    assert ids(report([changed(HEALTHY, pcie=low)])) == [("below-profile", "FAIL")]


def test_the_health_mask_0xaa_is_healthy_and_its_bits_are_read_in_twos() -> None:
    assert {gpu.fabric.health_mask for gpu in HEALTHY.gpus if gpu.fabric} == {0xAA}
    assert ids(report([HEALTHY])) == []
    degraded = machine("hgx-h100-8", "gpu1:health=degraded_bandwidth")
    assert ids(report(degraded)) == [("fabric-unhealthy", "FAIL")]


def test_all_links_down_on_all_gpus_is_found() -> None:
    """DCGM's level 2 passes there."""
    down = machine("hgx-h100-8", *(f"gpu{index}:nvlink=0" for index in range(8)))
    assert ("nvlinks-all-down", "FAIL") in ids(report(down))


@pytest.mark.parametrize(
    "facts",
    [
        {"memory_errors": 0},
        {"temperature_c": 86},
        {"pcie_replays": 999},
        {"memory_used_bytes": 2**30},
        {"processes": (GpuProcess(pid=7),), "idle": True},
    ],
)
def test_what_differs_a_little_is_well(facts: dict[str, Any]) -> None:
    assert ids(report([changed(HEALTHY, 6, **facts)])) == []


def test_all_gpus_hot_is_found_without_an_odd_one() -> None:
    assert {each for each, _ in ids(report([changed(HEALTHY, temperature_c=88)]))} == {"gpu-hot"}


def test_one_slow_direction_is_named_once() -> None:
    found = report([HEALTHY], measurements=copies({(0, 3): 320.0}))
    assert ids(found) == [("p2p-slow", "WARN")]
    assert "GPU0" in found.findings[0].subject
    assert " → GPU3" in found.findings[0].subject
    links = {row.subject: row.verdict for row in rows(found, VerdictRow) if row.scope == "link"}
    assert [verdict for verdict in links.values() if verdict != "PASS"] == ["WARN"]
