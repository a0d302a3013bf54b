"""Tables of other programs, judged by `gpubench report`: published ones, pasted ones, and what is no table at all.

The published figures are those of tests/published/collectives.csv, which has their sources; the lines around them are
made here, as nccl-tests prints them.
"""

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published_collectives import FIGURES, Published, read
from gpubench.collectives.registry import collective_named
from gpubench.model.results.speed import LARGE_BYTES
from gpubench.model.terms.verdict import Verdict, parse_doubt
from gpubench.profiles import load, profile_names
from gpubench.readers.results.nccl_tests.table import COLLECTIVE_NAMES
from tests.cli.running import ROOT, gpubench
from tests.fakes.nccl_tests import Half, Output, Result

PROGRAMS = {own: theirs for theirs, own in COLLECTIVE_NAMES.items()}
REAL = ROOT / "tests" / "results" / "h200x4"

Line = dict[str, str]

SMALL = Half(time_us=20.0, algbw=0.05, busbw=0.09)


def tables() -> dict[str, list[Line]]:
    """The figures of each source on a machine that a profile knows."""
    found: dict[str, list[Line]] = {}
    known = profile_names()
    with FIGURES.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if line["profile"] in known:
                name = f"{line['source']}, {line['state']}, {line['collective']} {line['algorithm']}"
                found.setdefault(name, []).append(line)
    return found


TABLES = tables()


