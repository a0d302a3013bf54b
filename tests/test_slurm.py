"""The gate of docs/recipes/slurm under a real slurmctld, with several slurmd on this host.

Nodes get the lines that gpubench prints for simulated machines. Each line is made once: ten nodes that run gpubench
at the same time need ten cores.
"""

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.cli.running import ROOT, gpubench

PROGRAMS = ("munged", "slurmctld", "slurmd", "scontrol", "srun", "sbatch")
MISSING = [program for program in PROGRAMS if shutil.which(program) is None]
SECONDS = 120
HEALTHY = ("--simulate", "hgx-h100-8")
LINKS_DOWN = (*HEALTHY, "--fault", "gpu3:nvlink=9")
BROKEN, LATE, ABSENT = "exec python3 -c 'import no_such_module'", "exit 124", "exit 127"
REASON = (
    "gpubench: (simulated) node0 GPU3: 9 of 18 NVLinks down (links 9-17). Try: nvidia-smi --gpu-reset -i 0000:19:00.0"
)
PROLOG, EPILOG = ".prolog_slurmd", ".epilog_slurmd"

ANSWERS = {
    "good": HEALTHY,
    "busy": (*HEALTHY, "--fault", "gpu3:busy=7"),
    "cpu": ("--replay", "nowhere"),
    "broken": BROKEN,
    "late": LATE,
    "absent": ABSENT,
    "links": LINKS_DOWN,
    "lost": (*HEALTHY, "--fault", "gpu3:lost=yes"),
    "silent": (*HEALTHY, "--fault", "node0:silent=nvml"),
    "before": HEALTHY,
    f"before{PROLOG}": LINKS_DOWN,
    "after": HEALTHY,
    f"after{EPILOG}": LINKS_DOWN,
    "theirs": HEALTHY,
}
"""By node, and by node and context of the script: the machine that gpubench judges, or what its program does."""

STAYING, DRAINED = ("good", "busy", "cpu", "broken", "late", "absent"), ("links", "lost", "silent")

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=nohold_on_prolog_fail
Prolog={folder}/gate.sh
Epilog={folder}/gate.sh
HealthCheckProgram={folder}/gate.sh
HealthCheckInterval=3
HealthCheckNodeState=ANY
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def answer(folder: Path, name: str, source: str | Sequence[str]) -> None:
    """Write what gpubench does on a node, as lines of a shell."""
    if not isinstance(source, str):
        result = gpubench("check", "--quick", *source, "--exit-style", "slurm")
        source = f"echo {shlex.quote(result.stdout.strip())}\nexit {result.returncode}"
    new = folder / "new"
    new.write_text(source + "\n")
    new.rename(folder / "answers" / name)


