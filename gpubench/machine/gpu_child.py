"""A child process that reads the traffic of GPUs from NVML. It answers each line of input with a line of JSON.

Hopper and later GPUs report average rates between two samples (GPM). Older GPUs have byte counters. The CPU time of one
sample on a busy H200 is 0.3 ms. Reading kernel utilization adds up to 1.8 ms, errors 1.0 ms, and links 0.9 ms
(`benchmarks.nvml_costs`).
"""

import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpubench.machine.drivers import GPU_IS_LOST, GpuQueries, decode
from gpubench.machine.gpus import MULTIPROCESSORS, read_clock_reasons, read_processes, throttle_reasons
from gpubench.machine.nvml import ALL_LINKS, NVLINK_COUNTERS, PCIE_COUNTERS, open_library, read_link_counters
from gpubench.model.facts.snapshot import normalize_bus_id
from gpubench.model.facts.traffic import FOREIGN_GB_S, GpuReading
from gpubench.model.terms.plain import to_plain
from gpubench.model.terms.units import BYTES_PER_GB

if TYPE_CHECKING:
    from gpubench.model.facts.process import GpuProcess

WINDOW_SECONDS = 0.02  # Time between two readings of 32-bit counters, which PCIe 6 x16 wraps in 34 ms
_COUNTS_TO = 2**32
_MOST_WINDOW_SECONDS = _COUNTS_TO / BYTES_PER_GB / 128
"""A PCIe 6 x16 link may wrap its 32-bit counters after 34 ms. A later second reading would show too little traffic."""

_MIB = 2**20
_KB = 1000

_GPM_RATES = {"pcie_sent": 20, "pcie_received": 21, "nvlink_received": 60, "nvlink_sent": 61}
"""GPM metrics in MiB/s: NVML_GPM_METRIC_PCIE_TX, PCIE_RX, NVLINK_TOTAL_RX, NVLINK_TOTAL_TX."""

_GPM_KERNELS = {"kernels": 1}  # GPM metric in percent: NVML_GPM_METRIC_GRAPHICS_UTIL
_ERROR_FIELDS = {"NVLink replay": 161, "NVLink recovery": 162, "NVLink crc_flit": 163}
"""NVML_FI_DEV_NVLINK_ERROR_* field numbers. Scope 0xFFFFFFFF returns the sum over all links."""

_SELDOM = 20
"""Read each GPU's error counters only in every 20th reading. They rarely change, but cost as much as everything
else together.
"""

_C2C = "it reaches host memory over NVLink-C2C, which these counters do not count"

_THROUGHPUTS = {"pcie_sent": 0, "pcie_received": 1}  # Counter numbers in nvmlPcieUtilCounter_t


