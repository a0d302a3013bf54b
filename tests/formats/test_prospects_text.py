"""What topo says would be: which pairs and nodes fall back, which are slow, and because of what."""

import pytest
from msgspec.structs import replace

from gpubench.formats.table import other_lines, prospect_lines
from gpubench.measure.topo import examine
from gpubench.model.facts.snapshot import GpuDirectFacts
from gpubench.model.paths.topology import Topology
from gpubench.model.results.report import Report
from gpubench.model.terms.verdict import Verdict
from tests.fakes.planted import Job, simulated, with_nodes, with_ranks


def looked_at(job: Job) -> Report:
    return examine([Topology(node) for node in job.nodes], job.ranks)


def lines(job: Job) -> list[str]:
    return [line.removeprefix("fallback (simulated): ") for _, line in prospect_lines(looked_at(job))]


def others(job: Job) -> list[str]:
    return [line for _, line in other_lines(looked_at(job))]


def set_on(job: Job, *ranks: int, **environment: str) -> Job:
    return with_ranks(job, lambda each: replace(each, environment={**each.environment, **environment}), *ranks)


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (
            set_on(simulated("hgx-h100-8*2"), NCCL_IB_DISABLE="1"),
            (
                "node0-1 → other nodes would fall back, because NCCL_IB_DISABLE=1 in the environment: sockets between "
                "nodes, nccl-ib-disabled"
            ),
        ),
        (
            with_nodes(
                simulated("hgx-h100-8*2"), lambda node: replace(node, gpudirect=GpuDirectFacts(peermem=False)), 1
            ),
            (
                "node1 → other nodes would fall back, because GPUDirect RDMA is possible on other nodes, but not "
                "known to be possible here: RDMA through host memory, gpudirect-one-side"
            ),
        ),
    ],
    ids=["sockets", "RDMA through host memory"],
)
def test_nodes_whose_way_to_others_would_fall_back(job: Job, said: str) -> None:
    inside, between = lines(job)
    assert inside.startswith("no pair inside a node would fall back: ")
    assert between == said


def test_one_port_of_many_that_is_down_is_slow_and_no_fallback() -> None:
    one = simulated("hgx-h100-8*2", "node1.nic2:state=down")
    assert len(lines(one)) == 1
    assert others(one) == ["node1 mlx5_2 would be slow, because port is down (rdma-port-down)"]
    every = simulated("hgx-h100-8*2", *(f"node1.nic{number}:state=down" for number in range(8)))
    assert "node1 → other nodes would fall back, because" in lines(every)[1]


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (
            simulated("hgx-h200-4", "gpu2:throttle=hw_slowdown"),
            "GPU2 would be slow, because clocks lowered: hw slowdown",
        ),
        (set_on(simulated("hgx-h200-4"), NCCL_ALGO="Ring"), "this job might be slow, because NCCL_ALGO=Ring in"),
        (set_on(simulated("hgx-h200-4"), NCCL_SHM_DISABLE="1"), "would use a network inside a node if there is no"),
        (set_on(simulated("hgx-h200-4"), UCX_TLS="rc,sm"), "would be copied through host memory by MPI, UCX or a"),
    ],
    ids=["slow", "perhaps slow", "a network inside", "copied by MPI"],
)
def test_what_does_not_stage_is_worded_otherwise(job: Job, said: str) -> None:
    (line,) = others(job)
    assert said in line
    assert all("no pair would fall back" in each for each in lines(job))


def test_settings_between_nodes_are_findings_where_there_are_several() -> None:
    job = set_on(simulated("hgx-h100-8*2"), NCCL_IB_DISABLE="1")
    (finding,) = [each for each in looked_at(job).findings if each.id == "nccl-ib-disabled"]
    assert (finding.severity, finding.next_command) == (
        Verdict.FAIL,
        "env -u NCCL_IB_DISABLE gpubench allreduce && unset NCCL_IB_DISABLE",
    )
    alone = set_on(simulated("hgx-h100-8"), NCCL_IB_DISABLE="1")
    assert [each.id for each in looked_at(alone).findings] == []
    assert "node0 → other nodes would fall back" in lines(alone)[1]
