"""Where machines come from: this host, a simulation, a recording, or a file from another tool."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.errors import SIMULATED_INSTEAD, UsageError, no_gpu
from gpubench.model.facts.environment import LaunchedRank, performance_variables, refuse_several_ranks
from gpubench.model.terms.options import SIMULATE, option
from gpubench.model.terms.units import format_ranges

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
    """Options for the folder to replay a recording from, or to record into."""

    help_group: ClassVar = SIMULATE

    replay: Path | None = option("DIR", "Show the recording that --record wrote to this folder.", read=Path)
    record: Path | None = option("DIR", "Also write all facts and raw samples to this folder.", read=Path)


def check_gpus(asked: Sequence[int], present: Sequence[int], where: str) -> None:
    """Raise UsageError if --gpus names a GPU that is not `present`."""
    missing = next((gpu for gpu in asked if gpu not in present), None)
    if missing is not None:
        raise UsageError(
            f"--gpus {','.join(map(str, asked))}: there is no GPU{missing} on {where}",
            expected=f"GPUs of {where}: {format_ranges(present) or 'none'}",
            next_step="gpubench topo shows the GPUs and their numbers",
        )


def choose_gpus(gpus: Sequence[int], simulation: "Simulation | None" = None) -> "Simulation | None":
    """Hide all GPUs except these from the simulation, or from CUDA in this process and its children.

    They have the numbers of `gpubench topo`. Return the simulation. Raises UsageError if the host does not have them or
    CUDA_VISIBLE_DEVICES hides them, and CouldNotMeasureError if it has no GPU.
    """
    if simulation is not None:
        return simulation.choose_gpus(gpus)
    from gpubench.machine.nvml import read_driver, read_uuids

    uuids, setting = read_uuids(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if not uuids:
        absent = read_driver(os.environ).absent or "the driver finds none on this host"
        raise no_gpu(absent, "--gpus", SIMULATED_INSTEAD)
    entries = [str(gpu) for gpu in range(len(uuids))] if setting is None else setting.replace(" ", "").split(",")
    seen = [
        gpu
        for gpu, uuid in enumerate(uuids)
        if uuid and any(entry == str(gpu) or (entry.startswith("GPU-") and uuid.startswith(entry)) for entry in entries)
    ]
    check_gpus(gpus, seen, "this host" if setting is None else f"this host with CUDA_VISIBLE_DEVICES={setting}")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(uuids[gpu] for gpu in gpus)
    return None


class Simulation(Struct, frozen=True):
    """A simulated machine with its faults.

    - `text` and `broken` are the values of --simulate and --fault.
    - `environment` has the NCCL variables of the job whose effect is modeled, and `ignored` has all others.
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
        """The command-line options that describe the simulation."""
        chosen = "" if self.machine.gpus is None else f" --gpus {','.join(map(str, self.machine.gpus))}"
        return f"--simulate {self.text}" + chosen + "".join(f" --fault {text}" for text in self.broken)

    @property
    def profile(self) -> dict[str, str]:
        return {"name": self.machine.profile.name, "sha256": self.machine.profile.sha256}

    @property
    def note(self) -> str:
        """One line with the NCCL variables that the simulation ignores. Empty if there are none."""
        ignored = " ".join(f"{name}={value}" for name, value in self.ignored.items())
        return f"ignored in simulation: {ignored}" if ignored else ""

    def choose_gpus(self, gpus: Sequence[int]) -> "Simulation":
        """Return the simulation with only these GPUs of each node. Raises UsageError if a node does not have them."""
        renumbering = next((fault for fault in self.faults if fault.index is not None and fault.get("missing")), None)
        if renumbering is not None:
            raise UsageError(
                f"--gpus with --fault {renumbering}", expected="only one of these options, because both remove GPUs"
            )
        check_gpus(gpus, range(self.machine.profile.match.visible), self.text)
        return replace(self, machine=replace(self.machine, gpus=tuple(gpus)))

    def drop_variables(self, command: str) -> "Simulation":
        """Return the simulation without NCCL variables, for a command that ignores them.

        Raises UsageError if a --fault option sets one.
        """
        from gpubench.model.profiles.fault import ENV

        asked = next((text for text in self.broken if f"{ENV}=NCCL_" in text), None)
        if asked is not None:
            raise UsageError(
                f"--fault {asked} with {command}",
                expected="a fault that changes its result",
                reason="NCCL variables change nothing in this simulation, so it would pass as healthy",
                next_step=f"gpubench check --simulate {shlex.quote(self.text)} --fault {shlex.quote(asked)}",
            )
        hardware = tuple(fault for fault in self.faults if not fault.variables)
        return replace(self, faults=hardware, environment={}, ignored={**self.environment, **self.ignored})

    def note_effects(self, measured: str, unused: str = "", by: str = "") -> None:
        """Print a note about faults that do not affect what the command measures.

        With `unused`, only print faults that have no effect because the collective ignores this fault key, such as
        `corrupts`.
        """
        from gpubench.formats.delivery import say

        hardware = [fault for fault in self.faults if not fault.variables]
        idle = [fault for fault in hardware if not fault.changes(measured, unused)]
        if unused:
            idle = [fault for fault in idle if fault.changes(measured)]
        if idle:
            named = f"--fault {', '.join(map(str, idle))} has no effect on {by or measured}"
            say(f"gpubench: note: {named}: gpubench check shows it", to=sys.stderr)


