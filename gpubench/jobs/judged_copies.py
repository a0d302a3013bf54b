"""Copies that another program timed, nvbandwidth's, judged as `gpubench p2p` judges its own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpubench.errors import UsageError
from gpubench.formats.presentation import Presentation
from gpubench.hardware.simulated.machine import SimulatedMachine, snapshots
from gpubench.jobs.listeners import NullListener
from gpubench.jobs.metadata import metadata_of
from gpubench.jobs.outputs import presenting
from gpubench.measure.p2p.machine import CopyMachine, wiring_of_process
from gpubench.measure.p2p.request import NVBANDWIDTH, Bench, Copy, HostCopy, P2pRequest, PairCopy
from gpubench.measure.p2p.run import P2pRun
from gpubench.model.facts.idle_gpu import IdleGpu
from gpubench.model.paths.p2p import Cell, Pair, Series
from gpubench.model.paths.topology import Topology
from gpubench.model.results.curves import HOST
from gpubench.model.results.report import PAIR_COLUMNS, Metadata, PairRow, Row
from gpubench.model.results.result_file import ResultFile
from gpubench.model.results.topo.rows import TREE_SECTION
from gpubench.model.terms.copies import CopyGpu, Direction, Engine, HostMemory
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.units import BYTES_PER_GB
from gpubench.ports.listener import Listener
from gpubench.profiles.matching import ProfileMatch

_NO_FIGURE = "no figure of this pair in the file"


@dataclass(frozen=True, kw_only=True)
class _ReadRequest(P2pRequest):
    """A request for what a file has: of host memory the copies that it names."""

    with_host: tuple[HostCopy, ...] = ()

    def host_copies(self, gpus: int) -> Iterator[HostCopy]:
        """Those of the file."""
        del gpus
        yield from self.with_host


@dataclass(frozen=True)
class _ReadBench(Bench):
    """Hands over what a file has of each copy; nothing is measured, and nothing again."""

    cells: Mapping[str, Cell]

    def enable_peer_access(self) -> dict[Pair, str]:
        """Whoever measured had it."""
        return {}

    def measure(self, copies: Sequence[Copy]) -> Iterator[Cell]:
        """The cells in the order of the copies."""
        return (self.cells.get(str(copy), Cell(error=_NO_FIGURE)) for copy in copies)

    def measure_again(self, copy: Copy, before: Cell) -> Cell:
        """The same."""
        del copy
        return before

    def look_while_idle(self) -> tuple[IdleGpu, ...]:
        """Nobody looked."""
        return ()


@dataclass(frozen=True)
class _WithOwnIds(NullListener):
    """Hands rows on with the bus ids of the file, in the place of those of the machine that they are judged by."""

    listener: Listener[PairRow]
    bus_ids: Mapping[str, str | None]

    def row(self, row: Row) -> None:
        """A row."""
        assert isinstance(row, PairRow)
        source, destination = self.bus_ids.get(row.source), self.bus_ids.get(row.destination)
        self.listener.row(replace(row, source_bus_id=source, destination_bus_id=destination))


@dataclass(frozen=True, slots=True)
class ReadCopies:
    """The copies of a file by GPU: their names in its rows, in order, and of each row its series, or its host copy."""

    names: tuple[str, ...]
    rows: tuple[PairRow, ...]
    host: str

    @classmethod
    def of(cls, file: ResultFile) -> "ReadCopies":
        """Those of nvbandwidth, or of gpubench's CSV, on one host; UsageError for others, which name no GPU."""
        rows = tuple(row for row in file.pairs if row.bandwidth_gb_s is not None and row.size_bytes)
        hosts = {host for row in rows for host in (row.source_node, row.destination_node)}
        unfit = next((row for row in rows if row.engine not in tuple(Engine) or row.direction is None), None)
        if not rows or unfit is not None or len(hosts) > 1:
            what = "copies between several hosts" if len(hosts) > 1 else "copies that name no GPU, or no engine"
            raise UsageError(
                f"{file.name} has {what}",
                expected="matrices of nvbandwidth, or rows of gpubench p2p, of one host",
                reason="osu_bw names ranks alone" if unfit is not None else "",
                next_step=f"gpubench compare {file.name} other.txt holds it against another such file",
            )
        ends = {name for row in rows for name in (row.source, row.destination)} - {HOST}
        return cls(tuple(sorted(ends, key=lambda name: (len(name), name))), rows, hosts.pop())

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Ordered pairs of GPUs that any matrix has."""
        place = {name: number for number, name in enumerate(self.names)}
        return tuple(
            sorted(
                {(place[r.source], place[r.destination]) for r in self.rows if HOST not in (r.source, r.destination)}
            )
        )

    def request(self) -> _ReadRequest:
        """What the file has, as a request."""
        between = [row for row in self.rows if HOST not in (row.source, row.destination)]
        with_host = [row for row in self.rows if HOST in (row.source, row.destination)]
        return _ReadRequest(
            pairs=self.pairs,
            series=tuple(dict.fromkeys(map(_series, between))),
            host_bytes=with_host[0].size_bytes if with_host else None,
            pattern_bytes=self.rows[0].size_bytes or 1,
            method=NVBANDWIDTH,
            check=False,
            with_host=tuple(self._host_copy(row) for row in with_host),
        )

    def cells(self) -> dict[str, Cell]:
        """The figures by the name of each copy: seconds of one, of both directions those that both take."""
        place = {name: number for number, name in enumerate(self.names)}
        found = {}
        for row in self.rows:
            size, gb_s = row.size_bytes or 0, row.bandwidth_gb_s or 0.0
            copies = 2 if row.direction == Direction.BOTH else 1
            if HOST in (row.source, row.destination):
                name = str(self._host_copy(row))
            else:
                name = str(PairCopy(_series(row), (place[row.source], place[row.destination])))
            found[name] = Cell(seconds=(copies * size / (gb_s * BYTES_PER_GB),))
        return found

    def _host_copy(self, row: PairRow) -> HostCopy:
        to_gpu = row.source == HOST
        memory = HostMemory.of_note(row.note) or HostMemory.PINNED
        return HostCopy(memory, self.names.index(row.destination if to_gpu else row.source), to_gpu)


def _series(row: PairRow) -> Series:
    return Series(
        Engine(row.engine or ""), Direction(row.direction or ""), peer=row.peer != "off", size_bytes=row.size_bytes or 1
    )


def run(
    shown: Presentation,
    file: ResultFile,
    copies: ReadCopies,
    machine: SimulatedMachine,
    arguments: Sequence[str],
    *,
    strict: bool,
) -> int:
    """Show the copies of a file, judged by a healthy machine of the kind; the exit code."""
    # What a model says of peer access is no evidence of the machine that the file is of.
    node = Topology(replace(snapshots(machine)[0], host=copies.host, pairs=()))
    gpus = [
        CopyGpu(device=name, index=number, bus_id=gpu.bus_id or "", uuid="", name=gpu.name or "")
        for number, (name, gpu) in enumerate(zip(copies.names, node.gpus, strict=False))
    ]
    matched = ProfileMatch(machine.profile)
    model = CopyMachine(wiring_of_process(node, gpus), gpus, (), matched, Origin.RECORDED)
    ids = {row.source: row.source_bus_id for row in copies.rows} | {
        row.destination: row.destination_bus_id for row in copies.rows
    }
    request = copies.request()
    with presenting(shown) as presenter:
        presenter.begin(_metadata(file, request, model, ids, arguments, strict=strict), PAIR_COLUMNS)
        report = P2pRun(request, _ReadBench(copies.cells()), model, _WithOwnIds(presenter, ids)).run()
        sections = {name: section for name, section in report.sections.items() if name != TREE_SECTION}
        presenter.end(replace(report, sections=sections))
    return presenter.exit_code


def _metadata(
    file: ResultFile,
    request: P2pRequest,
    machine: CopyMachine,
    bus_ids: Mapping[str, str | None],
    arguments: Sequence[str],
    *,
    strict: bool,
) -> Metadata:
    names = [machine.label(gpu) for gpu in range(len(machine.gpus))]
    profile = None if machine.matched is None else machine.matched.profile
    return metadata_of(
        arguments,
        "p2p",
        origin=Origin.RECORDED,
        hosts=[machine.host(0)],
        libraries=dict(file.circumstances.libraries),
        options={
            "pairs": [[names[gpu] for gpu in pair] for pair in request.pairs],
            "sizes": sorted({each.size_bytes for each in request.series}),
            "warmup": request.method.warmup,
            "samples": request.method.samples,
            "repeats": request.method.repeats,
            "sample_seconds": request.method.sample_seconds,
            "as": file.kind,
            "check": False,
            "strict": strict,
            "evidence": "kept",
            "gpus": {
                name: f"{bus_ids.get(name) or ''} {machine.gpus[number].name}".strip()
                for number, name in enumerate(names)
            },
        },
        profile=None if profile is None else {"name": profile.name, "sha256": profile.sha256},
        source="; ".join((f"{file.name}: {file.kind}", *file.remarks)),
    )
