"""Hosts on this machine: network namespaces on one switch, with ranks started by Open MPI's daemons.

Under load, Open MPI's daemons sometimes fail to start or to end a job, and busy-waiting ranks may take minutes. None of
this is tested: jobs without output and slow jobs are skipped, and a job that has printed the expected text is ended.
"""

import os
import shlex
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec import Struct

from gpubench.ranks.launch import Flavour, find_launcher
from tests.cli.running import PROGRAM, ROOT, environment

SECONDS_TO_SPEAK = 60
SECONDS_OF_A_HANG = 15
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl": "^ofi",  # spares each start a second
}
AGENT = """#!/bin/bash
# What Open MPI takes for ssh: drops its options, and runs the command in the namespace with that address.
while [[ "$1" == -* ]]; do shift; done
case $1 in {cases} esac
shift
exec ip netns exec $host unshare -u bash -c "hostname $host; $*"
"""


class Hosts(Struct, frozen=True):
    """Hosts on which `run` starts gpubench with `ranks` per host and `options` of mpirun."""

    names: tuple[str, ...]
    switch: str
    folder: Path
    ranks: int = 2
    options: str = ""
    program: Sequence[str] = PROGRAM

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(f"10.77.0.{number}" for number in range(1, len(self.names) + 1))

    def run(self, *arguments: str, until: str, **settings: str) -> str:
        """Return the output of a job up to its end or to the text `until`."""
        with self.job(*arguments, "--timeout", str(SECONDS_OF_A_HANG), **settings) as job:
            said = job.wait_for(until)
            if until not in said and job.process.poll() is None:
                pytest.skip(f"beside other work the job was slow: {said[-200:]!r}")
            return said

    def finish(self, *arguments: str, **settings: str) -> tuple[str, int]:
        """Return the output of a job and mpirun's exit code."""
        with self.job(*arguments, **settings) as job:
            return job.finish()

    def alone(self, *arguments: str) -> str:
        """Return the output of one gpubench on the first host, which starts its ranks itself."""
        settings = ENVIRONMENT | {"PRTE_MCA_plm_ssh_agent": str(self.agent())}
        script = f"hostname {self.names[0]}; exec {shlex.join([*self.program, *arguments])}"
        ended = subprocess.run(
            ["ip", "netns", "exec", self.names[0], "unshare", "-u", "bash", "-c", script],
            capture_output=True, text=True, cwd=ROOT, check=False,
            env=environment(**settings), timeout=2 * SECONDS_TO_SPEAK,
        )  # fmt: skip
        return ended.stderr + ended.stdout

    @contextmanager
    def job(self, *arguments: str, **settings: str) -> Iterator["HostJob"]:
        """Start a job, and end it when the context exits."""
        places = ",".join(f"{address}:{self.ranks}" for address in self.addresses)
        exports = " ".join(f"-x {name}" for name in settings)
        agent = f"{find_launcher().path} --prtemca plm_ssh_agent {self.agent()}"
        mpirun = f"{agent} --host {places} -n {self.ranks * len(self.names)} {exports} {self.options}"
        ranks = shlex.join([*self.program, *arguments])
        script = f"hostname {self.names[0]}; exec {mpirun} {ranks}"
        printed = self.folder / "printed"
        with printed.open("w") as stream:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[0], "unshare", "-u", "bash", "-c", script],
                stdout=stream, stderr=stream, cwd=ROOT,
                env=environment(**ENVIRONMENT, **settings),
            )  # fmt: skip
            try:
                yield HostJob(process, printed)
            finally:
                self.kill()
                process.kill()
                process.wait()

    def on_switch(self, *words: str) -> None:
        """Run `ip` or `tc` on the switch, whose ports are port0, port1, ..."""
        command("ip", "netns", "exec", self.switch, *words)

    def pids(self, host: int) -> list[int]:
        name = self.names[host]
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout
        return [int(pid) for pid in found.split()]

    def agent(self) -> Path:
        path = self.folder / "agent"
        pairs = zip(self.addresses, self.names, strict=True)
        path.write_text(AGENT.format(cases=" ".join(f"{address}) host={name};;" for address, name in pairs)))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def kill(self) -> None:
        for name in self.names:
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
            subprocess.run(["kill", "-9", *pids.split()], check=False, capture_output=True)


@dataclass(frozen=True)
class HostJob:
    """A job on these hosts, and the file with its output."""

    process: "subprocess.Popen[bytes]"
    printed: Path

    def wait_for(self, text: str, seconds: float = SECONDS_TO_SPEAK) -> str:
        """Return the output up to its end, to a text, or to a time limit."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and text not in self.printed.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        said = self.printed.read_text()
        if "gpubench" not in said:
            pytest.skip(f"Open MPI's daemons started no job in {SECONDS_TO_SPEAK} s: {said[-200:]!r}")
        return said

    def finish(self) -> tuple[str, int]:
        """Return the output and mpirun's exit code."""
        try:
            code = self.process.wait(SECONDS_TO_SPEAK)
        except subprocess.TimeoutExpired:
            said = self.printed.read_text()[-200:]
            pytest.skip(f"Open MPI's daemons did not end the job in {SECONDS_TO_SPEAK} s: {said!r}")
        return self.wait_for("gpubench"), code


@contextmanager
def connected(count: int, folder: Path) -> Iterator[Hosts]:
    """Create hosts, each with a cable to a switch in another namespace."""
    if os.geteuid() != 0 or not shutil.which("ip") or find_launcher().flavour is not Flavour.OPEN_MPI:
        pytest.skip("needs root, iproute2 and Open MPI")
    switch = f"gs{os.getpid()}"
    hosts = Hosts(tuple(f"g{letter}{os.getpid()}" for letter in "abcdefgh"[:count]), switch, folder)
    try:
        command("ip", "netns", "add", switch)
    except subprocess.CalledProcessError:
        pytest.skip("network namespaces are not allowed here")
    try:
        command("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        command("ip", "-n", switch, "link", "set", "bridge", "up")
        for number, (name, address) in enumerate(zip(hosts.names, hosts.addresses, strict=True)):
            command("ip", "netns", "add", name)
            ends = ("eth0", "netns", name, "type", "veth", "peer", f"port{number}", "netns", switch)
            command("ip", "link", "add", *ends)
            command("ip", "-n", switch, "link", "set", f"port{number}", "master", "bridge", "up")
            command("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                command("ip", "-n", name, "link", "set", device, "up")
        yield hosts
    finally:
        for name in (*hosts.names, switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
