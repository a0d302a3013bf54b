"""The faults whose cost is predicted: those asked for, those of a stored check or scan, else three usual ones."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from gpubench.errors import UsageError
from gpubench.jobs.plan.fault_model import FaultModel, as_rates, check_reachable, fault_has, not_modelled
from gpubench.jobs.plan.machine import PlannedMachine
from gpubench.measure.plan.faults import FaultCase
from gpubench.model.profiles.fault import Fault, Subject, parse_fault

ASKED, USUAL = "asked for", "usual"

_SLOW_RAIL = 0.5


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
        _check_subject(machine, fault)
        if why := not_modelled(fault, machine):
            if source == ASKED:
                raise UsageError(
                    f"--fault {text} with plan",
                    expected="a fault that changes the time of a collective",
                    reason=f"{why}; the step would pass as healthy",
                    next_step="--fault link0-1:staged=yes, gpu0:nvlink=9 or nic0:bandwidth=0.5",
                )
            notes.append(f"{text}: {why}")
            continue
        cases.append(_case(machine, text, fault, source))
    return cases


def _check_subject(machine: PlannedMachine, fault: Fault) -> None:
    """Raise UsageError for a node, GPU or NIC that the machine does not have."""
    from gpubench.hardware.simulated.links import node_links
    from gpubench.hardware.simulated.machine import SimulatedMachine, check_nodes

    assert machine.profile is not None
    check_nodes(SimulatedMachine(machine.profile, machine.nodes), [fault])
    node_links(machine.profile, [fault])


def _case(machine: PlannedMachine, text: str, fault: Fault, source: str) -> FaultCase:
    assert machine.profile is not None
    model = FaultModel(machine, as_rates(fault, machine.profile))
    check_reachable(model, text)
    return FaultCase(
        text=text,
        what=_words(fault),
        source=source,
        seconds=model.seconds,
        how=f"times × what {machine.profile.name} simulated with this fault takes over without",
    )


def _words(fault: Fault) -> str:
    from gpubench.hardware.simulated.links import STAGING

    whose = "a pair" if fault.subject is Subject.LINK else "a GPU"
    if fault_has(fault, STAGING):
        return f"{whose} that goes through host memory"
    if links := fault.get("nvlink"):
        return f"{whose} with {links} NVLinks"
    if fault.subject is Subject.NIC:
        return "a node without a rail" if fault_has(fault, ("missing", "state")) else "a slow rail"
    if speed := fault.get("speed"):
        return f"{whose} at {float(speed):.0%} of its links' speed"
    return f"{whose} with a slower PCIe link"


def _usual(machine: PlannedMachine) -> Iterator[str]:
    profile = machine.profile
    if profile is None:
        return
    if machine.gpus_per_node > 1:
        yield "link0-1:staged=yes"
    if profile.nvlink is not None and machine.gpus_per_node > 1:
        yield f"gpu0:nvlink={profile.nvlink.links // 2}"
    rails = [number for number, each in enumerate(profile.nic) if each.rate_gbit_s]
    if machine.nodes > 1 and rails:
        yield f"nic{rails[0]}:bandwidth={_SLOW_RAIL:g}"


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
