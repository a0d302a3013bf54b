"""Predictions of `gpubench plan` beside training steps that were measured: every cell, and the errors.

    python -m benchmarks.plan_validation                     # of the recorded runs on two H200s
    python -m benchmarks.plan_validation --folder DIR        # of your own
    python -m benchmarks.plan_validation --markdown          # the table of docs/plan.md

DIR has `steps.jsonl`, a line for every file that `benchmarks.plan_steps` wrote, a folder for every fabric with what
`gpubench allreduce`, `allgather` and `reducescatter --output` wrote on it, and in `overlap` by fabric what `gpubench
overlap --output` wrote.

What enters a prediction: the model's forward and backward on one GPU, of tensor parallelism a rank's share of them; the
curves; and what `gpubench overlap` measured beside GEMMs (with `--partner blocks` collectives beside two blocks of the
model). None of it is a distributed step, and nothing is fitted. `gpt-1.3B` was held out: it was predicted when the rest
stood.
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
    curve_of,
)
from gpubench.training.step import StepPrediction, predict
from gpubench.training.workload import BlockKind, Sharding, TransformerModel, parse_layout

HELD_OUT = ("gpt-1.3B",)
FOLDER = Path(__file__).parents[1] / "tests" / "plan" / "h200x2"
OVERLAP = "overlap"
PARTNERS = (OVERLAP, "blocks", "gemm", "none")
CTAS = {"ctas8": 8}
"""Fabrics with a cap, of which `gpubench overlap` has rows among those of the healthy one."""
HOST = {"alone": None, "ddp": Sharding.DDP, "fsdp": Sharding.FSDP}
"""As `gpubench plan --measure` names what the host takes to issue a block."""
LAYOUTS = {"ddp": "ddp", "fsdp2": "fsdp", "tp": "tp2"}
GEMM_SECONDS = 8192**3 * 2 / 764e12
"""One product of 8192³ at the 764 TFLOP/s that an H200 reaches in float16."""

MEGA = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A step that was measured, and what was predicted of it."""

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
        """Milliseconds."""
        return self.prediction.seconds * 1e3

    @property
    def error(self) -> float:
        """Percent of the measured step."""
        return 100 * (self.predicted_ms / self.measured_ms - 1)

    @property
    def added_error(self) -> float:
        """Percent of what communication added to the step, slow-downs and copies included."""
        added = self.measured_ms - self.single_ms
        return 100 * ((self.predicted_ms - self.single_ms) / added - 1)

    @property
    def is_held_up_by_host(self) -> bool:
        """True of FSDP2 of 24 small blocks: the host issues slower than a GPU computes."""
        return self.layout == "fsdp2" and self.model == "gpt-0.3B"

    @property
    def is_held_out(self) -> bool:
        """True for the model that was not looked at before."""
        return self.model in HELD_OUT


class StoredCurves:
    """The curves of one fabric."""

    def __init__(self, folder: Path) -> None:
        self._curves = {
            path.stem: curve_of(
                [
                    CurvePoint(row.size_bytes, row.time_us * 1e-6, (row.ci95_percent or 0) / 100)
                    for row in read_results(path).rows
                ],
            )
            for path in sorted(folder.glob("*.json"))
        }

    def curve(self, collective: str, _ranks: CommunicatorRanks) -> CollectiveCurve:
        """The curve of a collective."""
        return self._curves[collective]


def main() -> None:
    """Predict every step, and print how far off it is."""
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
    """All cells of a folder, or those of a fabric, in the order in which they were measured."""
    runs = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    curves = {run["fabric"]: StoredCurves(folder / run["fabric"]) for run in runs}
    alike = {run["fabric"]: next(each for each in runs if _same(each, run) and each["contention"]) for run in runs}
    overlaps = {fabric: overlap_of(folder, fabric) for fabric in curves} if partner == OVERLAP else {}
    for number, run in enumerate(runs, 1):
        for step in run["steps"] if fabric in (None, run["fabric"]) else ():
            if step["layout"] not in LAYOUTS or step["setting"] == "none":  # FSDP2 without its prefetch
                continue
            settled = _settled_first(runs, run.get("day"))
            own = next(each for each in (run, *settled) if _single(each, step["model"]) is not None)
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
    """Runs on the healthy fabric, of that day first, of these those whose single steps were timed before and after."""
    healthy = [run for run in runs if run["fabric"] == "healthy"]
    return sorted(
        healthy,
        key=lambda each: (each.get("day") != day, not any("again_ms" in single for single in each["single"])),
    )


