"""Rows in nccl-tests' own terms, and the collectives and rank counts that could have produced them.

Names, units and formulas are those of nccl-tests 1.0 to 2.20 (src/common.cu, src/util.cu). They are the same in
rccl-tests.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from msgspec import Struct

from gpubench.errors import IncompleteResultError, UsageError
from gpubench.model.terms.operation import ring_allreduce_factor

COLLECTIVE_NAMES = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    **{name: name for name in ("broadcast", "reduce", "gather", "scatter", "sendrecv", "alltoall", "alltoallv")},
    "hypercube": "hypercube",
}
"""gpubench's names by nccl-tests' names. gpubench itself does not measure alltoallv and hypercube."""

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
"""gpubench's name and the size in bytes of each element type, by nccl-tests' name."""

REDUCTIONS = ("sum", "prod", "max", "min", "avg", "mulsum", "none")


class Device(Struct, frozen=True):
    """A rank in nccl-tests' device list. `bus_id` is None if the list shows only a part of it, as before 2.11."""

    rank: int
    group: int
    pid: int
    host: str
    index: int
    bus_id: str | None
    name: str


class PerIteration(Struct, frozen=True, kw_only=True):
    """Statistics from option -I: the time of single operations in µs, between CUDA events. None if the output lacks
    it.
    """

    p50_us: float | None = None
    p95_us: float | None = None
    p99_us: float | None = None
    cv_percent: float | None = None
    samples: int | None = None
    mean_us_by_process: tuple[float, ...] = ()


class Placed(Struct, frozen=True, kw_only=True):
    """The values of a row for one placement, out of place or in place. `wrong` is None if the data were not
    verified.
    """

    placement: str
    time_us: float
    algbw_gb_s: float
    busbw_gb_s: float
    wrong: int | None
    per_iteration: PerIteration | None = None


class OutputLine(Struct, frozen=True, kw_only=True):
    """One row of the table, in nccl-tests' terms.

    `names_reduction` and `names_root` are true if the table has these columns, as all tables since 2.11 do.
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
        """Return a row with these cells. Their names are those in nccl-tests' JSON."""
        return cls(
            size_bytes=int(cells["size"]),
            count=int(cells["count"]),
            element_type=str(cells["type"]),
            reduction=str(cells["redop"]),
            root=int(cells["root"]),
            placed=placed,
        )


_SHAPES: Mapping[str, tuple[bool | None, bool, bool | None]] = {
    "allreduce": (True, False, False),
    "reducescatter": (True, False, True),
    "reduce": (True, True, False),
    "broadcast": (False, True, False),
    "allgather": (False, False, True),
    "alltoall": (False, False, True),
    "gather": (False, True, True),
    "scatter": (False, True, True),
    "sendrecv": (None, False, False),
    "alltoallv": (False, False, None),
    "hypercube": (False, False, True),
}
"""Whether the rows of a collective name a reduction, name a root, and count only one rank's block.

None matches both. sendrecv prints a reduction, although it does not use one.
"""

_FACTOR_OF_THREE_RANKS = 1.2  # With three ranks, busbw is 4/3 of algbw for all-reduce, and equal to algbw for sendrecv
LARGE_BYTES = 2**20  # From this size on, bandwidths have enough digits to show that a device list is wrong
_MOST_TRIED = 4096  # Rank counts to try for a ratio of busbw to algbw. Above some hundred ranks, several counts fit


