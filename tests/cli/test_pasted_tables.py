"""Tables of other programs as people paste them: whole, cut, edited, twice, or with the failure of the run among them.

A table that lies must not be PASS, and what a person wrote around a healthy one must not change its verdict. Each line
is one kind: what is done to a recorded healthy table, then the exit code and what `report` says.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.test_report_tables import REAL, report, written

TABLE = (REAL / "all_reduce.txt").read_text()
ROW = next(line for line in TABLE.splitlines() if line.startswith("  1073741824 "))
LAST = "# Out of bounds values : 0 OK"
HEALTHY = "PASS: 4 × H200, all-reduce 363 GB/s (100 % of expected), data right, paths unknown"
DEVICES = [line for line in TABLE.splitlines() if line.startswith("#  Rank")]
ROWS = [line for line in TABLE.splitlines() if " float " in line]

Edit = Callable[[str], str]


def instead(old: str, new: str) -> Edit:
    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return edit


def behind(line: str, new: str) -> Edit:
    return instead(line, f"{line}\n{new}")


def without(*lines: str) -> Edit:
    def edit(text: str) -> str:
        return "\n".join(line for line in text.splitlines() if line not in lines)

    return edit


def with_time(time: str) -> Edit:
    return instead("4550.09  235.98", f"{time}  235.98")


def slower(text: str, times: float = 4.0) -> str:
    """The same table with all times longer."""
    lines = []
    for line in text.splitlines():
        words = line.split()
        if line in ROWS:
            for place in (5, 9):
                time, algbw, busbw = (float(word) for word in words[place : place + 3])
                words[place : place + 3] = f"{time * times:.2f}", f"{algbw / times:.2f}", f"{busbw / times:.2f}"
        lines.append("  ".join(words) if line in ROWS else line)
    return "\n".join(lines) + "\n"


def in_a_pdf(text: str) -> str:
    """The table with the minus signs, dashes and spaces of a PDF."""
    return text.replace("-1", "\u22121").replace("  ", "\u00a0 ")


def headless(text: str) -> str:
    """A table with its list of devices and rows alone."""
    return without(*[line for line in text.splitlines() if line.startswith("#") and "Rank" not in line])(text)


AROUND = [
    (
        "a prompt of root's",
        lambda text: f"root@box:~/nccl-tests# ./build/all_reduce_perf -b 1K -e 4G -f 4 -g 4\n{text}",
    ),
    ("another prompt", lambda text: f"[root@gpu-7 ~]# mpirun -n 4 all_reduce_perf -g 1\n{text}[root@gpu-7 ~]# exit\n"),
    ("prompts and a question", lambda text: f"$ ./all_reduce_perf -g 4\n{text}\n$ \nIs this normal?\n\nThanks\n"),
    ("prose", lambda text: f"Hello,\n\nwe see this with 4 GPUs:\n\n```\n{text}```\n\nAny idea why it is so slow?\n"),
    ("a story", lambda text: f"Hi,\nbefore the update our job was killed with exit code 1 on rank 3.\n\n{text}"),
    (
        "another story",
        lambda text: f"{text}\nI get this after I killed a hanging rank; the run before died of signal 9",
    ),
    ("devices left out", instead("\n".join(DEVICES[2:3]), "...")),
    ("devices left out in brackets", instead("\n".join(DEVICES[2:3]), "#  [...]")),
    ("devices left out with a word", instead("\n".join(DEVICES[2:3]), "# <snip>")),
    ("rows left out", instead(ROWS[3], "...")),
    ("from a PDF", in_a_pdf),
    ("without the vendor", lambda text: text.replace("NVIDIA H200", "H200")),
    ("twice on one machine", lambda text: text + text),
    ("twice without headers", lambda text: text + "\n".join(ROWS)),
    ("the rows of two runs below each other", lambda text: headless(text) + "\n" + headless(text)),
    ("devices of which one process lists half", without(*DEVICES[2:])),
    ("2.20", instead("version 2.19.6 ", "version 2.20.0 (b4d5bee) ")),
    ("without the last lines", lambda text: text.partition("# Out of")[0]),
    ("a comment", behind(LAST, "# this is fine, we ran all_reduce_perf twice")),
]


@pytest.mark.parametrize("edit", [edit for _, edit in AROUND], ids=[name for name, _ in AROUND])
def test_what_stands_around_a_healthy_table_does_not_change_its_verdict(edit: Edit, tmp_path: Path) -> None:
    code, said = report(written(tmp_path, edit(TABLE)), "--summary")
    whole = "without" not in said and "did not end" not in said
    assert (code, said.splitlines()[0].startswith(HEALTHY) or not whole) == (0, True), said
    assert said.startswith(("PASS", "WARN")), said


LIES: list[tuple[str, Edit, int, str]] = [
    ("NCCL failed", behind(ROW, "vm: Test NCCL failure common.cu:1005 'unhandled system error'"), 1, "FAIL: "),
    ("CUDA failed", behind(ROW, "vm: Test CUDA failure common.cu:392 'an illegal memory access'"), 1, "FAIL: "),
    (
        "a rank was killed",
        behind(LAST, "mpirun noticed that process rank 3 with PID 7 exited on signal 9"),
        1,
        "FAIL: ",
    ),
    ("a rank crashed before", lambda text: f"[vm:7] Signal: Segmentation fault (11)\n{text}", 1, "FAIL: "),
    ("the job was cancelled", behind(ROW, "slurmstepd: error: *** STEP 1.0 ON vm CANCELLED AT 8:00 ***"), 1, "FAIL: "),
    ("wrong data in the last line", instead(LAST, "# Out of bounds values : 12 FAILED"), 1, "Out of bounds values: 12"),
    ("wrong data, cut off", instead(LAST, "# Out of bounds values : 12"), 1, "Out of bounds values: 12"),
    ("wrong data in a row", instead("353.97       0", "353.97       7"), 1, "7 wrong elements"),
    ("below the minimum that a person set", instead("154.873 ", "154.873 FAILED"), 1, "FAIL: "),
    ("a negative time", with_time("-5.00"), 0, "WARN: "),
    ("no time", with_time("0.00"), 0, "WARN: "),
    ("no number", with_time("nan"), 0, "WARN: "),
    ("infinite", with_time("inf"), 0, "WARN: "),
    ("negative infinite", with_time("-inf"), 0, "WARN: "),
    ("a negative bandwidth", instead("353.97", "-353.97"), 0, "WARN: "),
    ("a row that was cut", instead(ROW, ROW[:70]), 0, "WARN: "),
    ("a row that was cut in its last half", instead(ROW, ROW[:-20]), 0, "WARN: "),
    ("a slow run behind a fast one", lambda text: text + slower(text), 1, "FAIL: "),
    ("a slow run before a fast one", lambda text: slower(text) + text, 1, "FAIL: "),
    ("a slow run without headers", lambda text: headless(text) + "\n" + headless(slower(text)), 1, "FAIL: "),
    (
        "devices that do not fit",
        lambda text: without(*DEVICES[2:])(text).replace("nGpus 4", "nGpus 1"),
        2,
        "2 ranks, but its rows are those of 4",
    ),
    ("devices of another run", behind(DEVICES[3], DEVICES[3].replace("3", "4", 1)), 2, "its rows are those of 4"),
]


@pytest.mark.parametrize(("edit", "code", "said"), [each[1:] for each in LIES], ids=[each[0] for each in LIES])
def test_a_table_that_lies_does_not_pass(edit: Edit, code: int, said: str, tmp_path: Path) -> None:
    strict = ("--strict",) if said == "FAIL: " else ()
    found = report(written(tmp_path, edit(TABLE)), "--summary", *strict)
    assert (found[0], said in found[1]) == (code, True), found[1]
    assert "PASS" not in found[1]


@pytest.mark.parametrize(
    ("edit", "said"),
    [(str, "2 runs of allreduce: line 1 on vm, line "), (headless, "on vm, line 18 on vn")],
    ids=["whole", "without headers"],
)
def test_runs_of_two_machines_are_two_tables(edit: Edit, said: str, tmp_path: Path) -> None:
    file = written(tmp_path, edit(TABLE) + "\n" + edit(TABLE).replace(" vm ", " vn "))
    code, refusal = report(file, "--json")
    assert (code, said in refusal) == (2, True), refusal
    judged = [line for line in report(file, "--summary")[1].splitlines() if not line.startswith("gpubench: ")]
    assert len(judged) == 2


@pytest.mark.parametrize("time", ["-5.00", "0.00", "nan", "inf"])
def test_a_row_with_an_impossible_time_is_named_with_its_line(time: str, tmp_path: Path) -> None:
    text = with_time(time)(TABLE)
    number = next(place for place, line in enumerate(text.splitlines(), 1) if f" {time}  235.98" in line)
    said = report(written(tmp_path, text))[1]
    assert f"1 row left out: line {number} (1073741824 bytes): '{time}' is not a valid value" in " ".join(said.split())


@pytest.mark.parametrize("rows", [[], ROWS[:3], ROWS])
def test_a_run_that_failed_is_1_whatever_rows_it_has(rows: list[str], tmp_path: Path) -> None:
    head = without(*ROWS)(TABLE.partition("# Out of")[0])
    failure = "vm: Test NCCL failure all_reduce.cu:274 'remote process exited or there was a network error / '"
    text = "\n".join((head, *rows, failure, " .. vm pid 12: Test failure common.cu:484", ""))
    code, said = report(written(tmp_path, text))
    assert (code, "seen:     Test NCCL failure all_reduce.cu:274" in said) == (1, True), said
    assert any(line.startswith("FAIL: ") for line in said.splitlines())


def test_part_of_the_named_machine_is_a_doubt(tmp_path: Path) -> None:
    path = written(tmp_path, TABLE)
    code, said = report(path, "--machine", "hgx-h200-8", "--summary")
    assert (code, "WARN: hgx-h200-8 on vm: 4 of the 8 GPUs" in said) == (0, True), said
    assert report(path, "--machine", "hgx-h200-8", "--strict", "--summary")[0] == 1
    assert "PASS: 4 × H200" in report(path, "--machine", "hgx-h200-8/4", "--summary")[1]


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "alltoall"])
def test_devices_that_do_not_fit_are_refused_for_every_collective_that_tells(name: str, tmp_path: Path) -> None:
    text = (REAL / f"{name}.txt").read_text()
    devices = [line for line in text.splitlines() if line.startswith("#  Rank")]
    assert report(written(tmp_path, text))[0] == 0
    code, said = report(written(tmp_path, without(*devices[3:])(text).replace("nGpus 4", "nGpus 1")))
    assert (code, "3 ranks, but its rows are those of 4" in said) == (2, True), said


ELIDED = (
    "# Collective test starting: all_reduce_perf\n# Using devices\n"
    "#  Rank  0 Group  0 Pid     11 on   node-a device  0 [0000:1b:00] NVIDIA B200\n"
    "#  Rank  1 Group  0 Pid     12 on   node-a device  1 [0000:43:00] NVIDIA B200\n"
    "{gap}"
    "{last}"
    "#       size        count   type  redop  root    time   algbw   busbw #wrong    time   algbw   busbw #wrong\n"
    "  8589934592   2147483648  float    sum    -1   24000  357.91  671.09      0   24000  357.91  671.09      0\n"
    "# Out of bounds values : 0 OK\n"
)
RANK_15 = "#  Rank 15 Group  0 Pid     18 on   node-b device  7 [0000:df:00] NVIDIA B200\n"


@pytest.mark.parametrize("gap", ["...\n", "#  ...\n", "…\n", "[ 12 more ]\n", ""])
def test_ranks_and_nodes_follow_from_the_devices_that_were_left(gap: str, tmp_path: Path) -> None:
    code, said = report(written(tmp_path, ELIDED.format(gap=gap, last=RANK_15)), "--summary")
    assert (code, "16 × NVIDIA B200" in said or "16 × B200" in said) == (0, True), said


@pytest.mark.parametrize(
    ("gap", "last"),
    [
        ("...\n", ""),
        ("", ""),
        ("...\n", RANK_15.replace("device  7", "device  0")),
        ("...\n", RANK_15.replace("15", "14")),
    ],
)
def test_devices_that_leave_a_doubt_are_asked_for_by_their_name(gap: str, last: str, tmp_path: Path) -> None:
    code, said = report(written(tmp_path, ELIDED.format(gap=gap, last=last)))
    assert code == 2, said
    assert "--machine 'hgx-b200-8*2'" in said or "its rows are those of 16" in said, said
    assert "h100" not in said


def test_a_collective_that_nothing_names_is_asked_for_alone(tmp_path: Path) -> None:
    devices = "".join(
        f"#  Rank {rank} Group 0 Pid 7 on box device {rank} [0000:b{rank}:00] NVIDIA L40S\n" for rank in (0, 1)
    )
    row = "1073741824 268435456 float sum -1 51130 21.00 21.00 0 51130 21.00 21.00 0\n"
    code, said = report(written(tmp_path, f"{devices}{row}"))
    assert (code, "does not contain the collective (allreduce or sendrecv)" in said) == (2, True), said
    assert "GPUs" not in said
    assert "--machine" not in said


def test_a_table_of_markdown_is_read(tmp_path: Path) -> None:
    rows = "| 1,048,576 | 18 | 58.25 | 87.38 |\n| 4,294,967,296 | 17,758 | 241.86 | **362.79** |\n"
    head = "| size (B) | time (us) | algbw (GB/s) | busbw (GB/s) |\n|---:|---:|---:|---:|\n"
    asked = "--machine", "hgx-h200-4", "--collective", "allreduce", "--summary"
    code, said = report(written(tmp_path, head + rows), *asked)
    assert (code, "4 × H200, all-reduce 363 GB/s (100 % of expected)" in said) == (0, True), said


def two_nodes(time: Callable[[int], float], model: str = "NVIDIA GH200 120GB") -> str:
    """An all-reduce of two nodes of four GPUs, whose sizes take these µs."""
    devices = "".join(
        f"#  Rank {rank} Group 0 Pid 7 on host{rank // 4} device {rank % 4} [0000:0{rank}:00] {model}\n"
        for rank in range(8)
    )
    rows = ""
    for size in (2**power for power in range(8, 31)):
        figures = f"{time(size):.2f} {size / time(size) / 1e3:.2f} {size * 1.75 / time(size) / 1e3:.2f} 0"
        rows += f"{size} {size // 4} float sum -1 {figures} {figures}\n"
    return f"# Collective test starting: all_reduce_perf\n# Using devices\n{devices}{rows}{LAST}\n"


TWO_NODES: list[tuple[str, str, str]] = [
    ("healthy", two_nodes(lambda size: 50 + size / 80e3), "PASS: 8 × GH200"),
    ("slow", two_nodes(lambda size: 50 + size / 3e3), "WARN: all-reduce reaches 5.2 of "),
    (
        "slow, and one small row alone",
        two_nodes(lambda size: 50 + size / 3e3).replace("1024 256 float sum -1 50.34", "1024 256 float sum -1 850.34"),
        "WARN: all-reduce reaches 5.2 of ",
    ),
    (
        "one small row alone",
        two_nodes(lambda size: 50 + size / 80e3).replace("1024 256 float sum -1 50.01", "1024 256 float sum -1 850.01"),
        "INCONCLUSIVE: all-reduce of 1K",
    ),
    (
        "faster than the NICs that a profile assumes",
        two_nodes(lambda size: 50 + size / 5.4e3, "NVIDIA A100-SXM4-40GB"),
        "times what profile hgx-a100-4-40gb expects of assumed NICs (set others with --nics)",
    ),
]


@pytest.mark.parametrize(("text", "said"), [each[1:] for each in TWO_NODES], ids=[each[0] for each in TWO_NODES])
def test_the_gravest_rows_of_two_nodes_decide_the_sentence(text: str, said: str, tmp_path: Path) -> None:
    found = report(written(tmp_path, text), "--summary")
    assert (found[0], said in found[1]) == (0, True), found[1]


@pytest.mark.parametrize("machine", ["gb200-nvl72*360", "hgx-h200-4*9", "hgx-h200-8*2"])
def test_a_machine_of_more_nodes_than_the_table_has_ranks_is_refused(machine: str, tmp_path: Path) -> None:
    """The list of devices of this excerpt begins with the last one, so that only --machine tells the nodes."""
    text = without(*DEVICES[:-1])(TABLE).replace("Rank  3", "Rank  7").replace("NVIDIA H200", "NVIDIA GB200")
    text = text if machine.startswith("gb") else text.replace("NVIDIA GB200", "NVIDIA H200")
    code, said = report(written(tmp_path, text), "--machine", machine)
    assert (code, "Traceback" in said, "expected:" in said) == (2, False, True), said


def test_runs_at_once_whose_lines_are_mixed_have_no_run_without_a_row(tmp_path: Path) -> None:
    settings = "# nThread 1 nGpus 4 minBytes 1 maxBytes 9 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 "
    head, others = f"{settings}validation: 1 graph: 0\n", "\n".join(DEVICES).replace(" vm ", " vm2 ")
    devices = "\n".join(DEVICES)
    rows = "\n".join(row for row in ROWS for _ in range(2))
    text = f"{head}{head}{devices}\n{others}\n{rows}\n{LAST}\n{LAST}\n"
    said = report(written(tmp_path, text), "--collective", "allreduce")[1]
    assert "without a row" not in said, said
    assert "1 run without a row" in report(written(tmp_path, text.removesuffix(f"{LAST}\n")))[1]


MATRIX = """Running device_to_device_memcpy_read_ce.
memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)
           0         1         2         3
 0       N/A    393.73    393.93    393.74
 1    393.74       N/A    393.74    393.74
 2    393.74    393.93       N/A    393.74
 3    393.91    393.74    393.87       N/A

