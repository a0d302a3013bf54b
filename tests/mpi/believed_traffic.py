"""Ranks that believe they are nodes of their own, whose GPUs train a model: `watch` sees simulated traffic, all else is
real."""

import time
from dataclasses import replace
from typing import Any

from gpubench.jobs import rank as ranks
from gpubench.jobs import watch
from gpubench.machine import probe as probing
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.profiles.fault import parse_fault
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.verdict import Origin
from gpubench.simulated.links import SimulatedTraffic
from gpubench.simulated.machine import parse_machine, snapshots
from tests.mpi.on_import import put_everywhere


def install(number: int, machine: str, *faults: str) -> None:
    """Have the rank with that number be the node with that number."""
    parsed = parse_machine(machine)
    broken = [parse_fault(each) for each in faults]
    own = replace(snapshots(parsed, broken)[number], host=f"host{number}", origin=Origin.MEASURED)
    identity = ranks.own_identity

    def probe(*_arguments: object) -> Snapshot:
        return own

    def own_identity(group: Any) -> tuple[RankIdentity, list[int]]:
        known, _ = identity(group)
        return replace(known, host=own.host, node=number, local_rank=0), list(range(group.size))

    def reader(*_arguments: object) -> SimulatedTraffic:
        here = [each for each in broken if each.node_number == number]
        return SimulatedTraffic(own, parsed.profile, here, 0, time.monotonic, several=True)

    put_everywhere(probing, "probe", probe)
    put_everywhere(ranks, "own_identity", own_identity)
    put_everywhere(watch, "reader_here", reader)
