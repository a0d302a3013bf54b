"""`gpubench check`, and `gpubench` alone, which is a check of ten lines: their help, and the runs."""

import sys
from collections.abc import Sequence
from dataclasses import replace

import typer

from gpubench.cli.options import PresentationOptions, check_profile, check_replay, given_arguments
from gpubench.cli.signature import PLOT, HelpPage, typer_app
from gpubench.errors import exclusive
from gpubench.jobs.plans import CheckPlan
from gpubench.model.terms.commands import Command

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
""",
)


def app(command: Command) -> typer.Typer:
    """The command for typer: the check, or, without a name, the one that answers in ten lines."""
    if command.name:
        return typer_app(command, HELP, CheckPlan, _run, without=PLOT)
    without = (*PLOT, "full", "hosts", "slurm", "ranks_per_gpu")
    return typer_app(command, HELP_OF_BRIEF, CheckPlan, _run_briefly, without=without)


def checked(plan: CheckPlan, shown: PresentationOptions, also: Sequence[str] = ()) -> CheckPlan:
    """The plan with its presentation. Raises UsageError for options that exclude each other, or a broken profile.

    `also` are sections that the report has beside those of a check.
    """
    from gpubench.jobs.check import SECTIONS

    elsewhere = {"--simulate": plan.simulation, "--replay": plan.recording.replay}
    started = [name for name, value in {"--hosts": plan.hosts, "--slurm": plan.slurm}.items() if value]
    unfit = [*started[1:], *(name for name, value in elsewhere.items() if value)]
    if started and unfit:
        raise exclusive((started[0], unfit[0]), "one of them: ranks can be started on real machines only")
    if plan.quick and plan.full:
        raise exclusive(("--quick", "--full"), "one of them, or neither")
    no_ranks = [*started, *(name for name, value in {**elsewhere, "--quick": plan.quick}.items() if value)]
    if plan.ranks_per_gpu > 1 and no_ranks:
        raise exclusive((no_ranks[0], "--ranks-per-gpu"), "one of them: its ranks measure this machine's GPUs")
    check_profile(plan.profile)
    check_replay(plan.recording, {"--simulate": plan.simulation, "--record": plan.recording.record})
    return replace(plan, presentation=shown.parse((*SECTIONS, *also)))


def _run(plan: CheckPlan, shown: PresentationOptions) -> int:
    from gpubench.jobs import check

    plan = checked(plan, shown)
    if not (plan.hosts or plan.slurm):
        return check.run(plan, sys.argv[1:])
    from gpubench.jobs.several_hosts import run_there

    return run_there(plan, sys.argv[1:], ["check", *given_arguments(replace(plan, hosts=None, slurm=False))])


def _run_briefly(plan: CheckPlan, shown: PresentationOptions) -> int:
    from gpubench.jobs import check

    return check.run(checked(replace(plan, brief=True), shown, ("nodes", "gpus", "nics")), sys.argv[1:])
