"""Strangers on the hosts and the network of a job do not change its verdict."""

import os
import signal
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.mpi.hosts import command, connected
from tests.mpi.test_faults import LONG, MPIRUN, start, watchdogs_of
from tests.mpi.test_host_faults import TIMEOUT, WORDS
from tests.ranks.watchdog import strangers

pytestmark = pytest.mark.mpi


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "result.json"


def test_neither_killed_watchdogs_nor_a_flood_of_the_next_hide_a_stopped_rank(output: Path) -> None:
    run = start(MPIRUN, output, *LONG, "--timeout", "2", ranks=3)
    run.wait_for_rows(1)
    killed = watchdogs_of(output)
    assert len(killed) == 3
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 300
    while len(watchdogs := watchdogs_of(output)) < 3 or set(watchdogs) & set(killed):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    addresses = [address for pid in watchdogs for address in strangers.tcp_addresses(pid)]
    names = [name for pid in watchdogs for name in strangers.local_names(pid)]
    os.kill(run.pid(1), signal.SIGSTOP)
    time.sleep(0.5)  # longer than watchdogs wait before they query each other
    with strangers.flood(addresses), strangers.local_flood(names, os.getuid()):
        deadline = time.monotonic() + 120
        while watchdogs_of(output) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert watchdogs_of(output) == [], "they wait as long as the flood lasts"
    said = run.end()
    assert "the others wait for rank 1" in said
    assert said.count("missing:") == 1
    assert "".join(line for line in said.splitlines() if "arrived:" in line).count("rank ") == 2


def test_watchdogs_that_a_firewall_parts_say_so_and_hear_no_bridge(tmp_path: Path) -> None:
    """Each host also has a container bridge with the same address, which Open MPI must not use."""
    output = tmp_path / "result.json"
    with connected(2, tmp_path) as two:
        hosts = replace(two, ranks=1)
        for name in hosts.names:
            command("ip", "-n", name, "link", "add", "docker0", "type", "bridge")
            command("ip", "-n", name, "addr", "add", "172.17.0.1/16", "dev", "docker0")
            command("ip", "-n", name, "link", "set", "docker0", "up")
        with hosts.job(
            *WORDS, "--sizes", "8K", "--iters", "100000", f"--output={output}", OMPI_MCA_btl_tcp_if_include="eth0"
        ) as job:
            deadline = time.monotonic() + 300
            while len(watchdogs := watchdogs_of(output)) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            heard = [address for pid in watchdogs for address in strangers.tcp_addresses(pid)]
            for name in hosts.names:
                for _, port in heard:
                    command("ip", "-n", name, "rule", "add", "ipproto", "tcp", "dport", str(port), "blackhole")
            for pid in watchdogs:  # the new watchdogs have to connect again
                os.kill(pid, signal.SIGKILL)
            said = job.wait_for("do not answer")
    assert sorted(address for address, _ in heard) == sorted(hosts.addresses)
    assert f"note: the watchdogs of rank 1 on {hosts.names[1]} do not answer the watchdog of rank 0" in said
    assert f"A hang is noticed after 60 s, not after {TIMEOUT} s" in said
