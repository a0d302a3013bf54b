"""nvbandwidth's matrices: recorded on four H200s, and JSON made here after its source (json_output.cpp)."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpubench.errors import UsageError
from gpubench.readers.registry import read_results
from gpubench.readers.results.nvbandwidth import read

RECORDED = Path(__file__).parents[2] / "results" / "h200x4" / "nvbandwidth.txt"
TEXT = RECORDED.read_text()

MATRIX = """nvbandwidth Version: v0.8
node7
Device 0: NVIDIA H100 80GB HBM3 (00000000:19:00)
Device 1: NVIDIA H100 80GB HBM3 (00000000:3b:00)
Running {test}.
memcpy CE GPU(row) {arrow} GPU(column){part} bandwidth (GB/s)
           0         1
 0       N/A    {one}
 1    {other}       N/A

SUM {test} 3.00
"""


def matrix(
    test: str = "device_to_device_memcpy_read_ce",
    arrow: str = "->",
    part: str = "",
    one: float = 100.0,
    other: float = 200.0,
) -> str:
    return MATRIX.format(test=test, arrow=arrow, part=part, one=one, other=other)


def pairs(text: str) -> dict[tuple[str, str], float | None]:
    return {(row.source, row.destination): row.bandwidth_gb_s for row in read(text, "x").pairs}


def test_recorded() -> None:
    found = read_results(RECORDED)
    assert (found.kind, found.circumstances.tool) == ("nvbandwidth text", "nvbandwidth 0.8")
    assert (found.circumstances.hosts, found.circumstances.gpus) == (("vm",), ("NVIDIA H200",) * 4)
    assert found.remarks == ("left out: device_to_device_latency_sm",)
    kinds = [(row.engine, row.direction, row.peer) for row in found.pairs]
    between = {("ce", "read", "on"), ("ce", "write", "on"), ("ce", "both", "on"), ("sm", "write", "on")}
    assert set(kinds) == between | {("ce", "read", None), ("ce", "write", None)}
    assert all(kinds.count(each) == 12 for each in between)
    by_key = {(row.source, row.destination, row.engine, row.direction): row for row in found.pairs}
    assert by_key["GPU3", "GPU0", "ce", "read"].bandwidth_gb_s == 393.91
    assert by_key["GPU0", "GPU3", "ce", "write"].bandwidth_gb_s == 396.14
    assert by_key["GPU0", "GPU1", "ce", "both"].bandwidth_gb_s == 778.81
    assert by_key["host", "GPU0", "ce", "read"].bandwidth_gb_s == 55.56
    first = by_key["GPU0", "GPU1", "ce", "read"]
    assert (first.source_bus_id, first.destination_bus_id) == ("0000:00:06.0", "0000:00:07.0")
    assert (first.size_bytes, first.verified, first.origin) == (512 * 2**20, "no", "recorded")


def test_the_size_is_that_of_the_command() -> None:
    def size(text: str) -> set[int | None]:
        return {row.size_bytes for row in read(text, "x").pairs}

    assert size(f"$ ./nvbandwidth -t 1 -b 64\n{matrix()}") == {64 * 2**20}
    assert size(f"$ ./nvbandwidth --bufferSize=128\n{matrix()}") == {128 * 2**20}
    assert size(matrix()) == {512 * 2**20}


def as_json(rows: list[list[str]], test: str = "device_to_device_memcpy_read_ce", part: str = "") -> dict[str, Any]:
    description = f"memcpy CE GPU(row) -> GPU(column){part} bandwidth (GB/s)"
    case = {"name": test, "bandwidth_description": description, "bandwidth_matrix": rows, "status": "Passed"}
    waived = {"name": "device_to_device_memcpy_write_sm", "status": "Waived"}
    return {"nvbandwidth": {"Driver Version": "580.1", "testcases": [case, waived], "version": "v0.8"}}


def test_json() -> None:
    found = read(json.dumps(as_json([["N/A", "100"], ["200.5", "N/A"]])), "x")
    assert {(row.source, row.destination): row.bandwidth_gb_s for row in found.pairs} == {
        ("GPU0", "GPU1"): 100.0,
        ("GPU1", "GPU0"): 200.5,
    }
    assert (found.kind, found.circumstances.gpus) == ("nvbandwidth JSON", ())
    assert found.remarks == ("left out: device_to_device_memcpy_write_sm",)


def test_json_has_three_matrices_of_both_directions_below_each_other() -> None:
    rows = [["N/A", str(value)] for value in (1, 2, 3)]
    below = [row for first in rows for row in (first, ["7", "N/A"])]
    found = read(json.dumps(as_json(below, "device_to_device_bidirectional_memcpy_read_ce", " Total")), "x")
    assert [(row.direction, row.bandwidth_gb_s) for row in found.pairs] == [("both", 3.0), ("both", 7.0)]


@pytest.mark.parametrize(
    "text",
    [
        '{"nvbandwidth": {"testcases": 7}}',
        '{"nvbandwidth": {"testcases": [{"name": 1}]}}',
        '{"nvbandwidth": {"testcases": [{}]}}',
        '{"nvbandwidth": {',
        '{"nvbandwidth": {}}',
        "memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)\n",
    ],
)
def test_damaged_files_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        read(text, "x")


def test_a_row_with_too_few_values_is_left_out_and_counted() -> None:
    found = read(TEXT.replace(" 1    393.74       N/A    393.74    393.74", " 1    393.74       N/A    393.74"), "x")
    assert not found.complete
    assert found.left_out[0].endswith("(device_to_device_memcpy_read_ce): no valid row of GPU1")
    assert len([row for row in found.pairs if (row.engine, row.direction) == ("ce", "read")]) == 9 + 4


def test_a_quoted_and_tagged_matrix_is_read_the_same() -> None:
    plain = read(TEXT, "x").pairs
    quoted = "\n".join(f"> {line}" for line in TEXT.splitlines())
    tagged = "\n".join(f"[1,0]<stdout>:{line}" for line in TEXT.splitlines())
    assert read(quoted, "x").pairs == plain
    assert read(tagged, "x").pairs == plain


def test_zeros_and_gpus_beyond_any_machine_are_no_rows() -> None:
    assert pairs(matrix(one=0.0)) == {("GPU1", "GPU0"): 200.0}
    huge = matrix().replace("           0         1\n", "        9998      9999\n")
    with pytest.raises(UsageError, match="has no nvbandwidth matrix"):
        read(huge, "x")
