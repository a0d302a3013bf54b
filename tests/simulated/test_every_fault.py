"""Every key of --fault on every profile, against a list written by hand: which parts and rows change, and no others.

`WHAT_CHANGES` has a line per key. A part is named by the fault's own devices ("gpu", "pair"), rows of copies by their
ends and by the way that they take: direct, through host memory (peer access off), or with host memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import permutations
from typing import NamedTuple

import pytest
from msgspec.structs import fields

from gpubench.errors import GpubenchError, UsageError
from gpubench.model.facts.snapshot import Snapshot, is_amd
from gpubench.model.paths.topology import XGMI_LINK
from gpubench.model.profiles.fault import FAULT_KEYS, FaultKey, Subject, parse_fault
from gpubench.model.profiles.profile import Profile
from gpubench.model.terms.operation import Block, DataPattern, DataType, Engine, HostMemory, Place
from gpubench.ports.backend import Region
from gpubench.ports.copies import CopyStream
from gpubench.profiles import all_profiles
from gpubench.simulated.links import SimulatedCopies
from gpubench.simulated.machine import SimulatedMachine, parse_machine, snapshots
from gpubench.simulated.times import CollectiveTimes

MACHINES = tuple(profile.name for profile in all_profiles() if profile.match.visible and not is_amd(profile.gpu.name))
KEYS = [key for key in FAULT_KEYS if not key.command]

# The parts of a healthy machine that a fault may change, as they are named below.
DIRECT, OFF, WITH_HOST = "direct copies", "copies with peer access off", "copies with host memory"
DATA = "data of direct copies"
RINGS, IN_SWITCHES, ALL_TO_ALL, AT_ROOT = "rings", "reductions in NVSwitches", "alltoall", "gather"
COLLECTIVES = {RINGS, IN_SWITCHES, ALL_TO_ALL, AT_ROOT}


class Changes(NamedTuple):
    """What a key changes: facts as 'part.field', kinds of rows of the fault's own GPUs, and collectives of its node.

    The words in `refused` are all that a machine may answer that cannot have the fault.
    """

    facts: str = ""
    rows: frozenset[str] | set[str] = frozenset()
    collectives: frozenset[str] | set[str] = frozenset()
    refused: str = ""


NO_FABRIC = "no NVLink fabric"
NO_LINK = "it cannot be trained down"
NO_OTHER = "there is no "
REFUSED_PAIRS = "pair.cuda pair.read pair.write pair.nvlink pair.atomics pair.pci"


def what_changes(key: FaultKey, profile: Profile) -> Changes:
    """The line of a key, as far as it depends on how the GPUs of a machine reach each other."""
    by_nvlink = profile.nvlink is not None
    # Without NVLinks the PCIe link is what direct copies, copies through host memory and collectives use.
    slot = Changes("gpu.pcie node.pci_devices", {OFF, WITH_HOST} if by_nvlink else {OFF, WITH_HOST, DIRECT})
    slot = slot._replace(collectives=set() if by_nvlink else COLLECTIVES, refused=NO_LINK)
    own_links = {DIRECT} if by_nvlink else {DIRECT, OFF, WITH_HOST}
    # xGMI joins two GPUs by one link, so the fault takes all that they have.
    is_xgmi = profile.nvlink is not None and profile.nvlink.version == XGMI_LINK
    link_facts = "gpu.nvlinks pair.nvlink" if is_xgmi else "gpu.nvlinks"
    lines = {
        "gpu nvlink": Changes("gpu.nvlinks", {DIRECT}, COLLECTIVES, "NVLinks"),
        "gpu width": slot,
        "gpu generation": slot._replace(facts=f"{slot.facts} gpu.idle gpu.performance_state"),
        "gpu p2p": Changes(REFUSED_PAIRS, {DIRECT}, COLLECTIVES),
        "gpu cuda_peer": Changes("pair.cuda", {DIRECT}, COLLECTIVES),
        "gpu mig": Changes(f"gpu.mig {REFUSED_PAIRS}", {DIRECT}, COLLECTIVES),
        "gpu ecc": Changes("gpu.ecc"),
        "gpu throttle": Changes("gpu.throttle_reasons gpu.idle", collectives=COLLECTIVES),
        "gpu rows": Changes("gpu.remapped_rows"),
        "gpu fabric": Changes(f"gpu.fabric {REFUSED_PAIRS}", {DIRECT}, COLLECTIVES, NO_FABRIC),
        "gpu health": Changes("gpu.fabric", refused=NO_FABRIC),
        "gpu speed": Changes("", own_links, COLLECTIVES),
        "gpu errors": Changes("gpu.memory_errors"),
        "gpu temperature": Changes("gpu.temperature_c"),
        "gpu replays": Changes("gpu.pcie_replays"),
        "gpu busy": Changes("gpu.processes gpu.idle"),
        "nic state": Changes("nic.state node.rdma_ports"),
        "nic rate": Changes("nic.rate_gbit_s"),
        "nic width": Changes("nic.pcie node.pci_devices", refused=NO_LINK),
        "nic generation": Changes("nic.pcie node.pci_devices", refused=NO_LINK),
        "nic errors": Changes("node.rdma_ports", refused="no RDMA port"),
        "nic missing": Changes("nic.* node.rdma_ports node.pci_devices"),
        "link nvlink": Changes(link_facts, {DIRECT}, {RINGS, ALL_TO_ALL, AT_ROOT}, "no NVLink connects the two"),
        "link p2p": Changes(REFUSED_PAIRS, {DIRECT}, COLLECTIVES),
        "link staged": Changes("", {DIRECT}, COLLECTIVES),
        "link corrupts": Changes("", {DATA}),
        "link speed": Changes("", {DIRECT}, {RINGS, ALL_TO_ALL, AT_ROOT}),
        "node driver": Changes("node.driver node.driver_settings"),
        "node cuda": Changes("node.driver"),
        "node peermem": Changes("node.gpudirect"),
        "node acs": Changes("node.pci_devices", refused="no PCIe bridge"),
        "node iommu": Changes("node.kernel node.pci_devices"),
        "node clique": Changes("gpu.fabric", collectives=COLLECTIVES, refused="no NVLink domain"),
        "node imex": Changes("node.driver_settings", collectives=COLLECTIVES, refused="no NVLink domain"),
        # Without NVLinks these GPUs are below different root ports, and NCCL takes host memory anyway.
        "node env": Changes("", collectives=COLLECTIVES if by_nvlink else set()),
        "node mnnvl": Changes(collectives=COLLECTIVES, refused="no NVLink domain"),
    }
    return lines[f"{key.subject} {key.key}"]


BY_NVLS = (
    "hgx-h100-8",
    "hgx-h200-8",
    "hgx-h20-8",
    "hgx-h800-8",
    "hgx-b200-8",
    "hgx-b300-8",
    "gb200-nvl72",
    "gb300-nvl72",
)
"""Whose all-reduce NVSwitches do: no path between two GPUs takes part."""

WITHOUT_PEER_ACCESS = ("rtx-4090-2", "rtx-5090-2")
"""Whose GPUs reach each other through host memory by design."""


def expected_changes(key: FaultKey, profile: Profile) -> Changes:
    """The line of a key for one machine: what it does not have cannot change."""
    line = what_changes(key, profile)
    rows, collectives = set(line.rows), set(line.collectives)
    if profile.name in WITHOUT_PEER_ACCESS:
        if key.key in ("p2p", "cuda_peer", "mig", "fabric", "staged", "env"):
            collectives = set()  # they go through host memory anyway
        if key.subject is Subject.LINK and key.key == "speed":
            rows = {OFF}  # the way that copies between the two take
        rows -= {DIRECT, DATA}
    if profile.name not in BY_NVLS:
        collectives -= {IN_SWITCHES}
    if profile.match.visible == 1:
        rows -= {DIRECT, DATA, OFF}
        collectives = set()
        facts = line.facts.replace(REFUSED_PAIRS, "")
        needs_two = key.subject is Subject.LINK or key.key in ("p2p", "cuda_peer")
        line = line._replace(facts=facts, refused=NO_OTHER if needs_two else line.refused)
    return line._replace(rows=rows, collectives=collectives)


# What is there to compare: facts, rows of copies and times of collectives of node 0, by name.
Name = tuple[object, ...]
Observed = Mapping[Name, object]


def observe(machine: SimulatedMachine, *texts: str) -> Observed:
    """Everything that is read and measured of the first node. Raises UsageError for a fault that it cannot have."""
    faults = [parse_fault(text) for text in texts]
    node = snapshots(machine, faults, 0, [0])[0]
    return {**dict(facts_of(node)), **dict(copies_of(machine, *texts)), **dict(times_of(machine, *texts))}


def facts_of(node: Snapshot) -> Iterator[tuple[Name, object]]:
    buses = {gpu.device: gpu.bus_id for gpu in node.gpus}
    for gpu in node.gpus:
        yield from ((("fact", "gpu", gpu.bus_id, each.name), getattr(gpu, each.name)) for each in fields(gpu))
    for nic in node.nics:
        yield from ((("fact", "nic", nic.name, each.name), getattr(nic, each.name)) for each in fields(nic))
    for pair in node.pairs:
        ends = frozenset((buses[pair.source], buses[pair.destination])), buses[pair.source]
        names = [name for name in pair.__struct_fields__ if name not in ("source", "destination")]
        yield from ((("fact", "pair", *ends, name), getattr(pair, name)) for name in names)
    parts = ("gpus", "nics", "pairs")
    yield from (
        (("fact", "node", node.host, each.name), getattr(node, each.name))
        for each in fields(node)
        if each.name not in parts
    )


SIZES = (16, 2**28)  # Of a latency, and of a bandwidth


def copies_of(machine: SimulatedMachine, *texts: str) -> Iterator[tuple[Name, object]]:
    """Rows of copies, with noise, by the bus ids of their ends."""
    copies = SimulatedCopies(machine, [parse_fault(text) for text in texts], 0)
    buses = [gpu.bus_id for gpu in copies.gpus]

    def seconds(source: Place, destination: Place, by: int, engine: Engine, size: int) -> float:
        ends = [Region(copies.allocate(place, size), 0) for place in (source, destination)]
        return copies.seconds([CopyStream(by, engine, ends[0], ends[1], size)], 1)

    for gpu, bus in enumerate(buses):
        for size in SIZES:
            yield ("copy", WITH_HOST, bus, "to", size), seconds(HostMemory.PINNED, gpu, gpu, Engine.CE, size)
            yield ("copy", WITH_HOST, bus, "from", size), seconds(gpu, HostMemory.PINNED, gpu, Engine.CE, size)
    for one, other in permutations(range(len(buses)), 2):
        ends = frozenset((buses[one], buses[other])), buses[one]
        for size in SIZES:
            yield ("copy", OFF, *ends, size), seconds(one, other, one, Engine.CE, size)
        reaches = copies.can_reach(one, other)
        if reaches:
            copies.enable(one, other)
            for size in SIZES:
                yield ("copy", DIRECT, *ends, size), seconds(one, other, one, Engine.CE, size)
            yield ("copy", DIRECT, *ends, "sm read"), seconds(one, other, other, Engine.SM, SIZES[1])
        block = DataPattern(DataType.INT64, None, 2), [(Block(0, one, 8, 0, 8), one)]
        yield ("copy", DATA, *ends), copies.corrupts and copies.allocate(other, 64).count_wrong(*block) > 0


def times_of(machine: SimulatedMachine, *texts: str) -> Iterator[tuple[Name, object]]:
    times = CollectiveTimes(machine, [parse_fault(text) for text in texts])
    of_all_reduce = IN_SWITCHES if machine.profile.name in BY_NVLS else RINGS
    kinds = {"allgather": RINGS, "allreduce": of_all_reduce, "alltoall": ALL_TO_ALL, "gather": AT_ROOT}
    for name, kind in kinds.items():
        try:
            yield ("time", kind, name), tuple(times.seconds(name, 2**28, row=0))
        except GpubenchError as error:
            yield ("time", kind, name), error.seen  # of one GPU, or of nodes that do not reach each other


@cache
def healthy(name: str) -> Observed:
    return observe(parse_machine(name))


def differences(before: Observed, now: Observed) -> list[Name]:
    return [name for name in {**before, **now} if name not in before or name not in now or before[name] != now[name]]


def fault_for(key: FaultKey, profile: Profile) -> tuple[str, tuple[int, ...]]:
    """A fault of this key that changes something, and the GPUs that it names."""
    gpu = min(1, profile.match.visible - 1)
    pair = (0, 3) if profile.name == "dgx-1-v100" else (0, 1)  # a pair of several NVLinks
    nvlink = 0 if profile.nvlink is None else profile.nvlink.links
    linked = next(
        (links for *ends, links in (profile.nvlink.pairs if profile.nvlink else ()) if tuple(ends) == pair), 2
    )
    values = {
        "gpu nvlink": nvlink // 2,
        "gpu width": 8,
        "gpu generation": max(1, profile.gpu.pcie_generation - 1),
        "nic width": 1,
        "nic generation": 1,
        "link nvlink": linked // 2,
        "gpu temperature": 91,
        "node env": "NCCL_P2P_DISABLE=1",
        "node driver": "550.54.15",
        "node cuda": "12.4",
        "node peermem": "no" if profile.node.peermem else "yes",
    }
    kinds = {"FACTOR": "0.5", "N": "7", "RATE": "50"}
    value = values.get(f"{key.subject} {key.key}", key.words[0] if key.words else kinds.get(key.values))
    if key.key == "throttle":
        value = "hw_slowdown"
    where = {
        Subject.GPU: (f"gpu{gpu}", (gpu,)),
        Subject.NIC: ("nic0", ()),
        Subject.LINK: (f"link{pair[0]}-{pair[1]}", pair),
        Subject.NODE: ("node0", tuple(range(profile.match.visible))),
    }
    part, gpus = where[key.subject]
    return f"{part}:{key.key}={value}", gpus


APART = ("lost", "missing", "silent", "driver_missing")
"""Keys that take devices away: their own tests are below."""


@pytest.mark.parametrize(
    "key", [key for key in KEYS if key.key not in APART], ids=lambda key: f"{key.subject} {key.key}"
)
def test_a_fault_changes_what_it_names_and_nothing_else(key: FaultKey) -> None:
    wrong = [f"{name}: {problem}" for name in MACHINES for problem in problems_of(key, name)]
    assert not wrong, "\n".join(wrong[:20])


def problems_of(key: FaultKey, name: str) -> Iterator[str]:
    machine = parse_machine(name)
    line = expected_changes(key, machine.profile)
    text, gpus = fault_for(key, machine.profile)
    try:
        now = observe(machine, text)
    except UsageError as error:
        if not line.refused or (line.refused not in str(error) and line.refused != NO_LINK):
            yield f"{text} is refused: {error}"
        return
    devices = snapshots(machine, (), 0, [0])[0].gpus
    fault = Planted(text, key, line, {devices[gpu].bus_id for gpu in gpus if gpu < len(devices)})
    changed = differences(healthy(name), now)
    yield from fault.problems_of_facts(changed, name in WITHOUT_PEER_ACCESS)
    yield from fault.problems_of_rows(changed, now)
    collectives = {kind for what, kind, *_ in changed if what == "time"}
    if collectives != line.collectives:
        yield f"{text} changes the collectives {collectives}, and not {line.collectives}"


SO_ANYWAY = ("cuda_peer", "ecc", "staged", "corrupts", "env")
"""Faults that machines without peer access have by design."""


class Planted(NamedTuple):
    """A fault, its line, and the bus ids of the GPUs that it names."""

    text: str
    key: FaultKey
    line: Changes
    own: set[str | None]

    def problems_of_facts(self, changed: Sequence[Name], is_so_anyway: bool) -> Iterator[str]:
        """Facts that change and should not, and parts of which none changes."""
        listed = set(self.line.facts.split())
        found = [(str(kind), rest) for what, kind, *rest in changed if what == "fact"]
        for kind, rest in found:
            is_own = kind not in ("gpu", "pair") or self.names(rest[0])
            if not is_own or not {f"{kind}.{rest[-1]}", f"{kind}.*"} & listed:
                yield f"{self.text} changes {kind} {rest}"
        if not (changed or self.key.key == "env" or (is_so_anyway and self.key.key in SO_ANYWAY)):
            yield f"{self.text} is accepted and changes nothing"
        missed = {each.partition(".")[0] for each in listed} - {kind for kind, _ in found} - {"node"}
        if missed and not (is_so_anyway and self.key.key in SO_ANYWAY):
            yield f"{self.text} changes no fact of {missed}"

    def problems_of_rows(self, changed: Sequence[Name], now: Observed) -> Iterator[str]:
        """Rows that change and should not, and those that should."""
        rows = {name for name in changed if name[0] == "copy"}
        for what, kind, ends, *rest in rows:
            if kind not in self.line.rows or not self.names(ends):
                yield f"{self.text} changes {what} {kind} {ends} {rest}"
        if {kind for _, kind, *_ in rows} != self.line.rows:
            yield f"{self.text} changes rows of other kinds than {self.line.rows}"
        if self.key.key == "nvlink":
            return  # where NVLinks join pairs, some of a GPU's pairs keep theirs
        left = (name for name in now if name[0] == "copy" and name[1] in self.line.rows and name not in rows)
        yield from (f"{self.text} leaves {name} as it is" for name in left if self.names(name[2]) and name[1] != DATA)

    def names(self, part: object) -> bool:
        """True for a GPU that the fault names and for its pairs; of a fault between two GPUs for that pair alone."""
        if not isinstance(part, frozenset):
            return part in self.own
        return bool(part >= self.own if self.key.subject is Subject.LINK else part & self.own)


@pytest.mark.parametrize("key", ["lost", "missing"])
def test_a_gpu_that_is_gone_takes_its_own_rows_with_it_and_no_others(key: str) -> None:
    for name in MACHINES:
        before, gone = healthy(name), min(1, parse_machine(name).profile.match.visible - 1)
        node = snapshots(parse_machine(name), (), 0, [0])[0]
        bus, now = node.gpus[gone].bus_id, observe(parse_machine(name), f"gpu{gone}:{key}=yes")
        own = {each for each in before if each[2] == bus or (isinstance(each[2], frozenset) and bus in each[2])}
        assert not [each for each in now if each in own and each[0] == "copy"], name
        # Those after it have other numbers, and an NVLink that led to it is down.
        others = {"index", "cuda_index", "nvlinks"} if key == "missing" else {"cuda_index"}
        for what, kind, part, *rest in set(differences(before, now)) - own:
            is_gone = what == "time" or (kind == "node" and rest[-1] == "pci_devices")
            assert is_gone or (kind == "gpu" and rest[-1] in others), (name, what, kind, part, rest)


@pytest.mark.parametrize(
    ("fault", "unread"),
    [
        ("silent=nvml", {"gpu", "pair", "node.driver"}),
        ("silent=cuda", {"gpu", "pair", "node.gpudirect"}),
        ("silent=sysfs", {"gpu", "nic", "node.machine", "node.gpudirect", "node.switches", "node.nvswitches"}),
        ("driver_missing=yes", {"gpu", "pair", "node.driver", "node.gpudirect"}),
    ],
)
def test_a_source_that_does_not_answer_takes_its_own_facts_away(fault: str, unread: set[str]) -> None:
    """Nothing is measured then; what it says of copies and collectives is that of the healthy machine."""
    for name in MACHINES:
        changed = differences(healthy(name), observe(parse_machine(name), f"node0:{fault}"))
        facts = {f"node.{name[-1]}" if name[1] == "node" else str(name[1]) for name in changed if name[0] == "fact"}
        assert facts <= unread | {"node.failures", "node.pci_devices", "node.rdma_ports", "node.driver_settings"}, name
        assert facts, name
        assert not [each for each in changed if each[0] == "time"], name


@pytest.mark.parametrize("key", KEYS, ids=lambda key: f"{key.subject} {key.key}")
def test_a_fault_stays_on_its_node(key: FaultKey) -> None:
    for name in ("hgx-h100-8*2", "gb200-nvl72", "hgx-a100-4*2"):
        machine = parse_machine(name)
        text = fault_for(key, machine.profile)[0]
        try:
            first, second, *_ = snapshots(machine, [parse_fault(on_second(text))])
        except UsageError:
            continue
        assert first == snapshots(machine, (), 0, [0])[0], name
        assert second != snapshots(machine, (), 0, [1])[0] or key.key in NO_FACT, name


NO_FACT = ("speed", "staged", "corrupts", "mnnvl", "env")


def on_second(text: str) -> str:
    """The same fault on node1."""
    return text.replace("node0:", "node1:") if text.startswith("node0") else f"node1.{text}"


OF_NICS = ("state=down", "rate=50", "width=1", "generation=1", "missing=yes")


@pytest.mark.parametrize("fault", [f"nic0:{each}" for each in OF_NICS])
def test_a_fault_of_a_nic_slows_collectives_of_several_nodes(fault: str) -> None:
    for name in ("hgx-h100-8*2", "hgx-a100-8*4", "hgx-b200-8*2"):
        machine = parse_machine(name)
        slow, usual = dict(times_of(machine, fault)), dict(times_of(machine))
        assert slow["time", ALL_TO_ALL, "alltoall"] > usual["time", ALL_TO_ALL, "alltoall"], name  # type: ignore[operator]
