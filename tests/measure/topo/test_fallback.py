"""Expected paths and their causes."""

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from gpubench.measure.topo import examine
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import GpuFacts, PairFacts, PciPlace, Snapshot
from gpubench.model.paths.topology import Topology
from gpubench.model.results.report import FallbackRow, Report
from gpubench.model.terms.verdict import Verdict
from gpubench.readers.machines.topo_matrix import read as read_topo_matrix
from gpubench.simulated.machine import parse_machine, snapshots


def facts(
    environment: Mapping[str, str] = {}, rank: int = 0, shm_device: int = 7, conf: Mapping[str, str] = {}
) -> RankFacts:
    return RankFacts(
        rank=rank, host="node0", node=0, local_rank=rank, pid=9, shm_device=shm_device,
        environment=environment, nccl_files={"/etc/nccl.conf": conf},
    )  # fmt: skip


def rows(report: Report) -> list[FallbackRow]:
    return report.rows(FallbackRow)


def looked_at(node: Snapshot, *ranks: RankFacts) -> Report:
    return examine([Topology(node)], ranks)


def h200s(gpus: int = 4) -> Snapshot:
    return snapshots(parse_machine(f"hgx-h200-{gpus}"))[0]


def over_pcie(path: str) -> Snapshot:
    place = PciPlace(host_bridge="pci0000:00", numa_node=0)
    gpus = tuple(GpuFacts(index=n, bus_id=f"0000:0{n}:00.0", name="L40S", nvlinks=(), place=place) for n in range(2))
    pairs = [
        PairFacts(source=f"GPU{one}", destination=f"GPU{1 - one}", path=path, cuda=True, read="OK", write="OK")
        for one in range(2)
    ]
    return replace(h200s(2), gpus=gpus, pairs=tuple(pairs), nvswitches=())


@pytest.mark.parametrize("environment", [{"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_LEVEL": "LOC"}])
def test_a_variable_that_keeps_nccl_off_nvlinks_is_named(environment: dict[str, str]) -> None:
    report = looked_at(h200s(), facts(environment))
    (row,) = rows(report)
    name, value = next(iter(environment.items()))
    assert (row.conclusion, row.cause, row.advice) == (
        "direct impossible",
        "nccl-p2p-disabled",
        f"gpubench p2p && unset {name}",
    )
    assert row.cause_seen == f"{name}={value} in the environment"
    (finding,) = [each for each in report.findings if each.id == "nccl-p2p-disabled"]
    assert (finding.severity, len(finding.subjects)) == (Verdict.FAIL, 12)
    assert report.verdict is Verdict.FAIL
    assert looked_at(h200s(), facts(environment)).verdict is Verdict.FAIL


def test_a_configuration_file_is_blamed_unless_the_environment_overrides_it() -> None:
    (row,) = rows(looked_at(h200s(), facts(conf={"NCCL_P2P_DISABLE": "1"})))
    assert row.cause_seen == "NCCL_P2P_DISABLE=1 in /etc/nccl.conf"
    assert (
        row.advice
        == "gpubench p2p && grep -nE 'NCCL_P2P_DISABLE' /etc/nccl.conf. Remove NCCL_P2P_DISABLE from /etc/nccl.conf."
    )
    (row,) = rows(looked_at(h200s(), facts({"NCCL_P2P_DISABLE": "0"}, conf={"NCCL_P2P_DISABLE": "1"})))
    assert row.conclusion == "direct possible"
    ranks = facts({"NCCL_P2P_DISABLE": "1"}), facts(rank=1, conf={"NCCL_P2P_DISABLE": "1"})
    (row,) = rows(looked_at(h200s(), *ranks))
    assert row.cause_seen == "NCCL_P2P_DISABLE=1 in the environment and /etc/nccl.conf"
    assert row.advice == "gpubench p2p && unset NCCL_P2P_DISABLE. Remove NCCL_P2P_DISABLE from /etc/nccl.conf too."


