"""The run in which conditions are looked for, and the sightings that detectors return."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.model.facts.process import ENVIRONMENT, GpuCondition, MpiSupport, RankFacts
from gpubench.model.facts.snapshot import GpuFacts, PciDevice
from gpubench.model.facts.traffic import IdleGpu
from gpubench.model.paths.nodes import MachineKind
from gpubench.model.paths.topology import Device, Refusal, Topology
from gpubench.model.paths.transport import Confidence, Pair, Transport
from gpubench.model.paths.wiring import GpuPlace, Wiring
from gpubench.model.profiles.profile import Profile
from gpubench.model.results.figures import QUICK, Measurements
from gpubench.model.results.report import CollectiveRow, Effect
from gpubench.model.terms.ranks import DevicePlace, RankIdentity
from gpubench.model.terms.units import format_size
from gpubench.model.terms.verdict import NO_CURE, Cure, Verdict

OFF = ("", "0")  # Values that switch a variable of NCCL off
_MOST_NAMES = 4


def joined(texts: Iterable[str], most: int = _MOST_NAMES) -> str:
    """Join the first few distinct texts, and count the rest."""
    distinct = list(dict.fromkeys(filter(None, texts)))
    rest = len(distinct) - most
    return ", ".join(distinct[:most]) + (f" and {rest} more" if rest > 0 else "")


class Sighting(Struct, frozen=True, kw_only=True):
    """A condition as it was detected in one place.

    An empty severity, cure, expected or likely means that of the condition. A `quiet` sighting explains paths and is
    not a finding.
    """

    subject: str
    seen: str
    confidence: Confidence = Confidence.PROVEN
    gpus: frozenset[int] | None = None  # Positions of GPUs with affected paths; None for all GPUs of the run
    pairs: frozenset[Pair] | None = None  # Affected ordered pairs, for conditions of pairs
    names: tuple[str, ...] = ()  # Subjects as findings name them
    places: tuple[DevicePlace, ...] = ()  # Nodes and devices of the subjects
    heading: str = ""  # One name for all subjects
    effects: tuple[Effect, ...] = ()
    severity: Verdict | None = None
    expected: str = ""
    likely: str = ""
    cure: Cure = NO_CURE
    expected_percent: float | None = None  # Share of the expected speed that is left
    quiet: bool = False

    def touches(self, pair: Pair) -> bool:
        """True if it affects the path of this pair."""
        if self.pairs is not None:
            return pair in self.pairs
        return self.gpus is None or not self.gpus.isdisjoint(pair)


class Unread(Struct, frozen=True):
    """A place where a condition could not be looked for, and the reason."""

    subject: str
    reason: str


Found = Iterator[Sighting | Unread]


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
    """The run and its paths. A GPU's position is its index in `wiring`: the rank number if ranks have GPUs."""

    wiring: Wiring
    facts: Sequence[RankFacts] = ()
    #: The user's variables: distinct values of all ranks, without those that gpubench set
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: Host-staged pairs and their transports; None if nothing was sent
    staged: Mapping[Pair, Sequence[Transport]] | None = None
    #: Evidence for host-staged pairs if CUDA, not NCCL, made the copies; None if NCCL moves the data
    copied: Mapping[Pair, str] | None = None
    #: Pairs along which wrong data arrived
    wrong: frozenset[Pair] = frozenset()
    #: Pairs that were measured at the same time
    together: Sequence[Together] = ()
    kinds: Sequence[MachineKind] = ()
    #: Matching profiles by node
    profiles: Mapping[int, Profile] = field(default_factory=dict)
    #: True if --profile names the profile: then the machine has to match it in everything
    profile_asked_for: bool = False
    expected_gpus: int | None = None
    measurements: Measurements = QUICK
    #: Share of its time that a rank was ready to run and waited for a CPU
    waited: Mapping[int, float] = field(default_factory=dict)
    #: Condition of a rank's GPU right after operations
    at_work: Mapping[int, GpuCondition] = field(default_factory=dict)
    #: GPUs by position while this job was idle, before its first operation and after its last
    idle_gpus: Mapping[int, IdleGpu] = field(default_factory=dict)
    #: How many times the most that this job can move the NVLinks of a GPU carried, if more than once
    beyond: Mapping[int, float] = field(default_factory=dict)
    issued: Sequence[IssueTime] = ()
    slow: Sequence[CollectiveRow] = ()
    #: What MPI did with GPU memory, if that was tried
    mpi_support: MpiSupport | None = None

    @property
    def nodes(self) -> Mapping[int, Topology]:
        """Nodes with known facts, by number."""
        return self.wiring.nodes

    @property
    def uses_nccl(self) -> bool:
        """True if NCCL moves the data, or would move it."""
        return self.copied is None

    def values(self, name: str) -> tuple[str, ...]:
        """Return the distinct values of a variable among the ranks."""
        return tuple(self.settings.get(name, ()))

    def is_on(self, name: str) -> bool:
        """True if any rank has the variable set to a value other than empty and 0."""
        return any(value not in OFF for value in self.values(name))

    def host(self, node: int) -> str:
        """Return the node's name if the job has several nodes, else an empty text."""
        return self.nodes[node].snapshot.host if len(self.nodes) > 1 and node in self.nodes else ""

    def subject(self, node: int, *words: str) -> str:
        """Return a subject: the words, after the node's name if there are several nodes, or the node's name alone."""
        text = " ".join(filter(None, (self.host(node), *words)))
        return text or (self.nodes[node].snapshot.host if node in self.nodes else f"node {node}")

    def gpu_name(self, gpu: int) -> str:
        """Return a GPU's name, such as 'node1 GPU3'."""
        known, node = self.wiring.gpu(gpu), self.wiring.gpus[gpu].node
        return self.subject(node, f"GPU {gpu}" if known is None else known.device)

    def pair_name(self, pair: Pair) -> str:
        """Return a pair's name: by ranks if each rank has one GPU, else by GPUs."""
        one, other = (self.wiring.gpus[gpu] for gpu in pair)
        if isinstance(one, RankIdentity):
            return f"ranks {pair[0]} → {pair[1]}"
        known = self.wiring.gpu(pair[1])
        same_node = one.node == other.node and known is not None
        return f"{self.gpu_name(pair[0])} → {known.device if same_node and known else self.gpu_name(pair[1])}"

    def names_with_ids(self, node: int, *devices: Device) -> str:
        """Return the names of devices with bus ids, after the host's if there are several nodes; else the host's."""
        names = " → ".join(
            f"{device.device} ({device.bus_id})" if device.bus_id else device.device for device in devices
        )
        return " ".join(filter(None, (self.host(node) if devices else self.nodes[node].snapshot.host, names)))

    def places(self, node: int, *devices: Device) -> tuple[DevicePlace, ...]:
        """Return the places of a node's devices; without devices, the place of the node."""
        host = self.nodes[node].snapshot.host
        return tuple(DevicePlace(host, device.device, device.bus_id) for device in devices) or (DevicePlace(host),)

    def gpu_places(self, gpus: Iterable[int]) -> tuple[DevicePlace, ...]:
        """Return the places of GPUs by position."""
        return tuple(map(self.wiring.place, dict.fromkeys(gpus)))

    def pair_with_ids(self, pair: Pair) -> str:
        """Return the names of two GPUs of a node with bus ids."""
        known = [gpu for gpu in map(self.wiring.gpu, pair) if gpu is not None]
        return self.names_with_ids(self.wiring.gpus[pair[0]].node, *known)

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
    def _positions(self) -> dict[int, list[int]]:
        """Positions of GPUs by node."""
        found: dict[int, list[int]] = {}
        for position, gpu in enumerate(self.wiring.gpus):
            found.setdefault(gpu.node, []).append(position)
        return found

    def pair_node(self, pair: Pair) -> Topology:
        """Return the node of a pair's source GPU."""
        return self.nodes[self.wiring.gpus[pair[0]].node]

    def node_gpus(self, node: int) -> frozenset[int]:
        """Return the positions of a node's GPUs."""
        return frozenset(self._positions.get(node, ()))

    def rank_gpus(self, facts: RankFacts) -> frozenset[int]:
        """Return the rank's GPU if each rank has one, else all GPUs of its node."""
        return frozenset((facts.rank,)) if self._has_one_gpu(facts) else self.node_gpus(facts.node)

    def _has_one_gpu(self, facts: RankFacts) -> bool:
        known = self.wiring.gpus[facts.rank] if facts.rank < len(self.wiring.gpus) else None
        return isinstance(known, RankIdentity) and known.rank == facts.rank

    def rank_places(self, ranks: Iterable[RankFacts]) -> tuple[DevicePlace, ...]:
        """Return the GPUs of ranks that have one each, else the nodes of the ranks."""
        places: dict[DevicePlace, None] = {}
        for rank in ranks:
            node = self.nodes.get(rank.node)
            of_node = DevicePlace(rank.host if node is None else node.snapshot.host)
            places[self.wiring.place(rank.rank) if self._has_one_gpu(rank) else of_node] = None
        return tuple(places)

    def gpus(self) -> Iterator[tuple[int, Topology, GpuFacts]]:
        """Iterate over the GPUs with known facts: position, node, facts."""
        for position, place in enumerate(self.wiring.gpus):
            known = self.wiring.gpu(position)
            if known is not None:
                yield position, self.nodes[place.node], known

    @cached_property
    def local_pairs(self) -> tuple[Pair, ...]:
        """Ordered pairs inside nodes to explain: the host-staged ones, or all pairs if nothing was sent."""
        if self.staged is not None:
            return tuple(pair for pair in self.staged if self.wiring.share_node(pair))
        return tuple(
            (one, other) for members in self._positions.values() for one in members for other in members if one != other
        )

    @cached_property
    def remote_pairs(self) -> tuple[Pair, ...]:
        """Pairs between nodes to explain. If nothing was sent, one pair joins each two neighbouring nodes."""
        if self.staged is not None:
            return tuple(pair for pair in self.staged if not self.wiring.share_node(pair))
        first = [members[0] for members in self._positions.values()]
        return tuple((one, other) for one, other in pairwise(first))

    @cached_property
    def refusals(self) -> Mapping[Pair, Refusal]:
        """Pairs inside nodes without peer access, and how the driver refuses it."""
        found = ((pair, self.wiring.refusal(pair)) for pair in self.local_pairs)
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

    def node_ranks(self, node: int) -> list[RankFacts]:
        """Return the processes of a node."""
        return [fact for fact in self.facts if fact.node == node]

    def node_sighting(
        self, number: int, seen: str, confidence: Confidence = Confidence.PROVEN, *words: str, **more: Any
    ) -> Sighting:
        """Return a sighting on a node, which affects the paths of all its GPUs. `words` name the part of the node."""
        places = self.places(number, *(nic for nic in self.nodes[number].nics if nic.name in words))
        names = () if words else (self.names_with_ids(number),)
        more = {"gpus": self.node_gpus(number), "names": names, "places": places, **more}
        return Sighting(subject=self.subject(number, *words), seen=seen, confidence=confidence, **more)

    def nodes_sighting(
        self, numbers: Iterable[int], seen: str, confidence: Confidence = Confidence.PROVEN, **more: Any
    ) -> Sighting:
        """Return a sighting on several nodes."""
        numbers = list(numbers)
        hosts = tuple(self.nodes[number].snapshot.host for number in numbers)
        gpus = frozenset(gpu for number in numbers for gpu in self.node_gpus(number))
        places = tuple(map(DevicePlace, hosts))
        more = {"subject": joined(hosts), "gpus": gpus, "names": hosts, "places": places, **more}
        return Sighting(seen=seen, confidence=confidence, **more)

    def gpu_sighting(
        self, position: int, seen: str, confidence: Confidence = Confidence.PROVEN, **more: Any
    ) -> Sighting:
        """Return a sighting on one GPU."""
        known, node = self.wiring.gpu(position), self.wiring.gpus[position].node
        names = () if known is None else (self.names_with_ids(node, known),)
        more = {"gpus": frozenset((position,)), "names": names, "places": self.gpu_places((position,)), **more}
        return Sighting(subject=self.gpu_name(position), seen=seen, confidence=confidence, **more)

    def device_sighting(
        self, number: int, device: Device, seen: str, confidence: Confidence = Confidence.PROVEN, **more: Any
    ) -> Sighting:
        """Return a sighting on a device. A GPU affects its own paths, a NIC those of all GPUs of the node."""
        gpus = self.node_gpus(number)
        if isinstance(device, GpuFacts):
            gpus = frozenset(gpu for gpu in gpus if self.wiring.gpu(gpu) is device)
        more = {
            "gpus": gpus,
            "names": (self.names_with_ids(number, device),),
            "places": self.places(number, device),
            **more,
        }
        return Sighting(subject=self.subject(number, device.device), seen=seen, confidence=confidence, **more)

    def pair_sighting(
        self, pairs: Collection[Pair], seen: str, confidence: Confidence = Confidence.PROVEN, **more: Any
    ) -> Sighting:
        """Return a sighting on ordered pairs of GPUs."""
        names = tuple(map(self.pair_name, sorted(pairs)))
        more = {"names": names, "places": self.gpu_places(chain.from_iterable(sorted(pairs))), **more}
        return Sighting(subject=joined(names), seen=seen, confidence=confidence, pairs=frozenset(pairs), **more)

    def rank_sighting(
        self, ranks: Sequence[RankFacts], seen: str, confidence: Confidence = Confidence.PROVEN, **more: Any
    ) -> Sighting:
        """Return a sighting on ranks of one node."""
        gpus = frozenset(gpu for rank in ranks for gpu in self.rank_gpus(rank))
        more = {"gpus": gpus, "places": self.rank_places(ranks), **more}
        subject = self.subject(ranks[0].node, rank_names(ranks))
        return Sighting(subject=subject, seen=seen, confidence=confidence, **more)


