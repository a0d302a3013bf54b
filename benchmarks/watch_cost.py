"""Measure what a watch costs: time of a core, and the slowdown of an all-reduce beside it, on this host's GPUs.

    python -m benchmarks.watch_cost --pairs 20

One NCCL job runs all the time and times its all-reduces in blocks. A watch runs during every other block; the order
alternates from pair to pair. Passes if the watch takes no more than 1 % of a core, and the median ratio of paired
blocks is no more than 1.001 or within chance. Fails if a watch missed an interval of its block or ended early: then
nothing was measured.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

MOST_CORE_PERCENT, MOST_RATIO = 1.0, 1.001
CHANCE, RELABELLINGS = 0.01, 10_000
_START_SECONDS = 60.0
"""Before its first interval, a watch reads this machine once with three processes."""

_NANOSECONDS = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="of blocks with and without (default 10)")
    parser.add_argument("--seconds", type=float, default=4, help="of a block (default 4)")
    parser.add_argument("--size", type=int, default=2**26, help="bytes of an all-reduce (default 64M)")
    parser.add_argument("--gpus", type=int, default=2)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        be_a_rank(arguments)
    else:
        sys.exit(start(arguments))


def start(arguments: argparse.Namespace) -> int:
    """Start ranks with torchrun's variables; return the first exit code that is not 0."""
    command = [sys.executable, "-m", "benchmarks.watch_cost", *sys.argv[1:]]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29552", "WORLD_SIZE": str(arguments.gpus)}
    children = [
        subprocess.Popen(command, env={**os.environ, **address, "RANK": str(gpu), "LOCAL_RANK": str(gpu)})
        for gpu in range(arguments.gpus)
    ]
    while (codes := [child.poll() for child in children]).count(0) < len(codes):
        failed = [code for code in codes if code]
        if failed:
            for child in children:
                child.kill()  # it would wait for the one that failed
            return abs(failed[0])
        time.sleep(0.2)
    return 0


def be_a_rank(arguments: argparse.Namespace) -> None:
    """Time blocks; rank 0 starts and ends the watches, and judges."""
    torch: Any = import_module("torch")
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    data = torch.ones(arguments.size // 2, dtype=torch.bfloat16, device="cuda")
    block(torch, data, 1.0)
    ratios, cores = [], []
    for pair in range(arguments.pairs):
        times = {}
        for watched in (True, False) if pair % 2 else (False, True):
            watch = BesideWatch() if watched and rank == 0 else None
            torch.distributed.barrier()
            if watch is not None:
                watch.begin()
            times[watched] = block(torch, data, arguments.seconds)
            if watch is not None:
                cores.append(watch.end())
            torch.distributed.barrier()
        ratios.append(times[True] / times[False])
    torch.distributed.barrier()
    if rank == 0:
        judge(ratios, cores)
    os._exit(0)


class BesideWatch:
    """A watch of everything, once per second, ready after its first interval; a broken one ends this process."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "gpubench", "watch", "--exit-zero", "--interval", "1s"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._lines: list[str] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        deadline = time.monotonic() + _START_SECONDS
        while not self._lines:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._broken("it showed no interval")
            time.sleep(0.05)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        self._lines.extend(self._process.stdout)

    def begin(self) -> None:
        """Start to count its intervals and its time on a core."""
        self._seen, self._begun = len(self._lines), time.monotonic()
        self._before = core_seconds(self._process.pid)

    def end(self) -> float:
        """End it with Ctrl-C; return the percent of a core since `begin`."""
        if self._process.poll() is not None:
            self._broken("it has ended before it was asked to")
        seconds = time.monotonic() - self._begun
        taken = core_seconds(self._process.pid) - self._before
        shown = len({line.split(" s  ")[0] for line in self._lines[self._seen :]})
        self._process.send_signal(signal.SIGINT)
        self._process.wait()
        self._listener.join()
        if self._process.returncode != 0:
            self._broken(f"exit code {self._process.returncode}")
        if shown < int(seconds) - 1 or taken <= 0:
            self._broken(f"{shown} intervals of 1 s in {seconds:.1f} s, {taken:.4f} s of a core")
        return 100 * taken / seconds

    def _broken(self, why: str) -> None:
        self._process.kill()
        told = "" if self._process.stderr is None else self._process.stderr.read()
        print(f"nothing was measured: the watch did not run whole: {why}\n{told}", file=sys.stderr, flush=True)
        os._exit(1)


def core_seconds(pid: int) -> float:
    """Return the core time of a process and its children, over their present threads, from /proc."""
    pids = [pid]
    for parent in pids:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            pids += [int(child) for child in children.read_text().split()]
    stats = [stat for process in pids for stat in Path(f"/proc/{process}/task").glob("*/schedstat")]
    if not stats:
        sys.exit("this kernel keeps no /proc/PID/schedstat")
    return sum(int(stat.read_text().split()[0]) for stat in stats) / _NANOSECONDS


def block(torch: Any, data: Any, seconds: float) -> float:
    """Time all-reduces in batches of twenty until the ranks agree to stop; return the median microseconds of one."""
    batches = []
    stop = torch.zeros(1, device="cuda")
    end = time.monotonic() + seconds
    while True:
        begin, finish = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(20):
            torch.distributed.all_reduce(data)
        finish.record()
        finish.synchronize()
        batches.append(begin.elapsed_time(finish) * 1000 / 20)
        if len(batches) % 50 == 0:
            stop.fill_(float(time.monotonic() > end))
            torch.distributed.all_reduce(stop)
            if stop.item() > 0:
                return float(statistics.median(batches))


def judge(ratios: list[float], cores: list[float]) -> None:
    """Print both results, and exit with 1 if either exceeds its bound."""
    logs = np.log(np.array(ratios))
    signs = np.random.default_rng(0).choice((-1.0, 1.0), (RELABELLINGS, len(logs)))
    chance = float(np.mean(np.abs((signs * logs).mean(axis=1)) >= abs(logs.mean()) - 1e-15))
    ratio, core = statistics.median(ratios), statistics.median(cores)
    spread = f"{min(ratios):.5f} to {max(ratios):.5f}"
    print(
        f"all-reduce with a watch over without: median {ratio:.5f}, {spread}, {len(ratios)} pairs, chance {chance:.3f}"
    )
    print(f"the watch takes {core:.2f} % of a core ({min(cores):.2f} to {max(cores):.2f}), {len(cores)} watches")
    failed = core > MOST_CORE_PERCENT or (ratio > MOST_RATIO and chance < CHANCE)
    sys.stdout.flush()
    os._exit(1 if failed else 0)


if __name__ == "__main__":
    main()
