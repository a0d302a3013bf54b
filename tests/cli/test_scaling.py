"""`--np 1,2,4,8` on simulated machines: one report of several runs, its table, plot, recording and refusals."""

import json
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gpubench.cli.app import app
from gpubench.errors import GpubenchError
from tests.formats.schema import VALIDATOR

H200 = ("--simulate", "hgx-h200-8", "--sizes", "1M:1G:32", "--in-place")


def ended(*words: str) -> Any:
    return CliRunner().invoke(app, words)


def report(*words: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(ended(*words, "--format", "json").stdout)
    VALIDATOR.validate(document)
    return document


def scaling(document: dict[str, Any], *columns: str) -> list[tuple[Any, ...]]:
    most = max(row["size_bytes"] for row in document["scaling"])
    return [tuple(row[name] for name in columns) for row in document["scaling"] if row["size_bytes"] == most]


def test_each_number_of_ranks_is_the_run_of_its_own() -> None:
    whole = report("allreduce", *H200, "--np", "2,4,8")
    alone = [row for count in ("8", "4", "2") for row in report("allreduce", *H200, "--np", count)["rows"]]
    assert whole["rows"] == alone
    speeds = {row["ranks"]: row["busbw_gb_s"] for row in alone if row["size_bytes"] == 2**30}
    assert scaling(whole, "ranks", "gpus", "efficiency_percent", "breaks") == [
        (count, f"GPU0-{count - 1}", pytest.approx(100 * speeds[count] / speeds[2]), False) for count in (2, 4, 8)
    ]
    assert whole["sentence"].startswith(f"PASS (simulated): 8 × H200, all-reduce {speeds[8]:.0f} GB/s")


def test_the_last_line_has_the_speed_of_the_most_ranks_even_if_fewer_are_faster() -> None:
    document = report("allreduce", "--simulate", "hgx-h100-8*16", "--np", "8,128", "--sizes", "1G", "--in-place")
    (_, of_8), (_, of_128) = scaling(document, "ranks", "bandwidth_gb_s")
    assert of_8 > of_128
    assert f"128 × H100 80GB HBM3, all-reduce {of_128:.0f} GB/s" in document["sentence"]
    assert f"scaling efficiency {100 * of_128 / of_8:.0f} % at 128 ranks" in document["sentence"]
    assert scaling(document, "nodes", "gpus", "breaks", "reason")[1] == (
        *(16, "node0-15: GPU0-7", True),
        "as expected of this machine, because the added GPUs are on another node, behind NICs",
    )


def test_scaling_breaks_at_a_staged_pair_and_the_report_fails_with_its_run() -> None:
    result = ended("allreduce", *H200, "--np", "2,4,8", "--fault", "link0-3:staged=yes")
    assert result.exit_code == 1
    assert "scaling breaks at 4 ranks: GPU0 → GPU3 goes through host memory" in result.stdout
    document = report("allreduce", *H200, "--np", "2,4,8", "--fault", "link0-3:staged=yes")
    assert scaling(document, "ranks", "breaks") == [(2, False), (4, True), (8, False)]
    assert [row["verdict"] for row in document["rows"] if row["size_bytes"] == 2**30] == ["FAIL", "FAIL", "PASS"]
    assert [finding["id"] for finding in document["findings"]] == ["host-staged"]


@pytest.mark.parametrize(
    ("words", "fault", "said"),
    [
        (("allreduce", "hgx-h100-8*2", "8,16"), "node1.link2-5:staged=yes", "16 ranks: node1 GPU2 → GPU5 goes through"),
        (("kv", "hgx-h200-4", "2,4", "--blocks", "1", "--no-host"), "gpu3:nvlink=12", "4 ranks: nvlink-down, GPU3"),
        (("allreduce", "hgx-h100-8*4", "16,32"), "node2.nic3:rate=100", "32 ranks: rdma-port-slow, node2 mlx5_3"),
        (("allreduce", "dgx-1-v100", "2,4,8"), "gpu5:speed=0.4", "8 ranks: no reason found"),
        (("allgather", "l40s-8", "2,4,8"), "gpu6:generation=1", "8 ranks: pcie-generation, GPU6"),
        (("allreduce", "hgx-h100-8*2", "4,8,16"), "node1.gpu2:nvlink=6", "16 ranks: nvlink-down, node1 GPU2"),
        (("allreduce", "hgx-h200-8", "1,2,4,8"), "gpu5:nvlink=12", "8 ranks: nvlink-down, GPU5"),
        (("allreduce", "hgx-h200-8", "4,8"), "gpu5:throttle=hw_thermal_slowdown", "8 ranks: gpu-hw-slowdown, GPU5"),
        (("allreduce", "l40s-8", "2,4,8"), "gpu3:width=4", "4 ranks: pcie-width, GPU3"),
        (("allreduce", "dgx-1-v100", "2,4"), "gpu3:speed=0.4", "4 ranks: no reason found"),
    ],
)
def test_scaling_breaks_at_the_part_that_fails(words: tuple[str, ...], fault: str, said: str) -> None:
    command, machine, counts, *options = words
    options += [] if command == "kv" else ["--in-place"]
    shown = ended(command, "--simulate", machine, "--np", counts, "--sizes", "256M", "--fault", fault, *options).stdout
    assert f"\nscaling breaks at {said}" in shown


def test_the_summary_names_the_number_of_ranks_of_a_speed() -> None:
    shown = ended("allreduce", *H200, "--np", "4,8", "--fault", "link0-3:staged=yes").stdout
    assert "GB/s at 1G, float32, in place, 8 ranks" in shown
    assert "(7 %). Try" in shown.splitlines()[-1]  # Of 8 ranks: 4 ranks reach 8 %
    faulty = ("--simulate", "hgx-h100-8*2", "--sizes", "64M", "--in-place", "--fault", "node0.gpu1:speed=0.6")
    assert " at 4 ranks. Try" in ended("allreduce", *faulty, "--np", "4,16").stdout.splitlines()[-1]


def test_a_part_that_fails_is_found_once() -> None:
    machine = ("--simulate", "hgx-h100-8*2", "--sizes", "1G", "--in-place", "--fault", "node0.gpu5:nvlink=9")
    findings = report("allreduce", *machine, "--np", "8,16")["findings"]
    assert [(finding["id"], finding["subject"]) for finding in findings] == [
        ("nvlink-down", "node0 GPU5 (0000:1b:00.0)")
    ]


def test_a_fault_of_a_node_that_is_not_used_yet_breaks_nothing_before() -> None:
    machine = ("--simulate", "hgx-h100-8*2", "--sizes", "1G", "--in-place", "--fault", "node1.gpu5:nvlink=9")
    document = report("allreduce", *machine, "--np", "4,8,16")
    assert [row["verdict"] for row in document["rows"]] == ["FAIL", "PASS", "PASS"]


def test_the_page_draws_the_curve_and_marks_the_break(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    ended("allreduce", *H200, "--np", "2,4,8", "--fault", "link0-3:staged=yes", "--output", str(page))
    text = unescape(page.read_text(encoding="utf-8"))
    assert "Allreduce float32 sum in place: bandwidth over GPUs, GB/s" in text
    assert text.count('<line class="limit"') == 1
    assert "breaks at 4: GPU0 → GPU3 goes through host memory" in text
    assert text.count("<figcaption>Allreduce float32 sum: bus bandwidth") == 1  # Of 8 ranks, not one line through all


def test_the_terminal_plots_it_too() -> None:
    said = ended("allreduce", *H200, "--np", "2,4,8", "--plot").stdout
    assert "bandwidth over GPUs" in said
    assert "ranks      size" in said


def test_every_run_is_recorded_and_replayed(tmp_path: Path) -> None:
    faulty = (*H200, "--fault", "link0-3:staged=yes")
    before = report("allreduce", *faulty, "--np", "2,4,8", "--record", str(tmp_path / "seen"))
    after = report("allreduce", "--replay", str(tmp_path / "seen"))
    assert [path.name for path in sorted((tmp_path / "seen").iterdir())] == ["np-2", "np-4", "np-8"]
    assert (after["scaling"], after["rows"], after["verdict"]) == (before["scaling"], before["rows"], "FAIL")
    again = ended("allreduce", *faulty, "--np", "2,4", "--record", str(tmp_path / "seen"))
    assert isinstance(again.exception, GpubenchError)
    assert "already has a recording" in str(again.exception)


def test_a_stored_result_shows_the_same_table(tmp_path: Path) -> None:
    shown = ended("allreduce", *H200, "--np", "2,8", "--output", str(tmp_path / "result.json")).stdout
    again = ended("report", str(tmp_path / "result.json")).stdout
    table = shown.partition("\nscaling of ")[2]
    assert table
    assert table == again.partition("\nscaling of ")[2]


def test_csv_has_the_table() -> None:
    lines = ended("allreduce", *H200, "--np", "2,8", "--format", "csv", "--section", "scaling").stdout.splitlines()
    assert lines[0].startswith("measured,origin,size_bytes,ranks,nodes,gpus,time_us,bandwidth_gb_s")
    assert len(lines) == 1 + 2 * 3


def test_an_overlap_scales_by_its_step() -> None:
    document = report("overlap", "--simulate", "hgx-h200-8", "--np", "1,2,8", "--sizes", "256M", "--ctas", "own")
    (two, eight) = scaling(document, "ranks", "time_us", "bandwidth_gb_s", "efficiency_percent")
    assert two == (2, two[1], None, 100.0)
    assert eight == (8, eight[1], None, pytest.approx(100 * two[1] / eight[1]))
    assert {row["ranks"]: row["step_us"] for row in document["overlap"]} == {8: eight[1], 2: two[1]}


def test_recorded_transfers_are_compared_over_any_numbers_of_gpus(tmp_path: Path) -> None:
    words = ("kv", "--simulate", "dgx-1-v100", "--sizes", "64M", "--blocks", "1", "--no-host")
    measured = report(*words, "--np", "2,8", "--record", str(tmp_path / "seen"))
    assert report("kv", "--replay", str(tmp_path / "seen"), "--np", "2,8")["scaling"] == measured["scaling"]
    error = ended("kv", "--replay", str(tmp_path / "seen"), "--np", "16").exception
    assert isinstance(error, GpubenchError)
    assert error.seen == "--np 16 on node0, which has 8 GPUs"


def test_kv_shows_the_slowest_pair_among_the_first_gpus() -> None:
    words = ("kv", "--simulate", "dgx-1-v100", "--sizes", "64M", "--blocks", "1", "--no-host")
    document = report(*words, "--np", "2,4,8")
    for ranks, gb_s, gpus in scaling(document, "ranks", "bandwidth_gb_s", "gpus"):
        first = [f"GPU{number}" for number in range(ranks)]
        inside = [row for row in document["kv"] if {row["source"], row["destination"]} <= {*first}]
        assert (gb_s, gpus) == (min(row["bandwidth_gb_s"] for row in inside), f"GPU0-{ranks - 1}")
    assert scaling(document, "breaks", "reason")[-1] == (True, "GPU0 → GPU5 goes through host memory, by design")
    assert len(report(*words, "--np", "4")["kv"]) == 4 * 3 * 2


@pytest.mark.parametrize(
    ("words", "seen", "expected"),
    [
        (("allreduce", "--np", "2,2"), "--np 2,2", "each larger than the one before"),
        (("allreduce", "--np", "4,2"), "--np 4,2", "each larger than the one before"),
        (("allreduce", "--np", "0,2"), "--np 0,2", "whole numbers of 1 or more"),
        (("allreduce", "--np", "2,many"), "--np 2,many", "whole numbers of 1 or more"),
        (("overlap", "--np", "2,"), "--np 2,", "whole numbers of 1 or more"),
        (("allreduce", *H200, "--np", "8,16"), "--np 16 on hgx-h200-8, which has 8 GPUs", "at most 8"),
        (("allreduce", "--simulate", "hgx-h100-8*2", "--np", "2,12,16"), "--np 12 on hgx-h100-8*2", "multiples of 8"),
        (
            ("broadcast", *H200, "--np", "2,4", "--root", "3"),
            "--root 3 is out of range",
            "a rank from 0 to 1",
        ),
        (("kv", "--simulate", "hgx-h200-4", "--np", "2,8"), "--np 8 on node0, which has 4 GPUs", "at most 4"),
        (("kv", "--simulate", "hgx-h200-4", "--np", "2", "--pairs", "0-1"), "--pairs and --np exclude each other", ""),
        (("allreduce", "--np", "2,4", "--split", "2"), "--np 2,4 and --split exclude each other", "single number"),
        (("allreduce", "--np", "2,4", "--cycles", "0"), "--np 2,4 and --cycles exclude each other", "single number"),
        (("allreduce", "--np", "2,4", "--algo", "ring"), "--np 2,4 and --algo exclude each other", "single number"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_there_is(
    words: tuple[str, ...], seen: str, expected: str
) -> None:
    result = ended(*words)
    error = result.exception
    assert isinstance(error, GpubenchError), error
    assert (error.exit_code, result.stdout) == (2, "")
    assert seen in error.seen
    assert expected in error.expected


def test_one_rank_is_left_out_where_it_has_nothing_to_exchange() -> None:
    result = ended("allreduce", *H200, "--np", "1,2", "--format", "json")
    assert "--np 1 is left out, because one rank cannot exchange data" in result.stderr
    assert {row["ranks"] for row in json.loads(result.stdout)["scaling"]} == {2}
