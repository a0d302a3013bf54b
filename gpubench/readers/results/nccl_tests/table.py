"""Rows as nccl-tests prints them, and the collectives and numbers of ranks that they fit.

Names, units and formulas are those of nccl-tests 1.0 to 2.20 (src/common.cu, src/util.cu). rccl-tests has the same.
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
"""gpubench's names by nccl-tests' names. Only nccl-tests has alltoallv and hypercube."""

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
"""gpubench's name and bytes per element, by nccl-tests' name."""

REDUCTIONS = ("sum", "prod", "max", "min", "avg", "mulsum", "none")


class Device(Struct, frozen=True):
    """A rank in nccl-tests' device list. `bus_id` is None if it is incomplete, as before 2.11."""

    rank: int
    group: int
    pid: int
    host: str
    index: int
    bus_id: str | None
    name: str


class PerIteration(Struct, frozen=True, kw_only=True):
    """The statistics of -I: microseconds between CUDA events around single operations. None if the text lacks it."""

    p50_us: float | None = None
    p95_us: float | None = None
    p99_us: float | None = None
    cv_percent: float | None = None
    samples: int | None = None
    mean_us_by_process: tuple[float, ...] = ()


class Placed(Struct, frozen=True, kw_only=True):
    """One placement of a line: out of place or in place. `wrong` is None if nothing was compared."""

    placement: str
    time_us: float
    algbw_gb_s: float
    busbw_gb_s: float
    wrong: int | None
    per_iteration: PerIteration | None = None


class OutputLine(Struct, frozen=True, kw_only=True):
    """One line of the table, in nccl-tests' terms.

    `names_reduction` and `names_root` tell whether the table has such a column, as all tables since 2.11 do.
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
        """Return the line of these cells, named as in nccl-tests' JSON."""
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
"""Whether rows name a reduction and a root, and count the elements of one rank's block (None: either). sendrecv
names the first reduction, which it does not use.
"""

_FACTOR_OF_THREE_RANKS = 1.2  # With three ranks, busbw of allreduce is 4/3 of algbw, and of sendrecv equal to it
LARGE_BYTES = 2**20  # From this size on, bandwidths have enough digits to contradict a device list
_MOST_TRIED = 4096  # Ranks that are tried for a ratio of busbw to algbw. Above some hundred, several fit


def collective_of(lines: Sequence[OutputLine], ranks: int, named: str | None, where: str) -> str:
    """Return the collective of rows that do not name it. `named` is the user's answer, `where` the file.

    Raises UsageError if several fit and `named` is None, or if the named one does not fit.
    """
    possible = possible_collectives(lines, ranks)
    if not possible:
        raise UsageError(
            f"{where}: rows of {ranks} ranks as no collective has them",
            expected="size, count and type that fit together",
            reason="a column was moved or edited, or another number of ranks took part",
            next_step="give the whole output of nccl-tests",
        )
    if named is None and len(possible) == 1:
        return possible[0]
    if named is None:
        error = IncompleteResultError(
            f"{where}: nothing says which collective this is",
            expected="a line such as '# Collective test starting: all_gather_perf', the command, or --collective",
            reason=f"nccl-tests before 2.17 does not say it, and rows like these are of {', '.join(possible)}",
            next_step=f"the same command with --collective {possible[0]}, if that is what ran",
        )
        error.collectives = possible
        raise error
    if named not in possible:
        raise UsageError(
            f"{where}: its rows are not of {named}, as --collective says",
            expected=f"one that has such rows: {', '.join(possible)}",
            reason="another collective ran",
            next_step=f"the same command with --collective {possible[0]}, if that is what ran",
        )
    return named


def possible_collectives(lines: Sequence[OutputLine], ranks: int | None) -> list[str]:
    """Return the collectives that fit the largest of these rows. `ranks` is None if unknown."""
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
    """Infer the number of ranks from the blocks of a size, or for all-reduce from busbw over algbw, which is
    2(n-1)/n.

    None if nothing shows it, or if several fit after rounding.
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
    """Return the largest rounding error in GB/s: nccl-tests prints two decimals, people fewer."""
    return next((0.5 / 10**digits for digits in (0, 1) if round(gb_s, digits) == gb_s), 0.005)


def _before_2_11(line: OutputLine) -> tuple[str, ...]:
    """Return the collectives that printed these columns before 2.11: alltoall left redop blank, sendrecv had none."""
    if line.names_root:
        return ("reduce",) if line.names_reduction else ("broadcast", "gather", "scatter")
    if line.names_reduction:
        return ("alltoall",) if line.reduction == "none" else ("allreduce", "reducescatter")
    return "allgather", "sendrecv", "hypercube"
