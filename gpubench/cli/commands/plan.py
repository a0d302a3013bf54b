"""`gpubench plan`: its help, what excludes what, and the prediction."""

import sys
from dataclasses import replace

from gpubench.cli.options import PresentationOptions
from gpubench.cli.signature import HelpPage, app_of
from gpubench.errors import UsageError, exclusive
from gpubench.training.options import TrainingPlan

HELP = HelpPage(
    (
        (
            "Compare two layouts on a simulated cluster of four nodes",
            "gpubench plan --parameters 7B --simulate 'hgx-h100-8*4' --layout 'tp2 pp2 ddp' --layout fsdp",
        ),
        (
            "Predict 64 nodes from a step that was measured on one",
            "gpubench plan --parameters 7B --simulate 'hgx-h100-8*64' --layout fsdp --step 412ms --measured-on 8",
        ),
        ("Measure computation and collectives here", "gpubench plan config.json --measure"),
        (
            "Predict the cost of a fault",
            "gpubench plan --parameters 7B --simulate hgx-h200-8 --fault link0-1:staged=yes",
        ),
    ),
    """
The report has the milliseconds that communication adds to a step, a comparison of layouts, and the cost of faults. A
step is forward, backward and optimizer, simulated event by event.

MODEL is TOML or JSON with layers, hidden, heads, sequence, batch, ..., or a Hugging Face config.json.

Give one measured number: --step or --tokens-per-second of a run, --tflops, or --measure. Without it computation is a
range, the share of the data sheet that published runs reach on such GPUs, and so is the answer. Times of collectives
come from --results, otherwise from a measurement now, otherwise from the profile; contention from --overlap, otherwise
from what two H200s showed. docs/plan.md derives every formula and compares predictions with published steps.
""",
)


def _run(plan: TrainingPlan, shown: PresentationOptions) -> int:
    from gpubench.training import job

    _check(plan)
    return job.run(replace(plan, presentation=shown.parse(job.SECTIONS)), sys.argv[1:])


def _check(plan: TrainingPlan) -> None:
    """Raise UsageError for options that exclude each other, or that lack one."""
    if (plan.model_file is None) == (plan.parameters is None):
        seen = "neither MODEL nor --parameters" if plan.parameters is None else "MODEL and --parameters"
        raise UsageError(
            seen,
            expected="one of them: a file with the model, or its number of parameters",
            next_step="gpubench plan --parameters 7B --simulate hgx-h200-8",
        )
    sources = {
        "--measure": plan.measure,
        "--tflops": plan.tflops,
        "--step": plan.step_seconds,
        "--tokens-per-second": plan.tokens_per_second,
    }
    said = [name for name, value in sources.items() if value]
    if len(said) > 1:
        raise exclusive(said, "one source of the computation time")
    if plan.measured_text and not plan.layouts:
        raise UsageError(
            "a measured step without --layout",
            expected="the layout that it was measured with",
            next_step="--layout fsdp",
        )
    if plan.simulate is not None and plan.profile is not None:
        raise exclusive(("--simulate", "--profile"), "one of them: both name a profile")
    if plan.global_batch is not None and plan.microbatches is not None:
        raise exclusive(("--global-batch", "--microbatches"), "one of them: each follows from the other")


app = app_of(HELP, TrainingPlan, _run)