def rank_names(ranks: Sequence[RankFacts]) -> str:
    """Return 'rank 3' or 'ranks 0, 1'."""
    return f"rank{'s' if len(ranks) > 1 else ''} {joined(str(rank.rank) for rank in ranks)}"


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
            profiles={number: profile for number, profile in enumerate(self.profiles) if profile is not None},
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
        return Cure.of(unset(*names), comment=f"{removed} too." if files else "")
    return Cure.of(f"{verified_run(names)}grep -nE '{'|'.join(names)}' {' '.join(files)}", comment=f"{removed}.")


VERIFIED_COPIES = "gpubench p2p"  # Exit code 1 if data arrive wrong
_KEEP_OFF_PEERS = (
    *("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_P2P_DIRECT_DISABLE", "NCCL_P2P_USE_CUDA_MEMCPY", "NCCL_HOSTID"),
)
_KEEP_OFF_OTHERS = (
    *("NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_READ"),
    *("NCCL_NET_GDR_C2C", "NCCL_DMABUF_ENABLE", "NCCL_MNNVL_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"),
)


def unset(*names: str) -> str:
    """Return the command that removes variables; a verified copy runs first if they keep data off a path."""
    return f"{verified_run(names)}unset {' '.join(names)}"


def verified_run(names: Collection[str]) -> str:
    """Return the verified run that precedes the removal of variables: whoever set them may have seen wrong data."""
    if not set(_KEEP_OFF_PEERS).isdisjoint(names):
        return f"{VERIFIED_COPIES} && "
    off = [name for name in names if name in _KEEP_OFF_OTHERS]
    return f"env {' '.join(f'-u {name}' for name in off)} gpubench allreduce && " if off else ""


def user_settings(facts: Sequence[RankFacts], logged: Sequence[Mapping[str, str]] = ()) -> dict[str, tuple[str, ...]]:
    """Return the distinct values of the user's variables, from the environment and NCCL's files of all ranks."""
    found: dict[str, dict[str, None]] = {}
    known = ({name: setting.value for name, setting in fact.nccl_settings.items()} for fact in facts)
    others = ({name: value for name, value in fact.environment.items() if name[:5] != "NCCL_"} for fact in facts)
    for variables in (*known, *others, *logged):
        for name, value in variables.items():
            found.setdefault(name, {})[value] = None
    return {name: tuple(values) for name, values in sorted(found.items())}
