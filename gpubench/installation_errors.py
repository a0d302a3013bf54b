"""What is not installed, or does not fit together: MPI, CuPy, CUDA, NCCL. Each error says what to install or set."""

from gpubench.errors import CouldNotMeasureError, UsageError


def missing_mpi_launcher() -> CouldNotMeasureError:
    """No mpirun beside this Python or on PATH."""
    return CouldNotMeasureError(
        "no mpirun was found beside this Python or on PATH",
        expected="Open MPI or MPICH, which starts one process a rank",
        reason="gpubench brings no MPI of its own unless asked: a cluster's own MPI must not be shadowed",
        next_step="pip install 'gpubench[local]' on a laptop or in CI; `module load openmpi` on a cluster",
    )


def unusable_mpi_launcher(path: str, answer: str) -> CouldNotMeasureError:
    """The mpirun that was found does not say what it is."""
    return CouldNotMeasureError(
        f"{path} --version answered {answer!r}",
        expected="Open MPI 4 or 5, or MPICH",
        next_step="start the ranks yourself: mpirun -n 4 gpubench ...",
    )


def missing_mpi_library(detail: str) -> CouldNotMeasureError:
    """mpi4py is there and finds no MPI library."""
    return CouldNotMeasureError(
        f"mpi4py cannot load an MPI library: {detail}",
        expected="libmpi.so.40 (Open MPI) or libmpi.so.12 (MPICH) that the dynamic loader finds",
        reason="the environment module or the `local` extra is missing in this shell",
        next_step="pip install 'gpubench[local]', `module load openmpi`, or set MPI4PY_LIBMPI=/path/libmpi.so.40",
    )


def separate_jobs(launcher: str, claimed: int) -> CouldNotMeasureError:
    """The launcher started N processes and MPI sees one: N separate one-rank jobs."""
    return CouldNotMeasureError(
        f"{launcher} started {claimed} processes, but in each of them MPI sees a single rank",
        expected=f"one job of {claimed} ranks",
        reason="the mpirun that was used belongs to another MPI than the library that mpi4py loaded",
        next_step="put the mpirun of mpi4py's library first on PATH, "
        "or set MPI4PY_LIBMPI to this launcher's libmpi (srun: try --mpi=pmix)",
    )


_INSTEAD = {
    "p2p": "--simulate hgx-h200-4 shows what it prints",
    "check": "--profile host checks NICs, libraries and CPUs; --simulate hgx-h200-4 shows what it prints",
    "profiles": "--simulate hgx-h200-4 shows what it prints",
}
"""What a command without GPUs can do in the place of what it was asked for."""


def no_gpu(reason: str, for_what: str = "--backend nccl") -> CouldNotMeasureError:
    """A command, or `--backend nccl`, where no GPU can be used."""
    instead = _INSTEAD.get(for_what, "")
    return CouldNotMeasureError(
        f"no usable GPU: {reason}",
        expected=f"at least one NVIDIA GPU for {for_what}",
        next_step="nvidia-smi shows what the driver sees; "
        + (instead or "--backend host measures MPI on CPU buffers instead"),
    )


def missing_cupy(cuda_major: int | None) -> CouldNotMeasureError:
    """GPUs are present and CuPy is not; `cuda_major` is the newest CUDA that the driver runs, if it said so."""
    extra = f"cuda{cuda_major}" if cuda_major in (12, 13) else "cuda12] or gpubench[cuda13"
    return CouldNotMeasureError(
        "CuPy is not installed, and GPUs are driven through it",
        expected="cupy-cuda12x or cupy-cuda13x, whichever the driver runs",
        next_step=f"pip install 'gpubench[{extra}]'; collectives also run on CPU buffers: --backend host",
    )


def unusable_cupy(detail: str) -> CouldNotMeasureError:
    """CuPy is installed and its import fails."""
    return CouldNotMeasureError(
        f"CuPy cannot be imported: {detail}",
        reason="two CuPy builds in one environment, or one built for another NumPy",
        next_step="pip list | grep cupy, remove all, then install one: pip install 'gpubench[cuda12]' or '[cuda13]'",
    )


def no_kernels(detail: str) -> CouldNotMeasureError:
    """CuPy cannot compile the kernels that fill and check buffers."""
    return CouldNotMeasureError(
        f"CuPy cannot compile its kernels: {detail}",
        expected="NVRTC of the same CUDA major version as CuPy",
        reason="CuPy was installed without it: no CUDA toolkit here, and no nvidia-cuda-nvrtc wheel",
        next_step="pip install 'gpubench[cuda12]' or '[cuda13]', as CuPy's own name says; both bring NVRTC",
    )


def cupy_of_wrong_cuda(built_for: int, driver_runs: int) -> CouldNotMeasureError:
    """CuPy needs a newer CUDA than the driver runs; both as CUDA encodes versions (13000 is 13.0)."""
    runs_major = driver_runs // 1000
    advice = f"pip uninstall -y cupy-cuda{built_for // 1000}x && pip install 'gpubench[cuda{runs_major}]'"
    return CouldNotMeasureError(
        f"CuPy is built for CUDA {cuda_version_text(built_for)}, the driver runs CUDA {cuda_version_text(driver_runs)}",
        expected="a CuPy of the driver's major version or older",
        next_step=advice if runs_major >= 12 else "update the NVIDIA driver to one that runs CUDA 12 or newer",
    )


def cuda_version_text(encoded: int) -> str:
    """13000 → '13.0', as `cudaDriverGetVersion` encodes it."""
    return f"{encoded // 1000}.{encoded % 1000 // 10}"


def missing_nccl(detail: str) -> CouldNotMeasureError:
    """CuPy found no libnccl."""
    return CouldNotMeasureError(
        f"CuPy finds no NCCL library: {detail}",
        expected="libnccl.so.2 from the nvidia-nccl wheel or on the loader's path",
        next_step="pip install 'gpubench[cuda12]' or '[cuda13]', or name one: --nccl-library /path/libnccl.so.2",
    )


def nccl_library_not_used(asked: str, loaded: str) -> CouldNotMeasureError:
    """`--nccl-library` names one file and the process uses another."""
    return CouldNotMeasureError(
        f"--nccl-library {asked} was asked for, but the process loaded {loaded}",
        reason="an LD_PRELOAD or another package loaded its NCCL first",
        next_step="unset LD_PRELOAD and try again",
    )


def unreadable_nccl_library(path: str, detail: str) -> UsageError:
    """`--nccl-library` names a file that is no NCCL library."""
    return UsageError(
        f"--nccl-library {path} cannot be loaded: {detail}",
        expected="the path of a libnccl.so.2 for this machine",
        next_step="find / -name 'libnccl.so*' lists those on this machine",
    )


def no_nccl_allocator(version: str) -> UsageError:
    """`--allocator nccl` with an NCCL that has none."""
    return UsageError(
        f"--allocator nccl, but NCCL {version} has no ncclMemAlloc",
        expected="NCCL 2.19 or newer",
        next_step="--allocator cuda, or another library: --nccl-library /path/libnccl.so.2",
    )
