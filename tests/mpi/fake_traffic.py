"""gpubench watch where each rank is a node that trains a model: `mpirun ... python -m tests.mpi.fake_traffic watch`.

GPUBENCH_TEST_TRAFFIC is the simulated machine and its faults.
"""

import os
import time
from typing import Any

from msgspec.structs import replace

from gpubench.__main__ import main
from gpubench.jobs import rank as ranks
from gpubench.jobs import watch  # noqa: F401 - it imports what is replaced
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.profiles.fault import parse_fault
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.verdict import Origin
from gpubench.simulated.machine import parse_machine, snapshots
from gpubench.simulated.traffic import SimulatedTraffic
from tests.fakes.stand_in import stand_in


def install(number: int, machine: str, *faults: str) -> None:
    """Make this rank the node with its number."""
    parsed = parse_machine(machine)
    broken = [parse_fault(each) for each in faults]
    own = replace(snapshots(parsed, broken)[number], host=f"host{number}", origin=Origin.MEASURED)
    identity = ranks.read_identity

    def probe(*_arguments: object) -> Snapshot:
        return own

    def read_identity(group: Any) -> tuple[RankIdentity, list[int]]:
        known, _ = identity(group)
        return replace(known, host=own.host, node=number, local_rank=0), list(range(group.size))

    def reader(*_arguments: object) -> SimulatedTraffic:
        here = [each for each in broken if each.node_number == number]
        return SimulatedTraffic(own, parsed.profile, here, 0, time.monotonic, several=True)

    stand_in("gpubench.machine.probe.probe", probe)
    stand_in("gpubench.jobs.rank.read_identity", read_identity)
    stand_in("gpubench.jobs.watch.reader_here", reader)


if __name__ == "__main__":
    install(int(os.environ["OMPI_COMM_WORLD_RANK"]), *os.environ["GPUBENCH_TEST_TRAFFIC"].split())
    main()
