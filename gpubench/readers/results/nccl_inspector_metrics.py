"""Reads the Prometheus metrics of NCCL's Inspector (NCCL_INSPECTOR_PROM_DUMP=1), a file for each GPU or several joined.

A line is the geometric mean of busbw (GB/s of 1e9 bytes), or the mean time, of a GPU's operations whose size is in a
bucket such as 4-5GB, of 2**30 bytes (plugins/profiler/inspector/inspector_prom.cc). A time includes the wait for late
ranks, so the GPU with the highest busbw counts for its communicator.
"""

import re
from collections.abc import Mapping

from gpubench.model.paths.nccl_log import INSPECTED, InspectedSize
from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.result_file import FileCircumstances, ResultFile
from gpubench.model.terms.units import group_by, parse_size
from gpubench.readers.documents import output_lines
from gpubench.readers.results.nccl_inspector import make_row
from gpubench.readers.transfers import damaged, text_result

_METRIC = re.compile(
    r"\bnccl_(?P<what>bus_bandwidth_gbs|collective_exec_time_microseconds)\{(?P<labels>[^{}]{1,900})\}"
    r"(?: +(?P<value>\S+))?"
)
_LABEL = re.compile(r'(\w{1,20})="([^"]{0,255})"')
_BUCKET = re.compile(r"(?P<low>\d{1,5})-\d{1,5}(?P<unit>|[KMGT])B")
_NUMBER = re.compile(r"\d{1,15}(?:\.\d{1,15})?(?:e[+-]?\d{1,3})?")
_NOTE = "element type and exact sizes not recorded; means of a job's operations on the GPU with the highest busbw"
Values = dict[str, float]


def recognises(text: str) -> bool:
    """Return True if a text has a metric of the Inspector's collectives."""
    return _METRIC.search(text) is not None


def read(text: str, name: str) -> ResultFile:
    """Return one row for each collective, size bucket and shape of communicator.

    Raises UsageError if there is none with a bandwidth and a time.
    """
    found: dict[tuple[tuple[str, str], ...], Values] = {}
    left_out: list[str] = []
    for number, line in output_lines(text, name):
        for metric in _METRIC.finditer(line):
            if metric["value"] is None or not _NUMBER.fullmatch(metric["value"]):
                left_out.append(damaged(number, line))
            else:
                found.setdefault(tuple(_LABEL.findall(metric["labels"])), {})[metric["what"]] = float(metric["value"])
    sizes = [(dict(labels), size) for labels, values in found.items() if (size := _size(dict(labels), values))]
    nodes = dict.fromkeys(labels["node"] for labels, _ in sizes if labels.get("node", "unknown") != "unknown")
    expected = "a collective with nccl_bus_bandwidth_gbs and nccl_collective_exec_time_microseconds"
    known = FileCircumstances(tool="NCCL Inspector", hosts=tuple(nodes))
    return text_result(name, "NCCL Inspector", left_out, expected, circumstances=known, rows=_rows(sizes))


def _size(labels: Mapping[str, str], values: Values) -> InspectedSize | None:
    """Return the mean operation of a line. Its size is that of bandwidth and time, inside the bucket."""
    bucket, known = _BUCKET.fullmatch(labels.get("message_size", "")), INSPECTED.get(labels.get("collective", ""))
    ranks, nodes = (int(labels[key]) if labels.get(key, "").isdecimal() else 0 for key in ("nranks", "n_nodes"))
    busbw, time_us = (values.get(key, 0.0) for key in ("bus_bandwidth_gbs", "collective_exec_time_microseconds"))
    if bucket is None or known is None or ranks < 2 or nodes < 1 or not (busbw > 0 and time_us > 0):
        return None
    name, factor = known
    unit = parse_size(f"1{bucket['unit']}") * (ranks if name in ("allgather", "reducescatter") else 1)
    low = int(bucket["low"])
    size = min(max(busbw / factor(ranks) * 1e3 * time_us, low * unit), (low + 1) * unit)
    return InspectedSize(name, round(size), ranks, nodes, 0, size / (busbw / factor(ranks) * 1e3))


def _rows(sizes: list[tuple[dict[str, str], InspectedSize]]) -> list[CollectiveRow]:
    rows = []
    alike = group_by(sizes, lambda one: (one[1].collective, one[1].ranks, one[1].nodes, one[0]["message_size"]))
    for same in alike.values():
        by_communicator = group_by(same, lambda one: one[0].get("comm_name", ""))
        best = [max((size for _, size in own), key=_busbw) for own in by_communicator.values()]
        rows.append(make_row(sorted(best, key=_busbw)[len(best) // 2], _NOTE))
    return sorted(rows, key=lambda row: (row.collective, row.ranks, row.nodes, row.size_bytes))


def _busbw(size: InspectedSize) -> float:
    return size.busbw_gb_s or 0.0
