"""Forward and backward of the blocks of a model, with the communication inside them.

A block's operations share its time by their FLOPs. Per block and microbatch, of b·s·h activations of e bytes:

- tensor parallelism: an all-reduce of b·s·h·e after attention and after the MLP, as many in the backward pass
  (Shoeybi et al. 2019, arXiv 1909.08053, section 3); with sequence parallelism an all-gather before and a
  reduce-scatter after each, the same bytes (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2);
- Ulysses: an all-to-all of queries, keys, values and of the result, each b·s·h·e over the ranks (Jacobs et al. 2023,
  arXiv 2309.14509, section 3.2);
- ring attention: n - 1 sends of keys and values under n parts of the attention, in the backward pass with their
  gradients (Liu et al. 2023, arXiv 2310.01889, section 3);
- experts: tokens go to their experts and come back, tokens·experts_per_token·h·e each (Lepikhin et al. 2020, arXiv
  2006.16668, section 3.2), by the busiest rank.
"""

from collections.abc import Callable

from gpubench.measure.plan.program import StepJob, StepProgram
from gpubench.model.workload.layout import ContextKind
from gpubench.model.workload.transformer import Operation

CONTEXT = "context"

_TENSOR_SOURCE = "tensor parallel"
_SEQUENCE_SOURCE = "sequence parallel"
_EXPERT_SOURCE = "experts"

Ready = Callable[[Operation], None]
"""Told of an operation whose backward pass has been issued: its gradients are ready."""


class BlockTimes:
    """Seconds of the operations of a model on one GPU of a layout."""

    def __init__(self, job: StepJob) -> None:
        forward, backward = job.compute.shares(job.layout.tensor)
        flops = job.model.forward_flops() / job.model.batch
        self._forward = forward / flops / job.layout.context
        self._backward = backward / flops / job.layout.context

    def forward(self, operation: Operation) -> float:
        """Of the forward pass."""
        return operation.flops * self._forward

    def backward(self, operation: Operation) -> float:
        """Of the backward pass."""
        return operation.flops * self._backward


class BlockWriter:
    """Writes the passes of blocks into a program."""

    def __init__(self, program: StepProgram) -> None:
        self._program = program
        self.times = BlockTimes(program.job)
        job = program.job
        self._activations = job.model.activation_bytes / job.layout.context
        self._is_whole = max(job.layout.tensor, job.layout.context, job.layout.expert) == 1
        self._tensor, self._context, self._expert = job.tensor_group(), job.context_group(), job.expert_group()

    def forward(self, block: int) -> None:
        """The forward pass of a block."""
        if self._is_whole:
            self._compute_whole(block, backward=False)
            return
        for operation in self._program.job.model.operations(block):
            self._enter(operation.name)
            self._compute(operation, backward=False)
            self._leave(operation.name)

    def backward(self, block: int, ready: Ready | None = None) -> None:
        """The backward pass of a block, last operation first; `ready` of None: nobody waits for its gradients."""
        if self._is_whole and ready is None:
            self._compute_whole(block, backward=True)
            return
        for operation in reversed(self._program.job.model.operations(block)):
            self._leave(operation.name, backward=True)
            self._compute(operation, backward=True)
            if ready is not None:
                ready(operation)
            self._enter(operation.name, backward=True)

    def _compute_whole(self, block: int, *, backward: bool) -> None:
        """A block in which nothing is communicated, as one task of the kernels that it has."""
        operations = [each for each in self._program.job.model.operations(block) if each.flops]
        seconds = sum(map(self.times.backward if backward else self.times.forward, operations))
        self._program.compute(f"{block}.", seconds, kernels=len(operations) * (2 if backward else 1))

    def end(self, operation: Operation | None, *, backward: bool, ready: Ready | None = None) -> None:
        """Embedding or head, where the model has them."""
        if operation is None:
            return
        self._compute(operation, backward=backward)
        if ready is not None:
            ready(operation)

    def _compute(self, operation: Operation, *, backward: bool) -> None:
        job = self._program.job
        seconds = self.times.backward(operation) if backward else self.times.forward(operation)
        if operation.needs_attention and job.layout.context > 1:
            self._split_attention(operation.name, seconds, backward=backward)
            return
        if seconds > 0:
            # Backward: one product for the gradient of the input, one for that of the weights.
            self._program.compute(operation.name, seconds, kernels=2 if backward else 1)

    def _enter(self, name: str, *, backward: bool = False) -> None:
        """What comes before an operation in the forward pass, and behind it in the backward pass."""
        layout, part = self._program.job.layout, name.rpartition(".")[2]
        begins = name.endswith(("attention.in", "mlp.up", "router"))
        if begins and layout.sequence_parallel:
            collective = "reducescatter" if backward else "allgather"
            self._program.synchronous(collective, self._tensor, self._activations, _SEQUENCE_SOURCE)
        elif begins and backward:
            self._program.synchronous("allreduce", self._tensor, self._activations, _TENSOR_SOURCE)
        if part == "up" and "experts" in name:
            self._exchange_tokens()

    def _leave(self, name: str, *, backward: bool = False) -> None:
        """What comes behind an operation in the forward pass, and before it in the backward pass."""
        layout, part = self._program.job.layout, name.rpartition(".")[2]
        if part == "down" and "experts" in name:
            self._exchange_tokens()
        if not name.endswith(("attention.out", "mlp.down", "experts.down")):
            return
        if layout.sequence_parallel:
            collective = "allgather" if backward else "reducescatter"
            self._program.synchronous(collective, self._tensor, self._activations, _SEQUENCE_SOURCE)
        elif not backward:
            self._program.synchronous("allreduce", self._tensor, self._activations, _TENSOR_SOURCE)

    def _exchange_tokens(self) -> None:
        job = self._program.job
        size = self._activations * job.model.experts_per_token * job.settings.imbalance / job.layout.tensor
        self._program.synchronous("alltoall", self._expert, size, _EXPERT_SOURCE)

    def _split_attention(self, name: str, seconds: float, *, backward: bool) -> None:
        job, program = self._program.job, self._program
        if job.layout.context_kind is ContextKind.ULYSSES:
            queries, keys = self._context_bytes()
            exchanged = [queries, keys, keys]
            for size in exchanged if not backward else [queries]:
                program.synchronous("alltoall", self._context, size, str(ContextKind.ULYSSES))
            program.compute(name, seconds)
            for size in exchanged if backward else [queries]:
                program.synchronous("alltoall", self._context, size, str(ContextKind.ULYSSES))
            return
        ranks = job.layout.context
        size = 2 * self._context_bytes()[1] * (2 if backward else 1)
        arrived: int | None = None
        for part in range(ranks):
            before = [each for each in (arrived, program.last) if each is not None]
            arrived = None
            if part < ranks - 1:
                # Sent on as soon as it is here, while this part of the attention computes with it.
                arrived = program.communicate(
                    "sendrecv", self._context, size, source="ring attention", stream=CONTEXT, after=before
                )
            program.compute(name, seconds / ranks, before)

    def _context_bytes(self) -> tuple[float, float]:
        """Bytes of a rank's queries, and of its keys."""
        job = self._program.job
        model, layout = job.model, job.layout
        tokens = model.tokens / layout.context
        size = model.data_type.size_bytes / layout.tensor
        return tokens * model.hidden * size, tokens * model.key_value_width * size
