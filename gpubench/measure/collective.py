"""Measure one collective over a sweep of sizes: nccl-tests' timing loop, with every timed buffer verified."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpubench.collectives.record import Call, Collective
from gpubench.errors import UsageError, no_size_left
from gpubench.measure.cases import Case, JobFacts, SweepRequest, cases, describe, without_data
from gpubench.measure.witness import Witness
from gpubench.model.data_pattern import POISON, Block, DataPattern
from gpubench.model.operation import Placement, ReduceOp
from gpubench.model.report import CollectiveRow, Origin, RankIdentity, Report
from gpubench.model.samples import RankTimes
from gpubench.model.sweep import DroppedSize, describe_dropped, split_by_memory
from gpubench.model.units import format_size
from gpubench.model.verdict import WRONG_DATA, Finding, Verdict, overall
from gpubench.ports import Backend, Group, Launch, Listener, Memory, Region


def fitting_sizes(
    request: SweepRequest, group: Group, backend: Backend, identity: RankIdentity
) -> tuple[tuple[int, ...], tuple[DroppedSize, ...]]:
    """The sizes to measure, the same on every rank, and those dropped, each with its reason.

    Dropped are sizes that do not fit the free memory of the tightest rank, and sizes so small that a rank's share of
    them rounds to nothing.

    Raises:
        CouldNotMeasureError: none is left.
    """
    free_bytes, tightest = min(group.gather((backend.free_bytes(), str(identity))))
    fitting, dropped = split_by_memory(request.sizes, backend.buffers, free_bytes, tightest)
    empty = without_data(request, fitting, group.size)
    dropped += empty
    kept = tuple(size for size in fitting if size not in {each.size_bytes for each in empty})
    if not kept:
        raise no_size_left("; ".join(describe_dropped(dropped)))
    return kept, dropped


def check_root(collective: Collective, root: int, ranks: int) -> None:
    """Raise UsageError where `--root` is no rank of the job."""
    if collective.rooted and not 0 <= root < ranks:
        raise UsageError(f"--root {root} with {ranks} ranks", expected=f"a rank from 0 to {ranks - 1}")


def measure(
    request: SweepRequest,
    group: Group,
    backend: Backend,
    nodes: int,
    identities: Sequence[RankIdentity],
    listener: Listener[CollectiveRow],
    witness: Witness | None = None,
) -> Report:
    """Measure every case of the request; rows go to `listener` as they are measured, on every rank alike.

    A witness watches which ways the bytes go; the report of the first rank has what it found.
    """
    largest = max(request.sizes)
    buffers = backend.allocate(largest), backend.allocate(largest)
    sweep = _Sweep(request, group, backend, nodes, *buffers, largest)
    every_case = tuple(cases(request, group.size))
    if witness is not None:
        witness.try_out(every_case, sweep.try_once)
    sweep.warm_up(every_case)
    verdicts: list[Verdict] = []
    failures: list[tuple[CollectiveRow, Sequence[int]]] = []
    for number, case in enumerate(every_case):
        listener.progress(number, len(every_case), f"{request.collective.name} {case.label}")
        row, wrong_by_rank = sweep.row(number, case)
        if witness is not None:
            row = witness.row(case, row, wrong_by_rank)
        listener.row(row)
        verdicts.append(Verdict(row.verdict) if row.verdict else Verdict.SKIP)
        if row.wrong:
            failures.append((row, wrong_by_rank))
    findings = (_wrong_data(failures, identities),) if failures else ()
    return _report(verdicts, findings, witness)


def _report(verdicts: Sequence[Verdict], findings: Sequence[Finding], witness: Witness | None) -> Report:
    """The report with what the witness has to say; where paths are judged, a doubt about them fails."""
    outcome = None if witness is None else witness.outcome()
    if witness is None or outcome is None:
        return Report(verdict=overall(verdicts), complete=True, findings=findings)
    verdict = overall([*verdicts, *(finding.severity for finding in outcome.findings)])
    if witness.senses.strict and verdict is Verdict.WARN:
        verdict = Verdict.FAIL
    return Report(
        verdict=verdict, complete=True, findings=(*findings, *outcome.findings), sections=dict(outcome.sections)
    )


def _wrong_data(failures: Sequence[tuple[CollectiveRow, Sequence[int]]], identities: Sequence[RankIdentity]) -> Finding:
    row, wrong_by_rank = failures[0]
    ranks = [str(identities[rank]) for rank, wrong in enumerate(wrong_by_rank) if wrong]
    total = sum(failure.wrong or 0 for failure, _ in failures)
    shown = ", ".join(ranks[:4]) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return Finding(
        id=WRONG_DATA,
        severity=Verdict.FAIL,
        subject=shown,
        seen=f"{total} wrong elements in {len(failures)} rows, first in {row.dtype} {format_size(row.size_bytes)} "
        f"{row.placement}: {row.wrong} wrong elements",
        expected="every element as computed from what the ranks sent",
        cause="data damaged on the way: a GPU, a link, ACS or IOMMU between peers, or a bug in the library",
        next_command=f"gpubench {row.collective} --sizes {row.size_bytes} --dtype {row.dtype} "
        "again, then with NCCL_P2P_DISABLE=1: if that is clean, peer-to-peer copies are at fault",
    )


@dataclass(frozen=True, slots=True)
class _Sweep:
    """What all rows of a sweep share: the job, the backend, and two buffers of the largest size."""

    request: SweepRequest
    group: Group
    backend: Backend
    nodes: int
    send: Memory
    receive: Memory
    largest_bytes: int

    def row(self, number: int, case: Case) -> tuple[CollectiveRow, Sequence[int]]:
        """Measure and verify one case; the row, and wrong elements by rank."""
        launches = [self._launch(case, buffer) for buffer in range(self._buffers(case))]
        seconds = self._time(number * 2, case, launches)
        wrong = self._verify(number * 2, case, launches) if self.request.check else 0
        answers = self.group.gather((seconds, wrong))
        wrong_by_rank = [answer[1] for answer in answers]
        job = JobFacts(self.backend.name, Origin.MEASURED, self.group.size, self.nodes)
        times = RankTimes.of([answer[0] for answer in answers])
        return describe(self.request, case, job, times, sum(wrong_by_rank)), wrong_by_rank

    def try_once(self, case: Case) -> None:
        """Run one operation of a case, untimed."""
        self.backend.seconds(self.backend.bind([self._launch(case, 0)], 0))

    def warm_up(self, cases: Sequence[Case]) -> None:
        """Run every case untimed, as nccl-tests does before its first row, and in place too; then a row for nothing.

        Libraries connect and load kernels at first use, and an idle GPU needs tens of milliseconds of work to raise its
        clocks.
        """
        for case in cases:
            self._warm_up_row([self._launch(case, 0)])
        self.row(0, cases[0])

    def _warm_up_row(self, launches: Sequence[Launch]) -> None:
        untimed = [launches[i % len(launches)] for i in range(self.request.warmup)]
        self.backend.seconds(self.backend.bind(untimed, 0))

    def _buffers(self, case: Case) -> int:
        """nccl-tests' rotation: as many buffers as fit into the largest size, no more than there are iterations."""
        return min(self.largest_bytes // case.size_bytes, self.request.iterations)

    def _launch(self, case: Case, buffer: int) -> Launch:
        start = buffer * case.layout.largest
        send, receive = (
            Region(self.send, start * case.dtype.size_bytes),
            Region(self.receive, start * case.dtype.size_bytes),
        )
        if case.placement is Placement.IN_PLACE:
            send = self._in_place(case, start, case.layout.in_place_send)
            receive = self._in_place(case, start, case.layout.in_place_receive)
        call = Call(
            send=send,
            receive=receive,
            count=case.layout.count,
            dtype=case.dtype,
            op=case.op or ReduceOp.SUM,
            root=self.request.root,
            rank=self.group.rank,
            ranks=self.group.size,
        )
        return self.request.collective.issue(self.backend.calls, call)

    def _in_place(self, case: Case, start: int, step: int) -> Region:
        return Region(self.receive, (start + self.group.rank * step) * case.dtype.size_bytes)

    def _time(self, row: int, case: Case, launches: Sequence[Launch]) -> float:
        """Seconds an operation took on this rank, averaged over the iterations (and replays).

        The warm-up comes before the buffers are poisoned, so that its results cannot pass for timed ones.
        """
        request = self.request
        self._fill(row, case, len(launches))
        self._warm_up_row(launches)
        if request.check and case.placement is Placement.OUT_OF_PLACE:
            self.receive.fill_byte(len(launches) * case.size_bytes, POISON)
        timed = self.backend.bind(
            [launches[i % len(launches)] for i in range(request.iterations)], request.graph_replays
        )
        self.group.barrier()
        return self.backend.seconds(timed) / (request.iterations * max(1, request.graph_replays))

    def _verify(self, row: int, case: Case, launches: Sequence[Launch]) -> int:
        """Wrong elements on this rank: of every timed buffer, or in place of one more operation on fresh data."""
        rank, ranks, layout = self.group.rank, self.group.size, case.layout
        buffers, offset = len(launches), 0
        if case.placement is Placement.IN_PLACE:
            row, buffers, offset = row + 1, 1, rank * layout.in_place_receive
            self._fill(row, case, buffers)
            self.group.barrier()
            self.backend.seconds(self.backend.bind(launches[:1], min(1, self.request.graph_replays)))
        blocks = [
            (
                Block(row, buffers, layout.largest, offset + segment.offset, segment.count, segment.start),
                segment.source,
            )
            for segment in self.request.collective.expected(layout, rank, ranks, self.request.root)
        ]
        return self.receive.count_wrong(self._pattern(case), blocks)

    def _fill(self, row: int, case: Case, buffers: int) -> None:
        """Write this rank's data: into the send buffers, or in place into poisoned receive buffers."""
        memory, offset = self.send, 0
        if case.placement is Placement.IN_PLACE:
            memory, offset = self.receive, self.group.rank * case.layout.in_place_send
            memory.fill_byte(buffers * case.size_bytes, POISON)
        block = Block(row, buffers, case.layout.largest, offset, case.layout.send)
        memory.fill_sent(self._pattern(case), block, self.group.rank)

    def _pattern(self, case: Case) -> DataPattern:
        return DataPattern(case.dtype, case.op, self.group.size)
