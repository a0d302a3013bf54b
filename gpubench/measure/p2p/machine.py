"""What is known of GPUs before they copy: who drives them, how they are wired, what is expected, who else uses them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.facts.snapshot import bus_id
from gpubench.model.paths.p2p import Pair, Series
from gpubench.model.paths.topology import Limit, Topology
from gpubench.model.paths.wiring import GpuPlace, Wiring
from gpubench.model.profiles.profile import SHARE, Profile
from gpubench.model.terms.copies import CopyGpu, Direction
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.rank_identity import RankIdentity

PROCESS, IPC, NETWORK = "process", "ipc", "network"
"""Scopes of a pair: one process drives both GPUs, two processes of a node do, or two of different nodes."""


@dataclass(frozen=True, kw_only=True)
class CopyMachine:
    """The GPUs that copy, by position: driven by one process, or each by the rank of that number where `is_ranks`.

    `busy` says who else uses a GPU; `facts` are of the processes. `unreachable` are pairs of which CUDA told the one
    process that they have no peer access.
    """

    wiring: Wiring
    profile: Profile | None
    busy: Mapping[int, str]
    origin: Origin
    gpus: Sequence[CopyGpu]
    facts: Sequence[RankFacts] = ()
    unreachable: frozenset[Pair] = frozenset()
    is_ranks: bool = False

    @property
    def nodes(self) -> tuple[Topology, ...]:
        """The nodes of the GPUs, in their order."""
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
        """The name of a GPU in rows and matrices: the driver's, or the rank as a number."""
        return str(gpu) if self.is_ranks else self.gpus[gpu].device

    def describe(self, gpu: int) -> str:
        """Which GPU it is, for a header."""
        found = f"{self.gpus[gpu].bus_id} {self.gpus[gpu].name}"
        return f"on {self.host(gpu)}: {found}" if self.is_ranks else found

    def host(self, gpu: int) -> str:
        """The host that a GPU is in."""
        return self.wiring.host(gpu)

    def scope(self, pair: Pair) -> str:
        """What lies between the processes that drive a pair: PROCESS, IPC or NETWORK."""
        if not self.is_ranks:
            return PROCESS
        return IPC if self.wiring.together(pair) else NETWORK

    def can_reach(self, pair: Pair) -> bool:
        """Whether peer access is possible: as CUDA says, NVML where CUDA was not asked; between nodes it needs none."""
        if not self.is_ranks:
            return pair not in self.unreachable
        if not self.wiring.together(pair):
            return True
        access = self.wiring.peer_access(pair)
        return access.possible is not False if access.cuda is None else access.cuda

    def users(self, *gpus: int) -> str:
        """Who else uses these GPUs; empty where nobody does."""
        return ", ".join(f"{self.gpus[gpu].device} is in use by {self.busy[gpu]}" for gpu in gpus if gpu in self.busy)


def machine_of_process(
    node: Topology,
    gpus: Sequence[CopyGpu],
    facts: Sequence[RankFacts],
    profile: Profile | None,
    origin: Origin,
    unreachable: frozenset[Pair],
) -> CopyMachine:
    """Those GPUs of a node that one process drives."""
    wiring = Wiring([GpuPlace(node.snapshot.host, 0, gpu.bus_id) for gpu in gpus], {0: node})
    return CopyMachine(
        wiring=wiring,
        profile=profile,
        busy=_other_users(wiring),
        origin=origin,
        gpus=gpus,
        facts=facts,
        unreachable=unreachable,
    )


def machine_of_ranks(
    nodes: Sequence[Topology],
    identities: Sequence[RankIdentity],
    facts: Sequence[RankFacts],
    profile: Profile | None,
    origin: Origin,
) -> CopyMachine:
    """The GPUs of all ranks, on nodes in their order."""
    wiring = Wiring(identities, dict(enumerate(nodes)))
    return CopyMachine(
        wiring=wiring,
        profile=profile,
        busy=_other_users(wiring, {(identity.node, identity.pid) for identity in identities}),
        origin=origin,
        gpus=tuple(
            CopyGpu(
                device=f"rank {identity.rank}",
                index=identity.gpu_index or 0,
                bus_id=bus_id(identity.gpu_bus_id or ""),
                uuid=identity.gpu_uuid or "",
                name=identity.gpu or "",
            )
            for identity in identities
        ),
        facts=facts,
        is_ranks=True,
    )


def _other_users(wiring: Wiring, own: Collection[tuple[int, int]] = ()) -> dict[int, str]:
    """Whose work is on each GPU, as it was read before this run touched it; `own` processes are node and pid.

    A process that merely holds a context, as a desktop does, leaves a GPU idle. An MPI that knows CUDA may have put
    the ranks on their GPUs already.
    """
    users = {}
    for position, place in enumerate(wiring.gpus):
        gpu = wiring.gpu(position)
        if gpu is None or gpu.idle is True:
            continue
        others = [each for each in gpu.processes or () if (place.node, each.pid) not in own]
        if others:
            named = (f"process {each.pid}" + (f" ({each.name})" if each.name else "") for each in others)
            users[position] = ", ".join(named)
    return users
