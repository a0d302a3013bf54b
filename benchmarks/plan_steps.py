"""Real training steps of PyTorch on the GPUs here, timed: what `benchmarks.plan_validation` holds predictions against.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.plan_steps --fabric healthy --folder steps/

Forward and backward, no optimizer, bf16, the gradients of one microbatch; a step is the time between two events at its
beginning, the median of `--steps`. Every rank's figures are written to `FOLDER/FABRIC.rank0.json`:

- `single`: each model on one GPU, forward and backward apart, all GPUs at once and nothing communicated;
- `contention`: collectives beside a model's own forward and backward, and beside GEMMs, neither being a training step;
- `steps`: DDP by bucket size, FSDP2 with and without prefetch, tensor parallelism, a pipeline.

The settings of a fabric (NCCL_MAX_CTAS, NCCL_P2P_DISABLE) are the environment's; `--fabric` is what it is called.
"""

import argparse
import itertools
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "gpt-0.3B": {"kind": "gpt", "layers": 24, "hidden": 1024, "heads": 16, "sequence": 2048, "batch": 4},
    "gpt-0.8B": {"kind": "gpt", "layers": 16, "hidden": 2048, "heads": 16, "sequence": 2048, "batch": 4},
    "gpt-1.3B": {"kind": "gpt", "layers": 16, "hidden": 2560, "heads": 20, "sequence": 2048, "batch": 4},
    "gpt-7B": {"kind": "gpt", "layers": 32, "hidden": 4096, "heads": 32, "sequence": 2048, "batch": 1},
    "mlp-0.3B": {"kind": "mlp", "layers": 9, "hidden": 2048, "heads": 16, "sequence": 2048, "batch": 4},
    "mlp-0.8B": {"kind": "mlp", "layers": 6, "hidden": 4096, "heads": 32, "sequence": 2048, "batch": 4},
}
"""Blocks alone, no embedding: `gpt` is layer norm, attention, layer norm, two linear layers; `mlp` the last two."""

TINY = {
    "gpt-0.3B": {"kind": "gpt", "layers": 2, "hidden": 64, "heads": 4, "sequence": 32, "batch": 2},
    "mlp-0.3B": {"kind": "mlp", "layers": 2, "hidden": 64, "heads": 4, "sequence": 32, "batch": 2},
}
"""To try the program without a GPU."""

BUCKETS = (1, 5, 25, 100, 250, 1000)
MEGA = 2**20


def main() -> None:
    """Measure what was asked for; rank 0 writes it down."""
    arguments = parse()
    run = Run(arguments)
    try:
        run.measure()
    finally:
        run.write()
        run.close()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fabric", default="healthy")
    parser.add_argument("--folder", type=Path, default=Path("steps"))
    parser.add_argument("--models", default="gpt-0.3B,mlp-0.3B,gpt-0.8B,mlp-0.8B,gpt-1.3B,gpt-7B")
    parser.add_argument("--what", default="single,contention,ddp,fsdp,tp,pp,again")
    parser.add_argument("--buckets", default=",".join(map(str, BUCKETS)))
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warm", type=int, default=3, help="untimed; DDP makes its buckets after the first")
    parser.add_argument("--settle", type=float, default=1.5, help="seconds of steps before those of one GPU are timed")
    parser.add_argument("--tiny", action="store_true", help="tiny models on CPUs with gloo")
    return parser.parse_args()


