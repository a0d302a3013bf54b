"""Logs beyond the limits of what is read: what was read is kept, and the report names the limit."""

import io
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from gpubench.errors import UsageError
from gpubench.measure.explain.report import explain
from gpubench.model.paths.nccl_log import LogFacts
from gpubench.model.terms.verdict import Verdict
from gpubench.readers import limits
from gpubench.readers import limits as document_limits
from gpubench.readers.nccl_log.attribution import Comm, Thread
from gpubench.readers.nccl_log.files import read_logs
from gpubench.readers.nccl_log.stream import NcclLogReader
from tests.fakes.nccl_logs import Job

WHOLE = "".join(Job(ranks=4).logs())


def init(number: int, *, size: int = 2, rank: int = 0, host: str = "a", pid: int = 1, tid: int = 1) -> str:
    where = f"comm {0x1000 + number:#x} rank {rank} nranks {size} cudaDev 0 nvmlDev 0 busId 1a000"
    return f"{host}:{pid}:{tid} [0] NCCL INFO ncclCommInitRank {where} commId {9 + number:#x} - Init START\n"


def without_id(number: int) -> str:
    return f"a:{number}:1 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1a000 - Init COMPLETE\n"


def channel(source: int, destination: int, pid: int = 1) -> str:
    return f"a:{pid}:1 [0] NCCL INFO Channel 00/0 : {source}[0] -> {destination}[0] via P2P/IPC\n"


def read(*parts: str) -> LogFacts:
    """What is in a log whose parts are blocks that a file is read in."""
    reader, waiting = NcclLogReader(), [part.encode() for part in parts]

    class Blocks(io.BytesIO):
        def read(self, _size: int | None = -1, /) -> bytes:
            return waiting.pop(0) if waiting else b""

    reader.read(Blocks())
    return reader.facts()


