"""Sources of machines: this host, simulated machines, recordings, and files of other tools."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from gpubench.errors import UsageError
from gpubench.jobs.options import SIMULATE, option
from gpubench.model.facts.environment import LaunchedBy, bearing_on_performance
from gpubench.records import dataclass

if TYPE_CHECKING:
    from gpubench.formats.presenter import Presenter
    from gpubench.jobs.machines import Machines
    from gpubench.model.facts.process import RankFacts
    from gpubench.model.facts.snapshot import Snapshot
    from gpubench.model.profiles.fault import Fault
    from gpubench.model.terms.ranks import RankIdentity
    from gpubench.ports.group import Group
    from gpubench.simulated.machine import SimulatedMachine


@dataclass(frozen=True, slots=True)
class Recording:
    """The folder to show instead of a machine, and the one to write to."""

    help_group: ClassVar = SIMULATE

    replay: Path | None = option("DIR", "Show what --record wrote to this folder.", read=Path)
    record: Path | None = option("DIR", "Also write all facts and raw samples to this folder.", read=Path)


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated machine and what is broken in it. `text` and `broken` are as the user wrote them.

    `environment` are the NCCL variables of the whole job with a known effect, and `ignored` the others.
    """

    text: str
    machine: "SimulatedMachine"
    broken: tuple[str, ...]
    faults: "tuple[Fault, ...]"
    seed: int
    environment: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The options that made it."""
        return f"--simulate {self.text}" + "".join(f" --fault {text}" for text in self.broken)

    @property
    def profile(self) -> dict[str, str]:
        """The profile, for the metadata."""
        return {"name": self.machine.profile.name, "sha256": self.machine.profile.sha256}

    @property
    def note(self) -> str:
        """The variables that the simulation ignores, in one line; empty without any."""
        ignored = " ".join(f"{name}={value}" for name, value in self.ignored.items())
        return f"ignored in simulation: {ignored}" if ignored else ""

    def without_variables(self) -> "Simulation":
        """The same for a command that models none of NCCL's variables. Raises UsageError for those of a fault."""
        from gpubench.model.profiles.fault import ENV

        asked = next((text for text in self.broken if f"{ENV}=NCCL_" in text), None)
        if asked is not None:
            raise UsageError(
                f"--fault {asked} with scan",
                expected="a fault that changes what it shows",
                reason="what NCCL's variables do to a scan is not modelled; it would pass as healthy",
                next_step=f"gpubench check --simulate {shlex.quote(self.text)} --fault {shlex.quote(asked)}",
            )
        hardware = tuple(each for each in self.faults if not each.variables)
        return replace(self, faults=hardware, environment={}, ignored={**self.environment, **self.ignored})

    def note_effects(self, measured: str, unused: str = "", by: str = "") -> None:
        """Name the faults that change nothing of what a command measures, on stderr.

        With a key that is `unused` by a collective, those that it alone makes change something.
        """
        from gpubench.formats.delivery import say

        hardware = [fault for fault in self.faults if not fault.variables]
        idle = [fault for fault in hardware if not fault.changes(measured, unused)]
        if unused:
            idle = [fault for fault in idle if fault.changes(measured)]
        if idle:
            named = f"--fault {', '.join(map(str, idle))} has no effect on {by or measured}"
            say(f"gpubench: note: {named}: gpubench check shows it", to=sys.stderr)


