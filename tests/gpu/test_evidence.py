"""On two or four real GPUs with NVLinks: every indirect path that can be provoked is found with its cause."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.cli.running import ROOT, gpubench, mpirun_command
from tests.gpu import machine
from tests.gpu.machine import RANKS, SHARES, gpu_of_rank, launch, launched, several_ranks

RING = {(rank, (rank + 1) % RANKS) for rank in range(RANKS)}
CHAIN = {pair for rank in range(RANKS - 1) for pair in ((rank, rank + 1), (rank + 1, rank))}
SIZES = ("--sizes", "1K,16M" if SHARES else "1K,64M,256M")
JSON = ("--format", "json")

pytestmark = [pytest.mark.gpu, pytest.mark.mpi, *several_ranks]

Document = dict[str, Any]


def measured(*arguments: str, **variables: str) -> tuple[Document, str]:
    """Return the document and stderr of a collective that launched itself."""
    result = gpubench("allreduce", *SIZES, *launch(), *JSON, *arguments, env=launched(**variables))
    document: Document = json.loads(result.stdout)
    assert result.returncode == (document["verdict"] == "FAIL"), result.stderr
    return document, result.stderr


def under_mpirun(script: str, *mpirun_arguments: str, arguments: Sequence[str] = JSON) -> tuple[Document, str]:
    """Return the same for ranks that a line of shell starts. `$GPUBENCH` is the command."""
    words = [sys.executable, "-m", "gpubench", "allreduce", *SIZES, *arguments]
    command = [mpirun_command(1)[0], *mpirun_arguments, "-n", str(RANKS), "bash", "-c", script]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=110, cwd=ROOT,
        env={name: value for name, value in machine.under_mpirun().items() if name != "OMPI_MCA_btl"}
        | {"GPUBENCH": " ".join(words)},
    )  # fmt: skip
    document: Document = json.loads(result.stdout[result.stdout.index("{\n") : result.stdout.rindex("\n}") + 2])
    assert result.returncode == (document["verdict"] == "FAIL"), result.stdout + result.stderr
    return document, result.stderr


def pairs(row: Document) -> set[tuple[int, int]]:
    found = (pair.split(" → ") for pair in row["pairs"])
    return {(int(source), int(destination)) for source, destination in found}


def staged(document: Document) -> Document:
    """Return the only fallback row of a job that is entirely host-staged."""
    (row,) = document["fallback"]
    assert row["conclusion"] == "staged"
    assert SHARES or row["times_slower"] > 4, "ranks of one GPU have no link to be slower than"
    assert document["verdict"] == "FAIL"
    assert {each["host_staged"] for each in document["rows"]} == {True}
    return dict(row)


def assert_within_a_gpu(document: Document) -> None:
    """Assert that ranks on one GPU need no peer access. NCCL connects them directly with any setting."""
    (row,) = document["fallback"]
    assert (row["conclusion"], row["transport"]) == ("direct", "P2P/CUMEM")


def test_the_plain_run_is_direct_and_proven() -> None:
    document, said = measured()
    (row,) = document["fallback"]
    sure = "likely" if SHARES else "proven"  # no counter sees traffic within a GPU
    assert (row["conclusion"], row["confidence"], row["transport"]) == ("direct", sure, "P2P/CUMEM")
    assert pairs(row) <= RING | CHAIN
    assert pairs(row) >= RING
    assert said.count("fallback: none. ") == 1
    assert document["verdict"] == "PASS"
    assert {each["host_staged"] for each in document["rows"]} == {False}
    assert all(each["algorithm"] and each["protocol"] and each["channels"] for each in document["rows"])
    assert {each["measurement"] for each in document["evidence"]} == {"absent" if SHARES else "present"}
    assert {each["capability"] for each in document["evidence"]} == {"present"}
    assert not [name for name in document["metadata"]["environment"] if name.startswith("NCCL_DEBUG")]


def test_peer_access_switched_off_goes_through_shared_memory() -> None:
    document, said = measured(NCCL_P2P_DISABLE="1")
    if SHARES:
        assert_within_a_gpu(document)
        return
    row = staged(document)
    assert row["transport"] == "SHM/direct"
    assert row["cause_seen"] == "NCCL_P2P_DISABLE=1 in the environment"
    assert pairs(row) >= RING
    assert row["confidence"] == "proven"
    assert {each["measurement"] for each in document["evidence"]} == {"contradicting"}
    assert "HOST-STAGED" in said


def test_shared_memory_switched_off_too_goes_through_sockets() -> None:
    document, _ = measured(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    if SHARES:
        assert_within_a_gpu(document)
        return
    row = staged(document)
    assert row["transport"].startswith("NET/Socket/")
    assert row["cause_seen"] == "NCCL_SHM_DISABLE=1 NCCL_P2P_DISABLE=1 in the environment"
    assert "nccl-shm-disabled" in {cause["id"] for cause in document["causes"]}, "one cause names both settings"
    assert row["times_slower"] > 20
    assert pairs(row) >= RING


def test_two_emulated_nodes_are_staged_between_them_alone() -> None:
    a_node = RANKS // 2
    document, _ = under_mpirun(f"NCCL_HOSTID=node$((OMPI_COMM_WORLD_RANK/{a_node})) exec $GPUBENCH")
    by_conclusion = {row["conclusion"]: row for row in document["fallback"]}
    between = by_conclusion.pop("staged")
    assert all(source // a_node != destination // a_node for source, destination in pairs(between))
    assert between["transport"].startswith("NET/Socket/")
    assert "NCCL_HOSTID=node0" in between["cause_seen"]
    assert list(by_conclusion) == (["direct"] if a_node > 1 else [])
    for inside in by_conclusion.values():
        assert all(source // a_node == destination // a_node for source, destination in pairs(inside))
        assert inside["transport"] == "P2P/CUMEM"


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="unshare -m needs root")
def test_a_dev_shm_of_each_ranks_own_goes_through_sockets_with_no_setting_to_blame() -> None:
    script = "exec unshare -m bash -c 'mount -t tmpfs tmpfs /dev/shm && exec $GPUBENCH'"
    document, _ = under_mpirun(script, "--mca", "btl", "tcp,self")
    row = staged(document)
    assert row["transport"].startswith("NET/Socket/")
    assert row["cause"] == "shm-not-shared"
    assert SHARES or row["times_slower"] > 20
    assert pairs(row) >= RING


def test_one_visible_gpu_a_rank_is_direct() -> None:
    document, _ = under_mpirun(f"{gpu_of_rank()} exec $GPUBENCH")
    (row,) = document["fallback"]
    assert (row["conclusion"], row["transport"]) == ("direct", "P2P/CUMEM")
    assert pairs(row) >= RING


@pytest.mark.parametrize(("algorithm", "expected"), [("Ring", RING), ("Tree", CHAIN)])
def test_a_forced_algorithm_runs_over_its_own_pairs(algorithm: str, expected: set[tuple[int, int]]) -> None:
    document, _ = measured(NCCL_ALGO=algorithm)
    assert {row["algorithm"] for row in document["rows"]} == {algorithm.upper()}
    (row,) = document["fallback"]
    assert (row["conclusion"], pairs(row)) == ("direct", expected)


@pytest.mark.parametrize("collective", ["alltoall", "sendrecv", "broadcast", "reducescatter"])
def test_other_collectives_are_direct(collective: str) -> None:
    result = gpubench(collective, *SIZES, *launch(), *JSON, env=launched())
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert {row["conclusion"] for row in document["fallback"]} == {"direct"}
    assert {row["host_staged"] for row in document["rows"]} == {False}


def test_strict_passes_what_is_direct_and_measures_what_is_host_staged() -> None:
    asked = ("allreduce", *SIZES, *launch(), "--strict")
    plain = gpubench(*asked, env=launched())
    if SHARES:
        assert plain.returncode == 3, "a gate passes no speed that was not judged"
        assert "speed not judged: ranks share a GPU" in plain.stdout
        return
    assert plain.returncode == 0, plain.stdout + plain.stderr
    staged = gpubench(*asked, env=launched(NCCL_P2P_DISABLE="1"))
    assert staged.returncode == 1
    assert "FAIL host-staged" in staged.stdout
    assert "NCCL_P2P_DISABLE=1 in the environment" in staged.stdout


def test_no_evidence_is_nothing() -> None:
    document, said = measured("--no-evidence")
    assert document["evidence"] == []
    assert {(row["transport"], row["algorithm"], row["host_staged"]) for row in document["rows"]} == {(None,) * 3}
    assert "fallback: not known: --no-evidence" in said


@pytest.mark.parametrize("level", ["INFO", "WARN"])
def test_what_a_user_asks_of_nccls_log_still_reaches_him(level: str) -> None:
    result = gpubench(
        "allreduce", "--sizes", "1K", *launch(), "--format", "csv",
        env=launched(NCCL_DEBUG=level),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "NCCL version" in result.stderr
    assert (" via P2P/CUMEM" in result.stderr) == (level == "INFO")
    assert "fallback: none" in result.stderr
    assert {row["transport"] for row in csv.DictReader(io.StringIO(result.stdout))} == {"P2P/CUMEM"}
