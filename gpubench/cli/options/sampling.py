"""The options that say how often and how the operations of a collective are timed."""

from dataclasses import dataclass
from typing import ClassVar

from gpubench.cli.options.choices import parse_choices
from gpubench.cli.plain_values import MEASURE
from gpubench.cli.signature import completed, option
from gpubench.errors import UsageError
from gpubench.model.terms.statistics.sampling import AUTO, DEFAULT_ITERATIONS, INTERVAL, Mode, Sampling


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The timing of the rows of a collective."""

    help_group: ClassVar = MEASURE

    mode: str = option(
        "|".join(Mode),
        "Operations back to back, as nccl-tests has them, or each alone, with percentiles.",
        default="throughput",
        autocompletion=completed("mode"),
    )
    iters: str | None = option(
        "N|auto",
        f"Timed operations a row; auto: until the mean is known within {INTERVAL:.0%}. Default {AUTO}; "
        f"{DEFAULT_ITERATIONS[Mode.THROUGHPUT]} with --graph, --split and --simulate; "
        f"alone {DEFAULT_ITERATIONS[Mode.LATENCY]}.",
        name="--iters -n",
    )
    budget: float | None = option(
        "S", f"Seconds a row that --iters {AUTO} may take. Default {Sampling().budget_seconds:g}.", min=0
    )

    def parse(self, *, graph_replays: int, counted: bool = False) -> Sampling:
        """The sampling of a row; UsageError for a number that is none, and a budget for a given number.

        `counted` is whether a number is needed for another reason than a graph: groups, or a model.
        """
        mode = parse_choices("--mode", [self.mode], Mode)[0]
        if self.iters == AUTO and graph_replays:
            raise UsageError(
                f"--iters {AUTO} with --graph",
                expected="a number: so many operations are captured, and replays of them are timed",
                next_step=f"--iters {DEFAULT_ITERATIONS[Mode.THROUGHPUT]} --graph {graph_replays}",
            )
        needs_number = counted or graph_replays > 0 or mode is Mode.LATENCY
        if self.iters == AUTO or (self.iters is None and not needs_number):
            return Sampling(mode, None, Sampling().budget_seconds if self.budget is None else self.budget)
        if self.budget is not None:
            raise UsageError(
                f"--budget {self.budget:g} without --iters {AUTO}",
                expected=f"a budget for as many operations as it takes: --iters {AUTO}",
                next_step=f"--iters {AUTO} --budget {self.budget:g}",
            )
        return Sampling(mode, DEFAULT_ITERATIONS[mode] if self.iters is None else self._number())

    def _number(self) -> int:
        text = self.iters or ""
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(f"--iters {text}", expected=f"a number from 1 on, or {AUTO}", next_step="--iters 20")
        return int(text)
