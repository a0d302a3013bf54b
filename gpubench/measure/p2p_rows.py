"""Rows of measured copies, and what is known of the machine before anything is copied."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gpubench.model.copies import CopyGpu, Direction, Engine, HostMemory
from gpubench.model.p2p import JUDGED_FROM_BYTES, Carried, Cell, Pair, Reference, Series, judge
from gpubench.model.profile import ExpectedKind, Profile
from gpubench.model.report import Origin, PairRow
from gpubench.model.snapshot import GpuFacts
from gpubench.model.topology import UNKNOWN_PATH, Limit, Topology, rounded
from gpubench.model.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND
from gpubench.model.verdict import Verdict

HOST = "host"
IPC, NETWORK = "ipc", "network"
_NET = "NET"


@dataclass(frozen=True)
class Machine:
    """The wiring, the profile, who else uses a GPU, and the GPUs that copy; the last two by position."""

    topology: Topology
    profile: Profile | None
    busy: Mapping[int, str]
    origin: Origin
    gpus: Sequence[CopyGpu]

    @cached_property
    def _facts(self) -> list[GpuFacts]:
        facts = {gpu.device: gpu for gpu in self.topology.gpus}
        return [facts[gpu.device] for gpu in self.gpus]

    def expected(self, quantity: str | None) -> float | None:
        """The profile's value, None where it has none; a threshold is a floor and no expectation."""
        if self.profile is None or quantity is None:
            return None
        found = [each for each in self.profile.find(quantity) if each.kind is not ExpectedKind.THRESHOLD]
        return found[0].value if found else None

    def path(self, pair: Pair) -> str:
        """The path class of a pair."""
        return self.topology.path(self._facts[pair[0]], self._facts[pair[1]])

    def limit(self, series: Series, pair: Pair) -> Limit:
        """The ceiling of a pair, for both directions together where both are copied."""
        limit = self.topology.limit(self._facts[pair[0]], self._facts[pair[1]])
        if series.direction is Direction.BOTH and limit.gb_s is not None:
            return Limit(2 * limit.gb_s, f"{limit.note}, both ways")
        return limit

    def refusal(self, pair: Pair) -> str:
        """Why a pair has no peer access, as the driver puts it."""
        return self.topology.peer_access(self._facts[pair[0]], self._facts[pair[1]]).reason

    def host_limit(self, gpu: int) -> Limit:
        """The ceiling between a GPU and host memory."""
        return self.topology.pcie_total(self._facts[gpu])

    def label(self, gpu: int) -> str:
        """The name of a GPU in rows and matrices."""
        return self.gpus[gpu].device

    def describe(self, gpu: int) -> str:
        """Which GPU it is, for a header."""
        return f"{self.gpus[gpu].bus_id} {self.gpus[gpu].name}"

    def node(self, gpu: int) -> str:  # noqa: ARG002 - all GPUs of one process are on one node
        """The host that a GPU is in."""
        return self.topology.snapshot.host

    def scope(self, pair: Pair) -> str:  # noqa: ARG002 - one process drives both
        """What lies between the two processes that drive a pair: `process`, `ipc` or `network`."""
        return "process"

    def users(self, *gpus: int) -> str:
        """Who else uses these GPUs; empty where nobody does."""
        return ", ".join(f"{self.gpus[gpu].device} is in use by {self.busy[gpu]}" for gpu in gpus if gpu in self.busy)


@dataclass(frozen=True)
class RankMachine(Machine):
    """The wiring of all nodes of a job. A GPU's position is its rank; `topology` is that of the first node."""

    nodes: tuple[Topology, ...]
    node_by_rank: tuple[int, ...]

    @cached_property
    def _found(self) -> list[GpuFacts | None]:
        """What is known of each rank's GPU, by its bus id: CUDA's and the driver's indices differ between ranks."""
        facts = [{gpu.bus_id: gpu for gpu in node.gpus} for node in self.nodes]
        return [facts[node].get(gpu.bus_id) for node, gpu in zip(self.node_by_rank, self.gpus, strict=True)]

    def label(self, gpu: int) -> str:
        """The rank as a number."""
        return str(gpu)

    def describe(self, gpu: int) -> str:
        """Where a rank runs, and on which GPU."""
        return f"on {self.node(gpu)}: {super().describe(gpu)}"

    def node(self, gpu: int) -> str:
        """The host that a rank runs on."""
        return self.nodes[self.node_by_rank[gpu]].snapshot.host

    def scope(self, pair: Pair) -> str:
        """`ipc` between ranks of one node, `network` between nodes."""
        return IPC if self.node_by_rank[pair[0]] == self.node_by_rank[pair[1]] else NETWORK

    def path(self, pair: Pair) -> str:
        """The path class; NET between nodes."""
        if self.scope(pair) == NETWORK:
            return _NET
        source, destination = (self._found[rank] for rank in pair)
        if source is None or destination is None:
            return UNKNOWN_PATH
        return self._topology(pair).path(source, destination)

    def limit(self, series: Series, pair: Pair) -> Limit:  # noqa: ARG002 - one way at a time
        """The ceiling of a pair on one node."""
        if self.scope(pair) == NETWORK:
            return Limit(None, "between nodes it depends on which NICs NCCL takes")
        source, destination = (self._found[rank] for rank in pair)
        if source is None or destination is None:
            return Limit(None, "the driver did not describe these GPUs")
        return self._topology(pair).limit(source, destination)

    def can_reach(self, pair: Pair) -> bool:
        """False where CUDA, or NVML where CUDA was not asked, says that one GPU cannot address the other's memory."""
        source, destination = (self._found[rank] for rank in pair)
        if self.scope(pair) == NETWORK or source is None or destination is None:
            return True
        access = self._topology(pair).peer_access(source, destination)
        return access.possible is not False if access.cuda is None else access.cuda

    def refusal(self, pair: Pair) -> str:
        """Why a pair has no peer access, as the driver puts it."""
        source, destination = (self._found[rank] for rank in pair)
        if source is None or destination is None:
            return "the driver did not describe these GPUs"
        return self._topology(pair).peer_access(source, destination).reason

    def _topology(self, pair: Pair) -> Topology:
        return self.nodes[self.node_by_rank[pair[0]]]


