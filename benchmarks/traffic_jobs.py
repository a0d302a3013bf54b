"""Run a job with one kind of traffic, for a watch of this host's GPUs: `python -m benchmarks.traffic_jobs KIND`.

The jobs are like those of users: PyTorch processes that reduce gradients, load data, write checkpoints or answer
requests, and a CuPy process that copies between GPUs. `inference` starts a job per GPU; `training`, `waiting`,
`loading` and `checkpoint` start one job with a process per GPU and torchrun's variables. The environment decides
whether they are staged:

    python -m benchmarks.traffic_jobs training --seconds 20
    NCCL_P2P_DISABLE=1 python -m benchmarks.traffic_jobs training --seconds 20
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

ELEMENTS = 2**27
"""Per buffer: 256 MiB in half precision."""

Step = Callable[[], object]


def training(torch: Any, _rank: int) -> Step:
    """Compute gradients and reduce them by bucket, as DistributedDataParallel does."""
    layer = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    buckets = [torch.ones(ELEMENTS // 8, dtype=torch.bfloat16, device="cuda") for _ in range(4)]

    def step() -> None:
        works = []
        for bucket in buckets:
            layer @ layer
            works.append(torch.distributed.all_reduce(bucket, async_op=True))
        for work in works:
            work.wait()
        torch.cuda.synchronize()

    return step


def loading(torch: Any, _rank: int) -> Step:
    """Load batches from pinned host memory."""
    batch = torch.ones(ELEMENTS, dtype=torch.bfloat16).pin_memory()
    return lambda: (batch.to("cuda", non_blocking=True), torch.cuda.synchronize())


def checkpoint(torch: Any, _rank: int) -> Step:
    """Save weights to pinned host memory."""
    weights = torch.ones(ELEMENTS, dtype=torch.bfloat16, device="cuda")
    saved = torch.empty_like(weights, device="cpu", pin_memory=True)
    return lambda: (saved.copy_(weights, non_blocking=True), torch.cuda.synchronize())


def inference(torch: Any, _rank: int) -> Step:
    """Receive requests and send answers at the same time, and compute in between."""
    layer = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    request = torch.ones(ELEMENTS, dtype=torch.bfloat16).pin_memory()
    answer, result = torch.empty_like(request, pin_memory=True), torch.ones_like(request, device="cuda")
    ways = torch.cuda.Stream(), torch.cuda.Stream()

    def step() -> None:
        with torch.cuda.stream(ways[0]):
            request.to("cuda", non_blocking=True)
        with torch.cuda.stream(ways[1]):
            answer.copy_(result, non_blocking=True)
        layer @ layer
        torch.cuda.synchronize()

    return step


def waiting(torch: Any, rank: int) -> Step:
    """Compute long on rank 0, while the other ranks wait for it inside NCCL."""
    layer = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    bucket = torch.ones(ELEMENTS // 8, dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        if rank == 0:
            time.sleep(4)
        layer @ layer
        torch.distributed.all_reduce(bucket)
        torch.cuda.synchronize()

    return step


def copies(ways: Sequence[tuple[int, int]], staged: Sequence[tuple[int, int]]) -> None:
    """Copy between GPUs with CuPy in one process; pairs in `staged` get no peer access."""
    cupy: Any = import_module("cupy")
    size_bytes = 2 * ELEMENTS
    issued = []
    for source, destination in (*ways, *staged):
        memory = []
        for gpu in (source, destination):
            with cupy.cuda.Device(gpu):
                memory.append(cupy.cuda.runtime.malloc(size_bytes))
        with cupy.cuda.Device(source):
            if (source, destination) in ways:
                cupy.cuda.runtime.deviceEnablePeerAccess(destination)
            stream = cupy.cuda.Stream(non_blocking=True)
        issued.append((stream, (memory[1], destination, memory[0], source, size_bytes, stream.ptr)))

    def step() -> None:
        for _, arguments in issued:
            cupy.cuda.runtime.memcpyPeerAsync(*arguments)
        for stream, _ in issued:
            stream.synchronize()

    repeat(step)


JOBS: dict[str, Callable[[Any, int], Step]] = {
    "training": training,
    "waiting": waiting,
    "loading": loading,
    "checkpoint": checkpoint,
}
ALONE: dict[str, Callable[[Any, int], Step]] = {"inference": inference}
COPIES: dict[str, tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]] = {
    "copies": ([(0, 1)], []),
    "copies-without-peer-access": ([], [(0, 1)]),
    "ring-with-a-staged-copy": ([(0, 1), (1, 2), (2, 3)], [(3, 0)]),
}
"""Direct and staged pairs of source and destination GPU."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*JOBS, *ALONE, *COPIES])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--gpus", type=int, default=2)
    arguments = parser.parse_args()
    os.environ["TRAFFIC_SECONDS"] = str(arguments.seconds)
    if arguments.kind in COPIES:
        copies(*COPIES[arguments.kind])
    elif "RANK" in os.environ:
        be_a_rank(arguments.kind)
    else:
        start(arguments)


def start(arguments: argparse.Namespace) -> None:
    """Start a process per GPU with torchrun's variables; those of inference are independent jobs."""
    together = arguments.kind in JOBS
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29551", "WORLD_SIZE": str(arguments.gpus)}
    alone = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "1"}
    command = [sys.executable, "-m", "benchmarks.traffic_jobs", *sys.argv[1:]]
    children = []
    for gpu in range(arguments.gpus):
        place = {"RANK": str(gpu if together else 0), "LOCAL_RANK": str(gpu)}
        children.append(subprocess.Popen(command, env={**os.environ, **(address if together else alone), **place}))
    sys.exit(max(child.wait() for child in children))


def be_a_rank(kind: str) -> None:
    """Make the traffic of one GPU until the time is up."""
    torch: Any = import_module("torch")
    rank, gpu = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    if kind in JOBS:
        torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", gpu))
        torch.distributed.barrier()
    step = {**JOBS, **ALONE}[kind](torch, rank)
    step()
    if kind in JOBS:
        torch.distributed.barrier()
    repeat(step)
    # Ranks end at different steps: NCCL's own shutdown would wait for ranks that are gone.
    sys.stdout.flush()
    os._exit(0)


def repeat(step: Step) -> None:
    """Repeat the step until the time is up; first print the Unix time of the start."""
    print(f"first traffic at {time.time():.3f}", flush=True)
    end = time.monotonic() + float(os.environ["TRAFFIC_SECONDS"])
    while time.monotonic() < end:
        step()


if __name__ == "__main__":
    main()