def simulation_of(
    text: str, faults: Sequence[str], seed: int, environment: Mapping[str, str] = MappingProxyType({})
) -> Simulation:
    """The simulated machine `hgx-h100-8*16` with faults `node3.gpu5:nvlink=12` and the job's NCCL variables.

    Raises UsageError.
    """
    from gpubench.model.profiles.fault import parse_faults
    from gpubench.simulated.machine import parse_machine

    machine = parse_machine(text)
    broken = tuple("".join(each.split()) for each in faults)
    parsed = tuple(fault for each in broken for fault in parse_faults(each, machine.nodes))
    of_nccl = {name: value for name, value in bearing_on_performance(environment).items() if name.startswith("NCCL_")}
    known = dict[str, str]()
    if of_nccl or any(fault.variables for fault in parsed):
        from gpubench.simulated.settings import check_variables, job_variables, known_effects

        check_variables(machine.profile, parsed, machine.nodes)
        known = known_effects(machine.profile, of_nccl, machine.nodes)
        parsed = (*job_variables(known, machine.nodes), *parsed)
    ignored = {name: value for name, value in of_nccl.items() if name not in known}
    return Simulation(text, machine, broken, parsed, seed, known, ignored)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """A simulated machine, and its faults."""

    help_group: ClassVar = SIMULATE

    simulate: str | None = option(
        "MACHINE",
        "Simulate a machine: a profile (hgx-h200-4), 16 nodes of it ('hgx-h100-8*16'), or one of its GPUs "
        "(hgx-h100-8/1). See gpubench profiles list.",
        completed_as="simulate",
        common=True,
    )
    fault: list[str] | None = option(
        "WHERE:KEY=VALUE",
        "Break a part of the simulated machine, counted from 0: node3.gpu5:nvlink=12. --help-all lists the keys. "
        "Repeatable.",
        completed_as="fault",
        common=True,
    )
    seed: int = option("N", "Random seed for the simulated noise.", default=0, show_default=False)

    def parse(self, command: str) -> Simulation | None:
        """The simulated machine, None without --simulate. Raises UsageError for a fault without a machine.

        Some faults mean something for one `command` alone, as those of leaves and rounds for scan.
        """
        faults = self.fault or ()
        if self.simulate is None:
            if faults:
                raise UsageError(
                    f"--fault {faults[0]} without --simulate",
                    expected="--simulate with --fault: only a simulated machine can be broken",
                    next_step=f"--simulate hgx-h200-4 --fault {faults[0]}",
                )
            return None
        from gpubench.jobs.metadata import recorded_settings

        simulation = simulation_of(self.simulate, faults, self.seed, recorded_settings(os.environ))
        if command == "scan":
            simulation = simulation.without_variables()
        unfit = next((each for each in simulation.faults if each.command not in ("", command)), None)
        if unfit is not None:
            raise UsageError(
                f"--fault {unfit} has an effect on gpubench {unfit.command} only",
                expected="a fault of facts, copies or collectives",
                next_step=f"gpubench {unfit.command} --simulate {shlex.quote(self.simulate)} --fault {unfit}",
            )
        return simulation


SECONDS_TO_READ_A_NODE = 10.0  # Of a node that is read beside a measurement, which goes on without its facts


@dataclass(frozen=True, slots=True)
class Here:
    """The machine at hand and this process; `timeout_s` is how long its driver may take to answer."""

    timeout_s: float
    text: str | None = None

    def machines(self) -> "Machines":
        """Read by the kernel, NVML and CUDA."""
        from gpubench.machine.probe import probe

        return _of_this_process(probe(self.timeout_s, os.environ))

    @contextmanager
    def being_read(self) -> Iterator[Callable[[], "Machines"]]:
        """Have kernel, NVML and CUDA asked in processes of their own; what is yielded waits `timeout_s` for them."""
        from gpubench.machine.probe import Probe

        with Probe(os.environ) as probe:
            yield lambda: _of_this_process(probe.snapshot(self.timeout_s))


def _of_this_process(snapshot: "Snapshot") -> "Machines":
    from gpubench.jobs.machines import Machines
    from gpubench.jobs.metadata import recorded_settings
    from gpubench.machine.process import read_rank_facts

    environment = recorded_settings(os.environ)
    return Machines.of([snapshot], [read_rank_facts(0, 0, 0, environment)], None, environment)


