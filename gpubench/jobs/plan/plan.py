"""What a prediction is asked for."""

from dataclasses import dataclass
from pathlib import Path

from gpubench.formats.presentation import Presentation
from gpubench.model.workload.transformer import TransformerModel

NAME = "plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportTarget:
    """A network file to write: for which program, and where."""

    program: str
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """The model, the machine, and where times come from.

    `simulate` is a profile with a number of nodes, None for the GPUs at hand or those of the results. `gpus` are those
    that take part, None for all; `sequences` are a step's over all GPUs, `microbatches` a data-parallel rank's.
    """

    model: TransformerModel
    notes: tuple[str, ...]
    simulate: str | None
    profile: str | None
    nodes: int | None
    gpus: int | None
    layouts: tuple[str, ...]
    sequences: int | None
    microbatches: int | None
    bucket_mb: float | None
    first_bucket_mb: float | None
    imbalance: float
    results: tuple[Path, ...]
    overlap: tuple[Path, ...]
    other_machine: bool
    measure: bool
    forward_ms: float | None
    backward_ms: float | None
    tflops: float | None
    gpu_memory_bytes: int | None
    with_optimizer: bool
    faults: tuple[str, ...]
    faults_from: Path | None
    exports: tuple[ExportTarget, ...]
    timeout_s: float
    presentation: Presentation
