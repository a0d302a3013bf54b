"""The options that say how often and how the operations of a collective are timed."""

from dataclasses import dataclass

from gpubench.cli.options.choices import parse_choices
from gpubench.cli.signature import option
from gpubench.errors import UsageError
from gpubench.model.terms.sampling import AUTO, DEFAULT_ITERATIONS, INTERVAL, Mode, Sampling


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The timing of the rows of a collective."""

    mode: str = option(
        "|".join(Mode),
        "Operations back to back, as nccl-tests has them, or each alone, with percentiles.",
        default="throughput",
    )
    iters: str | None = option(
        "N|auto",
        f"Timed operations a row; auto: until the mean is known within {INTERVAL:.0%}. "
        f"Default {DEFAULT_ITERATIONS[Mode.THROUGHPUT]}, alone {DEFAULT_ITERATIONS[Mode.LATENCY]}.",
    )
    budget: float | None = option(
        "S", f"Seconds a row that --iters auto may take. Default {Sampling().budget_seconds:g}.", min=0
    )

    def parse(self, *, graph_replays: int) -> Sampling:
        """The sampling of a row; UsageError for a number that is none, and a budget for a given number."""
        mode = parse_choices("--mode", [self.mode], Mode)[0]
        if self.iters == AUTO:
            if graph_replays:
                raise UsageError(
                    "--iters auto with --graph",
                    expected="a number: so many operations are captured, and replays of them are timed",
                    next_step=f"--iters {DEFAULT_ITERATIONS[Mode.THROUGHPUT]} --graph {graph_replays}",
                )
            return Sampling(mode, None, Sampling().budget_seconds if self.budget is None else self.budget)
        if self.budget is not None:
            raise UsageError(
                f"--budget {self.budget:g} without --iters {AUTO}",
                expected=f"a budget for as many operations as it takes: --iters {AUTO}",
                next_step=f"--iters {AUTO} --budget {self.budget:g}",
            )
        if self.iters is None:
            return Sampling(mode, DEFAULT_ITERATIONS[mode])
        if not self.iters.isdecimal() or int(self.iters) < 1:
            raise UsageError(f"--iters {self.iters}", expected=f"a number from 1 on, or {AUTO}", next_step="--iters 20")
        return Sampling(mode, int(self.iters))