SUM device_to_device_memcpy_read_ce 4725.57
COEFFICIENT_OF_VARIATION device_to_device_memcpy_read_ce 0.00
"""
HEAD_0_10 = (
    "nvbandwidth Version: v0.10.0\nBuilt from Git version: v0.10\n\nCUDA Runtime Version: 13.3 (13030)\n"
    "CUDA Driver Version (API): 13.3 (13030)\nDriver Version: 610.57.04\n\n"
)
LAST_ROW = " 3    393.91    393.74    393.87       N/A\n"
AS_JSON = """{
  "nvbandwidth": {
    "testcases": [
      {
        "name": "device_to_device_memcpy_read_ce",
        "bandwidth_description": "memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)",
        "bandwidth_matrix": [["N/A", "393.7"], ["393.8", "N/A"]]
      }
    ],
    "version": "v0.8"
  }
}
"""
TO_HOST = """Running host_to_device_memcpy_ce.
memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)
           0         1         2         3
 0     55.36     55.33     55.41     55.39

Running device_to_host_memcpy_ce.
memcpy CE CPU(row) <- GPU(column) bandwidth (GB/s)
           0         1         2         3
 0     55.15     55.11     55.10     55.12
"""
COPIES: list[tuple[str, str, str, int, str]] = [
    (
        "another model",
        f"Device 0: NVIDIA H100 80GB HBM3\n\n{MATRIX}",
        "hgx-h200-4",
        2,
        "names NVIDIA H100 80GB HBM3, but",
    ),
    ("two nodes", MATRIX, "hgx-h200-4*2", 2, "has 4 GPUs on 1 node, but --machine hgx-h200-4*2 has 2 nodes"),
    ("whole", MATRIX, "hgx-h200-4", 0, "PASS"),
    ("0.10", HEAD_0_10 + MATRIX, "hgx-h200-4", 0, "PASS"),
    ("0.10 with TMA", HEAD_0_10 + MATRIX + MATRIX.replace("_ce", "_tma").replace("CE", "TMA"), "hgx-h200-4", 0, "PASS"),
    ("prompts", f"root@box:~# ./nvbandwidth -t 4\n{HEAD_0_10}{MATRIX}root@box:~# \n", "hgx-h200-4", 0, "PASS"),
    ("prose", f"Is this normal?\n\n```\n{MATRIX}```\nThanks!\n", "hgx-h200-4", 0, "PASS"),
    ("without the line above", MATRIX.partition("\n")[2], "hgx-h200-4", 0, "PASS"),
    ("JSON", AS_JSON, "hgx-h200-4/2", 0, "PASS"),
    ("JSON behind a prompt", f"$ ./nvbandwidth -j\n{AS_JSON}$ exit\n", "hgx-h200-4/2", 0, "PASS"),
    ("JSON with a row cut", AS_JSON.replace(', ["393.8", "N/A"]', ""), "hgx-h200-4/2", 3, "ERROR"),
    ("4 of 8", MATRIX, "hgx-h200-8", 0, "WARN: hgx-h200-8: 4 of the 8 GPUs"),
    ("4 of 8, strict", MATRIX, "hgx-h200-8 --strict", 1, "WARN: hgx-h200-8: 4 of the 8 GPUs"),
    ("last row cut", MATRIX.replace(LAST_ROW, ""), "hgx-h200-4", 3, "ERROR"),
    ("middle row cut", MATRIX.replace(" 1    393.74       N/A    393.74    393.74\n", ""), "hgx-h200-4", 3, "ERROR"),
    ("everything below the second row cut", MATRIX.partition("\n 2 ")[0], "hgx-h200-4", 3, "ERROR"),
    ("a row cut in its middle", MATRIX.replace("    393.87       N/A", ""), "hgx-h200-4", 3, "ERROR"),
    ("a pair without a value", MATRIX.replace("393.91", "   N/A"), "hgx-h200-4", 3, "ERROR"),
    ("a negative value", MATRIX.replace("393.91", "-93.91"), "hgx-h200-4", 3, "ERROR"),
    ("an infinite value", MATRIX.replace("393.91", "   inf"), "hgx-h200-4", 3, "ERROR"),
    ("zero", MATRIX.replace("393.91", "  0.00"), "hgx-h200-4", 3, "ERROR"),
    ("an edited value", MATRIX.replace("393.87", "393.00").replace("4725.57", "9725.57"), "hgx-h200-4", 0, "WARN"),
    ("a test that printed nothing", f"{MATRIX}\nRunning device_to_device_memcpy_write_ce.\n", "hgx-h200-4", 0, "WARN"),
    ("host memory", TO_HOST, "hgx-h200-4", 0, "PASS"),
    ("host memory, a value missing", TO_HOST.replace("55.12", "  N/A"), "hgx-h200-4", 0, "WARN: GPU3"),
    ("host memory, a second row", TO_HOST.replace("55.39\n", "55.39\n 1 9 9 9 9\n"), "hgx-h200-4", 0, "WARN"),
    ("the same test twice", MATRIX + MATRIX, "hgx-h200-4", 2, "has 2 runs of device_to_device_memcpy_read_ce: line 1"),
]


def test_matrices_of_fewer_gpus_than_the_file_lists_are_a_doubt(tmp_path: Path) -> None:
    listed = "".join(f"Device {number}: NVIDIA H200 (00000000:00:0{number + 1})\n" for number in range(5))
    code, said = report(written(tmp_path, f"vm\n{listed}\n{MATRIX}"), "--summary")
    assert (code, "WARN: " in said, "4 of the 5 GPUs" in said) == (0, True, True), said


@pytest.mark.parametrize(("address", "named"), [(" (00000000:5{0}:00.0)", "GPU2 (0000:52:00.0)"), ("", "GPU2")])
def test_a_finding_names_gpus_by_the_addresses_of_the_file_or_by_none(address: str, named: str, tmp_path: Path) -> None:
    listed = "".join(f"Device {number}: NVIDIA H200{address.format(number)}\n" for number in range(4))
    slow = MATRIX.replace(" 2    393.74    393.93       N/A    393.74", " 2    150.00    150.00       N/A    150.00")
    text, output = f"vm\n{listed}\n{slow}".replace("4725.57", "3994.16"), tmp_path / "judged.json"
    code, said = report(written(tmp_path, text), "--output", str(output))
    assert (code, f"p2p-slow: {named}" in said) == (1, True), said
    expected = {f"0000:5{number}:00.0" for number in range(4)} if address else set()
    assert set(re.findall(r"[0-9a-f]{4}:[0-9a-f]{2}:00\.0", said + output.read_text())) == expected


@pytest.mark.parametrize(
    ("trials", "loop"),
    [("20 trials", "20 operations, one at a time;"), ("20 trials, up to 10 queued calls per trial", "20 iterations;")],
)
def test_bandwidths_without_percentiles_are_shown_with_what_is_expected(trials: str, loop: str, tmp_path: Path) -> None:
    title = f"The average bandwidth of all_reduce over 8 ranks (5 warmups / {trials}):\n\n"
    row = "|   16GiB | 475.45GBps | 271.68GBps |\n"
    code, said = report(
        written(tmp_path, f"{title}| payload | busbw | algbw |\n{row}"), "--machine", "hgx-h100-8", "--format", "table"
    )
    assert (code, loop in said, "271.68 475.45" in said) == (0, True, True), said
    assert ("% exp" in said, "p95" in said) == (True, False), said


@pytest.mark.parametrize("models", ["X", "XY"])
def test_copies_of_gpus_that_no_profile_knows_are_shown_and_not_judged(models: str, tmp_path: Path) -> None:
    listed = "".join(f"Device {number}: NVIDIA {models[number % len(models)]}900\n" for number in range(4))
    for text in (TO_HOST, MATRIX.replace("393.93", "33.93").replace("4725.57", "4005.57")):
        code, said = report(written(tmp_path, f"{listed}\n{text}"))
        assert (code, "speed not judged" in said, "SKIP: " in said) == (0, True, True), said
        assert report(written(tmp_path, f"{listed}\n{text}"), "--strict")[0] == 3


def test_matrices_of_a_different_number_of_gpus_are_shown_whole(tmp_path: Path) -> None:
    text = TO_HOST.replace("     55.10     55.12", "").replace("1         2         3\n 0     55.15", "1\n 0 55.15")
    code, said = report(written(tmp_path, f"Device 0: NVIDIA H200\n\n{text}"))
    assert (code, "Traceback" in said, "WARN: " in said) == (0, False, True), said


@pytest.mark.parametrize(("text", "machine", "code", "said"), [e[1:] for e in COPIES], ids=[e[0] for e in COPIES])
def test_matrices_as_people_paste_them(text: str, machine: str, code: int, said: str, tmp_path: Path) -> None:
    found = report(written(tmp_path, text), "--summary", "--machine", *machine.split())
    assert (found[0], said in found[1]) == (code, True), found[1]
