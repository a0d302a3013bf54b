"""Reads the bandwidth tables of perftest: ib_write_bw, ib_read_bw and ib_send_bw, between NICs of two hosts.

perftest prints MB/sec or MiB/sec of 2**20 bytes, and with --report_gbits Gb/sec of 1e9 bits (`format_factor` in
src/perftest_parameters.c). The bandwidth of a bidirectional test is the sum of both directions. With GPU memory, the
lines of src/cuda_memory.c stand above the table.
"""

import re
from collections import Counter

from gpubench.model.results.result_file import ResultFile
from gpubench.readers.documents import is_row, last_numbers, output_lines
from gpubench.readers.transfers import damaged, name_end, text_result, transfer_row

_TITLE = re.compile(
    r"\b(?P<verb>Send|Send_imm|RDMA_Write|RDMA_Write_imm|RDMA_Read) (?P<both>Bidirectional )?(?:Post List )?BW "
)
_DEVICE = re.compile(r"\bDevice\s*: (?P<name>[\w.-]{1,40})")
_ON_GPU = re.compile(
    r"\[pid = \d+, dev = \d+\] device name = \[|allocated (?:\d+ bytes of )?GPU buffer|Picking (?:device No|GPU number)"
    r"|Use (?:ROCm|CUDA|MUSA) memory\s*: ON|\bib_\w+_bw .*--use_(?:cuda|rocm)"
)
_HEADER = re.compile(r"#bytes\s.*\bBW average\[(?P<unit>MB|MiB|Gb)/sec\]")
_NAMES = re.compile(r"#\w+|(?:BW peak|BW average|MsgRate|BW Port\d|MsgRate Port\d|CPU_Util)\[[^\]]{1,8}\]")
_END = re.compile(r"\s*-{20}")
_BYTES_PER_S = {"MB": 2**20, "MiB": 2**20, "Gb": 1e9 / 8}


def recognises(text: str) -> bool:
    """Return True if a text has the header of a bandwidth table of perftest."""
    return _HEADER.search(text) is not None


def is_json(text: str) -> bool:
    """Return True if a text starts like perftest's JSON, which is not read."""
    return re.match(r'\s*\{\s*"?test_info"?:', text) is not None


def read(text: str, name: str) -> ResultFile:
    """Read the rows of all runs in a text. Raises UsageError if there are none."""
    rows = []
    left_out: list[str] = []
    runs: Counter[str] = Counter()
    verb, both, nic, memory, names, unit = "", False, "NIC", "", list[str](), "MB"
    has_row = on_gpu = False
    for number, line in output_lines(text, name):
        if _ON_GPU.search(line):
            on_gpu = True
        if found := _TITLE.search(line):
            verb, both, names, nic = found["verb"], bool(found["both"]), [], "NIC"
        if found := _DEVICE.search(line):
            nic = found["name"]
        if found := _HEADER.search(line):
            runs[nic] += 1
            names, unit, memory = _NAMES.findall(line), found["unit"], "device" if on_gpu else ""
            has_row = on_gpu = False
            continue
        values = last_numbers(line) if names else []
        if line.strip() and len(values) < 2 and (has_row or _END.match(line)):
            names = []  # Before the first row, perftest may warn about the clock of the CPU
        if not names or len(values) < len(names):
            left_out += [damaged(number, line)] if names and is_row(line) else []
            continue
        cells = dict(zip((column.partition("[")[0] for column in names), values, strict=False))
        gb_s = cells["BW average"] * _BYTES_PER_S[unit] / 1e9
        if not 0 < gb_s < float("inf") or not cells["#bytes"] > 0:
            left_out.append(damaged(number, line))
            continue
        has_row = True
        there = "remote" if runs[nic] == 1 else f"remote, run {runs[nic]}"
        ends = name_end(nic, memory), there
        way = "both" if both else "read" if verb == "RDMA_Read" else "write"
        ends = (ends[1], ends[0]) if way == "read" else ends
        rows.append(transfer_row(ends, "rdma", int(cells["#bytes"]), gb_s, direction=way, scope="network"))
    expected = "rows of ib_write_bw: #bytes, #iterations, BW average"
    return text_result(name, "perftest", left_out, expected, pairs=rows)