@pytest.mark.parametrize(
    ("limit", "lines", "said"),
    [
        ("MOST_PROCESSES", (init(1, host=f"h{n}") for n in range(9)), "4 processes"),
        ("MOST_THREADS_OF_A_PROCESS", (init(1, tid=n) for n in range(9)), "4 threads of a process"),
        ("MOST_COMMS", (init(n, pid=n) for n in range(9)), "4 ranks of communicators"),
        ("MOST_COMMS_OF_A_PROCESS", (init(n) for n in range(9)), "4 communicators of a process"),
        ("MOST_COMMUNICATORS", (init(n) for n in range(9)), "4 communicators, of "),
        ("MOST_PLACES", (init(n) for n in range(9)), "communicators, of 4 ranks together"),
        ("MOST_LOG_RANKS", [init(77, size=9)], "4 ranks of one communicator"),
        ("MOST_WITHOUT_ID", map(without_id, range(9)), "4 communicators without an id"),
        ("MOST_WITHOUT_ID", (channel(0, 1, pid=n) for n in range(9)), "4 communicators without an id"),
        ("MOST_EARLY_OF_A_THREAD", (channel(n, n + 1) for n in range(9)), "4 ranks without a communicator"),
        ("MOST_SETTINGS", (f"a:1:1 [0] NCCL INFO NCCL_V{n} set to 1\n" for n in range(9)), "4 different settings"),
        ("MOST_REMARKS", (f"a:1:1 [0] NCCL INFO DMA-BUF is available on GPU device {n}\n" for n in range(9)), "4 rem"),
        ("MOST_WARNINGS", (f"a:1:1 [0] NCCL WARN w{n}\n" for n in range(9)), "4 different warnings"),
        (
            "MOST_TELLERS",
            (f"a:{n}:1 [0] NCCL INFO NCCL_V set to 1\n" for n in range(9)),
            "4 distinct lines of different",
        ),
        (
            "MOST_AMBIGUOUS",
            [*(init(n, size=9) for n in range(5)), channel(0, 1).replace(":1:1 ", ":1:2 ")],
            "4 channels",
        ),
        ("MOST_LOG_BYTES", [WHOLE], "4 bytes"),
        ("MOST_LOG_LINES", [WHOLE], "4 lines"),
    ],
)
def test_beyond_a_limit_the_report_names_it(
    limit: str, lines: Iterable[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, limit, 4)
    facts = read("".join(lines), WHOLE, WHOLE)
    assert any(said in each.most for each in facts.limits), facts.limits
    report = explain(facts, ["job.log"])
    assert any(each.id == "log-limit" and said in each.expected for each in report.findings)
    assert report.verdict not in (Verdict.PASS, Verdict.SKIP)


def test_what_was_read_before_a_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_COMMS", 8)
    facts = read(WHOLE, "".join(init(n, pid=n + 1) for n in range(9)), WHOLE)
    assert (facts.communicators[0].size, facts.lines) == (4, WHOLE.count("\n") + 9)


def test_pairs_are_counted_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_LOG_PAIRS", 4)
    monkeypatch.setattr("gpubench.readers.nccl_log.stream._BYTES_BETWEEN_PAIRS", 1)
    facts = read(WHOLE, WHOLE, WHOLE)
    assert [each.most for each in facts.limits] == ["4 connections of a rank with a peer"]


def test_seconds_of_reading_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_LOG_SECONDS", 0.0)
    assert read(WHOLE, WHOLE).limits[0].most == "0 seconds of reading"


def test_a_whole_log_reaches_none() -> None:
    assert read(WHOLE).limits == ()


def test_files_beyond_the_most_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_LOG_FILES", 2)
    for name in "abcd":
        (tmp_path / name).write_text(WHOLE)
    reader = NcclLogReader()
    assert len(read_logs([str(tmp_path)], reader, io.BytesIO())) == 2
    assert reader.facts().limits[0].most == "2 files"


def test_a_line_without_an_end_is_given_up_and_others_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_BYTES_WITHOUT_LINE_END", 2**20)
    (tmp_path / "a").write_bytes(bytes(5 * 2**20))
    with pytest.raises(UsageError, match="has no line end in 64 MiB"):
        read_logs([str(tmp_path)], NcclLogReader(), io.BytesIO())
    (tmp_path / "b").write_text(WHOLE)
    reader = NcclLogReader()
    read_logs([str(tmp_path)], reader, io.BytesIO())
    assert reader.facts().communicators[0].size == 4
    assert "no line end" in reader.facts().limits[0].seen


def test_a_pipe_that_nobody_writes_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_limits, "SECONDS_WITHOUT_WRITER", 0.05)
    monkeypatch.setattr(document_limits, "SECONDS_SILENT", 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is a pipe without a writer"):
        read_logs([str(tmp_path / "pipe")], NcclLogReader(), io.BytesIO())
    both = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        with pytest.raises(UsageError, match="is a pipe whose writer sends nothing"):
            read_logs([str(tmp_path / "pipe")], NcclLogReader(), io.BytesIO())
        os.write(both, WHOLE.encode())
        reader = NcclLogReader()
        read_logs([str(tmp_path / "pipe")], reader, io.BytesIO())
        assert reader.facts().communicators[0].size == 4
        assert "writer sends nothing" in reader.facts().limits[0].seen
    finally:
        os.close(both)


@pytest.mark.parametrize("has_thread", [False, True])
def test_the_work_for_communicators_of_one_process_grows_with_their_number_and_not_with_its_square(
    monkeypatch: pytest.MonkeyPatch, *, has_thread: bool
) -> None:
    tried = 0
    may_write, forget = Comm.may_write, Thread.forget_caches

    def counted(comm: Comm, rank: int, device: str, peer: int) -> bool:
        nonlocal tried
        tried += 1
        return may_write(comm, rank, device, peer)

    def counted_thread(thread: Thread) -> None:
        nonlocal tried
        tried += 1
        forget(thread)

    monkeypatch.setattr(Comm, "may_write", counted)
    monkeypatch.setattr(Thread, "forget_caches", counted_thread)
    communicators, lines = 400, list[str]()
    for number in range(communicators):
        complete = init(number, tid=number if has_thread else 1).replace("Init START", "Init COMPLETE")
        lines.append(complete + channel(0, 1).replace(":1:1 ", f":1:{number} " if has_thread else ":1:1 "))
    facts = read("".join(lines))
    assert sum(len(each.connections.ranks[0]) for each in facts.communicators) == communicators
    assert tried < 20 * communicators
