"""A GPU while a job is idle: two moments as one, and who holds its memory."""

from gpubench.model.facts.process import GpuProcess
from gpubench.model.facts.traffic import GpuUse, describe_holders, exceeds_idle

GIB = 2**30
PYTHON = GpuProcess(pid=8342, name="python", memory_bytes=120 * GIB)


def test_noise_is_nobody() -> None:
    assert [exceeds_idle(each) for each in (None, 0.0, 0.02, 0.5, 371.0)] == [False, False, False, True, True]


def test_who_holds_memory_is_named_and_what_nobody_shows_is_said() -> None:
    def words(size_bytes: int) -> str:
        return f"{size_bytes / GIB:g} GiB"

    assert describe_holders(GpuUse(users=(PYTHON,), held_bytes=121 * GIB), words) == "process 8342 (python): 120 GiB"
    assert describe_holders(GpuUse(held_bytes=130 * GIB), words) == "a process that is not visible here: 130 GiB"
    silent = GpuProcess(pid=7)
    assert describe_holders(GpuUse(users=(silent,), held_bytes=9 * GIB), words) == "process 7: 9 GiB"
    assert describe_holders(GpuUse(held_bytes=GIB // 2), words) == describe_holders(GpuUse(), words) == ""