def output_of(lines: Sequence[Line], slower: float = 1.0) -> Output:
    """What nccl-tests would have printed of these figures."""
    first = lines[0]
    collective, per_node = collective_named(first["collective"]), int(first["ranks_per_node"])
    hosts = tuple(f"host{number}" for number in range(int(first["nodes"])))
    factor = collective.busbw_factor(per_node * len(hosts))
    results = []
    for line in lines:
        size, busbw = int(line["size_bytes"]), float(line["busbw_gb_s"]) / slower
        half = Half(time_us=size * factor / busbw / 1e3, algbw=busbw / factor, busbw=busbw)
        in_blocks = collective.name in ("allgather", "alltoall", "gather", "reducescatter", "scatter")
        blocks = per_node * len(hosts) if in_blocks else 1
        op, root = ("sum" if collective.reduces else "none"), (0 if collective.rooted else -1)
        results.append(Result(size=size, count=size // 4 // blocks, op=op, root=root, halves=(half, half)))
    return Output(
        program=PROGRAMS[collective.name],
        hosts=hosts,
        gpus=per_node,
        results=tuple(results),
        model=load(first["profile"]).match.gpus[0],
    )


def report(path: Path, *arguments: str) -> tuple[int, str]:
    """The exit code, and what stands on stdout and stderr."""
    result = gpubench("report", str(path), *arguments)
    assert "Traceback" not in result.stderr
    return result.returncode, result.stdout + result.stderr


def document(path: Path, *arguments: str) -> dict[str, object]:
    """The report as json, with any verdict."""
    found: dict[str, object] = json.loads(gpubench("report", str(path), "--format", "json", *arguments).stdout)
    return found


def written(folder: Path, text: str, name: str = "table.txt") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def nics_of(line: dict[str, str]) -> tuple[str, ...]:
    """The option that names the NICs of a table, if its source names them."""
    return () if line["nics_gbit_s"] == "0x0" or "?" in line["nics_gbit_s"] else ("--nics", line["nics_gbit_s"])


@pytest.mark.parametrize("source", TABLES)
def test_published_tables(source: str, tmp_path: Path) -> None:
    """No healthy machine fails, and none at half its speed passes; what the source calls ill does not pass either.

    Of many domains that NICs join only far more than half the speed is told apart (docs/explanation/limits.md), and
    of small sizes as well. Boxes of PCIe cards are healthy at 22 and at 46 GB/s, by what joins the cards.
    """
    lines = TABLES[source]
    with_nics = nics_of(lines[0])
    if lines[0]["nodes"] == "1":
        with_nics = ("--machine", f"{lines[0]['profile']}/{lines[0]['ranks_per_node']}")
    if lines[0]["profile"] == "gb300-nvl-4":
        with_nics = (*with_nics, "--machine", f"gb300-nvl-4*{lines[0]['nodes']}")
    algorithm = f"NCCL_ALGO={lines[0]['algorithm']} ./all_reduce_perf\n" if lines[0]["algorithm"] else ""
    own = document(written(tmp_path, algorithm + output_of(lines).text()), *with_nics)
    state, domains = lines[0]["state"], lines[0]["profile"].endswith("nvl72") and int(lines[0]["nodes"]) > 36
    assert (own["verdict"] != Verdict.FAIL) or state != "healthy"
    assert (own["verdict"] != Verdict.PASS) or state != "ill"
    if state == "healthy" and lines[0]["nodes"] == "1":
        assert own["verdict"] in (Verdict.PASS, Verdict.SKIP)
    is_small = all(int(line["size_bytes"]) < LARGE_BYTES for line in lines)
    if state == "healthy" and not domains and not is_small and "rtx" not in lines[0]["profile"]:
        half = document(written(tmp_path, algorithm + output_of(lines, slower=2.0).text()), *with_nics)
        assert half["verdict"] != Verdict.PASS
    assert len(str(own["sentence"])) < 200


WHOLE = [
    each
    for each in read()
    if each.row.algorithm is None
    and (each.row.nodes % 18 == 0 or "nvl72" not in each.expected.source)
    and each.row.nodes < 100
    and each.verdict() is not Verdict.SKIP
]
"""Figures of machines that --machine can name: of racks whole ones, and of nodes few enough to be judged quickly."""


@pytest.mark.parametrize("figure", WHOLE[::9], ids=lambda each: each.source)
def test_the_expectation_is_that_of_a_row_that_was_measured_here(figure: Published, tmp_path: Path) -> None:
    line = next(
        line
        for line in (line for table in TABLES.values() for line in table)
        if line["source"] == figure.source and int(line["size_bytes"]) == figure.row.size_bytes
    )
    machine = f"{line['profile']}*{int(line['nodes']) // (18 if line['profile'].endswith('nvl72') else 1)}"
    if line["nodes"] == "1":
        machine = f"{line['profile']}/{line['ranks_per_node']}"
    found = document(written(tmp_path, output_of([line]).text()), "--machine", machine, *nics_of(line))
    rows: list[dict[str, Any]] = found["rows"]  # type: ignore[assignment]
    if parse_doubt(rows[0]["note"]):
        assert rows[0]["verdict"] is None or rows[0]["verdict"] == "PASS", "data alone may pass"
        return
    assert rows[0]["expected_gb_s"] == pytest.approx(figure.predicted_gb_s, rel=0.02)
    assert rows[0]["limit_gb_s"] == pytest.approx(figure.limit_gb_s, rel=0.01)


def test_a_recorded_table_is_shown_as_ours() -> None:
    code, text = report(REAL / "all_reduce.txt")
    assert code == 0
    assert "measured by another program, read from" in text
    assert "at 4G, float32, out of place, 100% of expected" in text
    assert "PASS: 4 × H200, all-reduce 363 GB/s (100 % of expected), data right, paths unknown" in text


def test_a_recorded_table_of_a_fallback_fails() -> None:
    code, text = report(REAL / "ar_NCCL_P2P_DISABLE_1.txt", "--summary")
    assert (code, "FAIL: all-reduce reaches 27 of 340 GB/s (8 %) on vm" in text) == (1, True)


B200 = (
    "       size        count    type   redop   root     time   algbw   busbw #wrong     time   algbw   busbw #wrong",
    "        (B)   (elements)                            (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)",
    "  536870912    134217728   float     sum     -1   1500.0  357.91  671.09      0   1500.0  357.91  671.09      0",
    " 8589934592   2147483648   float     sum     -1  24000.0  357.91  671.09      0  24000.0  357.91  671.09      0",
)
"""Rows of two nodes, at a rate that eight NICs of 400 Gbit/s let two trees reach: 0.9 of 750 GB/s."""


def _piped(lines: Sequence[str]) -> str:
    return "\n".join(f"| {' | '.join(line.split())} |" for line in lines)


@pytest.mark.parametrize(
    "pasted",
    [
        lambda lines: "\n".join(lines),
        lambda lines: "\n".join(f"#{line}" if "size" in line or "(B)" in line else line for line in lines),
        lambda lines: "$ srun ./build/all_reduce_perf -b 512M -e 8G -f 2\n" + "\n".join(lines) + "\nuser@node1:~$ ",
        lambda lines: "```\n" + "\n".join(lines) + "\n```",
        lambda lines: "Hello,\n\nis this normal?\n\n" + "\n".join(f"> {line}" for line in lines),
        lambda lines: "\n".join(f"> > {line}" for line in lines),
        lambda lines: "\r\n".join(lines),
        lambda lines: "\n".join(line.replace("  ", "\u00a0 ") for line in lines),
        lambda lines: "\n".join(line.expandtabs().replace("   ", "\t") for line in lines),
        lambda lines: "\n".join(f"[1,0]<stdout>:{line}" for line in lines),
        lambda lines: "\n".join(f"node1: {line}" for line in lines),
        _piped,
        lambda lines: "\n".join(lines[2:]),
        lambda lines: "#  Rank 15 Group  0 Pid 9 on node2 device  7 [0x0c] NVIDIA B200\n" + "\n".join(lines),
    ],
)
def test_a_pasted_table_is_answered_in_one_line(pasted: Callable[[Sequence[str]], str], tmp_path: Path) -> None:
    path = written(tmp_path, pasted(B200))
    code, text = report(path, "--machine", "hgx-b200-8*2", "--summary")
    assert (code, text.splitlines()[0]) == (
        0,
        "PASS: 16 × B200, all-reduce 671 GB/s (118 % of expected), data right, paths unknown",
    )


def test_a_table_of_which_all_that_names_its_machine_was_cut_is_asked_for_once(tmp_path: Path) -> None:
    path = written(tmp_path, "\n".join(B200))
    code, text = report(path)
    assert (code, text.count("error:")) == (2, 1)
    assert "does not contain the GPUs and the number of nodes. Its rows are those of 16 ranks" in text
    assert "--machine 'hgx-h100-8*2'\n" in text


def test_all_that_is_missing_is_asked_for_in_one_message(tmp_path: Path) -> None:
    path = written(tmp_path, "1048576  32768  float  none  -1  60.00  17.48  15.29  0  59.00  17.77  15.55  0")
    code, text = report(path)
    assert (code, text.count("error:")) == (2, 1)
    assert "the GPUs and the number of nodes or the collective (allgather or alltoall" in text
    assert "--machine hgx-h100-8 --collective allgather" in text
    code, text = report(path, "--machine", "hgx-h100-8", "--collective", "all_gather", "--summary")
    assert (code, "all-gather" in text) == (0, True)


def test_nics_that_nobody_told_make_no_failure(tmp_path: Path) -> None:
    """An A100 node has 4 × 100 Gbit/s in one cloud and 8 × 200 in another: the same figures are ill, and healthy.

    --machine names GPUs and nodes. The NICs of its profile stay assumed.
    """
    lines = TABLES["NVIDIA/nccl#527: 4 × p4d, questioned, allreduce "]
    path = written(tmp_path, output_of(lines).text())
    assumed, told, own = (
        document(path, *each) for each in ((), ("--machine", "hgx-a100-8-40gb*4"), ("--nics", "4x100"))
    )
    assert [each["verdict"] for each in (assumed, told, own)] == ["WARN", "WARN", "WARN"]
    assert all("NICs assumed (set others with --nics)" in json.dumps(each) for each in (assumed, told))
    assert "assumed (set others" not in json.dumps(own)


def test_a_machine_that_the_file_contradicts_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, Output(hosts=("a", "b"), results=(Result(halves=(SMALL, SMALL)),)).text())
    for machine, said in (("hgx-h100-4*2", "names NVIDIA H200"), ("hgx-h200-4", "8 ranks on 2 nodes")):
        code, text = report(path, "--machine", machine)
        assert (code, said in text) == (2, True), text


@pytest.mark.parametrize("machine", ["hgx-b200-8", "hgx-b200-8*4", "hgx-b200-8/4*2"])
def test_a_machine_of_another_number_of_ranks_than_figures_tell_is_refused(machine: str, tmp_path: Path) -> None:
    path = written(tmp_path, "\n".join(B200))
    code, text = report(path, "--machine", machine)
    assert (code, "is that of 16 ranks, but --machine has" in text) == (2, True), text


def test_tables_of_several_collectives_are_shown_one_by_one(tmp_path: Path) -> None:
    names = ("all_reduce", "reduce_scatter")
    path = written(tmp_path, "".join((REAL / f"{name}.txt").read_text() for name in names))
    code, text = report(path)
    assert (code, text.count("PASS: 4 × H200, ")) == (0, 2)
    code, text = report(path, "--json")
    assert (code, "has allreduce on 4 ranks (line 1) and reducescatter on 4 ranks (line " in text) == (2, True)
    assert "--collective allreduce" in text
    one = report(path, "--collective", "reducescatter")[1]
    assert ("reduce-scatter 346 GB/s" in one, "all-reduce" in one) == (True, False)
    assert "and none of alltoall" in report(path, "--collective", "alltoall")[1]


def _row(**changes: str) -> str:
    words = B200[2].split()
    places = {"size": 0, "time": 5, "algbw": 6, "busbw": 7, "wrong": 8}
    for name, value in changes.items():
        words[places[name]] = value
    return "  ".join(words)


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", 2, "is empty"),
        ("hello\n", 2, "is not the start of a file"),
        (_row(time="1.5"), 2, "a column has another unit"),
        (_row(algbw="2863.3", busbw="5368.7"), 2, "a column has another unit"),
        (_row()[:60], 2, "no complete row"),
        (_row(size="9" * 18), 2, "a column has another unit"),
        (_row(time="nan"), 2, "damaged"),
        (_row(time="inf"), 2, "damaged"),
        (_row(time="-5"), 2, "damaged"),
        (_row(wrong="7"), 1, "FAIL"),
        (Output().text(), 2, "a column has another unit"),
    ],
)
def test_bad_input(text: str, code: int, said: str, tmp_path: Path) -> None:
    found = report(written(tmp_path, text), *(("--machine", "hgx-b200-8*2") if "Rank" not in text else ()))
    assert (found[0], said in found[1]) == (code, True), found[1]
    assert "Traceback" not in found[1]


