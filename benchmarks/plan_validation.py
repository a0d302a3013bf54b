"""Compare predictions of `gpubench plan` with measured training steps: every cell, and the errors.

    python -m benchmarks.plan_validation                     # of the recorded runs on two H200s
    python -m benchmarks.plan_validation --folder DIR        # of your own
    python -m benchmarks.plan_validation --markdown          # the table of benchmarks/plan_validation.md

DIR contains `steps.jsonl`, with a line for every file of `benchmarks.plan_steps`; a folder per fabric with the output
of `gpubench allreduce`, `allgather` and `reducescatter --output`; and in `overlap`, by fabric, the output of `gpubench
overlap --output`.

A prediction uses the model's forward and backward pass on one GPU (for tensor parallelism, a rank's share of them), the
curves, and what `gpubench overlap` measured beside GEMMs (with `--partner blocks`, collectives beside two blocks of the
model). None of it is a distributed step, and nothing is fitted. `gpt-1.3B` was held out: it was predicted after the
rest was final.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.training.models import MODELS
from gpubench.readers.registry import read_results
from gpubench.training.cluster import read_all
from gpubench.training.events import ContentionTable, MeasuredContention
from gpubench.training.program import (
    CollectiveCurve,
    CollectiveTimesFound,
    CommunicatorRanks,
    ComputeTimes,
    CurvePoint,
    StepJob,
    StepSettings,
    build_curve,
)
from gpubench.training.step import StepPrediction, predict
from gpubench.training.workload import BlockKind, Sharding, TransformerModel, parse_layout

HELD_OUT = ("gpt-1.3B",)
FOLDER = Path(__file__).parents[1] / "tests" / "plan" / "h200x2"
OVERLAP = "overlap"
PARTNERS = (OVERLAP, "blocks", "gemm", "none")
CTAS = {"ctas8": 8}
"""Fabrics with a cap on CTAs; `gpubench overlap` has their rows in the file of the healthy one."""
HOST = {"alone": None, "ddp": Sharding.DDP, "fsdp": Sharding.FSDP}
"""Names in `host_ms_a_block`: the time that the host takes to issue a block, by sharding."""
LAYOUTS = {"ddp": "ddp", "fsdp2": "fsdp", "tp": "tp2"}
GEMM_SECONDS = 8192**3 * 2 / 764e12
"""One product of 8192³ at 764 TFLOP/s, which an H200 reaches in float16."""

MEGA = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A measured step and its prediction."""

    run: int
    fabric: str
    model: str
    layout: str
    setting: Any
    measured_ms: float
    single_ms: float
    prediction: StepPrediction

    @property
    def predicted_ms(self) -> float:
        return self.prediction.seconds * 1e3

    @property
    def error(self) -> float:
        """Percent of the measured step."""
        return 100 * (self.predicted_ms / self.measured_ms - 1)

    @property
    def added_error(self) -> float:
        """Percent of the time that communication added to the step, slowdowns and copies included."""
        added = self.measured_ms - self.single_ms
        return 100 * ((self.predicted_ms - self.single_ms) / added - 1)

    @property
    def is_held_up_by_host(self) -> bool:
        """True for FSDP2 of 24 small blocks: the host issues them slower than a GPU computes."""
        return self.layout == "fsdp2" and self.model == "gpt-0.3B"

    @property
    def is_held_out(self) -> bool:
        """True for the model that was predicted last."""
        return self.model in HELD_OUT


class StoredCurves:
    def __init__(self, folder: Path) -> None:
        self._curves = {
            path.stem: build_curve(
                [
                    CurvePoint(row.size_bytes, row.time_us * 1e-6, (row.ci95_percent or 0) / 100)
                    for row in read_results(path).rows
                ],
            )
            for path in sorted(folder.glob("*.json"))
        }

    def curve(self, collective: str, _ranks: CommunicatorRanks) -> CollectiveCurve:
        return self._curves[collective]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--partner", default=OVERLAP, choices=PARTNERS)
    arguments = parser.parse_args()
    found = list(cells(arguments.folder, arguments.partner))
    for line in table(found, markdown=arguments.markdown):
        print(line)
    print()
    for line in summary(found):
        print(f"- {line}" if arguments.markdown else line)


