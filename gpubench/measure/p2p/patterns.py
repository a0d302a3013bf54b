"""Copies of several pairs at once, beside what the same pairs reach one at a time."""

from collections.abc import Iterator, Mapping, Sequence

from gpubench.conditions.definition.circumstances import Together
from gpubench.measure.p2p.machine import CopyMachine
from gpubench.measure.p2p.matrix import CopyMatrix
from gpubench.measure.p2p.request import P2pRequest, PatternCopy
from gpubench.model.paths.p2p import Cell, Pair, Series
from gpubench.model.results.rows.patterns import PatternRow
from gpubench.model.terms.copies import Direction, Engine, pairs_of
from gpubench.model.terms.units import BYTES_PER_GB, percent

PatternCells = Mapping[PatternCopy, Cell]


def pattern_rows(
    machine: CopyMachine, request: P2pRequest, measured: PatternCells, matrices: Sequence[CopyMatrix]
) -> Iterator[PatternRow]:
    """A row for every pattern in each direction."""
    for copy, cell in measured.items():
        pairs = pairs_of(copy.pattern, len(machine.gpus))
        total = _total_gb_s(request, cell, len(pairs))
        parts = None if total is None else _parts_gb_s(request, copy.direction, pairs, matrices)
        yield PatternRow(
            pattern=copy.pattern,
            direction=copy.direction,
            gpus=len(machine.gpus),
            pairs=len(pairs),
            size_bytes=request.pattern_bytes,
            total_gb_s=total,
            parts_gb_s=parts,
            share_percent=percent(total, parts),
            wrong=cell.wrong,
            origin=machine.origin,
            note=cell.error,
        )


def measured_both_ways(request: P2pRequest, measured: PatternCells, gpus: int) -> list[Together]:
    """The patterns that were both written and read."""
    found = []
    for pattern in request.patterns:
        pairs = pairs_of(pattern, gpus)
        cells = [measured[PatternCopy(pattern, way)] for way in (Direction.WRITE, Direction.READ)]
        write, read = (_total_gb_s(request, cell, len(pairs)) for cell in cells)
        if write is not None and read is not None:
            found.append(Together(pattern.replace("_", " "), pairs, write, read))
    return found


def _total_gb_s(request: P2pRequest, cell: Cell, pairs: int) -> float | None:
    """The bandwidth of all pairs together."""
    return pairs * request.pattern_bytes / cell.typical_seconds / BYTES_PER_GB if cell.seconds else None


def _parts_gb_s(
    request: P2pRequest, direction: Direction, pairs: Sequence[Pair], matrices: Sequence[CopyMatrix]
) -> float | None:
    """The bandwidths of the pairs one at a time, added up; None where one was not measured."""
    wanted = Series(Engine.CE, direction, peer=True, size_bytes=request.pattern_bytes)
    alone = next((each.gb_s for each in matrices if each.series == wanted), {})
    return sum(alone[pair] for pair in pairs) if all(pair in alone for pair in pairs) else None