def test_an_unknown_gpu_is_shown_and_not_judged(tmp_path: Path) -> None:
    half = Half(time_us=1e3, algbw=1.048576, busbw=1.572864)
    path = written(tmp_path, Output(model="Imaginary X1", results=(Result(size=2**20, halves=(half, half)),)).text())
    code, text = report(path, "--summary")
    assert (code, "4 × Imaginary X1" in text, "speed not judged: no profile" in text) == (0, True, True)
    assert report(path, "--strict")[0] == 3


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.txt"
    with path.open("wb") as file:
        file.truncate(200 * 2**20)
    code, text = report(path)
    assert (code, "gpubench reads at most 128 MiB" in text) == (2, True)


def test_every_format_shows_it_and_what_is_kept_is_shown_again(tmp_path: Path) -> None:
    suffixes = ("html", "json", "jsonl", "csv", "md", "txt", "prom", "xml")
    report(REAL / "all_reduce.txt", *(word for each in suffixes for word in ("-o", str(tmp_path / f"a.{each}"))))
    assert all((tmp_path / f"a.{each}").stat().st_size > 300 for each in suffixes)
    assert "<svg" in (tmp_path / "a.html").read_text()
    own = report(REAL / "all_reduce.txt", "--summary")[1]
    assert report(tmp_path / "a.json", "--summary")[1] == own
    again = report(tmp_path / "a.csv", "--machine", "hgx-h200-4", "--summary")[1]
    assert again.splitlines()[0] == own.splitlines()[0]
    code, text = report(tmp_path / "a.json", "--machine", "hgx-h200-4")
    assert (code, "--machine" in text) == (2, True)


