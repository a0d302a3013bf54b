"""Build simulated machines: nodes that match a profile, with faults, as snapshots of origin `simulated`."""

import re
import uuid
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.model.facts import snapshot
from gpubench.model.facts.health import HIDDEN, decode_health, drop_hidden
from gpubench.model.facts.process import GpuProcess
from gpubench.model.profiles.fault import Fault, Subject
from gpubench.model.profiles.profile import Profile
from gpubench.profiles import find_domain, load, match_whole_machine, profile_names
from gpubench.simulated.node import add_surroundings, apply_surrounding_faults, healthy_node

_LOST = "GPU is lost"
_NO_DRIVER = "NVML does not start (Driver Not Loaded)"
_NO_ANSWER = "no answer (simulated)"
_WITHOUT_NVML = (
    *("index", "bus_id", "name", "uuid", "cuda_index", "multiprocessors", "cuda_features", "pcie", "place"),
)
"""Facts about a GPU that are known without NVML, from sysfs and CUDA."""


def _apply_faults(node: snapshot.Snapshot, faults: Iterable[Fault]) -> snapshot.Snapshot:
    """Apply faults to a healthy node and return it. GPU and NIC indices are those of the healthy node.

    Raise UsageError if a fault does not fit the node.
    """
    faults = tuple(faults)
    pairs = {(pair.source, pair.destination): pair for pair in node.pairs}
    gpus, nics = list(node.gpus), list(node.nics)
    for fault in faults:
        for key, value in fault.settings:
            if fault.subject is Subject.GPU:
                gpu = gpus[_index(fault, fault.index, gpus, "GPU")]
                if len(gpus) == 1 and key in ("p2p", "cuda_peer"):
                    raise wrong_value(fault, "there is no other GPU", "a machine with several GPUs")
                _change_pairs(pairs, gpu, key, value)
                gpus[gpu.index] = _GPU_CHANGES[key](gpu, value, fault) if key in _GPU_CHANGES else gpu
            elif fault.subject is Subject.NIC:
                number = _index(fault, fault.index, nics, "NIC")
                nics[number] = _change_nic(nics[number], key, value, fault)
            elif fault.subject is Subject.LINK:
                _change_link(gpus, pairs, fault, key, value)
    lost = {gpu.device for gpu in gpus if gpu.lost}
    unknown = dict.fromkeys(("cuda", "read", "write", "nvlink", "atomics", "pci"), _LOST)
    missing_nics = {fault.index for fault in faults if fault.subject is Subject.NIC and fault.get("missing")}
    broken = replace(
        node,
        nics=tuple(nic for number, nic in enumerate(nics) if number not in missing_nics),
        pairs=tuple(
            pair
            if lost.isdisjoint(names)
            else snapshot.PairFacts(source=names[0], destination=names[1], pcie_path=pair.pcie_path, unknown=unknown)
            for names, pair in pairs.items()
        ),
    )
    missing_gpus = {fault.index for fault in faults if fault.subject is Subject.GPU and fault.get("missing")}
    broken = _remove_gpus(broken, gpus, missing_gpus)
    for fault in faults:
        if fault.subject is Subject.NODE:
            broken = _change_node(broken, dict(fault.settings))
    return broken


def faults_by_node(faults: Iterable[Fault]) -> dict[int, list[Fault]]:
    """Group faults by node number."""
    found: dict[int, list[Fault]] = {}
    for fault in faults:
        found.setdefault(fault.node_number, []).append(fault)
    return found


def wrong_value(fault: Fault, seen: str, expected: str) -> UsageError:
    """Return the error for a fault value that is impossible on this machine."""
    return UsageError(f"--fault {str(fault)!r}: {seen}", expected=expected)


def not_joined(fault: Fault) -> UsageError:
    """Return the error for a fault of the NVLinks between two GPUs that no NVLink connects directly."""
    return wrong_value(fault, "no NVLink connects the two GPUs directly", "gpuJ:nvlink=N if NVSwitches connect them")


def _index(
    fault: Fault, index: int | None, devices: list[snapshot.GpuFacts] | list[snapshot.NicFacts], part: str
) -> int:
    if index is None or index >= len(devices):
        have = f"{part}s 0 to {len(devices) - 1}" if devices else f"no {part}"
        raise wrong_value(fault, f"there is no {part} {index}", f"the machine has {have}")
    return index