def cells(folder: Path, partner: str = OVERLAP, fabric: str | None = None) -> Iterator[Cell]:
    """Yield all cells of a folder, or those of a fabric, in the order of measurement."""
    runs = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    curves = {run["fabric"]: StoredCurves(folder / run["fabric"]) for run in runs}
    alike = {run["fabric"]: next(other for other in runs if _same(other, run) and other["contention"]) for run in runs}
    overlaps = {fabric: overlap_of(folder, fabric) for fabric in curves} if partner == OVERLAP else {}
    for number, run in enumerate(runs, 1):
        for step in run["steps"] if fabric in (None, run["fabric"]) else ():
            if step["layout"] not in LAYOUTS or step["setting"] == "none":  # FSDP2 without prefetch
                continue
            settled = _settled_first(runs, run.get("day"))
            own = next(candidate for candidate in (run, *settled) if _single(candidate, step["model"]) is not None)
            kind = _model_of(step["model"]).kind
            table = overlaps if partner == OVERLAP else {run["fabric"]: _beside(alike[run["fabric"]], kind, partner)}
            job = _job(step, own, curves[run["fabric"]], ContentionTable(table[run["fabric"]]))
            yield Cell(
                run=number,
                fabric=run["fabric"],
                model=step["model"],
                layout=step["layout"],
                setting=step["setting"],
                measured_ms=step["ms"],
                single_ms=(job.compute.forward_seconds + job.compute.backward_seconds) / job.layout.tensor * 1e3,
                prediction=predict(job, with_range=False),
            )


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["fabric"] == other["fabric"])


def _settled_first(runs: Sequence[dict[str, Any]], day: str | None) -> list[dict[str, Any]]:
    """Runs on the healthy fabric, that day's first; among these, runs whose single steps were timed twice come
    first.
    """
    healthy = [run for run in runs if run["fabric"] == "healthy"]
    return sorted(
        healthy,
        key=lambda run: (run.get("day") != day, not any("again_ms" in single for single in run["single"])),
    )


def _single(run: dict[str, Any], model: str) -> dict[str, Any] | None:
    return next((step for step in run["single"] if step["model"] == model), None)


def _model_of(name: str) -> TransformerModel:
    shape = dict(MODELS[name])
    kind = BlockKind.MLP if shape.pop("kind") == "mlp" else BlockKind.TRANSFORMER
    return TransformerModel(name=name, biases=True, kind=kind, **shape)


def _job(step: dict[str, Any], run: dict[str, Any], curves: StoredCurves, contention: ContentionTable) -> StepJob:
    is_ddp = step["layout"] == "ddp"
    return StepJob(
        model=_model_of(step["model"]),
        layout=parse_layout(LAYOUTS[step["layout"]], run["ranks"]),
        compute=_compute(step, run),
        times=CollectiveTimesFound(curves.curve),
        contention=contention,
        settings=StepSettings(bucket_bytes=(step["setting"] if is_ddp else 25) * MEGA),
        gpus_per_node=run["ranks"],
    )


def _compute(step: dict[str, Any], run: dict[str, Any]) -> ComputeTimes:
    """Return the times of a step on one GPU; for tensor parallelism, a rank's share times the number of ranks.

    If it was timed before and after the distributed steps, take the mean.
    """
    single = _single(run, step["model"]) or {}
    whole = statistics.mean([single["step_ms"], single.get("again_ms", single["step_ms"])]) * 1e-3
    share = single["forward_ms"] / single["step_ms"]
    for alone in run["steps"] if step["layout"] == "tp" else ():
        if (alone["model"], alone["layout"], alone["setting"]) == (step["model"], "tp-alone", run["ranks"]):
            whole = alone["ms"] * 1e-3 * run["ranks"]
    return ComputeTimes(
        forward_seconds=whole * share,
        backward_seconds=whole * (1 - share),
        source="one GPU",
        copy_gb_s=run["copy_gb_s"],
        host_seconds={HOST[key]: ms * 1e-3 for key, ms in run.get("host_ms_a_block", {}).items()},
    )