def test_osu_of_nccl_is_judged_once_a_person_tells_the_machine(tmp_path: Path) -> None:
    text = "# OSU NCCL-CUDA Allreduce Latency Test v7.3\n# Size       Avg Latency(us)\n{}"
    path = written(tmp_path, text.format("1073741824             4550.00\n"))
    code, said = report(path)
    assert (code, "does not contain the GPUs and the number of nodes" in said) == (2, True)
    code, said = report(path, "--machine", "hgx-h200-4", "--summary")
    assert (code, "PASS: 4 × H200, all-reduce 354 GB/s (100 % of expected)" in said) == (0, True)


@pytest.mark.parametrize("nics", ["", "8", "0x400", "8x0", "8 by 400", "x"])
def test_nics_that_are_none_are_refused(nics: str) -> None:
    code, text = report(REAL / "all_reduce.txt", "--nics", nics)
    assert (code, "needs the number of NICs and their rate" in text) == (2, True)


def test_matrices_of_nvbandwidth_are_shown_as_p2p(tmp_path: Path) -> None:
    code, text = report(REAL / "nvbandwidth.txt")
    assert code == 0
    assert "512M, copy engine, read by the destination, peer access on" in text
    assert text.count("% exp: 100; expected: profile hgx-h200-4") == 5
    assert "PASS: 4 × H200, p2p 396 GB/s (100 % of expected), data not verified, all paths direct" in text
    found = document(written(tmp_path, (REAL / "nvbandwidth.txt").read_text()))
    rows: list[dict[str, object]] = found["pairs"]  # type: ignore[assignment]
    assert rows[0]["destination_bus_id"] == "0000:00:06.0"
    assert {row["limit_gb_s"] for row in rows if row["direction"] == "read" and row["peer"]} == {450.0}
    assert "tree" not in found