def gb_s(series: Series, cell: Cell) -> float:
    """A cell's bandwidth, of both directions together where both are copied."""
    copies = 2 if series.direction is Direction.BOTH else 1
    return copies * series.size_bytes / cell.typical_seconds / BYTES_PER_GB


def pair_row(machine: Machine, series: Series, pair: Pair, cell: Cell, judged: tuple[Verdict | None, str]) -> PairRow:
    """A cell of a matrix as a row."""
    source, destination = (machine.gpus[gpu] for gpu in pair)
    ceiling = machine.limit(series, pair)
    limit, why_no_limit = ceiling.gb_s, "" if ceiling.gb_s is not None else f"no limit: {ceiling.note}"
    bandwidth = gb_s(series, cell) if cell.seconds else None
    verdict, note = judged
    return PairRow(
        source=machine.label(pair[0]),
        destination=machine.label(pair[1]),
        source_bus_id=source.bus_id,
        destination_bus_id=destination.bus_id,
        source_node=machine.node(pair[0]),
        destination_node=machine.node(pair[1]),
        scope=machine.scope(pair),
        origin=machine.origin,
        direction=series.direction,
        engine="nccl" if series.network else series.engine,
        peer=None if series.network else "on" if series.peer else "off",
        size_bytes=series.size_bytes,
        bandwidth_gb_s=bandwidth,
        latency_us=_microseconds(cell),
        limit_gb_s=rounded(limit),
        limit_percent=percent(bandwidth, limit),
        nvlink_bytes=cell.carried.nvlink_bytes,
        pcie_bytes=cell.carried.pcie_bytes,
        path_class=machine.path(pair),
        host_staged=_is_staged(series, cell),
        verified=_verified(cell),
        verdict=verdict,
        note="; ".join(filter(None, (note, why_no_limit))) or None,
    )


def host_row(machine: Machine, memory: HostMemory, gpu: int, cell: Cell, size_bytes: int, *, to_gpu: bool) -> PairRow:
    """A copy between host memory and a GPU as a row."""
    own = machine.gpus[gpu]
    limit = machine.host_limit(gpu).gb_s
    bandwidth = size_bytes / cell.typical_seconds / BYTES_PER_GB if cell.seconds else None
    verdict, note = _host_verdict(machine, memory, gpu, cell, bandwidth, size_bytes, to_gpu=to_gpu)
    host = machine.topology.snapshot.host
    return PairRow(
        source=HOST if to_gpu else own.device,
        destination=own.device if to_gpu else HOST,
        source_bus_id=None if to_gpu else own.bus_id,
        destination_bus_id=own.bus_id if to_gpu else None,
        source_node=host,
        destination_node=host,
        scope="process",
        origin=machine.origin,
        direction=Direction.READ if to_gpu else Direction.WRITE,
        engine=Engine.CE,
        size_bytes=size_bytes,
        bandwidth_gb_s=bandwidth,
        latency_us=_microseconds(cell),
        limit_gb_s=rounded(limit),
        limit_percent=percent(bandwidth, limit),
        pcie_bytes=cell.carried.pcie_bytes,
        path_class=None,
        verified=_verified(cell),
        verdict=verdict,
        note="; ".join(filter(None, (f"{memory} host memory", note))),
    )


def _host_verdict(
    machine: Machine,
    memory: HostMemory,
    gpu: int,
    cell: Cell,
    bandwidth: float | None,
    size_bytes: int,
    *,
    to_gpu: bool,
) -> tuple[Verdict | None, str]:
    if cell.error or bandwidth is None:
        return Verdict.ERROR, cell.error or "not measured"
    if cell.wrong:
        return Verdict.FAIL, f"{cell.wrong} wrong elements"
    if memory is HostMemory.PAGEABLE or size_bytes < JUDGED_FROM_BYTES:
        return None, ""
    if gpu in machine.busy:
        return Verdict.SKIP, f"not judged: {machine.users(gpu)}"
    expected = machine.expected("host_to_device_gb_s" if to_gpu else "device_to_host_gb_s")
    # Bytes for host memory do not go over NVLink, and that is no staging.
    uncounted = replace(cell, carried=Carried())
    return judge(bandwidth, uncounted, Reference(machine.host_limit(gpu).gb_s, None, expected))


def _microseconds(cell: Cell) -> float | None:
    return cell.typical_seconds * MICROSECONDS_PER_SECOND if cell.seconds else None


def _is_staged(series: Series, cell: Cell) -> bool | None:
    """Without peer access always; with it as the counters say, where they say something."""
    if not series.peer:
        return True if cell.seconds else None
    return cell.is_staged


def _verified(cell: Cell) -> str | None:
    if not cell.seconds:
        return None
    return "no" if cell.wrong is None else "last"


def percent(part: float | None, whole: float | None) -> float | None:
    """A part of a whole in percent, None where either is unknown."""
    return None if part is None or not whole else 100 * part / whole
