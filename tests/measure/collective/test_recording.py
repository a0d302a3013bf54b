"""Replay of recorded sweeps: the same report, or a refusal."""

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpubench.backends.cuda import open_device
from gpubench.backends.nccl.backend import NcclBackend
from gpubench.backends.nccl.library import NcclLibrary
from gpubench.collectives.allreduce import ALLREDUCE
from gpubench.collectives.record import Collective, SweepRequest
from gpubench.collectives.registry import COLLECTIVES
from gpubench.conditions.circumstances import Circumstances
from gpubench.errors import UsageError
from gpubench.machine.nvml import Driver
from gpubench.measure.collective import paths
from gpubench.measure.collective.cases import RECORDING_VERSION, RunOptions
from gpubench.measure.collective.paths import Choice, LoggedChoices, PathObservations
from gpubench.measure.collective.recording import (
    CUT_SHORT,
    RecordedCollective,
    RecordedLog,
    RecordedLoggedChoices,
    RecordedObservations,
    RowWriter,
    file_name,
    read_recorded,
    replay,
)
from gpubench.measure.collective.report import Recorder
from gpubench.measure.collective.sweep import ObservationSources, Observers, PathObserver
from gpubench.measure.collective.variants import GroupRows, SweepVariant, SynchronizedGroup, measure_variants
from gpubench.measure.paths import IdleWindow
from gpubench.model.facts.process import GpuCondition, GpuProcess
from gpubench.model.facts.traffic import GpuUse, IdleGpu
from gpubench.model.paths.transport import EvidenceUse, Tuning, Used, parse_transport
from gpubench.model.paths.wiring import Wiring
from gpubench.model.results.backends import RefusedRow
from gpubench.model.results.report import CollectiveRow, Report, Table
from gpubench.model.terms.operation import DataType, ReduceOp
from gpubench.model.terms.plain import from_plain, to_plain
from gpubench.model.terms.ranks import RankGroup, split_ranks
from gpubench.model.terms.statistics import Mode, Sampling
from gpubench.model.terms.verdict import Origin, Verdict
from gpubench.ports.backend import Backend
from gpubench.ports.group import Group
from gpubench.readers.documents import json_line, read_json_line
from tests.examples import examples
from tests.fakes import cupy_on_numpy, faults
from tests.fakes.library_log import FakeLog, said
from tests.fakes.one_variant import measure
from tests.fakes.ranks import ThreadGroup, run_ranks
from tests.measure.collective.test_observers import (
    COUNTED,
    RANKS,
    Job,
    Users,
    direct,
    over_nvlink,
    over_pcie,
    shared_memory,
)
from tests.measure.collective.test_sweep import SIZES, ReceivedRows, request_for
from tests.measure.collective.test_variants import both

Measure = Callable[[ThreadGroup, Backend, ReceivedRows, Recorder], Report]


@dataclass
class Recording:
    report: Report
    rows: list[CollectiveRow]
    lines: list[str]
    circumstances: Circumstances
    collective: Collective = ALLREDUCE

    def replayed(self, lines: Sequence[str] | None = None) -> tuple[Report, list[CollectiveRow]]:
        lines = self.lines if lines is None else lines
        numbered = [(line, f"recorded, line {number}") for number, line in enumerate(lines, 1)]
        found, rows = read_recorded(numbered, self.collective, "recorded")
        recorder = ReceivedRows()
        # The samples contain the settings.
        circumstances = replace(self.circumstances, settings={})
        report = replay(found, rows, self.collective, circumstances, recorder, lambda _: None)
        return report, recorder.rows


