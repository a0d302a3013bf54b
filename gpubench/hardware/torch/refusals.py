"""The errors of a torch that is missing, or lacks what is asked of it."""

import re

from gpubench.errors import CouldNotMeasureError

_WITHOUT = "--backend nccl and --backend host need no torch"

_GLOO_LOST = re.compile(
    r"(?P<peer>\[[^\s\]]+\]:\d+): (?P<said>Connection (?:closed|reset) by peer|Broken pipe|Connection timed out)"
    r"|(?P<closed>Connection closed by peer) (?P<other>\[[^\s\]]+\]:\d+)"
)
"""What Gloo says where the process at the other end of a connection is gone."""


def first_line(error: BaseException) -> str:
    """What an error of torch's says first: its traceback in C++ follows."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def lost_connection(error: BaseException) -> CouldNotMeasureError | None:
    """The error of a rank whose connection to another Gloo found closed; None for any other error.

    Gloo knows that rank by its address alone: which one it was, and how it ended, its own watchdog tells.
    """
    said = first_line(error)
    found = _GLOO_LOST.search(said) if isinstance(error, RuntimeError) and "gloo" in said else None
    if found is None:
        return None
    return CouldNotMeasureError(
        f"the rank at {found['peer'] or found['other']} is gone, says Gloo: {found['said'] or found['closed']}",
        expected="every rank to stay until the last row",
        reason="it crashed, was ended, or the network between the two hosts broke",
        next_step="its own last words, on its host, say how; dmesg there shows an out-of-memory kill and Xid errors",
    )


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
