import pytest

from gpubench.model.facts.process import GpuCondition, GpuProcess

JOB = GpuProcess(pid=77, name="python3", memory_bytes=30 * 2**30)


@pytest.mark.parametrize(
    ("condition", "remarks"),
    [
        (GpuCondition(), []),
        (GpuCondition(clock_mhz=1980, most_clock_mhz=1980), []),
        (GpuCondition(clock_mhz=1782, most_clock_mhz=1980), []),
        (GpuCondition(clock_mhz=1781, most_clock_mhz=1980), ["runs at 1781 of 1980 MHz"]),
        (GpuCondition(clock_mhz=1200), []),
        (
            GpuCondition(throttle_reasons=("sw_power_cap",), clock_mhz=1200, most_clock_mhz=1980),
            ["is throttled: sw power cap; 1200 of 1980 MHz"],
        ),
        (
            GpuCondition(throttle_reasons=("hw_slowdown", "hw_power_brake"), clock_mhz=1980, most_clock_mhz=1980),
            ["is throttled: hw slowdown, hw power brake"],
        ),
        (GpuCondition(memory_errors=3), ["had 3 uncorrectable memory errors since the driver was loaded"]),
        (GpuCondition(others=(JOB,)), ["is also used by process 77 (python3) (30.0 GiB)"]),
        (GpuCondition(others=(GpuProcess(pid=1), GpuProcess(pid=2))), ["is also used by process 1 and process 2"]),
    ],
)
def test_what_is_off_is_said_and_nothing_else(condition: GpuCondition, remarks: list[str]) -> None:
    assert list(condition.remarks()) == remarks


def test_what_nobody_could_read_is_named_with_the_reason() -> None:
    assert GpuCondition().not_read == ""
    unread = {"throttle_reasons": "Not Supported", "clock": "Not Supported"}
    assert GpuCondition(unread=unread).not_read == "throttle reasons, clock (Not Supported)"


def test_of_several_looks_what_was_off_in_any_stays() -> None:
    hot = GpuCondition(throttle_reasons=("sw_thermal_slowdown",), clock_mhz=900, most_clock_mhz=1980, others=(JOB,))
    cool = GpuCondition(clock_mhz=1980, most_clock_mhz=1980, memory_errors=1, unread={"clock": "x"})
    for both in (hot.combine(cool), cool.combine(hot)):
        assert both == GpuCondition(
            throttle_reasons=("sw_thermal_slowdown",),
            clock_mhz=900,
            most_clock_mhz=1980,
            memory_errors=1,
            others=(JOB,),
        )
    assert GpuCondition(unread={"clock": "x"}).combine(GpuCondition(unread={"clock": "y"})).unread == {"clock": "y"}


def test_nine_tenths_of_the_highest_clock_are_no_slow_clock() -> None:
    assert list(GpuCondition(clock_mhz=1782, most_clock_mhz=1980).remarks()) == []
    assert list(GpuCondition(clock_mhz=1781, most_clock_mhz=1980).remarks()) == ["runs at 1781 of 1980 MHz"]
