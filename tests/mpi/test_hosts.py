"""Two real hosts on this machine: network namespaces with a cable between them, ranks started by Open MPI's daemons.

Under load Open MPI's daemons sometimes fail to start a job, or to end an aborted one. That is not what is tested here:
a job of which no rank ever spoke is skipped, and one that has said what it should is ended.
"""

import csv
import io
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpubench.hardware.launcher import Flavour, find_launcher
from gpubench.hardware.mpi import host_name
from tests.cli.running import INJECT, ROOT, environment

pytestmark = pytest.mark.mpi

SECONDS_TO_SPEAK = 60
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # Two ranks a host are no more than it has places for, so they would spin; but both hosts share these cores.
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
ADDRESSES = ("10.77.0.1", "10.77.0.2")
AGENT = """#!/bin/bash
# What Open MPI takes for ssh: drops its options, and runs the command in the namespace with that address.
while [[ "$1" == -* ]]; do shift; done
case $1 in {addresses[0]}) host={hosts[0]};; *) host={hosts[1]};; esac
shift
exec ip netns exec $host unshare -u bash -c "hostname $host; $*"
"""


@dataclass(frozen=True)
class Hosts:
    """Two hosts, on which `run` starts gpubench with two ranks each."""

    names: tuple[str, str]
    folder: Path

    def run(self, *arguments: str, until: str, **settings: str) -> str:
        """What the job printed, up to its end or to the text `until`."""
        places = ",".join(f"{address}:2" for address in ADDRESSES)
        exports = " ".join(f"-x {name}" for name in settings)
        mpirun = f"{find_launcher().path} --prtemca plm_ssh_agent {self.agent()} --host {places} -n 4 {exports}"
        script = f"hostname {self.names[0]}; exec {mpirun} {sys.executable} -m gpubench {' '.join(arguments)}"
        printed = self.folder / "printed"
        with printed.open("w") as stream:
            job = subprocess.Popen(
                ["ip", "netns", "exec", self.names[0], "unshare", "-u", "bash", "-c", script],
                stdout=stream, stderr=stream, cwd=ROOT,
                env=environment(**ENVIRONMENT, **settings),
            )  # fmt: skip
            deadline = time.monotonic() + SECONDS_TO_SPEAK
            while job.poll() is None and until not in printed.read_text() and time.monotonic() < deadline:
                time.sleep(0.1)
            self.kill()
            job.kill()
            job.wait()
        text = printed.read_text()
        if "gpubench" not in text:
            pytest.skip(f"Open MPI's daemons started no job in {SECONDS_TO_SPEAK} s: {text[-200:]!r}")
        return text

    def agent(self) -> Path:
        path = self.folder / "agent"
        path.write_text(AGENT.format(addresses=ADDRESSES, hosts=self.names))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def kill(self) -> None:
        for name in self.names:
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
            subprocess.run(["kill", "-9", *pids.split()], check=False, capture_output=True)


def command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if os.geteuid() != 0 or not shutil.which("ip") or find_launcher().flavour is not Flavour.OPEN_MPI:
        pytest.skip("needs root, iproute2 and Open MPI")
    names = (f"ga{os.getpid()}", f"gb{os.getpid()}")
    try:
        command("ip", "netns", "add", names[0])
    except subprocess.CalledProcessError:
        pytest.skip("network namespaces are not allowed here")
    try:
        command("ip", "netns", "add", names[1])
        command("ip", "link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "eth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            command("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                command("ip", "-n", name, "link", "set", device, "up")
        yield Hosts(names, tmp_path)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_ranks_of_two_hosts_are_one_job(hosts: Hosts, tmp_path: Path) -> None:
    output = tmp_path / "result.csv"
    text = hosts.run("allreduce", "--sizes", "1K,64K", "--iters", "3", "--output", str(output), until="verdict:")
    assert "4 ranks on 2 hosts" in text
    assert f"rank 2-3 on {hosts.names[1]}" in text
    assert "verdict: PASS" in text
    rows = list(csv.DictReader(io.StringIO(output.read_text())))
    assert {(row["ranks"], row["nodes"], row["wrong"]) for row in rows} == {("4", "2", "0")}


def test_a_rank_that_breaks_is_named_with_its_host(hosts: Hosts) -> None:
    fault = {"PYTHONPATH": f"{INJECT}{os.pathsep}{ROOT}", "GPUBENCH_TEST_FAULT": "3:raise"}
    said = f"rank 3 on {hosts.names[1]}: RuntimeError: planted in a test"
    text = hosts.run("allreduce", "--sizes", "1K:64K", "--iters", "3", until=said, **fault)
    assert said in text
    assert host_name() not in text.partition("RuntimeError")[0]
