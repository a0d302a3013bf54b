"""`gpubench watch --hang` as a user runs it, beside a service that answers as NCCL's RAS does."""

import json
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.cli.running import environment, gpubench
from tests.fakes.ras import GONE, FakeRank, as_json, as_text, service

GATE = ("--strict", "--interval", "200ms", "--for", "400ms")


def watch(*arguments: str, address: str) -> subprocess.CompletedProcess[str]:
    return gpubench("watch", "--hang", *arguments, env=environment(NCCL_RAS_ADDR=address))


def told(answers: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    with service(answers) as address:
        return watch(*(arguments or GATE), address=address)


def four(number: int, **changes: object) -> list[FakeRank]:
    """Ranks that launched so many all-reduces, rank 2 with changes."""
    ranks = [FakeRank(each, {"AllReduce": number, "Broadcast": 4}) for each in range(4)]
    ranks[2] = replace(ranks[2], **changes)
    return ranks


PROGRESS = [as_json(four(number)) for number in range(10, 20)]


def test_a_job_that_goes_on_passes_the_gate() -> None:
    done = told(PROGRESS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "PASS: no rank keeps others waiting"
    assert done.stdout.splitlines()[0].endswith("  1 communicator, and no rank keeps others waiting")


HANGS = [
    ({"counts": {"AllReduce": 19, "Broadcast": 4}}, "did not join", "AllReduce number 20"),
    ({"counts": {"AllReduce": 19, "Broadcast": 5}}, "called another operation: Broadcast instead", ""),
    ({"counts": {}, "silent": True}, "does not answer", ""),
    ({"counts": {}, "silent": True, "dead": True}, "is dead", ""),
    ({"error": 1}, "reported an error: Unhandled CUDA error", ""),
    ({"status": "FINALIZE"}, "left early", ""),
    ({"status": "NOCOMM"}, "left early", ""),
    ({"status": "ABORT"}, "left early", ""),
]


@pytest.mark.parametrize("form", [as_json, as_text])
@pytest.mark.parametrize(("changes", "seen", "operation"), HANGS)
def test_the_rank_that_hangs_is_named(form: object, changes: dict[str, object], seen: str, operation: str) -> None:
    assert callable(form)
    done = told([form(four(19)), form(four(20, **changes))])
    assert done.returncode == 1, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("FAIL: rank 2 (10.0.0.1:102)"), last
    assert seen in done.stdout.replace("\n            ", " ")
    assert operation in done.stdout
    assert "rank 0 (" not in done.stdout
    advice = "py-spy dump --pid 102\n            Run it on 10.0.0.1. It shows the line where that rank is."
    assert (advice in done.stdout) is (seen == "did not join")


def test_ranks_that_run_ahead_of_each_other_are_not_behind() -> None:
    """The queue of a GPU holds about a thousand operations: others stop wherever theirs is full."""
    ranks = four(20, counts={"AllReduce": 5, "Broadcast": 4})
    ranks[1] = replace(ranks[1], counts={"AllReduce": 19, "Broadcast": 4})
    done = told([as_json(ranks)])
    assert "FAIL: rank 2 (10.0.0.1:102)" in done.stdout
    assert "rank 1 (" not in done.stdout
    assert "AllReduce number 6" in done.stdout


def test_a_rank_that_moves_keeps_nobody_waiting() -> None:
    behind = [as_json(four(number, counts={"AllReduce": number - 1, "Broadcast": 4})) for number in range(10, 20)]
    assert told(behind).returncode == 0


def test_a_rank_that_came_back_is_not_told_at_the_end() -> None:
    late = as_json(four(11, counts={"AllReduce": 10, "Broadcast": 4}))
    done = told([late, late, *PROGRESS[2:]], "--strict", "--interval", "200ms", "--for", "800ms")
    assert done.returncode == 0, done.stdout
    assert "rank 2 (10.0.0.1:102): did not join, AllReduce number 11" in done.stdout.splitlines()[1]


def test_a_job_that_launches_nothing_is_a_doubt() -> None:
    done = told([PROGRESS[0]])
    assert done.returncode == 1
    assert "WARN collective-stuck" in done.stdout
    assert "no rank launches an operation" in done.stdout


def test_text_of_a_healthy_job_does_not_show_progress() -> None:
    done = told([as_text(four(20))])
    assert done.returncode == 3
    assert done.stdout.splitlines()[-1].startswith("SKIP: RAS does not show whether operations make progress")


@pytest.mark.parametrize("text", [as_json([], communicators=0), "NCCL version 2.27.7 compiled with CUDA 12.9\n"])
def test_a_job_without_communicators_is_not_judged(text: str) -> None:
    done = told([text])
    assert (done.returncode, "0 communicators" in done.stdout) == (3, True), done.stdout


def test_answers_that_are_cut_off_are_none() -> None:
    done = told([PROGRESS[0][:-40]])
    assert done.returncode == 1, done.stdout
    assert "no answer in time" in done.stdout.splitlines()[0]
    assert "WARN rank-is-gone: every process that RAS asked" in done.stdout


def test_one_answer_alone_judges_nothing() -> None:
    done = told([as_json(four(20, counts={"AllReduce": 19}))], "--for", "0s", "--strict")
    assert done.returncode == 3, done.stdout


def test_what_hung_when_the_job_ended_is_told() -> None:
    hangs = as_json(four(20, silent=True))
    done = told([hangs, hangs, GONE], "--strict", "--interval", "200ms")
    assert done.returncode == 1
    assert "no answer any more, because the jobs have ended" in done.stdout
    assert "rank 2" in done.stdout.splitlines()[-1]


def test_answers_are_kept_for_explain(tmp_path: Path) -> None:
    hangs = [as_json(four(number)) for number in (19,)] + [as_json(four(20, silent=True))] * 2
    folder, result = tmp_path / "ras", tmp_path / "watch.json"
    done = told(hangs, *GATE, "--record", str(folder), "--output", str(result))
    assert done.returncode == 1
    assert [path.read_text() for path in sorted(folder.iterdir())] == hangs
    (row,) = json.loads(result.read_text())["hangs"]
    assert (row["ranks"], row["waiting"]) == (["rank 2 (10.0.0.1:102)"], 3)
    again = gpubench("explain", str(folder))
    assert again.returncode == 1
    assert "rank 2 (10.0.0.1:102)" in again.stdout.splitlines()[-1]


def test_without_ras_it_says_how_to_get_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    done = watch(*GATE, address=f"127.0.0.1:{port}")
    assert done.returncode == 3
    assert f"no process listens on 127.0.0.1:{port}, the port of NCCL's RAS" in done.stderr
    assert "NCCL 2.24" in done.stderr
    assert "NCCL_RAS_ADDR=HOST:PORT" in done.stderr


def test_another_program_on_the_port_is_told() -> None:
    done = told(["HTTP/1.1 400 Bad Request\n"])
    assert done.returncode == 2
    assert "is not from NCCL's RAS" in done.stderr


@pytest.mark.parametrize("option", [("--until-traffic",), ("--pid", "1")])
def test_options_of_traffic_are_refused(option: tuple[str, ...]) -> None:
    done = gpubench("watch", "--hang", *option)
    assert done.returncode == 2
    assert f"--hang and {option[0]}" in done.stderr


@pytest.mark.parametrize(
    ("machine", "fault", "rank"),
    [
        ("hgx-h100-8", "gpu5:hang=yes", "rank 5 (node0:4005)"),
        ("hgx-h100-8*2", "node1.gpu3:hang=yes", "rank 11 (node1:4003)"),
        ("hgx-h100-8", "node0:env=NCCL_P2P_DISABLE=1", ""),
        ("l40s-8", None, ""),
    ],
)
def test_a_simulated_hang_is_answered_like_a_real_one(machine: str, fault: str | None, rank: str) -> None:
    faults = () if fault is None else ("--fault", fault)
    result = gpubench("watch", "--hang", "--simulate", machine, *faults, "--format", "json")
    document = json.loads(result.stdout)
    assert document["metadata"]["origin"] == "simulated"
    assert document["verdict"] == ("FAIL" if rank else "PASS")
    assert [each["subject"] for each in document["findings"]] == ([rank] if rank else [])


@pytest.mark.parametrize(
    "arguments",
    [
        ("--hang", "--fault", "gpu5:nvlink=9"),
        ("--hang", "--fault", "node0:traffic=staged"),
        ("--fault", "gpu5:hang=yes"),
        ("--hang", "--record", "answers"),
    ],
)
def test_a_fault_that_a_question_cannot_show_is_refused(arguments: tuple[str, ...]) -> None:
    result = gpubench("watch", "--simulate", "hgx-h100-8", *arguments)
    assert result.returncode == 2
    assert "--hang" in result.stderr
