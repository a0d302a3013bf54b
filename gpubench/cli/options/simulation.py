"""The options that put a simulated machine in the place of the one at hand."""

import shlex
from dataclasses import dataclass
from typing import ClassVar

from gpubench.cli.plain_values import SIMULATE
from gpubench.cli.signature import completed, option
from gpubench.errors import UsageError
from gpubench.jobs.simulation import Simulation, simulation_of

_LOOKS_AT = {
    "scan": "scan looks at rounds, leaves and what NICs deliver between nodes",
    "watch": "watch looks at the traffic of jobs",
}


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """A simulated machine, and what is broken in it."""

    help_group: ClassVar = SIMULATE

    simulate: str | None = option(
        "NAME[/GPUS][*NODES]",
        "A machine that does not exist, from its profile: hgx-h200-4; 'hgx-h100-8*16' for 16 nodes, hgx-h100-8/1 for "
        "one GPU of its board.",
        autocompletion=completed("simulate"),
    )
    fault: list[str] | None = option(
        "WHERE:KEY=VALUE", "Break the simulated machine, e.g. node3.gpu5:nvlink=12; counted from 0. Repeatable."
    )
    seed: int = option("N", "Of the simulated noise.", default=0, show_default=False)

    def parse(self, *, command: str = "") -> Simulation | None:
        """The simulated machine, None where none was asked for; UsageError for a fault without a machine.

        Some faults mean something for one `command` alone, as those of leaves and rounds for scan.
        """
        faults = self.fault or ()
        if self.simulate is None:
            if faults:
                raise UsageError(
                    f"--fault {faults[0]} without --simulate",
                    expected="a simulated machine: what is real is not broken on purpose",
                    next_step=f"--simulate hgx-h200-4 --fault {faults[0]}",
                )
            return None
        simulation = simulation_of(self.simulate, faults, self.seed)
        unfit = next((each for each in simulation.faults if each.command not in ("", command)), None)
        if unfit is not None:
            raise UsageError(
                f"--fault {unfit}: only {_LOOKS_AT[unfit.command]}",
                expected="a fault that shows in facts, copies or collectives",
                next_step=f"gpubench {unfit.command} --simulate {shlex.quote(self.simulate)} --fault {unfit}",
            )
        return simulation