@dataclass
class InMemory(Recorder):
    described: RecordedCollective
    group: Group
    part: RankGroup | None = None
    lines: list[str] = field(default_factory=list)
    writer: RowWriter | None = None

    def begin(self, observations: PathObservations | None, refused: Sequence[RefusedRow] | None) -> None:
        def write(value: object) -> None:
            self.lines.append(json_line(value).rstrip("\n"))

        known = None if observations is None else RecordedObservations.of(observations)
        first = replace(self.described, testimony=known, refused=None if refused is None else tuple(refused))
        is_first = self.group.rank == 0
        if is_first:
            write(first)
        collect = self.group.collect if self.part is not None else lambda row: [row]
        self.writer = RowWriter(write if is_first else None, collect, self.part)

    def row(self, case: Any, measured: Any) -> None:
        assert self.writer is not None
        self.writer.row(case, measured)

    def end(self, idle: Sequence[IdleGpu]) -> None:
        assert self.writer is not None
        self.writer.after_rows(idle)


def recording(
    monkeypatch: pytest.MonkeyPatch,
    request: SweepRequest,
    job: Job,
    how: Callable[[SweepRequest, Job], Measure],
    parts: tuple[RankGroup, ...] = (),
    unwatched: str = "",
) -> Recording:
    monkeypatch.setattr(paths, "COUNTED_BYTES", COUNTED)
    cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(RANKS), cupy_on_numpy.Nccl(RANKS))
    described = RecordedCollective(
        schema_version=RECORDING_VERSION,
        collective=request.collective.name,
        backend="nccl",
        origin=Origin.MEASURED,
        asked=request.asked,
        options=RunOptions(allocator="cuda", timeout_s=60.0, evidence=EvidenceUse.KEPT, strict=False),
        ranks=tuple(job.identities),
        hosts=tuple(f"n{node}" for node in sorted(set(job.nodes))),
        parts=parts,
        unwatched=unwatched,
    )

    def body(group: ThreadGroup) -> tuple[Report, list[CollectiveRow], list[str]]:
        part = next((each for each in parts if group.rank in each.ranks), None)
        own = group if part is None else group.split(parts.index(part), group.rank)
        device = open_device(group.rank, RANKS, "n0", Driver(version="580.1"))
        backend = NcclBackend(own, device, NcclLibrary())
        recorder, shown = InMemory(described, group, part), ReceivedRows()
        report = how(request, job)(group, job.wrap(backend, group.rank), shown, recorder)
        backend.close()
        if recorder.writer is not None and group.rank == 0:
            recorder.writer.end()
        return report, shown.rows, recorder.lines

    report, rows, lines = run_ranks(RANKS, body)[0]
    return Recording(report, rows, lines, job.circumstances(), request.collective)


def observer_of(request: SweepRequest, job: Job, group: ThreadGroup) -> PathObserver:
    circumstances = job.circumstances()

    def look_around() -> Circumstances | None:
        return circumstances if group.collect(None) is not None else None

    log = RecordedLog(job.logs(group.rank))
    counters, window = job.counters(group.rank), None
    if job.users is not None:
        passed = [0.0]
        users = Users(*job.users(group.rank))
        window = IdleWindow(counters, users, clock=lambda: sum(passed), wait=passed.append)
    sources = ObservationSources(log, counters, look_around, job.nodes, window)
    return PathObserver.of(request, group, sources)


def watched(request: SweepRequest, job: Job) -> Measure:
    def body(group: ThreadGroup, backend: Backend, rows: ReceivedRows, recorder: Recorder) -> Report:
        observer = observer_of(request, job, group)
        return measure(
            request, group, backend, job.identities, rows, Observers(path_observer=observer, recorder=recorder)
        )

    return body


def unwatched(request: SweepRequest, job: Job) -> Measure:
    def body(group: ThreadGroup, backend: Backend, rows: ReceivedRows, recorder: Recorder) -> Report:
        def read() -> GpuCondition:
            return GpuCondition(throttle_reasons=("sw_power_cap",), unread={"memory_errors": "not supported"})

        return measure(request, group, backend, job.identities, rows, Observers(read_condition=read, recorder=recorder))

    return body


