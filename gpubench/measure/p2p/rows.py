"""Rows of measured copies, and what is known of the machine before anything is copied."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.paths.p2p import JUDGED_FROM_BYTES, Carried, Cell, Pair, Reference, Series, judge
from gpubench.model.paths.selection import names
from gpubench.model.paths.topology import Limit, Topology, rounded
from gpubench.model.paths.transport import is_staged
from gpubench.model.paths.wiring import Wiring
from gpubench.model.profiles.profile import SHARE, Profile
from gpubench.model.results.report import PairRow
from gpubench.model.terms.copies import CopyGpu, Direction, Engine, HostMemory
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND, percent
from gpubench.model.terms.verdict import Verdict

HOST = "host"
IPC, NETWORK = "ipc", "network"


@dataclass(frozen=True)
class Machine:
    """The GPUs of one process that copy, by position; how they are wired, the profile, and who else uses them.

    `facts` are of the processes: of all ranks, or of the one that has all GPUs.
    """

    wiring: Wiring
    profile: Profile | None
    busy: Mapping[int, str]
    origin: Origin
    gpus: Sequence[CopyGpu]
    facts: Sequence[RankFacts] = ()

    @property
    def nodes(self) -> tuple[Topology, ...]:
        """The nodes that copies are made on, in their order."""
        return tuple(self.wiring.nodes.values())

    def expected(self, quantity: str | None, limit_gb_s: float | None, path: str | None = None) -> float | None:
        """What the profile expects, None where it says nothing; one for any machine has a share of the limit."""
        if self.profile is None or quantity is None:
            return None
        if self.profile.match.generic is None:
            return self.profile.typical(quantity, path)
        share = self.profile.typical(quantity.removesuffix("_gb_s") + SHARE)
        return None if share is None or limit_gb_s is None else share * limit_gb_s

    def limit(self, series: Series, pair: Pair) -> Limit:
        """The ceiling of a pair, for both directions together where both are copied."""
        limit = self.wiring.limit(pair)
        if series.direction is Direction.BOTH and limit.gb_s is not None:
            return Limit(2 * limit.gb_s, f"{limit.note}, both ways")
        return limit

    def label(self, gpu: int) -> str:
        """The name of a GPU in rows and matrices."""
        return self.gpus[gpu].device

    def describe(self, gpu: int) -> str:
        """Which GPU it is, for a header."""
        return f"{self.gpus[gpu].bus_id} {self.gpus[gpu].name}"

    def host(self, gpu: int) -> str:
        """The host that a GPU is in."""
        return self.wiring.host(gpu)

    def scope(self, pair: Pair) -> str:  # noqa: ARG002 - one process drives both
        """What lies between the two processes that drive a pair: `process`, `ipc` or `network`."""
        return "process"

    def users(self, *gpus: int) -> str:
        """Who else uses these GPUs; empty where nobody does."""
        return ", ".join(f"{self.gpus[gpu].device} is in use by {self.busy[gpu]}" for gpu in gpus if gpu in self.busy)


class RankMachine(Machine):
    """The GPUs of a job, each driven by a rank; a GPU's position is its rank."""

    def label(self, gpu: int) -> str:
        """The rank as a number."""
        return str(gpu)

    def describe(self, gpu: int) -> str:
        """Where a rank runs, and on which GPU."""
        return f"on {self.host(gpu)}: {super().describe(gpu)}"

    def scope(self, pair: Pair) -> str:
        """`ipc` between ranks of one node, `network` between nodes."""
        return IPC if self.wiring.together(pair) else NETWORK

    def can_reach(self, pair: Pair) -> bool:
        """False where CUDA, or NVML where CUDA was not asked, says that one GPU cannot address the other's memory."""
        if not self.wiring.together(pair):
            return True
        access = self.wiring.peer_access(pair)
        return access.possible is not False if access.cuda is None else access.cuda


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
        source_node=machine.host(pair[0]),
        destination_node=machine.host(pair[1]),
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
        path_class=machine.wiring.path(pair),
        transport=names(cell.transports),
        host_staged=_is_staged(series, cell),
        verified=_verified(cell),
        verdict=verdict,
        note="; ".join(filter(None, (note, why_no_limit))) or None,
    )


def host_row(machine: Machine, memory: HostMemory, gpu: int, cell: Cell, size_bytes: int, *, to_gpu: bool) -> PairRow:
    """A copy between host memory and a GPU as a row."""
    own = machine.gpus[gpu]
    limit = machine.wiring.to_host(gpu).gb_s
    bandwidth = size_bytes / cell.typical_seconds / BYTES_PER_GB if cell.seconds else None
    verdict, note = _host_verdict(machine, memory, gpu, cell, bandwidth, size_bytes, to_gpu=to_gpu)
    host = machine.host(gpu)
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
        note="; ".join(filter(None, (memory.full_name, note))),
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
    limit = machine.wiring.to_host(gpu).gb_s
    expected = machine.expected("host_to_device_gb_s" if to_gpu else "device_to_host_gb_s", limit)
    # Bytes for host memory do not go over NVLink, and that is no staging.
    uncounted = replace(cell, carried=Carried())
    return judge(bandwidth, uncounted, Reference(limit, None, expected))


def _microseconds(cell: Cell) -> float | None:
    return cell.typical_seconds * MICROSECONDS_PER_SECOND if cell.seconds else None


def _is_staged(series: Series, cell: Cell) -> bool | None:
    """Between nodes as NCCL says; without peer access always; with it as the counters say, where they say something."""
    if series.network:
        return is_staged(cell.transports)
    if not series.peer:
        return True if cell.seconds else None
    return cell.is_staged


def _verified(cell: Cell) -> str | None:
    if not cell.seconds:
        return None
    return "no" if cell.wrong is None else "last"
