"""Messages from ranks to their launcher over the socket, and lines that mpirun prints meanwhile."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.cli.commands.collective import SECTIONS
from gpubench.errors import GpubenchError
from gpubench.formats.table import fallback_lines
from gpubench.model.results.backends import BackendRow, MpiTrialRow, RefusedRow, WinnerRow
from gpubench.model.results.report import FINDINGS_SECTION, CauseRow, CollectiveRow, RankTimeRow, Table
from gpubench.model.results.scaling import ScalingRow
from gpubench.ranks import launch
from gpubench.ranks.channel import ChannelReceiver, read_report
from tests.formats.sample import METADATA, REPORT, ROW

CAUSE = CauseRow(
    id="shm-not-shared",
    evidence="ranks 0 and 1 have different /dev/shm",
    advice="docker run --ipc=host",
    paths=2,
    verdict="WARN",
    hosts=("n1",),
    title="containers of their own",
    confidence="proven",
    effects=("a network inside a node",),
    subject="n1",
    implied_by=None,
    settles="df /dev/shm",
    link="https://docs.nvidia.com",
)
BESIDE_PATHS = {
    CauseRow.section: Table(CauseRow.columns(), lambda: [CAUSE]),
    RankTimeRow.section: Table(RankTimeRow.columns(), list),
    WinnerRow.section: Table(WinnerRow.columns(), list),
    RefusedRow.section: Table(RefusedRow.columns(), list),
    BackendRow.section: Table(BackendRow.columns(), list),
    MpiTrialRow.section: Table(MpiTrialRow.columns(), list),
    ScalingRow.section: Table(ScalingRow.columns(), list),
}

SPEAKER = """
import sys
from msgspec.structs import replace
from gpubench.errors import UsageError
from gpubench.ranks.channel import ChannelSender
from tests.formats.sample import METADATA, REPORT, ROW
from tests.formats.test_fallback_text import report
from tests.ranks.launch.test_channel import BESIDE_PATHS
from tests.model.results.test_fallback import STAGED, path
print("hello from the job")
sender = ChannelSender(sys.argv[1])
sender.begin(METADATA)
sender.progress(0, 2, "1K")
for _ in range(int(sys.argv[2])):
    sender.row(ROW)
sender.end(replace(REPORT, sections=report(path(0, 1, STAGED)).sections | BESIDE_PATHS))
other = ChannelSender(sys.argv[1])
other.error(UsageError("seen", expected="e", reason="r", next_step="n", where="rank 1 on n1"))
other.close()
sender.close()
sys.stdout.write("no newline at the end")
"""


@pytest.mark.parametrize("length", [80, 100, 200])
def test_any_folder_for_temporary_files_will_do(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path.joinpath("t" * max(1, length - len(str(tmp_path)) - 1))
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with ChannelReceiver() as channel:
        assert Path(channel.path).is_socket()
    assert not Path(channel.path).parent.exists()


def test_everything_arrives_in_order() -> None:
    rows = 500  # more than a socket holds
    heard: list[dict[str, Any]] = []
    chatter: list[str] = []
    with ChannelReceiver() as channel:
        environment = dict(os.environ) | {"PYTHONPATH": os.getcwd()}  # noqa: PTH109
        job = launch.start([sys.executable, "-c", SPEAKER, channel.path, str(rows)], environment)
        for message in channel.messages(job):
            if isinstance(message, str):
                chatter.append(message)
            else:
                heard.append(message)
        assert job.stdout is not None
        job.stdout.close()
    assert job.returncode == 0
    assert chatter == ["hello from the job", "no newline at the end"]
    kinds = [message["kind"] for message in heard]
    kinds.remove("error")
    assert [kind for kind in kinds if kind != "hello"] == ["begin", "progress", *["row"] * rows, "end"]
    assert kinds[0] == "hello"
    heard = [message for message in heard if message["kind"] != "hello"]
    assert heard[0]["metadata"] == METADATA.to_record()
    assert CollectiveRow(**heard[2]["row"]) == ROW
    report = read_report(next(each for each in heard if each["kind"] == "end"))
    assert replace(report, sections={}) == REPORT
    assert {*report.sections, CollectiveRow.section, FINDINGS_SECTION} == set(SECTIONS), "none is lost on the way"
    causes = report.sections[CauseRow.section]
    assert isinstance(causes, Table)
    assert list(causes.rows()) == [CAUSE]
    line, *_ = fallback_lines(report)
    assert line.startswith("fallback: HOST-STAGED: ranks 0 → 1 through host memory over SHM/direct")
    error = GpubenchError.from_record(next(each for each in heard if each["kind"] == "error")["error"])
    assert (error.exit_code, error.where) == (2, "rank 1 on n1")
    assert str(error).splitlines() == ["rank 1 on n1: seen", "  expected: e", "  likely:   r", "  try:      n"]


def test_what_a_rank_did_not_finish_saying_is_no_message() -> None:
    dying = """
import socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
line.sendall(bytes([0, 0, 0, 99]) + b'{"kind": "ro')
"""
    with ChannelReceiver() as channel:
        job = launch.start([sys.executable, "-c", dying, channel.path], dict(os.environ))
        assert list(channel.messages(job)) == []
        assert job.stdout is not None
        job.stdout.close()


def test_a_line_that_is_open_is_heard_to_its_end_though_the_job_is_gone() -> None:
    """Watchdogs report late how their ranks ended."""
    late = """
import os, socket, sys, time
line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
job = os.getpid()
if os.fork() == 0:
    while os.path.exists(f"/proc/{job}"):
        time.sleep(0.01)
    data = b'{"kind": "lost"}'
    line.sendall(len(data).to_bytes(4, "big") + data)
"""
    with ChannelReceiver() as channel:
        job = launch.start([sys.executable, "-c", late, channel.path], dict(os.environ))
        assert list(channel.messages(job)) == [{"kind": "lost"}]
        assert job.stdout is not None
        job.stdout.close()
