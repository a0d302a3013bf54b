"""How many GPUs a process is shown."""

from pathlib import Path

import pytest

from gpubench.hardware.node.gpu_count import gpus_of_host, visible_gpus


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (None, 4),
        ("0,1", 2),
        ("3", 1),
        ("", 0),
        ("-1", 0),
        ("0,9,1", 1),
        ("GPU-8932f937,GPU-12345678", 2),
        ("0,1,2,3,0", 4),
    ],
)
def test_cuda_shows_what_stands_before_the_first_that_is_not_there(given: str | None, shown: int) -> None:
    assert visible_gpus(4, {} if given is None else {"CUDA_VISIBLE_DEVICES": given}) == shown


def test_the_driver_lists_the_gpus_of_a_host(tmp_path: Path) -> None:
    assert gpus_of_host(tmp_path) == 0
    for name in ("0000:18:00.0", "0000:2a:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    assert gpus_of_host(tmp_path) == 2
