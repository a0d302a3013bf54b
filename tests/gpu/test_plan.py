"""What `plan --measure` times on a GPU with PyTorch: blocks, and the host that issues them."""

from statistics import median

import pytest
from msgspec.structs import replace

from gpubench.training.computation import time_blocks
from gpubench.training.workload import Sharding, TransformerModel
from tests.gpu.machine import has_gpu

pytestmark = [pytest.mark.gpu, has_gpu]

MODEL = TransformerModel(name="gpt", layers=4, hidden=1024, heads=16, sequence=1024, batch=2, biases=True)


def test_blocks_are_timed() -> None:
    pytest.importorskip("torch")
    found = time_blocks(MODEL)
    assert len(found.forward) == len(found.backward) > 10
    print(found)  # noqa: T201
    assert min(found.forward) > 0
    assert median(found.forward) < median(found.backward)


def test_what_shards_takes_the_host_longer() -> None:
    pytest.importorskip("torch")
    found = time_blocks(MODEL).host
    assert 0 < found[None] < found[Sharding.FSDP]
    assert found[None] < found[Sharding.DDP]


def test_heads_of_a_size_of_their_own_are_timed() -> None:
    """Queries of 16 × 256 elements and keys of 4 × 256 of a hidden size of 1,024: 1.5 times as many products.

    With 16 sequences the products take longer than the host needs to issue them.
    """
    pytest.importorskip("torch")
    plain = replace(MODEL, batch=16)
    wide = replace(plain, head_size=256, key_value_heads=4)
    assert median(time_blocks(wide).forward) > median(time_blocks(plain).forward)
