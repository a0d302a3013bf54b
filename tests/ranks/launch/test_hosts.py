"""Hosts of `check --hosts` on which gpubench does not start, with reasons, also with a real ssh."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpubench import __version__
from gpubench.ranks.launch import AGENTS, silent_hosts, why_silent

SAID = (
    ("ssh: Could not resolve hostname n1: Name or service not known", 255, "unknown host name"),
    ("ssh: Could not resolve hostname n1: Temporary failure in name resolution", 255, "unknown host name"),
    ("ssh: connect to host n1 port 22: Connection refused", 255, "connection refused"),
    ("root@n1: Permission denied (publickey,password).", 255, "no ssh key of this user is accepted"),
    ("No ED25519 host key is known for n1 and ...\nHost key verification failed.", 255, "its ssh host key is unknown"),
    ("ssh: connect to host n1 port 22: Connection timed out", 255, "not reachable"),
    ("ssh: connect to host n1 port 22: No route to host", 255, "not reachable"),
    ("bash: line 1: /opt/gpubench/bin/python3: No such file or directory", 127, "no gpubench there"),
    ("/usr/bin/python3: No module named gpubench", 1, "no gpubench there"),
    ("Traceback:\nImportError: libc.so.6: version `GLIBC_2.38'", 1, "exit code 1: ImportError: libc.so.6: version"),
    ("", 137, "exit code 137"),
)
"""The output of ssh or the remote shell, and what gpubench reports."""


@pytest.mark.parametrize(("stderr", "code", "seen"), SAID, ids=[seen for _, _, seen in SAID])
def test_what_ssh_prints_becomes_a_reason(stderr: str, code: int, seen: str) -> None:
    silence = why_silent("n1", code, "", stderr)
    assert silence is not None
    assert silence.seen.startswith(seen)
    assert "n1" in silence.command
    assert silence.cause


def test_a_host_with_the_same_gpubench_answers_and_one_with_another_does_not() -> None:
    banner = "Welcome to n1\n"
    assert why_silent("n1", 0, f"{banner}gpubench {__version__}\n", "a warning") is None
    silence = why_silent("n1", 0, "gpubench 0.0.1\n", "")
    assert silence is not None
    assert silence.seen == f"gpubench 0.0.1 there, and {__version__} here"


def test_hosts_of_an_allocation_and_this_host_need_no_ssh() -> None:
    agent = {AGENTS[0]: "false"}
    assert silent_hosts(["n1"], {"SLURM_JOB_ID": "7", **agent}) == {}
    assert silent_hosts(["localhost", "127.0.0.1", socket.gethostname()], agent) == {}
    assert silent_hosts(["127.0.0.9"], agent)["127.0.0.9"].seen == "exit code 1"
    assert silent_hosts(["n1"], {AGENTS[0]: "/nowhere/ssh"}) == {}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


HERE = f"ForceCommand echo gpubench {__version__}"
SERVERS: Mapping[str, tuple[str, ...]] = {
    "good": (HERE,),
    "keyless": (HERE, "AuthorizedKeysFile /dev/null"),
    "bare": ("ForceCommand /opt/no/such/python3",),
}
"""Hosts whose ssh server runs on a port of this machine, with extra configuration lines."""


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[str]:
    """An ssh client that knows these hosts, one with a closed port, and one with a new host key."""
    for key in ("host", "user"):
        made = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / key)]
        subprocess.run(made, check=True, timeout=60)
    shutil.copy(tmp_path / "user.pub", tmp_path / "authorized")
    Path("/run/sshd").mkdir(exist_ok=True)
    key = (tmp_path / "host.pub").read_text()
    with ExitStack() as servers:
        ports = {name: free_port() for name in (*SERVERS, "closed")}
        for name, lines in SERVERS.items():
            own = [f"Port {ports[name]}", "ListenAddress 127.0.0.1", f"HostKey {tmp_path}/host", "StrictModes no"]
            own += ["PasswordAuthentication no", "UsePAM no", "PermitRootLogin yes", f"PidFile {tmp_path}/{name}.pid"]
            own += [
                *lines,
                *([] if "AuthorizedKeysFile" in " ".join(lines) else [f"AuthorizedKeysFile {tmp_path}/authorized"]),
            ]
            (tmp_path / f"{name}.conf").write_text("\n".join(own) + "\n")
            program = [shutil.which("sshd") or "sshd", "-D", "-e", "-f", str(tmp_path / f"{name}.conf")]
            server = subprocess.Popen(program, stderr=subprocess.DEVNULL)
            servers.callback(server.wait)
            servers.callback(server.terminate)
        ports["stranger"] = ports["good"]
        config = [
            f"IdentityFile {tmp_path}/user",
            f"UserKnownHostsFile {tmp_path}/known",
            "GlobalKnownHostsFile /dev/null",
        ]
        for name, port in ports.items():
            config += [f"Host {name}", "  HostName 127.0.0.1", f"  Port {port}", f"  HostKeyAlias {name}"]
        (tmp_path / "config").write_text("\n".join(config) + "\n")
        known = (f"{name} {key}" for name in ports if name != "stranger")
        (tmp_path / "known").write_text("".join(known))
        wait_for(*(ports[name] for name in SERVERS))
        yield f"ssh -F {tmp_path}/config"


def wait_for(*ports: int) -> None:
    deadline = time.monotonic() + 60
    for port in ports:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.skipif(os.geteuid() != 0, reason="an ssh server for this test needs root")
@pytest.mark.skipif(shutil.which("sshd") is None or shutil.which("ssh-keygen") is None, reason="no sshd here")
def test_a_real_ssh_says_of_each_host_why_it_is_silent(ssh: str) -> None:
    hosts = ["good", "keyless", "bare", "closed", "stranger", "no-such-host.invalid"]
    found = silent_hosts(hosts, {**os.environ, AGENTS[0]: ssh})
    assert {host: silence.seen for host, silence in found.items()} == {
        "keyless": "no ssh key of this user is accepted",
        "bare": "no gpubench there",
        "closed": "connection refused",
        "stranger": "its ssh host key is unknown",
        "no-such-host.invalid": "unknown host name",
    }
