"""Measure transfers of GPU memory between two processes, and judge the path and the bandwidth of every pair."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median, quantiles
from typing import Any

import msgspec
from msgspec import field
from msgspec.structs import replace

from gpubench.conditions.checks import copy_findings, fact_findings, transfer_findings
from gpubench.conditions.folding import fold
from gpubench.errors import CouldNotMeasureError
from gpubench.measure.p2p.request import CopyMachine
from gpubench.measure.p2p.rows import pair_row
from gpubench.measure.path_outcome import report_on
from gpubench.measure.paths import Meter
from gpubench.model.paths import p2p
from gpubench.model.paths.topology import round_gb_s
from gpubench.model.paths.transport import Evidence, PathEvidence, State, Transport, TransportKind
from gpubench.model.paths.ucx import Allocation, ProtocolRange, Transfer, UcxRoute
from gpubench.model.profiles.copies import CopyJudge
from gpubench.model.results.fallback import End, Explanation, KnownPath, fallback_rows, make_findings
from gpubench.model.results.kv import KvRow
from gpubench.model.results.report import PairRow, Report, Verified
from gpubench.model.terms.operation import CopyGpu, Direction, Engine, TransferBackend
from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.ranks import DevicePlace
from gpubench.model.terms.units import (
    BYTES_PER_GB,
    MICROSECONDS_PER_SECOND,
    format_bandwidth,
    format_size,
    group_by,
    percent,
    plural,
    shorten,
)
from gpubench.model.terms.verdict import WRONG_DATA, Cure, Finding, Origin, Verdict, worst_verdict
from gpubench.ports.backend import Region
from gpubench.ports.copies import Copies, CopyStream
from gpubench.ports.group import Listener
from gpubench.ports.transfers import Moved, OpenTransfers, ProcessEnd, TransferCase, Transfers

SECTIONS = (KvRow.section, "scaling", "evidence", "fallback", "causes", "findings")
HOST = "host"
FILE, VERSION = "kv.jsonl", 1  # Of recordings
SMALLEST_BLOCK = 1024  # Smaller blocks than in any KV cache are not measured
SLOW_SHARE, FAILED_SHARE = 0.75, 0.5
"""Shares of the bandwidth of a plain copy to warn and fail below.

