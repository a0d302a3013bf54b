"""Sweeps with several settings: on the host backend, and on four ranks with fake GPUs."""

import csv
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import MPI_ENVIRONMENT, PROGRAM, ROOT, environment, gpubench, mpirun_command, run_mpirun
from tests.formats.schema import VALIDATOR
from tests.mpi.hosts import Hosts, connected
from tests.mpi.jobs import FAKE_GPUS, document_of, mpirun_on_fake_gpus, on_fake_gpus

pytestmark = pytest.mark.mpi

SECONDS_TO_BEGIN = 15.0
"""Time until ranks have measured their first rows on a busy machine"""

SMALL = ("allreduce", "--sizes", "1K:64K:8", "--iters", "3", "--warmup", "1")
AS_DATA = ("--format", "json", "--exit-zero")  # CPU operations are slower than GPUs are expected to be
ONE_ROW = ("--sizes", "1K", "--iters", "3", "--warmup", "1", "--out-of-place")


def emulated_nodes(
    *arguments: str, ranks: tuple[int, int] = (2, 2), program: Sequence[str] = PROGRAM
) -> "subprocess.CompletedProcess[str]":
    """Run the ranks of this host as two nodes, set by NCCL_HOSTID."""
    launcher, *_ = mpirun_command(1)
    nodes = [
        ["-n", str(count), "-x", f"NCCL_HOSTID=node{node}", *program, *arguments] for node, count in enumerate(ranks)
    ]
    return run_mpirun([launcher, *nodes[0], ":", *nodes[1]], environment(**MPI_ENVIRONMENT))


def test_algorithms_and_protocols_beside_the_own_choice(tmp_path: Path) -> None:
    table = tmp_path / "table.txt"
    asked = ("--algo", "ring,tree", "--proto", "ll,simple")
    result = on_fake_gpus(*SMALL, *asked, *AS_DATA, "--output", str(table))
    assert result.returncode == 0, result.stderr
    document = document_of(result)
    names = ["ring/ll", "ring/simple", "tree/ll", "tree/simple"]
    assert document["metadata"]["options"]["settings"] == names
    assert [row["setting"] for row in document["rows"]] == [None, *names, "again"] * 3 * 2
    for row in document["rows"]:
        assert row["wrong"] == 0
        if row["setting"] in names:
            assert f"{row['algorithm']}/{row['protocol']}".lower() == row["setting"]
            assert row["channels"] == 24
            assert row["note"] is None or "requested" not in row["note"]
    best = document["winners"]
    assert len(best) == 3 * 2
    assert {(row["own_algorithm"], row["own_protocol"]) for row in best} == {("RING", "LL")}
    times = {(row["size_bytes"], row["placement"], row["setting"]): row["time_us"] for row in document["rows"]}
    for row in best:
        here = {name: times[row["size_bytes"], row["placement"], name] for name in names}
        here["ring/ll"] = row["own_time_us"]  # NCCL's own choice counts as measured again
        assert (row["fastest"], row["time_us"]) == min(here.items(), key=lambda item: item[1])
    assert all(row["noise_percent"] is not None for row in best)
    assert document["refused"] == []
    assert [row["conclusion"] for row in document["fallback"]] == ["direct"]
    assert not {"NCCL_ALGO", "NCCL_PROTO"} & set(document["metadata"]["environment"])
    text = table.read_text()
    assert "every size in 6 variants, one after the other: own choice, ring/ll, ring/simple, tree/ll" in text
    assert "fastest by size, float32, sum, out of place" in text
    assert text.count("cross-over  ") == 2
    assert max(map(len, text.splitlines()[:-1])) <= 100


