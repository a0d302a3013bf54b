"""The rows of the section `rank_times`: every row of a collective, as each of its ranks saw it."""

from dataclasses import dataclass

from gpubench.model.results.report import Record

RANK_TIMES_SECTION = "rank_times"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeRow(Record):
    """One rank's part in one row of a collective.

    `time_us` is what an operation took there, waiting for other ranks included. Only of operations alone are known:
    `late_us`, the median of how long after the first rank it entered them, `clock_uncertainty_us`, by how much that may
    be wrong, and `last_percent`, how often it was the last. `setting` is that of the row.
    """

    collective: str
    backend: str
    origin: str
    size_bytes: int
    dtype: str
    op: str | None
    placement: str
    mode: str
    rank: int
    host: str
    node: int
    gpu_bus_id: str | None
    time_us: float
    late_us: float | None
    clock_uncertainty_us: float | None
    last_percent: float | None
    setting: str | None = None