def test_a_slow_gpu_and_a_fallback_in_matrices_are_named(tmp_path: Path) -> None:
    plain = (REAL / "nvbandwidth.txt").read_text()
    slow = plain.replace(" 2    393.74    393.93       N/A    393.74", " 2    150.00    150.00       N/A    150.00")
    code, text = report(written(tmp_path, slow), "--strict")
    assert (code, "FAIL: vm GPU2: p2p reaches 150 of 394 GB/s (38 %)." in text) == (1, True), text
    assert "GPU2" in text.partition("FAIL ")[2].partition("\n")[0], text
    lines = [
        "".join(
            f"{'N/A' if word == 'N/A' else 38.0:>10}" if number else f" {word}" for number, word in enumerate(words)
        )
        if (words := line.split()) and words[0].isdigit() and len(words) == 5
        else line
        for line in plain.splitlines()
    ]
    staged = report(written(tmp_path, "\n".join(lines)), "--strict", "--summary")
    assert (staged[0], "FAIL" in staged[1]) == (1, True), staged[1]


def test_wrong_data_in_rows_of_copies_fail_again(tmp_path: Path) -> None:
    path = tmp_path / "copies.csv"
    gpubench("p2p", "--simulate", "hgx-h100-4", "--fault", "link0-1:corrupts=yes", "-o", str(path))
    code, said = report(path, "--machine", "hgx-h100-4", "--summary")
    assert (code, "FAIL" in said, "wrong" in said) == (1, True, True), said


def test_matrices_without_gpus_are_asked_for(tmp_path: Path) -> None:
    document_ = {
        "nvbandwidth": {
            "testcases": [
                {
                    "name": "device_to_device_memcpy_write_ce",
                    "bandwidth_description": "memcpy CE GPU(row) <- GPU(column) bandwidth (GB/s)",
                    "bandwidth_matrix": [["N/A", "375"], ["376", "N/A"]],
                }
            ],
            "version": "v0.8",
        }
    }
    path = written(tmp_path, json.dumps(document_))
    code, text = report(path)
    assert (code, "does not contain the GPUs" in text) == (2, True)
    code, text = report(path, "--machine", "hgx-h100-8/2", "--summary")
    assert (code, "PASS: 2 × H100" in text) == (0, True), text
    assert "WARN: hgx-h100-8: 2 of the 8 GPUs" in report(path, "--machine", "hgx-h100-8", "--summary")[1]
    assert report(path, "--machine", "hgx-h100-8/1")[0] == 2


def test_explain_of_a_table_says_what_to_type(tmp_path: Path) -> None:
    for path in (REAL / "all_reduce.txt", REAL / "nvbandwidth.txt", written(tmp_path, "\n".join(B200))):
        result = gpubench("explain", str(path))
        assert result.returncode == 3
        assert f"gpubenchreport{path}" in "".join(result.stdout.split()), "a long path has lines of its own"
    log = written(tmp_path, "n1:1:1 [0] NCCL INFO Bootstrap : Using eth0\n" + "\n".join(B200))
    assert "gpubench report" not in gpubench("explain", str(log)).stdout


MARKDOWN = """We run all_reduce_perf on two nodes:

| Size | Time (us) | algbw (GB/s) | busbw (GB/s) |
|------|-----------|--------------|--------------|
| 512 MiB | 1500 | 357.9 | 671.1 |
| 8 GiB | 24000 | 357.9 | 671.1 |
"""


