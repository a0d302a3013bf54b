"""One command per collective, with its help page and option checks."""

from typing import TYPE_CHECKING

import typer

from gpubench.cli.exclusions import check_evidence, check_profile
from gpubench.cli.signature import HelpPage, check_presentation, job_runner, typer_app
from gpubench.collectives.registry import collective_named
from gpubench.errors import UsageError, exclusive
from gpubench.jobs.collective.nccl_tests import settle_nccl_tests
from gpubench.jobs.collective.plan import BACKEND_SUMMARIES, CollectivePlan
from gpubench.model.terms.commands import Command
from gpubench.model.terms.operation import HIERARCHICAL_OPTION as HIERARCHICAL_OPTION
from gpubench.model.terms.operation import HOST, ReduceOp
from gpubench.model.terms.options import REQUIRE_PATH, changed_options
from gpubench.model.terms.ranks import check_split
from gpubench.model.terms.settings import SET_OPTION
from gpubench.model.terms.statistics import AUTO

if TYPE_CHECKING:
    from gpubench.collectives.record import Collective


def checked(plan: CollectivePlan) -> CollectivePlan:
    """Return the plan with its presentation checked. Raises UsageError for options that exclude each other."""
    _check_replay(plan)
    for path in plan.presentation.output or ():
        if path in (*ReduceOp, "all"):
            raise UsageError(
                f"-o {path}",
                expected="-o FILE",
                reason="in nccl-tests -o names the reduction, in gpubench it names a file",
                next_step=f"--op {path if path != 'all' else 'sum,prod,max,min,avg'}",
            )
    check_evidence(plan.shows_evidence, strict=plan.strict, required=bool(plan.require_path))
    check_profile(plan.profile)
    plan = check_presentation(plan, SECTIONS)
    if not plan.collective.in_place and plan.in_place:
        raise UsageError(
            f"{plan.command} has no in-place form",
            reason="a rank would overwrite data that it has not sent yet",
            next_step=f"gpubench {plan.command}",
        )
    _check_compared(plan)
    _check_counts(plan)
    _ = plan.request  # Raises UsageError if --iters, --budget and --graph contradict each other
    if plan.split is not None:
        _check_split(plan, plan.split)
    if plan.simulation is not None:
        plan.refuse_gpu_options("a simulated machine has no real GPUs", but=(*plan.comparison_options, REQUIRE_PATH))
    if plan.backend == HOST:
        if plan.targets.gpus is not None:
            raise exclusive(("--gpus", "--backend host"), "only one of them, because --backend host uses no GPU")
        plan.refuse_gpu_options("--backend host uses none")
    plan.refuse_what_backend_lacks()
    return plan


def _check_split(plan: CollectivePlan, text: str) -> None:
    check_split(text)
    paths = "a single group", "NCCL's log and the link counters do not distinguish groups"
    refused = {
        "--evidence": (bool(plan.shows_evidence), *paths),
        "--strict": (plan.strict, *paths),
        REQUIRE_PATH: (bool(plan.require_path), *paths),
        "--record": (
            plan.simulation is not None and plan.recording.record is not None,
            "a single group",
            "a recorded simulation has one group of all ranks",
        ),
        f"--iters {AUTO}": (
            plan.iters == AUTO,
            "the same number of iterations in every group",
            "groups would end at different times, and the last one would not share the links",
        ),
    }
    for name, (is_given, expected, reason) in refused.items():
        if is_given:
            instead = "--iters 100" if name == f"--iters {AUTO}" else f"leave {name} out"
            raise UsageError(f"{name} with --split {text}", expected=expected, reason=reason, next_step=instead)


def _check_counts(plan: CollectivePlan) -> None:
    """Raise UsageError for options that do not work with several numbers of ranks."""
    once = {
        "--split": plan.split is not None,
        "--cycles": plan.cycles != 1,
        **dict.fromkeys(plan.comparison_options, True),
    }
    for name in (name for name, is_given in once.items() if is_given and plan.scales):
        counts = ",".join(map(str, plan.rank_counts))
        raise exclusive((f"--np {counts}", name), "only one of them, or a single number of ranks")