def _change_pairs(
    pairs: dict[tuple[str, str], snapshot.PairFacts], gpu: snapshot.GpuFacts, key: str, value: str
) -> None:
    changes: Mapping[str, Callable[[snapshot.PairFacts], snapshot.PairFacts]] = {
        "p2p": lambda pair: _refused(pair, value),
        "mig": lambda pair: _refused(pair, "NS"),
        "fabric": lambda pair: _refused(pair, "NS"),
        "cuda_peer": lambda pair: replace(pair, cuda=False),
        "nvlink": lambda pair: pair if int(value) else replace(pair, nvlink="NS"),
    }
    for ends, pair in pairs.items():
        if key in changes and gpu.device in ends:
            pairs[ends] = changes[key](pair)


def _refused(pair: snapshot.PairFacts, status: str) -> snapshot.PairFacts:
    return replace(pair, cuda=False, read=status, write=status, nvlink=status, atomics=status, pci=status)


def _change_link(
    gpus: list[snapshot.GpuFacts], pairs: dict[tuple[str, str], snapshot.PairFacts], fault: Fault, key: str, value: str
) -> None:
    ends = [gpus[_index(fault, index, gpus, "GPU")] for index in (fault.index, fault.second)]
    directions = [(ends[0].device, ends[1].device), (ends[1].device, ends[0].device)]
    if key == "p2p":
        pairs |= {names: _refused(pairs[names], value) for names in directions}
    elif key == "nvlink":
        for end, other in (ends, ends[::-1]):
            links = [link for link in end.nvlinks or () if link.peer_bus_id == other.bus_id]
            if not links or links[0].peer is not snapshot.NvlinkPeer.GPU:
                raise not_joined(fault)
            if int(value) > len(links):
                raise wrong_value(fault, f"{len(links)} NVLinks connect the two GPUs", f"0 to {len(links)}")
            gpus[end.index] = replace(end, nvlinks=_deactivated(end.nvlinks or (), links[int(value) :]))
        if not int(value):
            pairs |= {names: replace(pairs[names], nvlink="NS") for names in directions}


def _deactivated(links: tuple[snapshot.NvLink, ...], down: Iterable[snapshot.NvLink]) -> tuple[snapshot.NvLink, ...]:
    numbers = {link.number for link in down}
    return tuple(replace(link, active=False) if link.number in numbers else link for link in links)


def _nvlink(gpu: snapshot.GpuFacts, value: str, fault: Fault) -> snapshot.GpuFacts:
    links = gpu.nvlinks or ()
    if not links:
        raise wrong_value(fault, "the GPU has no NVLinks", "a machine with NVLinks: --simulate hgx-h100-8")
    if int(value) > len(links):
        raise wrong_value(fault, f"the GPU has {len(links)} NVLinks", f"0 to {len(links)}")
    return replace(gpu, nvlinks=_deactivated(links, links[int(value) :]))


def _trained(link: snapshot.PcieLink, key: str, value: str, fault: Fault) -> snapshot.PcieLink:
    most = link.max_width if key == "width" else link.max_generation
    if most is None:
        unknown = f"the profile of this machine does not have the PCIe {key} of the device"
        raise wrong_value(fault, unknown, "a machine whose profile has it: --simulate hgx-h100-8")
    if int(value) > most:
        raise wrong_value(fault, f"its PCIe {key} is at most {most}", f"1 to {most}")
    return replace(link, width=int(value)) if key == "width" else replace(link, generation=int(value))


def _fabric(gpu: snapshot.GpuFacts, fault: Fault) -> snapshot.Fabric:
    if gpu.fabric is None:
        raise wrong_value(fault, "the GPU has no NVLink fabric", "a machine with NVSwitch, Hopper or later")
    return gpu.fabric


def _health(gpu: snapshot.GpuFacts, value: str, fault: Fault) -> snapshot.GpuFacts:
    fabric = _fabric(gpu, fault)
    shift, bits = next(
        (shift, bits) for shift in range(0, 16, 2) for bits in (1, 2) if decode_health(bits << shift)[value]
    )
    mask = (fabric.health_mask or 0) & ~(3 << shift) | bits << shift
    return replace(gpu, fabric=replace(fabric, health_mask=mask))


