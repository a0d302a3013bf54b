"""Compare the cost of a fault, predicted from the healthy fabric alone, with steps that were measured with the
fault.

    python -m benchmarks.plan_faults
    python -m benchmarks.plan_faults --markdown         # the table of benchmarks/plan_validation.md

The measured steps ran with NCCL_P2P_DISABLE=1; the prediction is `gpubench plan --fault link0-1:staged=yes` of the same
model. Its input is the forward and backward pass on one GPU, the curves, and `gpubench overlap` of the healthy fabric.
`gpubench.simulated.times` models the fault's effect on a collective; its two shares come from collectives on such a
fabric, not from steps.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from benchmarks.plan_validation import FOLDER, Cell, StoredCurves, cells, overlap_of
from gpubench.model.terms.verdict import Origin
from gpubench.profiles import load
from gpubench.training.cluster import PlannedMachine
from gpubench.training.events import ContentionTable
from gpubench.training.fault_costs import fault_cases
from gpubench.training.program import CollectiveTimesFound
from gpubench.training.report import fault_costs
from gpubench.training.step import StepPrediction, predict

FAULT = "link0-1:staged=yes"


@dataclass(frozen=True, slots=True)
class FaultCell:
    """A step that was measured with the fault, and its predictions without and with it."""

    measured: Cell
    healthy: StepPrediction
    faulty: StepPrediction

    @property
    def error(self) -> float:
        """Percent of the measured step."""
        return 100 * (self.faulty.seconds * 1e3 / self.measured.measured_ms - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    for line in table(list(fault_cells(arguments.folder)), markdown=arguments.markdown):
        print(line)


def fault_cells(folder: Path) -> Iterator[FaultCell]:
    """Yield every step that was measured on the staged fabric."""
    profile = load("hgx-h200-2")
    machine = PlannedMachine(
        gpu=profile.gpu.name,
        gpus_per_node=profile.match.visible,
        nodes=1,
        profile=profile,
        hosts=("recorded",),
        origin=Origin.RECORDED,
        memory_bytes=profile.gpu.memory_bytes,
    )
    cases = fault_cases(machine, [FAULT], None, [])
    curves = CollectiveTimesFound(StoredCurves(folder / "healthy").curve)
    contention = ContentionTable(overlap_of(folder, "healthy"))
    for cell in cells(folder, fabric="staged"):
        healthy = predict(replace(cell.prediction.job, times=curves, contention=contention), with_range=False)
        ((_, faulty),) = fault_costs(healthy, cases)
        yield FaultCell(cell, healthy, faulty)


def table(found: Sequence[FaultCell], *, markdown: bool) -> Iterator[str]:
    """Yield a line per step, then the errors of those that are not bound by their host."""
    heads = ("run", "model", "layout", "setting", "healthy, predicted", "fault, predicted", "measured", "error %")
    rows = [
        (
            *(str(cell.measured.run), cell.measured.model, cell.measured.layout, str(cell.measured.setting)),
            *(f"{value * 1e3:.1f}" for value in (cell.healthy.seconds, cell.faulty.seconds)),
            *(f"{cell.measured.measured_ms:.1f}", f"{cell.error:+.1f}"),
        )
        for cell in found
    ]
    if markdown:
        yield f"| {' | '.join(heads)} |"
        yield "|---|---|---|---|--:|--:|--:|--:|"
        yield from (f"| {' | '.join(row)} |" for row in rows)
    else:
        yield from (
            "  ".join(f"{cell:>{max(8, len(head))}}" for cell, head in zip(row, heads, strict=True))
            for row in [heads, *rows]
        )
    errors = [abs(cell.error) for cell in found if not cell.measured.is_held_up_by_host]
    yield ""
    yield f"{len(errors)} steps: median error {statistics.median(errors):.1f} %, worst {max(errors):.1f} %"


if __name__ == "__main__":
    main()
