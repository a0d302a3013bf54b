"""Managed memory beside plain memory: a line for every pair of ends, and what each way reaches of a plain copy."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpubench.formats.text.columns import Column, lines, verdict_mark
from gpubench.model.results.report import PairRow
from gpubench.model.terms.copies import HostMemory
from gpubench.model.terms.grouping import grouped
from gpubench.model.terms.units import compress_names, format_share, format_size, percent
from gpubench.model.terms.verdict import Verdict

_OF_MANAGED = ("prefetch", "faults", "in place")
_COPY, _KERNEL = "ce", "sm"
_HOST = "host"
_HEADS = {"prefetch": "prefetch", "faults": "page faults", "in place": "in place"}

Ends = tuple[str, str]


def is_of_managed(row: PairRow) -> bool:
    """True of a row of managed memory, and of a kernel's on pinned memory, which stands beside it."""
    return row.engine in _OF_MANAGED or (row.engine == _KERNEL and _HOST in (row.source, row.destination))


def managed_lines(plain: Sequence[PairRow], managed: Sequence[PairRow]) -> Iterator[str]:
    """The table, with what each way reaches of the copy engine's copy between the same ends; nothing without rows."""
    if not managed:
        return
    found = {((row.source, row.destination), row.engine): row for row in (*filter(_stands_beside, plain), *managed)}
    ends = list(dict.fromkeys(pair for pair, _ in found))
    yield ""
    size = format_size(managed[0].size_bytes or 0)
    yield f"managed memory beside plain memory, {size}, GB/s (of the copy engine's copy)"
    columns = [Column("from", [source for source, _ in ends]), Column("to", [to for _, to in ends])]
    for engine, head in ((_COPY, "copy engine"), (_KERNEL, "kernel"), *_HEADS.items()):
        cells = [_cell(found.get((pair, engine)), found.get((pair, _COPY))) for pair in ends]
        columns.append(Column(head, cells, right=True))
    yield from lines(columns)


def _stands_beside(row: PairRow) -> bool:
    """Not pageable memory, which the driver copies twice."""
    return HostMemory.of_note(row.note) is not HostMemory.PAGEABLE


def _cell(row: PairRow | None, copied: PairRow | None) -> str:
    if row is None or row.bandwidth_gb_s is None:
        return "ERROR" if row is not None and row.verdict == Verdict.ERROR else "-"
    figure = f"{row.bandwidth_gb_s:.1f}{verdict_mark(row.verdict)}"
    if row.engine == _COPY or copied is None or copied.bandwidth_gb_s is None:
        return figure
    return f"{figure} ({format_share(percent(row.bandwidth_gb_s, copied.bandwidth_gb_s))} %)"


def support_lines(managed: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What CUDA says of managed memory, GPUs that are alike in one line."""
    for words, gpus in grouped(managed, _support).items():
        yield f"managed memory of {compress_names([str(each['device']) for each in gpus])}: {words}"


def _support(gpu: Mapping[str, Any]) -> str:
    if gpu["managed"] is False:
        return "none"
    words = ["prefetch, advice and page faults" if gpu["concurrent"] else "moved whole at every launch of a kernel"]
    if gpu["pageable"] is not None:
        way = "by the host's page tables" if gpu["host_page_tables"] else "HMM"
        words.append(f"kernels read memory of malloc ({way})" if gpu["pageable"] else "no HMM")
    return "; ".join(words)
