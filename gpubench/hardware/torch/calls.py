"""torch.distributed's collectives on tensors, with what it lacks made of what it has."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from gpubench.hardware.timing.loops import in_order
from gpubench.hardware.torch.library import TorchDistributed
from gpubench.hardware.torch.tensors import Tensors
from gpubench.model.facts.backends import divides
from gpubench.model.terms.operation import DataType, NumberKind, ReduceOp
from gpubench.ports.launch import Launch
from gpubench.ports.memory import Region

_OPS = {ReduceOp.SUM: "SUM", ReduceOp.PROD: "PRODUCT", ReduceOp.MAX: "MAX", ReduceOp.MIN: "MIN", ReduceOp.AVG: "AVG"}


class TorchCalls:
    """NCCL's collectives in one process group.

    `name` is gpubench's for the backend. `settle` waits for what a launch put on a stream; None where the timing does
    that. Gloo reduces in the buffer of every rank, so that ranks but the root hand it a copy too.
    """

    def __init__(
        self, found: TorchDistributed, name: str, group: Any, tensors: Tensors, settle: Launch | None = None
    ) -> None:
        self._distributed = found.distributed
        self._name, self._group, self._tensors = name, group, tensors
        self._settle = () if settle is None else (settle,)
        self._rank: int = group.rank()
        self._ranks: int = group.size()
        self._is_gloo = found.word == "gloo"
        # Roots and peers are ranks of the whole job to torch, also in a part of it.
        self._in_job = [found.distributed.get_global_rank(group, rank) for rank in range(self._ranks)]
        operations = found.distributed.ReduceOp
        self._ops = {op: getattr(operations, name) for op, name in _OPS.items()}
        # torch 2.13 has new names for two operations, and warns of the old ones.
        self._gather_into = _either(found.distributed, "all_gather_single", "all_gather_into_tensor")
        self._scatter_from = _either(found.distributed, "reduce_scatter_single", "reduce_scatter_tensor")

    def all_reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch:
        """`all_reduce`, in the receive buffer."""
        into = self._tensors.of(receive, count, dtype)
        call = partial(self._distributed.all_reduce, into, self._op(op, dtype), group=self._group)
        return self._launch([*self._copied(send, receive, count, dtype), call, *self._divided(into, op, dtype)])

    def all_gather(self, send: Region, receive: Region, count: int, dtype: DataType) -> Launch:
        """`all_gather_into_tensor`."""
        into, given = self._tensors.of(receive, count * self._ranks, dtype), self._tensors.of(send, count, dtype)
        return self._launch([partial(self._gather_into, into, given, group=self._group)])

    def reduce_scatter(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch:
        """`reduce_scatter_tensor`."""
        into, given = self._tensors.of(receive, count, dtype), self._tensors.of(send, count * self._ranks, dtype)
        call = partial(self._scatter_from, into, given, self._op(op, dtype), group=self._group)
        return self._launch([call, *self._divided(into, op, dtype)])

    def broadcast(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`broadcast`, in the receive buffer."""
        copied = self._copied(send, receive, count, dtype) if self._rank == root else ()
        into = self._tensors.of(receive, count, dtype)
        return self._launch(
            [*copied, partial(self._distributed.broadcast, into, self._in_job[root], group=self._group)]
        )

    def reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp, root: int) -> Launch:
        """`reduce`: the root's in its receive buffer; the others' in what they send, which NCCL leaves as it is."""
        is_root = self._rank == root
        copies = is_root or self._is_gloo
        work = self._tensors.of(receive if copies else send, count, dtype)
        copied = self._copied(send, receive, count, dtype) if copies else ()
        call = partial(self._distributed.reduce, work, self._in_job[root], self._op(op, dtype), group=self._group)
        return self._launch([*copied, call, *(self._divided(work, op, dtype) if is_root else ())])

    def all_to_all(self, send: Region, receive: Region, count: int, dtype: DataType) -> Launch:
        """`all_to_all_single`."""
        into, given = (self._tensors.of(each, count * self._ranks, dtype) for each in (receive, send))
        return self._launch([partial(self._distributed.all_to_all_single, into, given, group=self._group)])

    def gather(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`gather` into the blocks of the root's receive buffer."""
        blocks = self._blocks(receive, count, dtype) if self._rank == root else None
        given = self._tensors.of(send, count, dtype)
        return self._launch([partial(self._distributed.gather, given, blocks, self._in_job[root], group=self._group)])

    def scatter(self, send: Region, receive: Region, count: int, dtype: DataType, root: int) -> Launch:
        """`scatter` of the blocks of the root's send buffer."""
        blocks = self._blocks(send, count, dtype) if self._rank == root else None
        into = self._tensors.of(receive, count, dtype)
        return self._launch([partial(self._distributed.scatter, into, blocks, self._in_job[root], group=self._group)])

    def send_receive(
        self, send: Region, destination: int, receive: Region, source: int, count: int, dtype: DataType
    ) -> Launch:
        """`batch_isend_irecv` of one send and one receive; a rank that is its own neighbour copies."""
        if destination == self._rank == source:
            return self._launch(self._copied(send, receive, count, dtype))
        given, into = self._tensors.of(send, count, dtype), self._tensors.of(receive, count, dtype)
        if self._is_gloo and given.is_cuda:
            # Gloo writes a CUDA tensor to its socket as if it were the host's, which ends the process.
            on_host = [each.to("cpu") for each in (given, into)]
            exchange = self._exchange(on_host[0], destination, on_host[1], source)
            return self._launch([partial(on_host[0].copy_, given), exchange, partial(into.copy_, on_host[1])])
        return self._launch([self._exchange(given, destination, into, source)])

    def _exchange(self, given: Any, destination: int, into: Any, source: int) -> Launch:
        distributed, group = self._distributed, self._group
        operations = [
            distributed.P2POp(distributed.isend, given, self._in_job[destination], group),
            distributed.P2POp(distributed.irecv, into, self._in_job[source], group),
        ]

        def exchange() -> None:
            for work in distributed.batch_isend_irecv(operations):
                work.wait()

        return exchange

    def _launch(self, parts: Sequence[Launch]) -> Launch:
        return in_order([*parts, *self._settle])

    def _op(self, op: ReduceOp, dtype: DataType) -> Any:
        return self._ops[ReduceOp.SUM if op is ReduceOp.AVG and divides(self._name, dtype) else op]

    def _copied(self, send: Region, receive: Region, count: int, dtype: DataType) -> tuple[Launch, ...]:
        if send == receive:
            return ()
        into, given = self._tensors.of(receive, count, dtype), self._tensors.of(send, count, dtype)
        return (partial(into.copy_, given),)

    def _blocks(self, region: Region, count: int, dtype: DataType) -> list[Any]:
        return list(self._tensors.of(region, count * self._ranks, dtype).chunk(self._ranks))

    def _divided(self, into: Any, op: ReduceOp, dtype: DataType) -> tuple[Launch, ...]:
        """The division of a sum where the backend has no average; integers are rounded down."""
        if op is not ReduceOp.AVG or not divides(self._name, dtype):
            return ()
        rounding = None if dtype.kind is NumberKind.FLOAT else "floor"
        return (partial(into.div_, self._ranks, rounding_mode=rounding),)


def _either(distributed: Any, new: str, old: str) -> Any:
    return getattr(distributed, new, None) or getattr(distributed, old)
