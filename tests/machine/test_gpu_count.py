"""How many GPUs a host has."""

from pathlib import Path

from gpubench.machine.host import count_gpus


def test_the_driver_lists_the_gpus_of_a_host(tmp_path: Path) -> None:
    assert count_gpus(tmp_path) == 0
    for name in ("0000:18:00.0", "0000:2a:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    assert count_gpus(tmp_path) == 2
