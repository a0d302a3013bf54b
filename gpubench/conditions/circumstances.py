"""The input of detectors (`Circumstances`: facts and measurements of one run) and their output (`Sighting`:
evidence for a condition).
"""

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
from gpubench.model.paths.ucx import Transfer, UcxRoute
from gpubench.model.paths.wiring import GpuPlace, Wiring
from gpubench.model.profiles.profile import Profile
from gpubench.model.results.figures import QUICK, Measurements
from gpubench.model.results.report import CollectiveRow, Effect
from gpubench.model.terms.ranks import DevicePlace, RankIdentity
from gpubench.model.terms.units import format_size
from gpubench.model.terms.verdict import NO_CURE, Cure, Verdict

OFF = ("", "0")  # Values that switch an NCCL variable off
_MOST_NAMES = 4


def joined(texts: Iterable[str], most: int = _MOST_NAMES) -> str:
    """Join the first distinct texts, followed by the number of texts left out."""
    distinct = list(dict.fromkeys(filter(None, texts)))
    rest = len(distinct) - most
    return ", ".join(distinct[:most]) + (f" and {rest} more" if rest > 0 else "")


class Sighting(Struct, frozen=True, kw_only=True):
    """Evidence that a detector found its condition on a node, a GPU, a pair, a NIC or some ranks.

    If severity, cure, expected or likely is empty, the condition's own value applies. A `quiet` sighting can explain
    paths, but is not reported as a finding.
    """

    subject: str
    seen: str
    confidence: Confidence = Confidence.PROVEN
    gpus: frozenset[int] | None = None  # Positions of the GPUs whose paths are affected. None: all GPUs of the run
    pairs: frozenset[Pair] | None = None  # Affected ordered GPU pairs, if the condition is about pairs
    names: tuple[str, ...] = ()  # Affected devices or ranks, as findings name them
    places: tuple[DevicePlace, ...] = ()  # Nodes and devices of the affected subjects
    heading: str = ""  # Text that names all subjects together, instead of a list of them
    effects: tuple[Effect, ...] = ()
    severity: Verdict | None = None
    expected: str = ""
    likely: str = ""
    cure: Cure = NO_CURE
    expected_percent: float | None = None  # Remaining bandwidth in percent of the expected one
    quiet: bool = False

    def touches(self, pair: Pair) -> bool:
        """True if the condition affects the path between these two GPUs."""
        if self.pairs is not None:
            return pair in self.pairs
        return self.gpus is None or not self.gpus.isdisjoint(pair)


class Unread(Struct, frozen=True):
    """A node, device or rank on which a condition could not be checked, with the reason."""

    subject: str
    reason: str


Found = Iterator[Sighting | Unread]


class Together(Struct, frozen=True):
    """Pairs that copied at the same time, with their total bandwidth in GB/s: writes by the sources, reads by the
    destinations.
    """

    pattern: str
    pairs: tuple[Pair, ...]
    write_gb_s: float
    read_gb_s: float


class IssueTime(Struct, frozen=True):
    """The time in µs that the slowest rank's host takes to issue an operation, and the time of the whole operation."""

    label: str
    issue_us: float
    time_us: float

    @classmethod
    def of(cls, rows: Iterable[CollectiveRow]) -> "tuple[IssueTime, ...]":
        """Return the issue times of these rows. Rows without a measured issue time are skipped."""
        return tuple(
            cls(f"{format_size(row.size_bytes)} {row.placement.replace('_', ' ')}", row.issue_us, row.time_us)
            for row in rows
            if row.issue_us is not None
        )


