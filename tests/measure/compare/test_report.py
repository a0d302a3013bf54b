"""Comparisons with known answers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.measure.compare.findings import describe_file
from gpubench.measure.compare.judge import JudgedRow, slower_ranges
from gpubench.measure.compare.noise import ChangeNoise, RunFigures, gather
from gpubench.measure.compare.report import compare
from gpubench.model.results.compare import Change, CircumstanceRow, ComparisonRow, RowKey, Status
from gpubench.model.results.report import EvidenceRow, PairRow, Report, Table
from gpubench.model.results.result_file import FileCircumstances, ResultFile
from gpubench.model.terms.verdict import Verdict
from tests.fakes.noisy_results import SCENARIOS, Scenario, collective_row

SEEDS = 20


def rows_of(report: Report, section: str = "comparison") -> list[Any]:
    table = report.sections[section]
    assert isinstance(table, Table)
    return list(table.rows())


def file(*rows: Any, **circumstances: Any) -> ResultFile:
    pairs = tuple(row for row in rows if isinstance(row, PairRow))
    own = tuple(row for row in rows if not isinstance(row, PairRow))
    return ResultFile(
        name="f", kind="made", circumstances=FileCircumstances(tool="", **circumstances), rows=own, pairs=pairs
    )


def one(base: ResultFile, new: ResultFile, threshold: float | None = None) -> ComparisonRow:
    (row,) = rows_of(compare([base], [new], threshold))
    assert isinstance(row, ComparisonRow)
    return row


def pair(**changes: Any) -> PairRow:
    values: dict[str, Any] = {
        "source": "GPU0",
        "destination": "GPU1",
        "source_bus_id": "0000:01:00.0",
        "destination_bus_id": "0000:02:00.0",
        "source_node": "n1",
        "destination_node": "n1",
        "scope": "process",
        "origin": "measured",
        "direction": "write",
        "engine": "ce",
        "peer": "on",
        "size_bytes": 2**28,
        "bandwidth_gb_s": 395.0,
        "latency_us": 680.0,
        "limit_gb_s": 450.0,
        "path_class": "NV18",
        "host_staged": False,
        "verified": "last",
        "verdict": "PASS",
    }
    return PairRow(**(values | changes))


@pytest.mark.parametrize("base", [(), (pair(),)])
def test_a_new_bandwidth_above_the_limit_is_an_error(base: tuple[PairRow, ...]) -> None:
    report = compare([file(pair(size_bytes=2**20), *base)], [file(pair(size_bytes=2**20), pair(bandwidth_gb_s=1800.0))])
    (finding,) = [each for each in report.findings if each.id == "above-limit"]
    assert (finding.severity, report.verdict) == (Verdict.ERROR, Verdict.ERROR)
    assert "4.0 times the limit" in finding.seen


@pytest.mark.parametrize("scenario", [each for each in SCENARIOS if "usual" in each.name], ids=lambda each: each.name)
def test_false_alarms_and_detection(scenario: Scenario) -> None:
    seeds = range(SEEDS // 2)
    failed = sum(compare(*scenario.sides(seed)).verdict is Verdict.FAIL for seed in seeds)
    assert failed == (len(seeds) if scenario.changed else 0)


@pytest.mark.parametrize(
    ("change", "verdict", "said"),
    [
        ({"wrong": 3}, Verdict.FAIL, "3 wrong elements"),
        ({"host_staged": True}, Verdict.FAIL, "direct before, through host memory now"),
        ({"host_staged": True, "time_us": 50.0}, Verdict.FAIL, "direct before"),
        ({"host_staged": None, "transport": "SHM/direct"}, Verdict.FAIL, "direct before"),
        ({"transport": "P2P/IPC"}, Verdict.WARN, "transport P2P/CUMEM before, P2P/IPC now"),
        ({"verdict": "WARN"}, Verdict.WARN, "PASS before, WARN now"),
        ({"verdict": "FAIL", "note": "12 links"}, Verdict.FAIL, "PASS before, FAIL now: 12 links"),
        ({"verdict": "ERROR"}, Verdict.ERROR, "PASS before, ERROR now"),
        ({"verdict": "SKIP"}, Verdict.PASS, None),
        ({"verified": "no", "wrong": None}, Verdict.WARN, "no longer verified"),
        ({"time_us": 150.0}, Verdict.FAIL, "33.3 % slower (noise 4.8 %"),
        ({"time_us": 350.0}, Verdict.FAIL, "71.4 % slower (noise 4.8 %"),
        ({"time_us": 420.0}, Verdict.FAIL, "76.2 % slower (noise 4.8 %"),
        ({"time_us": 104.0}, Verdict.PASS, None),
        ({"time_us": 50.0}, Verdict.PASS, None),
        ({"algorithm": "NVLS"}, Verdict.PASS, None),
    ],
)
def test_the_verdict_follows_from_each_change(change: dict[str, Any], verdict: Verdict, said: str | None) -> None:
    base = collective_row(2**20, host_staged=False, transport="P2P/CUMEM", verdict="PASS", algorithm="RING")
    row = one(file(base), file(replace(base, **change)))
    assert row.verdict == verdict
    assert (row.reason is None) if said is None else said in (row.reason or "")


def test_doubts_are_warnings() -> None:
    base = [collective_row(size, transport="P2P/CUMEM") for size in (1024, 2048)]
    new = [replace(base[0], transport="P2P/IPC")]
    report = compare([file(*base)], [file(*new)])
    assert report.verdict is Verdict.WARN
    assert {(row.status, row.verdict) for row in rows_of(report)} == {
        (Status.COMPARED, Verdict.WARN),
        (Status.MISSING, Verdict.WARN),
    }


def test_wrong_data_make_no_baseline() -> None:
    row = one(file(collective_row(1024, wrong=7, time_us=1.0)), file(collective_row(1024)))
    assert (row.verdict, row.slower_percent) == (Verdict.INCONCLUSIVE, None)


def test_wrong_data_of_a_row_that_is_new() -> None:
    report = compare([file(collective_row(1024))], [file(collective_row(1024), collective_row(2048, wrong=1))])
    assert report.verdict is Verdict.FAIL


def test_one_cause_is_one_finding_and_rows_are_sorted_by_loss() -> None:
    before = [collective_row(size, verdict="PASS") for size in (2**28, 2**29, 2**30)]
    after = [
        replace(row, time_us=row.time_us * by, verdict="WARN") for row, by in zip(before, (1.5, 2, 1.8), strict=True)
    ]
    report = compare([file(*before, topology="a")], [file(*after, topology="b")])
    assert [row.size_bytes for row in rows_of(report)] == [2**29, 2**30, 2**28]
    (finding,) = report.findings
    assert (finding.id, finding.cause) == ("slower", "a device or link changed: topology a before, b now")
    assert finding.seen.startswith("50.0 % slower (noise ")
    assert finding.consequences == ("3 rows with a worse verdict: PASS before, WARN now",)
    assert finding.next_command.startswith("gpubench topo")


def test_slow_pairs_are_a_consequence_of_their_staged_path() -> None:
    slow = pair(bandwidth_gb_s=37.0, latency_us=7000.0)
    values: dict[str, Any] = dict.fromkeys(EvidenceRow.columns())
    direct = EvidenceRow(**values | {"source": "GPU0", "destination": "GPU1", "conclusion": "direct"})
    base = replace(file(pair()), evidence=(direct,))
    staged = replace(file(slow), evidence=(replace(direct, conclusion="staged"),))
    assert compare([staged], [staged]).verdict is Verdict.PASS
    report = compare([base], [staged])
    (finding,) = report.findings
    assert (finding.id, finding.subject) == ("path-was-direct", "GPU0 → GPU1")
    assert finding.consequences[0].startswith("1 row slower: 9")


def test_wrong_data_in_the_footer_alone_fail() -> None:
    base = file(collective_row(1024))
    report = compare([base], [file(collective_row(1024), wrong_elements=4)])
    assert (report.verdict, report.findings[0].id) == (Verdict.FAIL, "wrong-data")


@pytest.mark.parametrize(("threshold", "verdict"), [(16.0, Verdict.FAIL), (17.0, Verdict.PASS)])
def test_a_fixed_threshold_replaces_noise(threshold: float, verdict: Verdict) -> None:
    assert one(file(collective_row(1024)), file(collective_row(1024, time_us=120.0)), threshold).verdict == verdict


def test_the_rows_own_interval_counts() -> None:
    base, new = collective_row(1024, ci95_percent=10.0), collective_row(1024, time_us=115.0, ci95_percent=10.0)
    row = one(file(base), file(new))
    assert (row.verdict, row.noise_source) == (Verdict.INCONCLUSIVE, "the spread of the rows")
    assert one(file(base), file(replace(new, time_us=300.0))).verdict == Verdict.FAIL


def test_algorithms_of_a_sweep_are_separate_rows() -> None:
    base = [collective_row(1024, algorithm=name, time_us=us) for name, us in (("RING", 10.0), ("TREE", 20.0))]
    report = compare([file(*base)], [file(*base)])
    assert {(row.setting, row.base_runs, row.slower_percent) for row in rows_of(report)} == {
        ("RING", 1, 0.0),
        ("TREE", 1, 0.0),
    }


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, Verdict.PASS),
        ({"bandwidth_gb_s": 250.0, "latency_us": 1080.0}, Verdict.FAIL),
        ({"limit_gb_s": 300.0}, Verdict.FAIL),
        ({"path_class": "SYS"}, Verdict.WARN),
        ({"path_class": "NV12"}, Verdict.WARN),
        ({"path_class": "NV19"}, Verdict.PASS),
        ({"host_staged": True}, Verdict.FAIL),
        ({"bandwidth_gb_s": None, "latency_us": None, "verdict": "ERROR", "verified": None}, Verdict.ERROR),
    ],
)
def test_pairs(change: dict[str, Any], verdict: Verdict) -> None:
    report = compare([file(pair())], [file(pair(**change))])
    assert report.verdict is verdict


def test_pairs_of_other_hosts_are_matched_by_name() -> None:
    other = pair(source_node="n2", destination_node="n2", source_bus_id="0000:81:00.0", destination_bus_id=None)
    row = one(file(pair()), file(other))
    assert (row.status, row.source, row.destination, row.source_node) == (Status.COMPARED, "GPU0", "GPU1", "node 0")


def test_kinds_of_host_memory_are_separate_rows() -> None:
    rows = [pair(source="host", source_bus_id=None, note=f"{kind} host memory") for kind in ("pinned", "pageable")]
    assert len(rows_of(compare([file(*rows)], [file(*rows)]))) == 2


@pytest.mark.parametrize(
    ("kind", "gb_s", "verdict"),
    [
        ("pageable", (14.5, 9.2), Verdict.PASS),
        ("pinned", (55.3, 54.0), Verdict.PASS),
        ("pinned", (55.3, 27.0), Verdict.FAIL),
        ("pageable", (14.5, 4.0), Verdict.FAIL),
    ],
    ids=["pageable of two healthy H200 machines", "pinned of the same", "half the lanes", "pageable, much slower"],
)
def test_copies_with_host_memory_differ_from_machine_to_machine(
    kind: str, gb_s: tuple[float, float], verdict: Verdict
) -> None:
    rows = [
        pair(source="host", source_bus_id=None, note=f"{kind} host memory", bandwidth_gb_s=each, latency_us=67e3 / each)
        for each in gb_s
    ]
    assert one(file(rows[0]), file(rows[1])).verdict == verdict


def test_changed_circumstances() -> None:
    base = file(collective_row(1024), libraries={"NCCL": "2.28.9 from /a"}, environment={}, topology="aa")
    new = file(
        collective_row(1024), libraries={"NCCL": "2.28.9 from /b"}, environment={"NCCL_ALGO": "Ring"}, topology="bb"
    )
    report = compare([base], [new])
    changed = [row for row in rows_of(report, "circumstances") if row.changed]
    assert changed == [
        CircumstanceRow(name="topology", base="aa", new="bb", changed=True),
        CircumstanceRow(name="NCCL_ALGO", base="not set", new="Ring", changed=True),
    ]
    assert (report.verdict, [finding.id for finding in report.findings]) == (Verdict.WARN, ["topology-changed"])


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (file(collective_row(1024), gpus=("NVIDIA H100",) * 2), "2 × NVIDIA H100, not 2 × NVIDIA H200"),
        (file(collective_row(1024), gpus=("NVIDIA H200",) * 4), "4 × NVIDIA H200, not 2 × NVIDIA H200"),
        (file(collective_row(1024, origin="simulated")), "simulated, not measured"),
    ],
)
def test_other_machines_are_refused(new: ResultFile, said: str) -> None:
    base = file(collective_row(1024), gpus=("NVIDIA H200",) * 2)
    with pytest.raises(UsageError, match=said):
        compare([base], [new])
    with pytest.raises(UsageError, match=said):
        compare([base, new], [base])
    assert compare([base], [new], other_machine=True).verdict is Verdict.PASS


def test_sides_without_a_common_row_do_not_pass() -> None:
    report = compare([file(collective_row(1024, ranks=8))], [file(collective_row(1024, ranks=4))])
    assert report.verdict is Verdict.ERROR
    assert report.findings[0].seen == "ranks 4, not 8"
    assert compare([file()], [file()]).verdict is Verdict.ERROR


def test_an_incomplete_run_is_a_warning() -> None:
    new = replace(file(collective_row(1024)), complete=False, remarks=("the run was cut short",))
    report = compare([file(collective_row(1024))], [new])
    assert (report.verdict, report.findings[0].id) == (Verdict.WARN, "incomplete")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (None, True, "through host memory now (unknown before)"),
        (True, True, None),
        (True, False, None),
        (None, False, None),
    ],
)
def test_a_staged_path_with_an_unknown_past_is_a_warning(*, before: bool | None, after: bool, said: str | None) -> None:
    base = collective_row(2**20, host_staged=before)
    assert one(file(base), file(replace(base, host_staged=after))).reason == said


@pytest.mark.parametrize(
    ("row", "name"),
    [
        (collective_row(2**20), "allreduce 1M"),
        (collective_row(2**20, "in_place", op="max", dtype="int8", graph=10), "allreduce 1M int8 max in place graph"),
        (collective_row(2**20, mode="latency", root=2, group="rail 0"), "allreduce 1M root 2 latency rail 0"),
        (pair(), "GPU0 → GPU1 256M write ce"),
        (pair(peer="off"), "GPU0 → GPU1 256M write ce peer off"),
    ],
)
def test_a_finding_names_rows_without_defaults(row: Any, name: str) -> None:
    report = compare([file(row, collective_row(64))], [file(collective_row(64))])
    assert [finding.subjects for finding in report.findings] == [(name,)]


def test_sizes_are_formatted_if_none_is_in_common() -> None:
    report = compare([file(collective_row(2**20))], [file(collective_row(2**21))])
    assert [finding.seen for finding in report.findings] == ["size_bytes 2M, not 1M"]


def test_the_description_of_a_file_names_two_hosts_and_counts_the_others() -> None:
    def described(*hosts: str) -> str:
        return describe_file(file(gpus=("H200",) * 2, hosts=hosts, libraries={"NCCL": "2.28.9 from /lib/x"}))

    assert described("n1", "n2") == "NCCL 2.28.9, 2 × H200 on n1, n2"
    assert described("n1", "n2", "n3") == "NCCL 2.28.9, 2 × H200 on n1, n2 and 1 hosts more"


def noise_of(logs: Mapping[RowKey, Sequence[float]]) -> ChangeNoise:
    def figures(log: float) -> RunFigures:
        (runs,) = gather([file(collective_row(64, time_us=math.exp(log)))], [])[0].values()
        return runs[0]

    runs = {key: [figures(log) for log in each] for key, each in logs.items()}
    return ChangeNoise(runs, runs)


@pytest.mark.parametrize(
    ("runs", "part"),
    # The distance between runs, and the variance of the middle of all runs on both sides.
    [((0.0, 0.1), 1 / 2 + 1 / 2), ((0.0, 0.1, 0.2), math.pi / 2 * (1 / 3 + 1 / 3))],
)
def test_the_noise_between_runs_follows_from_their_medians(runs: Sequence[float], part: float) -> None:
    keys = [RowKey(collective="allreduce", size_bytes=2**power) for power in range(10, 16)]
    found = noise_of(dict.fromkeys(keys, runs)).change_noise(keys[0])
    assert found is not None
    assert found.deviation == pytest.approx(1.4826 * 0.1 / math.sqrt(2) * math.sqrt(part))
    assert found.freedom == pytest.approx(0.37 * 12 * (len(runs) - 1))


@pytest.mark.parametrize(("place", "sizes"), [(0, 7), (3, 10), (10, 13), (19, 7)])
def test_noise_is_estimated_from_six_sizes_on_either_side(place: int, sizes: int) -> None:
    keys = [RowKey(collective="allreduce", size_bytes=2**power) for power in range(10, 30)]
    found = noise_of(dict.fromkeys(keys, (0.0, 0.1))).change_noise(keys[place])
    assert found is not None
    assert found.freedom == pytest.approx(0.37 * 2 * sizes)


@pytest.mark.parametrize(("pairs", "known"), [(5, False), (6, True)])
def test_noise_of_single_runs_is_known_from_six_pairs(pairs: int, *, known: bool) -> None:
    keys = [RowKey(source=f"GPU{number}", destination="GPU9") for number in range(pairs)]
    assert (noise_of(dict.fromkeys(keys, (0.0,))).change_noise(keys[0]) is not None) is known


@pytest.mark.parametrize(("named", "found"), [(0, 1), (4, 1), (5, 1), (6, 0)])
def test_a_range_is_named_unless_most_of_its_rows_are(named: int, found: int) -> None:
    base = [collective_row(2**power, time_us=1e6) for power in range(24, 34)]
    before, after = gather([file(*base)], [file(*(replace(row, time_us=1.1e6) for row in base))])
    judged = [
        JudgedRow(key, Status.COMPARED, Verdict.FAIL, before[key], after[key], change=Change.SLOWER)
        for key in list(before)[:named]
    ]
    findings = list(slower_ranges(before, after, ChangeNoise(before, after), judged))
    assert [finding.subject for finding in findings] == ["allreduce 16M to 8G: 10 rows together"][:found]


@pytest.mark.parametrize(("slower", "found"), [(0.012, 0), (0.016, 1)])
def test_the_bound_of_a_range_follows_from_three_runs_per_side(slower: float, found: int) -> None:
    """Runs are 0.3 % apart. With 4 degrees of freedom, 1.4 % is noise."""

    def side(change: float) -> list[ResultFile]:
        logs = [change + run * 0.003 for run in range(3)]
        return [
            file(*(collective_row(2**power, time_us=1e6 * math.exp(log)) for power in range(24, 34))) for log in logs
        ]

    before, after = gather(side(0.0), side(slower))
    assert len(list(slower_ranges(before, after, ChangeNoise(before, after), []))) == found


def test_a_path_without_evidence_any_more_is_a_doubt() -> None:
    def row(to: str) -> EvidenceRow:
        values: dict[str, Any] = dict.fromkeys(EvidenceRow.columns(), "")
        return EvidenceRow(**(values | {"source": "a0", "destination": to, "conclusion": "direct"}))

    pairs = [pair(source="a0", destination=to, destination_bus_id=to) for to in ("a1", "a2")]
    before = replace(file(*pairs), evidence=(row("a1"), row("a2"), row("a3")))
    for evidence, lost in (((), ("a1", "a2", "a3")), ((row("a1"),), ("a2",)), ((row("a1"), row("a2")), ())):
        report = compare([before], [replace(before, evidence=evidence)])
        assert [finding.subjects for finding in report.findings] == [tuple(f"a0 → {each}" for each in lost)] * bool(
            lost
        )
        assert report.verdict is (Verdict.WARN if lost else Verdict.PASS)
    without = compare([before], [replace(before, evidence=None)])
    assert without.verdict is Verdict.PASS, "a file that cannot hold any"


def test_a_lost_gpudirect_is_named_as_the_cause_of_slower_rows() -> None:
    now = "NET/IB+P2P/CUMEM"
    rows = [
        collective_row(2**power, time_us=1e4, transport="NET/IB/GDRDMA+P2P/CUMEM", host_staged=False)
        for power in range(24, 30)
    ]
    new = [replace(row, time_us=1.6e4, transport=now, host_staged=True) for row in rows]
    (finding,) = (each for each in compare([file(*rows)], [file(*new)]).findings if each.id == "now-staged")
    assert finding.seen.endswith(f"through host memory now: {now}, not NET/IB/GDRDMA+P2P/CUMEM")
    assert finding.cause.startswith("GPUDirect RDMA is off")
    assert finding.next_command.startswith("gpubench topo --causes")
    assert finding.consequences[0].startswith("6 rows slower: 37.5 % slower")


def test_a_staged_path_that_never_had_gpudirect_has_another_cause() -> None:
    rows = [collective_row(2**24, transport="P2P/CUMEM")]
    new = [replace(row, transport="SHM/direct") for row in rows]
    (finding,) = (each for each in compare([file(*rows)], [file(*new)]).findings if each.id == "now-staged")
    assert finding.cause == "a setting, driver, container or GPU that refuses peer access"
