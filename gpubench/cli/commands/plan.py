"""`gpubench plan`: its options, and the prediction."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from gpubench.cli.options import PresentationOptions
from gpubench.cli.signature import INPUT, MEASURE, SIMULATE, HelpPage, app_of, completed, flag, option, step_timeout
from gpubench.errors import UsageError, exclusive

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
            "Predict from measured results",
            "gpubench plan model.toml --results results/ --overlap overlap.json --backward-ms 57.8 --forward-ms 25.0",
        ),
        ("Measure computation and collectives here", "gpubench plan config.json --measure"),
        (
            "Predict the cost of a fault",
            "gpubench plan --parameters 7B --simulate hgx-h200-8 --fault link0-1:staged=yes",
        ),
    ),
    """
The report has the milliseconds that communication adds to a step, the best bucket size, a comparison of layouts, and
the cost of faults. A step is forward and backward, simulated event by event.

MODEL is TOML or JSON with layers, hidden, heads, sequence, batch, ..., or a Hugging Face config.json.

Times of collectives come from --results, otherwise from a measurement now, otherwise from the profile. Contention comes
from --overlap, otherwise it is ignored. Computation comes from --forward-ms and --backward-ms, --measure, --tflops,
otherwise from the data sheet of the GPU. The report says which. docs/plan.md derives every formula and compares
predictions with measured steps.
""",
)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The model, the machine, and the sources of times."""

    help_group: ClassVar = INPUT

    model_file: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="File with the model (.toml or .json), or use --parameters.")
    ] = None
    parameters: str | None = option(
        "7B", "In place of MODEL: a transformer with about this many parameters, without embedding.", common=True
    )
    sequence: int | None = option("N", "Tokens per sequence.", min=1, max=100_000_000)
    batch: int | None = option("N", "Sequences per microbatch on one GPU.", min=1, max=1_000_000)
    global_batch: int | None = option("N", "Sequences per step on all GPUs (default: --batch × GPUs).", min=1)
    microbatches: int | None = option("N", "Microbatches per data-parallel rank, in every layout.", min=1, max=100_000)
    layout: list[str] | None = option(
        "WORDS",
        "Layout to compare: ddp, zero1, zero2 or fsdp, with tpN, sp, ppN, vN, ringN, ulyssesN, epN. Repeatable "
        "(default: all).",
        common=True,
    )
    simulate: str | None = option(
        "MACHINE",
        "Plan for a machine by its profile: hgx-h200-8, or 'hgx-h100-8*4' for 4 nodes (default: this machine).",
        autocompletion=completed("simulate"),
        common=True,
        group=SIMULATE,
    )
    profile: str | None = option(
        "NAME|FILE", "Profile to take times from that were not measured.", autocompletion=completed("profile")
    )
    nodes: int | None = option(
        "N", "Plan for N nodes of this machine, joined as in its profile.", min=1, max=16384, common=True
    )
    gpus: int | None = option("N", "Use only N GPUs (default: all).", min=1, max=1_000_000)
    results: list[str] | None = option("DIR|FILE", "Stored results of collectives. Repeatable.", common=True)
    overlap: list[str] | None = option("FILE", "Stored results of gpubench overlap. Repeatable.", common=True)
    other_machine: bool = flag("Use results of another machine.")
    measure: bool = flag(
        "Measure the model's computation here: its blocks with PyTorch, otherwise its matrix products with CuPy.",
        common=True,
        group=MEASURE,
    )
    forward_ms: float | None = option(
        "MS", "Measured time of the forward pass of one microbatch on one GPU.", min=1e-6, common=True
    )
    backward_ms: float | None = option("MS", "Measured time of the backward pass.", min=1e-6, common=True)
    tflops: float | None = option("N", "Speed of the model on one GPU, TFLOP/s.", min=1e-3, max=1e6, common=True)
    gpu_memory: str | None = option("80G", "Memory of a GPU (default: as found).")
    optimizer: str = option("adam|none", "Optimizer whose state needs memory.", default="adam")
    bucket_mb: float | None = option("MB", "Size of DDP's buckets (default: compare several).", min=0.001, max=1e6)
    first_bucket_mb: float | None = option("MB", "Size of the first bucket (default: 1, as in PyTorch).", min=0.001)
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
    timeout: float = step_timeout("one measurement", default=120.0)
    presentation: PresentationOptions

    def plan(self) -> "TrainingPlan":
        """The plan of these options. Raises UsageError for options that exclude each other."""
        from gpubench.jobs.plan import SECTIONS, parse_memory
        from gpubench.jobs.planned_machine import TrainingPlan

        self._check()
        model, notes = self._model()
        return TrainingPlan(
            model=model,
            notes=tuple(notes),
            simulate=self.simulate,
            profile=self.profile,
            nodes=self.nodes,
            gpus=self.gpus,
            layouts=tuple(self.layout or ()),
            sequences=self.global_batch,
            microbatches=self.microbatches,
            bucket_mb=self.bucket_mb,
            first_bucket_mb=self.first_bucket_mb,
            imbalance=self.imbalance,
            results=tuple(map(Path, self.results or ())),
            overlap=tuple(map(Path, self.overlap or ())),
            other_machine=self.other_machine,
            measure=self.measure,
            forward_ms=self.forward_ms,
            backward_ms=self.backward_ms,
            tflops=self.tflops,
            gpu_memory_bytes=None if self.gpu_memory is None else parse_memory(self.gpu_memory),
            with_optimizer=self.optimizer == "adam",
            faults=tuple(self.fault or ()),
            faults_from=None if self.faults_from is None else Path(self.faults_from),
            timeout_s=self.timeout,
            presentation=self.presentation.parse(SECTIONS),
        )

    def _check(self) -> None:
        """Raise UsageError for options that exclude each other."""
        from gpubench.cli.options import unknown_word

        if self.optimizer not in ("adam", "none"):
            raise unknown_word("--optimizer", self.optimizer, ("adam", "none"))
        given = {"--measure": self.measure, "--tflops": self.tflops, "--backward-ms": self.backward_ms}
        given["--forward-ms"] = self.forward_ms and self.backward_ms is None
        said = [name for name, value in given.items() if value]
        if len(said) > 1:
            raise exclusive(said, "one source of the computation time")
        if self.simulate is not None and self.profile is not None:
            raise exclusive(("--simulate", "--profile"), "one of them: both name a profile")
        if self.global_batch is not None and self.microbatches is not None:
            raise exclusive(("--global-batch", "--microbatches"), "one of them: each follows from the other")

    def _model(self) -> "tuple[TransformerModel, list[str]]":
        from gpubench.model.workload import model_of_parameters
        from gpubench.readers.workload import USUAL_SEQUENCE, parse_parameters, read_model

        if (self.model_file is None) == (self.parameters is None):
            given = "neither MODEL nor --parameters" if self.parameters is None else "MODEL and --parameters"
            raise UsageError(
                given,
                expected="one of them: a file with the model, or its number of parameters",
                next_step="gpubench plan --parameters 7B --simulate hgx-h200-8",
            )
        if self.model_file is not None:
            return read_model(Path(self.model_file), sequence=self.sequence, batch=self.batch)
        model = model_of_parameters(
            parse_parameters(self.parameters or ""), sequence=self.sequence or USUAL_SEQUENCE, batch=self.batch or 1
        )
        shape = f"{model.layers} layers with a hidden size of {model.hidden}, {model.parameters / 1e9:.3g} B parameters"
        return model, [f"--parameters {self.parameters} is taken for {shape} without embedding"]


def _run(options: PlanOptions) -> int:
    from gpubench.jobs import plan

    return plan.run(options.plan(), sys.argv[1:])


app = app_of(HELP, PlanOptions, _run)