class Circumstances(Struct, frozen=True, kw_only=True, dict=True):
    """The input of every detector: the nodes, ranks, settings, paths and measurements of one run.

    A GPU's position is its index in `wiring`. If ranks have GPUs, it is the rank number.
    """

    wiring: Wiring
    facts: Sequence[RankFacts] = ()
    #: The user's environment variables with the distinct values of all ranks. Variables that gpubench set are left out.
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: Host-staged pairs and their transports. None if nothing was sent.
    staged: Mapping[Pair, Sequence[Transport]] | None = None
    #: Evidence by host-staged pair if CUDA makes the copies. None if NCCL moves the data.
    copied: Mapping[Pair, str] | None = None
    #: Pairs whose destination received wrong data
    wrong: frozenset[Pair] = frozenset()
    #: Pairs that were measured simultaneously
    together: Sequence[Together] = ()
    kinds: Sequence[MachineKind] = ()
    #: The matching profile of each node
    profiles: Mapping[int, Profile] = field(default_factory=dict)
    #: True if --profile names the profile, so that the machine must match it completely
    profile_asked_for: bool = False
    expected_gpus: int | None = None
    measurements: Measurements = QUICK
    #: By rank: share of its time that the process was runnable but waited for a CPU
    waited: Mapping[int, float] = field(default_factory=dict)
    #: By rank: clocks and throttle reasons of its GPU, read right after operations
    at_work: Mapping[int, GpuCondition] = field(default_factory=dict)
    #: By GPU position: readings from before the first operation and after the last, while this job was idle
    idle_gpus: Mapping[int, IdleGpu] = field(default_factory=dict)
    #: By GPU position: NVLink traffic divided by the most that this job can have moved, if above 1
    beyond: Mapping[int, float] = field(default_factory=dict)
    issued: Sequence[IssueTime] = ()
    slow: Sequence[CollectiveRow] = ()
    #: Transfers of GPU memory between two processes by UCX, measured or read from a log
    transfers: Sequence[Transfer] = ()
    #: Results of MPI operations on GPU memory, if gpubench tried any
    mpi_support: MpiSupport | None = None

    @property
    def nodes(self) -> Mapping[int, Topology]:
        """Nodes with known facts, by node number."""
        return self.wiring.nodes

    @property
    def uses_nccl(self) -> bool:
        """True if NCCL moves the data in this run, or would move it."""
        return self.copied is None

    def values(self, name: str) -> tuple[str, ...]:
        """Return the distinct values of an environment variable on all ranks."""
        return tuple(self.settings.get(name, ()))

    def is_on(self, name: str) -> bool:
        """True if any rank sets the variable to a value other than '' and '0'."""
        return any(value not in OFF for value in self.values(name))

    def host(self, node: int) -> str:
        """Return the node's host name, or an empty text if the job has only one node."""
        return self.nodes[node].snapshot.host if len(self.nodes) > 1 and node in self.nodes else ""

    def subject(self, node: int, *words: str) -> str:
        """Return the words, prefixed by the host name if the job has several nodes. Without words, return the host
        name.
        """
        text = " ".join(filter(None, (self.host(node), *words)))
        return text or (self.nodes[node].snapshot.host if node in self.nodes else f"node {node}")

    def gpu_name(self, gpu: int) -> str:
        """Return a GPU's name, for example 'node1 GPU3' or, in a job with one node, 'GPU3'."""
        known, node = self.wiring.gpu(gpu), self.wiring.gpus[gpu].node
        return self.subject(node, f"GPU {gpu}" if known is None else known.device)

    def pair_name(self, pair: Pair) -> str:
        """Return a pair's name: two ranks if each rank has one GPU, else two GPUs."""
        one, other = (self.wiring.gpus[gpu] for gpu in pair)
        if isinstance(one, RankIdentity):
            return f"ranks {pair[0]} → {pair[1]}"
        known = self.wiring.gpu(pair[1])
        same_node = one.node == other.node and known is not None
        return f"{self.gpu_name(pair[0])} → {known.device if same_node and known else self.gpu_name(pair[1])}"

    def names_with_ids(self, node: int, *devices: Device) -> str:
        """Return device names with bus ids, prefixed by the host name if the job has several nodes.

        Without devices, return the host name.
        """
        names = " → ".join(
            f"{device.device} ({device.bus_id})" if device.bus_id else device.device for device in devices
        )
        return " ".join(filter(None, (self.host(node) if devices else self.nodes[node].snapshot.host, names)))

    def places(self, node: int, *devices: Device) -> tuple[DevicePlace, ...]:
        """Return the node and id of each device. Without devices, return the node itself."""
        host = self.nodes[node].snapshot.host
        return tuple(DevicePlace(host, device.device, device.bus_id) for device in devices) or (DevicePlace(host),)

    def gpu_places(self, gpus: Iterable[int]) -> tuple[DevicePlace, ...]:
        """Return the node and device of GPUs at these positions."""
        return tuple(map(self.wiring.place, dict.fromkeys(gpus)))

    def pair_with_ids(self, pair: Pair) -> str:
        """Return the names and bus ids of two GPUs of one node."""
        known = [gpu for gpu in map(self.wiring.gpu, pair) if gpu is not None]
        return self.names_with_ids(self.wiring.gpus[pair[0]].node, *known)

    def exact_profile(self, node: int) -> Profile | None:
        """Return the node's profile. None if the node has only a generic profile, or none."""
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
        """GPU positions by node number."""
        found: dict[int, list[int]] = {}
        for position, gpu in enumerate(self.wiring.gpus):
            found.setdefault(gpu.node, []).append(position)
        return found

    def pair_node(self, pair: Pair) -> Topology:
        """Return the node of the pair's source GPU."""
        return self.nodes[self.wiring.gpus[pair[0]].node]

    def node_gpus(self, node: int) -> frozenset[int]:
        """Return the positions of a node's GPUs."""
        return frozenset(self._positions.get(node, ()))

    def rank_gpus(self, facts: RankFacts) -> frozenset[int]:
        """Return the position of the rank's GPU if each rank has one GPU, else the positions of all GPUs of its
        node.
        """
        return frozenset((facts.rank,)) if self._has_one_gpu(facts) else self.node_gpus(facts.node)

    def _has_one_gpu(self, facts: RankFacts) -> bool:
        known = self.wiring.gpus[facts.rank] if facts.rank < len(self.wiring.gpus) else None
        return isinstance(known, RankIdentity) and known.rank == facts.rank

    def rank_places(self, ranks: Iterable[RankFacts]) -> tuple[DevicePlace, ...]:
        """Return the GPU of each rank. For ranks without exactly one GPU, return their node."""
        places: dict[DevicePlace, None] = {}
        for rank in ranks:
            node = self.nodes.get(rank.node)
            of_node = DevicePlace(rank.host if node is None else node.snapshot.host)
            places[self.wiring.place(rank.rank) if self._has_one_gpu(rank) else of_node] = None
        return tuple(places)

    def gpus(self) -> Iterator[tuple[int, Topology, GpuFacts]]:
        """Yield the position, node and facts of every GPU with known facts."""
        for position, place in enumerate(self.wiring.gpus):
            known = self.wiring.gpu(position)
            if known is not None:
                yield position, self.nodes[place.node], known

    @cached_property
    def local_pairs(self) -> tuple[Pair, ...]:
        """Ordered pairs inside nodes whose path detectors have to explain: host-staged pairs, or all pairs if
        nothing was sent.
        """
        if self.staged is not None:
            return tuple(pair for pair in self.staged if self.wiring.share_node(pair))
        return tuple(
            (one, other) for members in self._positions.values() for one in members for other in members if one != other
        )

    @cached_property
    def remote_pairs(self) -> tuple[Pair, ...]:
        """Pairs between nodes whose path detectors have to explain: host-staged pairs.

        If nothing was sent, it is one pair of GPUs for each two consecutive nodes.
        """
        if self.staged is not None:
            return tuple(pair for pair in self.staged if not self.wiring.share_node(pair))
        first = [members[0] for members in self._positions.values()]
        return tuple((one, other) for one, other in pairwise(first))

    @cached_property
    def refusals(self) -> Mapping[Pair, Refusal]:
        """GPU pairs inside nodes for which the driver refuses peer access, each with the refusal."""
        found = ((pair, self.wiring.refusal(pair)) for pair in self.local_pairs)
        return {pair: refusal for pair, refusal in found if refusal is not None}

    @cached_property
    def distinct(self) -> "Circumstances":
        """The same run, but only with the first of consecutive nodes that have equal facts.

        If facts about processes or paths are known, all nodes are kept.
        """
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
        """Return the facts of all ranks on a node."""
        return [fact for fact in self.facts if fact.node == node]

    def node_sighting(
        self, number: int, seen: str, confidence: Confidence = Confidence.PROVEN, *words: str, **more: Any
    ) -> Sighting:
        """Return a sighting that affects the paths of all GPUs of a node.

        `words` name the device or link of the node on which the condition was found.
        """
        places = self.places(number, *(nic for nic in self.nodes[number].nics if nic.name in words))
        names = () if words else (self.names_with_ids(number),)
        more = {"gpus": self.node_gpus(number), "names": names, "places": places, **more}
        return Sighting(subject=self.subject(number, *words), seen=seen, confidence=confidence, **more)

    def nodes_sighting(
        self, numbers: Iterable[int], seen: str, confidence: Confidence = Confidence.PROVEN, **more: Any
    ) -> Sighting:
        """Return a sighting that affects all GPUs of several nodes."""
        numbers = list(numbers)
        hosts = tuple(self.nodes[number].snapshot.host for number in numbers)
        gpus = frozenset(gpu for number in numbers for gpu in self.node_gpus(number))
        places = tuple(map(DevicePlace, hosts))
        more = {"subject": joined(hosts), "gpus": gpus, "names": hosts, "places": places, **more}
        return Sighting(seen=seen, confidence=confidence, **more)

    def gpu_sighting(
        self, position: int, seen: str, confidence: Confidence = Confidence.PROVEN, **more: Any
    ) -> Sighting:
        """Return a sighting that affects the paths of one GPU."""
        known, node = self.wiring.gpu(position), self.wiring.gpus[position].node
        names = () if known is None else (self.names_with_ids(node, known),)
        more = {"gpus": frozenset((position,)), "names": names, "places": self.gpu_places((position,)), **more}
        return Sighting(subject=self.gpu_name(position), seen=seen, confidence=confidence, **more)

    def device_sighting(
        self, number: int, device: Device, seen: str, confidence: Confidence = Confidence.PROVEN, **more: Any
    ) -> Sighting:
        """Return a sighting for a device. A GPU affects only its own paths. A NIC affects the paths of all GPUs of
        the node.
        """
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
        """Return a sighting that affects only the paths of these ordered GPU pairs."""
        names = tuple(map(self.pair_name, sorted(pairs)))
        more = {"names": names, "places": self.gpu_places(chain.from_iterable(sorted(pairs))), **more}
        return Sighting(subject=joined(names), seen=seen, confidence=confidence, pairs=frozenset(pairs), **more)

    def rank_sighting(
        self, ranks: Sequence[RankFacts], seen: str, confidence: Confidence = Confidence.PROVEN, **more: Any
    ) -> Sighting:
        """Return a sighting that affects the GPUs of these ranks, which run on one node."""
        gpus = frozenset(gpu for rank in ranks for gpu in self.rank_gpus(rank))
        more = {"gpus": gpus, "places": self.rank_places(ranks), **more}
        subject = self.subject(ranks[0].node, rank_names(ranks))
        return Sighting(subject=subject, seen=seen, confidence=confidence, **more)