One transfer of 256 MiB by UCX 1.22 reached 0.99 of it on two H200s. The speed of NIXL is not judged: the same two GPUs
reached 0.58 to 0.62 with NIXL 1.5.1 and its own progress thread, and 0.85 to 0.93 in another measurement.
"""

_COPY_BYTES, _COPY_REPEATS, _COPY_SAMPLES = 256 * 2**20, 8, 3
_LEAST_FOR_P99 = 20
_WHY_NO_SPEED = "speed not judged: both processes use one GPU"
_NIXL_VARIES = "speed not judged: NIXL's progress thread competes with the program that waits for the transfer"
_NO_NETWORK = "no network connects the two processes (--isolate net gives each a namespace without one)"


class KvRequest(Struct, frozen=True):
    """The transfers to measure. `pairs` are unordered pairs of GPU positions: equal positions are one GPU."""

    backend: str
    pairs: tuple[p2p.Pair, ...]
    allocations: tuple[Allocation, ...]
    sizes: tuple[int, ...]
    blocks: tuple[int, ...]
    to_host: bool = True

    def cases(self) -> Iterator[TransferCase]:
        """Yield the cases of one ordered pair, the largest transfer first, since it shows the path soonest."""
        for size_bytes in sorted(self.sizes, reverse=True):
            for blocks in self.blocks:
                if blocks == 1 or size_bytes // blocks >= SMALLEST_BLOCK:
                    for direction in (Direction.WRITE, Direction.READ):
                        yield TransferCase(direction, size_bytes, blocks)
        if self.to_host:
            yield TransferCase(Direction.WRITE, max(self.sizes), to_host=True)

    @property
    def steps(self) -> int:
        """The number of rows."""
        ordered = sum(1 if one == other else 2 for one, other in self.pairs)
        return ordered * len(self.allocations) * len(list(self.cases()))


class RecordedKv(Struct, frozen=True, kw_only=True):
    """The first line of a recording. Each later line is a `Measured`."""

    schema_version: int
    origin: Origin
    request: KvRequest
    gpus: tuple[CopyGpu, ...]
    libraries: Mapping[str, str] = field(default_factory=dict)


class Measured(Struct, frozen=True):
    """Everything that was measured from one GPU to another, with one kind of memory."""

    pair: p2p.Pair
    allocation: Allocation
    ends: tuple[ProcessEnd, ...] = ()
    expected_gb_s: float | None = None
    cases: tuple[Moved, ...] = ()
    error: str = ""

    @property
    def completed(self) -> list[Moved]:
        """The transfers between the two GPUs that succeeded."""
        return [moved for moved in self.cases if moved.seconds and not moved.case.to_host]

    @property
    def largest(self) -> list[Moved]:
        """The largest transfers between the two GPUs that succeeded, with the fewest blocks: a write and a read."""
        sizes = [(moved.case.size_bytes, -moved.case.blocks) for moved in self.completed]
        return [moved for moved, size in zip(self.completed, sizes, strict=True) if size == max(sizes)]

    @property
    def failure(self) -> str:
        """Why the processes failed. Empty if all transfers succeeded."""
        return self.error or next((moved.error for moved in self.cases if moved.error), "")

    @property
    def is_exportable(self) -> bool | None:
        """Whether CUDA IPC can export the memory of both processes. None if unknown."""
        values = [end.exportable for end in self.ends]
        return None if None in values or not values else all(values)

    @property
    def share_pid_namespace(self) -> bool | None:
        values = {end.pid_namespace for end in self.ends}
        return None if None in values or not values else len(values) == 1


def copy_gb_s(copies: Copies, pair: p2p.Pair) -> float:
    """Return the bandwidth of a copy by copy engine between two GPUs in GB/s, with peer access if that is possible."""
    if copies.can_reach(*pair):
        copies.enable(*pair)
    begin, end = (Region(copies.allocate(gpu, _COPY_BYTES), 0) for gpu in pair)
    stream = CopyStream(pair[0], Engine.CE, begin, end, _COPY_BYTES)
    copies.seconds([stream], 1)
    samples = [copies.seconds([stream], _COPY_REPEATS) / _COPY_REPEATS for _ in range(_COPY_SAMPLES)]
    return _COPY_BYTES / median(samples) / BYTES_PER_GB


class KvRun(msgspec.Struct, kw_only=True):
    """Measures all transfers and reports on them. `copies_gb_s` has the bandwidth of plain copies between two GPUs."""

    machine: CopyMachine
    request: KvRequest
    copies_gb_s: Mapping[p2p.Pair, float] = {}
    transfers: Transfers | None = None
    meter: Meter | None = None
    rows: list[KvRow] = []

    def run(self, listener: Listener[KvRow], write: Callable[[Measured], object]) -> Report:
        """Measure all pairs with all kinds of memory. A pair that fails does not stop the others.

        `write` records what was measured from one GPU to another.
        """
        measured: list[Measured] = []
        for pair in self.request.pairs:
            for allocation in self.request.allocations:
                for found in self._measure(pair, allocation, listener):
                    measured.append(found)
                    write(found)
        return self._report(measured)

    def replay(self, measured: Sequence[Measured], listener: Listener[KvRow]) -> Report:
        """Report on recorded transfers again."""
        for one in measured:
            for moved in one.cases:
                self._deliver(self._row(one, moved), listener)
        return self._report(measured)

    def _deliver(self, row: KvRow, listener: Listener[KvRow]) -> None:
        self.rows.append(row)
        listener.row(row)

    def _measure(self, pair: p2p.Pair, allocation: Allocation, listener: Listener[KvRow]) -> Iterator[Measured]:
        ways = [pair] if pair[0] == pair[1] else [pair, (pair[1], pair[0])]
        assert self.transfers is not None
        failure = ""
        try:
            with self.transfers.open(pair, allocation) as opened:
                while ways and not failure:  # After a failure, the processes are in an unknown state
                    way = ways.pop(0)
                    found = Measured(way, allocation, opened.ends, self.copies_gb_s.get(way))
                    found = self._measure_way(found, opened, listener, backwards=way != pair)
                    failure = found.failure
                    yield found
        except CouldNotMeasureError as error:
            failure = str(error)
        yield from (Measured(way, allocation, error=failure) for way in ways)

    def _measure_way(
        self, found: Measured, opened: OpenTransfers, listener: Listener[KvRow], *, backwards: bool
    ) -> Measured:
        for case in self.request.cases():
            names = f"{self._names(found.pair)} {found.allocation} {format_size(case.size_bytes)}"
            listener.progress(len(self.rows), self.request.steps, names)
            moved = self._move(found.pair, opened, case, backwards=backwards)
            found = replace(found, cases=(*found.cases, moved))
            self._deliver(self._row(found, moved), listener)
            if moved.error:
                break
        return found

    def _move(self, pair: p2p.Pair, opened: OpenTransfers, case: TransferCase, *, backwards: bool) -> Moved:
        """Measure one case, count the bytes on the links meanwhile, and verify the data."""
        meter = self.meter
        assert meter is not None
        try:
            opened.clear(case, backwards=backwards)
            before = [meter.read(gpu) for gpu in pair]
            moved = opened.move(case, backwards=backwards)
            expected = moved.transfers * case.size_bytes
            sent, received = (
                meter.since(reading, expected, receives=receives)
                for reading, receives in zip(before, (False, True), strict=True)
            )
            wrong = opened.count_wrong(case, backwards=backwards)
        except CouldNotMeasureError as error:
            return Moved(case=case, error=str(error))
        return replace(moved, sent=sent, received=received, wrong=wrong)

    def _names(self, pair: p2p.Pair) -> str:
        return " → ".join(self.machine.gpus[gpu].device for gpu in pair)

    def _row(self, found: Measured, moved: Moved) -> KvRow:
        case = moved.case
        source, destination = (self.machine.gpus[gpu] for gpu in found.pair)
        times = [seconds * MICROSECONDS_PER_SECOND for seconds in moved.seconds]
        p50 = median(times) if times else None
        expected = None if case.to_host else found.expected_gb_s
        verdict, note = self._judge_row(found, moved)
        return KvRow(
            node=self.machine.host(0),
            source=source.device,
            destination=HOST if case.to_host else destination.device,
            source_bus_id=source.bus_id,
            destination_bus_id=None if case.to_host else destination.bus_id,
            origin=self.machine.origin,
            backend=self.request.backend,
            direction=case.direction,
            memory=found.allocation,
            size_bytes=case.size_bytes,
            blocks=case.blocks,
            bandwidth_gb_s=moved.gb_s,
            p50_us=p50,
            p99_us=quantiles(times, n=100)[98] if len(times) >= _LEAST_FOR_P99 else None,
            block_us=None if p50 is None else p50 / case.blocks,
            expected_gb_s=round_gb_s(expected),
            expected_percent=percent(moved.gb_s, expected),
            transport=None if moved.chosen is None else moved.chosen.config,
            protocol=None if moved.chosen is None else moved.chosen.description,
            host_staged=None if case.to_host else moved.is_staged,
            nvlink_bytes=moved.sent.nvlink_bytes,
            pcie_bytes=moved.sent.pcie_bytes,
            verified=None if not moved.seconds else Verified.NO if moved.wrong is None else Verified.LAST,
            verdict=verdict,
            note=note or None,
        )

    def _judge_row(self, found: Measured, moved: Moved) -> tuple[Verdict | None, str]:
        if moved.error:
            return Verdict.ERROR, moved.error
        if moved.wrong:
            return Verdict.FAIL, plural(moved.wrong, "wrong word")
        if moved.case.to_host:
            return None, "not judged: to host memory"
        if moved.is_staged:
            wiring = self.machine.wiring
            if by_design := wiring.why_refused(found.pair):
                return Verdict.SKIP, by_design
            return Verdict.WARN if wiring.is_refusal_doubtful(found.pair) else Verdict.FAIL, ""
        return self._judge_speed(found, moved.case, moved.gb_s)

    def _judge_speed(self, found: Measured, case: TransferCase, rate: float | None) -> tuple[Verdict | None, str]:
        pair, expected = found.pair, found.expected_gb_s
        if not p2p.is_large_copy(case.size_bytes):
            return None, ""
        if pair[0] == pair[1]:
            return None, _WHY_NO_SPEED
        if expected is None or rate is None or case.blocks > 1:
            return None, ""
        if self.request.backend == TransferBackend.NIXL:
            return None, _NIXL_VARIES
        if users := self.machine.users(*pair):
            return Verdict.SKIP, f"not judged: {users}"
        share = rate / expected
        return Verdict.PASS if share >= SLOW_SHARE else Verdict.WARN if share >= FAILED_SHARE else Verdict.FAIL, ""

    def _report(self, measured: Sequence[Measured]) -> Report:
        causes = transfer_findings([self._transfer(one) for one in measured if one.largest])
        by_name = {name: finding for finding in causes for name in finding.subjects}
        paths = [self._path(one, by_name) for one in measured if one.largest]
        rows = fallback_rows(paths, self.machine.origin, lambda members: _explanation(by_name.get(members[0].pair)))
        outcome = report_on(paths, rows, self.machine.origin, ())
        doubts = make_findings([row for row in rows if not by_name.keys() & row.pairs], paths)
        designs = {path.pair for path in paths if path.evidence.by_design}
        facts = self.machine.facts(self._copies(measured))
        staged = [
            replace(finding, severity=Verdict.SKIP) if set(finding.subjects) <= designs else finding
            for finding in causes
        ]
        findings = (
            *self._wrong(measured),
            *staged,
            *doubts,
            *self._slow(measured),
            *self._failed(measured),
            *self._mixed(measured),
            *copy_findings(facts),
        )
        findings = fold(findings, self.machine.nodes, fact_findings(facts))
        verdicts = [path.judgement.verdict for path in paths] + [finding.severity for finding in findings]
        return Report(
            verdict=worst_verdict(verdicts),
            complete=True,
            findings=findings,
            sections=outcome.sections,
            main=KvRow.section,
        )

    @property
    def _has_several_kinds(self) -> bool:
        return len(self.request.allocations) > 1

    def _title(self, measured: Measured) -> str:
        return self._names(measured.pair) + f" ({measured.allocation})" * self._has_several_kinds

    def _transfer(self, measured: Measured) -> Transfer:
        """Return the facts that may explain the path: those of the slower of the write and the read."""
        wiring, chosen = self.machine.wiring, _worst(measured).chosen
        return Transfer(
            name=self._title(measured),
            route=UcxRoute.UNKNOWN if chosen is None else chosen.route,
            places=self._places([measured]),
            transport="" if chosen is None else chosen.config,
            allocation=measured.allocation,
            same_node=True,
            same_pid_namespace=measured.share_pid_namespace,
            peer_access=wiring.peer_access(measured.pair).possible,
            variables={name: value for end in measured.ends for name, value in end.variables.items()},
            get_disabled=_are_only_reads_staged(measured) or None,
        )

    def _path(self, measured: Measured, causes: Mapping[str, Finding]) -> KnownPath:
        pair, wiring = measured.pair, self.machine.wiring
        moved = _worst(measured)
        source, destination = (self.machine.gpus[gpu] for gpu in pair)
        name = destination.device + f" ({measured.allocation})" * self._has_several_kinds
        cause = causes.get(self._title(measured))
        return KnownPath(
            source=End(source.device, source.device, self.machine.host(0), source.bus_id, source.device),
            destination=End(name, name, self.machine.host(0), destination.bus_id, destination.device),
            evidence=PathEvidence(
                capability=self._capability(measured),
                selection=_selection(moved.chosen),
                measurement=self._measurement(measured, moved),
                correctness=_correctness(measured),
                by_design=wiring.why_refused(pair),
                in_doubt=wiring.is_refusal_doubtful(pair),
            ),
            transports=() if moved.chosen is None else (_transport(moved.chosen),),
            path_class=None if pair[0] == pair[1] else wiring.path(pair),
            bandwidth_gb_s=moved.gb_s,
            limit_gb_s=wiring.limit(pair).gb_s,
            cause=cause.id if cause is not None and moved.is_staged else "",
        )

    def _capability(self, measured: Measured) -> Evidence:
        if measured.is_exportable is False:
            return Evidence(State.CONTRADICTING, f"CUDA IPC cannot export {measured.allocation} memory")
        if measured.share_pid_namespace is False:
            return Evidence(State.CONTRADICTING, "the processes are in different PID namespaces")
        wired = self.machine.wiring.capability(measured.pair)
        if wired.state is State.PRESENT and measured.is_exportable:
            return replace(wired, seen=f"CUDA IPC can export the memory; {wired.seen}")
        return wired

    def _measurement(self, measured: Measured, moved: Moved) -> Evidence:
        pair, wiring, case, rate = measured.pair, self.machine.wiring, moved.case, moved.gb_s
        if pair[0] == pair[1]:
            limit = wiring.host_limit(pair[0]).gb_s
            if rate is not None and limit is not None and rate > p2p.ABOVE_HOST * limit:
                return Evidence(
                    State.PRESENT, f"{format_bandwidth(rate, 3)}, more than host memory's {format_bandwidth(limit, 3)}"
                )
            return Evidence(seen="within one GPU, counters and bandwidth do not show the path")
        speed = None
        if rate is not None and case.blocks == 1:  # Many blocks are slow on a direct path, too
            speed = p2p.Speed(size_bytes=case.size_bytes, passed_gb_s=rate, busbw_gb_s=rate)
        flow = p2p.Flow(
            ends=(moved.sent, moved.received),
            speed=speed,
            has_nvlinks=wiring.has_nvlinks(pair),
            limit_gb_s=wiring.limit(pair).gb_s,
            staged_gb_s=wiring.staged_gb_s(pair),
        )
        return p2p.flow_evidence(flow)

    def _finding(self, measured: Sequence[Measured], id_: str, severity: Verdict, **words: Any) -> Finding:
        names = tuple(map(self._title, measured))
        subject, places = shorten(names), self._places(measured)
        return Finding(id=id_, severity=severity, subject=subject, subjects=names, places=places, **words)

    def _wrong(self, measured: Sequence[Measured]) -> Iterator[Finding]:
        wrong = [one for one in measured if any(moved.wrong for moved in one.cases)]
        if wrong:
            most = max(moved.wrong or 0 for one in wrong for moved in one.cases)
            yield self._finding(
                wrong,
                WRONG_DATA,
                Verdict.FAIL,
                seen=f"wrong data arrived: {plural(most, 'wrong word')} of 8 bytes",
                expected="the destination has exactly the data that the source sent",
                cause="peer access that corrupts data (ACS, IOMMU, hypervisor), or faulty memory",
                cure=Cure.of("gpubench p2p"),
            )

    def _slow(self, measured: Sequence[Measured]) -> Iterator[Finding]:
        for one in measured:
            for moved in one.largest:
                verdict, _ = self._judge_row(one, moved)
                if verdict in (Verdict.WARN, Verdict.FAIL) and not moved.is_staged and not moved.wrong:
                    yield self._finding(
                        [one],
                        "kv-slow",
                        verdict,
                        seen=f"{format_bandwidth(moved.gb_s or 0.0, 3)} ({moved.case.direction}, "
                        f"{format_size(moved.case.size_bytes)})",
                        expected=f"{format_bandwidth(one.expected_gb_s or 0.0, 3)}, like a plain copy between these "
                        "GPUs in this run",
                        cause=f"unexplained: the path is {'unknown' if moved.chosen is None else 'direct'}",
                        cure=Cure.of("gpubench check"),
                    )

    def _copies(self, measured: Sequence[Measured]) -> list[PairRow]:
        """Return the judged copies for comparison, since a transfer as slow as a slow copy is not healthy.

        They have too few samples for a warning.
        """
        series = p2p.Series(Engine.CE, Direction.WRITE, peer=True, size_bytes=_COPY_BYTES)
        known = {one.pair: one.expected_gb_s for one in measured if one.expected_gb_s}
        rows = [
            pair_row(self.machine, series, pair, p2p.Cell((_COPY_BYTES / gb_s / BYTES_PER_GB,)), (Verdict.PASS, ""))
            for pair, gb_s in known.items()
            if self.machine.wiring.peer_access(pair).possible is not False and not self.machine.users(*pair)
        ]
        matched = self.machine.matched
        nodes = {node.snapshot.host: node for node in self.machine.nodes}
        judged = CopyJudge(None if matched is None else matched.profile, nodes).judge(rows)
        return [row if row.verdict == Verdict.FAIL else replace(row, verdict=None) for row in judged]

    def _mixed(self, measured: Sequence[Measured]) -> Iterator[Finding]:
        mixed = [one for one in measured if any(len(end.ucx_files) > 1 for end in one.ends)]
        if mixed:
            files = next(end.ucx_files for end in mixed[0].ends if len(end.ucx_files) > 1)
            yield self._finding(
                mixed,
                "kv-two-ucx",
                Verdict.WARN,
                seen=f"a process has loaded several copies of UCX: {', '.join(files)}",
                expected="one copy of UCX per process",
                cause="libraries that bring their own UCX, such as NIXL and Open MPI",
                cure=Cure.of("gpubench topo --software"),
            )

    def _failed(self, measured: Sequence[Measured]) -> Iterator[Finding]:
        by_error = group_by([one for one in measured if one.failure], lambda one: one.failure)
        for error, failed in by_error.items():
            yield self._finding(
                failed,
                "not-measured",
                Verdict.ERROR,
                seen=error,
                expected="a transfer that completes",
                cause=_NO_NETWORK if "unreachable" in error else "UCX cannot connect the two processes, or one ended",
                cure=Cure.of("UCX_LOG_LEVEL=info gpubench kv", comment="It shows UCX's own messages."),
            )

    def _places(self, measured: Sequence[Measured]) -> tuple[DevicePlace, ...]:
        return tuple(dict.fromkeys(self.machine.wiring.place(gpu) for one in measured for gpu in one.pair))


def _worst(measured: Measured) -> Moved:
    """Return the transfer whose path is worst: the largest staged one with the fewest blocks, else the slower of the
    largest two.
    """

    def rank(moved: Moved) -> tuple[int, int, int, float]:
        order = (True, None, False).index(moved.is_staged)
        return order, -moved.case.size_bytes, moved.case.blocks, moved.gb_s or 0.0

    staged = [moved for moved in measured.completed if moved.is_staged]
    return min(staged or measured.largest, key=rank)


def _are_only_reads_staged(measured: Measured) -> bool:
    staged = {moved.case.direction: moved.is_staged for moved in measured.largest}
    return staged == {Direction.WRITE: False, Direction.READ: True}


def _selection(chosen: ProtocolRange | None) -> Evidence:
    if chosen is None:
        return Evidence(seen="UCX printed no protocol for this transfer")
    seen = f"UCX chose {chosen.description} over {chosen.config or 'an unnamed transport'}"
    staged = chosen.route.host_staged
    return Evidence(
        State.ABSENT if staged is None else State.CONTRADICTING if staged else State.PRESENT,
        seen if staged is not None else f"{seen}, which gpubench does not know",
    )


def _correctness(measured: Measured) -> Evidence:
    checked = [moved.wrong for moved in measured.completed]
    if any(checked):
        return Evidence(State.CONTRADICTING, "wrong data arrived")
    if None in checked or not checked:
        return Evidence(seen="data were not verified")
    return Evidence(State.PRESENT, "data were verified")


def _transport(chosen: ProtocolRange) -> Transport:
    if chosen.route is UcxRoute.UNKNOWN:
        return Transport(chosen.config, TransportKind.UNKNOWN)
    kind = TransportKind.P2P if chosen.route is UcxRoute.PEER else TransportKind.NET
    return Transport(chosen.config or chosen.description, kind, gdr=chosen.route is UcxRoute.RDMA)


def _explanation(finding: Finding | None) -> Explanation:
    if finding is None:
        return Explanation("unknown", "no known cause was found", Cure.of("UCX_LOG_LEVEL=debug gpubench kv"))
    return Explanation(finding.id, finding.seen, finding.cure)
