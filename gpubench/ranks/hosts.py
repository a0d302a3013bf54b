"""Check which hosts can start gpubench, before `launch.py` starts ranks there.

mpirun names only the first host that it cannot reach, and waits two minutes for a host that is off.
"""

import re
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from gpubench import __version__
from gpubench.machine.children import module_command

AGENTS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC")
"""Variables that name the program by which an mpirun reaches hosts, in the place of ssh."""

_OF_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "HYDRA_LAUNCHER")
"""Variables of jobs in which mpirun starts ranks without ssh."""

_SECONDS_TO_CONNECT = 10
_SECONDS_TO_ANSWER = 30.0  # Python starts from a busy network file system in up to ten seconds
_MOST_AT_ONCE = 64
_LAST_CHARACTERS = 200


class Silence(NamedTuple):
    """Why gpubench does not start on a host: symptom, likely cause, and a command to find out more."""

    seen: str
    cause: str
    command: str


_UNKNOWN = Silence("unknown host name", "a misspelt name, or DNS does not have it", "getent hosts {host}")
_REFUSED = Silence("connection refused", "no ssh server runs there", "ssh {host} true")
_NO_KEY = Silence("no ssh key of this user is accepted", "the public key is not on that host", "ssh-copy-id {host}")
_NEW_KEY = Silence("its ssh host key is unknown", "a new host, or a reinstalled one", "ssh {host} true")
_NO_ROUTE = Silence("not reachable", "the host is off, or a firewall drops the connection", "ping -c 3 {host}")
_LATE = Silence(f"no answer in {_SECONDS_TO_ANSWER:.0f} s", "the host or its file system hangs", "ssh {host} uptime")
_ABSENT = Silence("no gpubench there", "it is not installed at the same path as here", "ssh {host} {program}")

_SAID = (
    (r"could not resolve|name or service not known|name resolution|unknown host", _UNKNOWN),
    (r"connection refused", _REFUSED),
    (r"host key verification failed|host identification has changed", _NEW_KEY),
    (r"permission denied|too many authentication failures", _NO_KEY),
    (r"timed out|no route to host|network is unreachable|host is down", _NO_ROUTE),
    (r"no such file or directory|no module named|command not found", _ABSENT),
)
"""What ssh and shells print, and what it means."""


def silent_hosts(hosts: Sequence[str], environment: Mapping[str, str]) -> dict[str, Silence]:
    """Return the hosts on which mpirun cannot start gpubench, with reasons.

    Empty in an allocation, because mpirun needs no ssh there.
    """
    if any(name in environment for name in _OF_ALLOCATIONS):
        return {}
    agent = next((environment[name] for name in AGENTS if environment.get(name)), "ssh")
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        answers = pool.map(partial(_silence_of, shlex.split(agent), environment), hosts)
        return {host: silence for host, silence in zip(hosts, answers, strict=True) if silence is not None}


def _silence_of(agent: Sequence[str], environment: Mapping[str, str], host: str) -> Silence | None:
    if _is_this_host(host):
        return None
    program = shlex.join(module_command("gpubench", "--version"))
    is_ssh = agent[0].rpartition("/")[2] == "ssh"
    options = ["-x", "-oBatchMode=yes", f"-oConnectTimeout={_SECONDS_TO_CONNECT}"] if is_ssh else []
    try:
        answer = subprocess.run(
            [*agent, *options, host, program],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS_TO_ANSWER,
            check=False,
        )
    except FileNotFoundError:
        return None  # mpirun says which program it needs
    except subprocess.TimeoutExpired:
        return _for_host(_LATE, host, program)
    return why_silent(host, answer.returncode, answer.stdout, answer.stderr)


def why_silent(host: str, exit_code: int, stdout: str, stderr: str) -> Silence | None:
    """Explain the output of `gpubench --version` on a host. None if it has the same version as this host."""
    program = shlex.join(module_command("gpubench", "--version"))
    versions = re.findall(r"^gpubench (\S+)$", stdout, re.MULTILINE)
    if __version__ in versions:
        return None
    if versions:
        seen = f"gpubench {versions[0]} there, and {__version__} here"
        other = Silence(seen, "installations differ", _ABSENT.command)
        return _for_host(other, host, program)
    for pattern, silence in _SAID:
        if re.search(pattern, stderr, re.IGNORECASE):
            return _for_host(silence, host, program)
    lines = stderr.split("\n") if stderr.strip() else stdout.split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")[:_LAST_CHARACTERS]
    seen = f"exit code {exit_code}" + (f": {last}" if last else "")
    return _for_host(Silence(seen, "gpubench does not start there", _ABSENT.command), host, program)


def _for_host(silence: Silence, host: str, program: str) -> Silence:
    return silence._replace(command=silence.command.format(host=host, program=shlex.quote(program)))


def _is_this_host(host: str) -> bool:
    """True if a name belongs to this host, where mpirun needs no ssh."""
    if host in ("localhost", socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as own:
            own.bind(address)
    except OSError:
        return False
    # All of 127.0.0.0/8 can be bound, and Open MPI takes 127.0.0.1 alone for its own host.
    return not str(address[0]).startswith("127.") or address[0] == "127.0.0.1"
