"""On real GPUs: every collective, type and reduction, graphs, planted faults, and kernels compared with NumPy."""

import csv
import io
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpubench.backends.cuda import CudaDevice, open_device
from gpubench.collectives.pattern import STORAGE, ArrayPattern, Stretch
from gpubench.collectives.registry import COLLECTIVES
from gpubench.model.terms.operation import Block, DataPattern, DataType, ReduceOp
from tests.cli.running import MPI_ENVIRONMENT, ROOT, broken, environment, gpubench, mpirun_command
from tests.gpu.machine import (
    DRIVER,
    RANKS,
    SHARES,
    between_gpus,
    gpu_of_rank,
    has_gpu,
    launch,
    launched,
    several_ranks,
    under_mpirun,
)

ALIKE = 1.0 if SHARES else 0.2
"""Largest difference between the median of a row's batches and its mean. Ranks that share a GPU vary more"""

pytestmark = [pytest.mark.gpu, has_gpu]


def several(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test with jobs of several ranks."""
    for mark in several_ranks:
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return open_device(0, 1, "here", DRIVER)


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_the_kernels_compute_what_the_arrays_do(device: CudaDevice) -> None:
    import numpy as np

    block = Block(row=70_001, buffers=3, stride=700, offset=16, count=600, start=2**32 - 100)
    memory = device.allocate(3 * 700 * 8)
    compared = 0
    for dtype, op, ranks in itertools.product(DataType, [None, *ReduceOp], (1, 2, 3, 4, 8, 13, 100)):
        data = DataPattern(dtype, op, ranks)
        pattern, stretch = ArrayPattern(np, data), Stretch(block.start, block.count, block.seeds())
        storage = STORAGE[dtype.size_bytes]
        for rank in {0, ranks // 2, ranks - 1}:
            memory.fill_byte(memory.size_bytes, 0)
            memory.fill_sent(data, block, rank)
            buffers = memory.array(0, 3 * 700, storage).get().reshape(3, 700)
            assert np.array_equal(buffers[:, 16:616], pattern.sent(rank, stretch)), (data, rank)
            assert not buffers[:, :16].any()
            assert not buffers[:, 616:].any()
            assert memory.count_wrong(data, [(block, rank)]) == 0
            compared += 1
        if op is not None:
            buffers = np.zeros((3, 700), storage)
            buffers[:, 16:616] = pattern.reduced(stretch)
            memory.array(0, 3 * 700, storage).set(buffers.reshape(-1))
            assert memory.count_wrong(data, [(block, None)]) == 0, data
            buffers[1, 20] ^= 4
            buffers[2, 615] ^= 4
            memory.array(0, 3 * 700, storage).set(buffers.reshape(-1))
            assert memory.count_wrong(data, [(block, None)]) == 2, data
    assert compared > 800


@several
def test_every_collective_plain_and_in_graphs_and_every_planted_fault() -> None:
    command = [mpirun_command(1)[0], "-n", str(RANKS), sys.executable, "-m", "tests.gpu.rank", "3"]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=110, env=under_mpirun(), cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    verdicts: dict[str, list[str]] = {}
    for line in result.stdout.splitlines():
        name, _, verdict = line.split()
        verdicts.setdefault(name, []).append(verdict)
    right = {name: ["PASS"] * len(COLLECTIVES) for name in ("cuda-0", "cuda-3", "nccl-0", "nccl-3")}
    right["none"] = ["PASS"] * (7 * 2 + 2)
    spoiled = {name: ["FAIL"] * (7 * 2 + 2) for name in ("wrong-block", "swapped-blocks", "one-bit", "stale")}
    assert verdicts == right | spoiled


@several
def test_a_sweep_of_many_sizes() -> None:
    result = gpubench("allreduce", "--sizes", "8:64M", *launch(), "--format", "csv", env=launched())
    assert result.returncode == 0, result.stderr
    said = result.stderr.splitlines()
    assert len(said) == 1
    assert all(line.startswith("gpubench: fallback: none. ") for line in said)
    found = rows(result.stdout)
    assert len(found) == 24 * 2
    assert {row["wrong"] for row in found} == {"0"}
    assert {row["backend"] for row in found} == {"nccl"}
    assert {row["ranks"] for row in found} == {str(RANKS)}
    assert {row["ranks_per_gpu"] for row in found} == {str(RANKS if SHARES else 1)}


@several
def test_as_many_iterations_as_it_takes() -> None:
    """The row notes what limits the budget. Large sizes need few iterations."""
    asked = ("allreduce", "--sizes", "1K,1M,256M", "--iters", "auto")
    result = gpubench(*asked, *launch(), "--format", "csv", env=launched())
    assert result.returncode == 0, result.stderr
    for row in rows(result.stdout):
        assert float(row["ci95_percent"]) <= 1 or "% takes about " in row["note"]
        assert float(row["batch_median_us"]) == pytest.approx(float(row["time_us"]), rel=ALIKE)
        assert row["wrong"] == "0"
    assert all(int(row["iterations"]) < 200 for row in rows(result.stdout) if int(row["size_bytes"]) == 2**28)


@several
def test_operations_alone() -> None:
    """An operation that is waited for takes longer than one among others."""
    asked = ("allreduce", "--sizes", "1K", *launch(), "--format", "csv")
    alone = rows(gpubench(*asked, "--mode", "latency", env=launched()).stdout)
    among = rows(gpubench(*asked, env=launched()).stdout)
    for one, other in zip(alone, among, strict=True):
        assert float(one["p50_us"]) <= float(one["p95_us"]) <= float(one["p99_us"])
        assert float(one["p50_us"]) > float(other["time_us"])
        assert one["wrong"] == "0"


@several
def test_memory_does_not_grow(tmp_path: Path) -> None:
    """At most 50 MB of host memory between the first and the last row, and no device memory."""
    notes = tmp_path / "notes"
    result = gpubench(
        "allreduce", "--sizes", "8:1G:4", "--iters", "5", *launch(), "--format", "csv",
        env=launched(**broken("0:memory"), GPUBENCH_TEST_FILE=str(notes)),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    noted = [tuple(int(word) for word in line.split()) for line in notes.read_text().splitlines()]
    assert len(noted) > len(rows(result.stdout))  # rows may be measured again
    assert noted[-1][0] - noted[0][0] < 50_000
    assert noted[-1][1] == noted[0][1]


@several
@pytest.mark.parametrize("ranks", [3])
def test_every_type_and_reduction(ranks: int) -> None:
    if not SHARES and ranks > DRIVER.visible:
        pytest.skip("two GPUs, and three ranks would share them")
    result = gpubench(
        "allreduce", "--sizes", "256K", "--iters", "3", "--dtype", ",".join(DataType), "--op", ",".join(ReduceOp),
        *launch(ranks), "--format", "csv", env=launched(),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert [row["wrong"] for row in rows(result.stdout)] == ["0"] * (8 * 5 * 2)


@several
def test_each_rank_may_see_a_single_gpu() -> None:
    script = f"{gpu_of_rank()} exec " + " ".join(
        [sys.executable, "-m", "gpubench", "allreduce", "--sizes", "1K,1M", "--format", "csv"]
    )
    command = [mpirun_command(1)[0], "-n", "2", "bash", "-c", script]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=110, env=under_mpirun(2), cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    assert {row["wrong"] for row in rows(result.stdout)} == {"0"}


def test_two_ranks_on_one_gpu_are_refused() -> None:
    """If there is only one GPU, NCCL has to be told that ranks share it."""
    command = mpirun_command(2, "allreduce", "--sizes", "1K")
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=110,
        env=environment(CUDA_VISIBLE_DEVICES="0", **MPI_ENVIRONMENT), cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 2
    assert ("rank 0-1 on" if SHARES else "would both drive GPU") in result.stderr
    assert "Traceback" not in result.stderr


@between_gpus("one number of ranks has nothing to scale to")
def test_speed_is_compared_over_numbers_of_ranks() -> None:
    """On the first GPUs; a job of one rank copies within its GPU."""
    result = gpubench("allreduce", "--np", "1,2", "--sizes", "64M", "--iters", "5", "--in-place", "--format", "json")
    assert result.returncode in (0, 1), result.stderr
    document = json.loads(result.stdout)
    assert [(row["ranks"], row["wrong"]) for row in document["rows"]] == [(2, 0), (1, 0)]
    alone, both = document["scaling"]
    assert (alone["gpus"], alone["bandwidth_gb_s"]) == ("GPU0", None)
    assert (both["gpus"], both["bandwidth_gb_s"] > 0, both["efficiency_percent"]) == ("GPU0-1", True, 100)


def test_more_ranks_than_gpus_are_refused() -> None:
    result = gpubench("allreduce", "--np", str(DRIVER.visible + 1))
    assert result.returncode == 2
    assert f"which shows {DRIVER.visible} GPU" in result.stderr
    under = subprocess.run(
        mpirun_command(DRIVER.visible + 1, "allreduce"), capture_output=True, text=True, check=False, timeout=110,
        env=environment(**MPI_ENVIRONMENT), cwd=ROOT,
    )  # fmt: skip
    assert under.returncode == 2
    why = "share GPU" if DRIVER.visible == DRIVER.gpus else "would both drive GPU"  # some GPUs of the host are hidden
    assert under.stderr.count(why) == 1


def test_another_nccl_is_measured_and_named() -> None:
    from gpubench.backends.nccl.library import NcclLibrary

    own = NcclLibrary().path
    result = gpubench("allreduce", "--sizes", "1K", "--nccl-library", own, "-v")
    assert result.returncode == 0, result.stderr
    assert f"from {own}" in result.stdout


def test_what_does_not_fit_the_gpu_is_dropped_by_name() -> None:
    result = gpubench("allreduce", "--sizes", "1M,512G", "--format", "csv", "--iters", "2")
    assert result.returncode == 0, result.stderr
    assert re.search(r"not measured: 512G: 2 buffers of that size do not fit; rank \d on \S+ \(GPU \d", result.stderr)
