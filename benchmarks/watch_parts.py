"""Measure what an interval of `gpubench watch` costs without the driver, by parts, on a host without GPUs.

    python -m benchmarks.watch_parts --gpus 8

The readings are made up: a child reports busy GPUs that change at every reading, with one sleeping process each.
Everything else is real: the child's pipe, /proc and /sys, rates, jobs, decisions, rows, and plain lines or the live
table. Times are of this process on a core, at the pace of a watch, so that it meets cold caches.
"""

import argparse
import contextlib
import cProfile
import io
import json
import os
import pstats
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, TextIO

from gpubench.formats.text.watch import LiveScreen, PlainScreen
from gpubench.jobs.watch import RealPace, Screen, WatchedJobs, WatchLoop, sleep
from gpubench.machine.traffic import NodeTraffic
from gpubench.measure.watch.report import Course, Intervals, Limits, NodeWatch, nvlink_finder
from gpubench.model.facts.process import GpuProcess
from gpubench.model.facts.traffic import GpuReading
from gpubench.model.paths.topology import Topology
from gpubench.model.terms.plain import to_plain
from gpubench.model.terms.verdict import Origin
from gpubench.simulated.machine import parse_machine, snapshots


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, choices=(2, 4, 8), default=8)
    parser.add_argument("--interval", type=float, default=0.25, help="seconds between readings (default 0.25)")
    parser.add_argument("--readings", type=int, default=80)
    parser.add_argument("--live", action="store_true", help="draw the live table, to a file")
    parser.add_argument("--profile", action="store_true", help="also print what the time goes to, by function")
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answer is not None:
        answer([int(pid) for pid in arguments.answer.split(",")])
        return
    with busy_processes(arguments.gpus) as pids:
        milliseconds, spread = cost(arguments, pids)
    shown = "live table" if arguments.live else "plain lines"
    print(
        f"{arguments.gpus} GPUs, {shown}: {milliseconds:.2f} ms of a core an interval ({spread}), "
        f"{len(os.sched_getaffinity(0))} cores here, load {os.getloadavg()[0]:.1f}"
    )


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[list[int]]:
    """Start a process per GPU, as torchrun does."""
    launched = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    sleepers = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, **launched})
        for _ in range(count)
    ]
    try:
        yield [sleeper.pid for sleeper in sleepers]
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def cost(arguments: argparse.Namespace, pids: list[int]) -> tuple[float, str]:
    """Return the core milliseconds per interval: the median over tenths of the run, and their range."""
    node = snapshots(parse_machine(f"hgx-h200-{arguments.gpus}"))[0]
    topology = Topology(node)
    asked = ["--gpus", str(arguments.gpus), "--answer", ",".join(map(str, pids))]
    command = [sys.executable, "-m", "benchmarks.watch_parts", *asked]
    reader = NodeTraffic(node.host, os.environ, lambda _: {}, 30.0, 5.0, command=command)
    watch = NodeWatch(reader, nvlink_finder(topology), WatchedJobs())
    course, pace, limits = Course({node.host: topology}.get), RealPace(sleep), Limits(topology)
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
        plan: Any = SimpleNamespace(interval_s=arguments.interval, seconds=None, until_traffic=False, presentation=None)
        loop = WatchLoop(
            plan, pace, Intervals(course), lambda _: limits, Origin.MEASURED, screen(arguments, nowhere), lambda _: None
        )
        taken: list[float] = []
        profiler = cProfile.Profile() if arguments.profile else None

        def read_all(_last: bool) -> Any:  # noqa: FBT001
            taken.append(time.process_time())
            if profiler is not None and len(taken) == arguments.readings // 4:
                profiler.enable()
            return [watch.read()] if len(taken) <= arguments.readings else None

        loop.run(read_all)
        watch.close()
    if profiler is not None:
        profiler.disable()
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats("cumulative").print_stats(70)
        print(text.getvalue())
    steady = taken[arguments.readings // 4 :]
    tenth = max(len(steady) // 10, 1)
    found = sorted((steady[n + tenth] - steady[n]) / tenth * 1000 for n in range(0, len(steady) - tenth, tenth))
    return found[len(found) // 2], f"{found[0]:.2f} to {found[-1]:.2f}"


def screen(arguments: argparse.Namespace, nowhere: TextIO) -> Screen:
    if not arguments.live:
        return PlainScreen(None)
    return LiveScreen(nowhere, lambda seconds: f"gpubench watch  {seconds:.0f} s", color=True)


def answer(pids: list[int]) -> None:
    """Be the child: report the GPUs of a staged job."""
    bus_ids = [gpu.bus_id or "" for gpu in snapshots(parse_machine(f"hgx-h200-{len(pids)}"))[0].gpus]
    for _ in sys.stdin:
        gpus = [
            GpuReading(
                index=index,
                bus_id=bus_ids[index],
                nvlink_sent_gb_s=0.0,
                nvlink_received_gb_s=0.0,
                pcie_sent_gb_s=30 + random.random(),
                pcie_received_gb_s=30 + random.random(),
                kernels_percent=99.0 + random.random(),
                utilization_percent=99,
                clock_mhz=1980,
                throttle_reasons=(),
                errors={"PCIe replays": 0, "NVLink replay": 0, "NVLink recovery": 0, "NVLink crc_flit": 0},
                processes=(GpuProcess(pid=pid, name="python", memory_bytes=2**33),),
            )
            for index, pid in enumerate(pids)
        ]
        sys.stdout.write(json.dumps({"gpus": [to_plain(gpu) for gpu in gpus]}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
