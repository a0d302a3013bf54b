"""The winners of a sweep as a file that NCCL's example tuner plugin reads, and RCCL's, whose columns are the same.

Columns as in NVIDIA/nccl, plugins/tuner/example/README.md (2.30) and ROCm/rccl, ext-tuner/example: collective, least
and most bytes, algorithm, protocol, channels, nodes, ranks, pipelined operations, registered buffers; -1 is any.

Channels are never left at -1: NCCL's plugin, though its page says otherwise, then asks for a single one (plugin.c sets
1 before it looks for a line, and enqueue.cc takes what it is given). So every size from 0 on has a line.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import isqrt

from msgspec import Struct

from gpubench.formats.json import DocumentRun, documents
from gpubench.model.results.backends import WinnerRow
from gpubench.model.results.report import CollectiveRow
from gpubench.model.terms.operation import Placement
from gpubench.model.terms.settings import NcclSetting
from gpubench.model.terms.units import format_size, printable_line

_COLUMNS = "collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff"
_KNOWN = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
_MOST_BYTES = 2**64 - 1
_MOST_CHARACTERS = 200
_IN_THE_COLUMNS = {f"NCCL_{end}_{what}" for end in ("MIN", "MAX") for what in ("NCHANNELS", "CTAS")}
"""Variables whose effect is the number of channels, which has a column."""


class TunedSize(Struct, frozen=True):
    """What the file asks for at one measured size."""

    size_bytes: int
    row: CollectiveRow
    is_winner: bool

    @property
    def choice(self) -> tuple[str, str, int] | None:
        """Return algorithm, protocol and channels from NCCL's log, or None if it named none."""
        row = self.row
        if row.algorithm is None or row.protocol is None or row.channels is None:
            return None
        return row.algorithm.lower(), row.protocol.lower(), row.channels

    @property
    def needs(self) -> tuple[str, ...]:
        """Return variables that the winner was measured with and that have no column."""
        own = NcclSetting.parse(self.row.setting).process_part.values
        return tuple(f"{name}={value}" for name, value in own if name not in _IN_THE_COLUMNS)


def tuned(rows: Sequence[CollectiveRow], best: Sequence[WinnerRow]) -> list[TunedSize]:
    """Return, by size, the winner if it is faster beyond the noise, else NCCL's own choice.

    Only the first type, reduction and placement count: the plugin knows none of them.
    """
    if not best:
        return []
    placements = {winner.placement for winner in best}
    placement = Placement.OUT_OF_PLACE if Placement.OUT_OF_PLACE in placements else best[0].placement
    key = best[0].dtype, best[0].op, placement
    measured = {(row.size_bytes, row.setting): row for row in rows if (row.dtype, row.op, row.placement) == key}
    found = []
    for winner in best:
        if (winner.dtype, winner.op, winner.placement) == key:
            setting = winner.setting if winner.beyond_noise else None
            found.append(TunedSize(winner.size_bytes, measured[winner.size_bytes, setting], bool(winner.beyond_noise)))
    return sorted(found, key=lambda size: size.size_bytes)


def _tuner_text(run: DocumentRun) -> Iterator[str]:
    rows = [row for row in run.rows if isinstance(row, CollectiveRow)]
    sizes = tuned(rows, run.report.rows(WinnerRow))
    yield _comment(
        f"gpubench {run.metadata.gpubench_version}, {run.metadata.started_at}: {' '.join(run.metadata.command)}"
    )
    yield _comment(f"{run.metadata.libraries.get('NCCL', 'NCCL')}")
    yield _comment(
        "NCCL_TUNER_PLUGIN=libnccl-tuner-example.so NCCL_TUNER_CONFIG_FILE=this file; RCCL's example reads it too"
    )
    yield _comment(f"{_COLUMNS}")
    name = str(run.metadata.collective)
    if name not in _KNOWN:
        yield _comment(f"nothing: NCCL chooses no algorithm for {name}")
        return
    if not run.report.complete or not sizes:
        yield _comment("nothing: the sweep is not finished, or nothing ran beside NCCL's own choice")
        return
    first = sizes[0].row
    series = " ".join(filter(None, (first.dtype, first.op, first.placement.replace("_", " "))))
    yield _comment(f"measured with {series}; other types and placements get the same")
    yield _comment("other collectives than those in this file run with one channel under NCCL's example plugin")
    start = 0
    alike = [list(here) for _, here in groupby(sizes, key=lambda size: (size.choice, size.needs))]
    for here, following in zip(alike, [*alike[1:], []], strict=True):
        end = isqrt(here[-1].size_bytes * following[0].size_bytes) if following else _MOST_BYTES
        yield from _lines(here, start, end)
        start = end + 1


def _comment(text: str) -> str:
    """Return a comment that the plugin reads as one line. It takes what follows 255 characters for another."""
    return printable_line(f"# {text}")[:_MOST_CHARACTERS] + "\n"


def _lines(alike: Sequence[TunedSize], start: int, end: int) -> Iterator[str]:
    first = alike[0]
    span = " to ".join(dict.fromkeys(format_size(size.size_bytes) for size in (first, alike[-1])))
    won = [format_size(size.size_bytes) for size in alike if size.is_winner]
    what = f"faster than NCCL's own choice at {', '.join(won)}" if won else "NCCL's own choice"
    yield _comment(f"{span}: {what}")
    if first.needs:
        yield _comment(f"measured with {' '.join(first.needs)}, which has to be set too")
    if first.choice is None:
        yield _comment(f"no line for {start} to {end} bytes: NCCL's log named no algorithm, protocol and channels")
        return
    algorithm, protocol, channels = first.choice
    row = first.row
    yield f"{row.collective},{start},{end},{algorithm},{protocol},{channels},{row.nodes},{row.ranks},-1,-1\n"


writer = documents(_tuner_text)
