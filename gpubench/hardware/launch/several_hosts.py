"""Ranks on several hosts: the command that starts them, srun's or mpirun's, and what it and they print."""

import re
import shutil
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.hardware.launch.interpreter import module_command, with_package
from gpubench.hardware.launch.launcher import Flavour, Launcher, die_with_parent, stop
from gpubench.model.facts.launched_by import DEFAULTS_VARIABLE, NO_DEFAULTS_TO_READ
from gpubench.readers.documents.opened import opened

_SECONDS_TO_ANSWER = 20
_MOST_BYTES = 2**20
_MOST_HOSTS = 65536
_LINE = re.compile(
    r"(?P<host>[A-Za-z0-9_][A-Za-z0-9_.-]{0,252})(?:(?::|\s+slots=)(?P<slots>[1-9][0-9]{0,4}))?(?:\s+max[-_]slots=[0-9]+)?",
    re.ASCII,
)
_PMI = ("pmix", "pmi2", "cray_shasta", "pmi")
"""What srun may speak to MPI, the best first; a version behind it, pmix_v4, counts as well."""


_MOST_LINES_KEPT = 200
_SECONDS_FOR_LAST_LINES = 2.0
"""Somebody whom the launcher left behind may hold its stderr open for ever."""

_EXPECTED = "a file with a host a line, as mpirun --hostfile has them: node1, or node1 slots=8"


def hosts_of(path: Path) -> dict[str, int | None]:
    """The hosts of a file as mpirun's --hostfile, each with the ranks that it has room for, None where it does not say.

    Room is told as Open MPI does, 'node1 slots=8', or as MPICH does, 'node1:8'.
    Raises UsageError: it cannot be read, has no host, or a line that is none.
    """
    try:
        with opened(path, _EXPECTED) as file:
            text = file.read(_MOST_BYTES + 1).decode()
    except UnicodeDecodeError:
        raise _unfit(path, "it is no text") from None
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise UsageError(
            f"--hosts {path} {'does not exist' if missing else f'cannot be read: {error.strerror}'}",
            expected=_EXPECTED,
            reason="a host, where a file is wanted" if missing else "its owner or mode forbids it, or it is a folder",
            next_step="printf 'node1\\nnode2\\n' > hosts.txt, then --hosts hosts.txt",
        ) from None
    found: dict[str, int | None] = {}
    for line in filter(None, (each.partition("#")[0].strip() for each in text.splitlines())):
        match = _LINE.fullmatch(line)
        if match is None or len(found) == _MOST_HOSTS:
            raise _unfit(path, f"{line[:80]!r} is no host" if match is None else "too many hosts")
        found[match["host"]] = None if match["slots"] is None else int(match["slots"])
    if not found:
        raise _unfit(path, "no host")
    return found


def _unfit(path: Path, what: str) -> UsageError:
    return UsageError(f"--hosts {path}: {what}", expected=_EXPECTED)


def mpirun_command(mpirun: Launcher, hosts: Sequence[str], ranks_a_host: int, arguments: Sequence[str]) -> list[str]:
    """The command that starts so many ranks on every host, none tied to a core, for NCCL and MPI have threads too."""
    ranks = str(len(hosts) * ranks_a_host)
    if mpirun.flavour is Flavour.MPICH:
        placed = ["-hosts", ",".join(hosts), "-ppn", str(ranks_a_host), "-bind-to", "none"]
        placed += ["-genv", DEFAULTS_VARIABLE, NO_DEFAULTS_TO_READ]
    else:
        slots = ",".join(f"{host}:{ranks_a_host}" for host in hosts)
        placed = ["--host", slots, "--map-by", f"ppr:{ranks_a_host}:node:OVERSUBSCRIBE", "--bind-to", "none"]
        placed += ["-x", f"{DEFAULTS_VARIABLE}={NO_DEFAULTS_TO_READ}"]
    return [mpirun.path, "-n", ranks, *placed, *module_command("gpubench", *arguments)]


