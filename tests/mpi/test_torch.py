"""Real torch.distributed over Gloo on CPU tensors, under mpirun and torchrun, if torch is installed."""

import json
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import ROOT, environment, gpubench
from tests.formats.schema import VALIDATOR

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(find_spec("torch") is None, reason="needs the user's torch")]

Document = dict[str, Any]


def measured(*arguments: str) -> Document:
    result = gpubench(*arguments, "--format", "json")
    assert result.returncode == 0, result.stderr
    document: Document = json.loads(result.stdout)
    VALIDATOR.validate(document)
    return document


def torchrun(
    *arguments: str, ranks: int = 2, variables: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "gpubench"]
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=ROOT,
        env=environment(**(variables or {})),
    )


@pytest.mark.parametrize("collective", ["reduce", "reducescatter"])
def test_every_type_and_reduction_gives_right_data(collective: str) -> None:
    types = "int8,uint8,int32,int64,float16,bfloat16,float32,float64"
    document = measured(
        *(collective, "--backend", "torch:gloo", "--np", "3", "--dtype", types, "--op", "sum,prod,max,min,avg"),
        *("--sizes", "3K", "--iters", "3"),
    )
    assert len(document["rows"]) == 8 * 5 * 2
    assert {row["wrong"] for row in document["rows"]} == {0}
    assert document["metadata"]["libraries"]["torch"].endswith("(CPUs alone)") or "CUDA" in str(document["metadata"])


def test_torch_beside_mpi_on_cpus_in_one_table(tmp_path: Path) -> None:
    table = tmp_path / "table.txt"
    document = measured(
        *("allreduce", "--backend", "host,torch:gloo", "--sizes", "1K,64K", "--iters", "5", "--output", str(table)),
        "--percentiles",
    )
    assert all(0 < row["p50_us"] <= row["p95_us"] <= row["p99_us"] for row in document["rows"])
    assert all(row["iterations"] == 5 and row["busbw_gb_s"] for row in document["rows"])
    assert [row["backend"] for row in document["rows"]] == ["torch:gloo", "host", "torch:gloo"] * 4
    assert {(row["backend"], row["first"]) for row in document["backends"]} == {("host", "torch:gloo")}
    for row in document["backends"]:
        assert row["speed_percent"] == pytest.approx(100 * row["first_time_us"] / row["time_us"])
    assert "host" in document["sentence"]
    text = table.read_text()
    assert "speed, % of torch:gloo's, float32, sum, in place" in text
    assert "Gloo on CPU buffers: the result does not apply to GPUs or their links" in text
    assert "fastest by size" not in text


def test_torchrun_starts_ranks_without_any_mpi(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    asked = ("gather", "--root", "1", "--backend", "torch:gloo", "--sizes", "1K,64K", "--iters", "5")
    result = torchrun(*asked, "--output", str(output), ranks=3)
    assert result.returncode == 0, result.stdout + result.stderr
    document: Document = json.loads(output.read_text())
    assert {(row["ranks"], row["wrong"]) for row in document["rows"]} == {(3, 0)}
    assert "MPI" not in document["metadata"]["libraries"]
    assert result.stdout.count("gather  backend torch:gloo  3 ranks on 1 host") == 1


@pytest.mark.slow
def test_groups_and_single_operations_under_torchrun(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    asked = ("broadcast", "--root", "1", "--backend", "torch:gloo", "--sizes", "64K", "-n", "10", "--mode", "latency")
    result = torchrun(*asked, "--split", "2", "--output", str(output), ranks=4)
    document: Document = json.loads(output.read_text())
    assert result.returncode == 0, result.stdout + result.stderr
    assert {(row["group"], row["ranks"], row["wrong"]) for row in document["rows"]} == {
        ("ranks 0-1", 2, 0),
        ("ranks 2-3", 2, 0),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "seen"),
    [
        ("0", "1 of 2 ranks came to the store at 127.0.0.1:{port} within 60 s"),
        ("1", "no answer from the store of rank 0 at 127.0.0.1:{port}"),
    ],
)
def test_a_rank_whose_partner_does_not_come_says_who_and_where(rank: str, seen: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    alone = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    result = gpubench("allreduce", "--backend", "torch:gloo", "--timeout", "5", env=environment(**alone))
    assert result.returncode == 3
    assert seen.format(port=port) in result.stderr
    assert "torchrun --standalone --nproc-per-node 2" in result.stderr


def test_what_needs_mpi_is_refused_under_torchrun() -> None:
    result = torchrun("allreduce", "--backend", "host", "--sizes", "1K")
    assert result.returncode != 0
    assert "--backend host under torchrun" in result.stderr
    assert "--backend torch:gloo, or mpirun -n 2" in result.stderr
    assert "this command under torchrun" in torchrun("p2p").stderr


def test_what_torch_lacks_is_said_before_ranks_start_or_by_one_of_them() -> None:
    result = gpubench("allreduce", "--backend", "torch:xccl", "--sizes", "1K")
    assert (result.returncode, result.stderr.count("gpubench: error")) == (3, 1)
    assert "was built without the xccl backend of torch.distributed" in result.stderr
