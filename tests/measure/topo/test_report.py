from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from gpubench.measure.topo import examine
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import DriverFacts
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.fault import parse_fault
from gpubench.model.results import topo
from gpubench.model.results.report import PairRow, Record, Report, Table
from gpubench.model.terms.verdict import Verdict
from gpubench.simulated.machine import parse_machine, snapshots


def cluster(machine: str, *faults: str) -> list[Topology]:
    return [
        Topology(snapshot) for snapshot in snapshots(parse_machine(machine), [parse_fault(fault) for fault in faults])
    ]


def rows(report: Report, section: str) -> Sequence[dict[str, object]]:
    table = report.sections[section]
    assert isinstance(table, Table)
    return [row.to_record() for row in table.rows()]


def test_rows_have_the_columns_of_their_section() -> None:
    facts = RankFacts(rank=0, host="node0", node=0, local_rank=0, pid=1, environment={"NCCL_ALGO": "Ring"})
    report = examine(cluster("hgx-h100-8*2"), [facts])
    for name, section in report.sections.items():
        if isinstance(section, Table):
            found = rows(report, name)
            assert found, name
            assert all(tuple(row) == tuple(section.columns) for row in found)


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [(None, "PASS"), ("gpu3:nvlink=12", "FAIL"), ("gpu3:rows=pending", "FAIL"), ("node0:silent=nvml", "ERROR")],
)
def test_the_verdict_follows_from_the_findings(fault: str | None, verdict: str) -> None:
    assert examine(cluster("hgx-h100-8", *([fault] if fault else []))).verdict == verdict


def test_a_failure_outranks_an_error() -> None:
    nodes = cluster("hgx-h100-8*2", "node0:silent=cuda", "node1.gpu1:lost=yes")
    assert examine(nodes).verdict is Verdict.FAIL


def test_ranks_are_checked_too() -> None:
    ranks = [
        RankFacts(rank=number, host="node0", node=0, local_rank=number, pid=1, shm_device=number) for number in range(2)
    ]
    assert [finding.id for finding in examine(cluster("hgx-h100-8"), ranks).findings] == ["shm-not-shared"]


def test_an_empty_node_is_shown() -> None:
    (node,) = cluster("hgx-h200-4/1")
    empty = Topology(replace(node.snapshot, gpus=(), nics=(), pairs=(), driver=DriverFacts(absent="no driver")))
    report = examine([empty])
    assert report.verdict is Verdict.SKIP
    assert rows(report, "gpus") == rows(report, PairRow.section) == []


def noting(name: str, built: list[str]) -> Callable[..., list[Record]]:
    def build(*_: object) -> list[Record]:
        built.append(name)
        return []

    return build


def test_an_unread_section_builds_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = cluster("hgx-h100-8")
    built: list[str] = []
    for name in ("all_gpu_rows", "rows_by_node", "node_rows", "kind_rows", "all_pair_rows", "rank_rows", "tree_rows"):
        monkeypatch.setattr(topo, name, noting(name, built))
    report = examine(nodes)
    assert built == []
    assert rows(report, "pairs") == []
    assert built == ["all_pair_rows"]


def test_a_node_without_gpus_among_others_with_gpus_is_an_error() -> None:
    nodes = [
        *cluster("hgx-h100-8"),
        Topology(replace(cluster("hgx-h100-8")[0].snapshot, host="bare", gpus=(), pairs=())),
    ]
    report = examine(nodes)
    found = {finding.id: finding for finding in report.findings}
    assert (found["gpu-missing"].severity, found["gpu-missing"].subject) == (Verdict.ERROR, "bare")
    assert report.verdict is Verdict.ERROR


def test_a_report_without_a_judgement_does_not_pass() -> None:
    (node,) = cluster("hgx-h100-8")
    bare = [Topology(replace(node.snapshot, gpus=(), pairs=(), nvswitches=(), nics=()))]
    assert examine(bare).verdict is Verdict.SKIP


def test_another_number_of_gpus_than_expected_fails() -> None:
    nodes = cluster("hgx-h100-8*2")
    assert examine(nodes, expected_gpus=8).findings == ()
    (more,) = examine(nodes, expected_gpus=4).findings
    assert (more.id, more.severity, more.subjects) == ("gpu-model", Verdict.FAIL, ("node0", "node1"))
    (fewer,) = examine(nodes, expected_gpus=16).findings
    assert (fewer.id, fewer.severity) == ("gpu-missing", Verdict.FAIL)