@pytest.mark.parametrize(
    "text",
    [
        MARKDOWN,
        MARKDOWN.replace("(us)", "(ms)").replace("1500", "1.5").replace("24000", "24"),
        MARKDOWN.replace("busbw (GB/s)", "busbw (Gb/s)").replace("671.1", "5368.8"),
        "all_reduce_perf\n# size(B) busbw(GB/s)\n8589934592 671.1\n",
        "all_reduce_perf\nMessage size, bus bandwidth\n512M, 671.09\n8G, 671.09\n",
        "all_reduce_perf\n   size  time  algbw  busbw  #wrong\n 512M  1500.0  357.91  671.09  0\n",
        "all_reduce_perf\n> size  out-of-place time\n> 8589934592  -  24000.0\n",
    ],
)
def test_columns_that_were_cut_follow_from_the_rest(text: str, tmp_path: Path) -> None:
    code, said = report(written(tmp_path, text), "--machine", "hgx-b200-8*2", "--summary")
    assert (code, "PASS: 16 × B200, all-reduce 671 GB/s" in said) == (0, True), said


@pytest.mark.parametrize(
    ("text", "machine", "said"),
    [
        (MARKDOWN, "hgx-b200-8*4", "is that of 16 ranks, but --machine has 32"),
        (MARKDOWN.replace("busbw (GB/s)", "busbw (lightyears)"), "hgx-b200-8*2", "is not the start of a file"),
        ("all_reduce_perf\nsize busbw\n8G 6710\n", "hgx-b200-8*2", "links of this machine carry at most 750"),
        ("size busbw\n8G 671\n", "hgx-b200-8*2", "the collective (allreduce or"),
        ("size busbw\n8G\n", "hgx-b200-8*2", "no measured values"),
    ],
)
def test_cut_tables_that_say_too_little_are_refused(text: str, machine: str, said: str, tmp_path: Path) -> None:
    code, found = report(written(tmp_path, text), "--machine", machine)
    assert (code, said in found) == (2, True), found


def with_lines_of_nccl(via: str, slower: float, host: str = "host") -> str:
    """A table of two nodes among whose lines NCCL names its connections."""
    busbw = 450.0 / slower
    half = Half(time_us=2**33 * 1.875 / busbw / 1e3, algbw=busbw / 1.875, busbw=busbw)
    result = Result(size=2**33, count=2**31, halves=(half, half))
    output = Output(hosts=(f"{host}0", f"{host}1"), gpus=8, results=(result,), model="NVIDIA H100 80GB HBM3")
    said = "".join(
        f"{host}0:10{rank}:20{rank} [{rank}] NCCL INFO Channel 0{rank}/0 : {rank}[{rank}] -> {8 + rank}[{rank}] [send] "
        f"via {via.format(rank)}\n"
        for rank in range(8)
    )
    head, mark, rows = output.text().partition("#\n#       size")
    return head + said + mark + rows


def test_a_path_that_changed_is_named_by_compare_and_report(tmp_path: Path) -> None:
    """By short names, beside which the last line has room for the reason."""
    written(tmp_path, with_lines_of_nccl("NET/IB/{}/GDRDMA", 1.0), "b.txt")
    written(tmp_path, with_lines_of_nccl("NET/IB/{}", 4.0), "a.txt")
    compared = gpubench("compare", "b.txt", "a.txt", "--summary", cwd=tmp_path)
    assert compared.returncode == 1
    assert "direct before, through host memory now: NET/IB, not NET/IB/GDRDMA" in compared.stdout
    assert "PASS: 16 × H100" in gpubench("report", "b.txt", "--summary", cwd=tmp_path).stdout
    slow = gpubench("report", "a.txt", "--strict", "--summary", cwd=tmp_path)
    assert (slow.returncode, "data go through host memory (NET/IB)" in slow.stdout) == (1, True), slow.stdout


def test_a_comparison_of_jobs_on_other_nodes_says_what_it_cannot_tell(tmp_path: Path) -> None:
    before = written(tmp_path, with_lines_of_nccl("NET/IB/{}/GDRDMA", 1.0), "before.txt")
    elsewhere = written(tmp_path, with_lines_of_nccl("NET/IB/{}/GDRDMA", 1.08, "other"), "after.txt")
    told = gpubench("compare", str(before), str(elsewhere), "--summary").stdout
    assert "are not detected" in told, told
    assert "are not detected" not in gpubench("compare", str(before), str(before), "--summary").stdout


def test_slow_nodes_of_a_rack_are_said_to_use_their_nics(tmp_path: Path) -> None:
    lines = TABLES["lixueduan.com GB200 MNNVL: 2 nodes over InfiniBand, ill, allreduce "]
    text = report(written(tmp_path, output_of(lines).text()), "--summary")[1]
    assert text.startswith("WARN: all-reduce reaches 85 of 861 GB/s (10 %) on host0-1, likely NICs instead of NVLinks")


