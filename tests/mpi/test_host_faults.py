"""Faults between hosts (network namespaces): a cut cable, a dead daemon, a slow link."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.running import document_so_far
from tests.mpi.hosts import HostJob, Hosts, connected
from tests.mpi.test_faults import left_after

pytestmark = pytest.mark.mpi

TIMEOUT = 3
SECONDS_FOR_MPIRUN = 10
"""Time for mpirun to report a lost daemon. Open MPI's sometimes does not end then"""

WORDS = ("allreduce", "--backend", "host", "--sizes", "1K,4M", "--timeout", str(TIMEOUT), "--out-of-place")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with connected(2, tmp_path) as pair:
        yield pair


def wait_for_rows(output: Path, job: HostJob) -> None:
    deadline = time.monotonic() + 300
    while not document_so_far(output).get("rows"):
        if time.monotonic() > deadline or job.process.poll() is not None:
            job.wait_for("gpubench")
            pytest.skip(f"Open MPI's daemons got no job under way: {job.printed.read_text()[-300:]!r}")
        time.sleep(0.1)


def check_kept(output: Path) -> None:
    document = json.loads(output.read_text())
    assert document["rows"]
    assert (document["complete"], document["verdict"]) == (False, "ERROR")


def test_a_cut_cable_names_the_host_behind_it_and_ends_the_ranks_on_both(hosts: Hosts, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    with hosts.job(*WORDS, "--sizes", "1K,4M", "--iters", "400", f"--output={output}") as job:
        wait_for_rows(output, job)
        hosts.on_switch("ip", "link", "set", "port1", "down")
        said = job.wait_for("try:")
        assert not left_after(output, TIMEOUT)
    assert "the others wait for rank 2-3" in said
    for rank in (2, 3):
        assert f"rank {rank} on {hosts.names[1]}: neither it nor its watchdog answers" in said
    assert f"arrived:  rank 0 on {hosts.names[0]}, rank 1 on {hosts.names[0]}: in " in said
    check_kept(output)


@pytest.mark.slow
def test_a_dead_daemon_takes_its_ranks_along(hosts: Hosts, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    with hosts.job(*WORDS, "--iters", "200", f"--output={output}") as job:
        wait_for_rows(output, job)
        for pid in hosts.pids(1):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "prted":
                os.kill(pid, signal.SIGKILL)
        assert not left_after(output, TIMEOUT)
        said = job.wait_for("no such text", SECONDS_FOR_MPIRUN)
    assert hosts.names[1] in said or hosts.addresses[1] in said
    check_kept(output)


@pytest.mark.slow
def test_a_link_that_became_slow_ends_nothing(hosts: Hosts, tmp_path: Path) -> None:
    """A row of 4 MiB takes longer than the time-out, but each of its operations does not."""
    if shutil.which("tc") is None:
        pytest.skip("needs tc")
    output = tmp_path / "result.json"
    with hosts.job(*WORDS, "--timeout", "6", "--iters", "30", f"--output={output}") as job:
        wait_for_rows(output, job)
        slow = ("tbf", "rate", "100mbit", "burst", "64kb", "latency", "400ms")
        hosts.on_switch("tc", "qdisc", "add", "dev", "port1", "root", *slow)
        said = job.wait_for("verdict:")
    assert "PASS: " in said
    assert json.loads(output.read_text())["complete"]
