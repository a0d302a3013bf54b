"""`gpubench plan`: its help page and checks of its options."""

from gpubench.cli.signature import HelpPage, check_presentation, job_runner, make_app
from gpubench.errors import UsageError
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

Add one measured number: --step or --tokens-per-second of a run, --tflops, or --measure. Without one, the computation
time, and so the prediction, is a range based on the share of the data-sheet speed that published runs reach. Times of
collectives come from --results, otherwise from a measurement now, otherwise from the profile. Contention comes from
--overlap, otherwise from a measurement on two H200s. docs/internals/plan-model.md derives every
formula.
""",
)


def _checked(plan: TrainingPlan) -> TrainingPlan:
    """Return the plan with its presentation checked.

    Raises: UsageError without a model, and for a measured step without its layout.
    """
    from gpubench.training.report import SECTIONS

    if plan.model_file is None and plan.parameters is None:
        raise UsageError(
            "neither MODEL nor --parameters",
            expected="a file with the model, or its number of parameters",
            next_step="gpubench plan --parameters 7B --simulate hgx-h200-8",
        )
    if plan.measured_text and not plan.layouts:
        raise UsageError(
            "a measured step without --layout",
            expected="the layout with which it was measured",
            next_step="--layout fsdp",
        )
    return check_presentation(plan, SECTIONS)


app = make_app(HELP, TrainingPlan, job_runner("gpubench.training.job", _checked))