def test_the_last_line_of_nccl_tests_names_the_collective(tmp_path: Path) -> None:
    """Of two ranks all-reduce and sendrecv have the same busbw."""
    rows = "1048576  262144  float  sum  -1  60.00  17.48  17.48  0  59.00  17.77  17.77  0\n"
    ranks = "".join(f"# Rank {rank} Group 0 Pid 1 on n{rank} device 0 [0x10] NVIDIA H200\n" for rank in range(2))
    path = written(tmp_path, ranks + rows + "# Collective test concluded: all_reduce_perf\n")
    assert document(path)["metadata"]["collective"] == "allreduce"  # type: ignore[index]


@pytest.mark.parametrize(("nodes", "blamed"), [(1, "copies in host memory"), (2, "NIC")])
def test_a_slow_table_of_one_node_is_not_blamed_on_nics(nodes: int, blamed: str, tmp_path: Path) -> None:
    """Ranks of one node use no NIC."""
    busbw = 100.0 / nodes
    ranks = 8 * nodes
    algbw = busbw / collective_named("allreduce").busbw_factor(ranks)
    half = Half(time_us=2**30 / algbw / 1e3, algbw=algbw, busbw=busbw)
    hosts = tuple(f"host{number}" for number in range(nodes))
    model = load("hgx-h100-8").match.gpus[0]
    result = Result(size=2**30, count=2**28, halves=(half, half))
    (tmp_path / "slow.txt").write_text(Output(hosts=hosts, gpus=8, results=(result,), model=model).text())
    found = document(tmp_path / "slow.txt")["findings"]
    assert isinstance(found, list)
    assert [(blamed in each["cause"], "NIC" in each["cause"]) for each in found] == [(True, nodes > 1)]


@pytest.mark.parametrize(
    ("busbw", "arguments", "verdict"),
    [
        (600.0, (), "PASS"),
        (360.0, (), "SKIP"),
        (100.0, (), "WARN"),
        (600.0, ("--nics", "8x400"), "PASS"),
        (360.0, ("--nics", "8x400"), "WARN"),
    ],
)
def test_a_table_that_a_ring_over_assumed_nics_explains_is_not_judged(
    busbw: float, arguments: tuple[str, ...], verdict: str, tmp_path: Path
) -> None:
    """Two nodes of eight B200, 680 GB/s by NVLSTree: half of what is expected is no PASS."""
    algbw = busbw / collective_named("allreduce").busbw_factor(16)
    half = Half(time_us=2**33 / algbw / 1e3, algbw=algbw, busbw=busbw)
    result = Result(size=2**33, count=2**31, halves=(half, half))
    model = load("hgx-b200-8").match.gpus[0]
    path = written(tmp_path, Output(hosts=("a", "b"), gpus=8, results=(result,), model=model).text())
    found = document(path, *arguments)
    assert found["verdict"] == verdict
    why = "speed not judged: 0.5 times what profile hgx-b200-8 expects of assumed NICs"
    assert (why in str(found["sentence"])) == (verdict == "SKIP")


@pytest.mark.parametrize(
    ("busbw", "strict", "ended"), [(15.0, False, (0, "PASS")), (25.0, False, (0, "SKIP")), (25.0, True, (3, "SKIP"))]
)
def test_a_table_far_above_what_is_expected_is_not_judged(
    busbw: float, strict: bool, ended: tuple[int, str], tmp_path: Path
) -> None:
    """Two RTX 4090s with a driver that allows peer access, of which the profile knows nothing."""
    gpus = [f"#  Rank {rank} Group 0 Pid 1 on h device {rank} [0x1{rank}] NVIDIA GeForce RTX 4090" for rank in (0, 1)]
    half = f"{2**29 / busbw / 1e3:.1f}  {busbw:.2f}  {busbw:.2f}  0"
    lines = [*gpus, f"536870912  134217728  float  sum  -1  {half}  {half}", "# Out of bounds values : 0 OK"]
    path = written(tmp_path, "\n".join(lines))
    code, text = report(path, "--collective", "allreduce", "--summary", *(["--strict"] if strict else []))
    assert (code, text.partition(":")[0]) == ended
    assert ("speed not judged: 1.6 times what profile rtx-4090-2 expects" in text) == (ended[1] == "SKIP")


