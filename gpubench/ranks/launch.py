"""Launch gpubench as ranks with mpirun or srun, and find out on which hosts it cannot start."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from msgspec import Struct

from gpubench import __version__
from gpubench.errors import CouldNotMeasureError, UsageError, missing_mpi_launcher, unusable_mpi_launcher
from gpubench.machine.children import die_with_parent, module_command, package_environment
from gpubench.model.facts.environment import CHANNEL_VARIABLE, DEFAULTS_VARIABLE, NO_DEFAULTS_TO_READ, strip_launcher
from gpubench.readers.documents import open_file

# Names of the environment variables that gpubench, not the user, set for its ranks
OWN_SETTINGS_VARIABLE = "GPUBENCH_SETTINGS"


def own_settings(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the environment variables that gpubench itself set for this rank."""
    return environment.get(OWN_SETTINGS_VARIABLE, "").split(",")


_SECONDS_TO_ANSWER = 20

_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_OPEN_MPI_SETTINGS = {
    **_AS_ROOT,
    # Allow more ranks than cores. Bind no rank to a core, because the threads of NCCL and MPI would share it. Open MPI
    # 4 reads the OMPI variables, Open MPI 5 the PRTE ones.
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    # All ranks are on this host, and Open MPI 5 needs a second to look for fabrics.
    "OMPI_MCA_btl": "^ofi",
    # In mpirun, hwloc's plugins start OpenCL, X11 or CUDA to list GPUs, which gpubench does not need. Names of plugins
    # that are not installed are ignored (hwloc manual, "Components and plugins").
    "HWLOC_COMPONENTS": "-gl,-opencl,-cuda,-nvml,-rsmi,-levelzero",
}

# Settings for jobs that use MPI but do not measure it.
_AGREEMENT_SETTINGS = {
    # Every Open MPI can run ob1 over shared memory. Without this setting, it first looks for fabrics (UCX, libfabric,
    # PSM).
    "OMPI_MCA_pml": "ob1",
    # In containers without ptrace, copying from another process's memory fails.
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}
_TRANSPORT_VARIABLES = ("OMPI_MCA_pml", "OMPI_MCA_mtl", "OMPI_MCA_btl")


class Flavour(StrEnum):
    OPEN_MPI = "Open MPI"
    MPICH = "MPICH"


