"""Machines that are not there: nodes of a profile's kind, with faults, as snapshots.

Everything here is a model and no measurement, and says so: the origin of every snapshot is `simulated`, its source the
profile. `simulated.times` has the times.
"""

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpubench.errors import UsageError
from gpubench.hardware.simulated.faults import apply_faults, wrong_value
from gpubench.hardware.simulated.node import healthy_node
from gpubench.hardware.simulated.surroundings import with_faults_around, with_surroundings
from gpubench.model.facts.driver_settings import Service
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.profiles.fault import Fault, Subject
from gpubench.model.profiles.profile import Profile
from gpubench.profiles.files import load, names
from gpubench.profiles.matching import domain_of, match

MOST_NODES = 16384

_MACHINE = re.compile(r"(?P<name>[^*/\s]+)(?:/(?P<gpus>\d{1,6}))?(?:\s*\*\s*(?P<nodes>\d{1,6}))?", re.ASCII)
_IDENTITIES = uuid.UUID("5b1f3c1e-6d0a-5f6e-9c55-6770752d73b1")
"""Namespace of the UUIDs of simulated GPUs: made up once, so that equal seeds give equal machines."""


_OF_DOMAINS = ("clique", "imex", "mnnvl")
"""Keys of faults that a node without an NVLink domain of several nodes cannot have."""


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """So many nodes of one kind."""

    profile: Profile
    nodes: int = 1

    def __str__(self) -> str:
        visible, name = self.profile.match.visible, self.profile.name
        part = f"/{visible}" if visible < load(name).match.visible else ""
        size = 1 if self.profile.domain is None else self.profile.domain.nodes
        if self.nodes % size:
            tray = match([self.profile.gpu.name], visible)
            name, size = name if tray is None else tray.profile.name, 1
        count = self.nodes // size
        return name + part + (f"*{count}" if count > 1 else "")

    @property
    def domain_nodes(self) -> int:
        """Nodes of an NVLink domain; 1 where NVLinks lead to no other node."""
        return 1 if self.profile.domain is None else min(self.nodes, self.profile.domain.nodes)


def parse_machine(text: str, option: str = "--simulate") -> SimulatedMachine:
    """A machine as `NAME[/GPUS][*NODES]`: 'hgx-h200-4', 'hgx-h100-8*16'; 'hgx-h100-8/1' shows one of its eight GPUs.

    `option` is the one that names it, for errors.

    Raises UsageError for another form, an unknown profile, or a number of GPUs or nodes that is none.
    """
    found = _MACHINE.fullmatch(text.strip())
    if found is None:
        raise UsageError(
            f"{option} {text!r} is no machine",
            expected="NAME[/GPUS][*NODES], with the name of a profile: hgx-h200-4, 'hgx-h100-8*16', hgx-h100-8/1",
            next_step=f"one of {', '.join(names())}",
        )
    profile = load(found["name"])
    nodes = int(found["nodes"] or 1) * (1 if profile.domain is None else profile.domain.nodes)
    # Several trays of a rack are joined by its NVLinks.
    rack = domain_of(profile.match.gpus) if nodes > 1 and found["gpus"] is None else None
    profile = rack or profile
    if not 1 <= nodes <= MOST_NODES:
        raise UsageError(f"{option} {text!r} has {nodes} nodes", expected=f"1 to {MOST_NODES}")
    return SimulatedMachine(_shown(profile, found["gpus"], f"{option} {text!r}"), nodes)


def _shown(profile: Profile, gpus: str | None, text: str) -> Profile:
    """The part of a board that a virtual machine shows; all of it without a number."""
    if gpus is None:
        return profile
    most = profile.match.visible
    if not 1 <= int(gpus) <= most:
        raise UsageError(f"{text} has {gpus} GPUs", expected=f"1 to {most}" if most else "no number")
    part = profile.part(int(gpus))
    return part if part is profile else replace(part, node=replace(part.node, virtual_machine=True))


