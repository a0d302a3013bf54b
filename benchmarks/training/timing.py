"""One rank of a measurement: its device, its models, and its timers."""

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.training.blocks import TensorRanks, stack

Step = Callable[[], None]


class Rank:
    """The process of one GPU, or with `--tiny` of a CPU; `found` becomes the JSON file."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.number, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        self.cuda = not arguments.tiny
        self.device = torch.device("cuda", local) if self.cuda else torch.device("cpu")
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

    def mark(self) -> Any:
        """Return the current time: an event on the current stream, or on a CPU seconds."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) if self.cuda else (last - first) * 1e3

    def wait(self) -> None:
        """Wait until the GPU is done."""
        if self.cuda:
            torch.cuda.synchronize()

    def timed(self, step: Step) -> list[float]:
        """Return the milliseconds of each step after the warm-up."""
        for _ in range(self.arguments.warm):
            step()
        self.wait()
        dist.barrier()
        marks = [self.mark()]
        for _ in range(self.arguments.steps):
            step()
            marks.append(self.mark())
        self.wait()
        return [self.milliseconds(first, last) for first, last in itertools.pairwise(marks)]

    def average(self, launch: Callable[[], Any], count: int, stream: Any = None) -> float:
        """Return the mean milliseconds per launch between two events on its stream, after one launch to warm up."""
        with torch.cuda.stream(stream or torch.cuda.current_stream()):
            launch()
            first = self.mark()
            for _ in range(count):
                launch()
            last = self.mark()
        self.wait()
        return self.milliseconds(first, last) / count

    def settle(self, step: Step) -> None:
        """Run steps until clocks and power are steady."""
        until = time.perf_counter() + self.arguments.settle
        while time.perf_counter() < until:
            step()
            self.wait()

    def note(self, name: str, layout: str, setting: Any, times: list[float], **more: Any) -> None:
        middle = statistics.median(times)
        own = {"model": name, "layout": layout, "setting": setting, "ms": middle, "all_ms": times}
        self.found["steps"].append(own | more)

    def input(self, model: dict[str, Any]) -> Any:
        """Return a batch of activations."""
        shape = (model["batch"], model["sequence"], model["hidden"])
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16).requires_grad_()

    def model(self, model: dict[str, Any], layers: int | None = None, ranks: TensorRanks | None = None) -> Any:
        """Return the model's blocks; `layers` limits their number."""
        with torch.device(self.device):
            made = stack(model, model["layers"] if layers is None else layers, ranks)
        return made.to(torch.bfloat16)


def step_of(module: Any, data: Any) -> Step:
    """Return a step of forward and backward pass; gradients are new each time, as after zero_grad(set_to_none=True)."""
    gradient = torch.randn_like(data)
    parameters = list(module.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        data.grad = None
        module(data).backward(gradient)

    return step
