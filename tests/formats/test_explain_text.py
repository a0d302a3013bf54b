"""What `gpubench explain` prints for people."""

import io

import pytest
from msgspec.structs import replace

from gpubench.formats.registry import TABLE, Presentation, Target
from gpubench.measure.explain.report import explain
from gpubench.model.results.report import Metadata, Report
from gpubench.model.terms.verdict import Verdict
from gpubench.readers.nccl_log.stream import NcclLogReader
from tests.fakes.last_line import is_command
from tests.fakes.nccl_logs import Job, between
from tests.formats.sample import ROW

METADATA = Metadata(
    gpubench_version="0.1.0",
    run_id="1",
    started_at="2026-11-20T00:00:00+00:00",
    command=["gpubench", "explain", "x.log"],
    subject="explain",
    origin="recorded",
    hosts=["vm"],
    libraries={"NCCL": "2.28.9"},
    environment={"NCCL_P2P_DISABLE": "1"},
    options={"files": 3, "files_without_nccl": 1, "lines": 12, "nccl_lines": 10, "warnings": {}},
    source="x.log",
)


def shown(*logs: str, metadata: Metadata = METADATA, width: int = 80) -> list[str]:
    reader = NcclLogReader()
    for log in logs:
        reader.read(io.BytesIO(log.encode()))
    return printed(explain(reader.facts(), ["x.log"]), metadata, width)


def printed(report: Report, metadata: Metadata = METADATA, width: int = 80) -> list[str]:
    stream = io.StringIO()
    writer = TABLE.writer(Target(stream=stream), Presentation(width=width))
    writer.begin(metadata, ())
    writer.end(report)
    lines = stream.getvalue().splitlines()
    assert all(len(line) <= width or is_command(line) for line in lines)
    return lines


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_pairs_are_named_as_far_as_there_is_room(width: int) -> None:
    lines = shown(
        *Job(via=lambda a, b, r: between(a, b, r, inside="SHM/direct", across="NET/Socket/0")).logs(), width=width
    )
    assert any("SHM/direct" in line and "FAIL" in line for line in lines)
    assert any(line.endswith(("0→1, 1→0, 2→3, 3→2", ", ...", "FAIL")) for line in lines)


def test_many_kinds_of_communicators_are_cut_short() -> None:
    logs = [
        "".join(
            Job(version=(2, 21), id=f"0x{number:x}", handle=0x1000 * number, ranks=2, channels=number).log(rank)
            for number in range(1, 30)
        )
        for rank in range(2)
    ]
    lines = shown(*logs)
    assert "and 19 communicators more: --format csv --section transports" in lines
    assert len(lines) < 60


def test_a_communicator_that_nobody_used() -> None:
    lines = shown(
        *(
            Job(ranks=2).log(rank) + Job(ranks=2, id="0xdd", handle=0x9000, via=lambda a, b, r: None).log(rank)
            for rank in range(2)
        )
    )
    assert "communicator 0xdd: 2 ranks on 1 node" in lines
    assert "  no connection, because NCCL connects ranks when they first communicate" in lines
    assert lines[-1] == "verdict: PASS"


def test_missing_unknown_and_unnamed() -> None:
    job = Job(via=lambda a, b, r: None if r else "X/new")
    lines = shown(*job.logs()[:3])
    assert "communicator 0xabc1: 4 ranks on 2 nodes, 1 without a log" in lines
    assert "through host memory: 0 of 6 paths, as NCCL logged them; 6 unknown" in lines
    nameless = shown("".join(f"{job.head(0)}{line}\n" for line in job.connections(0)))
    assert "communicator without a name" in nameless


def test_where_nccl_takes_one_host_for_two() -> None:
    notes = {rank: [f"NCCL_HOSTID set by environment to half{rank // 2}"] for rank in range(4)}
    lines = shown(*Job(hosts=("vm", "vm"), notes_of=notes).logs())
    assert "rank  host  for NCCL  pid  GPU" in lines
    assert "   3  vm    half1     103  0000:1b:00.0" in lines


def test_lines_that_fit_several_communicators_name_a_few() -> None:
    logs = []
    for rank in range(2):
        events = [(number, event) for number in range(1, 6) for event in ("Init START", "Init COMPLETE")]
        jobs = {number: Job(ranks=2, id=f"0x{number}", handle=0x1000 * number) for number, _ in events}
        texts = [jobs[number].communicator(rank, event) for number, event in events]
        logs.append("".join(f"{jobs[1].head(rank)}{text}\n" for text in (*texts, *jobs[1].connections(rank))))
    assert "communicator 0x1 or 0x2 or 0x3 or one of 2 more" in shown(*logs)


def test_many_ranks_are_named_by_host() -> None:
    job = Job(ranks=32, per_node=8, hosts=[f"node{number:02}" for number in range(4)])
    assert "32 ranks on node00-03" in shown(*job.logs())


def test_what_nccl_warns_of() -> None:
    options = {**METADATA.options, "warnings": {"one": 1, "three": 3, "two": 2, "more": 1, "most": 1}}
    lines = shown(*Job().logs(), metadata=replace(METADATA, options=options))
    assert "  NCCL warns 3 times: three" in lines
    assert "  NCCL warns 2 times: two" in lines
    assert "  NCCL warns: one" in lines
    assert "  and 2 more warnings" in lines


def test_a_run_that_was_cut_short() -> None:
    lines = printed(Report(verdict=Verdict.ERROR, complete=False))
    assert lines[-1].startswith("verdict: ERROR: the run was cut short")


def test_rows_of_other_commands_are_refused() -> None:
    writer = TABLE.writer(Target(stream=io.StringIO()), Presentation())
    writer.begin(METADATA, ())
    with pytest.raises(TypeError, match="explain has no rows of CollectiveRow"):
        writer.row(ROW)
