"""A simulated machine in the place of the one at hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpubench.errors import UsageError

if TYPE_CHECKING:
    from gpubench.hardware.simulated.machine import SimulatedMachine
    from gpubench.model.profiles.fault import Fault


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated machine and what is broken in it. `text` is as the user wrote it."""

    text: str
    machine: "SimulatedMachine"
    faults: "tuple[Fault, ...]"
    seed: int

    @property
    def source(self) -> str:
        """The options that made it."""
        return f"--simulate {self.text}" + "".join(f" --fault {fault}" for fault in self.faults)

    @property
    def profile(self) -> dict[str, str]:
        """The profile, for the metadata."""
        return {"name": self.machine.profile.name, "sha256": self.machine.profile.sha256}

    def check_effects(self, command: str, measured: str) -> None:
        """Raise UsageError for a fault of which nothing would show in what the command measures."""
        for fault in self.faults:
            if key := fault.unmodelled(measured):
                raise UsageError(
                    f"--fault {fault} with {command}",
                    expected="a fault that changes what it shows",
                    reason=f"what {key} does to {measured} is not modelled; they would pass as healthy",
                    next_step=f"gpubench check {self.source}",
                )


def simulation_of(text: str, faults: Sequence[str], seed: int) -> Simulation:
    """The simulated machine with this text, `hgx-h100-8*16`, and these faults, `node3.gpu5:nvlink=12`.

    Raises UsageError: there is no such profile or fault.
    """
    from gpubench.hardware.simulated.machine import parse_machine
    from gpubench.model.profiles.fault import parse_fault

    return Simulation(text, parse_machine(text), tuple(map(parse_fault, faults)), seed)
