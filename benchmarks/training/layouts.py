"""Training steps distributed over all ranks: DDP by bucket size, FSDP2, tensor parallelism, a pipeline."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from benchmarks.training.blocks import TensorRanks
from benchmarks.training.timing import Rank, step_of

_PIPELINED = "gpt-0.8B"


def ddp(rank: Rank, name: str, model: dict[str, Any]) -> None:
    """Measure DDP for each bucket size, and with a hook that does not reduce."""
    buckets = (25, 250) if name == "gpt-7B" else tuple(map(int, rank.arguments.buckets.split(",")))
    module, data = rank.model(model), rank.input(model)
    for bucket in buckets:
        wrapped = DistributedDataParallel(module, bucket_cap_mb=bucket)
        rank.note(name, "ddp", bucket, rank.timed(step_of(wrapped, data)))
        del wrapped
    silent = DistributedDataParallel(module, bucket_cap_mb=25)
    silent.register_comm_hook(None, _no_communication)
    rank.note(name, "ddp-silent", 25, rank.timed(step_of(silent, data)))


def _no_communication(_state, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations
    """A DDP hook that returns the bucket unchanged, for the cost of DDP without the all-reduce."""
    done: Any = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def fsdp(rank: Rank, name: str, model: dict[str, Any]) -> None:
    """Measure FSDP2 with and without prefetch in the backward pass."""
    for prefetch in (True, False):
        module, data = rank.model(model), rank.input(model)
        for block in module:
            fully_shard(block)
        fully_shard(module)
        if not prefetch:
            for block in module:
                block.set_modules_to_backward_prefetch([block])
        rank.note(name, "fsdp2", "prefetch" if prefetch else "none", rank.timed(step_of(module, data)))
        del module


def tp(rank: Rank, name: str, model: dict[str, Any]) -> None:
    """Measure tensor parallelism over all ranks, and a rank's share of the work without communication."""
    if model["kind"] != "gpt":
        return
    data = rank.input(model)
    for layout, group in (("tp", dist.group.WORLD), ("tp-alone", None)):
        module = rank.model(model, ranks=TensorRanks(rank.ranks, group))
        rank.note(name, layout, rank.ranks, rank.timed(step_of(module, data)))
        del module


def pp(rank: Rank, name: str, model: dict[str, Any]) -> None:
    """Measure a pipeline with a stage per rank and two schedules, and a stage alone."""
    if name != _PIPELINED and not rank.arguments.tiny:
        return
    module, data = rank.model(model, model["layers"] // rank.ranks), rank.input(model)
    stage = PipelineStage(module, rank.number, rank.ranks, rank.device)
    for kind in (Schedule1F1B, ScheduleGPipe):
        schedule = kind(stage, n_microbatches=model["batch"], loss_fn=lambda out, _: out.float().mean())
        target = data.detach()

        def step(schedule: Any = schedule, target: Any = target) -> None:
            for parameter in module.parameters():
                parameter.grad = None
            if rank.number == 0:
                schedule.step(target)
            else:
                schedule.step(target=target)

        rank.note(name, "pp", kind.__name__, rank.timed(step), microbatches=model["batch"])
    one = rank.input({**model, "batch": 1})
    rank.note(name, "pp-alone", "one microbatch", rank.timed(step_of(module, one)))
    rank.note(name, "pp-alone", "its forward", rank.timed(lambda: module(one)))
