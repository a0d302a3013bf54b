"""`report -`, `compare -`, and texts with the tables of several runs or programs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import ROOT, gpubench
from tests.readers.results.test_ml_engineering import HEAD, TABLE, TITLE
from tests.readers.results.test_p2p_bandwidth_latency import access, bandwidths, devices, latencies
from tests.readers.results.test_perftest import run

REAL = ROOT / "tests" / "results" / "h200x4"
REDUCE, GATHER, COPIES = (REAL / f"{name}.txt" for name in ("all_reduce", "all_gather", "nvbandwidth"))


def piped(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpubench", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=120)


def last_lines(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith(("PASS:", "WARN:", "FAIL:", "SKIP:"))]


def test_report_and_compare_read_standard_input() -> None:
    result = piped(REDUCE.read_text(), "report", "-", "--json")
    assert json.loads(result.stdout)["verdict"] == "PASS"
    assert piped(REDUCE.read_text(), "compare", str(REDUCE), "-").stdout.endswith("rows compared\n")
    assert piped(REDUCE.read_text(), "compare", "-", str(REDUCE)).returncode == 0


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ("", ("report", "-"), "/dev/stdin is empty"),
        ("hello\n", ("report", "-"), "/dev/stdin, line 1: 'hello' is not the start of a file"),
        ("ROCm System Management Interface\n", ("report", "-"), "/dev/stdin is rocm-smi's output: the topology of AMD"),
        ("", ("compare", "-", "-"), "compare with - twice"),
        ("{\ntest_info: {\ntest: RDMA_Write_BW_Test,\n},\n", ("report", "-"), "/dev/stdin is perftest's output"),
        ("SUM device_to_device_memcpy_read_ce 4725.57\n", ("report", "-"), "only the sums of nvbandwidth: SUM device"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, arguments: tuple[str, ...], said: str) -> None:
    result = piped(text, *arguments)
    assert result.returncode == 2
    assert said in result.stderr


def test_runs_of_several_collectives_and_programs_are_judged_one_by_one(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("\n".join((REDUCE.read_text(), GATHER.read_text(), COPIES.read_text(), run(unit="Gb"))))
    result = gpubench("report", str(page), "--nics", "1x100")
    lines = last_lines(result.stdout)
    assert [line.partition(": ")[0] for line in lines] == ["PASS", "PASS", "PASS", "SKIP"]
    assert ["all-reduce" in lines[0], "all-gather" in lines[1], "p2p" in lines[2]] == [True] * 3
    one = gpubench("report", str(page), "--collective", "allgather", "--nics", "1x100")
    assert not any("all-reduce" in line for line in last_lines(one.stdout))
    refused = gpubench("report", str(page), "--json")
    assert (refused.returncode, "has 4 tables: nccl-tests text" in refused.stderr) == (2, True)


def test_a_bad_run_among_good_ones_fails_the_page(tmp_path: Path) -> None:
    page = tmp_path / "log.txt"
    slow = (REAL / "ar_NCCL_P2P_DISABLE_1.txt").read_text().replace(" on         vm ", " on         vn ")
    page.write_text(REDUCE.read_text() + slow)
    result = gpubench("report", str(page))
    assert [line.partition(": ")[0] for line in last_lines(result.stdout)] == ["PASS", "FAIL"]
    assert result.returncode == 1


@pytest.mark.parametrize("option", ["--quiet", "--summary"])
def test_short_answers_are_one_a_table(option: str, tmp_path: Path) -> None:
    page = tmp_path / "log.txt"
    page.write_text(2 * (devices("NVIDIA X1") + access() + bandwidths() + latencies()))
    assert len(last_lines(gpubench("report", str(page), option).stdout)) == 2


def test_topo_reads_standard_input_as_report_does() -> None:
    text = "\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tNV4\t X \n"
    assert "2 GPUs" in piped(text, "topo", "--from", "-").stdout


def test_two_topologies_of_amd_in_one_text_are_refused() -> None:
    text = "Link Type between two GPUs\n       GPU0  GPU1\nGPU0   0     XGMI\nGPU1   XGMI  0\n"
    assert piped(text, "topo", "--from", "-").returncode == 0
    result = piped(text + text, "topo", "--from", "-")
    assert (result.returncode, "line 5: a second table of the same kind" in result.stderr) == (2, True)


def test_a_bench_that_names_its_gpus_lacks_only_the_number_of_nodes() -> None:
    said = piped(HEAD + TITLE + TABLE, "report", "-").stderr
    assert "does not contain the number of nodes" in said
    assert "have NVIDIA H200, but no hosts" in said


def test_the_same_copies_of_two_runs_are_two_tables(tmp_path: Path) -> None:
    page = tmp_path / "log.txt"
    page.write_text(COPIES.read_text() + COPIES.read_text())
    assert len(last_lines(gpubench("report", str(page)).stdout)) == 2
    page.write_text(2 * (devices() + access() + bandwidths() + latencies()))
    assert len(last_lines(gpubench("report", str(page)).stdout)) == 2


def test_a_part_that_cannot_be_judged_is_named_and_does_not_pass(tmp_path: Path) -> None:
    page = tmp_path / "log.txt"
    page.write_text(REDUCE.read_text() + bandwidths())
    result = gpubench("report", str(page))
    assert (result.returncode, len(last_lines(result.stdout))) == (2, 1)
    assert "does not contain the GPUs" in result.stderr


def test_the_last_line_has_the_figure_of_a_bidirectional_test() -> None:
    text = run("RDMA_Write Bidirectional BW Test", unit="Gb", rows=" 65536  5000  770.00  768.00  1.46\n")
    (line,) = last_lines(piped(text, "report", "-", "--nics", "1x400").stdout)
    assert line == "PASS: p2p both ways 96 GB/s (96 % of limit), data not verified"


def test_copies_at_the_speed_of_host_memory_fail_though_their_latency_is_direct() -> None:
    text = devices("NVIDIA H100 80GB HBM3") + access() + bandwidths((16.5, 16.6)) + latencies()
    result = piped(text, "report", "-", "--machine", "hgx-h100-8/2")
    assert result.returncode == 1
    assert "copies of 16 bytes are 9.6 times as fast as with peer access off" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("text", "verdict", "said"),
    [
        (devices("NVIDIA X1") + access() + bandwidths() + latencies(), "PASS", "all paths direct, speed not judged"),
        (devices("NVIDIA X1") + access() + bandwidths(), "SKIP", "speed not judged"),
        (devices("NVIDIA X1") + access("CANNOT") + bandwidths(), "SKIP", "speed not judged"),
        (
            devices("NVIDIA X1") + access() + bandwidths((16.5, 16.6)) + latencies().replace("1.25", "12.1"),
            "FAIL",
            "data go through host memory",
        ),
        (devices("NVIDIA H100 PCIe") + access() + bandwidths((16.5, 16.6)), "FAIL", "cause not found. Try"),
    ],
)
def test_equal_copies_with_and_without_peer_access_are_staged(text: str, verdict: str, said: str) -> None:
    (line,) = last_lines(piped(text, "report", "-").stdout)
    assert line.startswith(f"{verdict}: ")
    assert said in line