def in_ways(request: SweepRequest, job: Job) -> Measure:
    def body(group: ThreadGroup, backend: Backend, rows: ReceivedRows, recorder: Recorder) -> Report:
        assert isinstance(backend, NcclBackend)
        own = SweepVariant(setting=None, backend=backend)
        others = [replace(way, logs_choices=True) for way in both(request, group, backend, NcclLibrary())]
        observer = observer_of(request, job, group)
        return measure_variants(
            request, group, [own, *others], job.identities, rows, Observers(path_observer=observer, recorder=recorder)
        )

    return body


def in_groups(parts: tuple[RankGroup, ...]) -> Callable[[SweepRequest, Job], Measure]:
    def measured(request: SweepRequest, job: Job) -> Measure:
        def body(group: ThreadGroup, backend: Backend, rows: ReceivedRows, recorder: Recorder) -> Report:
            part = next(each for each in parts if group.rank in each.ranks)
            own = group.split(parts.index(part), group.rank)
            of_group = GroupRows(part, own, group, rows)
            identities = [job.identities[rank] for rank in part.ranks]
            return of_group.merged(
                measure(
                    request, SynchronizedGroup(own, group), backend, identities, of_group, Observers(recorder=recorder)
                )
            )

        return body

    return measured


def plain(report: Report, rows: Sequence[CollectiveRow]) -> dict[str, Any]:
    sections = {
        name: [row.to_record() | {"origin": ""} for row in section.rows()]
        for name, section in report.sections.items()
        if isinstance(section, Table)
    }
    sections["rows"] = [row.to_record() | {"origin": ""} for row in rows]
    return report.to_record() | {"sections": sections}


def check_same(recorded: Recording) -> None:
    report, rows = recorded.replayed()
    again = plain(report, rows)
    for name in ("evidence", "fallback", "causes"):
        if name not in recorded.report.sections:
            assert name in again["sections"], "which the command adds to a report that nobody watched"
            del again["sections"][name]
    assert again == plain(recorded.report, recorded.rows)
    assert {row.origin for row in rows} == {"recorded"}
    json.dumps(again, allow_nan=False)


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda each: each.name)
def test_every_collective_is_replayed(monkeypatch: pytest.MonkeyPatch, collective: Collective) -> None:
    job = Job(lambda rank: shared_memory(rank), over_pcie, {"NCCL_P2P_DISABLE": ("1",)})
    request = request_for(collective, root=RANKS - 1, sampling=Sampling(iterations=4))
    recorded = recording(monkeypatch, request, job, watched)
    assert "NCCL_P2P_DISABLE" in recorded.lines[0]
    check_same(recorded)


@pytest.mark.parametrize(
    "sampling", [Sampling(iterations=None, budget_seconds=0.002), Sampling(Mode.LATENCY, iterations=40)]
)
def test_every_mode_of_timing_is_replayed(monkeypatch: pytest.MonkeyPatch, sampling: Sampling) -> None:
    request = request_for(ALLREDUCE, sampling=sampling, sizes=(1024,))
    recorded = recording(monkeypatch, request, Job(direct), unwatched)
    own = json.loads(recorded.lines[1])["row"]["sample"]["own"]
    assert len(own["samples"]) >= 9, "raw seconds, and not only what was made of them"
    check_same(recorded)


def test_other_processes_before_and_after_a_sweep_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = recording(monkeypatch, request_for(ALLREDUCE), Job(direct, users=comes_late), watched)
    first, last = json.loads(recorded.lines[0])["testimony"]["idle"], json.loads(recorded.lines[-1])["idle"]
    assert [each["use"]["utilization_percent"] for each in (first[2], last[2])] == [0, 100]
    causes = plain(recorded.report, ())["sections"]["causes"]
    assert [(cause["id"], cause["confidence"]) for cause in causes] == [("gpu-in-use", "proven")]
    assert causes[0]["evidence"].startswith("GPU2 is in use by process 8342 (python), 12.0 GiB: 100 % busy")
    check_same(recorded)


