"""Compare predictions of `gpubench plan` with published training steps: every row, and how many are right.

    python -m benchmarks.plan_published                      # the table, and the figures below it
    python -m benchmarks.plan_published --markdown           # the tables of plan_published.md, by publication
    python -m benchmarks.plan_published --set practice       # one set alone
    python -m benchmarks.plan_published --only 'H100 7b'     # series of that name alone

`plan_published.toml` has the rows and their sources. Each is predicted twice: as a range, from the model and the
profile alone, and as one number, calibrated with the published speed of its series' first row (`--tokens-per-second`).
"""

import argparse
import dataclasses
import shlex
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from gpubench.errors import GpubenchError
from gpubench.model.terms.units import group_by
from gpubench.training.cluster import CurveFinder, choose_machine
from gpubench.training.job import build_job, count_microbatches
from gpubench.training.options import TrainingPlan
from gpubench.training.program import StepJob
from gpubench.training.report import tokens_per_second
from gpubench.training.step import StepPrediction, predict
from gpubench.training.workload import ParallelLayout, Recompute, TransformerModel

PUBLISHED = Path(__file__).parent / "plan_published.toml"
_SETS = {
    "practice": "Practice",
    "first_held_out": "Held out first, then looked at",
    "second_held_out": "Held out second, then looked at",
    "held_out": "Held out",
}
_NODE = {"gb200-nvl72": 4, "gb300-nvl72": 4}
"""GPUs per node, if not eight."""


@dataclass(frozen=True, slots=True)
class PublishedStep:
    """A published figure in tokens per second and GPU, and the plan that predicts it."""

    table: str
    use: str
    series: str
    options: str
    plan: TrainingPlan
    model: TransformerModel
    gpus: int
    tokens: float


@dataclass(frozen=True, slots=True)
class PublishedPrediction:
    """The prediction, in tokens per second and GPU; `calibrated` is None for the row that calibrates its series."""

    published: PublishedStep
    least: float
    most: float
    calibrated: float | None

    @property
    def is_inside(self) -> bool:
        """True if the range contains the published figure."""
        return self.least <= self.published.tokens <= self.most

    @property
    def error(self) -> float | None:
        """Percent of the published figure."""
        return None if self.calibrated is None else 100 * (self.calibrated / self.published.tokens - 1)


def published_steps(path: Path = PUBLISHED) -> Iterator[PublishedStep]:
    with path.open("rb") as file:
        document = tomllib.load(file)
    for table in document["tables"]:
        for series, model, gpus, layout, sequence, batch, sequences, options, tokens in table["rows"]:
            words = shlex.split(options)
            again = words[words.index("--recompute") + 1] if "--recompute" in words else Recompute.NONE
            shape = TransformerModel(
                name=model,
                sequence=sequence,
                batch=batch,
                recompute=Recompute(again),
                fp8="--fp8" in words,
                **document["models"][model],
            )
            told = f"{layout}, sequence {sequence}, {batch} of {sequences} {options}".strip()
            machine = f"{table['machine']}*{max(1, gpus // _NODE.get(table['machine'], 8))}"
            plan = TrainingPlan(
                simulate=machine,
                layouts=(layout,),
                gpus=gpus,
                global_batch=sequences,
                reduce_fp32="--reduce-fp32" in words,
            )
            name = f"{table['name']} {series}"
            yield PublishedStep(table["name"], table["set"], name, told, plan, shape, gpus, tokens)


def predictions(steps: Sequence[PublishedStep]) -> Iterator[PublishedPrediction]:
    """Yield a prediction for every step; the first of each series calibrates the others."""
    firsts: dict[str, PublishedStep] = {}
    for step in steps:
        first = firsts.setdefault(step.series, step)
        plain = _predicted(step)
        calibrated = None if first is step else _predicted(step, first)
        tokens = tokens_per_second(plain) * plain.seconds / step.gpus
        yield PublishedPrediction(
            step,
            tokens / plain.most,
            tokens / plain.least,
            None if calibrated is None else tokens_per_second(calibrated) / step.gpus,
        )


