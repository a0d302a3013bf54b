"""The request for a sweep of one collective: sizes, types, reductions, placements, and how rows are timed."""

from dataclasses import dataclass, field, fields

from gpubench.collectives.record import Collective
from gpubench.model.terms.operation import DataType, Placement, ReduceOp
from gpubench.model.terms.statistics.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The request for any collective, as plain data.

    `graph_replays` of 0 launches plainly; `ops` is ignored by collectives that do not reduce.
    """

    sizes: tuple[int, ...]
    dtypes: tuple[DataType, ...] = (DataType.FLOAT32,)
    ops: tuple[ReduceOp, ...] = (ReduceOp.SUM,)
    placements: tuple[Placement, ...] = (Placement.OUT_OF_PLACE,)
    root: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    warmup: int = 5
    graph_replays: int = 0
    check: bool = True

    def request(self, collective: Collective) -> "SweepRequest":
        """The request for one collective."""
        return SweepRequest(collective=collective, **{each.name: getattr(self, each.name) for each in fields(Asked)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest(Asked):
    """The request for one collective."""

    collective: Collective

    @property
    def asked(self) -> Asked:
        """The same without the collective; `request` is the inverse."""
        return Asked(**{each.name: getattr(self, each.name) for each in fields(Asked)})
