"""Rows and results that the readers of text share.

The ends of transfers are NICs, ranks or processes: perftest, OSU, ucx_perftest and nixlbench print no GPUs.
"""

from collections.abc import Iterable, Sequence

from gpubench.errors import UsageError
from gpubench.model.results.report import CollectiveRow, PairRow, Verified
from gpubench.model.results.result_file import FileCircumstances, LatencyRow, ResultFile, left_out_remark
from gpubench.model.terms.verdict import Origin
from gpubench.readers.documents import STDIN

UNKNOWN_NODE = "unknown"
_MEMORY = {
    **dict.fromkeys(("cuda", "cuda-managed", "rocm", "rocm-managed", "vram", "device"), "device"),
    **dict.fromkeys(("host", "dram"), "host"),
}


def name_end(name: str, memory: str | None) -> str:
    """Return the name of an end with its memory, such as 'client (device)'. `memory` is the program's own word."""
    return f"{name} ({_MEMORY.get(memory.lower(), memory.lower())})" if memory else name


def transfer_row(
    ends: tuple[str, str],
    engine: str,
    size_bytes: int,
    gb_s: float,
    *,
    direction: str | None = None,
    scope: str | None = None,
    latency_us: float | None = None,
    note: str | None = None,
) -> PairRow:
    """Return the row of a transfer from the first of the two ends to the second."""
    return PairRow(
        source=ends[0],
        destination=ends[1],
        source_bus_id=None,
        destination_bus_id=None,
        source_node=UNKNOWN_NODE,
        destination_node=UNKNOWN_NODE,
        scope=scope,
        origin=Origin.RECORDED,
        direction=direction,
        engine=engine,
        size_bytes=size_bytes,
        bandwidth_gb_s=gb_s,
        latency_us=latency_us,
        limit_gb_s=None,
        path_class=None,
        verified=Verified.NO,
        note=note,
    )


def text_result(
    name: str,
    program: str,
    left_out: Sequence[str],
    expected: str,
    *,
    circumstances: FileCircumstances | None = None,
    remarks: Sequence[str] = (),
    rows: Iterable[CollectiveRow] = (),
    latencies: Iterable[LatencyRow] = (),
    pairs: Iterable[PairRow] = (),
) -> ResultFile:
    """Return the result in a program's text. `left_out` describes its damaged rows.

    Raises UsageError if there are no rows. `expected` describes them.
    """
    result = ResultFile(
        name=name,
        kind=f"{program} text",
        circumstances=circumstances or FileCircumstances(tool=program),
        rows=tuple(rows),
        latencies=tuple(latencies),
        pairs=tuple(pairs),
        complete=not left_out,
        remarks=(*([left_out_remark(left_out)] if left_out else []), *remarks),
        left_out=tuple(left_out),
    )
    if not result.count:
        what = f"no complete row: {left_out_remark(left_out)}" if left_out else "no measured values"
        raise UsageError(
            f"{name} has {what}, of {program}",
            expected=expected,
            reason="the run ended before its first size, or the text was cut",
            next_step="keep the output in a file (| tee FILE) and look at its end" if name == STDIN else f"tail {name}",
        )
    return result


def damaged(number: int, line: str) -> str:
    """Return the description of a row that is left out."""
    return f"line {number} ({' '.join(line.split())[:40]}): not a valid row"
