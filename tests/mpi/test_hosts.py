"""Two real hosts on this machine: network namespaces with a cable between them, ranks started by Open MPI's daemons."""

import csv
import io
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpubench.hardware.launcher import Flavour, find_launcher
from gpubench.hardware.mpi import host_name
from tests.cli.running import INJECT, ROOT, environment

pytestmark = pytest.mark.mpi

Run = Callable[..., subprocess.CompletedProcess[str]]

AGENT = """#!/bin/bash
# What Open MPI takes for ssh: drops its options, and runs the command in the namespace with that address.
while [[ "$1" == -* ]]; do shift; done
case $1 in {addresses[0]}) host={hosts[0]};; *) host={hosts[1]};; esac
shift
exec ip netns exec $host unshare -u bash -c "hostname $host; $*"
"""


def command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[Run]:
    """Runs gpubench with two ranks on each of two hosts."""
    if os.geteuid() != 0 or not shutil.which("ip") or find_launcher().flavour is not Flavour.OPEN_MPI:
        pytest.skip("needs root, iproute2 and Open MPI")
    hosts = (f"ga{os.getpid()}", f"gb{os.getpid()}")
    addresses = ("10.77.0.1", "10.77.0.2")
    try:
        command("ip", "netns", "add", hosts[0])
    except subprocess.CalledProcessError:
        pytest.skip("network namespaces are not allowed here")
    try:
        command("ip", "netns", "add", hosts[1])
        command("ip", "link", "add", "eth0", "netns", hosts[0], "type", "veth", "peer", "eth0", "netns", hosts[1])
        for host, address in zip(hosts, addresses, strict=True):
            command("ip", "-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                command("ip", "-n", host, "link", "set", device, "up")
        agent = tmp_path / "agent"
        agent.write_text(AGENT.format(addresses=addresses, hosts=hosts))
        agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
        yield lambda *arguments, **settings: launch(agent, hosts, addresses, arguments, settings)
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


def launch(
    agent: Path,
    hosts: tuple[str, str],
    addresses: tuple[str, str],
    arguments: tuple[str, ...],
    settings: dict[str, str],
) -> subprocess.CompletedProcess[str]:
    places = ",".join(f"{address}:2" for address in addresses)
    exports = " ".join(f"-x {name}" for name in settings)
    mpirun = f"{find_launcher().path} --prtemca plm_ssh_agent {agent} --host {places} -n 4 {exports}"
    script = f"hostname {hosts[0]}; exec {mpirun} {sys.executable} -m gpubench {' '.join(arguments)}"
    return subprocess.run(
        ["ip", "netns", "exec", hosts[0], "unshare", "-u", "bash", "-c", script],
        capture_output=True, text=True, check=False, timeout=100, cwd=ROOT,
        env=environment(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", **settings),
    )  # fmt: skip


def test_ranks_of_two_hosts_are_one_job(two_hosts: Run, tmp_path: Path) -> None:
    output = tmp_path / "result.csv"
    result = two_hosts("allreduce", "--sizes", "1K,64K", "--iters", "3", "--output", str(output))
    assert result.returncode == 0, result.stderr
    assert "4 ranks on 2 hosts" in result.stdout
    assert f"rank 2-3 on gb{os.getpid()}" in result.stdout
    rows = list(csv.DictReader(io.StringIO(output.read_text())))
    assert {(row["ranks"], row["nodes"], row["wrong"]) for row in rows} == {("4", "2", "0")}


def test_a_rank_that_breaks_is_named_with_its_host(two_hosts: Run) -> None:
    fault = {"PYTHONPATH": f"{INJECT}{os.pathsep}{ROOT}", "GPUBENCH_TEST_FAULT": "3:raise"}
    result = two_hosts("allreduce", "--sizes", "1K:64K", "--iters", "3", **fault)
    assert result.returncode == 3
    assert f"rank 3 on gb{os.getpid()}: RuntimeError: planted in a test" in result.stderr
    assert host_name() not in result.stderr.partition("RuntimeError")[0]
