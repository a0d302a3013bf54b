"""`gpubench plan`: its options, and the prediction."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpubench.cli.options import PresentationOptions
from gpubench.cli.signature import app_of, completed, flag, option
from gpubench.errors import UsageError, exclusive

if TYPE_CHECKING:
    from gpubench.jobs.planned_machine import TrainingPlan
    from gpubench.model.workload import TransformerModel

HELP = """
What this fabric, as measured, makes of a training step: the milliseconds that communication costs, the best bucket, how
layouts compare, and what a fault of the fabric would cost. A step is forward and backward, simulated event by event.

MODEL is TOML or JSON with layers, hidden, heads, sequence, batch, ..., or a Hugging Face config.json.

  gpubench plan model.toml --results results/ --overlap overlap.json --backward-ms 57.8 --forward-ms 25.0

  gpubench plan config.json --measure

  gpubench plan --parameters 7B --simulate 'hgx-h100-8*4' --layout 'tp2 pp2 ddp' --layout fsdp

  gpubench plan --parameters 7B --simulate hgx-h200-8 --fault link0-1:staged=yes

Collectives come from --results, else are measured now, else from the profile; contention from --overlap, else it is
taken for none; computation from --forward-ms and --backward-ms, --measure, --tflops, else the data sheet of the GPU.
The report says which. docs/plan.md derives every formula, and has predictions beside measured steps.
"""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The model, the machine, and what its times follow from."""

    model_file: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The model, a .toml or .json; or --parameters.")
    ] = None
    parameters: str | None = option("7B", "A model with about so many parameters in place of MODEL: blocks alone.")
    sequence: int | None = option("N", "Tokens of a sequence.", min=1, max=100_000_000)
    batch: int | None = option("N", "Sequences of a microbatch on one GPU.", min=1, max=1_000_000)
    global_batch: int | None = option("N", "Sequences of a step in all. Default: --batch × GPUs.", min=1)
    microbatches: int | None = option(
        "N", "Microbatches of a data-parallel rank, whatever the layout.", min=1, max=100_000
    )
    layout: list[str] | None = option(
        "WORDS", "ddp, zero1, zero2 or fsdp, with tpN, sp, ppN, vN, ringN, ulyssesN, epN. Repeatable. Default: all."
    )
    simulate: str | None = option(
        "NAME[/GPUS][*NODES]", "A machine by its profile in place of this one.", autocompletion=completed("simulate")
    )
    profile: str | None = option(
        "NAME|FILE", "What to expect where nothing was measured.", autocompletion=completed("profile")
    )
    nodes: int | None = option("N", "Nodes alike: what lies between them is the profile's.", min=1, max=16384)
    gpus: int | None = option("N", "GPUs that take part. Default: all.", min=1, max=1_000_000)
    results: list[str] | None = option("DIR|FILE", "Stored results of collectives. Repeatable.")
    overlap: list[str] | None = option("FILE", "Stored results of gpubench overlap. Repeatable.")
    other_machine: bool = flag("Use results of another machine.")
    measure: bool = flag("Time the model's computation here: its blocks by PyTorch, else its products by CuPy.")
    forward_ms: float | None = option("MS", "Forward pass of one microbatch on one GPU, as you measured it.", min=1e-6)
    backward_ms: float | None = option("MS", "Backward pass, likewise.", min=1e-6)
    tflops: float | None = option("N", "What the model reaches on one GPU, TFLOP/s.", min=1e-3, max=1e6)
    gpu_memory: str | None = option("80G", "Memory of a GPU. Default: as found.")
    optimizer: str = option("adam|none", "Whose states the memory holds.", default="adam")
    bucket_mb: float | None = option("MB", "One cap of DDP's buckets in place of comparing them.", min=0.001, max=1e6)
    first_bucket_mb: float | None = option(
        "MB", "The first bucket's cap; PyTorch's is 1 where you give none.", min=0.001
    )
    imbalance: float = option(
        "FACTOR", "Tokens of the busiest expert rank over the average.", default=1.0, min=1, max=1000
    )
    fault: list[str] | None = option("WHERE:KEY=VALUE", "A fault whose cost to tell, e.g. gpu0:nvlink=9. Repeatable.")
    faults_from: str | None = option("FILE", "Faults that a stored check or scan tells of.")
    timeout: float = option("S", "Seconds that a measurement may take.", default=120.0, min=0.1, max=86400)
    presentation: PresentationOptions

    def plan(self) -> "TrainingPlan":
        """The plan that these options ask for; UsageError for what does not fit together."""
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
        """Raise UsageError for options of which only one can be."""
        from gpubench.cli.options import unknown_word

        if self.optimizer not in ("adam", "none"):
            raise unknown_word("--optimizer", self.optimizer, ("adam", "none"))
        given = {"--measure": self.measure, "--tflops": self.tflops, "--backward-ms": self.backward_ms}
        given["--forward-ms"] = self.forward_ms and self.backward_ms is None
        said = [name for name, value in given.items() if value]
        if len(said) > 1:
            raise exclusive(said, "one source of the time that is computed")
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
                expected="one of them: a file with the model's shape, or how many parameters it has",
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