_GPU_CHANGES: Mapping[str, Callable[[snapshot.GpuFacts, str, Fault], snapshot.GpuFacts]] = {
    "nvlink": _nvlink,
    "width": lambda gpu, value, fault: replace(gpu, pcie=_trained(gpu.pcie, "width", value, fault)),
    "generation": lambda gpu, value, fault: replace(
        gpu, pcie=_trained(gpu.pcie, "generation", value, fault), idle=False, performance_state=0
    ),
    "lost": lambda gpu, _value, _fault: snapshot.GpuFacts(
        index=gpu.index, bus_id=gpu.bus_id, place=gpu.place, lost=_LOST
    ),
    "mig": lambda gpu, _value, _fault: replace(gpu, mig=True),
    "ecc": lambda gpu, _value, _fault: replace(gpu, ecc=False),
    "throttle": lambda gpu, value, _fault: replace(gpu, throttle_reasons=(value,), idle=False),
    "rows": lambda gpu, value, _fault: replace(
        gpu,
        remapped_rows=snapshot.RemappedRows(
            correctable=0, uncorrectable=1, pending=value == "pending", failure=value == "failure"
        ),
    ),
    "fabric": lambda gpu, value, fault: replace(gpu, fabric=replace(_fabric(gpu, fault), state=value, status=None)),
    "health": _health,
    "errors": lambda gpu, value, _fault: replace(gpu, memory_errors=int(value)),
    "temperature": lambda gpu, value, _fault: replace(gpu, temperature_c=int(value), slowdown_margin_c=None),
    "replays": lambda gpu, value, _fault: replace(gpu, pcie_replays=int(value)),
    "busy": lambda gpu, value, _fault: replace(gpu, processes=(GpuProcess(pid=int(value)),), idle=False),
}
"""How each key changes a GPU. A GPU with a lower PCIe generation is busy, because idle GPUs lower their generation
anyway.
"""


def _change_nic(nic: snapshot.NicFacts, key: str, value: str, fault: Fault) -> snapshot.NicFacts:
    if key == "errors" and not nic.rdma:
        raise wrong_value(fault, "this NIC has no RDMA port that counts errors", "an InfiniBand or RoCE NIC")
    if key == "state":
        return replace(nic, state=value)
    if key == "rate":
        return replace(nic, rate_gbit_s=float(value))
    if key in ("width", "generation"):
        return replace(nic, pcie=_trained(nic.pcie, key, value, fault))
    return nic


def _remove_gpus(node: snapshot.Snapshot, gpus: list[snapshot.GpuFacts], missing: set[int | None]) -> snapshot.Snapshot:
    """Remove GPUs and renumber the rest. NVLinks to a removed GPU are down."""
    gone = {gpu.bus_id for gpu in gpus if gpu.index in missing} - {None}

    def cut(link: snapshot.NvLink) -> snapshot.NvLink:
        return replace(link, active=False, peer=None, peer_bus_id=None) if link.peer_bus_id in gone else link

    present = [
        gpu if gpu.nvlinks is None else replace(gpu, nvlinks=tuple(map(cut, gpu.nvlinks)))
        for gpu in gpus
        if gpu.index not in missing
    ]
    numbered = [replace(gpu, index=index) for index, gpu in enumerate(present)]
    usable = [gpu.index for gpu in numbered if not gpu.lost]
    names = {old.device: new.device for old, new in zip(present, numbered, strict=True)}
    return replace(
        node,
        gpus=tuple(
            replace(gpu, cuda_index=usable.index(gpu.index) if gpu.index in usable else None) for gpu in numbered
        ),
        pairs=tuple(
            replace(pair, source=names[pair.source], destination=names[pair.destination])
            for pair in node.pairs
            if pair.source in names and pair.destination in names
        ),
    )


def _change_fabrics(node: snapshot.Snapshot, **changes: Any) -> tuple[snapshot.GpuFacts, ...]:
    """Return the node's GPUs with these fields changed in their NVLink fabric."""
    return tuple(
        gpu if gpu.fabric is None else replace(gpu, fabric=replace(gpu.fabric, **changes)) for gpu in node.gpus
    )