def flat_alltoall(small_us: float, large_gb_s: float, processes: int) -> str:
    """All-to-all on 8 A100s: the same time up to 1 MiB, and a bandwidth at 1 GiB, of one process or of eight."""
    rows = []
    for size, time_us in (
        (2**10, small_us),
        (2**16, small_us),
        (2**20, small_us),
        (2**30, 2**30 * 0.875e-3 / large_gb_s),
    ):
        algbw = size / time_us / 1e3
        half = Half(time_us=time_us, algbw=algbw, busbw=algbw * 0.875)
        rows.append(Result(size=size, count=size // 32, op="none", halves=(half, half)))
    run = Output(program="alltoall", gpus=8, results=tuple(rows), model="NVIDIA A100-SXM4-40GB")
    if processes == 1:
        return run.text()
    # One thread per GPU launches on it alone.
    text = run.text().replace("nGpus 8", "nGpus 1")
    for number in range(8):
        text = text.replace(f"Rank {number:2d} Group  0 Pid   1000", f"Rank {number:2d} Group  0 Pid   {2000 + number}")
    return text


LAUNCHED = [  # µs up to 1 MiB, GB/s at 1 GiB, processes, words of the last line
    (88.0, 226.0, 1, "PASS: 8 × A100"),  # eight launches of 11 µs, one after another
    (88.0, 226.0, 8, "FAIL: "),
    (200.0, 226.0, 1, "FAIL: "),
    (88.0, 100.0, 1, "FAIL: "),
    (20.0, 226.0, 8, "PASS: 8 × A100"),
]


@pytest.mark.parametrize(("small_us", "large_gb_s", "processes", "last"), LAUNCHED)
def test_a_process_that_drives_several_gpus_may_take_a_launch_per_gpu(
    small_us: float, large_gb_s: float, processes: int, last: str, tmp_path: Path
) -> None:
    said = report(written(tmp_path, flat_alltoall(small_us, large_gb_s, processes)), "--summary")[1]
    assert said.startswith(last), said


def test_what_a_hostile_table_names_is_shown_as_text(tmp_path: Path) -> None:
    text = (REAL / "all_reduce.txt").read_text().replace(" on         vm ", " on <script>alert(1)</script> ")
    path = written(tmp_path, text.replace("NVIDIA H200", "NVIDIA H200\x1b[31m<b>"))
    assert "<script>" in path.read_text()
    report(path, "-o", str(tmp_path / "page.html"), "-o", str(tmp_path / "page.md"))
    assert "<script>alert" not in (tmp_path / "page.html").read_text()
    assert "\x1b" not in (tmp_path / "page.md").read_text()


RCCL_TABLE = next(name for name in TABLES if "AAC8" in name)


def rccl_text(model: str) -> str:
    """A table as rccl-tests prints it, whose lines of ranks have this GPU model."""
    text = replace(output_of(TABLES[RCCL_TABLE]), model=model).text()
    return text.replace("# Using devices", "rccl-tests: Version develop:a7809b3\n# Using devices")


@pytest.mark.parametrize("model", ["AMD Instinct MI300X", "AMD Instinct MI300X VF"])
def test_a_table_of_rccl_tests_is_judged_by_the_profile_of_its_gpus(model: str, tmp_path: Path) -> None:
    found = document(written(tmp_path, rccl_text(model)))
    rows: list[dict[str, object]] = found["rows"]  # type: ignore[assignment]
    assert {row["backend"] for row in rows} == {"rccl"}
    assert rows[-1]["expected_source"] == "profile mi300x-8"
    assert found["verdict"] == Verdict.PASS


def test_a_table_of_rccl_tests_that_names_no_model_is_asked_for_an_amd_machine(tmp_path: Path) -> None:
    """A driver without the model's name leaves it empty: '# Rank 0 ... device 0 [0000:75:00]'."""
    code, text = report(written(tmp_path, rccl_text("")))
    assert (code, "--machine mi300x-8" in text) == (2, True), text


def test_a_stored_staged_result_names_its_cause_in_the_last_line() -> None:
    ended = gpubench("report", str(ROOT / "tests/results/h200x8/allreduce-p2p-disabled.json"))
    assert "because NCCL_P2P_DISABLE=1" in ended.stdout.splitlines()[-1]
