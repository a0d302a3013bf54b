"""`gpubench plan`: its options, and the prediction."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gpubench.cli.options import PresentationOptions
from gpubench.cli.signature import HelpPage, app_of
from gpubench.errors import UsageError, exclusive
from gpubench.jobs.options import INPUT, MEASURE, SIMULATE, argument, flag, option, step_timeout, unknown_choice
from gpubench.records import dataclass

if TYPE_CHECKING:
    from gpubench.jobs.planned_machine import TrainingPlan
    from gpubench.model.workload import TransformerModel

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


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The model, the machine, and the sources of times."""

    help_group: ClassVar = INPUT

    model_file: str | None = argument("MODEL", "File with the model (.toml or .json), or use --parameters.")
    parameters: str | None = option(
        "7B", "In place of MODEL: a transformer with about this many parameters, without embedding.", common=True
    )
    sequence: int | None = option("N", "Tokens per sequence.", min=1, max=100_000_000)
    batch: int | None = option("N", "Sequences per microbatch on one GPU.", min=1, max=1_000_000)
    global_batch: int | None = option("N", "Sequences per step on all GPUs (default: --batch × GPUs).", min=1)
    microbatches: int | None = option("N", "Microbatches per data-parallel rank, in every layout.", min=1, max=100_000)
    layout: list[str] | None = option(
        "WORDS",
        "Layout to compare: ddp, zero1, zero2, fsdp or hsdpN, with tpN, sp, ppN, vN, cpN, epN. Repeatable "
        "(default: the first four).",
        common=True,
    )
    recompute: str | None = option(
        "full|selective|none", "What the backward pass computes again, to save memory (default: none).", common=True
    )
    fp8: bool = flag("Matrix products compute in 8 bits.")
    simulate: str | None = option(
        "MACHINE",
        "Plan for a machine by its profile: hgx-h200-8, or 'hgx-h100-8*4' for 4 nodes (default: this machine).",
        completed_as="simulate",
        common=True,
        group=SIMULATE,
    )
    profile: str | None = option("NAME|FILE", "Profile for times that were not measured.", completed_as="profile")
    nodes: int | None = option(
        "N", "Plan for N nodes of this machine, joined as in its profile.", min=1, max=16384, common=True
    )
    gpus: int | None = option("N", "Use only N GPUs (default: all).", min=1, max=1_000_000)
    results: list[str] | None = option("DIR|FILE", "Stored results of collectives. Repeatable.", common=True)
    overlap: list[str] | None = option("FILE", "Stored results of gpubench overlap. Repeatable.")
    other_machine: bool = flag("Use results of another machine.")
    measure: bool = flag(
        "Measure the model's computation here: its blocks with PyTorch.",
        common=True,
        group=MEASURE,
    )
    tflops: float | None = option("N", "Speed of the model on one GPU, TFLOP/s.", min=1e-3, max=1e6, common=True)
    step: str | None = option(
        "412ms", "Measured time of a step with the first --layout: everything else follows from it.", common=True
    )
    tokens_per_second: float | None = option(
        "N", "Measured tokens per second of all GPUs, in place of --step.", min=1e-3, max=1e15, common=True
    )
    measured_on: int | None = option(
        "GPUS", "GPUs of the run that --step or --tokens-per-second is from (default: those planned for).", min=1
    )
    optimizer: str = option("adam|none", "Optimizer whose state needs memory.", default="adam")
    bucket_mb: float | None = option(
        "MB",
        "Size of gradient buckets (default: 25 for ddp, as in PyTorch; for zero1 as in Megatron-LM).",
        min=0.001,
        max=1e6,
    )
    imbalance: float = option(
        "FACTOR", "Tokens of the busiest expert rank, divided by the average.", default=1.0, min=1, max=1000
    )
    fault: list[str] | None = option(
        "WHERE:KEY=VALUE",
        "Predict the cost of this fault, e.g. gpu0:nvlink=9. Repeatable.",
        common=True,
        group=SIMULATE,
    )
    faults_from: str | None = option("FILE", "Predict the cost of the faults in a stored result of check or scan.")
    timeout_s: float = step_timeout("one measurement", default=120.0)

    def plan(self, shown: PresentationOptions) -> "TrainingPlan":
        """The plan of these options. Raises UsageError for options that exclude each other."""
        from gpubench.jobs.plan import SECTIONS, parse_step
        from gpubench.jobs.planned_machine import TrainingPlan
        from gpubench.model.results.report import made_of

        self._check()
        model, notes = self._model()
        return made_of(
            TrainingPlan,
            self,
            model=model,
            notes=tuple(notes),
            layouts=tuple(self.layout or ()),
            results=tuple(map(Path, self.results or ())),
            overlap=tuple(map(Path, self.overlap or ())),
            step_seconds=None if self.step is None else parse_step(self.step),
            with_optimizer=self.optimizer == "adam",
            faults=tuple(self.fault or ()),
            faults_from=None if self.faults_from is None else Path(self.faults_from),
            timeout_s=self.timeout_s,
            presentation=shown.parse(SECTIONS),
        )

    def _check(self) -> None:
        if self.optimizer not in ("adam", "none"):
            raise unknown_choice("--optimizer", self.optimizer, ("adam", "none"))
        given: dict[str, object] = {
            "--measure": self.measure,
            "--tflops": self.tflops,
            "--step": self.step,
            "--tokens-per-second": self.tokens_per_second,
        }
        said = [name for name, value in given.items() if value]
        if len(said) > 1:
            raise exclusive(said, "one source of the computation time")
        if (self.step is not None or self.tokens_per_second is not None) and not self.layout:
            raise UsageError(
                "a measured step without --layout",
                expected="the layout that it was measured with",
                next_step="--layout fsdp",
            )
        if self.simulate is not None and self.profile is not None:
            raise exclusive(("--simulate", "--profile"), "one of them: both name a profile")
        if self.global_batch is not None and self.microbatches is not None:
            raise exclusive(("--global-batch", "--microbatches"), "one of them: each follows from the other")

    def _model(self) -> "tuple[TransformerModel, list[str]]":
        from dataclasses import replace

        from gpubench.model.workload import Recompute, model_of_parameters
        from gpubench.readers.workload import USUAL_SEQUENCE, parse_parameters, read_model

        if (self.model_file is None) == (self.parameters is None):
            given = "neither MODEL nor --parameters" if self.parameters is None else "MODEL and --parameters"
            raise UsageError(
                given,
                expected="one of them: a file with the model, or its number of parameters",
                next_step="gpubench plan --parameters 7B --simulate hgx-h200-8",
            )
        words = tuple(map(str, Recompute))
        if self.recompute is not None and self.recompute not in words:
            raise unknown_choice("--recompute", self.recompute, words)
        recipe: dict[str, Any] = {} if self.recompute is None else {"recompute": Recompute(self.recompute)}
        recipe |= {"fp8": True} if self.fp8 else {}
        if self.model_file is not None:
            model, notes = read_model(Path(self.model_file), sequence=self.sequence, batch=self.batch)
            return replace(model, **recipe), notes
        model = model_of_parameters(
            parse_parameters(self.parameters or ""), sequence=self.sequence or USUAL_SEQUENCE, batch=self.batch or 1
        )
        shape = f"{model.layers} layers with a hidden size of {model.hidden}, {model.parameters / 1e9:.3g} B parameters"
        return replace(model, **recipe), [f"--parameters {self.parameters} is taken for {shape} without embedding"]


def _run(options: PlanOptions, shown: PresentationOptions) -> int:
    from gpubench.jobs import plan

    return plan.run(options.plan(shown), sys.argv[1:])


app = app_of(HELP, PlanOptions, _run)
