"""torch.distributed as a backend: tensors, collectives, and their timing on GPUs and CPUs."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from gpubench.backends.cuda import CudaDevice, CudaMemory, GatedClock, GpuBuffers
from gpubench.backends.mpi.backends import HostBuffers, NumpyMemory
from gpubench.backends.timing import BlockingClock, join_launches
from gpubench.backends.torch import distributed
from gpubench.backends.torch.distributed import TorchDistributed
from gpubench.model.terms.operation import Block, DataPattern, DataType, NumberKind, ReduceOp, divides_sum
from gpubench.model.terms.ranks import UNWATCHED, Progress
from gpubench.ports.backend import Array, CollectiveCalls, Launch, Memory, Region
from gpubench.ports.group import Group


class DeviceMemory:
    """A tensor on a torch device that CuPy does not support. It is filled and checked through a host buffer."""

    def __init__(self, torch: Any, device: Any, size_bytes: int, progress: Progress = UNWATCHED) -> None:
        self.size_bytes = size_bytes
        self._host = NumpyMemory(size_bytes, progress)
        self._on_host = torch.from_numpy(self._host.array(0, size_bytes, "uint8"))
        self.tensor = torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def array(self, offset_bytes: int, count: int, dtype: str) -> Array:
        """Return a host copy of `count` elements."""
        self._on_host.copy_(self.tensor)
        return self._host.array(offset_bytes, count, dtype)

    def fill_sent(self, data: DataPattern, block: Block, rank: int) -> None:
        self._on_host.copy_(self.tensor)
        self._host.fill_sent(data, block, rank)
        self.tensor.copy_(self._on_host)

    def fill_byte(self, size_bytes: int, value: int) -> None:
        self.tensor[:size_bytes] = value

    def count_wrong(self, data: DataPattern, blocks: Sequence[tuple[Block, int | None]]) -> int:
        self._on_host.copy_(self.tensor)
        return self._host.count_wrong(data, blocks)


class Tensors:
    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._whole: dict[int, tuple[Memory, Any]] = {}
        self.types = {dtype: getattr(torch, dtype.value) for dtype in DataType}

    def of(self, region: Region, count: int, dtype: DataType) -> Any:
        """Return a tensor that shares memory with the first `count` elements of a region."""
        start = region.offset_bytes
        return self._bytes(region.memory)[start : start + count * dtype.size_bytes].view(self.types[dtype])

    def _bytes(self, memory: Memory) -> Any:
        if isinstance(memory, DeviceMemory):
            return memory.tensor
        if id(memory) not in self._whole:
            whole = memory.array(0, memory.size_bytes, "uint8")
            device = "cuda" if isinstance(memory, CudaMemory) else "cpu"
            self._whole[id(memory)] = memory, self._torch.as_tensor(whole, device=device)
        return self._whole[id(memory)][1]


_OPS = {ReduceOp.SUM: "SUM", ReduceOp.PROD: "PRODUCT", ReduceOp.MAX: "MAX", ReduceOp.MIN: "MIN", ReduceOp.AVG: "AVG"}


class TorchCalls:
    """NCCL's collectives in one torch process group. `name` is gpubench's name for the backend.

    `settle` waits for the work that a launch enqueued on a stream. It is None if the clock waits instead. Gloo reduces
    in place on every rank, so every rank copies its data to the receive buffer first.
    """

    def __init__(
        self, found: TorchDistributed, name: str, group: Any, tensors: Tensors, settle: Launch | None = None
    ) -> None:
        self._distributed = found.distributed
        self._name, self._group, self._tensors = name, group, tensors
        self._settle = () if settle is None else (settle,)
        self._rank: int = group.rank()
        self._ranks: int = group.size()
        self._is_gloo = found.backend == "gloo"
        # Torch identifies roots and peers by their rank in the whole job, also in groups of fewer ranks.
        self._in_job = [found.distributed.get_global_rank(group, rank) for rank in range(self._ranks)]
        operations = found.distributed.ReduceOp
        self._ops = {op: getattr(operations, name) for op, name in _OPS.items()}
        # Torch 2.13 renamed these two functions and warns about the old names.
        self._gather_into = _either(found.distributed, "all_gather_single", "all_gather_into_tensor")
        self._scatter_from = _either(found.distributed, "reduce_scatter_single", "reduce_scatter_tensor")

    def all_reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch:
        """`all_reduce`, which works in place in the receive buffer."""
        into = self._tensors.of(receive, count, dtype)
        call = partial(self._distributed.all_reduce, into, self._op(op, dtype), group=self._group)
        return self._launch([*self._copied(send, receive, count, dtype), call, *self._divided(into, op, dtype)])

    def all_gather(self, send: Region, receive: Region, count: int, dtype: DataType) -> Launch:
        into, source = self._tensors.of(receive, count * self._ranks, dtype), self._tensors.of(send, count, dtype)
        return self._launch([partial(self._gather_into, into, source, group=self._group)])

    def reduce_scatter(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch:
        into, source = self._tensors.of(receive, count, dtype), self._tensors.of(send, count * self._ranks, dtype)
        call = partial(self._scatter_from, into, source, self._op(op, dtype), group=self._group)
        return self._launch([call, *self._divided(into, op, dtype)])

    def broadcast(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`broadcast`, which works in place in the receive buffer."""
        copied = self._copied(send, receive, count, dtype) if self._rank == root else ()
        into = self._tensors.of(receive, count, dtype)
        return self._launch(
            [*copied, partial(self._distributed.broadcast, into, self._in_job[root], group=self._group)]
        )

    def reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp, root: int) -> Launch:
        """`reduce`, in place: in the receive buffer on the root, and in the send buffer on other ranks.

        NCCL leaves the send buffers unchanged. Gloo does not, so with Gloo every rank uses its receive buffer.
        """
        is_root = self._rank == root
        copies = is_root or self._is_gloo
        work = self._tensors.of(receive if copies else send, count, dtype)
        copied = self._copied(send, receive, count, dtype) if copies else ()
        call = partial(self._distributed.reduce, work, self._in_job[root], self._op(op, dtype), group=self._group)
        return self._launch([*copied, call, *(self._divided(work, op, dtype) if is_root else ())])

    def all_to_all(self, send: Region, receive: Region, count: int, dtype: DataType) -> Launch:
        into, source = (self._tensors.of(region, count * self._ranks, dtype) for region in (receive, send))
        return self._launch([partial(self._distributed.all_to_all_single, into, source, group=self._group)])

    def all_to_all_v(self, send: Region, receive: Region, counts: Sequence[int], dtype: DataType) -> Launch:
        """`all_to_all_single` with a separate element count for each peer."""
        own = [counts[self._rank]] * self._ranks
        into, source = self._tensors.of(receive, sum(own), dtype), self._tensors.of(send, sum(counts), dtype)
        call = self._distributed.all_to_all_single
        return self._launch([partial(call, into, source, own, list(counts), group=self._group)])

    def gather(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`gather` to blocks of the root's receive buffer."""
        blocks = self._blocks(receive, count, dtype) if self._rank == root else None
        source = self._tensors.of(send, count, dtype)
        return self._launch([partial(self._distributed.gather, source, blocks, self._in_job[root], group=self._group)])

    def scatter(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`scatter` from blocks of the root's send buffer."""
        blocks = self._blocks(send, count, dtype) if self._rank == root else None
        into = self._tensors.of(receive, count, dtype)
        return self._launch([partial(self._distributed.scatter, into, blocks, self._in_job[root], group=self._group)])

    def send_receive(
        self, send: Region, destination: int, receive: Region, source: int, count: int, dtype: DataType
    ) -> Launch:
        """`batch_isend_irecv` with one send and one receive. A rank that is its own neighbour copies instead."""
        if destination == self._rank == source:
            return self._launch(self._copied(send, receive, count, dtype))
        outgoing, into = self._tensors.of(send, count, dtype), self._tensors.of(receive, count, dtype)
        if self._is_gloo and outgoing.is_cuda:
            # Gloo would pass a CUDA pointer to its socket as if it were host memory, which crashes the process.
            on_host = [tensor.to("cpu") for tensor in (outgoing, into)]
            exchange = self._exchange(on_host[0], destination, on_host[1], source)
            return self._launch([partial(on_host[0].copy_, outgoing), exchange, partial(into.copy_, on_host[1])])
        return self._launch([self._exchange(outgoing, destination, into, source)])

    def _exchange(self, outgoing: Any, destination: int, into: Any, source: int) -> Launch:
        distributed, group = self._distributed, self._group
        operations = [
            distributed.P2POp(distributed.isend, outgoing, self._in_job[destination], group),
            distributed.P2POp(distributed.irecv, into, self._in_job[source], group),
        ]

        def exchange() -> None:
            for work in distributed.batch_isend_irecv(operations):
                work.wait()

        return exchange

    def _launch(self, parts: Sequence[Launch]) -> Launch:
        return join_launches([*parts, *self._settle])

    def _op(self, op: ReduceOp, dtype: DataType) -> Any:
        return self._ops[ReduceOp.SUM if op is ReduceOp.AVG and divides_sum(self._name, dtype) else op]

    def _copied(self, send: Region, receive: Region, count: int, dtype: DataType) -> tuple[Launch, ...]:
        if send == receive:
            return ()
        into, source = self._tensors.of(receive, count, dtype), self._tensors.of(send, count, dtype)
        return (partial(into.copy_, source),)

    def _blocks(self, region: Region, count: int, dtype: DataType) -> list[Any]:
        return list(self._tensors.of(region, count * self._ranks, dtype).chunk(self._ranks))

    def _divided(self, into: Any, op: ReduceOp, dtype: DataType) -> tuple[Launch, ...]:
        """Return the division of a sum, if the backend cannot average. Integers are rounded down."""
        if op is not ReduceOp.AVG or not divides_sum(self._name, dtype):
            return ()
        rounding = None if dtype.kind is NumberKind.FLOAT else "floor"
        return (partial(into.div_, self._ranks, rounding_mode=rounding),)


def _either(distributed: Any, new: str, old: str) -> Any:
    return getattr(distributed, new, None) or getattr(distributed, old)


NEVER_RUN = "never run on hardware, because gpubench's authors have no such GPUs"


class TorchGroups:
    """The process groups of one torch.distributed backend, and their collectives."""

    def __init__(self, found: TorchDistributed, name: str, group: Group, *, one_node: bool) -> None:
        self.name = name
        self._found, self._group, self._one_node = found, group, one_node
        self._tensors = Tensors(found.torch)
        self.settle: Launch | None = None  # Called after every operation to wait for the work that it enqueued
        self.device: Any = None  # The torch device for new communicators
        self.process_group: Any = None
        self._all: TorchCalls | None = None

    @property
    def calls(self) -> TorchCalls:
        """The collectives of all ranks. The first use connects the ranks, so all of them must make it together."""
        if self._all is None:
            self._all = self._calls(self.connect())
        return self._all

    def connect(self) -> Any:
        """Open the process group of all ranks. All ranks must call this together."""
        if self.process_group is None:
            self.process_group = distributed.open_group(
                self._found, self._group, one_node=self._one_node, device=self.device
            )
        return self.process_group

    def open(self, group: Group) -> TorchCalls:
        return self._calls(distributed.open_part(self._found, group.gather(self._group.rank)))

    def versions(self) -> dict[str, str]:
        nccl = self._found.nccl()
        return {"torch": self._found.version} | ({"torch's NCCL": nccl} if nccl else {})

    def abort(self) -> None:
        """Abort the communicators if this torch version can. Another thread may call this."""
        abort = getattr(self.process_group, "abort", None)
        if abort is not None:
            abort()

    def end(self) -> None:
        distributed.close(self._found, self.process_group)
        self.process_group = None

    def _calls(self, process_group: Any) -> TorchCalls:
        return TorchCalls(self._found, self.name, process_group, self._tensors, self.settle)


class _Opening:
    _groups: TorchGroups

    @property
    def name(self) -> str:
        return self._groups.name

    @property
    def calls(self) -> TorchCalls:
        return self._groups.calls

    def open(self, group: Group) -> TorchCalls:
        return self._groups.open(group)

    def drop(self, calls: CollectiveCalls) -> None:
        """Do nothing, because process groups last as long as the job."""


class TorchOnCpu(_Opening, HostBuffers, BlockingClock):
    """torch.distributed on CPU tensors that share memory with NumPy arrays."""

    buffers = 3  # For a reduction, Gloo may need one more buffer of the message size

    def __init__(self, groups: TorchGroups, group: Group, ranks_on_node: int, progress: Progress) -> None:
        super().__init__(group, progress, "CPUs have no CUDA graphs")
        self._groups, self._ranks_on_node, self._progress = groups, ranks_on_node, progress

    def libraries(self) -> Mapping[str, str]:
        return self._groups.versions()

    def close(self) -> None:
        self._groups.end()


class TorchOnDevice(_Opening, BlockingClock):
    """torch.distributed on an AMD or Intel GPU, which only torch can use. The clock waits for each operation."""

    buffers = 2

    def __init__(self, groups: TorchGroups, found: TorchDistributed, device: Any, group: Group, progress: Progress):
        super().__init__(group, progress, "on this device torch's operations are timed one by one")
        self._groups, self._torch, self._device, self._progress = groups, found.torch, device, progress
        self._of_kind = getattr(found.torch, device.type)
        groups.settle = getattr(self._of_kind, "synchronize", lambda: None)

    def libraries(self) -> Mapping[str, str]:
        """Return the torch version, and warn that this backend is untested."""
        return self._groups.versions() | {"this backend": NEVER_RUN}

    def free_bytes(self) -> int:
        free, _ = self._of_kind.mem_get_info(self._device)
        return int(free) * 7 // 8

    def allocate(self, size_bytes: int) -> Memory:
        return DeviceMemory(self._torch, self._device, size_bytes, self._progress)

    def close(self) -> None:
        self._groups.end()


class _OnCuda(_Opening, GpuBuffers):
    """Base class for torch backends on a GPU that CuPy has opened. Torch uses CuPy's stream."""

    buffers = 2

    def _share_stream(self, found: TorchDistributed) -> Any:
        """Make torch use the GPU and stream of `self._device`. Return the torch device."""
        cuda, index = found.torch.cuda, self._device.identity.index
        cuda.set_device(index)
        cuda.set_stream(cuda.ExternalStream(self._device.stream.ptr, device=index))
        return found.torch.device("cuda", index)

    def libraries(self) -> Mapping[str, str]:
        return self._groups.versions() | self._device.libraries()


class EnqueuedOnCuda(_OnCuda, GatedClock):
    """Torch operations that are enqueued on a stream and measured in GPU time."""

    def __init__(
        self, groups: TorchGroups, found: TorchDistributed, device: CudaDevice, group: Group, progress: Progress
    ) -> None:
        super().__init__(device, group, progress)
        self._groups, self._device = groups, device
        self._torch_device = self._share_stream(found)

    def libraries(self) -> Mapping[str, str]:
        return {**super().libraries(), **self.gate_words()}

    def close(self) -> None:
        self._device.stream.synchronize()
        self._groups.end()
        self.free_gate()
        self._device.close()


class TorchNccl(EnqueuedOnCuda):
    """torch.distributed over NCCL on NVIDIA GPUs."""

    def __init__(
        self, groups: TorchGroups, found: TorchDistributed, device: CudaDevice, group: Group, progress: Progress
    ) -> None:
        super().__init__(groups, found, device, group, progress)
        groups.device = self._torch_device

    def trouble(self) -> str:
        """Return '', because torch does not expose NCCL's asynchronous errors."""
        return ""

    def abort(self) -> None:
        self._aborted = True
        self._groups.abort()


class TorchGlooOnCuda(_OnCuda, BlockingClock):
    """torch.distributed over Gloo with CUDA tensors, which Gloo copies to host memory and back."""

    def __init__(
        self, groups: TorchGroups, found: TorchDistributed, device: CudaDevice, group: Group, progress: Progress
    ) -> None:
        super().__init__(group, progress, "the host runs Gloo's operations")
        self._groups, self._device = groups, device
        self._share_stream(found)
        groups.settle = device.stream.synchronize

    def close(self) -> None:
        self._device.stream.synchronize()
        self._groups.end()
        self._device.close()