def _change_node(node: snapshot.Snapshot, settings: Mapping[str, str]) -> snapshot.Snapshot:
    driver = node.driver
    node = replace(
        node,
        driver=replace(driver, version=settings.get("driver", driver.version), cuda=settings.get("cuda", driver.cuda)),
    )
    if "peermem" in settings:
        node = replace(node, gpudirect=replace(node.gpudirect, peermem=settings["peermem"] == "yes"))
    if "clique" in settings:
        node = replace(node, gpus=_change_fabrics(node, clique=int(settings["clique"])))
    if "silent" in settings:
        failure = snapshot.ProbeFailure(stage=settings["silent"], error=_NO_ANSWER, timed_out=True)
        node = replace(_SILENCED[settings["silent"]](node), failures=(*node.failures, failure))
    if "driver_missing" in settings:
        bare = _drop_cuda(_drop_nvml(node), _NO_DRIVER)
        gpus = tuple(replace(gpu, uuid=None) for gpu in bare.gpus)
        node = replace(bare, driver=snapshot.DriverFacts(absent=_NO_DRIVER), gpus=gpus, pairs=())
    return node


def _drop_nvml(node: snapshot.Snapshot) -> snapshot.Snapshot:
    """Return the node as if NVML were missing, with facts from sysfs and CUDA only.

    /proc still has the driver's version, but not the CUDA version.
    """
    return replace(
        node,
        driver=replace(node.driver, cuda=None),
        gpus=tuple(snapshot.GpuFacts(**{name: getattr(gpu, name) for name in _WITHOUT_NVML}) for gpu in node.gpus),
        pairs=tuple(
            snapshot.PairFacts(source=pair.source, destination=pair.destination, cuda=pair.cuda) for pair in node.pairs
        ),
    )


def _drop_cuda(node: snapshot.Snapshot, reason: str = _NO_ANSWER) -> snapshot.Snapshot:
    return replace(
        node,
        gpudirect=replace(node.gpudirect, dma_buf=None),
        gpus=tuple(
            replace(
                gpu,
                cuda_index=None,
                multiprocessors=None,
                cuda_features={},
                unknown={**gpu.unknown, "cuda_index": reason},
            )
            for gpu in node.gpus
        ),
        pairs=tuple(replace(pair, cuda=None, unknown={**pair.unknown, "cuda": reason}) for pair in node.pairs),
    )


def _drop_sysfs(node: snapshot.Snapshot) -> snapshot.Snapshot:
    return replace(
        node,
        machine=snapshot.HostFacts(),
        gpudirect=replace(node.gpudirect, peermem=None),
        gpus=tuple(replace(gpu, place=snapshot.PciPlace()) for gpu in node.gpus),
        nics=(),
        switches=(),
        nvswitches=(),
    )


_SILENCED: Mapping[str, Callable[[snapshot.Snapshot], snapshot.Snapshot]] = {
    "nvml": _drop_nvml,
    "cuda": _drop_cuda,
    "sysfs": _drop_sysfs,
}

MOST_NODES = 16384

_MACHINE = re.compile(r"(?P<name>[^*/\s]+)(?:/(?P<gpus>\d{1,6}))?(?:\s*\*\s*(?P<nodes>\d{1,6}))?", re.ASCII)
# An arbitrary constant, so that equal seeds result in equal machines.
_IDENTITIES = uuid.UUID("5b1f3c1e-6d0a-5f6e-9c55-6770752d73b1")
OF_DOMAINS = ("clique", "imex", "mnnvl")  # Keys of faults that need an NVLink domain of several nodes