@dataclass(frozen=True, slots=True)
class Simulated:
    """Machines made from a profile, with faults."""

    simulation: Simulation

    @property
    def text(self) -> str:
        """--simulate with its faults."""
        return self.simulation.source

    def machines(self) -> "Machines":
        """Made by the seed."""
        from gpubench.jobs.machines import Machines
        from gpubench.simulated.machine import snapshots

        asked = self.simulation
        nodes = snapshots(asked.machine, asked.faults, asked.seed)
        # One rank for each GPU that answers, as a collective has; a node without any still has its variables.
        ranks = [place for place in enumerate(nodes) for _ in range(max(1, sum(not gpu.lost for gpu in place[1].gpus)))]
        return Machines.of(nodes, self.processes(ranks), self.text, asked.environment)

    def processes(self, ranks: "Sequence[tuple[int, Snapshot]]") -> "list[RankFacts]":
        """The process of every rank, by number and facts of its node, if any rank has NCCL variables."""
        if not any(fault.variables for fault in self.simulation.faults):
            return []
        from gpubench.simulated.settings import rank_facts, variables_by_node

        variables = variables_by_node(self.simulation.faults)
        return [rank_facts(rank, variables.get(node, {}), own, node) for rank, (node, own) in enumerate(ranks)]


@dataclass(frozen=True, slots=True)
class Replayed:
    """Machines that `--record` wrote to a folder; of one host, where that is named."""

    directory: Path
    host: str | None = None

    @property
    def text(self) -> str:
        """--replay with its folder."""
        return f"--replay {self.directory}"

    def machines(self) -> "Machines":
        """Nodes and processes as they were."""
        from gpubench.jobs.machines import Machines
        from gpubench.machine import recorded

        snapshots, processes = recorded.read_recording(self.directory, self.host)
        return Machines.of(snapshots, processes, self.text)


@dataclass(frozen=True, slots=True)
class FromFile:
    """One machine that a file of another tool describes."""

    path: Path

    @property
    def text(self) -> str:
        """The path."""
        return str(self.path)

    def machines(self) -> "Machines":
        """As far as the file says."""
        from gpubench.jobs.machines import Machines
        from gpubench.readers.registry import read_file

        return Machines.of([read_file(self.path)], (), self.text)


Source = Here | Simulated | Replayed | FromFile  # Its `text` are the options that named it, None for here


def source_of(
    timeout_s: float, *, simulation: Simulation | None = None, replay: Path | None = None, file: Path | None = None
) -> Source:
    """The source that options name, at most one of these; else the machine at hand."""
    if file is not None:
        return FromFile(file)
    if replay is not None:
        return Replayed(replay)
    return Here(timeout_s) if simulation is None else Simulated(simulation)


def say_what_is_ignored(source: Source, presenter: "Presenter") -> None:
    """Name the NCCL variables that a simulation ignores."""
    if isinstance(source, Simulated) and source.simulation.note:
        presenter.note(source.simulation.note)


def refuse_under_launcher(command: str, source: Source, launch: LaunchedBy | None) -> None:
    """Raise UsageError where several ranks are to show a machine that is not theirs."""
    if source.text is not None and launch is not None and launch.size > 1:
        raise UsageError(
            f"{command} {source.text.split()[0]} under {launch.launcher}",
            expected="one process: nothing is measured here",
            next_step=launch.without_it,
        )


def gathered(
    group: "Group", snapshots: Sequence["Snapshot"], process: "RankFacts", source: Source | None = None
) -> "Machines | None":
    """The machines of a job on its first rank, None on others; with `source` no rank's own facts count."""
    from gpubench.jobs.machines import Machines

    collected = group.collect((snapshots, process))
    if collected is None:
        return None
    text = None if source is None else source.text
    from gpubench.jobs.metadata import recorded_settings

    environment = recorded_settings(os.environ) if text is None else None
    nodes = [each for own, _ in collected for each in own]
    processes = [] if isinstance(source, FromFile) else [facts for _, facts in collected]
    if isinstance(source, Simulated):
        processes = list(source.machines().processes)
    return Machines.of(nodes, processes, text, environment)


def own_process(identity: "RankIdentity") -> "RankFacts":
    """The facts of this rank's process."""
    from gpubench.jobs.metadata import recorded_settings
    from gpubench.machine.process import read_rank_facts

    return read_rank_facts(identity.rank, identity.node, identity.local_rank, recorded_settings(os.environ))
