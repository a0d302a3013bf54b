"""GPUs that are gone although the machine has them."""

from collections.abc import Iterator
from itertools import zip_longest

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.profile import Profile
from gpubench.model.terms.units import counted
from gpubench.model.terms.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """FAIL for a GPU that the driver lost, or does not list although it is on the PCI bus, or that the board misses."""
    for node, profile in zip_longest(facts.nodes, facts.profiles[: len(facts.nodes)]):
        yield from _missing(facts, node, profile)
        for gpu in node.gpus:
            if gpu.lost:
                yield Finding(
                    id="gpu-lost",
                    severity=Verdict.FAIL,
                    subject=facts.subject(node, gpu),
                    seen=gpu.lost,
                    expected="a GPU that answers",
                    cause="it fell off the bus (Xid 79): power, temperature, a PCIe fault, or a failed GPU",
                    next_command="dmesg | grep Xid; a reboot or power cycle brings it back, or it has to be replaced",
                )


def _missing(facts: Facts, node: Topology, profile: Profile | None) -> Iterator[Finding]:
    """GPUs that left no trace on a board whose NVSwitches are all here; in virtual machines a part of it is normal."""
    snapshot = node.snapshot
    count = len(snapshot.gpus) + snapshot.gpus_of_others
    if profile is None or snapshot.machine.virtual_machine is not False or not snapshot.nvswitches:
        return
    if count < profile.match.board:
        yield Finding(
            id="gpu-missing",
            severity=Verdict.FAIL,
            subject=facts.subject(node),
            seen=f"{counted(count, 'GPU')}, the board has {profile.match.board}",
            expected=f"{counted(profile.match.board, 'GPU')}, as profile {profile.name} has it",
            cause="a GPU that does not train its PCIe link any more is not even on the bus; or somebody took it out",
            next_command="lspci -d 10de: | grep -c 3D; a power cycle, then the server's log (ipmitool sel list)",
        )


GPU_PRESENT = Check("gpu_present", "every GPU of the machine answers", find)