@pytest.mark.parametrize("environment", [{"NCCL_P2P_DISABLE": "0"}, {"NCCL_P2P_LEVEL": "NVL"}, {"NCCL_P2P_LEVEL": "?"}])
def test_a_variable_that_changes_nothing_is_not_blamed(environment: dict[str, str]) -> None:
    (row,) = rows(looked_at(h200s(), facts(environment)))
    assert row.conclusion == "direct possible"


@pytest.mark.parametrize(
    ("path", "environment", "cause"),
    [
        ("PIX", {}, None),
        ("PXB", {}, None),
        ("PHB", {}, "nccl-default-level"),
        ("NODE", {}, "nccl-default-level"),
        ("SYS", {}, "nccl-default-level"),
        ("PXB", {"NCCL_P2P_LEVEL": "PIX"}, "nccl-p2p-disabled"),
        ("PIX", {"NCCL_P2P_LEVEL": "PIX"}, None),
        ("NODE", {"NCCL_P2P_LEVEL": "PHB"}, None),
        ("SYS", {"NCCL_P2P_LEVEL": "PHB"}, "nccl-default-level"),
        ("SYS", {"NCCL_P2P_LEVEL": "SYS"}, None),
    ],
)
def test_nccl_p2p_level_limits_the_distance(path: str, environment: dict[str, str], cause: str | None) -> None:
    (row,) = rows(looked_at(over_pcie(path), facts(environment)))
    assert row.cause == cause
    assert row.verdict == {None: "PASS", "nccl-default-level": "SKIP", "nccl-p2p-disabled": "FAIL"}[cause]


def test_a_refusal_of_the_driver_has_a_cure() -> None:
    node = h200s(2)
    refused = tuple(replace(pair, cuda=False, read="NS", write="NS") for pair in node.pairs)
    (ready,) = rows(looked_at(replace(node, pairs=refused), facts()))
    assert (ready.cause, ready.verdict) == ("peer-access-refused", "FAIL"), "NVML says that the fabric is ready"
    untold = tuple(replace(gpu, fabric=None) for gpu in node.gpus)
    report = looked_at(replace(node, gpus=untold, pairs=refused), facts())
    (row,) = rows(report)
    assert (row.cause, row.verdict) == ("fabric-not-ready", "FAIL")
    assert "NVSwitches are active, but the driver refuses" in str(row.cause_seen)
    assert "nvidia-fabricmanager" in str(row.advice)
    assert [finding.id for finding in report.findings] == ["peer-access-refused"]


TEXT = """\tGPU0\tGPU1\tGPU2
GPU0\t X \tPXB\tSYS
GPU1\tPXB\t X \tPHB
GPU2\tSYS\tPHB\t X
"""


def test_topo_m_shows_no_design_if_a_pair_is_nearer() -> None:
    (row,) = rows(looked_at(read_topo_matrix(TEXT, "topo.txt")))
    assert (row.conclusion, row.count, row.cause) == ("unknown", 6, None)
    assert row.how == "PXB, SYS, PHB; peer access not known: nvidia-smi topo -p2p r shows it"
    (row,) = rows(looked_at(read_topo_matrix(TEXT.replace("PXB", "NODE"), "topo.txt")))
    assert (row.conclusion, row.verdict, row.cause) == ("direct impossible", "SKIP", "nccl-default-level")
    assert "NCCL uses peer access only up to path class PXB" in str(row.cause_seen)


def test_two_gpus_on_an_unknown_processor_may_be_on_amd() -> None:
    node = read_topo_matrix("\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tSYS\t X\n", "topo.txt")
    (row,) = rows(looked_at(node))
    assert (row.conclusion, row.cause) == ("unknown", None)
    on_intel = replace(node, machine=replace(node.machine, cpu="GenuineIntel family 6"))
    (row,) = rows(looked_at(on_intel))
    assert (row.conclusion, row.cause) == ("direct impossible", "nccl-default-level")