@pytest.mark.slow
def test_what_nccl_refuses_and_what_it_takes_instead_is_said_and_the_rest_is_measured() -> None:
    result = on_fake_gpus(*SMALL, "--algo", "nvls,pat,tree", *AS_DATA)
    assert result.returncode == 0, result.stderr
    document = document_of(result)
    (refused,) = document["refused"]
    assert (refused["setting"], refused["dtype"], refused["op"], refused["size_bytes"]) == (
        *("nvls", "float32", "sum"),
        1024,
    )
    assert "no algorithm/protocol available for function AllReduce" in refused["reason"]
    assert "NCCL_ALGO was set to nvls" in refused["reason"]
    assert {row["setting"] for row in document["rows"]} == {None, "pat", "tree", "again"}
    notes = {row["note"] for row in document["rows"] if row["setting"] == "pat"}
    assert {str(note).partition(";")[0] for note in notes} == {"asked for pat, NCCL took ring/simple"}
    assert "pat" not in {row["fastest"] for row in document["winners"]}


@pytest.mark.slow
def test_without_evidence_nothing_is_heard_and_the_rest_is_the_same() -> None:
    arguments = (*SMALL, "--proto", "ll", "--no-evidence", "--format", "json")
    document = document_of(on_fake_gpus(*arguments))
    assert [row["setting"] for row in document["rows"]] == [None, "ll", "again"] * 3 * 2
    assert {row["protocol"] for row in document["rows"]} == {None}
    assert {row["candidates"] for row in document["winners"]} == {2}


@pytest.mark.slow
def test_two_backends_in_one_table() -> None:
    arguments = ("--backend", "host,nccl", "--dtype", "float32,int8", "--op", "sum,max")
    result = on_fake_gpus(*SMALL, *arguments, "--out-of-place", "--width", "120", "--exit-zero")
    assert result.returncode == 0, result.stderr
    assert "allreduce  backend nccl and host  4 ranks" in result.stdout
    assert "3 variants, one after the other: nccl, nccl again, host" in result.stdout
    assert result.stdout.count("speed, % of nccl's, ") == 4
    csv_text = on_fake_gpus(*SMALL, *arguments[:2], "--format", "csv", "--section", "winners").stdout
    lines = list(csv.DictReader(io.StringIO(csv_text)))
    assert len(lines) == 6
    assert {line["own_backend"] for line in lines} == {"nccl"}
    assert {line["fastest"] for line in lines} <= {"nccl", "host"}


def test_a_hierarchical_all_reduce_beside_the_flat_one(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    arguments = ("--backend", "host", "--hierarchical", "--op", "sum,max", "--output", str(output))
    result = emulated_nodes("allreduce", "--sizes", "16,1000,64K", "--iters", "3", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    document: dict[str, Any] = json.loads(output.read_text())
    VALIDATOR.validate(document)
    made = [row for row in document["rows"] if row["setting"] == "hierarchical"]
    assert {row["size_bytes"] for row in made} == {1000, 65536}, "of 16 bytes there is no block for every rank"
    assert len(made) == 2 * 2 * 2
    for row in made:
        assert row["wrong"] == 0
        assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] * 1.5)
    assert {row["candidates"] for row in document["winners"]} == {2}


