"""The options that put a simulated machine in the place of the one at hand."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from gpubench.errors import UsageError
from gpubench.jobs.simulation import Simulation

SIMULATE = Annotated[
    str | None,
    typer.Option(
        "--simulate",
        metavar="NAME[*NODES]",
        help="A machine that does not exist, from its profile: hgx-h200-4, or 'hgx-h100-8*16' for 16 nodes.",
        show_default=False,
    ),
]
FAULT = Annotated[
    list[str] | None,
    typer.Option(
        "--fault",
        metavar="WHERE:KEY=VALUE",
        help="Break the simulated machine, e.g. node3.gpu5:nvlink=12; counted from 0. Repeatable.",
        show_default=False,
    ),
]
SEED = Annotated[int, typer.Option("--seed", metavar="N", help="Of the simulated noise.", show_default=False)]

PARAMETERS: tuple[tuple[str, Any, Any], ...] = (
    ("simulate", SIMULATE, None),
    ("fault", FAULT, None),
    ("seed", SEED, 0),
)
"""Name, declaration and default of each, for a command's signature."""


def parse_simulation(given: Mapping[str, Any]) -> Simulation | None:
    """The simulated machine that was asked for, None where none was.

    Raises:
        UsageError: no such profile or fault, or a fault without a machine.
    """
    faults = given["fault"] or ()
    if given["simulate"] is None:
        if faults:
            raise UsageError(
                f"--fault {faults[0]} without --simulate",
                expected="a simulated machine: what is real is not broken on purpose",
                next_step=f"--simulate hgx-h200-4 --fault {faults[0]}",
            )
        return None
    from gpubench.hardware.simulated.machine import parse_machine
    from gpubench.model.profiles.fault import parse_fault

    machine = parse_machine(given["simulate"])
    return Simulation(given["simulate"], machine, tuple(map(parse_fault, faults)), given["seed"])
