"""Exceptions that gpubench reports to users. Each has an exit code, and functions below build the common ones."""

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

DONE = 0
JUDGED_AND_FAILED = 1
WRONG_USAGE = 2
COULD_NOT_MEASURE = 3
INTERRUPTED = 130  # 128 plus the number of SIGINT, as in shells

DISTRIBUTION = "gpubench-cluster"  # the name on PyPI, where "gpubench" is another project
UPGRADE = f"pip install --upgrade {DISTRIBUTION}"

_TEXTS = ("seen", "expected", "reason", "next_step", "comment", "where")
_FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT)))
_ELSEWHERE = "--output FILE and --record DIR write elsewhere"
_TRY_MPI = "`mpirun -n 2 hostname` shows whether MPI works here at all"
_INSTALL_MPI = f"pip install '{DISTRIBUTION}[local]'"
_INSTALL_CUDA = f"pip install '{DISTRIBUTION}[cuda12]' or '[cuda13]'"


class GpubenchError(Exception):
    """An error that ends a run, as plain text for the user.

    - seen: what went wrong
    - expected: the state that gpubench needs
    - reason: the likely cause
    - next_step: a command or change to try
    - comment: about the command, on the line below it
    - where: the rank, host or GPU on which it happened
    """

    exit_code = COULD_NOT_MEASURE
    details: Sequence[str] = ()
    blames_node = False
    """True if the node itself is at fault, so a gate drains it."""

    def __init__(
        self,
        seen: str,
        *,
        expected: str = "",
        reason: str = "",
        next_step: str = "",
        comment: str = "",
        where: str = "",
    ) -> None:
        super().__init__(seen)
        self.seen, self.expected, self.reason, self.where = seen, expected, reason, where
        self.next_step, self.comment = next_step, comment

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the error as text, usually with one line per field. Text from other programs may contain line
        breaks.
        """
        labelled = (
            ("expected:", self.expected),
            ("likely:", self.reason),
            ("try:", self.next_step),
            ("", self.comment),
        )
        below = [f"  {label:<10}{text}" for label, text in labelled if text]
        return [f"{self.where}: {self.seen}" if self.where else self.seen, *self.details, *below]

    def to_record(self) -> dict[str, Any]:
        """Convert the error to plain data for `from_record`."""
        return {name: getattr(self, name) for name in (*_TEXTS, "details", "exit_code")}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Restore an error from the data of `to_record`. The exit code is kept, but not the subclass."""
        error = cls(**{name: str(record[name]) for name in _TEXTS})
        error.details, error.exit_code = record["details"], int(record["exit_code"])
        return error


class UsageError(GpubenchError):
    """The command line asks for something impossible. Raised before anything is measured."""

    exit_code = WRONG_USAGE


class IncompleteResultError(UsageError):
    """A result file does not contain enough to compare it.

    - ranks: True if the number of ranks is missing
    - collectives: the collectives that the file may contain, if there are several
    - likely_ranks: the number of ranks that the values suggest
    - models: GPU models in the file
    """

    ranks = False
    collectives: Sequence[str] = ()
    likely_ranks: int | None = None
    models: Sequence[str] = ()


class CouldNotMeasureError(GpubenchError):
    """The machine, a library or a rank prevented the measurement."""


class ClientRefusedError(CouldNotMeasureError):
    """CUDA's MPS server refuses a new client. It may accept one a few seconds later."""


class InterruptedRunError(CouldNotMeasureError):
    """The run was interrupted by Ctrl-C, SIGTERM or a closed pipe."""

    exit_code = INTERRUPTED


class OutputError(OSError):
    """Writing to an output failed during the run. `filename` is always set."""

    rows = 0


@contextmanager
def name_output(path: Path | str) -> Iterator[None]:
    """Convert OSError to OutputError with the name of the output. BrokenPipeError is raised unchanged."""
    try:
        yield
    except (OutputError, BrokenPipeError):
        raise
    except OSError as error:
        raise OutputError(error.errno, error.strerror, str(error.filename or path)) from error


@contextmanager
def add_advice(*, reason: str = "", next_step: str = "") -> Iterator[None]:
    """Add a likely reason and a next step to a UsageError, unless it already has them."""
    try:
        yield
    except UsageError as error:
        error.reason = error.reason or reason
        error.next_step = error.next_step or next_step
        raise