@pytest.mark.slow
def test_a_hierarchy_of_each_backend_beside_settings(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    arguments = ("--hierarchical", "--algo", "ring", "--backend", "nccl,host", "--output", str(output))
    result = emulated_nodes(*SMALL, *arguments, "--out-of-place", program=FAKE_GPUS)
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads(output.read_text())
    VALIDATOR.validate(document)
    ways = [(row["backend"], row["setting"]) for row in document["rows"]]
    host, nccl = (
        (("host", None), ("host", "hierarchical")),
        (("nccl", None), ("nccl", "ring"), ("nccl", "hierarchical")),
    )
    assert ways == [*nccl, *host, ("nccl", "again")] * 3
    assert {row["wrong"] for row in document["rows"]} == {0}
    taken = {row["setting"]: row["algorithm"] for row in document["rows"] if row["backend"] == "nccl"}
    assert taken == {None: "RING", "ring": "RING", "hierarchical": None, "again": "RING"}
    assert {row["own_backend"] for row in document["winners"]} == {"nccl"}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--backend", "host", "--algo", "ring"), 2, "--algo needs GPUs, and --backend host uses none"),
        (("--proto", "ll"), 2, "--proto needs GPUs, and this host shows none"),
        (("--algo", "rings"), 2, "--algo 'rings' is not known"),
        (("--backend", "nccl,gloo"), 2, "--backend 'gloo' is not known"),
        (("--backend", "host", "--hierarchical"), 2, "--hierarchical, but all 2 ranks are on one node"),
        (("--hierarchical", "--split", "node"), 2, "--hierarchical with --split"),
        (("--algo", "ring", "--simulate", "l40s-8"), 2, "--algo with --simulate l40s-8: ring"),
        (("--backend", "nccl,host", "--graph", "3"), 2, "--graph with --backend host"),
        (("--register", "symmetric"), 2, "--register needs GPUs, and this host shows none"),
        (("--cta-policy", "none"), 2, "--cta-policy 'none' is not known"),
        (("--max-ctas", "0"), 2, "--max-ctas 0"),
        (("--set", "NCCL_MAX_NCHANNELS=4"), 2, "--set needs GPUs, and this host shows none"),
        (("--set", "NCCL_ALGO=ring", "--algo", "tree"), 2, "--set NCCL_ALGO and --algo exclude each other"),
        (("--set", "NCCL_NET=IB", "--set", "NCCL_NET=Socket"), 2, "--set NCCL_NET is set twice"),
        (("--set", "NCCL_NET=IB", "--record", "recorded"), 2, "--set NCCL_NET with --record"),
        (("--set", "NCCL_NET=IB", "--hierarchical"), 2, "--set NCCL_NET with --hierarchical"),
        (("--set", "NCCL_NET=IB", "--split", "node"), 2, "--set with --split"),
    ],
)
def test_what_cannot_be_asked_for_is_one_error(arguments: tuple[str, ...], code: int, said: str) -> None:
    result = gpubench("allreduce", "--sizes", "1K", *arguments)
    assert result.returncode == code
    assert said in result.stderr
    assert "try:" in result.stderr or "expected:" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.slow
def test_averages_of_averages_and_uneven_nodes_are_refused() -> None:
    average = emulated_nodes(*SMALL, "--backend", "host", "--hierarchical", "--op", "avg", "--dtype", "int32")
    assert average.returncode == 2
    assert "--hierarchical with --op avg of int32" in average.stderr
    uneven = emulated_nodes(*SMALL, "--backend", "host", "--hierarchical", ranks=(2, 1))
    assert uneven.returncode == 2
    assert "nodes have from 1 to 2 ranks" in uneven.stderr


@pytest.mark.slow
def test_a_choice_that_somebody_made_already_is_not_nccls_own() -> None:
    result = on_fake_gpus(*SMALL, "--algo", "tree", NCCL_ALGO="Ring")
    assert result.returncode == 2
    assert "--algo with NCCL_ALGO=Ring, which is already set" in result.stderr
    assert "unset NCCL_ALGO" in result.stderr
    result = on_fake_gpus(*SMALL, "--set", "NCCL_NET=IB", NCCL_NET="Socket")
    assert result.returncode == 2
    assert "--set with NCCL_NET=Socket, which is already set" in result.stderr


