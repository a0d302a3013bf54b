"""What `gpubench run` costs a job: `python -m benchmarks.run_cost` (about five minutes with two processes on two GPUs).

A training loop of torchrun, or the command after `--`, runs alternately with `gpubench run` and without it. The loop
computes and all-reduces, with NCCL on GPUs and with Gloo on a CPU. The medians of the whole time, of the processor time
and of a step are printed with their range. A command of your own has a step if it prints `step NUMBER ms`.
"""

import argparse
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from gpubench.errors import COULD_NOT_MEASURE, DONE

_LOOP = """
import os, time
import torch
import torch.distributed as dist

on_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if on_gpu else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
side = 4096 if on_gpu else 256
weights, gradient = torch.ones(side, side, device=device), torch.ones(2**24 if on_gpu else 2**16, device=device)

def step():
    product = weights @ weights
    dist.all_reduce(gradient)
    gradient.div_(dist.get_world_size())
    return float(product[0, 0])

for _ in range(20):
    step()
begin = time.perf_counter()
for _ in range(500):
    step()
if dist.get_rank() == 0:
    print(f"step {(time.perf_counter() - begin) * 2:.4f} ms")
dist.destroy_process_group()
"""


def processor_seconds() -> float:
    """Return the processor time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(command: Sequence[str], folder: Path) -> tuple[float, float, float]:
    """Return a command's time and processor time in s, and the time of its steps in ms (NaN if it prints none)."""
    begin, used = time.perf_counter(), processor_seconds()
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    found = re.search(r"^step (\S+) ms$", ended.stdout, re.MULTILINE)
    if ended.returncode not in (DONE, COULD_NOT_MEASURE):  # Gloo writes no log to explain
        sys.exit(ended.stdout + ended.stderr)
    return seconds, processor_seconds() - used, float(found[1]) if found else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10, help="runs of each kind")
    parser.add_argument("--processes", type=int, default=2, help="processes of the training loop")
    parser.add_argument("command", nargs="*", help="a command to measure in place of the training loop")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "loop.py").write_text(_LOOP)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        plain = chosen.command or [*torchrun, str(chosen.processes), "loop.py"]
        wrapped = [sys.executable, "-m", "gpubench", "run", "--exit-zero", "--", *plain]
        runs: dict[str, list[tuple[float, float, float]]] = {"without": [], "with": []}
        measure(plain, folder)  # The first run reads the libraries from the disk
        for _ in range(chosen.runs):
            runs["without"].append(measure(plain, folder))
            runs["with"].append(measure(wrapped, folder))
    for kind, times in runs.items():
        for unit, values in zip(("s", "s of processors", "ms per step"), zip(*times, strict=True), strict=True):
            least, median, most = min(values), statistics.median(values), max(values)
            print(f"{kind:8} gpubench run: {median:8.3f} {unit:16} ({least:.3f} to {most:.3f})")


if __name__ == "__main__":
    main()
