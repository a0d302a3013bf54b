"""What a fault makes of a collective: its time on a simulated machine with it over that without."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gpubench.errors import GpubenchError, UsageError
from gpubench.jobs.plan.machine import PlannedMachine
from gpubench.measure.plan.curves import CommunicatorRanks
from gpubench.model.facts.snapshot import NicKind
from gpubench.model.profiles.fault import COLLECTIVES, Fault, Subject, parse_fault

if TYPE_CHECKING:
    from gpubench.hardware.simulated.times import CollectiveTimes
    from gpubench.model.profiles.profile import Profile

_FAR_MORE = 2.0
_GONE = ("missing", "lost")
_SLOT = ("width", "generation")
_OF_PORT = ("state", "rate", "missing", *_SLOT)
"""What NCCL knows of a NIC, and takes fewer channels over it for."""

_BITS_PER_BYTE = 8


@dataclass(slots=True)
class FaultModel:
    """What faults make of a collective: its time on a simulated machine with them over that without."""

    machine: PlannedMachine
    faults: tuple[Fault, ...]
    _times: "dict[CommunicatorRanks, tuple[CollectiveTimes, CollectiveTimes]]" = field(default_factory=dict)
    _known: dict[tuple[str, CommunicatorRanks, int], tuple[float, float]] = field(default_factory=dict)

    def seconds(self, collective: str, group: CommunicatorRanks, size_bytes: float, own: float) -> float:
        """What a collective takes with the faults that takes `own` seconds without.

        Where that is far more than on the healthy machine something slows it already: then what the simulated machine
        takes with the faults, if that is more; two faults of one path do not multiply.
        """
        size = 1 << max(10, round(size_bytes).bit_length() - 1)
        key = (collective, group, size)
        if key not in self._known:
            healthy, faulty = self._both(group)
            local = min(max(1, group.ranks // group.nodes), healthy.gpus)
            slow = max(faulty.seconds(collective, size, row=0, ranks_per_node=local))
            well = max(healthy.seconds(collective, size, row=0, ranks_per_node=local))
            self._known[key] = (well, max(well, slow))
        well, slow = self._known[key]
        larger = max(1.0, size_bytes / size)
        if group.sharing > 1 or own <= _FAR_MORE * well * larger:
            return own * slow / well
        return max(own, slow * larger)

    def _both(self, group: CommunicatorRanks) -> "tuple[CollectiveTimes, CollectiveTimes]":
        from gpubench.hardware.simulated.machine import SimulatedMachine
        from gpubench.hardware.simulated.times import CollectiveTimes

        if group not in self._times:
            assert self.machine.profile is not None
            machine = SimulatedMachine(self.machine.profile, group.nodes)
            local = max(1, min(group.ranks // group.nodes, machine.profile.match.visible))
            reached = [found for each in self.faults if (found := _within(each, group.nodes, local)) is not None]
            self._times[group] = (
                CollectiveTimes(machine, noise=0.0, whole_nodes=True),
                CollectiveTimes(machine, reached, noise=0.0, whole_nodes=True),
            )
        return self._times[group]


def _within(fault: Fault, nodes: int, gpus: int) -> Fault | None:
    """The fault in that one of many alike groups which it is in, counted from its first node and GPU; None: in none.

    A step is as slow as its slowest group, so a fault of the fourth node slows what runs within nodes too. A pair of
    GPUs that no group has in common is taken for one that it has: the worst that it can be.
    """
    node = None if fault.node is None else fault.node % nodes
    if fault.index is None or fault.subject not in (Subject.GPU, Subject.LINK):
        return replace(fault, node=node)
    first = fault.index % gpus
    if fault.second is None:
        return replace(fault, node=node, index=first)
    if gpus == 1:
        return None
    second = fault.second % gpus
    return replace(fault, node=node, index=first, second=(first + 1) % gpus if first == second else second)


def not_modelled(fault: Fault, machine: PlannedMachine) -> str:
    """Why nothing follows from a fault for the times of collectives, though on a machine something may; else empty."""
    assert machine.profile is not None
    if fault.command and fault.subject is not Subject.NIC:
        return f"only {fault.command} knows of it"
    if key := fault.unmodelled(COLLECTIVES):
        return f"what {key} does to {COLLECTIVES} is not modelled"
    keys = ", ".join(key for key, _ in fault.settings)
    if fault.subject is Subject.NIC and fault.get("bandwidth") and fault_has(fault, _OF_PORT):
        return f"what {keys} of one NIC do together is not modelled"
    if machine.nodes > 1 and fault.subject is Subject.GPU and machine.profile.nvlink and fault_has(fault, _SLOT):
        return f"what {keys} of a GPU does to its traffic between nodes is not modelled"
    if not _changes_links(fault, machine.profile):
        return f"no time of a collective follows from {keys}"
    return ""


def fault_has(fault: Fault, keys: Sequence[str]) -> bool:
    """True where it sets one of these."""
    return any(fault.get(key) for key in keys)


def _changes_links(fault: Fault, profile: "Profile") -> bool:
    from gpubench.hardware.simulated.links import node_links

    return node_links(profile, as_rates(fault, profile)) != node_links(profile, ())


def check_reachable(model: FaultModel, text: str) -> None:
    """Raise UsageError for a fault that the machine cannot have, or that leaves GPUs which no other one reaches."""
    machine = model.machine
    if any(each.subject is Subject.GPU and fault_has(each, _GONE) for each in model.faults):
        raise UsageError(
            f"--fault {text}: the job has no such GPU then",
            expected="a fault that all GPUs of the job outlive",
            next_step=f"--gpus {machine.gpus - 1}" if machine.gpus > 2 else "another fault",
        )
    groups = [CommunicatorRanks(machine.gpus_per_node)] if machine.gpus_per_node > 1 else []
    groups += [CommunicatorRanks(machine.gpus, machine.nodes)] if machine.nodes > 1 else []
    try:
        for each in groups:
            model.seconds("allreduce", each, 2**26, 0.0)
    except UsageError:
        raise
    except GpubenchError as error:
        raise UsageError(
            f"--fault {text}: {error.seen}", expected="a fault that leaves a way to the other GPUs"
        ) from None


def as_rates(fault: Fault, profile: "Profile") -> tuple[Fault, ...]:
    """A share of a NIC that nothing tells of as rates, which the model knows: those of the NICs beside it on the node.

    NCCL gives every channel the same share of the bytes, and so a rail of which it does not know that it is slow
    makes all others wait.
    """
    from gpubench.hardware.simulated.links import nic_gb_s

    share = fault.get("bandwidth")
    if fault.subject is not Subject.NIC or share is None:
        return (fault,)
    index = fault.index or 0
    if index >= len(profile.nic):
        raise UsageError(f"--fault {fault}: there is no NIC {index}", expected=f"an index below {len(profile.nic)}")
    gb_s = nic_gb_s(profile.nic[index], ())
    if gb_s is None:
        raise UsageError(
            f"--fault {fault}: {profile.name} does not know the rate of NIC {index}",
            expected="a rate of its own",
            next_step=f"nic{index}:rate=200",
        )
    slowed = gb_s * _BITS_PER_BYTE * float(share)
    is_ethernet = profile.nic[index].kind is NicKind.ETHERNET
    return tuple(
        parse_fault(f"node{fault.node_number}.nic{number}:rate={min(slowed, each.rate_gbit_s):g}")
        for number, each in enumerate(profile.nic)
        if each.rate_gbit_s is not None and (each.kind is NicKind.ETHERNET) == is_ethernet
    )