@pytest.mark.slow
def test_what_nccl_took_of_a_request_is_said_and_what_it_did_not_is_a_warning(tmp_path: Path) -> None:
    table = tmp_path / "table.txt"
    asked = ("--register", "user,symmetric", "--cta-policy", "default,zero")
    result = on_fake_gpus(*SMALL, *asked, *AS_DATA, "-o", str(table))
    assert result.returncode == 0, result.stderr
    document = document_of(result)
    policies = ("default", "zero")
    names = [f"register={how} cta-policy={policy}" for how in ("user", "symmetric") for policy in policies]
    assert document["metadata"]["options"]["settings"] == names
    assert document["metadata"]["options"]["allocator"] == "nccl"
    took = {(row["setting"], row["algorithm"], row["registered"]) for row in document["rows"]}
    assert took == {
        *((name, "RING", None) for name in (None, *names[:2], "again")),
        *((name, "SYMMETRIC", "symmetric") for name in names[2:]),
    }
    assert {row["wrong"] for row in document["rows"]} == {0}
    warned = [each for each in document["findings"] if each["id"] == "request-without-effect"]
    assert [each["subject"] for each in warned] == [
        *("--register user in allreduce", "--register user in allreduce"),
        *("--cta-policy zero in allreduce", "--cta-policy zero in allreduce"),
    ]
    assert "they cannot reduce" in warned[-1]["cause"]
    assert "ncclMemAlloc buffers" in table.read_text()
    assert " symmetric\n" in table.read_text()


@pytest.mark.slow
def test_a_cap_that_is_no_cap_is_a_warning_and_one_that_nccl_refuses_is_left_out() -> None:
    result = on_fake_gpus(*SMALL, "--max-ctas", "1,64", *AS_DATA)
    assert result.returncode == 0, result.stderr
    document = document_of(result)
    assert [(each["setting"], each["reason"]) for each in document["refused"]] == [
        ("max-ctas=1", "Error : maxCTAs 1 is less than minCTAs")
    ]
    warned = [each for each in document["findings"] if each["id"] == "request-without-effect"]
    assert [each["cause"] for each in warned] == ["NCCL uses at most 1 channel without the request"]


@pytest.mark.slow
def test_an_alltoall_whose_ranks_receive_unequally_much_is_right() -> None:
    arguments = ("alltoall", "--backend", "host", "--np", "3", "--sizes", "48,1K,100K", "--dtype", "int8,float64")
    result = gpubench(*arguments, "--skew", "0.5", "--iters", "3", "--format", "json")
    assert result.returncode == 0, result.stderr
    document = document_of(result)
    assert {(row["collective"], row["skew"], row["wrong"]) for row in document["rows"]} == {("alltoallv", 0.5, 0)}
    assert {row["expected_source"] for row in document["rows"]} == {None}
    assert document["metadata"]["options"]["skew"] == 0.5
    for row in document["rows"]:
        assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] * 2 / 3)
    refused = gpubench("alltoall", "--simulate", "hgx-h200-4", "--skew", "0.5")
    assert refused.returncode == 2
    assert "--simulate and --skew exclude each other" in refused.stderr
    assert "--skew" not in gpubench("allreduce", "--help-all").stdout


def test_a_repeated_sweep_shows_its_first_rows_and_says_how_it_went() -> None:
    arguments = ("allreduce", "--backend", "host", "--sizes", "1K", "--iters", "3", "-N", "3", "--format", "json")
    result = gpubench(*arguments)
    assert result.returncode == 0, result.stderr
    document = document_of(result)
    assert len(document["rows"]) == 2
    assert document["metadata"]["options"]["cycles"] == 3
    assert "soak: 0 min, 3 cycles, 6 rows, 0 wrong elements" in result.stderr
    refused = gpubench(*arguments, "--record", "recorded")
    assert refused.returncode == 2
    assert "--cycles 3 and --record exclude each other" in refused.stderr


@pytest.mark.slow
def test_a_soak_ends_in_order_when_it_is_interrupted() -> None:
    arguments = ("allreduce", "--backend", "host", "--np", "2", "--sizes", "1K", "--iters", "3", "--cycles", "0")
    command = [sys.executable, "-m", "gpubench", *arguments, "--format", "json", "--no-progress"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment()
    ) as soak:
        assert soak.stderr is not None
        time.sleep(SECONDS_TO_BEGIN)
        soak.send_signal(signal.SIGINT)
        out, said = soak.communicate(timeout=300)
    assert soak.returncode == 0, said
    document = json.loads(out)
    VALIDATOR.validate(document)
    assert document["complete"] is True
    assert len(document["rows"]) == 2
    assert "the soak ends after this row" in said
    assert "0 wrong elements" in said


