"""The words of nccl-tests, and its devices and lines as plain values.

Names, units and formulas are those of nccl-tests 1.0 to 2.19 (src/common.cu, src/util.cu); rccl-tests has the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

COLLECTIVE_NAMES = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    **{name: name for name in ("broadcast", "reduce", "gather", "scatter", "sendrecv", "alltoall", "alltoallv")},
    "hypercube": "hypercube",
}
"""gpubench's name by nccl-tests'. alltoallv and hypercube are nccl-tests' alone."""

ELEMENT_TYPES = {
    **{f"{sign}int{bits}": (f"{sign}int{bits}", bits // 8) for sign in ("", "u") for bits in (8, 32, 64)},
    "char": ("int8", 1),
    "int": ("int32", 4),
    "half": ("float16", 2),
    "float": ("float32", 4),
    "double": ("float64", 8),
    "bfloat16": ("bfloat16", 2),
    **{name: (name.replace("_", "").replace("fp", "f"), 1) for name in ("f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2")},
}
"""gpubench's name and the bytes of an element, by nccl-tests' name."""

REDUCTIONS = ("sum", "prod", "max", "min", "avg", "mulsum", "none")


@dataclass(frozen=True, slots=True)
class Device:
    """A rank as nccl-tests lists it. `bus_id` is None where it prints less than a whole one, as before 2.11."""

    rank: int
    group: int
    pid: int
    host: str
    index: int
    bus_id: str | None
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PerIteration:
    """The statistics of -I: microseconds between CUDA events around single operations; None is left out in text."""

    p50_us: float | None = None
    p95_us: float | None = None
    p99_us: float | None = None
    cv_percent: float | None = None
    samples: int | None = None
    mean_us_by_process: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One half of a line: out of place, or in place. `wrong` is None where nothing was compared."""

    placement: str
    time_us: float
    algbw_gb_s: float
    busbw_gb_s: float
    wrong: int | None
    per_iteration: PerIteration | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLine:
    """One line of the table, in nccl-tests' own words.

    `names_reduction` and `names_root` are whether the table has such a column, as all have since 2.11.
    """

    size_bytes: int
    count: int
    element_type: str
    reduction: str
    root: int
    placed: tuple[Placed, ...]
    names_reduction: bool = True
    names_root: bool = True

    @classmethod
    def of(cls, cells: Mapping[str, Any], placed: tuple[Placed, ...]) -> Self:
        """The line of these cells, named as in nccl-tests' JSON."""
        return cls(
            size_bytes=int(cells["size"]),
            count=int(cells["count"]),
            element_type=str(cells["type"]),
            reduction=str(cells["redop"]),
            root=int(cells["root"]),
            placed=placed,
        )
