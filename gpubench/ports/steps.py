"""Steps of a collective beside computation, on the two streams of a GPU."""

from collections.abc import Callable, Sequence
from typing import Protocol

from gpubench.model.terms.operation import DataType
from gpubench.model.terms.overlap import Partner, StepMarks, StepOrder
from gpubench.ports.launch import Launch


class OverlapSteps(Protocol):
    """Runs steps, each of which begins when the one before it is done."""

    def prepare(self, partner: Partner, gemm_side: int, dtype: DataType) -> None:
        """Take the memory of a partner, and compute once what its results are held against."""

    def run(
        self,
        order: StepOrder,
        partner: Partner,
        collectives: Sequence[Launch],
        operations: int,
        steps: int,
        look: Callable[[int], object],
    ) -> list[StepMarks]:
        """Run so many steps of one collective, each of `collectives` in turn, and so many operations of the partner.

        `look` is called while they run, with the number of steps that were completed since. Marks are in seconds since
        the first of them.
        """

    def partner_wrong(self, partner: Partner) -> int:
        """Elements of the partner's results that are not what it computes alone."""
