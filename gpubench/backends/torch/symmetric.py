"""PyTorch's symmetric memory: all-reduce by kernels that access the memory of other GPUs in the node directly.

In the one-shot algorithm, every rank reads the data of all other ranks. In the two-shot algorithm, every rank reduces
one part and writes the result to all other ranks. Both are CUDA kernels in `torch.ops.symm_mem`. Kernels that reduce in
NVSwitches (`multimem`) are not measured.
"""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from gpubench.backends.cuda import CudaDevice
from gpubench.backends.mpi.group import host_name
from gpubench.backends.timing import join_launches
from gpubench.backends.torch.backend import EnqueuedOnCuda, Tensors, TorchCalls, TorchGroups
from gpubench.backends.torch.distributed import TorchDistributed, first_line, torch_without
from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.model.terms.operation import TORCH_SYMM, TWO_SHOT, DataType, ReduceOp, choose_kernel
from gpubench.model.terms.ranks import Progress
from gpubench.ports.backend import Launch, Memory, Region
from gpubench.ports.group import Group

_OPERATIONS = ("one_shot_all_reduce_out", "one_shot_all_reduce_copy_out", "two_shot_all_reduce_")
_TYPES = (DataType.FLOAT32, DataType.BFLOAT16)
_SETTINGS = {
    # Multicast memory is only for kernels that are not measured here, and some machines cannot allocate it.
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # Otherwise torch rejects ranks that share a GPU, or that see different GPUs under the same index.
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}


def check_types(dtypes: Sequence[DataType], ops: Sequence[ReduceOp] | None) -> None:
    """Raise UsageError for a type or reduction that PyTorch's kernels do not support."""
    unknown = [f"--dtype {dtype}" for dtype in dtypes if dtype not in _TYPES]
    unknown += [f"--op {op}" for op in ops or () if op is not ReduceOp.SUM]
    if unknown:
        raise UsageError(
            f"{unknown[0]} with --backend {TORCH_SYMM}",
            expected=f"a sum of {' or '.join(_TYPES)}",
            reason="PyTorch's kernels for symmetric memory support nothing else",
            next_step=f"leave {unknown[0]} out, or --backend torch:nccl",
        )


def check_operations(found: TorchDistributed) -> None:
    """Raise CouldNotMeasureError if this torch lacks one of the operations."""
    operations = getattr(found.torch.ops, "symm_mem", None)
    for name in _OPERATIONS:
        if not hasattr(operations, name):
            raise torch_without(found.version, f"torch.ops.symm_mem.{name}")


def _no_symmetric_memory(said: str) -> CouldNotMeasureError:
    return CouldNotMeasureError(
        f"PyTorch shares no memory between these GPUs: {said}",
        expected="GPUs of one node with peer access, and processes that may share memory",
        reason="no peer access between the GPUs, or a container that isolates its processes",
        next_step="gpubench topo shows peer access, and --backend nccl,torch:nccl measures without symmetric memory",
    )


class SymmetricCalls(TorchCalls):
    """All-reduce in symmetric memory, with one kernel for all sizes or a kernel chosen by size."""

    def __init__(
        self, found: TorchDistributed, group: Any, tensors: Tensors, workspace: list[Memory], kernel: str | None = None
    ) -> None:
        super().__init__(found, TORCH_SYMM, group, tensors)
        self._operations, self._name_of_group = found.torch.ops.symm_mem, group.group_name
        self._workspace, self._kernel = workspace, kernel

    def all_reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch:
        """`two_shot_all_reduce_` in the receive buffer, or `one_shot_all_reduce_out`.

        In place, the one-shot kernel reads from a workspace, to which the data are copied first.
        """
        into = self._tensors.of(receive, count, dtype)
        how = op.value, self._name_of_group
        if choose_kernel(TORCH_SYMM, count * dtype.size_bytes, self._kernel) == TWO_SHOT:
            copied = self._copied(send, receive, count, dtype)
            return join_launches([*copied, partial(self._operations.two_shot_all_reduce_, into, *how)])
        if send == receive:
            held = self._tensors.of(Region(self._workspace[0], 0), count, dtype)
            return partial(self._operations.one_shot_all_reduce_copy_out, held, into, *how, into)
        source = self._tensors.of(send, count, dtype)
        return partial(self._operations.one_shot_all_reduce_out, source, *how, into)


class TorchSymmetric(EnqueuedOnCuda):
    """Symmetric memory on the NVIDIA GPUs of one node. Other backends cannot use its buffers."""

    buffers = 3  # The one-shot kernel needs a workspace if it works in place

    def __init__(
        self, groups: TorchGroups, found: TorchDistributed, device: CudaDevice, group: Group, progress: Progress
    ) -> None:
        super().__init__(groups, found, device, group, progress)
        self._found, self._group = found, group
        self._tensors = Tensors(found.torch)
        self._workspace: list[Memory] = []
        self._held: dict[int, Any] = {}

    @property
    def calls(self) -> SymmetricCalls:
        """The collectives of all ranks, which are connected at first use. Raises CouldNotMeasureError on several
        nodes.
        """
        return SymmetricCalls(self._found, self._process_group(), self._tensors, self._workspace)

    def select_kernel(self, kernel: str) -> SymmetricCalls:
        """Return the collectives of all ranks with the same kernel for all sizes."""
        return SymmetricCalls(self._found, self._process_group(), self._tensors, self._workspace, kernel)

    def open(self, group: Group) -> TorchCalls:
        """Raise CouldNotMeasureError, because symmetric buffers always belong to all ranks of the job."""
        raise _no_symmetric_memory(f"all ranks share the buffers, not only {group.size} of them")

    @property
    def memory_source(self) -> object:
        """This backend, because no other backend has symmetric buffers."""
        return self

    def allocate(self, size_bytes: int) -> Memory:
        """Allocate symmetric memory. All ranks must call this together. Raise CouldNotMeasureError."""
        self._process_group()
        if self._workspace[0].size_bytes < size_bytes:
            self._workspace[:] = [self._shared(size_bytes)]
        return self._shared(size_bytes)

    def _shared(self, size_bytes: int) -> Memory:
        memory = self._found.torch.distributed._symmetric_memory  # noqa: SLF001
        try:
            tensor = memory.empty(size_bytes, dtype=self._found.torch.uint8, device=self._torch_device)
            memory.rendezvous(tensor, self._groups.process_group)
        except RuntimeError as error:
            raise _no_symmetric_memory(first_line(error)) from error
        self._held[tensor.data_ptr()] = tensor
        return self._device.adopt(tensor.data_ptr(), size_bytes, self._held.pop)

    def _process_group(self) -> Any:
        if not self._workspace:
            hosts = dict.fromkeys(self._group.gather(host_name()))
            if len(hosts) > 1:
                raise _no_symmetric_memory(f"the ranks are on {len(hosts)} hosts")
            os.environ.update({name: value for name, value in _SETTINGS.items() if name not in os.environ})
            self._groups.connect()
            self._workspace[:] = [self._shared(1)]  # Raises an error if these ranks cannot share memory
        return self._groups.process_group