def check_nodes(machine: SimulatedMachine, faults: Sequence[Fault]) -> None:
    """Raise UsageError where a fault is on a node that the machine does not have."""
    for fault in faults:
        if machine.domain_nodes == 1 and any(fault.get(key) for key in _OF_DOMAINS):
            raise wrong_value(fault, f"{machine} has no NVLink domain of several nodes", "gb200-nvl72, gb300-nvl72")
        if fault.node_number >= machine.nodes:
            raise wrong_value(
                fault, f"there is no node {fault.node_number}", f"{machine} has nodes 0 to {machine.nodes - 1}"
            )


def by_domains(machine: SimulatedMachine, faults: Sequence[Fault]) -> tuple[SimulatedMachine, list[Fault]]:
    """The machine with each NVLink domain as one node of all its GPUs and NICs, and the faults on these.

    A node that takes no part in its domain leaves NCCL the NICs for all of them: then every node is one of its own.
    """
    size = machine.domain_nodes
    if machine.profile.domain is None:
        return machine, list(faults)
    if any(fault.get(key) for fault in faults for key in _OF_DOMAINS):
        tray = match([machine.profile.gpu.name], machine.profile.match.visible)
        assert tray is not None
        return SimulatedMachine(tray.profile, machine.nodes), list(faults)
    moved = []
    for fault in faults:
        domain, place = divmod(fault.node_number, size)
        step = place * (len(machine.profile.nic) if fault.subject is Subject.NIC else machine.profile.match.visible)
        index = None if fault.index is None else fault.index + step
        second = None if fault.second is None else fault.second + step
        moved.append(replace(fault, node=domain, index=index, second=second))
    return SimulatedMachine(machine.profile.domain_as_node(size), machine.nodes // size), moved


def snapshots(machine: SimulatedMachine, faults: Sequence[Fault] = (), seed: int = 0) -> list[Snapshot]:
    """The machine's nodes in order, node0 on; all that is alike in healthy nodes is one object.

    Raises UsageError for a fault on something that the machine does not have.
    """
    check_nodes(machine, faults)
    healthy = healthy_node(machine.profile)
    whole = with_surroundings(healthy)
    broken = {
        number: with_faults_around(
            with_surroundings(apply_faults(_named(healthy, number, seed), _on(faults, number))), _on(faults, number)
        )
        for number in {fault.node_number for fault in faults}
    }
    found = [broken.get(number) or _named(whole, number, seed) for number in range(machine.nodes)]
    if machine.domain_nodes == 1:
        return found
    stopped = {fault.node_number for fault in faults if fault.get("imex")}
    return [
        _in_domain(node, _identity(seed, f"domain{number // machine.domain_nodes}"), imex=number not in stopped)
        for number, node in enumerate(found)
    ]


def _in_domain(node: Snapshot, cluster: str, *, imex: bool) -> Snapshot:
    """The node with its GPUs in the cluster of its domain, in the clique that they have, and the service IMEX."""
    settings = node.driver_settings
    return replace(
        node,
        kernel=replace(node.kernel, imex=True),
        driver_settings=replace(settings, services={**settings.services, "nvidia-imex": Service(running=imex)}),
        gpus=tuple(
            gpu if gpu.fabric is None else replace(gpu, fabric=replace(gpu.fabric, cluster_uuid=cluster))
            for gpu in node.gpus
        ),
    )


def _on(faults: Sequence[Fault], number: int) -> list[Fault]:
    return [each for each in faults if each.node_number == number]


def _named(node: Snapshot, number: int, seed: int) -> Snapshot:
    """A copy of the node with a host name, a boot id and UUIDs of its own."""
    host = f"node{number}"
    return replace(
        node,
        host=host,
        machine=replace(node.machine, boot_id=_identity(seed, host)),
        gpus=tuple(replace(gpu, uuid=f"GPU-{_identity(seed, host, gpu.device)}") for gpu in node.gpus),
    )


def _identity(seed: int, *names: str) -> str:
    return str(uuid.uuid5(_IDENTITIES, "/".join((str(seed), *names))))