class SimulatedMachine(Struct, frozen=True):
    """A simulated machine: one or more nodes of the same profile.

    `gpus` has the GPUs of each node that processes see, or None for all.
    """

    profile: Profile
    nodes: int = 1
    gpus: tuple[int, ...] | None = None

    def __str__(self) -> str:
        visible, name = self.profile.match.visible, self.profile.name
        whole = load(name)
        part = f"/{visible}" if visible < whole.match.visible else ""
        if self.profile.domain is not None and self.profile.domain != whole.domain:
            part = f"/{self.profile.domain.nodes * visible}"
        size = 1 if self.profile.domain is None else self.profile.domain.nodes
        if self.nodes % size:
            tray = match_whole_machine([self.profile.gpu.name], visible)
            name, size = name if tray is None else tray.profile.name, 1
        count = self.nodes // size
        return name + part + (f"*{count}" if count > 1 else "")

    @property
    def hidden(self) -> frozenset[int]:
        """The GPUs of each node that processes do not see."""
        every = range(self.profile.match.visible)
        return frozenset(every).difference(every if self.gpus is None else self.gpus)

    @property
    def domain_nodes(self) -> int:
        """The number of nodes per NVLink domain. 1 if NVLinks do not connect nodes."""
        return 1 if self.profile.domain is None else min(self.nodes, self.profile.domain.nodes)


def parse_machine(text: str, option: str = "--simulate") -> SimulatedMachine:
    """Parse `NAME[/GPUS][*NODES]`, such as 'hgx-h200-4', 'hgx-h100-8*16', 'hgx-h100-8/1' or 'gb200-nvl72/64*2'.

    Raise UsageError, which names `option`, if the form, the profile or a number is invalid.
    """
    found = _MACHINE.fullmatch(text.strip())
    if found is None:
        raise UsageError(
            f"{option} {text!r} is not a machine",
            expected="NAME[/GPUS][*NODES], with the name of a profile: hgx-h200-4, 'hgx-h100-8*16', hgx-h100-8/1",
            next_step=f"one of {', '.join(profile_names())}",
        )
    profile, gpus = load(found["name"]), found["gpus"]
    if profile.domain is not None and gpus is not None and int(gpus) > profile.match.visible:
        profile, gpus = _part_of_rack(profile, profile.domain.nodes, int(gpus), f"{option} {text!r}"), None
    nodes = int(found["nodes"] or 1) * (1 if profile.domain is None else profile.domain.nodes)
    # Several trays of a rack form one NVLink domain.
    if nodes > 1 and gpus is None and profile.domain is None:
        profile = find_domain(profile.match.gpus) or profile
    if not 1 <= nodes <= MOST_NODES:
        raise UsageError(f"{option} {text!r} has {nodes} nodes", expected=f"1 to {MOST_NODES}")
    return SimulatedMachine(_part_of_node(profile, gpus, f"{option} {text!r}"), nodes)


def _part_of_rack(rack: Profile, most_nodes: int, gpus: int, text: str) -> Profile:
    nodes, rest = divmod(gpus, rack.match.visible)
    if rest or nodes > most_nodes:
        most = most_nodes * rack.match.visible
        raise UsageError(f"{text} has {gpus} GPUs", expected=f"whole nodes of {rack.match.visible}, {most} at most")
    return rack.resize_domains(nodes)


def _part_of_node(profile: Profile, gpus: str | None, text: str) -> Profile:
    if gpus is None:
        return profile
    most = profile.match.visible
    if not 1 <= int(gpus) <= most:
        raise UsageError(f"{text} has {gpus} GPUs", expected=f"1 to {most}" if most else "no number")
    part = profile.first_gpus(int(gpus))
    return part if part is profile else replace(part, node=replace(part.node, virtual_machine=True))


def check_nodes(machine: SimulatedMachine, faults: Sequence[Fault]) -> None:
    """Raise UsageError if a fault names a node that the machine does not have, or needs NVLinks between nodes."""
    for fault in faults:
        if machine.domain_nodes == 1 and any(fault.get(key) for key in OF_DOMAINS):
            raise wrong_value(fault, f"{machine} has no NVLink domain across nodes", "gb200-nvl72, gb300-nvl72")
        if fault.node_number >= machine.nodes:
            raise wrong_value(
                fault, f"there is no node {fault.node_number}", f"{machine} has nodes 0 to {machine.nodes - 1}"
            )


