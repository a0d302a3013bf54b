"""Start this program again as the ranks of a job on this host, under the mpirun that belongs to its MPI library."""

import ctypes
import os
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO

from gpubench.errors import missing_mpi_launcher, unusable_mpi_launcher
from gpubench.hardware.launch.interpreter import module_command, with_package
from gpubench.hardware.system_files import text_of
from gpubench.model.facts.launched_by import CHANNEL_VARIABLE, as_if_alone

OWN_SETTINGS_VARIABLE = "GPUBENCH_SETTINGS"
"""Names of the variables that gpubench itself set for its ranks: they are no settings of the user's."""


def own_settings(environment: Mapping[str, str]) -> list[str]:
    """The names of those variables, in a rank."""
    return environment.get(OWN_SETTINGS_VARIABLE, "").split(",")


_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl  # found here: after a fork, another thread may have had the lock of the loader
_SECONDS_TO_ANSWER = 20

_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_OPEN_MPI_SETTINGS = {
    **_AS_ROOT,
    # Open MPI 4 and 5 each know one of these pairs: more ranks than cores is fine, and no rank is tied to a core,
    # since NCCL's and MPI's own threads would then share it with the rank.
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    # All ranks are on this host; looking for fabrics takes Open MPI 5 a second of start-up.
    "OMPI_MCA_btl": "^ofi",
    # hwloc's plugins start OpenCL, X11 or CUDA in mpirun to list GPUs, which nothing here asks it for (hwloc's manual,
    # "Components and plugins": a name that is not there is ignored).
    "HWLOC_COMPONENTS": "-gl,-opencl,-cuda,-nvml,-rsmi,-levelzero",
}

_AGREEMENT_SETTINGS = {
    # Every Open MPI has ob1, which talks through shared memory; a look for fabrics (UCX, libfabric, PSM) comes first
    # where none is named. Without ptrace, as in containers, copies out of another process fail loudly.
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}
"""Where MPI carries no data that is measured, but only what ranks agree on."""

_CHOOSING = ("OMPI_MCA_pml", "OMPI_MCA_mtl", "OMPI_MCA_btl")
"""Open MPI's variables by which a user says what carries messages."""


class Flavour(StrEnum):
    """The MPI that an mpirun belongs to."""

    OPEN_MPI = "Open MPI"
    MPICH = "MPICH"


@dataclass(frozen=True, slots=True)
class Launcher:
    """An mpirun."""

    path: str
    flavour: Flavour

    def command(self, ranks: int, arguments: Sequence[str]) -> list[str]:
        """The command line that starts gpubench with `arguments` as that many ranks."""
        return [self.path, "-n", str(ranks), *module_command("gpubench", *arguments)]

    def environment(
        self,
        outer: Mapping[str, str],
        channel: str,
        also: Mapping[str, str] | None = None,
        *,
        measures_mpi: bool = True,
    ) -> dict[str, str]:
        """The environment of the job: this host only, whatever allocation this is; the user's own settings win.

        `also` are settings that its ranks need beside the launcher's own. Where a job `measures_mpi`, MPI carries
        messages as it chooses to.
        """
        inner = as_if_alone(outer)
        settings = _OPEN_MPI_SETTINGS if self.flavour is Flavour.OPEN_MPI else {}
        if settings and not measures_mpi and not any(name in inner for name in _CHOOSING):
            settings = settings | _AGREEMENT_SETTINGS
        own = {name: value for name, value in {**settings, **(also or {})}.items() if name not in inner}
        return with_package(inner | own | {CHANNEL_VARIABLE: channel, OWN_SETTINGS_VARIABLE: ",".join(own)})

    def on_hosts(self, outer: Mapping[str, str]) -> dict[str, str]:
        """The environment of a job on several hosts: the user's own, in which root may start it, as on one host."""
        return (_AS_ROOT if self.flavour is Flavour.OPEN_MPI else {}) | dict(outer)


def find_launcher(search_path: str | None = None) -> Launcher:
    """The mpirun beside this Python, which belongs to an MPI wheel in the same environment, else the first on PATH.

    Raises CouldNotMeasureError where there is none, or it does not say what it is.
    """
    beside = Path(sysconfig.get_path("scripts")) / "mpirun"
    path = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun", path=search_path)
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


DAEMON_FAILED = 213
"""Exit code of Open MPI 5's prterun where its own daemon did not start: on a busy host one start in some hundreds."""


def start(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | int = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    """Start the job in a session of its own, so that Ctrl-C reaches this process alone, which then ends the job.

    All that it prints goes to `output`.
    """
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it is gone (`prctl(2)`, PR_SET_PDEATHSIG)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class RankWatch:
    """Notices a launcher that stays although the ranks of its job are gone.

    Open MPI 5's prterun can wait forever for ranks that failed in MPI_Init: no process of the job is left but itself.
    """

    def __init__(self, job: subprocess.Popen[bytes], seconds_to_follow: float = 5.0) -> None:
        self._job = job
        self._seconds_to_follow = seconds_to_follow
        self._alone_since: float | None = None
        self._had_ranks = False

    def ended(self) -> bool:
        """True once the launcher has ended, or has outlived its ranks for longer than it needs to notice."""
        if self._job.poll() is not None:
            return True
        if _has_living_child(self._job.pid):
            self._had_ranks, self._alone_since = True, None
        elif self._had_ranks and self._alone_since is None:
            self._alone_since = time.monotonic()
        return self._alone_since is not None and time.monotonic() - self._alone_since > self._seconds_to_follow


def _has_living_child(pid: int) -> bool:
    lists = (text_of(path) or "" for path in Path(f"/proc/{pid}/task").glob("*/children"))
    stats = (text_of(Path(f"/proc/{child}/stat")) for children in lists for child in children.split())
    return any(stat is not None and stat.rpartition(")")[2].split()[0] not in "ZX" for stat in stats)


def stop(job: subprocess.Popen[bytes], seconds_to_end: float = 3.0) -> int:
    """End a job: mpirun is asked to end its ranks, and killed with them when it does not. Returns its exit code."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(seconds_to_end)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
    return job.wait()
