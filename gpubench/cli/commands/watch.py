"""`gpubench watch`: its options, and the run."""

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpubench.cli.options import PresentationOptions, RecordingOptions, SimulationOptions
from gpubench.cli.signature import app_of, flag, option
from gpubench.errors import UsageError, exclusive

if TYPE_CHECKING:
    from gpubench.jobs.watch import WatchPlan

HELP = """
The NVLink, PCIe and NIC traffic of jobs that run already, and which way it goes: direct, staged through host memory, by
sockets, unbalanced, one GPU idle while its peers wait, loading data, idle, or unknown. Needs no log, restart or root;
of other users' processes it cannot say why. On a terminal q or Ctrl-C ends it. Under mpirun or srun, one rank a node,
equal nodes are one line. Exit 0 done, 1 with --strict what is not as it should be, 3 with --strict nothing judged.

  gpubench watch

  gpubench watch --until-traffic --for 30s --strict    # a gate: exit 1 where a job is staged

  gpubench watch --job 4711 --for 1m --output watch.json

  gpubench watch --simulate hgx-h200-4 --fault node0:traffic=staged

  mpirun -n 16 --map-by ppr:1:node gpubench watch --for 30s
"""

_DURATION = re.compile(r"(?P<number>\d{1,6}(?:\.\d{1,6})?)\s*(?P<unit>ms|s|m|h|)", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
_LEAST_INTERVAL, _MOST_INTERVAL, _MOST_SECONDS = 0.1, 3600.0, 7 * 86400.0
_SIMULATED_SECONDS = 10.0
_JOB = re.compile(r"\d+|[0-9A-Fa-f]{4,64}", re.ASCII)
_GPUS = re.compile(r"(\d{1,3})(?:-(\d{1,3}))?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """What is watched, and how."""

    interval: str | None = option(
        "TIME", "Between two lines: 500ms, 1s, 1m. Default: 1s; 2s of nodes with more than four GPUs."
    )
    seconds: str | None = option(
        "TIME",
        "End after so long: 30s, 5m. Default: when somebody ends it; 10s of what is simulated, all that is recorded.",
        name="--for",
    )
    until_traffic: bool = flag("Wait for the first bytes; --for counts from then on.")
    strict: bool = flag("Exit 1 for what is not PASS, 3 where no path between GPUs was seen: for gates.")
    pid: list[int] | None = option("PID", "Only the jobs of this process. Repeatable.")
    job: str | None = option("ID", "Only this Slurm job, by its number, or this container, by the beginning of its id.")
    gpus: str | None = option("LIST", "Only these GPUs, by nvidia-smi's numbers: 0,2-3.")
    timeout: float = option("S", "Seconds in which a node's driver has to answer.", default=20.0, min=0.1, max=86400)
    simulation: SimulationOptions
    recording: RecordingOptions
    presentation: PresentationOptions

    def plan(self) -> "WatchPlan":
        """The plan that these options ask for; UsageError for what cannot be."""
        from gpubench.jobs.sources import Here, Replayed, Simulated
        from gpubench.jobs.watch import INTERVAL_SECONDS, SECTIONS, WatchedJobs, WatchPlan

        simulation = self.simulation.parse(command="watch")
        excluded = {"--simulate": self.simulation.simulate, "--record": self.recording.record, "--gpus": self.gpus}
        recording = self.recording.parse(excluded)
        if simulation is not None and self.gpus is not None:
            raise exclusive(("--simulate", "--gpus"), "one of them: a simulated machine is shown whole")
        if self.job is not None and not _JOB.fullmatch(self.job):
            raise UsageError(
                f"--job {self.job!r} is no job",
                expected="Slurm's number, or four or more digits of a container's id",
                reason="" if self.job else "a variable that is not set",
            )
        interval = INTERVAL_SECONDS
        if self.interval is not None:
            interval = _duration("--interval", self.interval, _LEAST_INTERVAL, _MOST_INTERVAL)
        seconds = None if self.seconds is None else _duration("--for", self.seconds, interval, _MOST_SECONDS)
        if simulation is not None and seconds is None:
            seconds = max(_SIMULATED_SECONDS, interval)
        source: Here | Simulated | Replayed = Here(self.timeout)
        if simulation is not None:
            source = Simulated(simulation)
        elif recording.replay is not None:
            source = Replayed(recording.replay)
        return WatchPlan(
            source=source,
            recording=recording,
            selection=WatchedJobs(tuple(self.pid or ()), self.job),
            gpus=None if self.gpus is None else _numbers(self.gpus),
            interval_s=interval,
            seconds=seconds,
            until_traffic=self.until_traffic,
            strict=self.strict,
            timeout_s=self.timeout,
            presentation=self.presentation.parse(SECTIONS),
            has_own_interval=self.interval is not None,
        )


def _duration(name: str, text: str, least: float, most: float) -> float:
    """Seconds of '30s', '5m', '500ms'; a number alone is seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{name} {text!r} is no time", expected="a number with ms, s, m or h behind it", next_step=f"{name} 30s"
        )
    seconds = float(match["number"]) * _SECONDS[match["unit"]]
    if not least <= seconds <= most:
        raise UsageError(f"{name} {text} is {seconds:g} s", expected=f"{least:g} s to {most:g} s")
    return seconds


def _numbers(text: str) -> tuple[int, ...]:
    """0, 2 and 3 of '0,2-3'."""
    found: dict[int, None] = {}
    for part in text.split(","):
        match = _GPUS.fullmatch(part.strip())
        first, last = (-1, -2) if match is None else (int(match[1]), int(match[2] or match[1]))
        if last < first:
            raise UsageError(f"--gpus {text!r} is no list of GPUs", expected="numbers and ranges: 0,2-3")
        found.update(dict.fromkeys(range(first, last + 1)))
    return tuple(found)


def _run(options: WatchOptions) -> int:
    from gpubench.jobs import watch

    return watch.run(options.plan(), sys.argv[1:])


app = app_of(HELP, WatchOptions, _run)