class Run:
    """One rank of the measurement."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.arguments = torch, dist, arguments
        self.rank, self.local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        self.cuda = not arguments.tiny
        self.device = torch.device("cuda", self.local) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
            dist.init_process_group("nccl", device_id=self.device)
        else:
            dist.init_process_group("gloo")
        self.ranks = dist.get_world_size()
        self.found: dict[str, Any] = {
            "fabric": arguments.fabric,
            "ranks": self.ranks,
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name() if self.cuda else "none",
            "environment": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
            "single": [],
            "contention": [],
            "steps": [],
            "failed": [],
        }

    def measure(self) -> None:
        """All parts, each model after the other; a part that fails is written down and does not end the rest."""
        models = TINY if self.arguments.tiny else MODELS
        asked = self.arguments.what.split(",")
        if self.cuda:
            self.found["copy_gb_s"] = self._copy_gb_s()
        for name in self.arguments.models.split(","):
            if name not in models:
                continue
            for part in asked:
                begun = time.perf_counter()
                try:
                    getattr(self, f"_{part}")(name, models[name])
                except Exception as error:  # noqa: BLE001 - one layout that cannot run must not take the others along
                    self.found["failed"].append({"model": name, "part": part, "error": repr(error)})
                    traceback.print_exc()
                self.write()
                if self.cuda:
                    self.torch.cuda.empty_cache()
                if self.rank == 0:
                    print(f"{self.arguments.fabric} {name} {part} {time.perf_counter() - begun:.1f} s", flush=True)

    def write(self) -> None:
        """Rank 0's figures as JSON."""
        if self.rank == 0:
            self.arguments.folder.mkdir(parents=True, exist_ok=True)
            path = self.arguments.folder / f"{self.arguments.fabric}.rank0.json"
            path.write_text(json.dumps(self.found, indent=1))

    def close(self) -> None:
        """Leave the group."""
        self.dist.destroy_process_group()

    # What is timed.

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) if self.cuda else (last - first) * 1e3

    def _wait(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize()

    def _timed(self, step: Callable[[], None]) -> list[float]:
        """Milliseconds of each step, warm-up left out."""
        for _ in range(self.arguments.warm):
            step()
        self._wait()
        self.dist.barrier()
        marks = [self._mark()]
        for _ in range(self.arguments.steps):
            step()
            marks.append(self._mark())
        self._wait()
        return [self._ms(first, last) for first, last in itertools.pairwise(marks)]

    def _note(self, name: str, layout: str, setting: Any, times: list[float], **more: Any) -> None:
        self.found["steps"].append(
            {
                "model": name,
                "layout": layout,
                "setting": setting,
                "ms": statistics.median(times),
                "all_ms": times,
                **more,
            }
        )

    def _input(self, model: dict[str, Any]) -> Any:
        shape = (model["batch"], model["sequence"], model["hidden"])
        data = self.torch.randn(shape, device=self.device, dtype=self.torch.bfloat16)
        return data.requires_grad_()

    def _model(self, model: dict[str, Any], layers: int | None = None, group: Any = None) -> Any:
        from benchmarks.plan_modules import stack

        with self.torch.device(self.device):
            made = stack(model, model["layers"] if layers is None else layers, group)
        return made.to(self.torch.bfloat16)

    def _step(self, module: Any, data: Any) -> Callable[[], None]:
        """Forward and backward; gradients are new in every step, as zero_grad(set_to_none=True) leaves them."""
        gradient = self.torch.randn_like(data)
        parameters = list(module.parameters())

        def step() -> None:
            for each in parameters:
                each.grad = None
            data.grad = None
            module(data).backward(gradient)

        return step

    # The parts, by the names of --what.

    def _copy_gb_s(self) -> float:
        """Bytes read and written by a copy within the GPU's memory, GB/s of 1e9 bytes."""
        source = self.torch.zeros(256 * MEGA, device=self.device, dtype=self.torch.bfloat16)
        target = self.torch.empty_like(source)
        return float(2 * source.nbytes / self._average(lambda: target.copy_(source), 10) / 1e6)

    def _single(self, name: str, model: dict[str, Any]) -> None:
        module, data = self._model(model), self._input(model)
        self._settle(self._step(module, data))
        whole = self._timed(self._step(module, data))
        forward = self._timed(lambda: self._forward(module, data))
        self.found["single"].append(
            {
                "model": name,
                "step_ms": statistics.median(whole),
                "forward_ms": statistics.median(forward),
                "copies_ms": statistics.median(self._timed(self._copies(module))),
                "all_ms": whole,
                "parameters": [[each, list(value.shape)] for each, value in module.named_parameters()],
            }
        )

    def _again(self, name: str, model: dict[str, Any]) -> None:
        """On one GPU once more, behind what communicates: clocks fall while a GPU is busy and warm."""
        module, data = self._model(model), self._input(model)
        whole = self._timed(self._step(module, data))
        own = next(each for each in self.found["single"] if each["model"] == name)
        own["again_ms"] = statistics.median(whole)

    def _settle(self, step: Callable[[], None]) -> None:
        """Steps until clocks and power have settled."""
        until = time.perf_counter() + self.arguments.settle
        while time.perf_counter() < until:
            step()
            self._wait()

    def _copies(self, module: Any) -> Callable[[], None]:
        """Every gradient into a flat buffer, tensor by tensor, and back: what DDP does beside reducing."""
        own = [self.torch.zeros_like(each) for each in module.parameters()]
        flat = self.torch.zeros(sum(each.numel() for each in own), device=self.device, dtype=own[0].dtype)
        sizes = [each.numel() for each in own]
        views = [part.view_as(each) for part, each in zip(flat.split(sizes), own, strict=True)]

        def copies() -> None:
            for view, each in zip(views, own, strict=True):
                view.copy_(each)
            for view, each in zip(views, own, strict=True):
                each.copy_(view)

        return copies

    def _forward(self, module: Any, data: Any) -> None:
        module(data)

    def _ddp(self, name: str, model: dict[str, Any]) -> None:
        from torch.nn.parallel import DistributedDataParallel

        buckets = (25, 250) if name == "gpt-7B" else tuple(map(int, self.arguments.buckets.split(",")))
        module, data = self._model(model), self._input(model)
        for bucket in buckets:
            wrapped = DistributedDataParallel(module, bucket_cap_mb=bucket)
            self._note(name, "ddp", bucket, self._timed(self._step(wrapped, data)))
            del wrapped
        silent = DistributedDataParallel(module, bucket_cap_mb=25)
        silent.register_comm_hook(None, _no_communication)
        self._note(name, "ddp-silent", 25, self._timed(self._step(silent, data)))

    def _fsdp(self, name: str, model: dict[str, Any]) -> None:
        from torch.distributed.fsdp import fully_shard

        for prefetch in (True, False):
            module, data = self._model(model), self._input(model)
            for block in module:
                fully_shard(block)
            fully_shard(module)
            if not prefetch:
                for block in module:
                    block.set_modules_to_backward_prefetch([block])
            self._note(name, "fsdp2", "prefetch" if prefetch else "none", self._timed(self._step(module, data)))
            del module

    def _tp(self, name: str, model: dict[str, Any]) -> None:
        if model["kind"] != "gpt":
            return
        module, data = self._model(model, group=self.dist.group.WORLD), self._input(model)
        self._note(name, "tp", self.ranks, self._timed(self._step(module, data)))
        del module
        alone = self._model(model, group=Alone(self.ranks))
        self._note(name, "tp-alone", self.ranks, self._timed(self._step(alone, data)))

    def _pp(self, name: str, model: dict[str, Any]) -> None:
        if name != "gpt-0.8B" and not self.arguments.tiny:
            return
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        module, data = self._model(model, model["layers"] // self.ranks), self._input(model)
        stage = PipelineStage(module, self.rank, self.ranks, self.device)
        for kind in (Schedule1F1B, ScheduleGPipe):
            schedule = kind(stage, n_microbatches=model["batch"], loss_fn=lambda out, _: out.float().mean())
            target = data.detach()

            def step(schedule: Any = schedule, target: Any = target) -> None:
                for each in module.parameters():
                    each.grad = None
                if self.rank == 0:
                    schedule.step(target)
                else:
                    schedule.step(target=target)

            self._note(name, "pp", kind.__name__, self._timed(step), microbatches=model["batch"])
        part = {**model, "batch": 1}
        one = self._input(part)
        self._note(name, "pp-alone", "one microbatch", self._timed(self._step(module, one)))
        self._note(name, "pp-alone", "its forward", self._timed(lambda: self._forward(module, one)))

    def _contention(self, name: str, model: dict[str, Any]) -> None:
        """Collectives beside GEMMs, and beside the forward and backward of two blocks of the model."""
        if not self.cuda or name not in ("gpt-0.8B", "mlp-0.8B"):
            return
        block, data = self._model(model, 2), self._input(model)
        partners = {f"{name} blocks": self._step(block, data)}
        if name == "gpt-0.8B":
            square = self.torch.randn(8192, 8192, device=self.device, dtype=self.torch.bfloat16)
            out = self.torch.empty_like(square)
            partners["gemm 8192"] = lambda: self.torch.matmul(square, square, out=out)
        sizes = (64,) if name == "mlp-0.8B" else (4, 16, 64, 256)
        for partner, work in partners.items():
            for collective in ("allreduce", "allgather", "reducescatter"):
                for size in sizes if collective == "allreduce" else (64,):
                    self._beside(partner, work, collective, size * MEGA)

    def _beside(self, partner: str, work: Callable[[], Any], collective: str, size: int) -> None:
        """Both alone, then twice together: the one that is timed begins later and ends earlier than the other."""
        other = self.torch.cuda.Stream()
        launch = self._collective(collective, size)
        comm_alone = self._agreed(self._average(launch, 10, other))
        work_alone = self._agreed(self._average(work, 6))
        with self._running(launch, other, max(4, int(14 * work_alone / comm_alone))):
            work_both = self._agreed(self._average(work, 6))
        with self._running(work, self.torch.cuda.current_stream(), max(6, int(80 * comm_alone / work_alone))):
            comm_both = self._agreed(self._average(launch, 10, other))
        self.found["contention"].append(
            {
                "partner": partner,
                "collective": collective,
                "size_bytes": size,
                "communication_alone_us": comm_alone * 1e3,
                "compute_alone_us": work_alone * 1e3,
                "compute_slowdown": work_both / work_alone,
                "communication_slowdown": comm_both / comm_alone,
            }
        )

    @contextmanager
    def _running(self, launch: Callable[[], Any], stream: Any, count: int) -> Iterator[None]:
        """So many launches on a stream, which run while the body is timed."""
        self.dist.barrier()
        self._wait()
        with self.torch.cuda.stream(stream):
            for _ in range(count):
                launch()
        yield
        self._wait()

    def _agreed(self, value: float) -> float:
        """The largest of all ranks: they have to issue the same collectives."""
        all_values = self.torch.tensor([value], device=self.device)
        self.dist.all_reduce(all_values, op=self.dist.ReduceOp.MAX)
        return float(all_values.item())

    def _average(self, launch: Callable[[], Any], count: int, stream: Any = None) -> float:
        """Milliseconds a launch, between two events on the stream it is issued to, the first launch left out."""
        with self.torch.cuda.stream(stream or self.torch.cuda.current_stream()):
            launch()
            first = self._mark()
            for _ in range(count):
                launch()
            last = self._mark()
        self._wait()
        return self._ms(first, last) / count

    def _collective(self, name: str, size: int) -> Callable[[], Any]:
        whole = self.torch.zeros(size // 2, device=self.device, dtype=self.torch.bfloat16)
        part = whole[: whole.numel() // self.ranks].clone()
        calls = {
            "allreduce": lambda: self.dist.all_reduce(whole),
            "allgather": lambda: self.dist.all_gather_into_tensor(whole, part),
            "reducescatter": lambda: self.dist.reduce_scatter_tensor(part, whole),
        }
        return calls[name]


def _no_communication(_state, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations
    """A hook for DDP that hands back what is in the bucket: all of DDP but the all-reduce."""
    import torch

    done: Any = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class Alone:
    """A group that is none: tensor parallelism's share of the work without its communication."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks


if __name__ == "__main__":
    main()
