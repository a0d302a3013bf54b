"""Measure what `gpubench watch` says about jobs of every kind on this host's first two GPUs, how soon, and at what
cost.

    python -m benchmarks.watch_verdicts --csv verdicts.csv

Each job of `benchmarks.traffic_jobs` runs beside a watch that started before it. For staged jobs the seconds count from
the first traffic, which the job prints, to the line that names the cause. For other jobs any alarm is false. Passes if
every staged job is named within 5 s, no alarm is false, and the watch takes no more than 1 % of a core.
"""

import argparse
import csv
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.watch_cost import core_seconds

MOST_SECONDS, MOST_CORE_PERCENT = 5.0, 1.0
STAGED = {"NCCL_P2P_DISABLE": "1"}
SOCKETS = {**STAGED, "NCCL_SHM_DISABLE": "1"}
ALLREDUCE = ["-m", "gpubench", "allreduce", "--np", "2", "--sizes", "256M", "--no-check", "--exit-zero", "--iters"]
SECONDS_A_THOUSAND = {"direct": 2.0, "staged": 20.0}
"""For all-reduces of 256 MiB, out of place and in place, on two H200s."""


@dataclass(frozen=True)
class Case:
    """A job, its environment, the path of its data, and whether that is an alarm."""

    name: str
    command: list[str]
    way: str
    environment: dict[str, str]
    alarm: bool = False


@dataclass(frozen=True)
class Outcome:
    """What the watch said: the paths with their numbers of lines, the alarm, its delay, the exit code, and the cost."""

    job: str
    expected: str
    seen: str
    alarm: str
    seconds_to_alarm: float | None
    exit_code: int
    core_percent: float
    right: bool


def job(kind: str, seconds: float) -> list[str]:
    return ["-m", "benchmarks.traffic_jobs", kind, "--seconds", str(seconds)]


def allreduce(way: str, seconds: float) -> list[str]:
    """Return a command with as many all-reduces as take about that long."""
    return [*ALLREDUCE, str(int(1000 * seconds / SECONDS_A_THOUSAND[way]))]


def cases(seconds: float) -> list[Case]:
    return [
        Case("DDP training", job("training", seconds), "direct", {}),
        Case("DDP training, NCCL_P2P_DISABLE=1", job("training", seconds), "staged", STAGED, alarm=True),
        Case("the same, NCCL_SHM_DISABLE=1 too", job("training", seconds), "sockets", SOCKETS, alarm=True),
        Case("gpubench allreduce", allreduce("direct", seconds), "direct", {}),
        Case("gpubench allreduce, NCCL_P2P_DISABLE=1", allreduce("staged", seconds), "staged", STAGED, alarm=True),
        Case("data loading, pinned, both GPUs", job("loading", seconds), "loading data", {}),
        Case("checkpoint to the host, both GPUs", job("checkpoint", seconds), "saving data", {}),
        Case("inference, in and out at once, a GPU each", job("inference", seconds), "host copies", {}),
        Case("copies with peer access, one process", job("copies", seconds), "direct", {}),
        Case(
            "copies without peer access, one process",
            job("copies-without-peer-access", seconds),
            "staged",
            {},
            alarm=True,
        ),
    ]


