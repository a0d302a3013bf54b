"""Measure what each NVML query of `gpubench watch` costs, in milliseconds of a core for one GPU of this host.

    python -m benchmarks.nvml_costs

Each query runs many times with a pause in between, as in a watch, so that it meets cold caches. Time in the driver's
library and time in the kernel are shown apart.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from gpubench.machine.drivers import GpuQueries
from gpubench.machine.gpu_child import NvmlTraffic
from gpubench.machine.gpus import MULTIPROCESSORS, read_clock_reasons, read_processes
from gpubench.machine.nvml import NVLINK_COUNTERS, PCIE_COUNTERS, open_library, read_link_counters

GRAPHICS, PCIE_SENT, PCIE_RECEIVED, NVLINK_RECEIVED, NVLINK_SENT = 1, 20, 21, 60, 61
"""NVML_GPM_METRIC_*."""

METRICS = (
    (GRAPHICS,),
    (PCIE_SENT,),
    (PCIE_SENT, PCIE_RECEIVED),
    (NVLINK_SENT,),
    (NVLINK_SENT, NVLINK_RECEIVED),
    (GRAPHICS, PCIE_SENT, PCIE_RECEIVED),
    (GRAPHICS, PCIE_SENT, PCIE_RECEIVED, NVLINK_SENT, NVLINK_RECEIVED),
)
ERRORS, ALL_LINKS = (161, 162, 163), 0xFFFFFFFF


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.01, help="seconds between two of them (default 0.01)")
    arguments = parser.parse_args()
    library = open_library()
    if library is None:
        sys.exit("this host has no driver of NVIDIA's")
    handle = library.nvmlDeviceGetHandleByIndex(0)
    queries = GpuQueries(library, handle)

    def timed(label: str, question: Callable[[], Any]) -> None:
        print(f"{label:<44}{cost(question, arguments.times, arguments.pause)}", flush=True)

    timed("nothing but the pause", lambda: None)
    if library.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
        before, after = library.nvmlGpmSampleAlloc(), library.nvmlGpmSampleAlloc()
        library.nvmlGpmSampleGet(handle, before)
        timed("GPM sample", lambda: library.nvmlGpmSampleGet(handle, after))
        for metrics in METRICS:
            timed(f"GPM metrics {metrics}", lambda metrics=metrics: get_metrics(library, before, after, metrics))  # type: ignore[misc]
    timed("NVLink counters, sum of links", lambda: read_link_counters(queries, NVLINK_COUNTERS))
    timed("PCIe counters", lambda: read_link_counters(queries, PCIE_COUNTERS))
    timed("processes, names and all", lambda: read_processes(queries))
    timed("processes that compute", lambda: library.nvmlDeviceGetComputeRunningProcesses(handle))
    timed("clock", lambda: library.nvmlDeviceGetClockInfo(handle, MULTIPROCESSORS))
    timed("reasons for the clock", lambda: read_clock_reasons(queries))
    timed("utilization", lambda: library.nvmlDeviceGetUtilizationRates(handle))
    timed("NVLink errors", lambda: queries.fields([(error, ALL_LINKS) for error in ERRORS]))
    timed("PCIe replays", lambda: library.nvmlDeviceGetPcieReplayCounter(handle))
    timed("a whole reading of one GPU", NvmlTraffic(library, [0]).read)


def get_metrics(library: Any, before: Any, after: Any, metrics: tuple[int, ...]) -> Any:
    """Return averages of metrics between two samples."""
    question = library.c_nvmlGpmMetricsGet_t()
    question.version, question.numMetrics = library.NVML_GPM_METRICS_GET_VERSION, len(metrics)
    question.sample1, question.sample2 = before, after
    for position, number in enumerate(metrics):
        question.metrics[position].metricId = number
    return library.nvmlGpmMetricsGet(question)


def cost(question: Callable[[], Any], times: int, pause: float) -> str:
    """Return a text such as '0.412 ms: 0.100 here, 0.312 in the kernel'."""
    question()
    before, whole = os.times(), time.process_time()
    for _ in range(times):
        question()
        time.sleep(pause)
    whole, after = time.process_time() - whole, os.times()
    user, system = after.user - before.user, after.system - before.system
    share = user / (user + system) if user + system else 1.0
    milliseconds = 1000 * whole / times
    return f"{milliseconds:.3f} ms: {milliseconds * share:.3f} here, {milliseconds * (1 - share):.3f} in the kernel"


if __name__ == "__main__":
    main()
