"""gpubench check where each host is a node of a simulated machine: `mpirun ... python -m tests.mpi.fake_nodes
check`.

GPUBENCH_TEST_NODES is the simulated machine with its faults. GPUBENCH_TEST_HOSTS are the hosts that are its nodes. On
GPUBENCH_TEST_SLOW_HOST memory copies take four times as long (`none`: on no host).

Ranks, hosts and their communication are real. Facts, and the copies of `gpubench p2p`, are simulated. The facts of
processes are empty, because this machine has no RDMA library.
"""

import os
import socket
from collections.abc import Sequence

from msgspec.structs import replace

from gpubench.__main__ import main
from gpubench.jobs import check
from gpubench.machine.children import module_command
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.profiles.fault import parse_fault
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.verdict import Origin
from gpubench.simulated.machine import parse_machine, snapshots
from tests.fakes.stand_in import stand_in

SMALL_SIZES = (2**10, 2**16)
"""CPUs reduce them, so they are smaller than those of GPUs"""


def install(machine: str, *faults: str, hosts: Sequence[str]) -> None:
    """Make this host the node with its number."""
    number = hosts.index(socket.gethostname())
    own = [fault.partition(".")[2] for fault in faults if fault.startswith(f"node{number}.")]
    nodes = snapshots(parse_machine(f"{machine}*{len(hosts)}"), [parse_fault(fault) for fault in faults])

    def probe(*_arguments: object) -> Snapshot:
        return replace(nodes[number], host=socket.gethostname(), origin=Origin.MEASURED)

    def own_facts(identity: RankIdentity) -> RankFacts:
        own = {name: getattr(identity, name) for name in ("rank", "host", "node", "local_rank", "pid")}
        return RankFacts(**own, shm_device=1)

    def command(module: str, *arguments: str) -> list[str]:
        given = [part for fault in own for part in ("--fault", fault)]
        return module_command(module, *arguments, "--simulate", machine, *given)

    stand_in("gpubench.machine.probe.probe", probe)
    stand_in("gpubench.jobs.sources.own_process", own_facts)
    stand_in("gpubench.jobs.check.GPU_SIZES", SMALL_SIZES)
    vars(check).update(module_command=command)


def slow_down(host: str) -> None:
    """Make memory copies on this host take four times as long as on other hosts.

    All hosts share the memory of this machine, so real times have no meaning.
    """
    seconds = 0.04 if socket.gethostname() == host else 0.01

    def copies(_size_bytes: int, samples: int) -> list[float]:
        return [seconds] * samples

    stand_in("gpubench.backends.timing.copy_seconds", copies)


if __name__ == "__main__":
    if os.environ["GPUBENCH_TEST_NODES"]:
        install(*os.environ["GPUBENCH_TEST_NODES"].split(), hosts=os.environ["GPUBENCH_TEST_HOSTS"].split(","))
    slow_down(os.environ["GPUBENCH_TEST_SLOW_HOST"])
    main()
