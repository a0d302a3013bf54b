"""Show what machines are: read or take them, gather them from ranks, examine and present them."""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gpubench.formats.delivery import delivering
from gpubench.formats.presentation import Presentation
from gpubench.formats.presenter import Presenter, rank_style, terminal_style
from gpubench.hardware import recorded
from gpubench.hardware.mpi import group as mpi
from gpubench.hardware.node.probe import probe
from gpubench.hardware.process.facts import read_rank_facts
from gpubench.hardware.simulated.machine import snapshots as simulated_nodes
from gpubench.jobs.agreement import agree
from gpubench.jobs.metadata import recorded_settings, stamp
from gpubench.jobs.outputs import check_writable
from gpubench.jobs.rank import own_facts, own_identity
from gpubench.jobs.simulation import Simulation
from gpubench.measure.topo.report import examine
from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.links import leads_to_switches
from gpubench.model.paths.nodes import with_own_names
from gpubench.model.paths.topology import Topology
from gpubench.model.results.report import Metadata
from gpubench.model.terms.origin import Origin
from gpubench.profiles.matching import ProfileMatch, match
from gpubench.readers.machines.registry import read_file

NAME = "topo"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopoPlan:
    """What the user asked for. At most one of `file`, `replay` and `simulation` is given."""

    file: Path | None
    replay: Path | None
    simulation: Simulation | None
    record: Path | None
    strict: bool
    causes: bool
    timeout_s: float
    presentation: Presentation


def run_alone(options: TopoPlan, arguments: Sequence[str]) -> int:
    """Read the machine in front of us, or the one asked for, and show it; the exit code.

    Raises:
        GpubenchError: nothing can be read, or an output cannot be written.
    """
    presenter = Presenter(options.presentation, terminal_style(options.presentation, sys.stdout), progress=False)
    check_writable(options.presentation.outputs, options.record)
    with delivering(presenter):
        snapshots, ranks = _machines(options)
        return _show(options, arguments, snapshots, ranks, presenter)


class TopoJob:
    """One rank's part in showing a cluster: the first rank of every node reads it, the first of all shows them."""

    def __init__(self, group: mpi.MpiGroup, options: TopoPlan, arguments: Sequence[str]) -> None:
        self._group = group
        self._options = options
        self._arguments = arguments
        self.identity, _ = own_identity(group)

    def run(self, channel: str | None) -> int:  # noqa: ARG002 - topo never launches itself
        """Read, gather, show, and return the exit code.

        Raises:
            AgreedError: a rank cannot do its part, and every rank knows it.
        """
        group, options = self._group, self._options
        agree(group, self._prepare)
        snapshots = agree(group, self._own_snapshots, place=str(self.identity))
        collected = group.collect((snapshots, own_facts(self.identity)))
        code = None
        if collected is not None:
            nodes = [snapshot for snapshots, _ in collected for snapshot in snapshots]
            ranks = [facts for _, facts in collected]
            presenter = Presenter(options.presentation, rank_style(options.presentation), progress=False)
            code = _show(options, self._arguments, nodes, ranks, presenter)
        return group.broadcast(code)

    def _prepare(self) -> None:
        if self._group.rank == 0:
            check_writable(self._options.presentation.outputs, self._options.record)

    def _own_snapshots(self) -> list[Snapshot]:
        """What this rank contributes: the first of a node its node; from files and simulations the first of all."""
        options, identity = self._options, self.identity
        if options.file is not None or options.simulation is not None:
            return _machines(options)[0] if identity.rank == 0 else []
        if identity.local_rank != 0:
            return []
        if options.replay is not None:
            return recorded.read_recording(options.replay, identity.host)[0]
        return [probe(options.timeout_s, os.environ)]


def _machines(options: TopoPlan) -> tuple[list[Snapshot], list[RankFacts]]:
    """The machines that the options name, else the one at hand."""
    if options.file is not None:
        return [read_file(options.file)], []
    if options.replay is not None:
        return recorded.read_recording(options.replay)
    if options.simulation is not None:
        simulation = options.simulation
        return simulated_nodes(simulation.machine, simulation.faults, simulation.seed), []
    return [probe(options.timeout_s, os.environ)], [read_rank_facts(0, 0, 0, recorded_settings(os.environ))]


def _show(
    options: TopoPlan,
    arguments: Sequence[str],
    snapshots: Sequence[Snapshot],
    ranks: Sequence[RankFacts],
    presenter: Presenter,
) -> int:
    """Record where asked, then examine and present; the exit code."""
    if options.record is not None:
        recorded.write_recording(options.record, snapshots, ranks)
    nodes = [Topology(snapshot) for snapshot in with_own_names(snapshots)]
    matches = [_match(*_models(node)) for node in nodes]
    profiles = [None if found is None else found.profile for found in matches]
    report = examine(nodes, ranks, profiles, strict=options.strict)
    presenter.begin(_metadata(options, arguments, nodes, matches[0]), ())
    presenter.end(report)
    return options.presentation.exit_code(report.verdict)


@cache
def _match(names: tuple[str, ...], count: int, switched: bool | None) -> ProfileMatch | None:  # noqa: FBT001
    """The profile for such GPUs: of a thousand nodes, most ask the same."""
    return match(names, count, switched=switched)


def _models(node: Topology) -> tuple[tuple[str, ...], int, bool | None]:
    """The names of a node's GPU models, how many GPUs it has, and whether their NVLinks lead to NVSwitches."""
    return tuple(sorted({gpu.name for gpu in node.gpus if gpu.name})), len(node.gpus), leads_to_switches(node.gpus)


def _metadata(
    options: TopoPlan, arguments: Sequence[str], nodes: Sequence[Topology], matched: ProfileMatch | None
) -> Metadata:
    origins = {node.snapshot.origin for node in nodes}
    driver = nodes[0].snapshot.driver
    source = _source(options)
    return Metadata(
        **stamp(arguments),
        subject=NAME,
        origin=origins.pop() if len(origins) == 1 else Origin.RECORDED,
        hosts=[node.snapshot.host for node in nodes],
        libraries={"driver": f"{driver.version} (runs CUDA {driver.cuda})"} if driver.version else {},
        environment=recorded_settings(os.environ) if source is None else {},
        options={"strict": options.strict, "timeout_s": options.timeout_s, "causes": options.causes},
        topology=Counter(node.fingerprint() for node in nodes).most_common(1)[0][0],
        profile=None if matched is None else _described(matched),
        source=source,
    )


def _described(matched: ProfileMatch) -> dict[str, str]:
    part = {"note": f"{matched.gpus} of the {matched.profile.match.board} GPUs of a board"} if matched.is_slice else {}
    return {"name": matched.profile.name, "sha256": matched.profile.sha256, **part}


def _source(options: TopoPlan) -> str | None:
    """Where the machines come from, when not from here."""
    if options.simulation is not None:
        return options.simulation.source
    if options.file is not None:
        return str(options.file)
    return None if options.replay is None else f"--replay {options.replay}"
