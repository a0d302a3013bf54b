"""Rates of links by NVML: the driver's averages where it has them, else counters that are read twice in a moment."""

import time
from types import SimpleNamespace
from typing import Any

from gpubench.machine.gpu_child import WINDOW_SECONDS, NvmlTraffic
from gpubench.model.facts.traffic import GpuReading
from tests.fakes.nvml import FakeGpu, FakeNvml, NVMLError, process

MIB = 2**20


class GpmNvml(FakeNvml):
    """One with GPM: each sample is a number, metrics are what a GPU says, or an error."""

    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self, *gpus: FakeGpu, metrics: dict[int, float | int], error: int = 0, refuses: int = 0) -> None:
        super().__init__(*gpus)
        self.metrics, self.error, self.refuses = metrics, error, refuses
        self.samples = 0

    def c_nvmlGpmMetricsGet_t(self) -> Any:  # noqa: N802 - pynvml's name
        metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(8)]
        return SimpleNamespace(metrics=metrics, sample1=None, sample2=None)

    def nvmlGpmSampleAlloc(self) -> dict[str, int]:  # noqa: N802
        return {}

    def nvmlGpmQueryDeviceSupport(self, _gpu: FakeGpu) -> Any:  # noqa: N802
        return SimpleNamespace(isSupportedDevice=1)

    def nvmlGpmSampleGet(self, _gpu: FakeGpu, sample: dict[str, int]) -> None:  # noqa: N802
        self._fail(self.refuses)
        self.samples += 1
        sample["taken"] = self.samples

    def nvmlGpmMetricsGet(self, asked: Any) -> None:  # noqa: N802
        self._fail(self.error)
        assert asked.sample2["taken"] == asked.sample1["taken"] + 1
        for metric in asked.metrics[: asked.numMetrics]:
            found = self.metrics.get(metric.metricId)
            metric.nvmlReturn, metric.value = (3, 0.0) if found is None else (0, found)


H200 = {1: 98.3, 20: 31921.0, 21: 27933.0, 60: 5.0, 61: 7.0}


def read(library: Any, times: int = 1, **more: Any) -> list[GpuReading]:
    traffic = NvmlTraffic(library, **more)
    return [traffic.read()[0] for _ in range(times)][-1:]


def test_kernels_are_asked_about_only_where_something_leaves_by_pcie() -> None:
    """It costs thirty times what all rates do."""
    (found,) = read(GpmNvml(FakeGpu("06"), metrics={**H200, 20: 3.0}), 3)
    assert (found.kernels_percent, found.nvlink_sent_gb_s) == (None, 7 * MIB / 1e9)
    busy = FakeGpu("06", replies={"nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=42)})
    (found,) = read(GpmNvml(busy, metrics={key: value for key, value in H200.items() if key != 1}), 3)
    assert (found.kernels_percent, found.utilization_percent) == (None, 42)
    assert not [name for name in found.unknown if name.startswith(("pcie", "nvlink"))]


def test_an_average_that_the_driver_has_not_is_unknown() -> None:
    (found,) = read(GpmNvml(FakeGpu(), metrics={key: value for key, value in H200.items() if key != 20}))
    assert found.pcie_sent_gb_s is None
    assert found.unknown["pcie_sent"] == "the driver reports no average for it"
    assert found.pcie_received_gb_s is not None
    (found,) = read(GpmNvml(FakeGpu(), metrics={**H200, 21: float("nan")}))
    assert found.pcie_received_gb_s is None
    (found,) = read(GpmNvml(FakeGpu(), metrics=H200, error=999))
    assert found.unknown["nvlink_sent"] == "Unknown Error"


def counting(sent: list[int]) -> FakeGpu:
    """A GPU before Hopper: NVLink counters in KiB, PCIe counters of 32 bits that say these numbers in turn."""

    def fields(_scope: int) -> dict[int, int | None]:
        return {138: 1000, 139: 2000, 197: sent.pop(0) if sent else 0, 198: 77, 161: 3}

    return FakeGpu(
        "06",
        fields=fields,
        replies={
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=42),
            "nvmlDeviceGetClockInfo": lambda _: 1410,
            "nvmlDeviceGetComputeRunningProcesses": [process(7, 2**30)],
        },
    )


def test_counters_that_may_have_gone_around_meanwhile_are_unknown() -> None:
    """A machine so busy that 20 ms of sleep take 40."""
    (found,) = read(FakeNvml(counting([0, 0, 10**6])), sleep=lambda _: time.sleep(2 * WINDOW_SECONDS))
    assert (found.pcie_sent_gb_s, found.pcie_received_gb_s) == (None, None)
    assert "may have overflowed" in found.unknown["pcie_sent"]


def test_who_may_not_use_gpm_gets_counters() -> None:
    library = GpmNvml(counting([]), metrics=H200, refuses=3)
    (found,) = read(library, sleep=lambda _: None)
    assert (found.nvlink_sent_bytes, found.nvlink_sent_gb_s) == (1000 * 1024, None)


def test_the_driver_s_own_window_is_the_last_resort() -> None:
    gpu = FakeGpu(
        "06", fields=lambda _: {138: 1, 139: 2}, replies={"nvmlDeviceGetPcieThroughput": lambda way: 663 + way}
    )
    (found,) = read(FakeNvml(gpu), sleep=lambda _: None)
    assert (found.pcie_sent_gb_s, found.pcie_received_gb_s) == (663e-6, 664e-6)


def test_of_a_gpu_with_nvlink_c2c_what_goes_to_host_memory_is_unknown() -> None:
    gpu = FakeGpu("06", replies={"nvmlDeviceGetC2cModeInfoV": SimpleNamespace(isC2cEnabled=1)})
    (found,) = read(GpmNvml(gpu, metrics=H200))
    assert (found.pcie_sent_gb_s, found.pcie_received_gb_s) == (None, None)
    assert "NVLink-C2C" in found.unknown["pcie_sent"]
    assert found.nvlink_sent_gb_s is not None


def test_processes_that_may_not_be_seen_are_unknown() -> None:
    gpu = FakeGpu("06", replies={"nvmlDeviceGetComputeRunningProcesses": NVMLError(3)})
    (found,) = read(FakeNvml(gpu), sleep=lambda _: None)
    assert (found.processes, found.unknown["processes"]) == (None, "Not Supported")


def test_processes_are_named_anew_only_where_they_are_others() -> None:
    library = FakeNvml(counting([]))
    traffic = NvmlTraffic(library, sleep=lambda _: None)
    for _ in range(3):
        traffic.read()
    assert library.calls.count("nvmlDeviceGetGraphicsRunningProcesses") == 1
    assert library.calls.count("nvmlDeviceGetComputeRunningProcesses") == 4


def test_a_gpu_that_is_lost_stays_lost_and_costs_none_of_the_others() -> None:
    lost = FakeGpu("06", replies={"nvmlDeviceGetComputeRunningProcesses": NVMLError(15)})
    gone = FakeGpu("07", handle_error=15)
    traffic = NvmlTraffic(FakeNvml(lost, gone, FakeGpu("08")), sleep=lambda _: None)
    for _ in range(2):
        found = traffic.read()
        assert [each.lost for each in found] == ["GPU is lost", "GPU is lost", None]
    assert [each.index for each in NvmlTraffic(FakeNvml(), [2], sleep=lambda _: None).read()] == [2]