def _single(run: dict[str, Any], model: str) -> dict[str, Any] | None:
    return next((each for each in run["single"] if each["model"] == model), None)


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
    """A step on one GPU, of tensor parallelism as many times its share of one as there are ranks.

    Where it was timed before and after the distributed ones, the middle of both.
    """
    single = _single(run, step["model"]) or {}
    whole = statistics.mean([single["step_ms"], single.get("again_ms", single["step_ms"])]) * 1e-3
    share = single["forward_ms"] / single["step_ms"]
    for each in run["steps"] if step["layout"] == "tp" else ():
        if (each["model"], each["layout"], each["setting"]) == (step["model"], "tp-alone", run["ranks"]):
            whole = each["ms"] * 1e-3 * run["ranks"]
    return ComputeTimes(
        forward_seconds=whole * share,
        backward_seconds=whole * (1 - share),
        source="one GPU",
        copy_gb_s=run["copy_gb_s"],
        host_seconds={HOST[key]: ms * 1e-3 for key, ms in run.get("host_ms_a_block", {}).items()},
    )


def overlap_of(folder: Path, fabric: str) -> list[MeasuredContention]:
    """What `gpubench overlap` measured on a fabric, or with its cap on the healthy one."""
    name = "healthy" if fabric in CTAS else fabric
    found = read_all((), (folder / "overlap" / f"{name}.json",)).contention
    return [each for each in found if each.ctas == CTAS.get(fabric)]


def _beside(run: dict[str, Any], kind: BlockKind, partner: str) -> list[MeasuredContention]:
    """Collectives beside blocks of the same kind of model, or of any where there are none; or beside GEMMs."""
    wanted = [each for each in run["contention"] if partner in each["partner"]]
    same = [each for each in wanted if kind is BlockKind.MLP and each["partner"].startswith("mlp")]
    return [
        MeasuredContention(
            collective=each["collective"],
            size_bytes=each["size_bytes"],
            partner=each["partner"],
            compute_slowdown=each["compute_slowdown"],
            communication_slowdown=each["communication_slowdown"],
            alone_seconds=each["communication_alone_us"] * 1e-6,
            kernel_seconds=GEMM_SECONDS if partner == "gemm" else 0.0,
        )
        for each in same or [each for each in wanted if not each["partner"].startswith("mlp")]
    ]


def table(found: Sequence[Cell], *, markdown: bool) -> Iterator[str]:
    """A line a cell, the held-out model last."""
    heads = ("run", "fabric", "model", "layout", "setting", "one GPU", "measured", "predicted", "error %")
    rows = [
        (
            *(str(each.run), each.fabric, each.model, each.layout, str(each.setting)),
            *(f"{value:.1f}" for value in (each.single_ms, each.measured_ms, each.predicted_ms)),
            f"{each.error:+.1f}",
        )
        for each in sorted(found, key=lambda cell: cell.is_held_out)
    ]
    if markdown:
        yield f"| {' | '.join(heads)} |"
        yield "|---|---|---|---|---|--:|--:|--:|--:|"
        yield from (f"| {' | '.join(row)} |" for row in rows)
        return
    for row in (heads, *rows):
        yield "  ".join(f"{cell:>{9 if place > 3 else 8}}" for place, cell in enumerate(row))


def summary(found: Sequence[Cell]) -> Iterator[str]:
    """Errors by fabric and of the held-out model."""
    groups: dict[str, list[Cell]] = {"all": list(found)}
    bound = [each for each in found if each.is_held_up_by_host]
    groups["all but FSDP2 of gpt-0.3B, which its host holds up"] = [each for each in found if each not in bound]
    for fabric in dict.fromkeys(each.fabric for each in found):
        groups[f"{fabric}, all but these"] = [each for each in found if each.fabric == fabric and each not in bound]
    groups["held out"] = [each for each in found if each.is_held_out]
    for layout in dict.fromkeys(each.layout for each in found):
        groups[f"{layout}, all but these"] = [each for each in found if each.layout == layout and each not in bound]
    for name, own in groups.items():
        errors = [abs(each.error) for each in own]
        added = [abs(each.added_error) for each in own]
        if own:
            step = f"step median error {statistics.median(errors):.1f} %, worst {max(errors):.1f} %"
            more = f"what communication adds, median error {statistics.median(added):.0f} %"
            yield f"{name}: {len(own)} cells, {step}; {more}"


if __name__ == "__main__":
    main()
