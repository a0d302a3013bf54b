"""The rows of an interval: one a GPU and one a port, with the limits of `topo`."""

from collections.abc import Iterator, Mapping, Sequence

from gpubench.measure.watch.course import Observed
from gpubench.model.facts.gpu_process import GpuProcess
from gpubench.model.facts.traffic_rates import GpuRates, NicRates, NodeRates
from gpubench.model.paths.topology import BITS_PER_BYTE, Topology
from gpubench.model.results.rows.watch import DeviceKind, TrafficRow
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.units import percent


class Limits:
    """What the links of a node carry at most in one direction, GB/s, each looked up once; None is not known."""

    def __init__(self, node: Topology | None) -> None:
        self._nvlink: Mapping[str | None, float | None] = {}
        self._pcie: Mapping[str | None, float | None] = {}
        self._nics: dict[str, float | None] = {}
        if node is not None:
            self._nvlink = {gpu.bus_id: node.nvlink_total(gpu).gb_s for gpu in node.gpus}
            self._pcie = {gpu.bus_id: node.pcie_total(gpu).gb_s for gpu in node.gpus}
            for nic in node.nics:
                rate = None if nic.rate_gbit_s is None else nic.rate_gbit_s / BITS_PER_BYTE
                self._nics |= dict.fromkeys((nic.name, *nic.interfaces), rate)

    def of_gpu(self, gpu: GpuRates) -> tuple[float | None, float | None]:
        """The limit of its busiest link, and how much of it that carried, in percent."""
        ways = (
            (gpu.nvlink_sent, self._nvlink.get(gpu.bus_id)),
            (gpu.nvlink_received, self._nvlink.get(gpu.bus_id)),
            (gpu.pcie_sent, self._pcie.get(gpu.bus_id)),
            (gpu.pcie_received, self._pcie.get(gpu.bus_id)),
        )
        return _busiest(ways)

    def of_nic(self, nic: NicRates) -> tuple[float | None, float | None]:
        """The same of a port."""
        limit = self._nics.get(nic.name)
        return _busiest(((nic.sent, limit), (nic.received, limit)))


def _busiest(ways: Sequence[tuple[float | None, float | None]]) -> tuple[float | None, float | None]:
    shares = [(percent(rate, limit), limit) for rate, limit in ways]
    known = [(share, limit) for share, limit in shares if share is not None]
    if not known:
        return next((limit for _, limit in ways if limit is not None), None), None
    share, limit = max(known, key=lambda each: each[0])
    return limit, round(share, 1)


def traffic_rows(
    rates: NodeRates, observed: Sequence[Observed], limits: Limits, origin: Origin, now: float
) -> Iterator[TrafficRow]:
    """The rows of one node over one interval, which ended `now`, in seconds since the watch began."""
    jobs = {gpu.bus_id: each.job.name for each in observed for gpu in each.job.gpus}
    names = {task.pid: task.name for task in rates.tasks}
    seconds, interval = round(now, 3), round(rates.end - rates.begin, 3)
    for gpu in rates.gpus:
        limit, share = limits.of_gpu(gpu)
        yield TrafficRow(
            seconds=seconds,
            interval_seconds=interval,
            node=rates.host,
            device=gpu.device,
            device_kind=DeviceKind.GPU,
            bus_id=gpu.bus_id,
            origin=origin,
            nvlink_sent_gb_s=_rounded(gpu.nvlink_sent),
            nvlink_received_gb_s=_rounded(gpu.nvlink_received),
            pcie_sent_gb_s=_rounded(gpu.pcie_sent),
            pcie_received_gb_s=_rounded(gpu.pcie_received),
            limit_gb_s=_rounded(limit),
            limit_percent=share,
            utilization_percent=gpu.utilization_percent,
            clock_mhz=gpu.clock_mhz,
            throttle_reasons=gpu.throttle_reasons,
            errors_grown=gpu.errors_grown,
            users=None if gpu.processes is None else [_user(each, names) for each in gpu.processes],
            job=jobs.get(gpu.bus_id),
            note=_note(gpu.unknown),
        )
    for nic in rates.nics:
        limit, share = limits.of_nic(nic)
        yield TrafficRow(
            seconds=seconds,
            interval_seconds=interval,
            node=rates.host,
            device=nic.name,
            device_kind=DeviceKind.NIC,
            origin=origin,
            network_sent_gb_s=_rounded(nic.sent),
            network_received_gb_s=_rounded(nic.received),
            limit_gb_s=_rounded(limit),
            limit_percent=share,
            errors_grown=nic.errors_grown,
            note=_note(nic.unknown),
        )


def _user(process: GpuProcess, names: Mapping[int, str | None]) -> str:
    name = names.get(process.pid) or process.name
    named = f"{process.pid} ({name})" if name else str(process.pid)
    return f"{named} under MPS" if process.mps else named


def _note(unknown: Mapping[str, str]) -> str | None:
    return "; ".join(f"{name.replace('_', ' ')}: {reason}" for name, reason in unknown.items()) or None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
