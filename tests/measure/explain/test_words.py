"""Log lines that decide a verdict: NVLS, refusals, lists of NICs, and the last warning."""

import pytest
from msgspec.structs import replace

from gpubench.formats.text.explain import _total
from gpubench.model.results.fallback import TransportRow
from gpubench.model.terms.verdict import Verdict
from tests.fakes.nccl_logs import Job
from tests.measure.explain.test_report import ids, report_of, via

NODE = Job(ranks=4, per_node=4, via=lambda source, destination, received: None)


def with_multicast(job: Job, ranks: int) -> list[str]:
    return [
        f"{job.log(rank)}{job.head(rank)}NVLS comm {job.handle + rank:#x} headRank {rank} nHeads 4 nvlsRanks 4\n"
        for rank in range(ranks)
    ]


def test_multicast_memory_connects_no_rank_that_does_not_say_so_and_no_two_nodes() -> None:
    assert ids(report_of(*with_multicast(NODE, 3))) == ["ranks-missing"]
    assert ids(report_of(*with_multicast(NODE, 3), NODE.log(3))) == ["ranks-silent"]
    two_nodes = replace(NODE, per_node=2)
    assert ids(report_of(*with_multicast(two_nodes, 4))) == ["ranks-silent"]


@pytest.mark.parametrize(
    "text", ["Cuda failure 2 'out of memory'", "Failed to bind NVLink SHARP (NVLS) Multicast memory: CUDA error 2"]
)
def test_multicast_groups_that_are_used_up_are_not_memory_that_is(text: str) -> None:
    warning = f"{NODE.head(0).replace('NCCL INFO ', '')}transport/nvls.cc:245 NCCL WARN {text}\n"
    report = report_of(*with_multicast(NODE, 4), warning)
    assert ids(report)[0] == "nvls-slots-used-up"
    assert "NCCL_NVLS_ENABLE" in report.findings[0].next_command


STAGED = Job(via=via(inside="SHM/direct/direct"))


def test_the_refusal_of_several_pairs_is_one_finding() -> None:
    notes = {rank: [f"P2P not supported between GPU{rank % 2} and GPU{1 - rank % 2}"] for rank in range(4)}
    report = report_of(*replace(STAGED, notes_of=notes).logs())
    assert [finding.cause.partition(":")[0] for finding in report.findings] == ["gpu-without-pcie-p2p"]


def test_vllm_says_that_the_driver_refuses_peer_access() -> None:
    line = "WARNING Custom allreduce is disabled because your platform lacks GPU P2P capability or P2P test failed.\n"
    report = report_of(*STAGED.logs(), line)
    assert report.verdict is Verdict.WARN
    assert report.findings[0].cause.startswith("gpu-without-pcie-p2p: ")


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("NET/IB : GPU Direct RDMA Disabled for GPU 0[0] / HCA 0 'mlx5_0' (distance 4 >= 3)", "gpudirect-too-far"),
        ("NET/IB : GPU Direct RDMA Disabled for GPU 0[0] / HCA 0 'mlx5_0'", "gpudirect-refused"),
    ],
)
def test_gpudirect_that_nccl_2_4_names_by_gpu_and_adapter_is_the_cause(line: str, cause: str) -> None:
    report = report_of(*Job(via=via(across="NET/IB/0"), notes=[line]).logs())
    assert report.findings[0].cause.startswith(f"{cause}: ")


ONE, TWO = "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:192.0.2.1<0>", "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB"


def test_ranks_with_fewer_adapters_are_a_doubt() -> None:
    report = report_of(*Job(notes_of={0: [ONE], 1: [ONE], 2: [TWO], 3: [TWO]}).logs())
    assert (report.verdict, ids(report)) == (Verdict.WARN, ["nccl-nics-differ"])
    assert report.findings[0].subject == "nodeA:100, nodeA:101"
    assert ids(report_of(*Job(notes=[TWO]).logs())) == []
    ignored = (
        "Detected mixed local Net device counts across ranks (min 1, max 2). Ignoring due to NCCL_IGNORE_NET_MISMATCH."
    )
    assert ids(report_of(*Job(notes=[ignored]).logs())) == ["nccl-nics-differ"]


def test_an_adapter_that_does_not_open_is_a_doubt() -> None:
    report = report_of(*Job(notes=[ONE, "NET/IB : Unable to open device mlx5_3"]).logs())
    assert (report.verdict, ids(report)) == (Verdict.WARN, ["rdma-nic-not-opened"])


@pytest.mark.parametrize("devices", ["[0]mlx5_0:1/IB [1]mlx5_1:1/RoCE", "[0]mlx5_0:1/IB [1]mlx5_1:1/IB"])
def test_adapters_of_two_fabrics_are_the_likely_reason_of_error_12(devices: str) -> None:
    job = Job(notes=[f"NET/IB : Using {devices} [RO]; OOB eth0:192.0.2.1<0>"])
    error = f"{job.head(0).replace('INFO', 'WARN')}NET/IB : Got completion from peer with status=12 opcode=0\n"
    finding = report_of(*job.logs(), error).findings[0]
    assert finding.id == "rdma-retry-exceeded"
    assert ("InfiniBand and RoCE" in finding.cause) is ("RoCE" in devices)


@pytest.mark.parametrize("per_node", [1, 2])
def test_a_run_that_did_not_end_blames_peer_access_only_where_a_node_has_two_ranks(per_node: int) -> None:
    job = Job(per_node=per_node, hosts=("a", "b", "c", "d"), via=via(across="NET/IB/0/GDRDMA"))
    if per_node == 1:
        job = replace(job, via=lambda source, destination, received: "NET/IB/0/GDRDMA")
    header = "# nThread 1 nGpus 1 minBytes 8 maxBytes 8 step: 2(factor) warmup iters: 1\n"
    finding = report_of(*job.logs(), header).findings[0]
    assert finding.id == "nccl-tests-unfinished"
    assert ("peer access" in finding.cause) is (per_node == 2)


def test_paths_in_doubt_count_as_paths_through_host_memory() -> None:
    row = TransportRow(
        communicator=None,
        scope="network",
        transport="NET/IB",
        pairs=2,
        channels_least=1,
        channels_most=1,
        host_staged=True,
        verdict="WARN",
        first=((0, 1),),
    )
    assert _total([row]) == "through host memory: 2 of 2 paths"
