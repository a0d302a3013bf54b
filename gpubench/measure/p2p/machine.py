"""The GPUs of a run before they copy: drivers, wiring, expectation, and other users."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property

from gpubench.conditions.definition.circumstances import Facts
from gpubench.model.facts.idle_gpu import IdleGpu
from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.facts.snapshot import bus_id
from gpubench.model.paths.p2p import Pair, Series
from gpubench.model.paths.topology import Limit, Topology
from gpubench.model.paths.wiring import GpuPlace, Wiring
from gpubench.model.profiles.profile import SHARE
from gpubench.model.results.measurements import Measurements
from gpubench.model.results.report import PairRow
from gpubench.model.terms.copies import CopyGpu, Direction
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.profiles.matching import ProfileMatch

PROCESS, IPC, NETWORK = "process", "ipc", "network"
"""Scopes of a pair: one process drives both GPUs, two processes of a node do, or two of different nodes."""


@dataclass(frozen=True)
class CopyMachine:
    """The GPUs that copy, by position: driven by one process, or each by the rank of that number where `is_ranks`.

    `processes` are what is known of these; `matched` is the profile to judge by. `unreachable` are pairs of which CUDA
    told the one process that they have no peer access. `idle_gpus` are GPUs as they were before the first copy and
    after the last, while none was made. `profile_asked_for` and `expected_gpus` are what somebody said that every node
    has.
    """

    wiring: Wiring
    gpus: Sequence[CopyGpu]
    processes: Sequence[RankFacts]
    matched: ProfileMatch | None
    origin: Origin
    unreachable: frozenset[Pair] = frozenset()
    is_ranks: bool = False
    idle_gpus: Mapping[int, IdleGpu] = field(default_factory=dict)
    profile_asked_for: bool = False
    expected_gpus: int | None = None

    def facts(self, rows: Sequence[PairRow]) -> Facts:
        """The nodes without what this run has on their GPUs, as conditions are looked for in them, and in some rows."""
        own: dict[int, set[int]] = {}
        for each in self.processes:
            own.setdefault(each.node, set()).add(each.pid)
        return Facts(
            [_without(own.get(number, set()), node) for number, node in self.wiring.nodes.items()],
            profiles=[None if self.matched is None else self.matched.profile] * len(self.nodes),
            measurements=Measurements(pairs=tuple(rows)),
            asked=self.profile_asked_for,
            expected_gpus=self.expected_gpus,
        )

    @property
    def nodes(self) -> tuple[Topology, ...]:
        """The nodes of the GPUs, in their order."""
        return tuple(self.wiring.nodes.values())

    def expected(self, quantity: str | None, limit_gb_s: float | None, path: str | None = None) -> float | None:
        """The profile's expectation, None where it has none; one for any machine has a share of the limit."""
        if self.matched is None or quantity is None:
            return None
        profile = self.matched.profile
        if profile.match.generic is None:
            return profile.typical(quantity, path)
        share = profile.typical(quantity.removesuffix("_gb_s") + SHARE)
        return None if share is None or limit_gb_s is None else share * limit_gb_s

    @property
    def whose_expectation(self) -> str:
        """The source of `expected` in words."""
        profile = None if self.matched is None else self.matched.profile
        if profile is None:
            return ""
        return f"profile {profile.name}" + (", a share of the limit" if profile.match.generic is not None else "")

    def limit(self, series: Series, pair: Pair) -> Limit:
        """The ceiling of a pair, for both directions together where both are copied."""
        limit = self.wiring.limit(pair)
        if series.direction is Direction.BOTH and limit.gb_s is not None:
            return Limit(2 * limit.gb_s, f"{limit.note}, both ways")
        return limit

    def label(self, gpu: int) -> str:
        """The name of a GPU in rows and matrices: the driver's, or the rank as a number."""
        return str(gpu) if self.is_ranks else self.gpus[gpu].device

    def describe(self, gpu: int) -> str:
        """A GPU in words, for a header."""
        found = f"{self.gpus[gpu].bus_id} {self.gpus[gpu].name}"
        return f"on {self.host(gpu)}: {found}" if self.is_ranks else found

    def host(self, gpu: int) -> str:
        """The host that a GPU is in."""
        return self.wiring.host(gpu)

    def scope(self, pair: Pair) -> str:
        """The way between the processes that drive a pair: PROCESS, IPC or NETWORK."""
        if not self.is_ranks:
            return PROCESS
        return IPC if self.wiring.together(pair) else NETWORK

    def can_reach(self, pair: Pair) -> bool:
        """True if peer access is possible: as CUDA says, NVML where CUDA was not asked; between nodes it needs none."""
        if not self.is_ranks:
            return pair not in self.unreachable
        if not self.wiring.together(pair):
            return True
        access = self.wiring.peer_access(pair)
        return access.possible is not False if access.cuda is None else access.cuda

    def users(self, *gpus: int) -> str:
        """Other users of these GPUs; empty where there are none."""
        return ", ".join(f"{self.gpus[gpu].device} is in use by {self._busy[gpu]}" for gpu in gpus if gpu in self._busy)

    @cached_property
    def _busy(self) -> dict[int, str]:
        """The processes that used each GPU before this run touched it.

        A process that merely holds a context, as a desktop does, leaves a GPU idle. An MPI that knows CUDA may have
        put the ranks on their GPUs already.
        """
        own = {(each.node, each.pid) for each in self.processes}
        busy = {}
        for position, place in enumerate(self.wiring.gpus):
            gpu = self.wiring.gpu(position)
            held = gpu.processes or () if gpu is not None and gpu.idle is not True else ()
            others = [each for each in held if (place.node, each.pid) not in own]
            if others:
                busy[position] = ", ".join(each.label for each in others)
        return busy


def _without(pids: AbstractSet[int], node: Topology) -> Topology:
    """The node without these processes on its GPUs."""
    gpus = tuple(
        replace(gpu, processes=tuple(each for each in gpu.processes or () if each.pid not in pids))
        for gpu in node.snapshot.gpus
    )
    return Topology(replace(node.snapshot, gpus=gpus)) if pids else node


def wiring_of_process(node: Topology, gpus: Sequence[CopyGpu]) -> Wiring:
    """The wiring of those GPUs of a node that one process drives."""
    return Wiring([GpuPlace(node.snapshot.host, 0, gpu.bus_id) for gpu in gpus], {0: node})


def machine_of_ranks(
    nodes: Sequence[Topology],
    ranks: Sequence[RankIdentity],
    processes: Sequence[RankFacts],
    matched: ProfileMatch | None,
    origin: Origin,
) -> CopyMachine:
    """The GPUs of all ranks, on nodes in their order."""
    gpus = [
        CopyGpu(
            device=f"rank {rank.rank}",
            index=rank.gpu_index or 0,
            bus_id=bus_id(rank.gpu_bus_id or ""),
            uuid=rank.gpu_uuid or "",
            name=rank.gpu or "",
        )
        for rank in ranks
    ]
    return CopyMachine(Wiring(ranks, dict(enumerate(nodes))), gpus, processes, matched, origin, is_ranks=True)
