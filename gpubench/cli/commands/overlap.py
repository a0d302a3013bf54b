"""`gpubench overlap`: its help page and checks of its options."""

from gpubench.cli.exclusions import check_evidence, check_profile
from gpubench.cli.signature import HelpPage, check_presentation, job_runner, make_app
from gpubench.training.overlap_options import OverlapPlan

HELP = HelpPage(
    (
        ("Measure all-reduce during a matrix product, on all GPUs of this host", "gpubench overlap"),
        ("Measure on two nodes of eight GPUs", "mpirun -n 16 gpubench overlap --sizes 256M"),
        (
            "Measure other computations, sizes and limits on NCCL's CTAs",
            "gpubench overlap --partner gemm,copy,chain --sizes 64M,256M --ctas own,8",
        ),
        (
            "Measure all-gather and write an HTML page",
            "gpubench overlap --collective allgather --output overlap.html",
        ),
        ("Try it without a GPU", "gpubench overlap --simulate hgx-h200-4"),
    ),
    """
The collective and the computation run alone, then together, until clocks and power have settled. The report shows how
much slower each becomes, how long the collective waited for SMs, and how much of it is hidden. The measurement is
repeated with several limits on NCCL's CTAs. The last line names the limit with the shortest step.
docs/commands/overlap.md defines every column.
""",
)


def checked(plan: OverlapPlan) -> OverlapPlan:
    """Return the plan with its presentation checked. Raises UsageError for options that exclude each other."""
    from gpubench.model.results.overlap import SECTIONS

    check_evidence(plan.shows_evidence, strict=plan.strict)
    check_profile(plan.profile)
    if plan.simulation is not None and plan.ranks_per_gpu > 1:
        plan.collective_plan.refuse_gpu_options("a simulated machine has no real GPUs")
    return check_presentation(plan, SECTIONS)


app = make_app(HELP, OverlapPlan, job_runner("gpubench.training.overlap", checked))
