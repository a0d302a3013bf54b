"""The options of `gpubench plan`: the model, the machine, and where times come from."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gpubench.errors import UsageError
from gpubench.formats.registry import Presentation
from gpubench.model.terms import options

if TYPE_CHECKING:
    from gpubench.training.workload import Recompute

_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>ms|s)", re.ASCII)


def _parse_step(text: str) -> float:
    """Parse a time such as '412ms' or '5.1s', and return it in seconds. Raises UsageError if the unit is missing."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match["number"]):
        raise UsageError(f"--step {text} is not the time of a step", expected="412ms, 5.1s", next_step="--step 412ms")
    return float(match["number"]) / (1e3 if match["unit"] == "ms" else 1.0)


def _parse_recompute(text: str) -> "Recompute":
    from gpubench.training.workload import Recompute

    return options.one_of("--recompute", Recompute)(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """Options of `plan`: the model, the machine, and where times come from.

    A measured step can be used, which took `step_seconds` or processed `tokens_per_second`. It ran on `measured_on`
    GPUs with the first of `layouts`. If `measured_on` is None, it ran on as many GPUs as are planned for.
    """

    help_group: ClassVar = options.INPUT

    model_file: Path | None = options.argument(
        "MODEL", "File with the model (.toml or .json), or use --parameters.", read=Path
    )
    parameters: str | None = options.option(
        "7B", "Instead of MODEL, use a transformer with about this many parameters, without embedding.", common=True
    )
    sequence: int | None = options.option("N", "Tokens per sequence.", min=1, max=100_000_000)
    batch: int | None = options.option("N", "Sequences per microbatch on one GPU.", min=1, max=1_000_000)
    global_batch: int | None = options.option("N", "Sequences per step on all GPUs (default: --batch × GPUs).", min=1)
    layouts: tuple[str, ...] = options.option(
        "WORDS",
        "Layout to compare: ddp, zero1, zero2, fsdp or hsdpN, with tpN, sp, ppN, vN, cpN, epN. Repeatable "
        "(default: the first four).",
        name="--layout",
        read=tuple,
        several=True,
        without=(),
        common=True,
    )
    recompute: "Recompute | None" = options.option(
        "full|selective|none",
        "What the backward pass computes again, to save memory (default: none).",
        read=_parse_recompute,
        common=True,
    )
    fp8: bool = options.flag("Compute matrix products in FP8.")
    simulate: str | None = options.option(
        "MACHINE",
        "Plan for a machine by its profile: hgx-h200-8, or 'hgx-h100-8*4' for 4 nodes (default: this machine).",
        completed_as="simulate",
        common=True,
        group=options.SIMULATE,
    )
    profile: str | None = options.option(
        "NAME|FILE", "Profile for times that were not measured.", completed_as="profile"
    )
    nodes: int | None = options.option(
        "N", "Plan for N nodes of this machine, connected as in its profile.", min=1, max=16384, common=True
    )
    gpus: int | None = options.option("N", "Use only N GPUs (default: all).", min=1, max=1_000_000)
    results: tuple[Path, ...] = options.option(
        "DIR|FILE",
        "Stored results of collectives. Repeatable.",
        read=options.parse_paths,
        several=True,
        without=(),
        common=True,
    )
    overlap: tuple[Path, ...] = options.option(
        "FILE", "Stored results of gpubench overlap. Repeatable.", read=options.parse_paths, several=True, without=()
    )
    other_machine: bool = options.flag("Use results of another machine.")
    measure: bool = options.flag(
        "Measure the computation of the model's blocks here, with PyTorch.", common=True, group=options.MEASURE
    )
    tflops: float | None = options.option(
        "N", "Speed of the model on one GPU, in TFLOP/s.", min=1e-3, max=1e6, common=True
    )
    step_seconds: float | None = options.option(
        "412ms",
        "Measured step time of the first --layout. The prediction is calibrated to it.",
        name="--step",
        read=_parse_step,
        common=True,
    )
    tokens_per_second: float | None = options.option(
        "N", "Measured tokens per second of all GPUs, instead of --step.", min=1e-3, max=1e15, common=True
    )
    measured_on: int | None = options.option(
        "GPUS",
        "GPUs of the run that --step or --tokens-per-second comes from (default: the planned GPUs).",
        min=1,
        hidden=True,
    )
    bucket_mb: float | None = options.option(
        "MB",
        "Size of gradient buckets (default: 25 for ddp as in PyTorch, and as in Megatron-LM for zero1).",
        min=0.001,
        max=1e6,
        hidden=True,
    )
    reduce_fp32: bool = options.flag("Reduce gradients in 32 bits, as Megatron-LM and torchtitan do.", hidden=True)
    imbalance: float = options.option(
        "FACTOR",
        "Tokens of the busiest expert rank, divided by the average.",
        default=1.0,
        min=1,
        max=1000,
        hidden=True,
    )
    faults: tuple[str, ...] = options.option(
        "WHERE:KEY=VALUE",
        "Predict the cost of this fault, e.g. gpu0:nvlink=9. Repeatable.",
        name="--fault",
        read=tuple,
        several=True,
        without=(),
        common=True,
        group=options.SIMULATE,
    )
    faults_from: Path | None = options.option(
        "FILE", "Predict the cost of the faults in a stored result of check or scan.", read=Path
    )
    timeout_s: float = options.step_timeout("one measurement", default=120.0)
    presentation: Presentation = field(default_factory=Presentation)

    @property
    def measured_text(self) -> str:
        """The measured step as a command-line option, or an empty text without one."""
        if self.step_seconds is not None:
            return f"--step {self.step_seconds * 1e3:g} ms"
        return "" if self.tokens_per_second is None else f"--tokens-per-second {self.tokens_per_second:g}"
