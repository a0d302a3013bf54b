"""The run in which conditions are looked for: machines, processes, settings, figures, paths, and NCCL's log of them."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.conditions.policy import Medium, PathKind, Relation
from gpubench.model.facts.process import ENVIRONMENT, GpuCondition, MpiSupport, RankFacts
from gpubench.model.facts.snapshot import GpuFacts, PciDevice
from gpubench.model.facts.traffic import IdleGpu
from gpubench.model.paths.nccl_log import Note, RemarkKind
from gpubench.model.paths.nodes import MachineKind
from gpubench.model.paths.topology import Device, Refusal, Topology
from gpubench.model.paths.transport import Pair, Transport
from gpubench.model.paths.wiring import GpuPlace, Wiring
from gpubench.model.profiles.profile import Profile
from gpubench.model.results.figures import QUICK, Measurements
from gpubench.model.results.report import CollectiveRow
from gpubench.model.terms.ranks import DevicePlace, RankIdentity
from gpubench.model.terms.units import format_size
from gpubench.model.terms.verdict import NO_CURE, Cure

_OFF = ("", "0")


class Together(Struct, frozen=True):
    """Pairs that copied at the same time, and their total GB/s as written by sources and read by destinations."""

    pattern: str
    pairs: tuple[Pair, ...]
    write_gb_s: float
    read_gb_s: float


class IssueTime(Struct, frozen=True):
    """The time that the slowest rank's host takes to issue an operation, and the operation's own time (µs)."""

    label: str
    issue_us: float
    time_us: float

    @classmethod
    def of(cls, rows: Iterable[CollectiveRow]) -> "tuple[IssueTime, ...]":
        """Return the issue times of slow rows; rows without one are skipped."""
        return tuple(
            cls(f"{format_size(row.size_bytes)} {row.placement.replace('_', ' ')}", row.issue_us, row.time_us)
            for row in rows
            if row.issue_us is not None
        )


class Circumstances(Struct, frozen=True, kw_only=True, dict=True):
    """The run, and its paths. Positions of GPUs are those of `wiring`; where ranks have them, the rank's.

    `settings` are the user's, by variable: the distinct values that ranks have, without what gpubench set itself.
    `staged` are the pairs that go through host memory, with what they take; None where nothing was sent, and only
    conditions are looked for. `copied` says of such pairs what showed it, where CUDA made the copies and NCCL's policy
    and settings mean nothing. `wrong` are pairs along which wrong data arrived, `together` those that were measured at
    once. `profiles` are those that nodes match, by number; with `profile_asked_for` somebody named it, and then the
    machine has to be the profile's in everything; `expected_gpus` is the number of GPUs that somebody said every node
    has. `measurements` are what a check measured. `waited` is the share of its time that a rank was ready to run and
    waited for a CPU, and `at_work` its GPU's condition right after operations, by rank. `idle_gpus` are GPUs by
    position as they were while this job was idle, before its first operation and after its last; `beyond` says of GPUs
    how often their NVLinks carried the bytes that this job can have moved at most, where that is more than once;
    `issued` are the times of rows that are slow, `slow` these rows themselves; `mpi_support` is what
    MPI did with GPU memory where that was tried.
    """

    wiring: Wiring
    facts: Sequence[RankFacts] = ()
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    staged: Mapping[Pair, Sequence[Transport]] | None = None
    copied: Mapping[Pair, str] | None = None
    wrong: frozenset[Pair] = frozenset()
    together: Sequence[Together] = ()
    kinds: Sequence[MachineKind] = ()
    profiles: Mapping[int, Profile] = field(default_factory=dict)
    profile_asked_for: bool = False
    expected_gpus: int | None = None
    measurements: Measurements = QUICK
    waited: Mapping[int, float] = field(default_factory=dict)
    at_work: Mapping[int, GpuCondition] = field(default_factory=dict)
    idle_gpus: Mapping[int, IdleGpu] = field(default_factory=dict)
    beyond: Mapping[int, float] = field(default_factory=dict)
    issued: Sequence[IssueTime] = ()
    slow: Sequence[CollectiveRow] = ()
    mpi_support: MpiSupport | None = None

    @property
    def nodes(self) -> Mapping[int, Topology]:
        """Nodes with known facts, by number."""
        return self.wiring.nodes

    @property
    def asked_of_nccl(self) -> bool:
        """True if NCCL moves the data, or would move it."""
        return self.copied is None

    def values(self, name: str) -> tuple[str, ...]:
        """Return the distinct values of a variable among the ranks."""
        return tuple(self.settings.get(name, ()))

    def switched_on(self, name: str) -> bool:
        """True if any rank has the variable set to a value other than empty and 0."""
        return any(value not in _OFF for value in self.values(name))

    def host(self, node: int) -> str:
        """Return the node's name if the job has several nodes, else an empty text."""
        return self.nodes[node].snapshot.host if len(self.nodes) > 1 and node in self.nodes else ""

    def on(self, node: int, *words: str) -> str:
        """Return a subject: the words, after the node's name if there are several nodes, or the node's name alone."""
        named = " ".join(filter(None, (self.host(node), *words)))
        return named or (self.nodes[node].snapshot.host if node in self.nodes else f"node {node}")

    def name(self, gpu: int) -> str:
        """Return a GPU's name, such as 'node1 GPU3'."""
        known, node = self.wiring.gpu(gpu), self.wiring.gpus[gpu].node
        return self.on(node, f"GPU {gpu}" if known is None else known.device)

    def pair_name(self, pair: Pair) -> str:
        """Return a pair's name: by ranks if each rank has one GPU, else by GPUs."""
        one, other = (self.wiring.gpus[gpu] for gpu in pair)
        if isinstance(one, RankIdentity):
            return f"ranks {pair[0]} → {pair[1]}"
        known = self.wiring.gpu(pair[1])
        together = one.node == other.node and known is not None
        return f"{self.name(pair[0])} → {known.device if together and known else self.name(pair[1])}"

    def named(self, node: int, *devices: Device) -> str:
        """Return the name of devices in findings, with bus ids. The host is added if there are several nodes."""
        names = " → ".join(
            f"{device.device} ({device.bus_id})" if device.bus_id else device.device for device in devices
        )
        return " ".join(filter(None, (self.host(node) if devices else self.nodes[node].snapshot.host, names)))

    def places(self, node: int, *devices: Device) -> tuple[DevicePlace, ...]:
        """Return the places of a node's devices; without devices, the place of the node."""
        host = self.nodes[node].snapshot.host
        return tuple(DevicePlace(host, device.device, device.bus_id) for device in devices) or (DevicePlace(host),)

    def places_of_gpus(self, gpus: Iterable[int]) -> tuple[DevicePlace, ...]:
        """Return the places of GPUs by position."""
        return tuple(map(self.wiring.place, dict.fromkeys(gpus)))

    def named_pair(self, pair: Pair) -> str:
        """Return the name of two GPUs of a node in findings."""
        known = [gpu for gpu in map(self.wiring.gpu, pair) if gpu is not None]
        return self.named(self.wiring.gpus[pair[0]].node, *known)

    def exact_profile(self, node: int) -> Profile | None:
        """Return the node's profile, or None if that profile is generic."""
        profile = self.profiles.get(node)
        return profile if profile is not None and profile.match.generic is None else None

    @cached_property
    def pci_devices(self) -> Mapping[int, Mapping[str, PciDevice]]:
        """PCI devices of each node, by bus id."""
        return {
            number: {device.bus_id: device for device in node.snapshot.pci_devices}
            for number, node in self.nodes.items()
        }

    @cached_property
    def _by_node(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for position, gpu in enumerate(self.wiring.gpus):
            found.setdefault(gpu.node, []).append(position)
        return found

    def node_of(self, pair: Pair) -> Topology:
        """Return the node of a pair's source GPU."""
        return self.nodes[self.wiring.gpus[pair[0]].node]

    def gpus_of(self, node: int) -> frozenset[int]:
        """Return the positions of a node's GPUs."""
        return frozenset(self._by_node.get(node, ()))

    def gpus_of_rank(self, facts: RankFacts) -> frozenset[int]:
        """Return the rank's GPU if each rank has one, else all GPUs of its node."""
        return frozenset((facts.rank,)) if self._has_own_gpu(facts) else self.gpus_of(facts.node)

    def _has_own_gpu(self, facts: RankFacts) -> bool:
        known = self.wiring.gpus[facts.rank] if facts.rank < len(self.wiring.gpus) else None
        return isinstance(known, RankIdentity) and known.rank == facts.rank

    def places_of_ranks(self, ranks: Iterable[RankFacts]) -> tuple[DevicePlace, ...]:
        """Return the GPUs of ranks that have one each, else the nodes of the ranks."""
        found = (self.wiring.place(rank.rank) if self._has_own_gpu(rank) else self._node_of(rank) for rank in ranks)
        return tuple(dict.fromkeys(found))

    def _node_of(self, facts: RankFacts) -> DevicePlace:
        node = self.nodes.get(facts.node)
        return DevicePlace(facts.host if node is None else node.snapshot.host)

    def gpus(self) -> Iterator[tuple[int, Topology, GpuFacts]]:
        """Iterate over the GPUs with known facts: position, node, facts."""
        for position, place in enumerate(self.wiring.gpus):
            known = self.wiring.gpu(position)
            if known is not None:
                yield position, self.nodes[place.node], known

    @cached_property
    def inside(self) -> tuple[Pair, ...]:
        """Ordered pairs inside nodes to explain: the host-staged ones, or all pairs if nothing was sent."""
        if self.staged is not None:
            return tuple(pair for pair in self.staged if self.wiring.share_node(pair))
        return tuple(
            (one, other) for members in self._by_node.values() for one in members for other in members if one != other
        )

    @cached_property
    def across(self) -> tuple[Pair, ...]:
        """Pairs between nodes to explain. If nothing was sent, one pair joins each two neighbouring nodes."""
        if self.staged is not None:
            return tuple(pair for pair in self.staged if not self.wiring.share_node(pair))
        first = [members[0] for members in self._by_node.values()]
        return tuple((one, other) for one, other in pairwise(first))

    @cached_property
    def refusals(self) -> Mapping[Pair, Refusal]:
        """Pairs inside nodes without peer access, and how the driver refuses it."""
        found = ((pair, self.wiring.refusal(pair)) for pair in self.inside)
        return {pair: refusal for pair, refusal in found if refusal is not None}

    @cached_property
    def distinct(self) -> "Circumstances":
        """The same run with one node for each set of equal facts, unless processes or paths are known."""
        if self.facts or self.staged is not None:
            return self
        kept: dict[int, Topology] = {}
        before: tuple[Topology, Profile | None] | None = None
        for number, node in self.nodes.items():
            facts = node.like, self.profiles.get(number)
            kept |= {} if facts == before else {number: node}
            before = facts
        gpus = [gpu for gpu in self.wiring.gpus if gpu.node in kept]
        profiles = {number: profile for number, profile in self.profiles.items() if number in kept}
        return replace(self, wiring=Wiring(gpus, kept), profiles=profiles)

    def ranks_of(self, node: int) -> list[RankFacts]:
        """Return the processes of a node."""
        return [fact for fact in self.facts if fact.node == node]


class Facts(Struct, frozen=True, dict=True):
    """The input of all checks: nodes, kinds of nodes, ranks, and the profile of each node."""

    nodes: Sequence[Topology]
    kinds: Sequence[MachineKind] = ()
    ranks: Sequence[RankFacts] = ()
    profiles: Sequence[Profile | None] = ()
    measurements: Measurements = QUICK
    asked: bool = False
    expected_gpus: int | None = None

    @cached_property
    def circumstances(self) -> Circumstances:
        """Convert the facts to the input of detectors, with all GPUs of all nodes."""
        places = [
            GpuPlace(node.snapshot.host, number, gpu.bus_id or gpu.device)
            for number, node in enumerate(self.nodes)
            for gpu in node.gpus
        ]
        return Circumstances(
            wiring=Wiring(places, dict(enumerate(self.nodes))),
            facts=self.ranks,
            settings=user_settings(self.ranks),
            kinds=self.kinds,
            profiles={number: each for number, each in enumerate(self.profiles) if each is not None},
            profile_asked_for=self.asked,
            expected_gpus=self.expected_gpus,
            measurements=self.measurements,
        )


def setting_places(names: Collection[str], facts: Sequence[RankFacts]) -> list[str]:
    """Return where NCCL variables are set: the environment, or files."""
    known = [fact.nccl_settings for fact in facts]
    found = {settings[name].place: None for settings in known for name in names if name in settings}
    return list(found) or [ENVIRONMENT]


def removal(names: Collection[str], places: Sequence[str]) -> Cure:
    """Return the command that removes variables, or finds them in files."""
    files = [place for place in places if place != ENVIRONMENT]
    removed = f"Remove {' and '.join(names)} from {' and '.join(files)}"
    if ENVIRONMENT in places:
        return Cure(unset(*names).commands, f"{removed} too." if files else "")
    return Cure.of(f"{verified_run(names)}grep -nE '{'|'.join(names)}' {' '.join(files)}", comment=f"{removed}.")


VERIFIED_COPIES = "gpubench p2p"  # Exit code 1 if data arrive wrong
_KEEP_OFF_PEERS = (
    *("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_P2P_DIRECT_DISABLE", "NCCL_P2P_USE_CUDA_MEMCPY", "NCCL_HOSTID"),
)
_KEEP_OFF_OTHERS = (
    *("NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_READ"),
    *("NCCL_NET_GDR_C2C", "NCCL_DMABUF_ENABLE", "NCCL_MNNVL_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"),
)


def unset(*names: str, comment: str = "") -> Cure:
    """Return the command that removes variables; a verified copy runs first if they keep data off a path."""
    return Cure.of(f"{verified_run(names)}unset {' '.join(names)}", comment=comment)


def verified_run(names: Collection[str]) -> str:
    """Return the verified run that precedes the removal of variables: whoever set them may have seen wrong data."""
    if not set(_KEEP_OFF_PEERS).isdisjoint(names):
        return f"{VERIFIED_COPIES} && "
    off = [name for name in names if name in _KEEP_OFF_OTHERS]
    return f"env {' '.join(f'-u {name}' for name in off)} gpubench allreduce && " if off else ""


def user_settings(facts: Sequence[RankFacts], said: Sequence[Mapping[str, str]] = ()) -> dict[str, tuple[str, ...]]:
    """Return the distinct values of the user's variables, from the environment and NCCL's files of all ranks."""
    found: dict[str, dict[str, None]] = {}
    known = ({name: setting.value for name, setting in fact.nccl_settings.items()} for fact in facts)
    others = ({name: value for name, value in fact.environment.items() if name[:5] != "NCCL_"} for fact in facts)
    for variables in (*known, *others, *said):
        for name, value in variables.items():
            found.setdefault(name, {})[value] = None
    return {name: tuple(values) for name, values in sorted(found.items())}


OFF = ("", "0")
SOCKET = "Socket"

ASK_FOR_MORE = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,GRAPH,NET,P2P,SHM"


class ProcessLog(Struct, frozen=True):
    """The settings of one process, and the lines of its log that explain a path."""

    settings: tuple[tuple[str, str], ...] = ()
    notes: tuple[Note, ...] = ()

    def setting(self, name: str) -> str | None:
        """Return the value of a variable, or None if it is not set."""
        return dict(self.settings).get(name)


class Staged(Struct, frozen=True, kw_only=True):
    """Two ranks that communicate through host memory, and everything the log shows about them.

    `one_node` is whether NCCL takes both for ranks of one machine, `same_machine` whether the log shows that they are.
    `network` carries the bytes, None where shared memory does. `path` is NCCL's type of path between the GPUs
    ('PIX', 'SYS'), None where it is not said; `gpus` how many it found on the host, 0 if not said. `notes` are about
    these two GPUs, `bus_ids` theirs. `nvlinks` is whether anything shows NVLinks on the machine, `models` are the
    ranks' GPUs where the text names them, `listed_models` others that it names, `interfaces` those over which processes
    meet. `one_per_host` is whether no host has two ranks, `rdma` whether any process of the job found an RDMA device,
    `plugin` whether any has a plugin for a network. `peers_elsewhere` is whether both GPUs have peer access to others
    of the machine.
    """

    one_node: bool
    same_machine: bool
    network: str | None
    path: str | None = None
    gpus: int = 0
    notes: tuple[Note, ...] = ()
    source: ProcessLog = ProcessLog()
    destination: ProcessLog = ProcessLog()
    bus_ids: tuple[str, ...] = ()
    nvlinks: bool = False
    models: tuple[str, ...] = ()
    listed_models: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    one_per_host: bool = False
    rdma: bool = False
    plugin: bool = False
    peers_elsewhere: bool = False

    @property
    def inside(self) -> bool:
        """Ordered pairs inside nodes to explain: the host-staged ones, or all pairs if nothing was sent."""
        return self.one_node or self.same_machine

    @property
    def kinds(self) -> tuple[PathKind, ...]:
        """Possible kinds of this path. A log does not show whether NVLinks join two machines."""
        inside = [Relation.ONE_GPU if self.one_gpu else Relation.ONE_NODE]
        relations = inside if self.inside else [Relation.ONE_DOMAIN, Relation.TWO_NODES]
        medium = Medium.SHM if self.network is None else Medium.SOCKET if self.network == SOCKET else Medium.RDMA
        return tuple(PathKind(relation, medium) for relation in relations)

    @property
    def one_gpu(self) -> bool:
        """True if both run on one GPU."""
        return self.inside and len(self.bus_ids) > 1 and len(set(self.bus_ids)) == 1

    @property
    def virtual(self) -> bool:
        """True if the GPUs are on PCI bus 0, where hypervisors put devices and physical servers have no slots."""
        return any(bus_id[5:7] == "00" for bus_id in self.bus_ids)

    def settings(self, name: str) -> tuple[str, ...]:
        """Return the distinct values of a variable in both processes."""
        values = (process.setting(name) for process in (self.source, self.destination))
        return tuple(dict.fromkeys(value for value in values if value is not None))

    def found(self, *kinds: RemarkKind) -> tuple[Note, ...]:
        """Return notes of these kinds, those about the two GPUs first."""
        notes = (*self.notes, *self.source.notes, *self.destination.notes)
        return tuple(dict.fromkeys(note for kind in kinds for note in notes if note.kind is kind))


class LoggedReason(NamedTuple):
    """Evidence and cure from a log, whether the log proves the condition, and whether it is by design."""

    evidence: str
    cure: Cure = NO_CURE
    is_proven: bool = True
    by_design: bool = False


def _through_shm(staged: Staged) -> bool:
    return staged.inside and staged.network is None


def uses_sockets(staged: Staged) -> bool:
    """True if the ranks are on different nodes and communicate over sockets."""
    return not staged.inside and staged.network == SOCKET


def uses_rdma(staged: Staged) -> bool:
    """True if the ranks are on different nodes and communicate over RDMA."""
    return not staged.inside and staged.network not in (None, SOCKET)


def remark_detector(
    kind: RemarkKind, cure: Cure, where: Callable[[Staged], bool] = _through_shm, said: str = "NCCL's log: {.gist}"
) -> Callable[[Staged], LoggedReason | None]:
    """Return a detector for a remark about two GPUs in NCCL's log."""

    def find(staged: Staged) -> LoggedReason | None:
        found = staged.found(kind) if where(staged) else ()
        return LoggedReason(said.format(found[0]), cure) if found else None

    return find