def parse_simulation(
    text: str, faults: Sequence[str], seed: int, environment: Mapping[str, str] = MappingProxyType({})
) -> Simulation:
    """Parse a machine such as `hgx-h100-8*16` and faults such as `node3.gpu5:nvlink=12`. Add the NCCL variables of
    the job.

    Raises UsageError.
    """
    from gpubench.model.profiles.fault import parse_faults
    from gpubench.simulated.machine import parse_machine

    machine = parse_machine(text)
    broken = tuple("".join(each.split()) for each in faults)
    parsed = tuple(fault for each in broken for fault in parse_faults(each, machine.nodes))
    of_nccl = {name: value for name, value in performance_variables(environment).items() if name.startswith("NCCL_")}
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
    """Options for a simulated machine and its faults."""

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
        "Break a part of the simulated machine, e.g. node3.gpu5:nvlink=12. Indices start at 0. Repeatable.",
        completed_as="fault",
        common=True,
    )
    seed: int = option("N", "Random seed for the simulated noise.", default=0, hidden=True)

    def parse(self, command: str) -> Simulation | None:
        """Return the simulated machine, or None without --simulate.

        Raises UsageError for a fault without a machine, or for a fault that affects another `command` only. For
        example, a fault of a leaf switch affects only `scan`.
        """
        faults = self.fault or ()
        if self.simulate is None:
            if faults:
                raise UsageError(
                    f"--fault {faults[0]} without --simulate",
                    expected="--simulate together with --fault, because only a simulated machine can be broken",
                    next_step=f"--simulate hgx-h200-4 --fault {faults[0]}",
                )
            return None
        from gpubench.jobs.metadata import recorded_settings
        from gpubench.model.facts.snapshot import is_amd

        simulation = parse_simulation(self.simulate, faults, self.seed, recorded_settings(os.environ))
        if is_amd(simulation.machine.profile.gpu.name):
            self._refuse_nvidia_only(command)
        if command in ("scan", "kv"):
            simulation = simulation.drop_variables(command)
        known = ("", command, "kv" if command == "check" else "")  # check --kv knows the faults of kv
        unfit = next((fault for fault in simulation.faults if fault.command not in known), None)
        if unfit is not None:
            raise UsageError(
                f"--fault {unfit} has an effect on gpubench {unfit.command} only",
                expected="a fault of facts, copies or collectives",
                next_step=_fitting_command(unfit, simulation),
            )
        return simulation

    def _refuse_nvidia_only(self, command: str) -> None:
        """Raise UsageError for a fault of simulated AMD GPUs, or a command that supports only NVIDIA GPUs."""
        name = f"--simulate {shlex.quote(self.simulate or '')}"
        if self.fault:
            seen, reason = f"--fault {self.fault[0]} with {name}", "the cures of faults are commands for NVIDIA GPUs"
        elif command in _ONLY_NVIDIA:
            seen = f"gpubench {command} {name}".replace("  ", " ")
            reason = "this command uses CUDA and NVML, and gpubench has never run on AMD GPUs"
        else:
            return
        raise UsageError(
            seen,
            expected="a machine with NVIDIA GPUs (topo and the collectives also simulate healthy AMD machines)",
            reason=reason,
            next_step=f"gpubench topo {name}, or gpubench report --help to judge a table of rccl-tests",
        )


def _fitting_command(fault: "Fault", simulation: Simulation) -> str:
    """Return the command that shows a fault."""
    machine, command = simulation.text, fault.command
    if command == "scan" and simulation.machine.nodes < _NODES_TO_SCAN:
        machine = str(replace(simulation.machine, nodes=_NODES_TO_SCAN))
    if fault.get("hang"):
        command += " --hang"
    return f"gpubench {command} --simulate {shlex.quote(machine)} --fault {fault}"


_NODES_TO_SCAN = 4  # Enough for a scan of any single node

_ONLY_NVIDIA = ("", "check", "p2p", "kv", "scan", "watch", "overlap")

SECONDS_TO_READ_A_NODE = 10.0  # Timeout to read a node during a measurement, which continues without the node's facts


class Here(Struct, frozen=True):
    """This machine and this process. `timeout_s` is the timeout for the driver, in seconds."""

    timeout_s: float
    text: str | None = None

    def machines(self) -> "Machines":
        """Read facts from the kernel, NVML and CUDA."""
        from gpubench.machine.probe import probe

        return _this_machine(probe(self.timeout_s, os.environ))

    @contextmanager
    def being_read(self) -> Iterator[Callable[[], "Machines"]]:
        """Start processes that read the kernel, NVML and CUDA. Yield a function that waits for the results and
        returns the machines.
        """
        from gpubench.machine.probe import Probe

        with Probe(os.environ) as probe:
            yield lambda: _this_machine(probe.snapshot(self.timeout_s))