def merge_domains(
    machine: SimulatedMachine, faults: Sequence[Fault], *, joined: bool = True
) -> tuple[SimulatedMachine, list[Fault]]:
    """Return the machine with each NVLink domain merged into one node, and the faults renumbered.

    Do not merge if a fault breaks a domain, or if `joined` is false.
    """
    size = machine.domain_nodes
    if machine.profile.domain is None:
        return machine, list(faults)
    if not joined or any(fault.get(key) for fault in faults for key in OF_DOMAINS):
        tray = match_whole_machine([machine.profile.gpu.name], machine.profile.match.visible)
        assert tray is not None
        return SimulatedMachine(tray.profile, machine.nodes), list(faults)
    moved = []
    for fault in faults:
        domain, place = divmod(fault.node_number, size)
        step = place * (len(machine.profile.nic) if fault.subject is Subject.NIC else machine.profile.match.visible)
        index = None if fault.index is None else fault.index + step
        second = None if fault.second is None else fault.second + step
        moved.append(replace(fault, node=domain, index=index, second=second))
    return SimulatedMachine(machine.profile.merge_nodes(size), machine.nodes // size), moved


def snapshots(
    machine: SimulatedMachine, faults: Sequence[Fault] = (), seed: int = 0, numbers: Sequence[int] | None = None
) -> list[snapshot.Snapshot]:
    """Return snapshots of the nodes with these numbers, by default of all nodes. Equal parts share one object.

    Raise UsageError if a fault does not fit the machine.
    """
    check_nodes(machine, faults)
    numbers = range(machine.nodes) if numbers is None else numbers
    healthy = healthy_node(machine.profile)
    whole = add_surroundings(healthy)
    broken_nodes = faults_by_node(fault for fault in faults if fault.breaks_hardware)
    found = []
    for number in numbers:
        node_faults = broken_nodes.get(number)
        if node_faults is None:
            found.append(_named(whole, number, seed))
        else:
            broken = _apply_faults(_named(healthy, number, seed), node_faults)
            found.append(apply_surrounding_faults(add_surroundings(broken), node_faults))
    if machine.hidden:
        found = [_hide_gpus(node, machine.hidden) for node in found]
    if machine.domain_nodes == 1:
        return found
    stopped = {fault.node_number for fault in faults if fault.get("imex")}
    return [
        _join_domain(node, _identity(seed, f"domain{number // machine.domain_nodes}"), imex=number not in stopped)
        for number, node in zip(numbers, found, strict=True)
    ]


def hidden_gpus(machine: SimulatedMachine, numbers: Iterable[int]) -> list[Fault]:
    """Return faults that take the hidden GPUs out of the links of the nodes with these numbers."""
    missing = (("missing", "yes"),)
    return [Fault(Subject.GPU, missing, number, index) for number in numbers for index in machine.hidden]


def _hide_gpus(node: snapshot.Snapshot, hidden: Container[int]) -> snapshot.Snapshot:
    """Return the node as processes see it if CUDA_VISIBLE_DEVICES hides these GPUs."""
    marked = [
        replace(gpu, unknown={**gpu.unknown, "cuda_index": HIDDEN}) if gpu.index in hidden else gpu for gpu in node.gpus
    ]
    node = drop_hidden(replace(node, gpus=tuple(marked)), ())
    known = [gpu.index for gpu in node.gpus if gpu.cuda_index is not None]
    return replace(
        node,
        gpus=tuple(replace(gpu, cuda_index=known.index(gpu.index)) if gpu.index in known else gpu for gpu in node.gpus),
    )


def _join_domain(node: snapshot.Snapshot, cluster: str, *, imex: bool) -> snapshot.Snapshot:
    settings = node.driver_settings
    return replace(
        node,
        kernel=replace(node.kernel, imex=True),
        driver_settings=replace(
            settings, services={**settings.services, "nvidia-imex": snapshot.Service(running=imex)}
        ),
        gpus=_change_fabrics(node, cluster_uuid=cluster),
    )


def _named(node: snapshot.Snapshot, number: int, seed: int) -> snapshot.Snapshot:
    host = f"node{number}"
    return replace(
        node,
        host=host,
        machine=replace(node.machine, boot_id=_identity(seed, host)),
        gpus=tuple(replace(gpu, uuid=f"GPU-{_identity(seed, host, gpu.device)}") for gpu in node.gpus),
    )


def _identity(seed: int, *names: str) -> str:
    return str(uuid.uuid5(_IDENTITIES, "/".join((str(seed), *names))))
