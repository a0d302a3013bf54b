"""Strangers on the hosts and the network of a job: none of them costs it its verdict."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.hardware.watchdog import strangers
from tests.mpi.test_faults import LONG, MPIRUN, TIMEOUT, processes_of, start

pytestmark = pytest.mark.mpi

SECONDS_MORE = 5
"""Beyond its time-out a stop may take so long to be told, whatever strangers send."""


def watchdogs_of(output: Path) -> list[int]:
    return [pid for pid in processes_of(output) if name_of(pid) == "gpubench-watch"]


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "result.json"


def test_neither_killed_watchdogs_nor_a_flood_of_the_next_hide_a_stopped_rank(output: Path) -> None:
    run = start(MPIRUN, output, *LONG)
    run.wait_for_rows(1)
    killed = watchdogs_of(output)
    assert len(killed) == 3
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while len(watchdogs := watchdogs_of(output)) < 3 or set(watchdogs) & set(killed):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    addresses = [address for pid in watchdogs for address in strangers.udp_addresses(pid)]
    names = [name for pid in watchdogs for name in strangers.local_names(pid)]
    with strangers.flood(addresses), strangers.local_flood(names, os.getuid()):
        time.sleep(0.5)
        os.kill(run.pid(1), signal.SIGSTOP)
        since = time.monotonic()
        while watchdogs_of(output) and time.monotonic() < since + 30:
            time.sleep(0.05)
        seconds = time.monotonic() - since
    said = run.end()
    assert "the others wait for rank 1" in said
    assert said.count("missing:") == 1
    assert "".join(line for line in said.splitlines() if "arrived:" in line).count("rank ") == 2
    assert seconds < TIMEOUT + SECONDS_MORE
