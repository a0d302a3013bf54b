"""A GPU while a job is idle: two moments as one, and who holds its memory."""

from gpubench.model.facts.process import GpuProcess
from gpubench.model.facts.traffic import GpuUse, IdleGpu, LinkRates, both, holders, is_foreign

GIB = 2**30
PYTHON = GpuProcess(pid=8342, name="python", memory_bytes=120 * GIB)


def test_of_two_moments_the_worse_counts() -> None:
    earlier = IdleGpu(rates=LinkRates(nvlink_sent=1.0), use=GpuUse(utilization_percent=100, held_bytes=3))
    later = IdleGpu(
        rates=LinkRates(nvlink_sent=0.5, pcie_received=9.0),
        use=GpuUse(utilization_percent=3, users=(PYTHON,), held_bytes=5),
    )
    together = IdleGpu(
        rates=LinkRates(nvlink_sent=1.0, pcie_received=9.0),
        use=GpuUse(utilization_percent=100, users=(PYTHON,), held_bytes=3),
    )
    assert both((earlier,), (later,)) == (together,)
    assert both((), (later,)) == both((later,), ()) == (later,)
    assert IdleGpu().together(IdleGpu()) == IdleGpu()


def test_noise_is_nobody() -> None:
    assert [is_foreign(each) for each in (None, 0.0, 0.02, 0.5, 371.0)] == [False, False, False, True, True]


def test_who_holds_memory_is_named_and_what_nobody_shows_is_said() -> None:
    def words(size_bytes: int) -> str:
        return f"{size_bytes / GIB:g} GiB"

    assert holders(GpuUse(users=(PYTHON,), held_bytes=121 * GIB), words) == "process 8342 (python): 120 GiB"
    assert holders(GpuUse(held_bytes=130 * GIB), words) == "a process that is not visible here: 130 GiB"
    silent = GpuProcess(pid=7)
    assert holders(GpuUse(users=(silent,), held_bytes=9 * GIB), words) == "process 7: 9 GiB"
    assert holders(GpuUse(held_bytes=GIB // 2), words) == holders(GpuUse(), words) == ""


def test_a_container_is_named() -> None:
    inside = GpuProcess(pid=7, container="docker 3f2a91bc04de")
    assert (inside.label, PYTHON.label) == ("process 7 in docker 3f2a91bc04de", "process 8342 (python)")