def _check_compared(plan: CollectivePlan) -> None:
    """Raise UsageError for options that do not work in a comparison of settings or backends."""
    if plan.is_compared and plan.split is not None:
        raise UsageError(
            f"{plan.comparison_options[0]} with --split",
            expected="only one of them, because all ranks together measure several settings",
            next_step="leave --split out",
        )
    once = {
        "--record": plan.recording.record is not None,
        "--split": plan.split is not None,
        "--simulate": plan.simulation is not None,
        SET_OPTION: bool(plan.processes),
    }
    for name in (name for name, is_given in once.items() if is_given and plan.cycles != 1):
        raise exclusive((f"--cycles {plan.cycles}", name), f"only one of them, because {name} measures a sweep once")
    if not plan.processes:
        return
    unfit = {
        "--record": plan.recording.record is not None,
        HIERARCHICAL_OPTION: plan.variants.hierarchical,
        f"--backend {plan.typed.get('backends')}": bool(plan.others),
    }
    for name in (name for name, is_given in unfit.items() if is_given):
        raise UsageError(
            f"{SET_OPTION} {plan.variants.set_variables[0]} with {name}",
            expected="only one of them, because NCCL reads this variable once per process, so every value needs a "
            "separate job",
            next_step=f"leave {name} out",
        )


def _check_replay(plan: CollectivePlan) -> None:
    if plan.recording.replay is None:
        return
    fitting = {"--replay", "--evidence", "--strict", REQUIRE_PATH, "--expect-gpus", "--profile"}
    given = [name for name, _ in changed_options(plan)]
    given += ["--simulate"] * (plan.simulation is not None) + ["--seed"] * (plan.seed != 0)
    for name in given:
        if name not in fitting and name.replace("--no-", "--") not in plan.presentation.defaults:
            expected = "--replay alone, or with --strict, --profile, --expect-gpus and output options"
            raise exclusive(("--replay", name), expected)


SECTIONS = (
    *("rows", "scaling", "rank_times", "evidence", "fallback", "causes", "findings"),
    *("winners", "refused", "backends", "mpi_support"),
)


def app(command: Command) -> typer.Typer:
    """Return the typer command, with only those options that apply to this collective."""
    collective = collective_named(command.name)
    means_something = {
        "ops": collective.reduces,
        "root": collective.rooted,
        "algo": not collective.point_to_point,
        "proto": not collective.point_to_point,
        "hierarchical": collective.decomposes,
        "skew": collective.skewed is not None,
    }
    without = {option for option, has_meaning in means_something.items() if not has_meaning}

    run = job_runner("gpubench.jobs.collective.job", checked)
    return typer_app(
        command, collective_help(collective), CollectivePlan, run, without=without, settle=settle_nccl_tests
    )


def collective_help(collective: "Collective") -> HelpPage:
    if collective.reduces:
        example, own = "Measure another data type, and two reductions", "--dtype bfloat16 --op sum,max"
    elif collective.rooted:
        example, own = "Measure with another root", "--root 1"
    else:
        example, own = "Time ten replays of a CUDA graph", "--graph 10"
    return HelpPage(
        (
            (
                "Measure on all GPUs of this host, one rank per GPU, and keep the result",
                f"gpubench {collective.name} --sizes 1K:4G --output result.json",
            ),
            ("Measure on two hosts, one rank per GPU", f"gpubench {collective.name} --hosts node1,node2"),
            (example, f"gpubench {collective.name} {own}"),
            ("Write CSV", f"gpubench {collective.name} --format csv > result.csv"),
            (
                "Try it without a GPU",
                f"gpubench {collective.name} --simulate hgx-h100-8 --fault link0-3:staged=yes",
            ),
        ),
        f"""{collective.description}

Backends: {BACKEND_SUMMARIES}.
""",
    )
