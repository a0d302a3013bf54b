"""Computation that is timed: products and copies on a CuPy of NumPy, and what a plan makes of them."""

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest

from gpubench.hardware import compute
from gpubench.hardware.compute import ProductTimer, spread_of
from gpubench.hardware.torch import distributed
from gpubench.jobs import plan
from gpubench.model.workload import TransformerModel

MODEL = TransformerModel(name="gpt", layers=4, hidden=64, heads=4, sequence=32, batch=2)


@dataclass
class FakeGpu:
    """A stream whose time passes by 1 ps a multiplication, 1 ns a copied megabyte."""

    now_ms: float = 0.0
    launched: list[str] = field(default_factory=list)

    @property
    def device(self) -> Any:
        gpu = self

        class Event:
            def record(self, _stream: object) -> None:
                self.at = gpu.now_ms

            def synchronize(self) -> None:
                pass

        def matmul(first: Any, second: Any, out: Any) -> None:
            gpu.launched.append(f"{first.shape[0]}x{first.shape[1]}x{second.shape[1]}")
            gpu.now_ms += first.shape[0] * first.shape[1] * second.shape[1] * 1e-9
            out[...] = first @ second

        def copyto(target: Any, source: Any) -> None:
            gpu.now_ms += source.nbytes * 1e-9
            target[...] = source

        cupy = SimpleNamespace(
            matmul=matmul,
            copyto=copyto,
            cuda=SimpleNamespace(Event=Event, get_elapsed_time=lambda first, last: last.at - first.at),
            **{name: getattr(numpy, name) for name in ("arange", "empty", "zeros", "empty_like")},
            **{name: getattr(numpy, name) for name in ("float16", "float32", "int32")},
        )
        return SimpleNamespace(cupy=cupy, stream=SimpleNamespace(synchronize=lambda: None))


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> ProductTimer:
    monkeypatch.setattr(compute, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(compute, "_SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(compute, "_COPY_BYTES", 2**20)
    return ProductTimer(FakeGpu().device)


def test_products_and_copies_are_timed_in_seconds(timer: ProductTimer) -> None:
    samples = timer.product(8, 16, 32)
    assert len(samples) == 7
    assert samples == pytest.approx([8 * 16 * 32 * 1e-12] * 7)
    assert timer.copy() == pytest.approx([timer.copy_bytes * 1e-12] * 7)


def test_without_pytorch_a_model_follows_from_its_products(
    timer: ProductTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two FLOPs a multiplication, so 2 TFLOP/s; copies at 2 TB/s, read and written."""
    monkeypatch.setattr(distributed, "is_installed", lambda: False)
    monkeypatch.setattr(plan, "_product_timer", lambda: timer)
    found = plan.measured_compute(MODEL, None)
    assert found.copy_gb_s == pytest.approx(2000)
    moved = 18 * MODEL.tokens * MODEL.hidden * 2 / 2e12
    assert found.forward_seconds == pytest.approx(MODEL.forward_flops() / 2e12 + MODEL.layers * moved)
    assert found.backward_seconds > 1.9 * found.forward_seconds
    assert found.origin == "measured"
    assert "by CuPy" in found.source


def test_a_pytorch_that_finds_no_gpu_is_told(timer: ProductTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = ModuleType("torch")
    torch.__dict__.update(cuda=SimpleNamespace(is_available=lambda: False), __version__="2.11.0+cpu")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", ModuleType("torch.distributed"))
    monkeypatch.setattr(distributed, "is_installed", lambda: True)
    monkeypatch.setattr(plan, "_product_timer", lambda: timer)
    assert "PyTorch 2.11.0+cpu finds no GPU" in plan.measured_compute(MODEL, None).source


def test_the_spread_of_samples_is_that_of_their_mean() -> None:
    assert spread_of([1.0]) == 0
    assert spread_of([1.0, 1.0, 1.0]) == 0
    assert spread_of([0.9, 1.0, 1.1, 1.0]) == pytest.approx(1.96 * 0.0816497 / 2, rel=1e-4)
