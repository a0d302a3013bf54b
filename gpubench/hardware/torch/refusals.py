"""The errors of a torch that is missing, or lacks what is asked of it."""

from gpubench.errors import CouldNotMeasureError, UsageError

_WITHOUT = "--backend nccl and --backend host need no torch"


def missing_torch() -> CouldNotMeasureError:
    """A backend of torch's was asked for, and there is no torch."""
    return CouldNotMeasureError(
        "torch is not installed in this Python",
        expected="PyTorch for --backend torch:...; it is the user's own that is measured, so none is brought along",
        reason="gpubench runs in another environment than the training",
        next_step=f"pip install gpubench in the environment that has torch; {_WITHOUT}",
    )


def unusable_torch(detail: str) -> CouldNotMeasureError:
    """Torch is installed and its import fails."""
    return CouldNotMeasureError(
        f"torch cannot be imported: {detail}",
        expected="an import without an error",
        reason="a library of it is missing, or one of another version was loaded before",
        next_step=f"python -c 'import torch, torch.distributed' shows it alone; {_WITHOUT}",
    )


def torch_without(version: str, what: str) -> CouldNotMeasureError:
    """This build of torch lacks what is asked of it."""
    return CouldNotMeasureError(
        f"torch {version} was built without {what}",
        expected=f"a build that has {what}",
        reason="wheels for CPUs, for CUDA, for ROCm and for Intel GPUs are different ones",
        next_step=f"https://pytorch.org/get-started lists the wheels; all of them have Gloo; {_WITHOUT}",
    )


def torch_of_wrong_cuda(version: str, driver_runs: str) -> CouldNotMeasureError:
    """Torch needs a newer CUDA, such as '13.0', than the driver runs."""
    return CouldNotMeasureError(
        f"torch {version} is for a newer CUDA than the driver runs, {driver_runs}",
        expected="a torch of the driver's major version or older",
        next_step=f"pip install torch --index-url https://download.pytorch.org/whl/cu{driver_runs.replace('.', '')}, "
        f"or a newer driver; {_WITHOUT}",
    )


def torch_sees_no_gpu(version: str) -> CouldNotMeasureError:
    """torch.cuda.is_available() says no where the driver lists GPUs."""
    return CouldNotMeasureError(
        f"torch {version} sees no GPU, and the driver lists some",
        expected="torch.cuda.is_available()",
        reason="a driver too old for it, or CUDA_VISIBLE_DEVICES in a form that torch does not read",
        next_step="python -c 'import torch; torch.cuda.init()' shows why",
    )


def torch_refused(backend: str, said: str) -> CouldNotMeasureError:
    """torch.distributed cannot connect the ranks."""
    if "EADDRINUSE" in said or "already in use" in said:
        return CouldNotMeasureError(
            f"torch.distributed cannot begin with {backend}: {said}",
            expected="a port on which nobody else listens",
            reason="MASTER_PORT is another job's, or one of before has not ended",
            next_step="torchrun --master-port N, or --standalone, which picks one",
        )
    gloo = "GLOO_SOCKET_IFNAME=lo on one host, or the interface that joins the hosts"
    return CouldNotMeasureError(
        f"torch.distributed cannot begin with {backend}: {said}",
        expected="a process group of all ranks",
        reason="Gloo looks this host's name up for its own address; NCCL's reasons stand in its log",
        next_step=gloo if backend == "gloo" else "NCCL_DEBUG=WARN gpubench ... shows what NCCL says",
    )


def refused_type(backend: str, what: str, said: str) -> UsageError:
    """Torch refuses a type or reduction, in its own words."""
    return UsageError(
        f"{what} with --backend {backend}: {said}",
        expected="a type and a reduction that this torch has for it",
        next_step="leave it out, or --backend nccl",
    )