def transfer_sighting(
    transfer: Transfer, why: str, confidence: Confidence = Confidence.PROVEN, **more: Any
) -> Sighting:
    """Return a sighting for one transfer. A NIC inside a node is only a WARN, because it bypasses host memory."""
    found = {"severity": Verdict.WARN} if transfer.route is UcxRoute.RDMA else {}
    return Sighting(
        subject=transfer.name,
        confidence=confidence,
        names=(transfer.name,),
        places=transfer.places,
        **{"seen": f"{why} ({transfer.path})", **found, **more},
    )


def rank_names(ranks: Sequence[RankFacts]) -> str:
    """Return 'rank 3' or 'ranks 0, 1'."""
    return f"rank{'s' if len(ranks) > 1 else ''} {joined(str(rank.rank) for rank in ranks)}"


class Facts(Struct, frozen=True, dict=True):
    """The input of all checks: nodes, groups of equal nodes, ranks, and a profile for each node."""

    nodes: Sequence[Topology]
    kinds: Sequence[MachineKind] = ()
    ranks: Sequence[RankFacts] = ()
    profiles: Sequence[Profile | None] = ()
    measurements: Measurements = QUICK
    asked: bool = False
    expected_gpus: int | None = None

    @cached_property
    def circumstances(self) -> Circumstances:
        """The same facts as input for detectors, with all GPUs of all nodes."""
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
    """Return where these NCCL variables are set: the environment or configuration files."""
    known = [fact.nccl_settings for fact in facts]
    found = {settings[name].place: None for settings in known for name in names if name in settings}
    return list(found) or [ENVIRONMENT]


