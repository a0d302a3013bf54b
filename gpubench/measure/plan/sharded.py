"""A step of FSDP (PyTorch's fully_shard) or ZeRO-3: parameters are gathered block by block, gradients scattered.

In the forward pass the all-gather of block *i* may begin once the parameters of block *i* - 2 have been copied out of
their buffer, and the block computes behind its own copy. In the backward pass the all-gather of the block before is
issued as a block begins, in front of that block's reduce-scatter where it is prefetched, behind it where it is not;
both go through one communicator, in the order of issue. A block's gradients are copied together once the
reduce-scatter of the block behind it has ended (PyTorch 2.11, torch/distributed/fsdp/_fully_shard). Gathered twice
and scattered once: 3Ψe(n-1)/n bytes a rank (Rajbhandari et al. 2020, arXiv 1910.02054, section 7.2).
"""

from gpubench.measure.plan.blocks import BlockWriter
from gpubench.measure.plan.gradients import tensor_bytes
from gpubench.measure.plan.program import GRADIENTS, StepJob, StepProgram
from gpubench.model.workload.transformer import Operation

_GATHER = "parameter all-gather"
_SCATTER = "gradient reduce-scatter"


def write_sharded_step(program: StepProgram) -> None:
    """The tasks of all microbatches of a step."""
    writer = _ShardedStep(program)
    for _ in range(program.job.settings.microbatches):
        writer.microbatch()


class _ShardedStep:
    def __init__(self, program: StepProgram) -> None:
        self._program = program
        self._job = program.job
        self._writer = BlockWriter(program)
        model = self._job.model
        first, last = model.ends()
        self._first, self._last = first, last
        # The root holds what lies outside the blocks, and keeps it from the forward to the backward pass.
        self._root = _bytes(self._job, tuple(each for each in (first, last) if each is not None))
        self._blocks = [_bytes(self._job, model.operations(block)) for block in range(model.layers)]
        self._scattered: int | None = None

    def microbatch(self) -> None:
        """Forward and backward of one microbatch."""
        program, writer, blocks = self._program, self._writer, range(len(self._blocks))
        copied: list[int] = []
        self._gather(self._root, ())
        writer.end(self._first, backward=False)
        for block in blocks:
            task = self._issue(self._blocks[block], copied[-2:-1])
            copied.append(self._copy_out(self._blocks[block], task))
            writer.forward(block)
        writer.end(self._last, backward=False)
        writer.end(self._last, backward=True)
        gathered: int | None = None
        for block in reversed(blocks):
            if gathered is None:
                gathered = self._issue(self._blocks[block], self._behind())
            self._copy_out(self._blocks[block], gathered)
            gathered = None
            if block and self._job.settings.prefetch:
                gathered = self._issue(self._blocks[block - 1], self._behind())
            writer.backward(block)
            self._scatter(self._blocks[block])
        writer.end(self._first, backward=True)
        self._scatter(self._root)
        program.compute("end", 0.0, () if self._scattered is None else (self._scattered,))

    def _behind(self) -> tuple[int, ...]:
        return () if self._program.last is None else (self._program.last,)

    def _gather(self, size_bytes: int, after: tuple[int, ...]) -> None:
        self._copy_out(size_bytes, self._issue(size_bytes, after))

    def _issue(self, size_bytes: int, after: "tuple[int, ...] | list[int]") -> int | None:
        group = self._job.gradient_group()
        return self._program.communicate(
            "allgather", group, size_bytes, source=_GATHER, stream=GRADIENTS, after=tuple(after)
        )

    def _copy_out(self, size_bytes: int, task: int | None) -> int:
        return self._program.copy("out of buffer", size_bytes, () if task is None else (task,))

    def _scatter(self, size_bytes: int) -> None:
        if not size_bytes:
            return
        self._program.copy("into buffer", size_bytes, () if self._scattered is None else (self._scattered,))
        group = self._job.gradient_group()
        self._scattered = self._program.communicate(
            "reducescatter", group, size_bytes, source=_SCATTER, stream=GRADIENTS, after=self._behind()
        )


def _bytes(job: StepJob, operations: tuple[Operation, ...]) -> int:
    return sum(tensor_bytes(job, tensor) for each in operations for tensor in each.tensors)
