"""`gpubench watch`: its options, and the run."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gpubench.cli.options import PresentationOptions, RecordingOptions, SimulationOptions
from gpubench.cli.signature import JUDGE, MEASURE, HelpPage, app_of, flag, option, step_timeout
from gpubench.errors import UsageError, exclusive
from gpubench.records import dataclass

if TYPE_CHECKING:
    from gpubench.jobs.hangs import HangPlan
    from gpubench.jobs.watch import WatchPlan

HELP = HelpPage(
    (
        ("Watch all jobs of this machine, until q or Ctrl-C", "gpubench watch"),
        (
            "Fail if the traffic of the next job is host-staged",
            "gpubench watch --until-traffic --for 30s --strict",
        ),
        ("Watch one Slurm job and keep the result", "gpubench watch --job 4711 --for 1m --output watch.json"),
        ("Watch 16 nodes, one rank per node", "mpirun -n 16 --map-by ppr:1:node gpubench watch --for 30s"),
        ("Name the rank that keeps a job waiting", "gpubench watch --hang --for 30s --strict"),
        ("Try it without a GPU", "gpubench watch --simulate hgx-h200-4 --fault node0:traffic=staged"),
    ),
    """
watch reads the NVLink, PCIe and NIC counters and says which path the traffic takes: direct, host-staged, over sockets,
unbalanced, one GPU idle while its peers wait, loading data, idle, or unknown. It needs no log, no restart of the job
and no root; for processes of other users it cannot name the cause. Under mpirun or srun, equal nodes share one line.

With --hang it asks NCCL's RAS (NCCL 2.24, on NCCL_RAS_ADDR or localhost:28028) instead. A rank counts as hanging that
two answers in a row show in the same place, behind the others or silent; longer pauses, such as checkpoints, need a
longer --interval. --record DIR keeps the answers, and gpubench explain DIR reads them.

Exit codes: 0 done; 1 with --strict, the verdict is not PASS; 2 wrong usage; 3 with --strict, nothing was judged.
""",
)

_DURATION = re.compile(r"(?P<number>\d{1,6}(?:\.\d{1,6})?)\s*(?P<unit>ms|s|m|h|)", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
_LEAST_INTERVAL, _MOST_INTERVAL, _MOST_SECONDS = 0.1, 3600.0, 7 * 86400.0
_SIMULATED_SECONDS = 10.0
_JOB = re.compile(r"\d+|[0-9A-Fa-f]{4,64}", re.ASCII)
_GPUS = re.compile(r"(\d{1,3})(?:-(\d{1,3}))?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """What is watched, and how."""

    help_group: ClassVar = MEASURE

    interval: str | None = option(
        "TIME",
        "Time between two lines: 500ms, 1s, 1m (default: 1s; 2s on nodes with more than four GPUs; 10s with --hang).",
        common=True,
    )
    seconds: str | None = option(
        "TIME",
        "Stop after this time, e.g. 30s, 5m. Default: until interrupted (10s with --simulate, the whole recording with "
        "--replay).",
        name="--for",
        common=True,
    )
    until_traffic: bool = flag("Wait for the first traffic; --for counts from then on.", common=True)
    hang: bool = flag(
        "Ask NCCL's RAS every 10 s which rank keeps the others of its job waiting. No counters are read.", common=True
    )
    strict: bool = flag(
        "Exit 1 unless the verdict is PASS, 3 if no path between GPUs was seen.", common=True, group=JUDGE
    )
    pid: list[int] | None = option("PID", "Watch only the jobs of this process. Repeatable.", common=True)
    job: str | None = option(
        "ID", "Watch only this Slurm job (its number) or container (the beginning of its id).", common=True
    )
    gpus: str | None = option("LIST", "Watch only these GPUs, numbered as in nvidia-smi: 0,2-3.", common=True)
    timeout: float = step_timeout("reading the driver of a node", default=20.0)
    simulation: SimulationOptions
    recording: RecordingOptions
    presentation: PresentationOptions

    def hang_plan(self) -> "HangPlan":
        """The plan of --hang. Raises UsageError for options that are about traffic."""
        from gpubench.jobs.hangs import INTERVAL_SECONDS, SECTIONS, HangPlan

        beside = {"--until-traffic": self.until_traffic, "--pid": self.pid, "--job": self.job, "--gpus": self.gpus}
        beside |= {"--simulate": self.simulation.simulate, "--replay": self.recording.replay}
        if others := [name for name, value in beside.items() if value]:
            raise exclusive(("--hang", *others), "--hang alone: it asks NCCL, and what it recorded explain reads")
        return HangPlan(
            interval_s=self._interval(INTERVAL_SECONDS),
            seconds=None if self.seconds is None else _duration("--for", self.seconds, 0.0, _MOST_SECONDS),
            strict=self.strict,
            record=None if self.recording.record is None else Path(self.recording.record),
            presentation=self.presentation.parse(SECTIONS),
        )

    def _interval(self, usual: float) -> float:
        if self.interval is None:
            return usual
        return _duration("--interval", self.interval, _LEAST_INTERVAL, _MOST_INTERVAL)

    def plan(self) -> "WatchPlan":
        """The plan of these options. Raises UsageError for options that exclude each other."""
        from gpubench.jobs.sources import Here, Replayed, Simulated
        from gpubench.jobs.watch import INTERVAL_SECONDS, SECTIONS, WatchedJobs, WatchPlan

        simulation = self.simulation.parse(command="watch")
        excluded = {"--simulate": self.simulation.simulate, "--record": self.recording.record, "--gpus": self.gpus}
        recording = self.recording.parse(excluded)
        if simulation is not None and self.gpus is not None:
            raise exclusive(("--simulate", "--gpus"), "one of them: all GPUs of a simulated machine are shown")
        if self.job is not None and not _JOB.fullmatch(self.job):
            raise UsageError(
                f"--job {self.job!r} is not a job",
                expected="the number of a Slurm job, or at least four digits of a container's id",
                reason="" if self.job else "the variable is probably not set",
            )
        interval = self._interval(INTERVAL_SECONDS)
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
            f"{name} {text!r} is not a time", expected="a number followed by ms, s, m or h", next_step=f"{name} 30s"
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
            raise UsageError(f"--gpus {text!r} is not a list of GPUs", expected="numbers and ranges: 0,2-3")
        found.update(dict.fromkeys(range(first, last + 1)))
    return tuple(found)


def _run(options: WatchOptions) -> int:
    if options.hang:
        from gpubench.jobs import hangs

        return hangs.run(options.hang_plan(), sys.argv[1:])
    from gpubench.jobs import watch

    return watch.run(options.plan(), sys.argv[1:])


app = app_of(HELP, WatchOptions, _run)
