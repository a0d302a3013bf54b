"""torch and torch.distributed on NumPy and threads: the same names and real data, without a GPU.

Operations are written from PyTorch's documentation, independent of gpubench's own formulas. Gloo behaves as the real
one: it reduces in every rank's tensor, averages no integers, and crashes if a CUDA tensor is sent. Operations on GPU
memory are enqueued on torch's stream, and can be captured.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.fakes.cupy_on_numpy import Stream
from tests.fakes.ranks import SECONDS_TO_MEET, ThreadGroup

Array = npt.NDArray[Any]

_TYPES = ("uint8", "int8", "int32", "int64", "float16", "float32", "float64")
_on_their_way: dict[tuple[int, int, int], "Queue[Array]"] = {}
_REDUCE: dict[str, Callable[..., Any]] = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "AVG": np.add,
}


OnStream = Callable[[Callable[[], None]], None]


def _at_once(operation: Callable[[], None]) -> None:
    operation()


class Tensor:
    def __init__(self, array: Array, *, is_cuda: bool = False, on_stream: OnStream = _at_once) -> None:
        self.array = array
        self.is_cuda = is_cuda
        self.on_stream = on_stream

    def _part(self, array: Array) -> "Tensor":
        return Tensor(array, is_cuda=self.is_cuda, on_stream=self.on_stream)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def __float__(self) -> float:
        return float(self.array)

    def __getitem__(self, where: "slice | int") -> "Tensor":
        return self._part(self.array[where])

    def __setitem__(self, where: slice, value: int) -> None:
        self.array[where] = value

    def view(self, dtype: str) -> "Tensor":
        return self._part(self.array.view("uint16" if dtype == "bfloat16" else dtype))

    def copy_(self, other: "Tensor") -> None:
        self.on_stream(lambda: self.set(other.array))

    def set(self, values: Array) -> None:
        self.array[:] = values

    def div_(self, number: int, rounding_mode: str | None) -> None:
        divided = self.array // number if rounding_mode == "floor" else self.array / number
        self.array[:] = divided.astype(self.array.dtype)

    def chunk(self, parts: int) -> list["Tensor"]:
        return [self._part(each) for each in np.split(self.array, parts)]

    def tolist(self) -> list[float]:
        found: list[float] = self.array.tolist()
        return found

    def to(self, device: str) -> "Tensor":
        assert device == "cpu"
        return Tensor(self.array.copy())


class ProcessGroup:
    def __init__(self, group: ThreadGroup, backend: str) -> None:
        self._group = group
        self.backend = backend
        self.aborted = False
        self.group_name = f"group {id(group)}"

    def rank(self) -> int:
        return self._group.rank

    def size(self) -> int:
        return self._group.size

    def abort(self) -> None:
        self.aborted = True

    def all(self, tensor: Tensor) -> list[Array]:
        return [each.copy() for each in self._group.gather(tensor.array.copy())]

    def reduced(self, tensor: Tensor, op: str) -> Array:
        if self.backend == "gloo" and op == "AVG" and tensor.array.dtype.kind in "iu":
            message = "result type Float can't be cast to the desired output type"
            raise RuntimeError(message)
        every = self.all(tensor)
        with np.errstate(all="ignore"):
            wide = [each.astype("float64") if each.dtype.kind == "f" else each for each in every]
            total = wide[0]
            for each in wide[1:]:
                total = _REDUCE[op](total, each)
            if op == "AVG":
                total = total / self.size() if tensor.array.dtype.kind == "f" else total // self.size()
            return np.asarray(total).astype(tensor.array.dtype)

    def exchanged_values(self, value: Any) -> list[Any]:
        return self._group.gather(value)

    def part(self, ranks: Sequence[int]) -> "ProcessGroup":
        return ProcessGroup(self._group.split(min(ranks), self._group.rank), self.backend)

    def exchanged(self, sent: dict[int, Array]) -> dict[int, Array]:
        return {peer: each[self.rank()] for peer, each in enumerate(self._group.gather(sent)) if self.rank() in each}


class Store:
    """`torch.distributed.TCPStore`. Stores with the same port share their keys."""

    kept: dict[int, dict[str, bytes]] = {}  # noqa: RUF012
    _changed = threading.Condition()

    def __init__(self, port: int) -> None:
        self.port = port
        self._values = self.kept.setdefault(port, {})

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            self._values[key] = str(int(self._values.get(key, b"0")) + amount).encode()
            return int(self._values[key])

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                raise RuntimeError("wait timeout after 1000ms, keys: /gpubench/0/all there")


class Distributed:
    """`torch.distributed` of one rank, built without the backends in `lacks`."""

    ReduceOp = SimpleNamespace(**{name: name for name in _REDUCE})
    isend, irecv = "isend", "irecv"

    def __init__(self, group: ThreadGroup, lacks: Sequence[str] = ()) -> None:
        self._threads = group
        self._lacks = lacks
        self.group = SimpleNamespace(WORLD=None)
        self.opened: list[ProcessGroup] = []
        self.device: Any = None
        self._symmetric_memory: SymmetricMemory | None = None

    def is_available(self) -> bool:
        return True

    def is_nccl_available(self) -> bool:
        return "nccl" not in self._lacks

    def is_gloo_available(self) -> bool:
        return "gloo" not in self._lacks

    def is_initialized(self) -> bool:
        return self.group.WORLD is not None

    def TCPStore(  # noqa: N802
        self, host: str, port: int, ranks: int, *, is_master: bool, timeout: object, wait_for_workers: bool
    ) -> Any:
        assert ranks == self._threads.size
        assert is_master or port, "the first rank has the store, or picks its port, and the others are told it"
        assert not wait_for_workers
        return Store(port or 40321)

    def PrefixStore(self, prefix: str, store: "Store") -> "Store":  # noqa: N802
        assert prefix.startswith("gpubench/")
        return store

    def init_process_group(
        self,
        backend: str,
        *,
        store: Any = None,
        rank: int = -1,
        world_size: int = -1,
        timeout: object,
        device_id: object = None,
        init_method: str = "",
    ) -> None:
        if init_method != "env://":
            assert (rank, world_size, store.port) == (self._threads.rank, self._threads.size, 40321)
        if backend in self._lacks:
            raise RuntimeError(f"{backend} does not begin\nand more lines")
        self.device = device_id
        self.group.WORLD = self.new_group(backend=backend)

    def new_group(
        self, ranks: Sequence[int] | None = None, *, backend: str, use_local_synchronization: bool = False, **_: object
    ) -> ProcessGroup:
        assert (ranks is None) or use_local_synchronization
        whole = ProcessGroup(self._threads, backend)
        some = ranks is not None and len(ranks) < self._threads.size
        self.opened.append(whole.part(ranks) if some and ranks is not None else whole)
        return self.opened[-1]

    def get_world_size(self) -> int:
        return self._threads.size

    def all_gather_object(self, found: list[Any], value: Any, *, group: ProcessGroup) -> None:
        found[:] = group.exchanged_values(value)

    def gather_object(self, value: Any, found: list[Any] | None, _root: int, *, group: ProcessGroup) -> None:
        values = group.exchanged_values(value)
        if found is not None:
            found[:] = values

    def broadcast_object_list(self, held: list[Any], root: int, *, group: ProcessGroup) -> None:
        held[:] = next(each for rank, each in group.exchanged_values((self._threads.rank, list(held))) if rank == root)

    def barrier(self, *, group: ProcessGroup) -> None:
        group.exchanged_values(None)

    def send(self, tensor: Tensor, peer: int, *, group: ProcessGroup) -> None:
        _on_their_way.setdefault((id(self._threads._world), self._threads.rank, peer), Queue()).put(tensor.array.copy())

    def recv(self, tensor: Tensor, peer: int, *, group: ProcessGroup) -> None:
        queue = _on_their_way.setdefault((id(self._threads._world), peer, self._threads.rank), Queue())
        tensor.array[:] = queue.get(timeout=SECONDS_TO_MEET)

    def get_global_rank(self, group: ProcessGroup, rank: int) -> int:
        assert rank < group.size()
        return rank

    def destroy_process_group(self, group: ProcessGroup | None = None) -> None:
        group = group or self.group.WORLD
        assert group in self.opened
        if group is self.group.WORLD:
            self.group.WORLD = None

    def all_reduce(self, tensor: Tensor, op: str, *, group: ProcessGroup) -> None:
        tensor.on_stream(lambda: tensor.set(group.reduced(tensor, op)))

    def reduce(self, tensor: Tensor, root: int, op: str, *, group: ProcessGroup) -> None:
        total = group.reduced(tensor, op)
        if group.rank() == root or group.backend == "gloo":
            tensor.array[:] = total

    def reduce_scatter_tensor(self, into: Tensor, given: Tensor, op: str, *, group: ProcessGroup) -> None:
        into.array[:] = np.split(group.reduced(given, op), group.size())[group.rank()]

    def all_gather_into_tensor(self, into: Tensor, given: Tensor, *, group: ProcessGroup) -> None:
        into.array[:] = np.concatenate(group.all(given))

    def broadcast(self, tensor: Tensor, root: int, *, group: ProcessGroup) -> None:
        tensor.array[:] = group.all(tensor)[root]

    def all_to_all_single(
        self,
        into: Tensor,
        given: Tensor,
        taken_counts: list[int] | None = None,
        given_counts: list[int] | None = None,
        *,
        group: ProcessGroup,
    ) -> None:
        ends = group.size() if given_counts is None else np.cumsum(given_counts)[:-1]
        blocks = [np.split(each, ends)[group.rank()] for each in group.all(given)]
        assert taken_counts is None or [len(block) for block in blocks] == taken_counts
        into.array[:] = np.concatenate(blocks)

    def gather(self, given: Tensor, blocks: list[Tensor] | None, root: int, *, group: ProcessGroup) -> None:
        assert (blocks is not None) == (group.rank() == root)
        for block, each in zip(blocks or (), group.all(given), strict=False):
            block.array[:] = each

    def scatter(self, into: Tensor, blocks: list[Tensor] | None, root: int, *, group: ProcessGroup) -> None:
        assert (blocks is not None) == (group.rank() == root)
        whole = np.concatenate([each.array for each in blocks]) if blocks else np.empty(0)
        everything = group.all(Tensor(whole))
        into.array[:] = np.split(everything[root], group.size())[group.rank()]

    def P2POp(  # noqa: N802
        self, kind: str, tensor: Tensor, peer: int, group: ProcessGroup
    ) -> Any:
        assert not (group.backend == "gloo" and tensor.is_cuda), "Gloo would end this process: Bad address"
        return SimpleNamespace(kind=kind, tensor=tensor, peer=peer, group=group)

    def batch_isend_irecv(self, operations: Sequence[Any]) -> list[Any]:
        sent = {each.peer: each.tensor.array.copy() for each in operations if each.kind == "isend"}
        arrived = operations[0].group.exchanged(sent)

        def wait() -> None:
            for each in operations:
                if each.kind == "irecv":
                    each.tensor.array[:] = arrived[each.peer]

        return [SimpleNamespace(wait=wait)]


class SymmetricMemory:
    """`torch.distributed._symmetric_memory`, and `torch.ops.symm_mem` for float32.

    `refuses` is the driver's error if GPUs cannot reach each other's memory.
    """

    def __init__(self, on_stream: OnStream) -> None:
        self._on_stream = on_stream
        self._groups: dict[str, ProcessGroup] = {}
        self._shared: list[tuple[int, int]] = []
        self.refuses = ""
        self.calls: list[str] = []

    def empty(self, size_bytes: int, *, dtype: str, device: object) -> Tensor:
        assert dtype == "uint8"
        return Tensor(np.zeros(size_bytes, "uint8"), is_cuda=True, on_stream=self._on_stream)

    def rendezvous(self, tensor: Tensor, group: ProcessGroup) -> None:
        assert len(set(group.exchanged_values(len(tensor.array)))) == 1, "the same size on every rank"
        if self.refuses:
            raise RuntimeError(f"{self.refuses}\nand more lines")
        self._groups[group.group_name] = group
        self._shared.append((tensor.data_ptr(), tensor.data_ptr() + len(tensor.array)))

    def one_shot_all_reduce_out(self, given: Tensor, op: str, group: str, out: Tensor) -> None:
        self._check(given, op)
        assert not np.shares_memory(given.array, out.array), "a rank would read what another one overwrites"
        self.calls.append("one_shot_all_reduce_out")
        self._on_stream(lambda: out.set(self._groups[group].reduced(given, "SUM")))

    def one_shot_all_reduce_copy_out(self, shared: Tensor, given: Tensor, op: str, group: str, out: Tensor) -> None:
        self._check(shared, op)
        assert not np.shares_memory(shared.array, out.array)
        self.calls.append("one_shot_all_reduce_copy_out")

        def run() -> None:
            shared.set(given.array)
            out.set(self._groups[group].reduced(shared, "SUM"))

        self._on_stream(run)

    def two_shot_all_reduce_(self, tensor: Tensor, op: str, group: str) -> None:
        self._check(tensor, op)
        self.calls.append("two_shot_all_reduce_")
        self._on_stream(lambda: tensor.set(self._groups[group].reduced(tensor, "SUM")))

    def _check(self, tensor: Tensor, op: str) -> None:
        if op != "sum":
            raise RuntimeError("one_shot_all_reduce: only sum is supported for now.")
        if tensor.array.dtype != "float32":
            raise NotImplementedError("\"one_shot_all_reduce\" not implemented for 'Half'")
        if not any(start <= tensor.data_ptr() < end for start, end in self._shared):
            raise RuntimeError("one_shot_all_reduce: input must be allocated with empty_strided_p2p().")


class Torch:
    """`torch` on one rank, built for this CUDA or for none."""

    __version__ = "2.11.0+cu130"
    uint8 = "uint8"
    bfloat16 = "bfloat16"

    def __init__(self, group: ThreadGroup, cuda: str | None = None, lacks: Sequence[str] = ()) -> None:
        for name in _TYPES:
            setattr(self, name, name)
        self.version = SimpleNamespace(cuda=cuda, hip=None, xpu=None)
        self.distributed = Distributed(group, lacks)
        self.streams: list[int] = []
        self.distributed._symmetric_memory = SymmetricMemory(self._on_stream)
        self.ops = SimpleNamespace(symm_mem=self.distributed._symmetric_memory)
        self.cuda = SimpleNamespace(
            is_available=lambda: cuda is not None,
            set_device=lambda _index: None,
            ExternalStream=lambda pointer, device: pointer,
            set_stream=self.streams.append,
            nccl=SimpleNamespace(version=lambda: (2, 28, 9)),
        )

    def tensor(self, values: Sequence[float], dtype: str) -> Tensor:
        return Tensor(np.array(values, dtype))

    def zeros(self, count: int, dtype: str) -> Tensor:
        return Tensor(np.zeros(count, dtype))

    def device(self, kind: str, index: int) -> Any:
        return SimpleNamespace(type=kind, index=index)

    def _on_stream(self, operation: Callable[[], None]) -> None:
        Stream.of(self.streams[-1]).submit(operation)

    def as_tensor(self, array: Array, device: str) -> Tensor:
        is_cuda = device == "cuda"
        return Tensor(array, is_cuda=is_cuda, on_stream=self._on_stream if is_cuda else _at_once)

    def from_numpy(self, array: Array) -> Tensor:
        return Tensor(array)

    def empty(self, count: int, dtype: str, device: object) -> Tensor:
        return Tensor(np.full(count, 0xEE, dtype))
