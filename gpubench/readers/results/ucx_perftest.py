"""Reads the final rows of ucx_perftest's bandwidth tests, between a client and a server.

Its MB/s is 2**20 bytes per second (src/tools/perf/perftest_run.c). The box above a table names test, memory and size;
without the box, the options of the command do. Tests of latency are left out.
"""

import re
from math import prod

from gpubench.model.results.result_file import ResultFile
from gpubench.readers.documents import last_numbers, output_lines
from gpubench.readers.transfers import damaged, name_end, text_result, transfer_row

_TABLE = re.compile(r"(?:Stage|Test)\W+# iterations\W.*\boverall\b|# iterations\W+(?:\d\d\.\d%ile|typical)")
_BOX = re.compile(r"\b(?P<name>Test|Send memory|Recv memory|Message size): +(?P<value>\S.*?)\s*$")
_COMMAND = re.compile(r"\bucx_perftest\b(?P<options>.*)")
_OPTION = re.compile(r"\s-(?P<name>[tms]) *(?P<value>[\w,:-]+|\$\(\([\d *]+\)\))")
_BATCH = re.compile(r"^\W{3,}(?P<test>[a-z_]+_(?:bw|lat))\W{3,}$")
_FINAL = re.compile(r"\bFinal:\s|^\s*\w+_(?:bw|get)\s")
_COLUMNS, _OVERALL = 8, 5  # Iterations, three latencies, two bandwidths and two message rates
_BYTES_PER_MB = 2**20


def recognises(text: str) -> bool:
    """Return True if a text has the header of ucx_perftest's table."""
    return _TABLE.search(text) is not None


def read(text: str, name: str) -> ResultFile:
    """Read the final row of every bandwidth test in a text. Raises UsageError if there is none."""
    rows = []
    left_out: list[str] = []
    known: dict[str, str] = {}
    for number, line in output_lines(text, name):
        if found := _COMMAND.search(line):
            known = _options(found["options"]) or known
        elif found := _BATCH.search(line):
            known["Test"] = found["test"]
        elif found := _BOX.search(line):
            known[found["name"]] = found["value"].rstrip("|").strip()
        elif _FINAL.search(line):
            values, size = last_numbers(line.replace(",", "")), known.get("Message size", "").partition(",")[0]
            what = known.get("Test", "")
            if "latency" in what or what.endswith("_lat"):
                left_out.append(f"line {number}: a test of latency")
            elif len(values) != _COLUMNS or not 0 < values[_OVERALL] < float("inf") or not size.isdecimal():
                left_out.append(damaged(number, line) if size.isdecimal() else f"line {number}: its size is unknown")
            else:
                gb_s = values[_OVERALL] * _BYTES_PER_MB / 1e9
                client, server = (name_end(end, known.get(key)) for end, key in _ENDS.items())
                is_read = what.startswith("get") or "_get" in what
                ends = (server, client) if is_read else (client, server)
                way = "read" if is_read else "write"
                rows.append(transfer_row(ends, "ucx", int(size), gb_s, direction=way))
    expected = "a row 'Final:' of a bandwidth test, such as -t tag_bw"
    return text_result(name, "ucx_perftest", left_out, expected, pairs=rows)


_ENDS = {"client": "Send memory", "server": "Recv memory"}


def _options(text: str) -> dict[str, str]:
    """Return what the options of a command say, under the names that the box uses. Without options, nothing."""
    found = {match["name"]: match["value"] for match in _OPTION.finditer(text)}
    if "t" not in found:
        return {}
    send, _, receive = found.get("m", "host").partition(",")
    return {
        "Test": found["t"],
        "Message size": str(prod(map(int, re.findall(r"\d+", found.get("s", "8"))))),
        "Send memory": send,
        "Recv memory": receive or send,
    }
