"""The backends that move the data of a collective, by name, and what each makes of smaller operations."""

from collections.abc import Sequence

from gpubench.model.terms.operation import DataType, NumberKind, Placement, ReduceOp

TORCH = "torch:"  # Before the name of torch.distributed's own backend

TORCH_NCCL, TORCH_SYMM, TORCH_GLOO = "torch:nccl", "torch:symm", "torch:gloo"

NCCL, MPI, HOST = "nccl", "mpi", "host"

NCCL_ALONE = "NCCL without torch"  # What the nccl backend would load if torch were not first

BACKEND_NAMES = (NCCL, TORCH_NCCL, TORCH_SYMM, "torch:rccl", "torch:xccl", MPI, TORCH_GLOO, HOST)
"""Those that can be asked for; of several in one table the first in this order is what the others are held against."""

ROW_BACKENDS = (*BACKEND_NAMES, "rccl", "simulated")  # Of other programs' results or a model too

_ONE_BUFFER = {"allreduce": "all_reduce", "broadcast": "broadcast", "reduce": "reduce"}
"""Collectives of torch.distributed that leave their result in the buffer that they read."""

ONE_SHOT, TWO_SHOT = "one-shot", "two-shot"

KERNELS = {TORCH_SYMM: (ONE_SHOT, TWO_SHOT)}
"""Backends that choose among kernels of their own, which are measured beside each other."""

_ONE_SHOT_BYTES = 128 * 2**10
"""Up to which PyTorch's compiler takes the one-shot kernel: `one_shot_all_reduce_threshold_bytes` in
torch/_inductor/config.py of 2.5 to 2.11."""


def kernel_of(backend: str, size_bytes: int, setting: str | None = None) -> str | None:
    """The kernel of its own that a backend takes: the one it is set to, else by size; None for other backends."""
    known = KERNELS.get(backend, ())
    if setting in known:
        return setting
    return (ONE_SHOT if size_bytes <= _ONE_SHOT_BYTES else TWO_SHOT) if known else None


_ENQUEUED = (NCCL, TORCH_NCCL, TORCH_SYMM)  # They wait in a stream, so that a gate can hold them
GATE = "gate"  # In the metadata, the clock of a table in which operations that can wait behind a gate do so


def gated(backends: Sequence[str], *, alone: bool = False, graph: bool = False) -> tuple[str, ...]:
    """Those backends of one table that the GPU times from the opening of a gate; the host's clock times the others.

    Operations `alone` are timed with their launch, and replays of a `graph` need no host to issue operations.
    """
    if alone or graph or {TORCH_NCCL, TORCH_SYMM}.isdisjoint(backends):
        return ()
    return tuple(each for each in _ENQUEUED if each in backends)


def composed(
    backend: str,
    collective: str,
    dtype: DataType,
    op: ReduceOp | None,
    placement: Placement,
    kernel: str | None = None,
) -> str:
    """A row's note on what its backend makes of several operations; empty for NCCL's single calls and groups."""
    parts = []
    if backend.startswith(TORCH) and collective in _ONE_BUFFER and kernel != ONE_SHOT:
        name = "two_shot_all_reduce_" if kernel == TWO_SHOT else _ONE_BUFFER[collective]
        if placement is Placement.OUT_OF_PLACE:
            parts.append(f"torch's {name} has one buffer: copied into it first")
    if backend == TORCH_GLOO and collective == "sendrecv":
        parts.append("Gloo sends no CUDA tensors: from GPUs by way of tensors of the host")
    if op is ReduceOp.AVG and divides(backend, dtype):
        parts.append(f"{backend} has no average of {dtype}: a sum, divided afterwards")
    return "; ".join(parts)


def divides(backend: str, dtype: DataType) -> bool:
    """True where an average is a sum that is divided by hand: MPI has none, and Gloo none of integers."""
    return backend == MPI or (backend == TORCH_GLOO and dtype.kind is not NumberKind.FLOAT)