def overlap_of(folder: Path, fabric: str) -> list[MeasuredContention]:
    """Return what `gpubench overlap` measured on a fabric, or on the healthy one with the fabric's cap."""
    name = "healthy" if fabric in CTAS else fabric
    found = read_all((), (folder / "overlap" / f"{name}.json",)).contention
    return [row for row in found if row.ctas == CTAS.get(fabric)]


def _beside(run: dict[str, Any], kind: BlockKind, partner: str) -> list[MeasuredContention]:
    """Return collectives beside GEMMs, or beside blocks: of the same kind of model if there are any."""
    wanted = [row for row in run["contention"] if partner in row["partner"]]
    same = [row for row in wanted if kind is BlockKind.MLP and row["partner"].startswith("mlp")]
    return [
        MeasuredContention(
            collective=row["collective"],
            size_bytes=row["size_bytes"],
            partner=row["partner"],
            compute_slowdown=row["compute_slowdown"],
            communication_slowdown=row["communication_slowdown"],
            alone_seconds=row["communication_alone_us"] * 1e-6,
            kernel_seconds=GEMM_SECONDS if partner == "gemm" else 0.0,
        )
        for row in same or [row for row in wanted if not row["partner"].startswith("mlp")]
    ]


def table(found: Sequence[Cell], *, markdown: bool) -> Iterator[str]:
    """Yield a line per cell, the held-out model last."""
    heads = ("run", "fabric", "model", "layout", "setting", "one GPU", "measured", "predicted", "error %")
    rows = [
        (
            *(str(cell.run), cell.fabric, cell.model, cell.layout, str(cell.setting)),
            *(f"{value:.1f}" for value in (cell.single_ms, cell.measured_ms, cell.predicted_ms)),
            f"{cell.error:+.1f}",
        )
        for cell in sorted(found, key=lambda cell: cell.is_held_out)
    ]
    if markdown:
        yield f"| {' | '.join(heads)} |"
        yield "|---|---|---|---|---|--:|--:|--:|--:|"
        yield from (f"| {' | '.join(row)} |" for row in rows)
        return
    for row in (heads, *rows):
        yield "  ".join(f"{cell:>{9 if place > 3 else 8}}" for place, cell in enumerate(row))


def summary(found: Sequence[Cell]) -> Iterator[str]:
    """Yield the errors by fabric, layout, and of the held-out model."""
    groups: dict[str, list[Cell]] = {"all": list(found)}
    bound = [cell for cell in found if cell.is_held_up_by_host]
    groups["all but FSDP2 of gpt-0.3B, which its host holds up"] = [cell for cell in found if cell not in bound]
    for fabric in dict.fromkeys(cell.fabric for cell in found):
        groups[f"{fabric}, all but these"] = [cell for cell in found if cell.fabric == fabric and cell not in bound]
    groups["held out"] = [cell for cell in found if cell.is_held_out]
    for layout in dict.fromkeys(cell.layout for cell in found):
        groups[f"{layout}, all but these"] = [cell for cell in found if cell.layout == layout and cell not in bound]
    for name, own in groups.items():
        errors = [abs(cell.error) for cell in own]
        added = [abs(cell.added_error) for cell in own]
        if own:
            step = f"step median error {statistics.median(errors):.1f} %, worst {max(errors):.1f} %"
            more = f"what communication adds, median error {statistics.median(added):.0f} %"
            yield f"{name}: {len(own)} cells, {step}; {more}"


if __name__ == "__main__":
    main()