def main() -> None:
    """Run all, print the table, and exit with 1 if an outcome is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8, help="of traffic of each job (default 8)")
    parser.add_argument("--only", help="jobs whose name holds this")
    parser.add_argument("--csv", help="also write the rows here")
    parser.add_argument("--reports", help="keep what the watch printed of each job in this folder")
    arguments = parser.parse_args()
    chosen = [case for case in cases(arguments.seconds) if arguments.only is None or arguments.only in case.name]
    found = []
    print(f"{'job':<43} {'alarm after s':>13} {'exit':>4} {'core %':>6}  seen, seconds each")
    for case in chosen:
        outcome, report = watch(case)
        found.append(outcome)
        late = "-" if outcome.seconds_to_alarm is None else f"{outcome.seconds_to_alarm:.1f}"
        wrong = "" if outcome.right else "   WRONG"
        print(
            f"{case.name:<43} {late:>13} {outcome.exit_code:>4} {outcome.core_percent:>6.2f}  {outcome.seen}{wrong}",
            flush=True,
        )
        if arguments.reports:
            folder = Path(arguments.reports)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{case.name.replace(' ', '_')}.txt").write_text(report)
    if arguments.csv:
        with Path(arguments.csv).open("w", newline="") as stream:
            writer = csv.DictWriter(stream, [field.name for field in fields(Outcome)])
            writer.writeheader()
            writer.writerows(map(asdict, found))
    alarms = [outcome.seconds_to_alarm for outcome in found if outcome.seconds_to_alarm is not None]
    false = sum(bool(outcome.alarm) and not case.alarm for case, outcome in zip(chosen, found, strict=True))
    named, to_be_named = len(alarms) - false, sum(case.alarm for case in chosen)
    print(f"{false} false alarms; {named} of {to_be_named} were named, the last after {max(alarms, default=0):.1f} s")
    failed = []
    for outcome in found:
        if not outcome.right:
            failed.append(f"{outcome.job}: it goes {outcome.expected}, which was not said in time")
        if outcome.core_percent > MOST_CORE_PERCENT:
            cost = f"{outcome.core_percent:.2f} % of a core, of which {MOST_CORE_PERCENT:g} % are allowed"
            failed.append(f"{outcome.job}: the watch took {cost}")
    sys.exit("\n".join(failed) or 0)


def watch(case: Case) -> tuple[Outcome, str]:
    """Run a job beside a watch, end the watch with Ctrl-C, and judge what it printed."""
    command = [sys.executable, "-m", "gpubench", "watch", "--strict", "--width", "160"]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines: list[tuple[float, str]] = []
    listener = threading.Thread(target=listen, args=(watcher, lines))
    listener.start()
    while not lines:
        if watcher.poll() is not None:
            sys.exit("the watch did not begin")
        time.sleep(0.1)
    begun, lines_before, cpu_before = time.monotonic(), len(lines), core_seconds(watcher.pid)
    done = subprocess.run(
        [sys.executable, *case.command],
        env={**os.environ, **case.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout[-500:], done.stderr[-1500:])
    core_percent = 100 * (core_seconds(watcher.pid) - cpu_before) / (time.monotonic() - begun)
    watcher.send_signal(signal.SIGINT)
    listener.join()
    watcher.wait()
    report = "\n".join(line for _, line in lines)
    return judge(case, done.stdout, lines[lines_before:], watcher.returncode, core_percent), report


def listen(watcher: "subprocess.Popen[str]", lines: list[tuple[float, str]]) -> None:
    """Keep every line with its time."""
    assert watcher.stdout is not None
    lines.extend((time.time(), line.rstrip("\n")) for line in watcher.stdout)


def judge(case: Case, printed: str, lines: list[tuple[float, str]], exit_code: int, core_percent: float) -> Outcome:
    """Judge the lines of the watch's intervals."""
    intervals = [(at, line.split(" s  ", 1)[1]) for at, line in lines if " s  " in line and "  NVLink " in line]
    until = next((n for n, (_, line) in enumerate(lines) if line.startswith("gpubench ")), len(lines))
    intervals = [interval for interval in intervals if interval[0] <= lines[min(until, len(lines) - 1)][0]]
    ways: dict[str, int] = {}
    for _, line in intervals:
        way = line.partition(" GPU")[0].strip()
        ways[way] = ways.get(way, 0) + 1
    alarms = [(at, line) for at, line in intervals if "  because " in line]
    began = [float(line.rpartition(" ")[2]) for line in printed.splitlines() if line.startswith("first traffic at")]
    busy = [at for at, line in intervals if not line.startswith("idle")]
    # A job that does not print its start had its first traffic in the interval before the first busy line.
    first = min(began, default=busy[0] - 1 if busy else 0.0)
    after = alarms[0][0] - first if alarms else None
    right = case.alarm == bool(alarms) and case.way in ways and (after is None or after <= MOST_SECONDS)
    return Outcome(
        job=case.name,
        expected=case.way,
        seen=", ".join(f"{way} {count}" for way, count in ways.items()),
        alarm=alarms[0][1].partition("  because ")[2] if alarms else "",
        seconds_to_alarm=after,
        exit_code=exit_code,
        core_percent=core_percent,
        right=right,
    )


if __name__ == "__main__":
    main()
