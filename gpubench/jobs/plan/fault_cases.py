"""The faults whose cost is predicted: those asked for, those of a stored check or scan, else three usual ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpubench.errors import GpubenchError, UsageError
from gpubench.jobs.plan.machine import PlannedMachine
from gpubench.measure.plan.curves import CommunicatorRanks
from gpubench.measure.plan.faults import FaultCase
from gpubench.model.profiles.fault import Fault, Subject, parse_fault

if TYPE_CHECKING:
    from gpubench.hardware.simulated.times import CollectiveTimes

ASKED, USUAL = "asked for", "usual"

_SLOW_RAIL = 0.5


@dataclass(slots=True)
class FaultModel:
    """What faults make of a collective: its time on a simulated machine with them over that without."""

    machine: PlannedMachine
    faults: tuple[Fault, ...]
    _times: "dict[CommunicatorRanks, tuple[CollectiveTimes, CollectiveTimes]]" = field(default_factory=dict)
    _known: dict[tuple[str, CommunicatorRanks, int], float] = field(default_factory=dict)

    def factor(self, collective: str, group: CommunicatorRanks, size_bytes: float) -> float:
        """Of a size; never below 1."""
        size = 1 << max(10, round(size_bytes).bit_length() - 1)
        key = (collective, group, size)
        if key not in self._known:
            healthy, faulty = self._both(group)
            local = min(max(1, group.ranks // group.nodes), healthy.gpus)
            slow = max(faulty.seconds(collective, size, row=0, ranks_per_node=local))
            well = max(healthy.seconds(collective, size, row=0, ranks_per_node=local))
            self._known[key] = max(1.0, slow / well)
        return self._known[key]

    def _both(self, group: CommunicatorRanks) -> "tuple[CollectiveTimes, CollectiveTimes]":
        from gpubench.hardware.simulated.machine import SimulatedMachine
        from gpubench.hardware.simulated.times import CollectiveTimes

        if group not in self._times:
            assert self.machine.profile is not None
            machine = SimulatedMachine(self.machine.profile, group.nodes)
            local = max(1, min(group.ranks // group.nodes, machine.profile.match.visible))
            reached = [found for each in self.faults if (found := _within(each, group.nodes, local)) is not None]
            self._times[group] = (CollectiveTimes(machine, noise=0.0), CollectiveTimes(machine, reached, noise=0.0))
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


def fault_cases(
    machine: PlannedMachine, asked: Sequence[str], file: Path | None, notes: list[str], *, with_usual: bool = True
) -> list[FaultCase]:
    """The faults of a plan; `notes` gathers why some cannot be predicted.

    Raises UsageError for a fault that is none, that the machine cannot have, or a file that tells of none.
    """
    if machine.profile is None:
        if asked or file is not None:
            raise UsageError(
                "what a fault costs is modelled from a profile, and none knows this machine",
                expected="--profile NAME",
                next_step="gpubench profiles list",
            )
        return []
    texts = [(text, ASKED) for text in asked]
    if file is not None:
        texts += [(text, file.name) for text in _of_file(file, machine)]
    if not texts and with_usual:
        texts = [(text, USUAL) for text in _usual(machine)]
    cases = []
    for text, source in texts:
        fault = parse_fault(text)
        if fault.command and fault.subject is not Subject.NIC:
            notes.append(f"{text}: what only {fault.command} knows of is not modelled")
            continue
        cases.append(_case(machine, text, _as_rate(fault, machine), source))
    return cases


def _case(machine: PlannedMachine, text: str, fault: Fault, source: str) -> FaultCase:
    from gpubench.hardware.simulated.links import node_links
    from gpubench.hardware.simulated.machine import SimulatedMachine, check_nodes

    assert machine.profile is not None
    simulated = SimulatedMachine(machine.profile, machine.nodes)
    check_nodes(simulated, [fault])
    node_links(machine.profile, [fault])
    model = FaultModel(machine, (fault,))
    try:
        model.factor("allreduce", CommunicatorRanks(machine.gpus_per_node), 2**26)
    except UsageError:
        raise
    except GpubenchError as error:
        raise UsageError(
            f"--fault {text}: {error.seen}", expected="a fault that leaves a way to the other GPUs"
        ) from None
    return FaultCase(
        text=text,
        what=_words(fault, text),
        source=source,
        factor=model.factor,
        how=f"times × what {machine.profile.name} simulated with this fault takes over without",
    )


def _as_rate(fault: Fault, machine: PlannedMachine) -> Fault:
    """A share of a NIC as its rate: the model knows rates."""
    share = fault.get("bandwidth")
    if fault.subject is not Subject.NIC or share is None or machine.profile is None:
        return fault
    index = fault.index or 0
    if index >= len(machine.profile.nic):
        raise UsageError(
            f"--fault {fault}: there is no NIC {index}", expected=f"an index below {len(machine.profile.nic)}"
        )
    rate = machine.profile.nic[index].rate_gbit_s or 0.0
    return parse_fault(f"node{fault.node_number}.nic{index}:rate={rate * float(share):g}")


def _words(fault: Fault, text: str) -> str:
    if fault.get("staged") or fault.get("p2p"):
        return "a pair that goes through host memory"
    if fault.get("nvlink"):
        return f"a GPU with {fault.get('nvlink')} NVLinks"
    if fault.subject is Subject.NIC:
        return "a slow rail"
    return text


def _usual(machine: PlannedMachine) -> Iterator[str]:
    profile = machine.profile
    if profile is None:
        return
    if machine.gpus_per_node > 1:
        yield "link0-1:staged=yes"
    if profile.nvlink is not None and machine.gpus_per_node > 1:
        yield f"gpu0:nvlink={profile.nvlink.links // 2}"
    rates = [each.rate_gbit_s for each in profile.nic if each.rate_gbit_s]
    if machine.nodes > 1 and rates:
        yield f"nic0:rate={rates[0] * _SLOW_RAIL:g}"


def _of_file(path: Path, machine: PlannedMachine) -> list[str]:
    """The faults that a stored check or scan tells of, as --fault writes them."""
    from gpubench.jobs.plan.told_faults import faults_told

    found = faults_told(path)
    if not found:
        raise UsageError(
            f"{path} tells of no fault whose cost can be predicted",
            expected="a check or scan that found staged pairs, missing NVLinks or slow NICs",
            reason=f"{machine.gpu}: all of it was well, or what was wrong is of another kind",
            next_step="leave --faults-from out: usual faults are tried",
        )
    return found
