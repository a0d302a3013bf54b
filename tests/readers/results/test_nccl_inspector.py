"""NCCL's Inspector: lines as inspector_json.cc writes them, made up, as a table of speeds and as who comes last."""

import json
import random
from pathlib import Path

import pytest

from gpubench.errors import UsageError
from gpubench.readers.registry import parse_results, read_results
from tests.cli.running import gpubench

RANKS = 4


def line(rank: int, number: int, us: int, collective: str = "AllReduce", size: int = 2**26) -> str:
    header = {"id": "0x7f8c496ae9f661", "comm_name": "unknown", "rank": rank, "n_ranks": RANKS, "nnodes": 1}
    metadata = {
        "inspector_output_format_version": "v4.0",
        "git_rev": "",
        "rec_mechanism": "nccl_profiler_interface",
        "dump_timestamp_us": 1748030377748202,
        "hostname": "node0",
        "pid": 100 + rank,
    }
    times = {"coll": collective, "coll_sn": number, "coll_msg_size_bytes": size, "coll_exec_time_us": us}
    times |= {"coll_timing_source": "kernel_gpu", "coll_algobw_gbs": 1.0, "coll_busbw_gbs": 1.0}
    return json.dumps({"header": header, "metadata": metadata, "coll_perf": times}) + "\n"


def job(folder: Path, late: int | None, operations: int = 50) -> Path:
    """The files of a job whose rank `late` is there 800 µs after the others."""
    folder.mkdir()
    chance = random.Random(1)
    texts = dict.fromkeys(range(RANKS), "")
    for number in range(operations):
        for rank in texts:
            waits = 800 if late is not None and rank != late else chance.randrange(15)
            texts[rank] += line(rank, number, 300 + waits)
            texts[rank] += line(rank, number, 100 + chance.randrange(15), "AllGather", 2**20)
    for rank, text in texts.items():
        (folder / f"node0-pid{100 + rank}.log").write_text(text)
    return folder


def test_the_size_of_a_gathered_buffer_is_that_of_all_ranks() -> None:
    (row,) = parse_results(line(0, 1, 100, "AllGather", 2**20), "x").rows
    assert row.size_bytes == RANKS * 2**20


def test_damaged_lines_sends_and_operations_without_a_time_are_counted() -> None:
    sent = line(0, 9, 5).replace('"coll_perf"', '"p2p_perf"')
    found = parse_results(line(0, 1, 100) + sent + line(0, 2, 0) + line(0, 3, 100)[:90] + "\n", "x")
    assert not found.complete
    assert found.remarks == (
        "1 damaged line left out",
        "2 lines left out (sends, without a time, or above a limit)",
    )
    with pytest.raises(UsageError, match="no collective with a time"):
        parse_results(sent, "x")


def test_a_job_is_judged_beside_what_is_expected(tmp_path: Path) -> None:
    files = sorted(job(tmp_path / "job", None).iterdir())
    whole = tmp_path / "job.jsonl"
    whole.write_text("".join(path.read_text() for path in files))
    assert len(read_results(whole).rows) == 2
    shown = gpubench("report", str(whole), "--machine", "hgx-h100-8/4", "--collective", "allreduce").stdout
    assert "% exp" in shown
    assert gpubench("compare", str(whole), str(whole)).returncode == 0


def test_explain_names_the_rank_that_the_others_wait_for(tmp_path: Path) -> None:
    done = gpubench("explain", str(job(tmp_path / "late", 2)))
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith("WARN: rank 2: is slow: came last in 50 of 100 operations")
    assert "allreduce       4   64M          50" in done.stdout


def test_explain_names_nobody_where_ranks_come_together(tmp_path: Path) -> None:
    done = gpubench("explain", str(job(tmp_path / "well", None)))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (
        0,
        "PASS: no rank keeps the others waiting in 100 operations",
    )