class Cluster:
    """A slurmctld and its nodes."""

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        self.folder, self._nodes = folder, nodes
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def write(self) -> None:
        for name in ("answers", "state", "tools"):
            (self.folder / name).mkdir()
        host, ports = socket.gethostname().partition(".")[0], free_ports(1 + len(self._nodes))
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 State=UNKNOWN"
            for node, port in zip(self._nodes, ports[1:], strict=True)
        )
        text = CONFIGURATION.format(host=host, port=ports[0], folder=self.folder, nodes=nodes)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o600)
        gate = (ROOT / "docs/recipes/slurm/gate.sh").read_text().replace("/opt/gpubench/bin", f"{self.folder}/tools")
        gate = gate.replace("LANG=", f"SLURM_CONF={self.folder}/slurm.conf LANG=")
        program = f"#!/bin/bash\ncd {self.folder}/answers\nnamed=$SLURMD_NODENAME.${{SLURM_SCRIPT_CONTEXT:-}}\n"
        program += '[[ -f $named ]] || named=$SLURMD_NODENAME\n. "./$named"\n'
        for path, script in ((self.folder / "gate.sh", gate), (self.folder / "tools" / "gpubench", program)):
            path.write_text(script)
            path.chmod(0o755)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        files = {name: str(self.folder / f"munge.{name}") for name in ("key", "socket", "pid", "log", "seed")}
        munge = ["munged", "--foreground", "--force", "--key-file", files["key"], "--socket", files["socket"]]
        munge += ["--pid-file", files["pid"], "--log-file", files["log"], "--seed-file", files["seed"]]
        daemons = [self._start("munged", *munge)]
        try:
            self.wait("the socket of munge", lambda: Path(files["socket"]).exists())
            daemons.append(self._start("slurmctld", "slurmctld", "-D"))
            daemons += [self._start(f"slurmd.{node}", "slurmd", "-D", "-N", node) for node in self._nodes]
            yield
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
            for daemon in daemons:
                daemon.wait(60)

    def _start(self, name: str, *command: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.out").open("wb") as output:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self.environment
            )

    def run(self, *command: str) -> str:
        words = list(command)
        result = subprocess.run(
            words, capture_output=True, text=True, check=False, env=self.environment, timeout=SECONDS
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def nodes(self) -> Mapping[str, tuple[str, str]]:
        """State and reason of each node."""
        result = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%N|%T|%500E"],
            capture_output=True,
            text=True,
            check=False,
            env=self.environment,
            timeout=SECONDS,
        )
        rows = (line.split("|", 2) for line in result.stdout.splitlines())
        return {name: (state.rstrip("*"), reason.strip()) for name, state, reason in rows}

    def wait(self, what: str, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not happened():
            assert time.monotonic() < deadline, f"{what} within {SECONDS} s: {self.nodes()}"
            time.sleep(0.3)

    def wait_for(self, node: str, state: str, reason: str) -> None:
        self.wait(f"{node} {state}: {reason}", lambda: self.nodes().get(node) == (state, reason))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    nodes = [name for name in ANSWERS if "." not in name]
    with tempfile.TemporaryDirectory(prefix="slurm-") as place:  # a short path: munge has a socket in it
        cluster = Cluster(Path(place), nodes)
        cluster.write()
        for name, source in ANSWERS.items():
            answer(cluster.folder, name, source)
        with cluster.running():
            for node in STAYING:
                cluster.wait_for(node, "idle", "none")
            yield cluster


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)} on this machine"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd runs jobs as root alone"),
]


def test_a_health_check_drains_faulty_nodes_with_the_whole_reason(cluster: Cluster) -> None:
    cluster.wait_for("links", "drained", REASON)
    cluster.wait_for("lost", "drained", "gpubench: (simulated) node0 GPU3: GPU is lost. Try: dmesg | grep Xid")
    silent = "gpubench: (simulated) node0, nvml: no answer (simulated). Try: dmesg | grep -i -E 'NVRM|Xid'"
    cluster.wait_for("silent", "drained", silent)


@pytest.mark.parametrize("node", STAYING)
def test_a_node_that_is_healthy_or_could_not_be_judged_runs_jobs_and_stays(node: str, cluster: Cluster) -> None:
    assert cluster.run("srun", "-w", node, "printenv", "SLURMD_NODENAME").strip() == node
    cluster.wait_for(node, "idle", "none")


def test_a_prolog_drains_the_node_before_the_job_starts(cluster: Cluster) -> None:
    marker = cluster.folder / "started"
    job = cluster.run("sbatch", "--parsable", "-w", "before", "-o", "/dev/null", "--wrap", f"touch {marker}").strip()
    cluster.wait_for("before", "drained", REASON)
    assert "JobState=PENDING" in cluster.run("scontrol", "show", "job", job)
    assert not marker.exists()


def test_an_epilog_drains_the_node_for_a_fault_that_is_new(cluster: Cluster) -> None:
    cluster.run("srun", "-w", "after", "true")
    cluster.wait_for("after", "drained", REASON)


def test_a_health_check_resumes_what_the_gate_drained_and_nothing_else(cluster: Cluster) -> None:
    cluster.wait_for("links", "drained", REASON)
    cluster.run("scontrol", "update", "NodeName=theirs", "State=DRAIN", "Reason=new disk")
    answer(cluster.folder, "links", HEALTHY)
    cluster.wait_for("links", "idle", "none")
    cluster.wait_for("theirs", "drained", "new disk")


@pytest.mark.parametrize("reason", ["gpubench: " + "x" * 245, "gpubench: a | b 'c' \"d\" $e %f `g` \\h = i, j"])
def test_slurm_keeps_a_reason_as_it_stands(reason: str, cluster: Cluster) -> None:
    cluster.run("scontrol", "update", "NodeName=theirs", "State=DRAIN", f"Reason={reason}")
    assert cluster.nodes()["theirs"][1] == reason
