"""MPI on GPU memory with fake GPUs: fully, partly or not supported, and together with NCCL."""

from pathlib import Path

import pytest

from tests.cli.running import gpubench
from tests.mpi.jobs import document_of, on_fake_gpus

pytestmark = pytest.mark.mpi

FEW = ("--iters", "3", "--warmup", "1", "--format", "json")
SMALL = ("--sizes", "1K,64K", *FEW)
COUNTED = ("--sizes", "1K,1M", *FEW)
"""With a size that is large enough for traffic counters"""


def test_an_mpi_that_crashes_is_a_finding_and_no_crash(tmp_path: Path) -> None:
    text = tmp_path / "table.txt"
    asked = ("allreduce", "--backend", "mpi", *SMALL, "--output", str(text))
    result = on_fake_gpus(*asked, GPUBENCH_TEST_MPI_CRASHES="allreduce,reduce")
    assert result.returncode == 1, result.stderr
    document = document_of(result)
    assert document["rows"] == []
    assert document["verdict"] == "FAIL"
    found, nothing = document["findings"]
    assert (found["id"], found["severity"]) == ("mpi-not-cuda-aware", "FAIL")
    assert found["seen"].startswith("allreduce of 1K on GPU memory crashed: signal 11 (SIGSEGV); 1 other operation")
    assert nothing["id"] == "not-measured"
    assert len(document["mpi_support"]) == 9 * 2
    assert document["metadata"]["libraries"]["MPI on GPU memory"] == "Open MPI v4.1.6: MPIX_Query_cuda_support no"
    table = text.read_text()
    assert "MPI on GPU memory, each operation in a separate job" in table
    assert "crashed  not tried" in table


def test_an_mpi_that_takes_the_operation_is_measured_and_its_path_judged_by_counters() -> None:
    result = on_fake_gpus("allreduce", "--backend", "mpi", *COUNTED, GPUBENCH_TEST_MPI_CRASHES="reduce")
    assert result.returncode == 0, result.stderr
    document = document_of(result)
    assert {(row["backend"], row["wrong"]) for row in document["rows"]} == {("mpi", 0)}
    (finding,) = [each for each in document["findings"] if each["id"] == "mpi-not-cuda-aware"]
    assert finding["severity"] == "WARN"
    (fallback,) = document["fallback"]
    assert "MPI moves the data, not NCCL" in fallback["how"]
    assert (fallback["conclusion"], fallback["transport"]) == ("direct", None)


@pytest.mark.slow
def test_an_aware_mpi_that_goes_through_the_host_fails() -> None:
    result = on_fake_gpus("allreduce", "--backend", "mpi", *COUNTED, logs="p2p-disabled")
    document = document_of(result)
    (staged,) = [each for each in document["findings"] if each["id"] == "host-staged"]
    assert staged["severity"] == "FAIL"
    assert document["fallback"][0]["conclusion"] == "staged"


def test_beside_nccl_it_is_left_out_or_held_against_it() -> None:
    asked = ("allreduce", "--backend", "nccl,mpi,host", *SMALL)
    left_out = document_of(on_fake_gpus(*asked, GPUBENCH_TEST_MPI_CRASHES="allreduce"))
    (refused,) = left_out["refused"]
    assert (refused["backend"], refused["size_bytes"]) == ("mpi", None)
    assert refused["reason"].startswith("allreduce of 1K on GPU memory crashed")
    assert {row["backend"] for row in left_out["backends"]} == {"host"}
    both = document_of(on_fake_gpus("allreduce", "--backend", "nccl,mpi", "--percentiles", *SMALL))
    assert all(0 < row["p50_us"] <= row["p95_us"] <= row["p99_us"] for row in both["rows"])
    assert [row["backend"] for row in both["rows"]] == ["nccl", "mpi", "nccl"] * 4
    assert {(row["backend"], row["first"]) for row in both["backends"]} == {("mpi", "nccl")}
    assert both["refused"] == []


@pytest.mark.slow
def test_a_recording_of_several_backends_is_told_again_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "recorded"
    asked = ("allreduce", "--backend", "nccl,mpi,host", *SMALL, "--record", str(folder))
    measured = document_of(on_fake_gpus(*asked))
    again = document_of(gpubench("allreduce", "--replay", str(folder), "--format", "json"))
    assert [row["backend"] for row in again["rows"]] == [row["backend"] for row in measured["rows"]]
    assert again["backends"] == [{**row, "origin": "recorded"} for row in measured["backends"]]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--backend", "mpi", "--graph", "3"), "--graph with --backend mpi"),
        (("--backend", "nccl,torch:gloo", "--graph", "3"), "--graph with --backend torch:gloo"),
        (("--backend", "mpi", "--algo", "ring"), "--algo with --backend mpi"),
        (("--backend", "mpi", "--dtype", "bfloat16"), "--dtype bfloat16 with the mpi backend"),
        (("--backend", "torch:gloo", "--nccl-library", "README.md"), "--nccl-library with --backend torch:gloo"),
        (("--backend", "torch:mccl"), "torch:mccl"),
    ],
)
def test_what_a_backend_lacks_is_refused(asked: tuple[str, ...], said: str) -> None:
    result = on_fake_gpus("allreduce", *asked, "--sizes", "1K")
    assert (result.returncode, result.stderr.count("gpubench: error")) == (2, 1), result.stderr
    assert said in result.stderr