class NvmlTraffic:
    """Read the traffic of this host's GPUs, or only of those with `indices`. `sleep` waits between two counter
    readings.
    """

    def __init__(
        self, library: Any, indices: Sequence[int] | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        wanted = range(library.nvmlDeviceGetCount()) if indices is None else indices
        self._gpus = [_WatchedGpu(library, index) for index in wanted]
        self._sleep = sleep
        self._count = 0

    def read(self) -> tuple[GpuReading, ...]:
        """Read all GPUs at the same time. The first reading has no rates."""
        count, self._count = self._count, self._count + 1
        sampled = [gpu for gpu in self._gpus if gpu.begin_window()]
        if sampled:
            began = time.perf_counter()
            self._sleep(WINDOW_SECONDS)
            for gpu in sampled:
                gpu.end_window(time.perf_counter() - began)
        turns = [count == 0 or (count + place) % _SELDOM == 0 for place in range(len(self._gpus))]
        return tuple(gpu.read(seldom=turn) for gpu, turn in zip(self._gpus, turns, strict=True))


class _WatchedGpu:
    """One GPU, with its previous reading and the source of its traffic rates."""

    def __init__(self, library: Any, index: int) -> None:
        self._library, self._index = library, index
        self._lost: str | None = None
        self._processes: tuple[GpuProcess, ...] | None = None
        self._pids: frozenset[int] | None = None
        self._errors: dict[str, int] = {}
        self._why_no_processes = ""
        self._why_no_window = ""
        self._window: dict[str, int] = {}
        self._rates: dict[str, float] = {}
        self._gpm: _GpmSamples | None = None
        self.bus_id = f"GPU{index}"
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            self.bus_id = normalize_bus_id(decode(library.nvmlDeviceGetPciInfo(handle).busId) or "") or self.bus_id
        except library.NVMLError as error:
            self._lost, handle = str(error), None
        self._queries = GpuQueries(library, handle)
        coherent = None if handle is None else self._queries.call("nvmlDeviceGetC2cModeInfoV").value
        self._why_no_pcie = _C2C if coherent is not None and coherent.isC2cEnabled else ""
        if handle is not None:
            self._gpm = _GpmSamples.start(library, handle)

    def begin_window(self) -> bool:
        """Read the 32-bit PCIe counters for the first time. Return False if no second reading is needed."""
        self._rates = {}
        self._why_no_window = ""
        if self._gpm is not None or self._lost is not None:
            return False
        self._window = read_link_counters(self._queries, PCIE_COUNTERS)
        if len(self._window) == len(PCIE_COUNTERS):
            return True
        for name, number in _THROUGHPUTS.items():
            kb_s = self._queries.call("nvmlDeviceGetPcieThroughput", number).value
            if kb_s is not None:
                self._rates[name] = kb_s * _KB / BYTES_PER_GB
        return False

    def end_window(self, seconds: float) -> None:
        """Read the PCIe counters again, `seconds` after the first time, and compute rates."""
        counts = read_link_counters(self._queries, PCIE_COUNTERS)
        if seconds > _MOST_WINDOW_SECONDS:
            self._why_no_window = f"its 32-bit counters were read {seconds * 1000:.0f} ms apart and may have overflowed"
            return
        self._rates |= {
            name: (count - self._window[name]) % _COUNTS_TO / BYTES_PER_GB / seconds for name, count in counts.items()
        }

    def read(self, *, seldom: bool) -> GpuReading:
        """Read this GPU. Read its error counters only if `seldom` is true. Otherwise return the previous ones."""
        queries = self._queries
        if self._lost is not None:
            return GpuReading(index=self._index, bus_id=self.bus_id, lost=self._lost)
        queries.unknown = {}
        counts: dict[str, int] = {}
        if self._gpm is None:
            counts = read_link_counters(queries, NVLINK_COUNTERS)
        else:
            self._rates = self._gpm.rates()
        self._read_processes()
        if seldom:
            self._read_errors()
        reasons = read_clock_reasons(queries)
        utilization = queries.read("utilization", "nvmlDeviceGetUtilizationRates")
        if self._why_no_pcie:
            self._rates = {name: rate for name, rate in self._rates.items() if name not in PCIE_COUNTERS}
        rates = self._rates
        reading = GpuReading(
            index=self._index,
            bus_id=self.bus_id,
            nvlink_sent_bytes=counts.get("nvlink_sent"),
            nvlink_received_bytes=counts.get("nvlink_received"),
            nvlink_sent_gb_s=rates.get("nvlink_sent"),
            nvlink_received_gb_s=rates.get("nvlink_received"),
            pcie_sent_gb_s=rates.get("pcie_sent"),
            pcie_received_gb_s=rates.get("pcie_received"),
            pcie_sampled_seconds=WINDOW_SECONDS if self._gpm is None else None,
            utilization_percent=None if utilization is None else utilization.gpu,
            kernels_percent=rates.get("kernels"),
            clock_mhz=queries.read("clock", "nvmlDeviceGetClockInfo", MULTIPROCESSORS),
            throttle_reasons=throttle_reasons(reasons),
            errors=dict(self._errors),
            processes=self._processes,
            lost=queries.lost,
            unknown={**queries.unknown, **dict(self._unknown(counts))},
        )
        self._lost = queries.lost
        return reading

    def _read_processes(self) -> None:
        compute = self._queries.call("nvmlDeviceGetComputeRunningProcesses").value
        pids = None if compute is None else frozenset(process.pid for process in compute)
        if pids is None or pids != self._pids:
            self._processes = read_processes(self._queries)
            self._why_no_processes = self._queries.unknown.pop("processes", "")
        self._pids = pids

    def _read_errors(self) -> None:
        replays = self._queries.call("nvmlDeviceGetPcieReplayCounter").value
        self._errors = {} if replays is None else {"PCIe replays": replays}
        counts = self._queries.fields([(number, ALL_LINKS) for number in _ERROR_FIELDS.values()])
        self._errors |= {
            name: counts[number, ALL_LINKS] for name, number in _ERROR_FIELDS.items() if (number, ALL_LINKS) in counts
        }

    def _unknown(self, counts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        why = "NVML does not count it on this GPU" if self._gpm is None else self._gpm.why
        for name in (*PCIE_COUNTERS, *NVLINK_COUNTERS):
            reason = (self._why_no_pcie or self._why_no_window if name in PCIE_COUNTERS else "") or why
            if name not in self._rates and name not in counts and reason:
                yield name, reason
        if self._processes is None and self._why_no_processes:
            yield "processes", self._why_no_processes


class _GpmSamples:
    """The last two GPM samples of a GPU. The driver averages over the time between them. `why` is the reason if it
    did not.
    """

    def __init__(self, library: Any, handle: object) -> None:
        self._library, self._handle = library, handle
        self._samples = [library.nvmlGpmSampleAlloc(), library.nvmlGpmSampleAlloc()]
        self._request = library.c_nvmlGpmMetricsGet_t()
        self._request.version = library.NVML_GPM_METRICS_GET_VERSION
        self._taken = 0
        self.why = ""

    @classmethod
    def start(cls, library: Any, handle: object) -> "_GpmSamples | None":
        """Take the first sample. None if the GPU, its driver or pynvml lacks GPM, or if this user may not use it."""
        try:
            if not library.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                return None
            samples = cls(library, handle)
            library.nvmlGpmSampleGet(handle, samples._samples[0])
        except (library.NVMLError, AttributeError):
            return None
        samples._taken = 1
        return samples

    def rates(self) -> dict[str, float]:
        """Return average rates in GB/s since the previous sample. If PCIe sent data, add `kernels`, the kernel
        utilization in percent.
        """
        self.why = ""
        now, before = self._taken % 2, (self._taken + 1) % 2
        try:
            self._library.nvmlGpmSampleGet(self._handle, self._samples[now])
            self._request.sample1, self._request.sample2 = self._samples[before], self._samples[now]
            found = {name: mib_s * _MIB / BYTES_PER_GB for name, mib_s in self._averages(_GPM_RATES).items()}
            # Kernel utilization distinguishes PCIe traffic by kernels from PCIe traffic by copies.
            if found.get("pcie_sent", 0.0) >= FOREIGN_GB_S:
                found |= self._averages(_GPM_KERNELS)
        except self._library.NVMLError as error:
            self.why = str(error)
            if getattr(error, "value", 0) == GPU_IS_LOST:
                self.why = f"the GPU is lost: {error}"
            return {}
        self._taken += 1
        if not found.keys() >= _GPM_RATES.keys():
            self.why = "the driver reports no average for it"
        return found

    def _averages(self, metrics: Mapping[str, int]) -> dict[str, float]:
        self._request.numMetrics = len(metrics)
        for position, number in enumerate(metrics.values()):
            self._request.metrics[position].metricId = number
        self._library.nvmlGpmMetricsGet(self._request)
        values = zip(metrics, self._request.metrics, strict=False)
        # A value is NaN if no time passed between the samples.
        return {name: item.value for name, item in values if item.nvmlReturn == 0 and not math.isnan(item.value)}


NO_DRIVER = "NVML does not start, because there is no driver or it does not answer"


def main(arguments: Sequence[str]) -> int:
    """Write one reading per input line until the input ends, and return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches this process, but the parent handles it
    library = open_library()
    if library is None:
        _write_line({"silent": NO_DRIVER})
        return 0
    indices = [int(index) for index in arguments[0].split(",")] if arguments else None
    try:
        traffic = NvmlTraffic(library, indices)
        for _ in sys.stdin:
            _write_line({"gpus": to_plain(traffic.read())})
    except library.NVMLError as error:
        _write_line({"silent": f"NVML does not answer ({error})"})
    return 0


def _write_line(document: object) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
