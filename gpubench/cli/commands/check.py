"""`gpubench check`, and `gpubench` alone, which is a check of ten lines: their options, and the runs."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import typer

from gpubench.cli.options import PresentationOptions, RecordingOptions, SimulationOptions, check_profile, expected_gpus
from gpubench.cli.signature import (
    JUDGE,
    MEASURE,
    HelpPage,
    completed,
    flag,
    given_words,
    option,
    sharing_ranks,
    step_timeout,
    typer_app,
)
from gpubench.errors import UsageError, exclusive
from gpubench.model.terms.commands import Command
from gpubench.records import dataclass

if TYPE_CHECKING:
    from gpubench.jobs.check import CheckPlan

HELP = HelpPage(
    (
        ("Check this machine", "gpubench check"),
        (
            "Check two nodes of eight GPUs and keep the result",
            "mpirun -n 16 gpubench check --strict --output node-gate.json",
        ),
        ("Read facts only, e.g. in a Slurm prolog", "gpubench check --quick"),
        ("Start the ranks on these hosts", "gpubench check --hosts hosts.txt"),
        ("Start the ranks in a Slurm allocation", "salloc -N 4 --gpus-per-node=8 gpubench check --slurm"),
        (
            "Try it without a GPU",
            "gpubench check --simulate 'hgx-h100-8*4' --fault node3.gpu5:nvlink=12",
        ),
    ),
    """
check finds the profile of the machine, reads its facts, measures copies between all GPUs and to and from host memory,
and all-reduce at three sizes. It says what is wrong, on which part, and what to do. Every GPU and link is compared with
the profile and with its siblings. What could not be measured is ERROR, which means neither healthy nor faulty.

Under mpirun, with one rank per GPU, every node, GPU and link has a verdict, and so has the cluster.

Exit codes: 0 healthy (warnings included); 1 something fails; 2 wrong usage; 3 could not measure.
""",
)

HELP_OF_BRIEF = HelpPage(
    (
        ("Check this machine", "gpubench"),
        ("Read facts only, without a measurement", "gpubench --quick"),
        ("Keep the result, which gpubench report shows again", "gpubench -o today.json"),
        ("Try it without a GPU", "gpubench --simulate hgx-h100-8 --fault gpu5:nvlink=12"),
    ),
    """
The ten lines say what is here, whether it is healthy, how fast it is compared with what is expected, what is wrong, and
which command to type next. Copies between all GPUs and all-reduce are measured at few sizes; gpubench check measures
more. A machine without GPUs is shown too.

Exit codes: 0 done; 1 something fails; 2 wrong usage; 3 could not measure.
""",
)


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The depth of a check, and the profile to judge by."""

    help_group: ClassVar = MEASURE

    quick: bool = flag("Read facts only, measure nothing.", common=True)
    full: bool = flag("Measure all collectives and all ways of copying.", common=True)
    profile: str | None = option(
        "NAME|FILE",
        "Judge by this profile, with its number of GPUs and NICs (host: a machine without GPUs).",
        autocompletion=completed("profile"),
        common=True,
        group=JUDGE,
    )
    expect_gpus: int | None = expected_gpus()
    hosts: str | None = option("FILE", "Start one rank per GPU by mpirun on these hosts, one per line.", common=True)
    slurm: bool = flag(
        "Start one rank per GPU by srun on all nodes of this allocation.", name="--slurm/--no-slurm", common=True
    )
    ranks_per_gpu: int = sharing_ranks()
    strict: bool = flag("Exit 1 for warnings too.", common=True, group=JUDGE)
    timeout: float = step_timeout("reading a driver (20 s at most), or one measurement", default=120.0)
    simulation: SimulationOptions
    recording: RecordingOptions
    presentation: PresentationOptions

    def plan(self, also: Sequence[str] = ()) -> "CheckPlan":
        """The plan of these options. Raises UsageError for any that cannot be, or a broken profile.

        `also` are sections that the report has beside those of a check.
        """
        from gpubench.jobs.check import FACTS_TIMEOUT_S, SECTIONS, CheckPlan, Depth
        from gpubench.jobs.sources import source_of

        if self.hosts == "":
            raise UsageError(
                "--hosts without a file's name",
                expected="a file with one host per line",
                reason="the variable is probably not set; only this machine would be checked",
            )
        elsewhere = {"--simulate": self.simulation.simulate, "--replay": self.recording.replay}
        started = [name for name, given in {"--hosts": self.hosts, "--slurm": self.slurm}.items() if given]
        unfit = [*started[1:], *(name for name, given in elsewhere.items() if given)]
        if started and unfit:
            raise exclusive((started[0], unfit[0]), "one of them: ranks can be started on real machines only")
        if self.quick and self.full:
            raise exclusive(("--quick", "--full"), "one of them, or neither")
        no_ranks = [*started, *(name for name, given in {**elsewhere, "--quick": self.quick}.items() if given)]
        if self.ranks_per_gpu > 1 and no_ranks:
            raise exclusive((no_ranks[0], "--ranks-per-gpu"), "one of them: its ranks measure this machine's GPUs")
        check_profile(self.profile)
        recording = self.recording.parse({"--simulate": self.simulation.simulate, "--record": self.recording.record})
        simulation, timeout_s = self.simulation.parse(), min(self.timeout, FACTS_TIMEOUT_S)
        return CheckPlan(
            depth=Depth.QUICK if self.quick else Depth.FULL if self.full else Depth.DEFAULT,
            source=source_of(timeout_s, simulation=simulation, replay=recording.replay),
            recording=recording,
            profile=self.profile,
            expected_gpus=self.expect_gpus,
            ranks_per_gpu=self.ranks_per_gpu,
            strict=self.strict,
            timeout_s=self.timeout,
            presentation=self.presentation.parse((*SECTIONS, *also)),
        )


def app(command: Command) -> typer.Typer:
    """The command for typer: the check, or, without a name, the one that answers in ten lines."""
    if command.name:
        return typer_app(command, HELP, CheckOptions, _run)
    return typer_app(
        command, HELP_OF_BRIEF, CheckOptions, _run_briefly, without=("full", "hosts", "slurm", "ranks_per_gpu")
    )


def _run(options: CheckOptions) -> int:
    from gpubench.jobs import check

    plan = options.plan()
    if not (options.hosts or options.slurm):
        return check.run(plan, sys.argv[1:])
    from gpubench.jobs.several_hosts import run_there

    hosts = None if options.slurm else Path(options.hosts or "")
    own = given_words(replace(options, hosts=None, slurm=False), PresentationOptions)
    return run_there(plan, sys.argv[1:], ["check", *own], hosts=hosts, gpus=options.expect_gpus)


def _run_briefly(options: CheckOptions) -> int:
    from gpubench.jobs import check
    from gpubench.jobs.check import Depth

    plan = options.plan(also=("nodes", "gpus", "nics"))
    depth = plan.depth if plan.depth is Depth.QUICK else Depth.BRIEF
    return check.run(replace(plan, depth=depth, brief=True), sys.argv[1:])