class EndedJob(NamedTuple):
    """A launcher that has ended: its exit code, all that came on stdout, the last lines that came on stderr."""

    exit_code: int
    stdout: str
    stderr: Sequence[str]


def run_to_its_end(command: Sequence[str], environment: Mapping[str, str], tell: Callable[[str], None]) -> EndedJob:
    """Run a launcher, and hand `tell` the lines of stderr as they come; whatever ends the wait ends the job too.

    Ranks read no defaults, which this process has read: all options are in the command.
    """
    own = with_package({**environment, DEFAULTS_VARIABLE: NO_DEFAULTS_TO_READ})
    last = deque[str](maxlen=_MOST_LINES_KEPT)

    def pass_on(stderr: IO[bytes]) -> None:
        for line in stderr:
            last.append(line.decode(errors="replace").rstrip("\r\n"))
            tell(last[-1])

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
        reading = threading.Thread(target=pass_on, args=(process.stderr,), daemon=True)
        reading.start()
        try:
            process.wait()
        finally:
            stop(process)
            reading.join(_SECONDS_FOR_LAST_LINES)
        stdout.seek(0)
        return EndedJob(process.returncode, stdout.read().decode(errors="replace"), tuple(last))


def named_in(hosts: Sequence[str], lines: Sequence[str]) -> dict[str, str]:
    """The hosts that a launcher complains of, each with the line, by their names in full or up to the first dot."""
    found: dict[str, str] = {}
    for line in lines:
        for host in hosts if "local host" not in line.lower() else ():
            names = {host} if host.replace(".", "").isdecimal() else {host, host.partition(".")[0]}
            if any(re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", line) for name in names):
                found.setdefault(host, line.strip())
    return found


def srun_command(environment: Mapping[str, str], ranks_a_host: int, arguments: Sequence[str]) -> list[str]:
    """The command that starts so many ranks on every node of this allocation, each with all GPUs of its node in sight.

    Raises:
        UsageError: there is no allocation.
        CouldNotMeasureError: there is no srun, or none that speaks to an MPI.
    """
    nodes = environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES")
    if not environment.get("SLURM_JOB_ID") or nodes is None or not nodes.isdecimal():
        raise UsageError(
            "--slurm outside of an allocation",
            expected="SLURM_JOB_ID and SLURM_JOB_NUM_NODES, which salloc and sbatch set",
            next_step="salloc -N 2 --gpus-per-node=8 --exclusive gpubench check --slurm",
        )
    srun = shutil.which("srun", path=environment.get("PATH"))
    if srun is None:
        raise CouldNotMeasureError("no srun on PATH", expected="Slurm's srun", next_step="--hosts FILE starts mpirun")
    placed = [f"--nodes={nodes}", f"--ntasks={int(nodes) * ranks_a_host}", f"--ntasks-per-node={ranks_a_host}"]
    own = [f"--mpi={_pmi_of(srun)}", "--cpu-bind=none", "--kill-on-bad-exit=1"]
    return [srun, *placed, *own, *module_command("gpubench", *arguments)]


def _pmi_of(srun: str) -> str:
    """What this srun speaks to MPI: pmix where it can."""
    try:
        answer = subprocess.run(
            [srun, "--mpi=list"], capture_output=True, text=True, timeout=_SECONDS_TO_ANSWER, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CouldNotMeasureError(f"{srun} --mpi=list: {error}", expected="the names of PMI plugins") from None
    known: list[str] = re.findall(r"[a-z0-9_]+", answer.stdout + answer.stderr)
    for kind in _PMI:
        found = next((each for each in known if each == kind or each.startswith(f"{kind}_v")), None)
        if found is not None:
            return found
    raise CouldNotMeasureError(
        "srun speaks no PMI, so ranks would not find each other",
        expected=f"one of {', '.join(_PMI)} in srun --mpi=list",
        next_step="scontrol show hostnames > hosts; gpubench check --hosts hosts",
    )