def test_recordings_without_idle_gpus_have_no_such_field(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = recording(monkeypatch, request_for(ALLREDUCE), Job(direct, over_nvlink), watched)
    assert not any("idle" in line for line in recorded.lines)
    check_same(recorded)


def test_gpus_of_other_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = recording(monkeypatch, request_for(ALLREDUCE), Job(direct, users=comes_late), watched)
    last = json.loads(recorded.lines[-1])
    with pytest.raises(UsageError, match="3 GPUs after the last row"):
        recorded.replayed([*recorded.lines[:-1], json.dumps(last | {"idle": last["idle"][1:]})])


def comes_late(rank: int) -> tuple[GpuUse, GpuUse]:
    user = GpuProcess(pid=8342, name="python", memory_bytes=12 * 2**30)
    idle = GpuUse(utilization_percent=0)
    return idle, GpuUse(utilization_percent=100, users=(user,)) if rank == 2 else idle


def test_wrong_data_and_late_ranks_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(
        direct,
        wrap=lambda backend, rank: faults.FaultyBackend(backend, faults.one_bit, timed=3) if rank == 2 else backend,
    )
    recorded = recording(monkeypatch, request_for(ALLREDUCE), job, unwatched)
    assert recorded.report.verdict is Verdict.FAIL
    assert "rank 2" in recorded.report.findings[0].subject
    check_same(recorded)


def test_variants_are_replayed_with_the_choices_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    collective = next(each for each in COLLECTIVES if each.name == "reducescatter")
    recorded = recording(monkeypatch, request_for(collective), Job(shared_memory), in_ways)
    sections = plain(recorded.report, recorded.rows)["sections"]
    assert [each["setting"] for each in sections["refused"]] == ["tree"]
    assert sections["winners"]
    assert list(json.loads(recorded.lines[0])["testimony"]["under"]) == ["ring"]
    check_same(recorded)


def test_groups_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(
        direct,
        wrap=lambda backend, rank: faults.FaultyBackend(backend, faults.one_bit, timed=3) if rank == 3 else backend,
    )
    parts = split_ranks("2", job.identities)
    request = request_for(ALLREDUCE)
    recorded = recording(monkeypatch, request, job, in_groups(parts), parts, "--split: of all groups at once")
    assert {row.group for row in recorded.rows} == {"ranks 0-1", "ranks 2-3"}
    assert recorded.report.verdict is Verdict.FAIL
    check_same(recorded)
    report, _ = recorded.replayed()
    fallback = plain(report, ())["sections"]["fallback"]
    assert [each["origin"] for each in fallback] == [""]
    assert "--split" in str(fallback)


@cache
def healthy() -> Recording:
    with pytest.MonkeyPatch.context() as monkeypatch:
        request = request_for(ALLREDUCE, sizes=SIZES, sampling=Sampling(Mode.LATENCY, iterations=30))
        return recording(monkeypatch, request, Job(direct, over_nvlink), watched)


def test_the_time_that_ranks_waited_for_a_cpu_is_recorded() -> None:
    circumstances = Circumstances(wiring=Wiring([], {}), waited={1: 0.75})
    observed = PathObservations(choices=LoggedChoices(), expected_bytes=[], traffic=[], circumstances=circumstances)
    kept = from_plain(RecordedObservations, to_plain(RecordedObservations.of(observed)))
    assert kept.restore(replace(circumstances, waited={})).circumstances.waited == {1: 0.75}


@pytest.mark.parametrize(
    ("kept", "said"), [(0, "0 rows without a final line"), (1, "1 row without"), (3, "3 rows without")]
)
def test_a_run_that_was_cut_short_shows_its_rows_and_an_error(kept: int, said: str) -> None:
    report, rows = healthy().replayed(healthy().lines[: 1 + kept])
    assert len(rows) == kept
    assert (report.verdict, report.complete) == (Verdict.ERROR, False)
    finding = next(each for each in report.findings if each.id == CUT_SHORT)
    assert finding.seen.startswith(said)
    assert {row.to_record()["size_bytes"] for row in rows} <= {*SIZES}


def edited(line: str, *path: str | int, to: object) -> str:
    document = json.loads(line)
    inner = document
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = to
    return json.dumps(document)


ROW = ("row", "sample")


@pytest.mark.parametrize(
    ("line", "path", "to", "said"),
    [
        (0, ("schema_version",), 2, "line 1: schema_version 2"),
        (0, ("collective",), "broadcast", "line 1: samples of 'broadcast'"),
        (0, ("wings",), 2, "unknown field 'wings'"),
        (0, ("hosts",), [], "line 1: ranks on more than 0 nodes"),
        (0, ("ranks", 1, "rank"), 5, "line 1: ranks that are not numbered from 0"),
        (0, ("ranks", 1, "host"), "\x1b[31m", "line 1: '\\x1b[31m'"),
        (0, ("parts",), [{"name": "a", "ranks": [0, 1]}], "groups that do not have 4 ranks"),
        (0, ("asked", "sizes"), [0], "asked.sizes[0] is 0 `int` >= 1"),
        (0, ("asked", "sizes"), [1], "a size without a share for each of 4 ranks"),
        (0, ("asked", "dtypes"), ["int8", "int8"], "int8, int8 requested"),
        (0, ("asked", "root"), 4, "root 4 of 4 ranks"),
        (0, ("asked", "warmup"), -1, "asked.warmup is -1 `int` >= 0"),
        (0, ("options", "evidence"), "much", "evidence is 'much'"),
        (0, ("testimony", "due"), [[1.0, 1.0]], "the evidence on paths is not from 4 ranks"),
        (0, ("testimony", "heard", "choices", 0, "use"), 7, "the evidence on paths is not from 4 ranks"),
        (0, ("testimony", "heard", "uses", 0, "unheard"), [4], "the evidence on paths is not from 4 ranks"),
        (1, (*ROW, "answers", 2, "seconds"), 0.0, "answers[2].seconds is 0.0 `float` >= 1e-12"),
        (1, (*ROW, "answers", 2, "seconds"), 1e308, "answers[2].seconds is 1e+308"),
        (1, (*ROW, "answers", 2, "entries", "last"), 31, "a rank that was last in 31 of 30"),
        (1, (*ROW, "answers"), [], "answers of 0 ranks"),
        (1, (*ROW, "own", "iterations"), 0, "own.iterations is 0 `int` >= 1"),
        (1, ("row", "case", "layout", "count"), 7, "line 2: a row that was not requested"),
        (1, ("row", "group"), "else", "a row of the group 'else'"),
        (-1, ("rows",), 9, "the end of 9 rows"),
        (-1, ("rows",), None, "a line that is neither a row nor the end"),
    ],
)  # fmt: skip
def test_inconsistent_recordings_are_refused(line: int, path: tuple[str | int, ...], to: object, said: str) -> None:
    lines = list(healthy().lines)
    lines[line] = edited(lines[line], *path, to=to)
    with pytest.raises(UsageError) as raised:
        healthy().replayed(lines)
    assert said in f"{raised.value.seen} {raised.value.expected}"
    assert raised.value.next_step


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: [], f"{file_name('allreduce')}: empty"),
        (lambda lines: [*lines, lines[1]], "unexpected lines after the last record"),
        (lambda lines: [lines[0], *lines[2:]], "the end of 4 rows"),
        (lambda lines: lines[1:], "unknown field 'row'"),
        (lambda lines: [lines[0][:-9], *lines[1:]], "line 1: no JSON"),
    ],
)
def test_inconsistent_lines_are_refused(change: Callable[[list[str]], list[str]], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        healthy().replayed(change(list(healthy().lines)))
    assert said in raised.value.seen


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def places(document: Any) -> list[tuple[Any, Any]]:
    if isinstance(document, dict):
        return [(document, name) for name in document] + [place for held in document.values() for place in places(held)]
    if isinstance(document, list):
        return [(document, at) for at in range(len(document))] + [place for held in document for place in places(held)]
    return []


def alike(value: object) -> st.SearchStrategy[Any]:
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.integers(-2, 9) | st.integers()
    if isinstance(value, float):
        return st.floats() | st.sampled_from([0.0, -1.0, 1e-300, 1e300])
    if isinstance(value, list):
        return st.sampled_from([[], value[1:], value + value, value[::-1]])
    return st.sampled_from(["", "nccl", "host", "ring", "RING", "NVLS", "float16", "in_place", "avg"])


@settings(max_examples=examples(80))
@given(st.data())
def test_any_value_in_any_place_is_read_or_refused(data: st.DataObject) -> None:
    documents = [json.loads(line) for line in healthy().lines]
    for _ in range(data.draw(st.integers(1, 2))):
        document = data.draw(st.sampled_from([documents[0], documents[0], documents[1], documents[-1]]))
        holder, name = data.draw(st.sampled_from(places(document)))
        holder[name] = data.draw(alike(holder[name]) | JSON)
    with contextlib.suppress(UsageError):
        report, rows = healthy().replayed([json.dumps(each) for each in documents])
        json.dumps(plain(report, rows), allow_nan=False)


@settings(max_examples=examples(60))
@given(st.data())
def test_a_damaged_recording_is_read_or_refused(data: st.DataObject) -> None:
    text = "\n".join(healthy().lines)
    start = data.draw(st.integers(0, len(text)))
    damaged = text[:start] + data.draw(st.text(max_size=4)) + text[start + data.draw(st.integers(0, 400)) :]
    with contextlib.suppress(UsageError):
        report, rows = healthy().replayed(damaged.split("\n"))
        json.dumps(plain(report, rows), allow_nan=False)


TRANSPORTS = st.sampled_from(["P2P/CUMEM", "SHM/direct", "NET/IB/0/GDRDMA/Shared", "NET/Socket/1(3)", "wings"])
USES = st.builds(
    Used,
    st.dictionaries(
        st.tuples(st.integers(0, 3), st.integers(0, 3)),
        st.lists(TRANSPORTS.map(parse_transport), max_size=2).map(tuple),
    ),
    st.lists(st.integers(0, 3), max_size=2).map(tuple),
)
TUNINGS = st.none() | st.builds(
    Tuning, st.just("AllReduce"), st.integers(0), st.sampled_from([None, "RING"]), st.none(), st.integers(0, 32)
)


@given(st.lists(USES, min_size=1, max_size=3), st.data())
def test_recorded_choices_are_restored(uses: list[Used], data: st.DataObject) -> None:
    keys = st.tuples(st.sampled_from(DataType), st.none() | st.sampled_from(ReduceOp), st.integers(1, 2**40))
    by_operation = data.draw(st.dictionaries(keys, st.builds(Choice, st.sampled_from(uses), TUNINGS), max_size=5))
    choices = LoggedChoices(by_operation, data.draw(st.sampled_from(["", "rank 0: deaf"])), "no tuning")
    recorded = RecordedLoggedChoices.of(choices)
    assert recorded.fits(4)
    assert len(recorded.uses) <= len(uses), "operations share them"
    again = read_json_line(RecordedLoggedChoices, json_line(recorded), "x").restore()
    assert again == choices
    assert list(again.by_operation) == list(choices.by_operation)


def test_a_log_is_kept_unchanged() -> None:
    log = RecordedLog(FakeLog(said("Channel 00/0 : 0[0] -> 1[0] via P2P/CUMEM"), no_log="", no_tuning="too old"))
    assert (log.is_readable(), log.no_log, log.no_tuning) == (True, "", "too old")
    heard = [*log.lines(), *log.lines()]
    log.switch_off()
    assert log.text() == b"".join(line + b"\n" for line in heard)
    assert b"via P2P/CUMEM" in log.text()