class Launcher(Struct, frozen=True):
    path: str
    flavour: Flavour

    def command(self, ranks: int, arguments: Sequence[str]) -> list[str]:
        return [self.path, "-n", str(ranks), *module_command("gpubench", *arguments)]

    def environment(
        self,
        outer: Mapping[str, str],
        channel: str,
        also: Mapping[str, str] | None = None,
        *,
        measures_mpi: bool = True,
    ) -> dict[str, str]:
        """Return the environment for ranks on this host. The user's variables override gpubench's settings and
        `also`.
        """
        inner = strip_launcher(outer)
        settings = _OPEN_MPI_SETTINGS if self.flavour is Flavour.OPEN_MPI else {}
        if settings and not measures_mpi and not any(name in inner for name in _TRANSPORT_VARIABLES):
            settings = settings | _AGREEMENT_SETTINGS
        own = {name: value for name, value in {**settings, **(also or {})}.items() if name not in inner}
        return package_environment(inner | own | {CHANNEL_VARIABLE: channel, OWN_SETTINGS_VARIABLE: ",".join(own)})

    def host_environment(self, outer: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for ranks on several hosts: the user's variables, plus Open MPI's permission to
        run as root.
        """
        return (_AS_ROOT if self.flavour is Flavour.OPEN_MPI else {}) | dict(outer)


def find_launcher(search_path: str | None = None) -> Launcher:
    """Return the mpirun next to this Python interpreter, or else the first one on PATH.

    Raise CouldNotMeasureError if there is none.
    """
    own = Path(sysconfig.get_path("scripts")) / "mpirun"
    path = str(own) if os.access(own, os.X_OK) else shutil.which("mpirun", path=search_path)
    if path is None:
        raise missing_mpi_launcher()
    return Launcher(path, _flavour(path))


def _flavour(path: str) -> Flavour:
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_SECONDS_TO_ANSWER, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise unusable_mpi_launcher(path, str(error)) from error
    if "Open MPI" in answer or "OpenRTE" in answer:
        return Flavour.OPEN_MPI
    if "HYDRA" in answer or "MPICH" in answer:
        return Flavour.MPICH
    raise unusable_mpi_launcher(path, answer.strip()[:80])


# Exit code of Open MPI 5's prterun if its daemon fails to start, which happens in one of several hundred runs
DAEMON_FAILED = 213


def start(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | int = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    """Start a job in a new session, so that Ctrl-C interrupts only gpubench and not the ranks."""
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def stop(job: subprocess.Popen[bytes], seconds_to_end: float = 3.0) -> int:
    """Terminate mpirun and return its exit code. If it does not exit in time, kill it and its ranks."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(seconds_to_end)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
    return job.wait()


_MOST_BYTES = 2**20
_MOST_HOSTS = 65536
_LINE = re.compile(
    r"(?P<host>[A-Za-z0-9_][A-Za-z0-9_.-]{0,252})(?:(?::|\s+slots=)(?P<slots>[1-9][0-9]{0,4}))?(?:\s+max[-_]slots=[0-9]+)?",
    re.ASCII,
)
# srun's PMI plugins in order of preference. A version suffix counts too, as in pmix_v4
_PMI = ("pmix", "pmi2", "cray_shasta", "pmi")

_MOST_LINES_KEPT = 200
_SECONDS_FOR_LAST_LINES = 2.0  # A process that outlives the launcher may keep its stderr open forever
_EXPECTED = "a file with one host per line, as for mpirun --hostfile: node1, or node1 slots=8"


def read_hosts(text: str) -> dict[str, int | None]:
    """Return the slots of each host that --hosts names, in a hostfile or separated by commas. Raise UsageError."""
    if not text:
        raise UsageError(
            "--hosts without a value",
            expected=f"{_EXPECTED}, or node1,node2:8",
            reason="the variable is probably not set, so only this machine would be measured",
        )
    if "/" in text or Path(text).exists():
        return read_hostfile(Path(text))
    entries = [entry.strip() for entry in text.split(",")]
    return _parse_hosts(entries, text, "hosts separated by commas, such as node1,node2:8, or the name of a file")


def read_hostfile(path: Path) -> dict[str, int | None]:
    """Parse a hostfile with `node1 slots=8`, `node1:8` or `node1` per line, and return the slots per host.

    Raise UsageError if the file is missing or malformed.
    """
    try:
        with open_file(path, _EXPECTED) as file:
            text = file.read(_MOST_BYTES + 1).decode()
    except UnicodeDecodeError:
        raise UsageError(f"--hosts {path} is not a text file", expected=_EXPECTED) from None
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise UsageError(
            f"--hosts {path} {'does not exist' if missing else f'cannot be read: {error.strerror}'}",
            expected=_EXPECTED,
            reason="a host name, but a file is expected"
            if missing
            else "its owner or mode forbids it, or it is a folder",
            next_step="printf 'node1\\nnode2\\n' > hosts.txt, then --hosts hosts.txt",
        ) from None
    lines = filter(None, (line.partition("#")[0].strip() for line in text.splitlines()))
    return _parse_hosts(lines, path, _EXPECTED)


def _parse_hosts(entries: Iterable[str], source: Path | str, expected: str) -> dict[str, int | None]:
    """Return the slots per host. As for mpirun, a host that appears several times has the sum of their slots."""
    found: dict[str, list[int | None]] = {}
    for entry in entries:
        match = _LINE.fullmatch(entry)
        if match is None or len(found) == _MOST_HOSTS:
            seen = f"{entry[:80]!r} is not a host name" if match is None else "too many hosts"
            raise UsageError(f"--hosts {source}: {seen}", expected=expected)
        found.setdefault(match["host"], []).append(None if match["slots"] is None else int(match["slots"]))
    if not found:
        raise UsageError(f"--hosts {source}: no host", expected=expected)
    # A batch system lists a host once per core, and then a host with one line has one slot.
    counted = any(len(slots) > 1 for slots in found.values())
    return {host: sum(each or 1 for each in slots) if counted else slots[0] for host, slots in found.items()}


def mpirun_command(
    mpirun: Launcher,
    hosts: Sequence[str],
    ranks_per_host: int,
    arguments: Sequence[str],
    variables: Iterable[str] = (),
) -> list[str]:
    """Return the mpirun command for several hosts, whose ranks get these environment variables.

    It binds no rank to a core, because NCCL and MPI start threads too.
    """
    ranks = str(len(hosts) * ranks_per_host)
    if mpirun.flavour is Flavour.MPICH:
        placed = ["-hosts", ",".join(hosts), "-ppn", str(ranks_per_host), "-bind-to", "none"]
        placed += ["-genv", DEFAULTS_VARIABLE, NO_DEFAULTS_TO_READ]
    else:
        slots = ",".join(f"{host}:{ranks_per_host}" for host in hosts)
        placed = ["--host", slots, "--map-by", f"ppr:{ranks_per_host}:node:OVERSUBSCRIBE", "--bind-to", "none"]
        placed += ["-x", f"{DEFAULTS_VARIABLE}={NO_DEFAULTS_TO_READ}"]
        placed += [word for name in variables for word in ("-x", name)]  # MPICH hands on all variables
    return [mpirun.path, "-n", ranks, *placed, *module_command("gpubench", *arguments)]


class EndedJob(NamedTuple):
    """A launcher's exit code, its complete stdout, and the last lines of its stderr."""

    exit_code: int
    stdout: str
    stderr: Sequence[str]


def run_to_its_end(command: Sequence[str], environment: Mapping[str, str], show: Callable[[str], None]) -> EndedJob:
    """Run a launcher until it exits, and pass each line of its stderr to `show`. Stop the job if this call is
    interrupted.
    """
    own = package_environment({**environment, DEFAULTS_VARIABLE: NO_DEFAULTS_TO_READ})
    last = deque[str](maxlen=_MOST_LINES_KEPT)

    def forward(stderr: IO[bytes]) -> None:
        for line in stderr:
            last.append(line.decode(errors="replace").rstrip("\r\n"))
            show(last[-1])

    with tempfile.TemporaryFile() as stdout:
        process = subprocess.Popen(
            command,
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        reading = threading.Thread(target=forward, args=(process.stderr,), daemon=True)
        reading.start()
        try:
            process.wait()
        finally:
            stop(process)
            reading.join(_SECONDS_FOR_LAST_LINES)
        stdout.seek(0)
        return EndedJob(process.returncode, stdout.read().decode(errors="replace"), tuple(last))


def find_named_hosts(hosts: Sequence[str], lines: Sequence[str]) -> dict[str, str]:
    """Return the hosts that appear in a launcher's output, each with the first line that names it. Short host names
    count too.
    """
    found: dict[str, str] = {}
    for line in lines:
        for host in hosts if "local host" not in line.lower() else ():
            names = {host} if host.replace(".", "").isdecimal() else {host, host.partition(".")[0]}
            if any(re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", line) for name in names):
                found.setdefault(host, line.strip())
    return found


def allocated_hosts(environment: Mapping[str, str]) -> list[str]:
    """Return the node names of this Slurm allocation. If scontrol fails, return the compressed node list as one
    name.
    """
    listed = environment.get("SLURM_JOB_NODELIST", "the allocation")
    try:
        answer = subprocess.run(
            ["scontrol", "show", "hostnames", listed],
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=_SECONDS_TO_ANSWER,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return [listed]
    return answer.stdout.split() if answer.returncode == 0 else [listed]


def srun_command(environment: Mapping[str, str], ranks_per_host: int, arguments: Sequence[str]) -> list[str]:
    """Return the srun command for all nodes of the allocation. Raise UsageError if there is no allocation."""
    nodes = environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES")
    if not environment.get("SLURM_JOB_ID") or nodes is None or not nodes.isdecimal():
        raise UsageError(
            "--slurm outside of an allocation",
            expected="SLURM_JOB_ID and SLURM_JOB_NUM_NODES, which salloc and sbatch set",
            next_step=f"salloc -N 2 --gpus-per-node=8 --exclusive gpubench {arguments[0]} --slurm",
        )
    srun = shutil.which("srun", path=environment.get("PATH"))
    if srun is None:
        raise CouldNotMeasureError("no srun on PATH", expected="Slurm's srun", next_step="--hosts FILE starts mpirun")
    placed = [f"--nodes={nodes}", f"--ntasks={int(nodes) * ranks_per_host}", f"--ntasks-per-node={ranks_per_host}"]
    own = [f"--mpi={_find_pmi(srun)}", "--cpu-bind=none", "--kill-on-bad-exit=1"]
    return [srun, *placed, *own, *module_command("gpubench", *arguments)]


def _find_pmi(srun: str) -> str:
    try:
        answer = subprocess.run(
            [srun, "--mpi=list"], capture_output=True, text=True, timeout=_SECONDS_TO_ANSWER, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CouldNotMeasureError(f"{srun} --mpi=list: {error}", expected="the names of PMI plugins") from None
    known: list[str] = re.findall(r"[a-z0-9_]+", answer.stdout + answer.stderr)
    for kind in _PMI:
        found = next((name for name in known if name == kind or name.startswith(f"{kind}_v")), None)
        if found is not None:
            return found
    raise CouldNotMeasureError(
        "srun has no PMI plugin, so ranks would not find each other",
        expected=f"one of {', '.join(_PMI)} in srun --mpi=list",
        next_step="scontrol show hostnames > hosts, and --hosts hosts instead of --slurm",
    )


# Environment variables that name the program that mpirun runs instead of ssh.
AGENTS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC")
# Environment variables that batch systems set. In their allocations, mpirun starts ranks without ssh.
_ALLOCATION_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "HYDRA_LAUNCHER")

_SECONDS_TO_CONNECT = 10
_SECONDS_FOR_SSH = 30.0  # Python takes up to 10 s to start on a busy network file system
_MOST_CONCURRENT = 64
_LAST_CHARACTERS = 200


class Silence(NamedTuple):
    """Why gpubench does not start on a host: the symptom, the likely cause, and a diagnostic command."""

    seen: str
    cause: str
    command: str


_UNKNOWN = Silence("unknown host name", "the name is misspelt, or DNS does not have it", "getent hosts {host}")
_REFUSED = Silence("connection refused", "no ssh server runs there", "ssh {host} true")
_NO_KEY = Silence("no ssh key of this user is accepted", "the public key is not on that host", "ssh-copy-id {host}")
_NEW_KEY = Silence("its ssh host key is unknown", "the host is new or reinstalled", "ssh {host} true")
_NO_ROUTE = Silence("not reachable", "the host is off, or a firewall drops the connection", "ping -c 3 {host}")
_LATE = Silence(f"no answer in {_SECONDS_FOR_SSH:.0f} s", "the host or its file system hangs", "ssh {host} uptime")
_ABSENT = Silence("no gpubench there", "it is not installed at the same path as here", "ssh {host} {program}")

_SSH_ERRORS = (
    (r"could not resolve|name or service not known|name resolution|unknown host", _UNKNOWN),
    (r"connection refused", _REFUSED),
    (r"host key verification failed|host identification has changed", _NEW_KEY),
    (r"permission denied|too many authentication failures", _NO_KEY),
    (r"timed out|no route to host|network is unreachable|host is down", _NO_ROUTE),
    (r"no such file or directory|no module named|command not found", _ABSENT),
)


def silent_hosts(hosts: Sequence[str], environment: Mapping[str, str]) -> dict[str, Silence]:
    """Return the hosts on which mpirun cannot start gpubench, with reasons.

    mpirun itself names only the first such host, and waits two minutes for a host that is powered off. Return an empty
    dict in an allocation, because mpirun does not use ssh there.
    """
    if any(name in environment for name in _ALLOCATION_VARIABLES):
        return {}
    agent = next((environment[name] for name in AGENTS if environment.get(name)), "ssh")
    from concurrent.futures import ThreadPoolExecutor  # slow to import

    with ThreadPoolExecutor(_MOST_CONCURRENT) as pool:
        answers = pool.map(partial(_check_host, shlex.split(agent), environment), hosts)
        return {host: silence for host, silence in zip(hosts, answers, strict=True) if silence is not None}


def _check_host(agent: Sequence[str], environment: Mapping[str, str], host: str) -> Silence | None:
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
            timeout=_SECONDS_FOR_SSH,
            check=False,
        )
    except FileNotFoundError:
        return None  # mpirun prints which program it needs
    except subprocess.TimeoutExpired:
        return _host_silence(_LATE, host, program)
    return why_silent(host, answer.returncode, answer.stdout, answer.stderr)


def why_silent(host: str, exit_code: int, stdout: str, stderr: str) -> Silence | None:
    """Find the reason in the output of `gpubench --version` on a host. None if the host has the same version as
    this one.
    """
    program = shlex.join(module_command("gpubench", "--version"))
    versions = re.findall(r"^gpubench (\S+)$", stdout, re.MULTILINE)
    if __version__ in versions:
        return None
    if versions:
        seen = f"gpubench {versions[0]} there, and {__version__} here"
        return _host_silence(Silence(seen, "installations differ", _ABSENT.command), host, program)
    for pattern, silence in _SSH_ERRORS:
        if re.search(pattern, stderr, re.IGNORECASE):
            return _host_silence(silence, host, program)
    lines = stderr.split("\n") if stderr.strip() else stdout.split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")[:_LAST_CHARACTERS]
    seen = f"exit code {exit_code}" + (f": {last}" if last else "")
    return _host_silence(Silence(seen, "gpubench does not start there", _ABSENT.command), host, program)


def _host_silence(silence: Silence, host: str, program: str) -> Silence:
    return silence._replace(command=silence.command.format(host=host, program=shlex.quote(program)))


def _is_this_host(host: str) -> bool:
    """True if `host` is a name of this host, on which mpirun does not use ssh."""
    if host in ("localhost", socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as own:
            own.bind(address)
    except OSError:
        return False
    # Every address in 127.0.0.0/8 can be bound, but Open MPI treats only 127.0.0.1 as this host.
    return not str(address[0]).startswith("127.") or address[0] == "127.0.0.1"
