"""On real GPUs: another process that computes, copies or holds memory during a measurement is named."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cli.running import ROOT, gpubench
from tests.gpu.machine import LAST_GPU, SHARES, between_gpus, launch, launched, several_ranks

OF_OTHERS = {"foreign-nvlink-traffic", "foreign-pcie-traffic", "gpu-in-use", "memory-in-use"}
SIZES = ("--sizes", "1K,64M,256M")

pytestmark = [pytest.mark.gpu, pytest.mark.mpi, *several_ranks]

BOTH_COMMANDS = [(), pytest.param(("p2p", "--sizes", "64M"), marks=between_gpus("copies from one to the other"))]

Document = dict[str, Any]

COMPUTES = """
import cupy
with cupy.cuda.Device({gpu}):
    a = cupy.ones((8192, 8192), "float16")
    cupy.cuda.get_current_stream().synchronize()
    print("ready", flush=True)
    while True:
        for _ in range(20):
            a @ a
        cupy.cuda.get_current_stream().synchronize()
"""

COPIES = """
import cupy
size = 2**30
def memory(gpu):
    with cupy.cuda.Device(gpu):
        return cupy.zeros(size, "uint8")
source, destination = memory(0), memory(1)
with cupy.cuda.Device(0):
    cupy.cuda.runtime.deviceEnablePeerAccess(1)
    stream = cupy.cuda.Stream(non_blocking=True)
    print("ready", flush=True)
    while True:
        for _ in range(20):
            cupy.cuda.runtime.memcpyPeerAsync(destination.data.ptr, 1, source.data.ptr, 0, size, stream.ptr)
        stream.synchronize()
"""

FROM_HOST = """
import cupy
size = 2**28
host = cupy.cuda.alloc_pinned_memory(size)
with cupy.cuda.Device({gpu}):
    there, stream = cupy.zeros(size, "uint8"), cupy.cuda.Stream(non_blocking=True)
    print("ready", flush=True)
    while True:
        for _ in range(20):
            cupy.cuda.runtime.memcpyAsync(there.data.ptr, host.ptr, size, 1, stream.ptr)
        stream.synchronize()
"""

HOLDS = """
import cupy, time
with cupy.cuda.Device({gpu}):
    free, _ = cupy.cuda.runtime.memGetInfo()
    held = cupy.cuda.runtime.malloc(free - 4 * 2**30)
    print("ready", flush=True)
    time.sleep(600)
"""


@contextmanager
def another(script: str, gpu: int = LAST_GPU) -> Iterator[int]:
    """Run a script in another process, and yield its pid."""
    text = script.replace("{gpu}", str(gpu))
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()


def measured(*arguments: str, **variables: str) -> Document:
    command = arguments or ("allreduce", *SIZES, *launch())
    result = gpubench(*command, "--format", "json", env=launched(**variables))
    assert result.stdout, result.stderr
    document: Document = json.loads(result.stdout)
    return document


def of_others(document: Document) -> dict[str, Document]:
    return {each["id"]: each for each in document["causes"] if each["id"] in OF_OTHERS}


def rates(cause: Document) -> list[float]:
    return [float(each) for each in re.findall(r"([0-9.e+]+) GB/s", cause["evidence"])]


@pytest.mark.parametrize("command", BOTH_COMMANDS)
def test_on_idle_gpus_nobody_is_found(command: tuple[str, ...]) -> None:
    document = measured(*command)
    assert of_others(document) == {}
    seen = {each["measurement"] for each in document["evidence"]}
    assert seen == {"absent" if SHARES else "present"}, "between ranks of one GPU nothing passes a link"


@pytest.mark.parametrize("command", BOTH_COMMANDS)
def test_a_process_that_computes_is_named(command: tuple[str, ...]) -> None:
    with another(COMPUTES) as pid:
        cause = of_others(measured(*command))["gpu-in-use"]
    assert cause["confidence"] == "proven"
    assert cause["evidence"].startswith(f"GPU{LAST_GPU} is in use by ")
    assert f"process {pid} (python" in cause["evidence"] or "not visible here" in cause["evidence"]


@between_gpus("copies from one to the other")
@pytest.mark.parametrize("command", [(), ("p2p", "--sizes", "64M", "--pairs", "0-1,1-0")])
def test_copies_of_another_process_are_named_and_no_proof_of_a_path(command: tuple[str, ...]) -> None:
    with another(COPIES):
        document = measured(*command)
    cause = of_others(document)["foreign-nvlink-traffic"]
    assert cause["confidence"] == "proven"
    assert "GPU0 sends" in cause["evidence"]
    assert re.search(r"GPU1 (sends [\d.]+ and )?receives", cause["evidence"])
    assert min(rates(cause)) > 100
    source, destination = ("0", "1") if not command else ("GPU0", "GPU1")
    (row,) = [
        each
        for each in document["evidence"]
        if (each["source"].removeprefix("rank "), each["destination"].removeprefix("rank ")) == (source, destination)
    ]
    assert row["measurement"] == "absent" or "PCIe counters showed no traffic" in row["measurement_seen"]
    assert "another program uses these links" in row["measurement_seen"]


def test_copies_from_host_memory_are_named() -> None:
    with another(FROM_HOST):
        cause = of_others(measured())["foreign-pcie-traffic"]
    assert re.search(rf"GPU{LAST_GPU} (sends [\d.]+ and )?receives", cause["evidence"])
    assert max(rates(cause)) > 10


def test_who_holds_the_memory_is_said_where_a_size_does_not_fit() -> None:
    with another(HOLDS) as pid:
        result = gpubench("allreduce", "--sizes", "1K,8G", *launch(), env=launched())
    said = result.stdout + result.stderr
    assert "other processes use its memory: " in said
    assert f"process {pid} (python" in said or "not visible here" in said


def test_the_time_to_issue_is_known_and_is_all_of_it_where_launches_block() -> None:
    healthy, blocked = (measured(**variables)["rows"] for variables in ({}, {"CUDA_LAUNCH_BLOCKING": "1"}))
    small, large = healthy[0], healthy[-1]
    # The slowest rank's time to issue and the mean time of all ranks. If the host limits, they are about equal.
    assert 0 < small["issue_us"] < 1.2 * small["time_us"]
    assert large["issue_us"] < 0.2 * large["time_us"]
    assert all(row["issue_us"] > 0.8 * row["time_us"] for row in blocked)
