"""Reads the table of nixlbench, for transfers between two processes, or with a storage backend.

A transfer has `Batch Size` blocks of `Block Size`. GB/Sec is 1e9 bytes per second (`printStats` in
benchmark/nixlbench/src/utils/utils.cpp). Versions before 0.4 print MiB/Sec and GiB/Sec, too. The aggregate over several
pairs is not read.
"""

import re

from gpubench.model.results.report import PairRow
from gpubench.model.results.result_file import ResultFile
from gpubench.readers.documents import is_row, last_numbers, output_lines
from gpubench.readers.transfers import damaged, name_end, text_result, transfer_row

_HEADER = re.compile(r"Block Size \(B\)\s+Batch Size\s.*B/W \(GB/Sec\)")
_NAMES = re.compile(
    r"Block Size \(B\)|Batch Size|(?:Aggregate )?B/W \(\w+/Sec\)|Network Util \(%\)|(?:Avg|P\d+|Min|Max) \w+\.? ?\(us\)"
)
_OPTION = re.compile(
    r"\b(?P<name>Backend|Initiator seg type|Target seg type|Op type)\s+\(--[^:]{1,200}\)\s*: *(?P<value>\w{1,20})"
)
_ARGUMENT = re.compile(r"--(?P<name>backend|(?:initiator_|target_)?seg_type|op_type)[ =]\"?(?P<value>[A-Za-z]\w{0,19})")
_BETWEEN_PROCESSES = ("UCX", "UCX_MO", "Mooncake", "GPUNETIO", "LIBFABRIC", "UCCL")


def recognises(text: str) -> bool:
    """Return True if a text has the header of nixlbench's table."""
    return _HEADER.search(text) is not None


def read(text: str, name: str) -> ResultFile:
    """Read the rows of all runs in a text. Raises UsageError if there are none."""
    rows: list[PairRow] = []
    left_out: list[str] = []
    names: list[str] = []
    options: dict[str, str] = {}
    for number, line in output_lines(text, name):
        found = [*_OPTION.finditer(line)] or [*_ARGUMENT.finditer(line)]
        if found:
            said = {each["name"].replace("_", " ").capitalize(): each["value"] for each in found}
            options, names = ({} if names else options) | said, []
        elif _HEADER.search(line):
            names = _NAMES.findall(line)
        elif names and len(values := last_numbers(line)) > 1:
            cells = dict(zip(names, values, strict=False))
            size, gb_s = cells["Block Size (B)"] * cells["Batch Size"], cells.get("B/W (GB/Sec)", 0.0)
            if len(values) == len(names) and 0 < gb_s < float("inf") and size > 0:
                rows.append(_row(options, int(size), gb_s, int(cells["Batch Size"])))
            elif is_row(line):
                left_out.append(damaged(number, line))
    expected = "rows of nixlbench: Block Size (B), Batch Size, B/W (GB/Sec)"
    return text_result(name, "nixlbench", left_out, expected, pairs=rows)


def _row(options: dict[str, str], size_bytes: int, gb_s: float, blocks: int) -> PairRow:
    backend = options.get("Backend", "")
    memory = [options.get(f"{end} seg type") or options.get("Seg type") for end in ("Initiator", "Target")]
    ends = list(map(name_end, ("initiator", "target"), memory))
    if backend and backend not in _BETWEEN_PROCESSES:
        ends[1] = f"storage ({backend})"
    if blocks > 1:
        ends[1] += f", {blocks} blocks"
    is_read = options.get("Op type") == "READ"
    return transfer_row(
        (ends[1], ends[0]) if is_read else (ends[0], ends[1]),
        "nixl",
        size_bytes,
        gb_s,
        direction="read" if is_read else "write",
    )
