"""The output of nccl-tests, generated from its source (src/util.cu of 2.19.6)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Half:
    time_us: float = 20.0
    algbw: float = 1.5
    busbw: float = 2.25
    wrong: float | None = 0
    times_us: tuple[float, ...] = ()
    by_process: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class Result:
    size: int = 1024
    count: int = 256
    kind: str = "float"
    op: str = "sum"
    root: int = -1
    halves: tuple[Half, Half] = (Half(), Half())


@dataclass(frozen=True)
class Output:
    """A run. `processes` are hosts, each with one process and `gpus` GPUs."""

    program: str = "all_reduce"
    hosts: tuple[str, ...] = ("n1",)
    gpus: int = 4
    results: tuple[Result, ...] = (Result(),)
    iters: int = 20
    aggregated: int = 1
    graph: int = 0
    blocking: bool = False
    cpu_time: bool = False
    per_iteration: bool = False
    skip: int = 0
    groups: tuple[int, ...] = ()
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = field(default=("NCCL_ALGO=Ring", "SECRET_TOKEN=abc"))
    version: int = 3
    model: str = "NVIDIA H200"

    def devices(self) -> list[dict[str, Any]]:
        return [
            {
                "rank": process * self.gpus + gpu,
                "group": self.groups[process] if self.groups else 0,
                "pid": 1000 + process,
                "hostname": host,
                "device": gpu,
                "device_hex": f"0000:{gpu + 6:02x}:00",
                "device_info": self.model,
            }
            for process, host in enumerate(self.hosts)
            for gpu in range(self.gpus)
        ]

    def text(self) -> str:
        lines = [
            "# nccl-tests version 2.19.6 nccl-headers=22809 nccl-library=22809",
            f"# Collective test starting: {self.program}_perf",
            (
                f"# nThread 1 nGpus {self.gpus} minBytes 1024 maxBytes 4096 step: 2(factor) warmup iters: 1 "
                f"iters: {self.iters} agg iters: {self.aggregated} validation: 1 graph: {self.graph} unalign: 0"
            ),
            *([self._report_line()] if self.per_iteration else []),
            *(["# Blocking Enabled: wait and barrier after each inner iteration (-m) "] if self.blocking else []),
            "#",
            "# Using devices",
            *(
                f"#  Rank {each['rank']:2d} Group {each['group']:2d} Pid {each['pid']:6d} on {each['hostname']:>10s} "
                f"device {each['device']:2d} [{each['device_hex']}] {each['device_info']}"
                for each in self.devices()
            ),
            "#",
            f"#       size         count      type   redop    root{2 * self._columns()}",
            "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)",
            *map(self._line, self.results),
            "# Out of bounds values : 0 OK",
            "# Avg bus bandwidth    : 1.5 ",
            "#",
            f"# Collective test concluded: {self.program}_perf",
        ]
        return "\n".join(lines) + "\n"

    def _report_line(self) -> str:
        skipped = f"; summary skips first {self.skip} iterations" if self.skip else ""
        return f"# Per-Iteration Report: CUDA event timing; i_* uses max over process rows{skipped} "

    def _columns(self) -> str:
        statistics = "    i_min    i_max    i_p99    i_cv%" if self.per_iteration else ""
        return f"  {'cputime' if self.cpu_time else 'time':>7s}   algbw   busbw  #wrong{statistics}"

    def _line(self, result: Result) -> str:
        text = f"{result.size:12d}  {result.count:12d}  {result.kind:>8s}  {result.op:>6s}  {result.root:6d}"
        for half in result.halves:
            wrong = "    N/A" if half.wrong is None else f"  {half.wrong:6g}"
            text += f"  {half.time_us:7.2f}  {half.algbw:6.2f}  {half.busbw:6.2f}{wrong}"
            if self.per_iteration:
                figures = statistics(half.times_us[self.skip :])
                text += "".join(f"  {figures[key]:7.2f}" for key in ("min_us", "max_us", "p99_us", "cv_pct"))
        return text

    def json(self) -> str:
        firsts = [each for each in self.devices() if each["rank"] % self.gpus == 0]
        document: dict[str, Any] = {
            "version": self.version,
            "start_time": "2026-11-20 08:00:00",
            "args": [f"./build/{self.program}_perf", *self.args],
            "env": list(self.env),
            "nccl_version": 22809,
            "config": {
                "nthreads": 1,
                "ngpus": self.gpus,
                "minimum_bytes": 1024,
                "maximum_bytes": 4096,
                "step_factor": 2,
                "warmup_iters": 1,
                "iterations": self.iters,
                "aggregated_iterations": self.aggregated,
                "validation": 1,
                "graph": self.graph,
                "blocking_collectives": str(self.blocking).lower(),
                "per_iter_timing": str(self.per_iteration).lower(),
                "per_iter_skip": self.skip,
                "parallel_init": "false",
                "devices": firsts,
            },
            "results": [self._result(result) for result in self.results],
            "out_of_bounds": {"count": 0, "okay": "true"},
            "average_bus_bandwidth": {"bandwidth": 1.5, "okay": "unchecked"},
            "errors": [],
            "end_time": "2026-11-20 08:00:09",
        }
        return json.dumps(document, separators=(",", ":"))

    def _result(self, result: Result) -> dict[str, Any]:
        record: dict[str, Any] = {
            "size": result.size,
            "count": result.count,
            "type": result.kind,
            "redop": result.op,
            "root": f"{result.root:6d}",
        }
        for key, half in zip(("out_of_place", "in_place"), result.halves, strict=True):
            record[key] = {
                "cpu_time" if self.cpu_time else "time": half.time_us,
                "alg_bw": half.algbw,
                "bus_bw": half.busbw,
                "nwrong": half.wrong,
            }
            if self.per_iteration:
                record[f"{key}_per_iter"] = {
                    "skipped_iterations": self.skip,
                    **statistics(half.times_us[self.skip :]),
                    "times_us": list(half.times_us),
                    **({"per_process_max_times_us": half.by_process} if half.by_process else {}),
                }
        return record | {"actual_iterations": self.iters, "experiment_name": ""}


def statistics(times: Sequence[float]) -> dict[str, float]:
    """Compute what computeIterStats does."""
    ordered, count = sorted(times), len(times)
    mean = sum(ordered) / count
    deviation = (sum((each - mean) ** 2 for each in ordered) / count) ** 0.5
    return {
        "min_us": ordered[0],
        "max_us": ordered[-1],
        "avg_us": mean,
        "p50_us": ordered[count // 2],
        "p95_us": ordered[min(count - 1, (count * 95 + 99) // 100 - 1)],
        "p99_us": ordered[min(count - 1, (count * 99 + 99) // 100 - 1)],
        "stdev_us": deviation,
        "cv_pct": 100 * deviation / mean,
    }