@pytest.mark.slow
def test_ranks_that_a_launcher_started_are_one_job() -> None:
    result = mpirun_on_fake_gpus(4, *SMALL, "--set", "NCCL_NET=IB")
    assert result.returncode == 2
    assert "--set NCCL_NET under" in result.stderr
    assert "gpubench compare" in result.stderr
    result = mpirun_on_fake_gpus(4, *SMALL, "--set", "NCCL_ALGO=ring,tree", "--exit-zero")
    assert result.returncode == 0, result.stderr


CHANNELS = ("NCCL_MAX_NCHANNELS=2", "NCCL_MAX_NCHANNELS=4")


def test_a_variable_has_jobs_of_its_own_that_take_turns(tmp_path: Path) -> None:
    table = tmp_path / "table.txt"
    outputs = (*AS_DATA, "--output", str(table))
    asked = ("--set", "NCCL_MAX_NCHANNELS=2,4", "--proto", "ll")
    result = on_fake_gpus("allreduce", *ONE_ROW, *asked, *outputs)
    assert result.returncode == 0, result.stderr
    document = document_of(result)
    there = [None, *(way for name in CHANNELS for way in (name, f"ll {name}"))]
    back = ["again", *(f"{way} again" for name in CHANNELS for way in (name, f"ll {name}"))]
    names = [row["setting"] for row in document["rows"]]
    assert {name: names.count(name) for name in names} == dict.fromkeys([*there, *back], 1)
    jobs = [(name or "").rpartition("=")[2] for name in dict.fromkeys(names)]
    assert list(dict.fromkeys(jobs)) == ["", "2", "4", "4 again", "2 again", "again"]
    assert document["metadata"]["options"]["settings"] == there[1:]
    assert document["metadata"]["options"]["turns"] == 6
    assert "NCCL_MAX_NCHANNELS" not in document["metadata"]["environment"]
    assert {row["wrong"] for row in document["rows"]} == {0}
    assert {row["expected_source"] for row in document["rows"] if row["setting"] not in (None, "again")} == {None}
    assert {row["candidates"] for row in document["winners"]} == {5}
    assert document["refused"] == []
    assert "variable-not-verified" in {each["id"] for each in document["findings"]}, "this library does not tell"
    text = " ".join(table.read_text().split())
    assert "5 variants, each in two separate jobs that run in alternating order: own choice, NCCL_MAX" in text


@pytest.mark.slow
def test_a_setting_whose_job_fails_is_left_out_with_the_reason() -> None:
    """The fake library fails with this variable, and MPI_Abort ends this job's mpirun."""
    arguments = (*SMALL, "--set", "NCCL_NET=Broken,Socket", *AS_DATA)
    result = on_fake_gpus(*arguments, GPUBENCH_TEST_BROKEN_NET="Broken")
    assert result.returncode == 0, result.stderr
    document = document_of(result)
    (refused,) = document["refused"]
    assert refused["setting"] == "NCCL_NET=Broken"
    assert "No transport found for rank 0" in refused["reason"]
    assert {row["setting"] for row in document["rows"]} == {None, "NCCL_NET=Socket", "NCCL_NET=Socket again", "again"}
    notes = {row["note"] for row in document["rows"] if row["setting"] == "NCCL_NET=Socket"}
    assert all("NCCL_NET=Socket changes the path that data takes" in note for note in notes)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with connected(2, tmp_path) as pair:
        yield pair


@pytest.mark.slow
def test_hierarchical_on_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    output = tmp_path / "result.csv"
    text = hosts.run(*SMALL, "--hierarchical", "--output", str(output), until="verdict:")
    assert "PASS: " in text
    rows = list(csv.DictReader(io.StringIO(output.read_text())))
    assert {(row["setting"], row["nodes"], row["wrong"]) for row in rows} == {
        (name, "2", "0") for name in ("", "hierarchical", "again")
    }