def collective_of(lines: Sequence[OutputLine], ranks: int, named: str | None, where: str) -> str:
    """Return the collective of rows that do not name it. `named` is the user's choice, and `where` the file name.

    Raises:
        IncompleteResultError: Several collectives fit, and `named` is None.
        UsageError: No collective fits, or `named` does not fit.
    """
    possible = possible_collectives(lines, ranks)
    if not possible:
        raise UsageError(
            f"{where}: rows that no collective of {ranks} ranks can have",
            expected="size, count and type that fit together",
            reason="a column was moved or edited, or another number of ranks took part",
            next_step="use the complete output of nccl-tests",
        )
    if named is None and len(possible) == 1:
        return possible[0]
    if named is None:
        error = IncompleteResultError(
            f"{where}: the collective is not named",
            expected="a line such as '# Collective test starting: all_gather_perf', the command, or --collective",
            reason=f"nccl-tests before 2.17 does not name it, and such rows can be from {', '.join(possible)}",
            next_step=f"the same command with --collective {possible[0]}, if this collective ran",
        )
        error.collectives = possible
        raise error
    if named not in possible:
        raise UsageError(
            f"{where}: its rows are not of {named}, the collective of --collective",
            expected=f"a collective with such rows: {', '.join(possible)}",
            reason="another collective ran",
            next_step=f"the same command with --collective {possible[0]}, if this collective ran",
        )
    return named


def possible_collectives(lines: Sequence[OutputLine], ranks: int | None) -> list[str]:
    """Return the collectives that fit the largest of these rows. `ranks` is None if the number of ranks is unknown."""
    line = max(lines, key=lambda line: line.size_bytes)
    blocks = None if ranks == 1 else _blocks(line) == ranks if ranks else _blocks(line) != 1
    seen = line.reduction != "none", line.root >= 0, blocks
    possible = [
        name
        for name, shape in _SHAPES.items()
        if all(None in (one, other) or one == other for one, other in zip(shape, seen, strict=True))
    ]
    if not (line.names_reduction and line.names_root):
        possible = [name for name in possible if name in _before_2_11(line)]
    figures = line.placed[0]
    if {"allreduce", "sendrecv"} <= set(possible) and ranks not in (1, 2) and figures.algbw_gb_s > 0:
        if figures.busbw_gb_s > _FACTOR_OF_THREE_RANKS * figures.algbw_gb_s:
            possible.remove("sendrecv")
        elif ranks is not None:
            possible.remove("allreduce")
    return possible


def _blocks(line: OutputLine) -> int:
    return round(line.size_bytes / (line.count * ELEMENT_TYPES[line.element_type][1])) if line.count else 1


def likely_ranks(lines: Sequence[OutputLine], collective: str) -> int | None:
    """Infer the number of ranks. None if the rows do not show it, or if several numbers fit after rounding.

    For collectives that count one rank's block, it is the number of blocks per message. For all-reduce, busbw over
    algbw is 2(n-1)/n for n ranks.
    """
    line = max(lines, key=lambda line: line.placed[0].algbw_gb_s)
    if _SHAPES.get(collective, (None, None, None))[2]:
        return _blocks(line) if _blocks(line) < _MOST_TRIED else None
    figures = line.placed[0]
    if collective != "allreduce" or figures.algbw_gb_s < 1:
        return None
    all_gb_s = (gb_s for line in lines for gb_s in (line.placed[0].busbw_gb_s, line.placed[0].algbw_gb_s))
    off = min(map(_rounded, all_gb_s))
    low, high = (
        (figures.busbw_gb_s - off) / (figures.algbw_gb_s + off),
        (figures.busbw_gb_s + off) / (figures.algbw_gb_s - off),
    )
    found = [ranks for ranks in range(2, _MOST_TRIED) if low <= ring_allreduce_factor(ranks) <= high]
    return found[0] if len(found) == 1 else None


def _rounded(gb_s: float) -> float:
    """Return the largest rounding error in GB/s. nccl-tests prints two decimals, but people often keep fewer."""
    return next((0.5 / 10**digits for digits in (0, 1) if round(gb_s, digits) == gb_s), 0.005)


def _before_2_11(line: OutputLine) -> tuple[str, ...]:
    """Return the collectives that printed these columns before 2.11. alltoall left redop blank, and sendrecv had no
    redop.
    """
    if line.names_root:
        return ("reduce",) if line.names_reduction else ("broadcast", "gather", "scatter")
    if line.names_reduction:
        return ("alltoall",) if line.reduction == "none" else ("allreduce", "reducescatter")
    return "allgather", "sendrecv", "hypercube"