def _this_machine(snapshot: "Snapshot") -> "Machines":
    from gpubench.jobs.machines import Machines
    from gpubench.jobs.metadata import recorded_settings
    from gpubench.machine.process import read_rank_facts

    environment = recorded_settings(os.environ)
    return Machines.of([snapshot], [read_rank_facts(0, 0, 0, environment)], None, environment)


class Simulated(Struct, frozen=True):
    """Machines that are simulated from a profile and faults."""

    simulation: Simulation

    @property
    def text(self) -> str:
        return self.simulation.source

    def machines(self) -> "Machines":
        """Return the simulated machines, with one rank per working GPU."""
        from gpubench.jobs.machines import Machines
        from gpubench.simulated.machine import snapshots

        asked = self.simulation
        nodes = snapshots(asked.machine, asked.faults, asked.seed)
        # Use one rank per working GPU, as collectives do. A node without GPUs gets one rank, whose process has the
        # variables.
        ranks = [place for place in enumerate(nodes) for _ in range(max(1, sum(not gpu.lost for gpu in place[1].gpus)))]
        return Machines.of(nodes, self.processes(ranks), self.text, asked.environment)

    def processes(self, ranks: "Sequence[tuple[int, Snapshot]]") -> "list[RankFacts]":
        """Return the process facts of all ranks, or an empty list if no rank has NCCL variables. `ranks` has the
        node of each rank.
        """
        if not any(fault.variables for fault in self.simulation.faults):
            return []
        from gpubench.simulated.settings import rank_facts, variables_by_node

        variables = variables_by_node(self.simulation.faults)
        return [rank_facts(rank, variables.get(node, {}), own, node) for rank, (node, own) in enumerate(ranks)]


class Replayed(Struct, frozen=True):
    """Machines in a folder that --record wrote. If `host` is set, only this host."""

    directory: Path
    host: str | None = None

    @property
    def text(self) -> str:
        return f"--replay {self.directory}"

    def machines(self) -> "Machines":
        """Read the recorded nodes and processes."""
        from gpubench.jobs.machines import Machines
        from gpubench.machine import recorded

        snapshots, processes = recorded.read_recording(self.directory, self.host)
        return Machines.of(snapshots, processes, self.text)


class FromFile(Struct, frozen=True):
    """One machine, described by a file from another tool."""

    path: Path

    @property
    def text(self) -> str:
        return str(self.path)

    def machines(self) -> "Machines":
        from gpubench.jobs.machines import Machines
        from gpubench.readers.registry import read_file

        return Machines.of([read_file(self.path)], (), self.text)


Source = Here | Simulated | Replayed | FromFile  # `text` has the options that select the source, and is None for Here


def choose_source(
    timeout_s: float, *, simulation: Simulation | None = None, replay: Path | None = None, file: Path | None = None
) -> Source:
    """Return the source that the options select. The default is this machine."""
    if file is not None:
        return FromFile(file)
    if replay is not None:
        return Replayed(replay)
    return Here(timeout_s) if simulation is None else Simulated(simulation)


def note_ignored_variables(source: Source, presenter: "Presenter") -> None:
    """Print a note with the NCCL variables that a simulation ignores."""
    if isinstance(source, Simulated) and source.simulation.note:
        presenter.note(source.simulation.note)


def refuse_under_launcher(command: str, source: Source, launch: LaunchedRank | None) -> None:
    """Raise UsageError if a launcher started several ranks to show a simulated or recorded machine."""
    if source.text is not None:
        refuse_several_ranks(
            launch, f"{command} {source.text.split()[0]}", "one process, because nothing is measured here"
        )


def first_node(simulation: Simulation, machines: "Machines", command: str) -> "Machines":
    """Return the first simulated node, for a command that measures one host.

    Raises UsageError for a fault of another node, and CouldNotMeasureError if the driver does not respond.
    """
    from gpubench.jobs.machines import check_drivers

    elsewhere = next((fault for fault in simulation.faults if fault.node_number > 0 and fault.breaks_hardware), None)
    if elsewhere is not None:
        raise UsageError(
            f"--fault {elsewhere} is on a node that {command} does not measure",
            expected=f"node0, because {command} measures the GPUs of one host",
            next_step=f"gpubench check {simulation.source}",
        )
    check_drivers([machines.nodes[0].snapshot], command, simulation.source)
    return replace(machines, nodes=machines.nodes[:1])


def gathered(
    group: "Group", snapshots: Sequence["Snapshot"], process: "RankFacts", source: Source | None = None
) -> "Machines | None":
    """Gather the machines of a job on its first rank, and return None on the other ranks.

    If `source` is a simulation, use its processes instead of the processes of the ranks. A file has no processes.
    """
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
    """Read the facts of this rank's process."""
    from gpubench.jobs.metadata import recorded_settings
    from gpubench.machine.process import read_rank_facts

    return read_rank_facts(identity.rank, identity.node, identity.local_rank, recorded_settings(os.environ))
