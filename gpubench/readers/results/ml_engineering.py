"""Reads the table of all_reduce_bench.py of the book Machine Learning Engineering, for torch's all-reduce over NCCL.

Payloads are 2**10-based, and GBps is 1e9 bytes per second (`fmt_bytes` and `conv_to_GBps` in
network/benchmarks/all_reduce_bench.py). It operates in place on float32. Newer versions queue up to 10 calls per trial,
as their title says; others time each call after a barrier. Above the table are the number of ranks and a GPU's
properties, but no hosts.
"""

import re

from gpubench.model.results.report import Verified
from gpubench.model.results.result_file import NO_USER_FACTS, FileCircumstances, LatencyRow, ResultFile, UserFacts
from gpubench.model.terms.operation import DataType, Placement, ReduceOp
from gpubench.model.terms.statistics import Mode
from gpubench.model.terms.units import parse_size
from gpubench.readers.documents import output_lines
from gpubench.readers.transfers import damaged, text_result

_TOOL = "all_reduce_bench.py"
_TITLE = re.compile(
    r"average bandwidth (?:and the per-call latency )?of all_reduce over (?P<ranks>\d{1,7}) ranks"
    r"(?: \((?:at least )?\d+ warmups? / (?P<trials>\d{1,9}) trials(?P<queued>, up to \d+ queued calls)?)?"
)
_GPU = re.compile(r"- hardware: _CudaDeviceProperties\(name='(?P<name>[^']{1,80})'")
_SOFTWARE = re.compile(r"- software: .*\bnccl=\((?P<version>\d+, \d+, \d+)\)")
_HEADER = re.compile(r"\bpayload\W+busbw\W+algbw\b")
_LIKE_A_ROW = re.compile(r"(?<!\S)\d{1,6}[KMGT]?i?B(?!\S)")
_ROW = re.compile(
    r"(?<!\S)(?P<size>\d{1,6}[KMGT]?)i?B\s+(?P<busbw>\d{1,6}\.\d{1,4}) ?GBps"
    r"\s+(?P<algbw>\d{1,6}\.\d{1,4}) ?GBps"
)


def recognises(text: str) -> bool:
    """Return True if a text has the header of the table."""
    return _HEADER.search(text) is not None


def read(text: str, name: str, user_facts: UserFacts = NO_USER_FACTS) -> ResultFile:
    """Read the rows of a table. `user_facts` supplies the number of ranks if the title is missing.

    Raises UsageError if there are no rows.
    """
    rows: list[LatencyRow] = []
    left_out: list[str] = []
    ranks, trials, mode, is_table, model = user_facts.ranks, None, Mode.LATENCY, False, ""
    libraries: dict[str, str] = {}
    for number, line in output_lines(text, name):
        plain = line.replace("|", " ")
        if found := _TITLE.search(line):
            ranks, trials = int(found["ranks"]), int(found["trials"]) if found["trials"] else None
            mode = Mode.THROUGHPUT if found["queued"] else Mode.LATENCY
        elif _HEADER.search(line):
            is_table = True
        elif found := _GPU.search(line):
            model = found["name"]
        elif found := _SOFTWARE.search(line):
            libraries["NCCL"] = found["version"].replace(", ", ".")
        elif is_table and _LIKE_A_ROW.search(plain):
            found = _ROW.search(plain)
            if found is None or not float(found["algbw"]) > 0:
                left_out.append(damaged(number, line))
            else:
                rows.append(_row(found, ranks, trials, mode))
    known = FileCircumstances(tool=_TOOL, models=(model,) if model else (), libraries=libraries)
    expected = "rows with payload, busbw and algbw in GBps, not all rounded down to 0"
    return text_result(name, _TOOL, left_out, expected, circumstances=known, latencies=rows)


def _row(found: re.Match[str], ranks: int | None, trials: int | None, mode: Mode) -> LatencyRow:
    size, algbw = parse_size(found["size"]), float(found["algbw"])
    return LatencyRow(
        collective="allreduce",
        backend="nccl",
        ranks=ranks,
        size_bytes=size,
        dtype=DataType.FLOAT32,
        op=ReduceOp.SUM,
        placement=Placement.IN_PLACE,
        mode=mode,
        iterations=trials,
        time_us=size / (algbw * 1e3),
        busbw_gb_s=float(found["busbw"]) if ranks and ranks > 1 else None,
        verified=Verified.NO,
        note="time computed from algbw",
    )
