"""Judge copies between GPUs, or transfers between two ends, that another program measured."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import Any, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.jobs.metadata import build_metadata
from gpubench.jobs.plans import ReportPlan
from gpubench.jobs.runner import NullListener, presenting
from gpubench.measure.collective import judged_rows
from gpubench.measure.p2p.request import (
    NVBANDWIDTH,
    Copy,
    CopyMachine,
    HostCopy,
    Method,
    P2pRequest,
    PairCopy,
    wiring_of_process,
)
from gpubench.measure.p2p.run import P2pRun
from gpubench.measure.transfers import TransferMachine, judge_transfers
from gpubench.model.facts.snapshot import GpuFacts, PairFacts, Snapshot
from gpubench.model.facts.traffic import IdleGpu
from gpubench.model.paths.p2p import Cell, Pair, Series
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.profile import Profile
from gpubench.model.results.compare import HOST
from gpubench.model.results.fallback import PATH_UNKNOWN
from gpubench.model.results.report import PAIR_COLUMNS, EvidenceRow, Metadata, PairRow, Report, Row, Table, Verified
from gpubench.model.results.result_file import ResultFile
from gpubench.model.results.topo import TreeRow
from gpubench.model.terms.operation import CopyGpu, Direction, Engine, HostMemory
from gpubench.model.terms.units import BYTES_PER_GB, shorten
from gpubench.model.terms.verdict import Cure, Finding, Origin, Verdict, worst_verdict
from gpubench.ports.group import Listener
from gpubench.profiles import ProfileMatch
from gpubench.readers.results import p2p_bandwidth_latency
from gpubench.simulated.machine import SimulatedMachine, snapshots

T = TypeVar("T")

_NO_FIGURE = "no value of this pair in the file"
_CUDA_SAMPLE = Method(warmup=0, samples=1, repeats=5)  # The sampling of p2pBandwidthLatencyTest


class _ReadRequest(P2pRequest, frozen=True, kw_only=True):
    """A request for the copies that are in a file, including copies between GPUs and host memory."""

    with_host: tuple[HostCopy, ...] = ()

    def host_copies(self, gpus: int) -> Iterator[HostCopy]:
        del gpus
        yield from self.with_host


class _ReadBench(Struct, frozen=True):
    """Returns the recorded time of each copy in a file. It measures nothing."""

    cells: Mapping[str, Cell]

    def enable_peer_access(self) -> dict[Pair, str]:
        """Return no errors, because the program that measured already had peer access."""
        return {}

    def measure(self, copies: Sequence[Copy]) -> Iterator[Cell]:
        return (self.cells.get(str(copy), Cell(error=_NO_FIGURE)) for copy in copies)

    def measure_again(self, copy: Copy, before: Cell) -> Cell:
        del copy
        return before

    def look_while_idle(self) -> tuple[IdleGpu, ...]:
        return ()


class _WithOwnIds(NullListener, Struct, frozen=True):
    listener: Listener[PairRow]
    bus_ids: Mapping[str, str | None]

    def row(self, row: Row) -> None:
        assert isinstance(row, PairRow)
        source, destination = self.bus_ids.get(row.source), self.bus_ids.get(row.destination)
        self.listener.row(replace(row, source_bus_id=source, destination_bus_id=destination))


class ReadCopies(Struct, frozen=True):
    """The copies in a file. `names` has the GPUs that its rows name, in order. CUDA refuses peer access to the pairs in
    `refused`.
    """

    names: tuple[str, ...]
    rows: tuple[PairRow, ...]
    host: str
    refused: frozenset[Pair] = frozenset()
    method: Method = NVBANDWIDTH

    @classmethod
    def of(cls, file: ResultFile) -> "ReadCopies":
        """Return the copies in a file from nvbandwidth, or in a CSV file of gpubench. They must be on one host.

        Raises UsageError for any other copies.
        """
        rows = tuple(row for row in file.pairs if row.bandwidth_gb_s is not None and row.size_bytes)
        hosts = {host for row in rows for host in (row.source_node, row.destination_node)}
        unfit = next((row for row in rows if row.engine not in tuple(Engine) or row.direction is None), None)
        if not rows or unfit is not None or len(hosts) > 1:
            what = "copies between several hosts" if len(hosts) > 1 else "copies without a GPU or without an engine"
            raise UsageError(
                f"{file.name} has {what}",
                expected="matrices of nvbandwidth, or rows of gpubench p2p, of one host",
                reason="osu_bw names only ranks" if unfit is not None else "",
                next_step=f"gpubench compare {file.name} other.txt compares it with another such file",
            )
        ends = {name for row in rows for name in (row.source, row.destination)} - {HOST}
        names = tuple(sorted(ends, key=lambda name: (len(name), name)))
        if file.circumstances.tool != p2p_bandwidth_latency.KIND:
            return cls(names, rows, hosts.pop())
        refused = [(row.source, row.destination) for row in file.pairs if row.peer == "on" and row not in rows]
        pairs = frozenset((names.index(one), names.index(other)) for one, other in refused)
        return cls(names, rows, hosts.pop(), pairs, _CUDA_SAMPLE)

    @property
    def bus_ids(self) -> dict[str, str | None]:
        """The PCI address of each GPU, by name."""
        ids = {row.source: row.source_bus_id for row in self.rows}
        return ids | {row.destination: row.destination_bus_id for row in self.rows}

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """All ordered pairs of GPUs, or no pairs if the file has only host memory. A pair without a value was not
        measured.
        """
        has_pairs = any(HOST not in (row.source, row.destination) for row in self.rows)
        return tuple(permutations(range(len(self.names)), 2)) if has_pairs else ()

    def incomplete(self) -> Iterator[Finding]:
        """Yield a finding for each matrix of copies with host memory in which GPUs are missing."""
        copied: dict[bool, set[str]] = {}
        for row in self.rows:
            if HOST in (row.source, row.destination):
                copied.setdefault(row.source == HOST, set()).add(row.destination if row.source == HOST else row.source)
        for is_to_gpu, names in copied.items():
            absent = [name for name in self.names if name not in names]
            if absent:
                seen = f"copies {'from' if is_to_gpu else 'to'} host memory, for {len(names)} of {len(self.names)}"
                cause = "the text was cut off, or these GPUs did not take part"
                cure = Cure.of("nvbandwidth -t host_to_device_memcpy_ce device_to_host_memcpy_ce")
                yield judged_rows.incomplete(shorten(absent), seen, "copies of every GPU", cause, cure)

    def request(self) -> _ReadRequest:
        between = [row for row in self.rows if HOST not in (row.source, row.destination)]
        with_host = [row for row in self.rows if HOST in (row.source, row.destination)]
        return _ReadRequest(
            pairs=self.pairs,
            series=tuple(dict.fromkeys(map(_series, between))),
            host_bytes=with_host[0].size_bytes if with_host else None,
            pattern_bytes=self.rows[0].size_bytes or 1,
            method=self.method,
            check=False,
            with_host=tuple(self._host_copy(row) for row in with_host),
        )

    def cells(self) -> dict[str, Cell]:
        """Return the time of each copy in seconds, by the name of the copy. A bidirectional copy moves twice the
        bytes.
        """
        place = {name: number for number, name in enumerate(self.names)}
        found = {}
        for row in self.rows:
            size, gb_s = row.size_bytes or 0, row.bandwidth_gb_s or 0.0
            copies = 2 if row.direction == Direction.BOTH else 1
            if HOST in (row.source, row.destination):
                name = str(self._host_copy(row))
            else:
                name = str(PairCopy(_series(row), (place[row.source], place[row.destination])))
            found[name] = Cell(seconds=(copies * size / (gb_s * BYTES_PER_GB),), wrong=_wrong_elements(row))
        return found

    def _host_copy(self, row: PairRow) -> HostCopy:
        to_gpu = row.source == HOST
        memory = HostMemory.parse_note(row.note) or HostMemory.PINNED
        return HostCopy(memory, self.names.index(row.destination if to_gpu else row.source), to_gpu)


def _wrong_elements(row: PairRow) -> int | None:
    """Parse the number of wrong elements from the note of a row. Return None if the data was not verified."""
    if row.verified in (None, Verified.NO):
        return None
    found = re.match(r"([\d,]+) wrong element", row.note or "")
    return int(found[1].replace(",", "")) if found else 0


def _series(row: PairRow) -> Series:
    return Series(
        Engine(row.engine or ""), Direction(row.direction or ""), peer=row.peer != "off", size_bytes=row.size_bytes or 1
    )


def _node(file: ResultFile, copies: ReadCopies, machine: SimulatedMachine | None) -> Topology:
    """Return the machine of the copies. Without a profile, only the names and addresses of its GPUs are known."""
    if machine is not None:
        found = snapshots(machine)[0]
    else:
        models, ids = file.circumstances.gpus, copies.bus_ids
        gpus = tuple(
            GpuFacts(index=number, bus_id=ids.get(name) or f"0000:{number:02x}:00.0", name=model)
            for number, (name, model) in enumerate(zip(copies.names, models, strict=False))
        )
        found = Snapshot(host=copies.host, origin=Origin.RECORDED, source=file.name, gpus=gpus)
    # Drop the peer access of the modeled machine, because it is no evidence about the real machine.
    devices = [gpu.device for gpu in found.gpus]
    refused = [PairFacts(source=devices[one], destination=devices[other], cuda=False) for one, other in copies.refused]
    return Topology(replace(found, host=copies.host, pairs=tuple(refused)))


def judge_copies(
    plan: ReportPlan,
    file: ResultFile,
    copies: ReadCopies,
    machine: SimulatedMachine | None,
    others: Sequence[Finding],
    arguments: Sequence[str],
) -> int:
    """Judge copies, show them and return the exit code. Without a machine, only paths can be judged."""
    node = _node(file, copies, machine)
    gpus = [
        CopyGpu(device=name, index=number, bus_id=gpu.bus_id or "", uuid="", name=gpu.name or "")
        for number, (name, gpu) in enumerate(zip(copies.names, node.gpus, strict=False))
    ]
    matched = None if machine is None else ProfileMatch(machine.profile)
    wiring = wiring_of_process(node, gpus)
    model = CopyMachine(wiring, gpus, (), matched, Origin.RECORDED, unreachable=copies.refused)
    request, ids = copies.request(), copies.bus_ids
    with presenting(plan.presentation) as presenter:
        profile = None if machine is None else machine.profile
        options = _options_of_copies(request, model, ids)
        metadata = _metadata(plan, file, arguments, node.snapshot.host, options, profile)
        presenter.begin(metadata, PAIR_COLUMNS)
        report = P2pRun(request, _ReadBench(copies.cells()), model, _WithOwnIds(presenter, ids)).run()
        sections = {name: section for name, section in report.sections.items() if name != TreeRow.section}
        own = {gpu.bus_id: ids.get(gpu.device) for gpu in gpus}
        report = _with_own_ids(replace(report, sections=sections), own)
        presenter.end((_without_doubts(report) if machine is None else report).add_findings(others))
    return presenter.exit_code


_ADDRESS = re.compile(r"(?P<open> \()?(?P<id>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])(?(open)\))")


def _with_own_ids(value: T, own: Mapping[str, str | None]) -> T:
    """Return a report, or a part of one, with the file's PCI addresses in place of the modeled machine's.

    If the file has no addresses, the text has none either, and commands name a GPU by its index.
    """
    found: Any = value
    if isinstance(value, Table):
        found = Table(value.columns, partial(_with_own_ids, tuple(value.rows()), own))
    elif isinstance(value, Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        ids = {name: own[field] for name, field in fields.items() if name.endswith("bus_id") and field in own}
        found = replace(value, **{name: _with_own_ids(field, own) for name, field in fields.items()} | ids)
    elif isinstance(value, tuple | list):
        found = type(value)(_with_own_ids(item, own) for item in value)
    elif isinstance(value, Mapping):
        found = {key: _with_own_ids(item, own) for key, item in value.items()}
    elif isinstance(value, str) and _ADDRESS.search(value):
        indices = {bus_id: str(index) for index, bus_id in enumerate(own)}

        def rename(address: re.Match[str]) -> str:
            bus_id = own.get(address["id"], address["id"])
            if address["open"]:
                return f" ({bus_id})" if bus_id else ""
            return bus_id or indices[address["id"]]

        found = _ADDRESS.sub(rename, value)
    return cast("T", found)


def _without_doubts(report: Report) -> Report:
    """Return the report on an unknown machine. It is SKIP if neither a speed nor a path is known."""
    findings = tuple(finding for finding in report.findings if finding.id != PATH_UNKNOWN)
    is_direct = any(row.host_staged is False for row in report.rows(EvidenceRow))
    best = Verdict.PASS if is_direct else Verdict.SKIP
    verdict = worst_verdict([best, *(finding.severity for finding in findings)])
    return replace(report, findings=findings, verdict=verdict)


def _metadata(
    plan: ReportPlan,
    file: ResultFile,
    arguments: Sequence[str],
    host: str,
    options: Mapping[str, Any],
    profile: Profile | None = None,
) -> Metadata:
    return build_metadata(
        arguments,
        "p2p",
        origin=Origin.RECORDED,
        hosts=[host],
        libraries=dict(file.circumstances.libraries),
        options={**options, "as": file.kind, "check": False, "strict": plan.strict, "evidence": "kept"},
        profile=None if profile is None else {"name": profile.name, "sha256": profile.sha256},
        source="; ".join((f"{file.name}: {file.kind}", *file.remarks)),
    )


def _options_of_copies(request: P2pRequest, machine: CopyMachine, bus_ids: Mapping[str, str | None]) -> dict[str, Any]:
    names = [machine.label(gpu) for gpu in range(len(machine.gpus))]
    return {
        "pairs": [[names[gpu] for gpu in pair] for pair in request.pairs],
        "sizes": sorted({series.size_bytes for series in request.series}),
        "warmup": request.method.warmup,
        "samples": request.method.samples,
        "repeats": request.method.repeats,
        "sample_seconds": request.method.sample_seconds,
        "gpus": {
            name: f"{bus_ids.get(name) or ''} {gpu.name}".strip() for name, gpu in zip(names, machine.gpus, strict=True)
        },
    }


def judge_transfer_file(
    plan: ReportPlan, file: ResultFile, machine: TransferMachine, others: Sequence[Finding], arguments: Sequence[str]
) -> int:
    """Judge transfers between two ends, show them and return the exit code."""
    rows, report = judge_transfers(list(file.pairs), machine, plan.name)
    metadata = _metadata(plan, file, arguments, "unknown", {"pairs": [], "gpus": {}})
    with presenting(plan.presentation) as presenter:
        presenter.begin(metadata, PAIR_COLUMNS)
        for row in rows:
            presenter.row(row)
        presenter.end(report.add_findings([*others, *judged_rows.left_out_findings(file)]))
    return presenter.exit_code