def _predicted(step: PublishedStep, measured: PublishedStep | None = None) -> StepPrediction:
    """Predict a step; `measured` is another whose published speed calibrates the computation."""
    job, (layout,) = _job_of(step, step.plan)
    if measured is not None:
        found, _ = _job_of(
            measured, dataclasses.replace(measured.plan, tokens_per_second=measured.tokens * measured.gpus)
        )
        # The computation grows with the tokens of a microbatch.
        job = replace(job, compute=found.compute.scaled(step.model.tokens / measured.model.tokens))
    count = count_microbatches(step.plan, step.model, layout)
    return predict(replace(job, layout=layout, settings=replace(job.settings, microbatches=count)))


def _job_of(step: PublishedStep, plan: TrainingPlan) -> tuple[StepJob, list[ParallelLayout]]:
    return build_job(plan, step.model, CurveFinder(choose_machine(plan, ())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=tuple(_SETS))
    parser.add_argument("--only", default="")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    steps = [step for step in published_steps() if arguments.set in (None, step.use) and arguments.only in step.series]
    try:
        found = list(predictions(steps))
    except GpubenchError as error:
        raise SystemExit(str(error)) from None
    for line in summary(found) if arguments.markdown else table(found):
        print(line)


def table(found: Sequence[PublishedPrediction]) -> Iterator[str]:
    """Yield a line per row, and after each set how many are right."""
    for use, heading in _SETS.items():
        rows = [row for row in found if row.published.use == use]
        if not rows:
            continue
        yield heading
        for row in rows:
            widths = zip(_cells(row), (34, 5, 62, 7, 18, 3, 7, 6), strict=True)
            yield "  ".join(f"{cell:<{width}}" for cell, width in widths)
        yield from ("", _sums(rows), "")


def summary(found: Sequence[PublishedPrediction]) -> Iterator[str]:
    """Yield Markdown for each set: a row per publication, how many are right, and every row outside its range."""
    for use, heading in _SETS.items():
        rows = [row for row in found if row.published.use == use]
        if not rows:
            continue
        yield from (f"## {heading}", "| runs | inside | GPUs | off by at most |", "|---|--:|--:|--:|")
        for name, own in group_by(rows, lambda row: row.published.table).items():
            gpus = sorted({row.published.gpus for row in own})
            errors = [abs(row.error) for row in own if row.error is not None]
            off = f"{max(errors):.1f} %" if errors else "-"
            inside = f"{sum(row.is_inside for row in own)} of {len(own)}"
            yield f"| {name} | {inside} | {'-'.join(map(str, dict.fromkeys((gpus[0], gpus[-1]))))} | {off} |"
        yield from ("", _sums(rows), "")
        outside = [row for row in rows if not row.is_inside]
        if outside:
            yield from ("| outside | GPUs | published | range |", "|---|--:|--:|--:|")
            for row in outside:
                run, ranks, _, *figures = _cells(row)[:5]
                yield f"| {' | '.join((run, ranks, *figures))} |"
            yield ""


def _cells(row: PublishedPrediction) -> tuple[str, ...]:
    step = row.published
    return (
        step.series,
        str(step.gpus),
        step.options,
        f"{step.tokens:,.0f}",
        f"{row.least:,.0f} to {row.most:,.0f}",
        "yes" if row.is_inside else "no",
        "-" if row.calibrated is None else f"{row.calibrated:,.0f}",
        "-" if row.error is None else f"{row.error:+.1f} %",
    )


def _sums(rows: Sequence[PublishedPrediction]) -> str:
    inside = sum(row.is_inside for row in rows)
    errors = [abs(row.error) for row in rows if row.error is not None]
    text = f"The range holds {inside} of {len(rows)} ({100 * inside / len(rows):.0f} %)."
    if errors:
        text += (
            f" Calibrated on the first row of their series, {len(errors)} others are off by "
            f"{statistics.median(errors):.1f} % in the median, by {max(errors):.1f} % at most."
        )
    return text


if __name__ == "__main__":
    main()
