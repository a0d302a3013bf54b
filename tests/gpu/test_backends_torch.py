"""On real GPUs: torch.distributed together with NCCL, Gloo through host memory, and MPI on GPU memory."""

import json
from importlib.util import find_spec
from typing import Any

import pytest

from tests.cli.running import gpubench
from tests.gpu.machine import SHARES, launch, launched, several_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.mpi, *several_ranks]
with_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs the user's torch")

BUILT_WITH = "torch tells the NCCL that it was built with, not the newer one with which ranks share a GPU"

Document = dict[str, Any]


def measured(*arguments: str, code: int = 0) -> Document:
    result = gpubench(*arguments, *launch(), "--format", "json", env=launched())
    assert result.returncode == code, result.stderr
    document: Document = json.loads(result.stdout)
    return document


@with_torch
@pytest.mark.skipif(SHARES, reason=BUILT_WITH)
def test_the_framework_its_library_and_gloo_in_one_table() -> None:
    document = measured("allreduce", "--sizes", "1K,16M", "--backend", "nccl,torch:nccl,torch:gloo", "--iters", "10")
    assert {row["wrong"] for row in document["rows"]} == {0}
    assert [row["backend"] for row in document["rows"][:4]] == ["nccl", "torch:nccl", "torch:gloo", "nccl"]
    of_torch = [row for row in document["rows"] if row["backend"] == "torch:nccl"]
    assert all(row["issue_us"] > 0 for row in of_torch)
    assert document["metadata"]["options"]["clock"] == "gate", "both by the same clock"
    libraries = document["metadata"]["libraries"]
    assert "gate" not in libraries, "this driver has one"
    assert libraries["torch's NCCL"] == libraries["NCCL"], "a process has one libnccl.so.2: here torch's own"
    beside = [row for row in document["backends"] if row["backend"] == "torch:nccl"]
    assert {row["transport"] for row in beside} == {row["first_transport"] for row in beside} != {None}
    assert "torch:nccl" in document["sentence"]
    for row in document["backends"]:
        print(row["size_bytes"], row["placement"], row["backend"], f"{row['speed_percent']:.1f} %")  # noqa: T201


@with_torch
@pytest.mark.parametrize("collective", ["allgather", "reducescatter", "broadcast", "reduce", "alltoall", "scatter"])
def test_other_collectives_of_torch(collective: str) -> None:
    document = measured(collective, "--sizes", "1K,1M", "--backend", "torch:nccl,torch:gloo", "--iters", "5")
    assert {row["wrong"] for row in document["rows"]} == {0}
    assert {row["backend"] for row in document["rows"]} == {"torch:nccl", "torch:gloo"}
    assert document["refused"] == []


@with_torch
@pytest.mark.parametrize("replays", [(), ("--iters", "5", "--graph", "3")], ids=["plain", "in a graph"])
def test_symmetric_memory_by_both_kernels(replays: tuple[str, ...]) -> None:
    types = "float32,bfloat16"
    document = measured("allreduce", "--sizes", "8,8K,1M", "--backend", "torch:symm", "--dtype", types, *replays)
    assert {row["wrong"] for row in document["rows"]} == {0}
    ways = {(row["size_bytes"], row["setting"], row["algorithm"]) for row in document["rows"]}
    assert {(8192, None, "one-shot"), (8192, "two-shot", "two-shot")} < ways
    assert {(2**20, None, "two-shot"), (2**20, "one-shot", "one-shot")} < ways
    assert document["refused"] == []
    assert document["verdict"] in ("PASS", "WARN"), document["findings"]


@with_torch
@pytest.mark.skipif(SHARES, reason="torch's NCCL does not get through a collective of ranks that share a GPU")
def test_one_table_names_the_fastest_by_size_in_graphs() -> None:
    asked = ("--sizes", "8K:8M", "--backend", "nccl,torch:nccl,torch:symm", "--graph", "10")
    document = measured("allreduce", *asked)
    assert {row["wrong"] for row in document["rows"]} == {0}
    assert {row["graph"] for row in document["rows"]} == {10}
    assert "clock" not in document["metadata"]["options"], "all are timed by the host, which replays a graph"
    best = document["winners"]
    assert {row["candidates"] for row in best} == {4}
    assert len(best) == 2 * len({row["size_bytes"] for row in best}) == 2 * 11
    for row in best:
        times = f"{row['time_us']:.2f} µs, nccl {row['own_time_us']:.2f}"
        print(row["size_bytes"], row["placement"], row["fastest"], times)  # noqa: T201


@with_torch
def test_what_symmetric_memory_cannot_do_is_refused_in_one_message() -> None:
    for asked, said in {
        ("allgather",): "allgather with --backend torch:symm",
        ("allreduce", "--dtype", "float16"): "--dtype float16 with --backend torch:symm",
        ("allreduce", "--op", "max"): "--op max with --backend torch:symm",
    }.items():
        result = gpubench(*asked, "--sizes", "1K", "--backend", "torch:symm", *launch(), env=launched())
        assert (result.returncode, result.stderr.count("gpubench: error")) == (2, 1), result.stderr
        assert said in result.stderr


@with_torch
def test_gloo_goes_through_the_host_by_design() -> None:
    document = measured("allreduce", "--sizes", "1M,16M", "--backend", "torch:gloo", "--iters", "5")
    assert document["verdict"] == "PASS"
    (fallback,) = document["fallback"]
    assert (fallback["conclusion"], fallback["verdict"]) == ("staged", "SKIP")
    assert "Gloo copies CUDA tensors to host memory" in fallback["cause_seen"]
    assert {row["by_design"] for row in document["evidence"]} != {None}


def test_mpi_is_tried_before_it_is_handed_gpu_memory() -> None:
    asked = ("sendrecv", "--backend", "mpi", "--sizes", "1M")
    result = gpubench(*asked, *launch(), "--format", "json", env=launched())
    document: Document = json.loads(result.stdout)
    trials = {row["operation"]: row["outcome"] for row in document["mpi_support"]}
    assert len(trials) == 9
    print(trials, document["metadata"]["libraries"]["MPI on GPU memory"])  # noqa: T201
    works = all(row["outcome"] == "right" for row in document["mpi_support"] if row["operation"] == "sendrecv")
    assert bool(document["rows"]) == works
    assert result.returncode == (0 if works else 1)
    if not works:
        assert "mpi-not-cuda-aware" in [each["id"] for each in document["findings"]]