def removal(names: Collection[str], places: Sequence[str]) -> Cure:
    """Return the cure that unsets variables, or that searches configuration files for them."""
    files = [place for place in places if place != ENVIRONMENT]
    removed = f"Remove {' and '.join(names)} from {' and '.join(files)}"
    if ENVIRONMENT in places:
        return Cure.of(unset(*names), comment=f"{removed} too." if files else "")
    return Cure.of(f"{verified_run(names)}grep -nE '{'|'.join(names)}' {' '.join(files)}", comment=f"{removed}.")


VERIFIED_COPIES = "gpubench p2p"  # Exits with code 1 if a copy arrives with wrong data
_KEEP_OFF_PEERS = (
    *("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_P2P_DIRECT_DISABLE", "NCCL_P2P_USE_CUDA_MEMCPY", "NCCL_HOSTID"),
)
_KEEP_OFF_OTHERS = (
    *("NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_READ"),
    *("NCCL_NET_GDR_C2C", "NCCL_DMABUF_ENABLE", "NCCL_MNNVL_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"),
)


def unset(*names: str) -> str:
    """Return the command that unsets variables. If they keep data off a path, a run that verifies data comes first."""
    return f"{verified_run(names)}unset {' '.join(names)}"


def verified_run(names: Collection[str]) -> str:
    """Return the command that verifies data before variables are unset.

    Somebody may have set the variables because a path delivered wrong data.
    """
    if not set(_KEEP_OFF_PEERS).isdisjoint(names):
        return f"{VERIFIED_COPIES} && "
    off = [name for name in names if name in _KEEP_OFF_OTHERS]
    return f"env {' '.join(f'-u {name}' for name in off)} gpubench allreduce && " if off else ""


def user_settings(facts: Sequence[RankFacts], logged: Sequence[Mapping[str, str]] = ()) -> dict[str, tuple[str, ...]]:
    """Return the distinct values of the user's variables on all ranks, from the environment and NCCL's
    configuration files.
    """
    found: dict[str, dict[str, None]] = {}
    known = ({name: setting.value for name, setting in fact.nccl_settings.items()} for fact in facts)
    others = ({name: value for name, value in fact.environment.items() if name[:5] != "NCCL_"} for fact in facts)
    for variables in (*known, *others, *logged):
        for name, value in variables.items():
            found.setdefault(name, {})[value] = None
    return {name: tuple(values) for name, values in sorted(found.items())}
