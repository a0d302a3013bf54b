"""Blocks that PyTorch times: what is said where it cannot, and how far samples are apart."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from gpubench.backends.torch import distributed
from gpubench.errors import CouldNotMeasureError
from gpubench.training.computation import relative_interval, time_blocks
from gpubench.training.workload import TransformerModel

MODEL = TransformerModel(name="gpt", layers=4, hidden=64, heads=4, sequence=32, batch=2)


def test_a_pytorch_that_finds_no_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = ModuleType("torch")
    torch.__dict__.update(cuda=SimpleNamespace(is_available=lambda: False), __version__="2.11.0+cpu")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", ModuleType("torch.distributed"))
    monkeypatch.setattr(distributed, "is_installed", lambda: True)
    with pytest.raises(CouldNotMeasureError) as told:
        time_blocks(MODEL)
    assert told.value.seen == "PyTorch 2.11.0+cpu finds no GPU"
    assert told.value.next_step == "--tflops N"


def test_the_spread_of_samples_is_that_of_their_mean() -> None:
    assert relative_interval([1.0]) == 0
    assert relative_interval([1.0, 1.0, 1.0]) == 0
    assert relative_interval([0.9, 1.0, 1.1, 1.0]) == pytest.approx(1.96 * 0.0816497 / 2, rel=1e-4)