def invalid_choice(option: str, value: str, choices: Sequence[str]) -> UsageError:
    return UsageError(
        f"{option} {value!r} is not known", expected=f"one of {', '.join(choices)}", next_step=f"{option} {choices[0]}"
    )


def exclusive(options: Sequence[str], expected: str) -> UsageError:
    seen = f"{' and '.join(options)} exclude each other"
    return UsageError(seen, expected=expected, next_step=f"leave {options[-1]} out")


SHARED_GPU_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
FIRST_NCCL_FOR_SHARED_GPUS = 23000  # NCCL 2.30, in the encoding of NCCL_VERSION_CODE
# Maximum share of a GPU's SMs that an MPS client may use, in percent
MPS_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def more_ranks_than_gpus(ranks: int, gpus: int, host: str, ranks_per_gpu: int = 1) -> UsageError:
    needed = -(-ranks // max(1, gpus))
    return UsageError(
        f"{ranks} ranks on {host}, which shows {gpus} GPU{'s' if gpus != 1 else ''}",
        expected="at most one rank per GPU" if ranks_per_gpu == 1 else f"at most {ranks_per_gpu} ranks per GPU",
        reason="ranks share a GPU only with --ranks-per-gpu",
        next_step=f"--ranks-per-gpu {needed}, --np {gpus * ranks_per_gpu}, or --backend host"
        if gpus
        else "--backend host",
    )


def fewer_gpus_than_ranks(ranks: int, gpus: int, host: str) -> UsageError:
    return UsageError(
        f"{ranks} ranks on {host}, which shows {gpus} GPU{'s' if gpus != 1 else ''}",
        expected="at most one rank per GPU",
        reason="this command measures between GPUs, so it needs a GPU for every rank",
        next_step=f"mpirun -n {gpus} ..." if gpus else "nvidia-smi shows the GPUs of the driver",
    )


def shared_gpu(first: str, second: str, gpu: str) -> UsageError:
    """Return the error for two ranks that use the same GPU although there are enough GPUs."""
    return UsageError(
        f"{first} and {second} would both drive GPU {gpu}",
        expected="one rank per GPU",
        reason="CUDA_VISIBLE_DEVICES has the same single GPU for several ranks",
        next_step="let every rank see all GPUs, or one each: CUDA_VISIBLE_DEVICES=$OMPI_COMM_WORLD_LOCAL_RANK",
    )


def shared_gpu_under_launcher(ranks_per_gpu: int, ranks: int) -> UsageError:
    return UsageError(
        f"--ranks-per-gpu {ranks_per_gpu} under a launcher that started {ranks} ranks",
        expected="--ranks-per-gpu only if gpubench starts the ranks",
        reason="the launcher's ranks share GPUs if there are more ranks than GPUs",
        next_step=f"leave --ranks-per-gpu out: mpirun -n 4 -x {SHARED_GPU_VARIABLE}=1 gpubench ...",
    )


def nccl_refuses_shared_gpu(sharing: str, nccl: str, cuda_major: int) -> UsageError:
    """Return the error for ranks that share a GPU while NCCL is too old for it. `nccl` is NCCL's version and file."""
    return UsageError(
        f'{sharing}, and NCCL {nccl} refuses that ("Duplicate GPU detected")',
        expected=f"NCCL 2.30 or newer with {SHARED_GPU_VARIABLE}=1, or one rank per GPU",
        next_step=f"pip install 'nvidia-nccl-cu{cuda_major}>=2.30', or --nccl-library /path/libnccl.so.2",
    )


def shared_gpu_is_not_enabled(sharing: str, ranks: int) -> UsageError:
    """Return the error for ranks that share a GPU without the environment variable that allows it."""
    return UsageError(
        f"{sharing}, and {SHARED_GPU_VARIABLE} is not 1 for all of them",
        expected=f"{SHARED_GPU_VARIABLE}=1 on every rank, because NCCL otherwise refuses ranks that share a GPU",
        next_step=f"mpirun -x {SHARED_GPU_VARIABLE}=1 ..., or without mpirun: --ranks-per-gpu {ranks}, which sets it",
    )


def shared_gpu_without_percentage(sharing: str, percent: float, ranks: int, kernels_at_once: int = 1) -> UsageError:
    """Return the error for ranks under MPS whose concurrent kernels may together use more SMs than their GPU has."""
    beside = ", and each rank computes during its collective" if kernels_at_once > 1 else ""
    return UsageError(
        f"{sharing} under MPS, with {percent:g} % of its SMs in total",
        expected=f"at most {100 // kernels_at_once} % in total",
        reason=f"kernels that wait for each other hang if the GPU cannot run them all at once{beside}",
        next_step=f"mpirun -x {MPS_PERCENTAGE}={100 // (ranks * kernels_at_once)} ..., "
        f"or without mpirun and the variable: --ranks-per-gpu {ranks}, which sets it",
    )


def different_nccl(versions: Sequence[str]) -> UsageError:
    """Return the error for ranks with different NCCL versions. Each text in `versions` has a version and its ranks."""
    return UsageError(
        f"ranks loaded different NCCL libraries: {'; '.join(versions)}",
        expected='the same version on every rank, because NCCL refuses to mix versions ("Mismatched NCCL version")',
        reason="LD_PRELOAD, LD_LIBRARY_PATH or the Python environment differs between ranks",
        next_step="--nccl-library /path/libnccl.so.2 names one for all ranks",
    )


def mps_refuses_clients(detail: str) -> ClientRefusedError:
    return ClientRefusedError(
        f"the MPS server refuses new clients: {detail}",
        expected="an MPS server that accepts this process",
        reason="a client hung or was killed, and the server takes some seconds to end it and the other clients",
        next_step="try again in ten seconds, or end the server: echo quit | nvidia-cuda-mps-control",
    )


def no_path(pair: str, said: str, cause: str, advice: str) -> CouldNotMeasureError:
    """Return the error for two ranks that no NCCL transport connects."""
    return CouldNotMeasureError(
        f"NCCL finds no path: {pair}: {said}",
        expected="peer access, shared memory or a network between all GPUs",
        reason=cause,
        next_step=advice,
    )


def no_size_left(detail: str) -> CouldNotMeasureError:
    return CouldNotMeasureError(f"no size is left to measure: {detail}", next_step="use other --sizes, e.g. 1K:64M")


def no_working_folder() -> UsageError:
    return UsageError(
        "the current folder no longer exists",
        expected="a folder that exists",
        reason="it was deleted or created again after the shell entered it",
        next_step="cd .. or cd $PWD",
    )


def unwritable_output(path: Path, error: OSError) -> UsageError:
    folder, elsewhere = path.parent, "name a file on another disk: df -h"
    reason, next_step = {
        errno.ENOENT: (f"there is no folder {folder}", f"mkdir -p {folder}, or name a file in an existing folder"),
        errno.ENOTDIR: (f"{folder} is a file, not a folder", "name a file in a folder"),
        errno.EISDIR: (f"{path} is a folder", f"--output {path}/{path.name} for a file in it"),
        errno.EROFS: (f"{folder} is on a disk that is mounted read-only", elsewhere),
        errno.ENOSPC: ("the disk or the quota is full", elsewhere),
        errno.ENXIO: ("it is a pipe without a reader", f"cat {path} > FILE, in another terminal, before gpubench"),
    }.get(error.errno or 0, (f"{folder}, or the file in it, belongs to another user", f"ls -ld {folder} {path}"))
    return UsageError(
        f"--output {path} cannot be written: {os.strerror(error.errno or 0)}",
        expected="a file that can be written (gpubench tests this before it measures)",
        reason=reason,
        next_step=next_step,
    )


def exit_style_under_launcher(launcher: str) -> UsageError:
    """Return the error for --exit-style under a launcher, since the launcher sets the exit code."""
    return UsageError(
        f"--exit-style under {launcher}",
        expected="one process, because a launcher has its own exit codes",
        next_step="leave the launcher out (gpubench starts one rank per GPU by itself), or read `verdict` in "
        "--output FILE",
    )


def output_failed(path: str, detail: str, rows: int) -> CouldNotMeasureError:
    return CouldNotMeasureError(
        f"{path} can no longer be written: {detail}. The run has ended{rows_kept(rows)}",
        reason="the disk or the quota is full" if detail in _FULL else "",
        next_step=f"df -h shows the free space, {_ELSEWHERE}" if detail in _FULL else _ELSEWHERE,
    )


def rows_kept(rows: int) -> str:
    """Return a sentence for the end of an error message, such as ". The 3 rows measured before are kept".

    It is empty if there are no rows.
    """
    kept = "the row measured before is" if rows == 1 else f"the {rows} rows measured before are"
    return f". {kept.capitalize()} kept" if rows else ""


def ranks_ended_early(exit_code: int, rows: int) -> CouldNotMeasureError:
    number = -exit_code if exit_code < 0 else exit_code - 128
    how = f"killed by signal {number}" if number > 0 else f"exit code {exit_code}"
    return CouldNotMeasureError(
        f"the ranks ended without a result (mpirun: {how}){rows_kept(rows)}",
        reason="a rank crashed or was killed (see the output of mpirun and the ranks above)",
        next_step="NCCL_DEBUG=WARN gpubench ... shows NCCL's warnings, and dmesg shows an out-of-memory kill",
    )


def no_rank_started() -> CouldNotMeasureError:
    return CouldNotMeasureError(
        "mpirun started no rank before the time limit for launch and MPI_Init",
        reason="mpirun hangs (see its output above)",
        next_step=_TRY_MPI,
    )


def launcher_failed(exit_code: int) -> CouldNotMeasureError:
    """Return the error for a launcher that ended before any rank started."""
    return CouldNotMeasureError(
        f"mpirun ended with exit code {exit_code} before any rank started",
        reason="the MPI installation does not work here (see the output of mpirun above)",
        next_step=_TRY_MPI,
    )


def missing_mpi_launcher() -> CouldNotMeasureError:
    return CouldNotMeasureError(
        "no mpirun was found next to this Python or on PATH",
        expected="Open MPI or MPICH, which starts one process per rank",
        reason="gpubench installs MPI only on request, so that it never hides the MPI of a cluster",
        next_step=f"{_INSTALL_MPI} on a laptop or in CI, or `module load openmpi` on a cluster",
    )


def unusable_mpi_launcher(path: str, answer: str) -> CouldNotMeasureError:
    return CouldNotMeasureError(
        f"{path} --version answered {answer!r}",
        expected="Open MPI 4 or 5, or MPICH",
        next_step="start the ranks yourself: mpirun -n 4 gpubench ...",
    )


def missing_mpi_library(detail: str) -> CouldNotMeasureError:
    return CouldNotMeasureError(
        f"mpi4py cannot load an MPI library: {detail}",
        expected="libmpi.so.40 (Open MPI) or libmpi.so.12 (MPICH) that the dynamic loader finds",
        reason="this shell lacks the environment module or the `local` extra",
        next_step=f"{_INSTALL_MPI}, `module load openmpi`, or set MPI4PY_LIBMPI=/path/libmpi.so.40",
    )


def separate_jobs(launcher: str, claimed: int) -> CouldNotMeasureError:
    """Return the error for a launcher that started separate jobs of one rank instead of one job."""
    return CouldNotMeasureError(
        f"{launcher} started {claimed} processes, but in each of them MPI sees a single rank",
        expected=f"one job of {claimed} ranks",
        reason="this mpirun and the library that mpi4py loaded belong to different MPIs",
        next_step="put the mpirun of mpi4py's library first on PATH, "
        "or set MPI4PY_LIBMPI to this launcher's libmpi (srun: try --mpi=pmix)",
    )


def no_gpu(reason: str, for_what: str = "--backend nccl", instead: str = "") -> CouldNotMeasureError:
    """Return the error for a command or option that needs a GPU. `instead` names an alternative that needs none."""
    if not instead:
        on_cpus = "Use --backend host to measure MPI on CPU buffers."
        instead = on_cpus if for_what.startswith("-") else SIMULATED_INSTEAD
    return CouldNotMeasureError(
        f"no usable GPU: {reason}",
        expected=f"at least one NVIDIA GPU for {for_what}",
        next_step="nvidia-smi",
        comment=f"It shows what the driver sees. {instead}",
    )


LOAD_DRIVER = "modprobe nvidia && nvidia-smi"
SIMULATED_INSTEAD = "Add --simulate hgx-h200-4 to try the command without a GPU."


def missing_cupy(cuda_major: int | None) -> CouldNotMeasureError:
    """Return the error for a missing CuPy. `cuda_major` is the newest CUDA version that the driver supports, if
    known.
    """
    install = f"pip install '{DISTRIBUTION}[cuda{cuda_major}]'" if cuda_major in (12, 13) else _INSTALL_CUDA
    return CouldNotMeasureError(
        "CuPy is not installed, and gpubench needs it to use GPUs",
        expected="cupy-cuda12x or cupy-cuda13x, matching the driver",
        next_step=f"{install}, or measure collectives on CPU buffers: --backend host",
    )


def unusable_cupy(detail: str) -> CouldNotMeasureError:
    return CouldNotMeasureError(
        f"CuPy cannot be imported: {detail}",
        reason="two CuPy builds in one environment, or one built for a different NumPy version",
        next_step=f"pip list | grep cupy, remove all, then install one: {_INSTALL_CUDA}",
    )


def no_kernels(detail: str) -> CouldNotMeasureError:
    return CouldNotMeasureError(
        f"CuPy cannot compile its kernels: {detail}",
        expected="NVRTC of the same CUDA major version as CuPy",
        reason="CuPy was installed without it, and there is no CUDA toolkit and no nvidia-cuda-nvrtc wheel",
        next_step=f"{_INSTALL_CUDA}, matching the name of the CuPy package (both include NVRTC)",
    )


def cupy_of_wrong_cuda(built_for: str, driver_runs: str) -> CouldNotMeasureError:
    built_major, runs_major = (int(each.split(".")[0]) for each in (built_for, driver_runs))
    advice = f"pip uninstall -y cupy-cuda{built_major}x && pip install '{DISTRIBUTION}[cuda{runs_major}]'"
    return CouldNotMeasureError(
        f"CuPy is built for CUDA {built_for}, but the driver supports CUDA {driver_runs}",
        expected="a CuPy for the driver's major version or older",
        next_step=advice if runs_major >= 12 else "update the NVIDIA driver to one that runs CUDA 12 or newer",
    )


def missing_nccl(detail: str) -> CouldNotMeasureError:
    return CouldNotMeasureError(
        f"no NCCL library was found: {detail}",
        expected="libnccl.so.2 from the nvidia-nccl wheel or on the loader's path",
        next_step=f"{_INSTALL_CUDA}, or name one: --nccl-library /path/libnccl.so.2",
    )


def missing_nccl_bindings(detail: str) -> CouldNotMeasureError:
    return CouldNotMeasureError(
        f"NVIDIA's bindings for NCCL cannot be imported: {detail}",
        expected="nccl4py, which the extras cuda12 and cuda13 install",
        next_step=f"{_INSTALL_CUDA}, because CuPy alone is not enough",
    )


def nccl_library_not_used(asked: str, loaded: str) -> CouldNotMeasureError:
    return CouldNotMeasureError(
        f"--nccl-library names {asked}, but the process loaded {loaded}",
        reason="LD_PRELOAD or another package loaded a different NCCL first",
        next_step="unset LD_PRELOAD and try again",
    )


def unreadable_nccl_library(path: str, detail: str) -> UsageError:
    return UsageError(
        f"--nccl-library {path} cannot be loaded: {detail}",
        expected="the path of a libnccl.so.2 for this machine",
        next_step="find / -name 'libnccl.so*' lists all copies on this machine",
    )


def no_nccl_allocator(version: str) -> UsageError:
    return UsageError(
        f"--allocator nccl, but NCCL {version} has no ncclMemAlloc",
        expected="NCCL 2.19 or newer",
        next_step="--allocator cuda, or another library: --nccl-library /path/libnccl.so.2",
    )


def nccl_lacks(option: str, version: str, what: str, first: str) -> UsageError:
    return UsageError(
        f"{option}, but NCCL {version} has no {what}",
        expected=f"NCCL {first} or newer",
        next_step=f"leave {option.partition(' ')[0]} out, or another library: --nccl-library /path/libnccl.so.2",
    )
