"""Two child processes of a KV transfer: answers, hangs and deaths; afterwards no process is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest

from gpubench.backends.kv_pair import ProcessTransfers, TransferProcess
from gpubench.backends.transfer_libraries import ucx_copies
from gpubench.errors import CouldNotMeasureError
from gpubench.model.paths.ucx import Allocation, UcxRoute
from gpubench.model.terms.operation import CopyGpu, Direction
from gpubench.ports.transfers import TransferCase
from tests.cli.running import ROOT, environment

SIZE = 2**20
CASE = TransferCase(Direction.WRITE, SIZE)
TO_HOST = TransferCase(Direction.WRITE, SIZE, to_host=True)
GPUS = [CopyGpu(device=f"GPU{index}", index=index, bus_id="", uuid=f"GPU-{index}", name="") for index in range(2)]


def worker(behavior: str) -> tuple[str, ...]:
    return sys.executable, "-m", "tests.fakes.transfer_worker", behavior


def transfers(behavior: str, library: Path | None = None, timeout_s: float = 5.0) -> ProcessTransfers:
    return ProcessTransfers(library, GPUS, SIZE, timeout_s, prefix=worker(behavior))


def processes_with(word: str) -> list[str]:
    """Return the processes that inherited a word in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if word.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


@pytest.fixture(autouse=True)
def no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(ROOT)
    mark = f"of-test-{uuid4()}"
    monkeypatch.setenv("GPUBENCH_TEST_MARK", mark)
    yield
    assert processes_with(mark) == []


def test_a_transfer_has_the_times_and_the_table_of_its_own_buffers() -> None:
    with transfers("answers").open((0, 1), Allocation.MALLOC) as opened:
        opened.clear(CASE, backwards=False)
        moved, to_host = (
            opened.move(case, backwards=True) for case in (CASE, TransferCase(Direction.WRITE, SIZE, 1, True))
        )
        assert opened.count_wrong(CASE, backwards=False) == 3
        first, _ = opened.ends
    assert (moved.seconds, moved.transfers, moved.wrong) == ((0.001,) * 5, 7, None)
    assert moved.chosen is not None
    assert moved.chosen.route is UcxRoute.PEER
    assert to_host.chosen is not None
    assert to_host.chosen.route is UcxRoute.EMULATED
    assert (first.ucx_files, first.exportable, first.pid_namespace) == (("/ucx/libucp.so.0",), True, 1)


def test_a_table_of_writes_is_no_evidence_for_reads() -> None:
    with transfers("answers").open((0, 1), Allocation.MALLOC) as opened:
        assert opened.move(TransferCase(Direction.READ, SIZE), backwards=False).chosen is None


@pytest.mark.parametrize("level", ["", "info"])
def test_what_ucx_says_is_printed_if_that_was_asked_for(
    level: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UCX_LOG_LEVEL", level) if level else monkeypatch.delenv("UCX_LOG_LEVEL", raising=False)
    with transfers("answers").open((0, 1), Allocation.MALLOC) as opened:
        opened.move(CASE, backwards=False)
    assert ("remote memory write" in capsys.readouterr().err) is bool(level)


@pytest.mark.parametrize(
    ("behavior", "said"),
    [
        ("hangs", "a process did not answer within 0.7 s during transfer"),
        ("forks", "a process did not answer within 0.7 s during transfer"),
        ("dies", "a process was ended by signal 9 during transfer: .*GPU has fallen off the bus"),
        ("fails", "UcxError: the transfer failed: Connection reset by remote peer"),
    ],
)
def test_a_transfer_that_fails_is_one_clear_error(behavior: str, said: str) -> None:
    opening = transfers(behavior, timeout_s=0.5).open((0, 1), Allocation.MALLOC)
    with opening as opened, pytest.raises(CouldNotMeasureError, match=said):
        opened.move(CASE, backwards=False)


def test_a_process_that_does_not_start_is_one_clear_error() -> None:
    with (
        pytest.raises(CouldNotMeasureError, match=r"ended with code 1 during open: libcuda.so.1: cannot open"),
        transfers("dies at the start").open((0, 1), Allocation.MALLOC),
    ):
        pass


def test_a_dead_process_is_an_error_at_the_next_command_and_closes(tmp_path: Path) -> None:
    process = TransferProcess(tmp_path / "log", {}, worker("dies"))
    with pytest.raises(CouldNotMeasureError):
        process.ask(30.0, "transfer")
    with pytest.raises(CouldNotMeasureError, match="ended by signal 9 during clear"):
        process.ask(30.0, "clear", "x" * 10**6)
    process.close()


def test_each_process_sees_only_its_own_gpu_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Noting(TransferProcess):
        def __init__(self, log: Path, environment: dict[str, str], prefix: tuple[str, ...] = ()) -> None:
            seen.append(environment)
            super().__init__(log, environment, prefix)

    monkeypatch.setattr("gpubench.backends.kv_pair.TransferProcess", Noting)
    with ProcessTransfers(None, GPUS, SIZE, 5.0, own_gpu_only=True, prefix=worker("answers")).open(
        (0, 1), Allocation.MALLOC
    ):
        pass
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == ["GPU-0", "GPU-1"]
    assert {each["UCX_PROTO_INFO"] for each in seen} == {"y"}


def test_processes_end_with_gpubench_even_if_it_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from gpubench.backends.kv_pair import TransferProcess\n"
        "started = TransferProcess(Path(sys.argv[1]), {})\n"
        "print(started._process.pid, flush=True); time.sleep(600)\n"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "log")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment()) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.5)
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{child}") and time.monotonic() < deadline:  # noqa: PTH110
        time.sleep(0.1)
    assert not Path(f"/proc/{child}").exists()


UCX = next(iter(ucx_copies(os.environ)), None)


@pytest.mark.skipif(UCX is None, reason="no UCX is installed: pip install libucx-cu13")
class TestUcx:
    """UCX itself, with host memory in place of GPU memory."""

    @pytest.mark.parametrize("direction", [Direction.WRITE, Direction.READ])
    @pytest.mark.parametrize("backwards", [False, True])
    @pytest.mark.parametrize("blocks", [1, 256])
    def test_data_arrive(self, direction: Direction, backwards: bool, blocks: int) -> None:
        case = TransferCase(direction, SIZE, blocks)
        with transfers("host", UCX).open((0, 1), Allocation.MALLOC) as opened:
            opened.clear(case, backwards=backwards)
            assert (opened.count_wrong(case, backwards=backwards) or 0) > SIZE // 16
            moved = opened.move(case, backwards=backwards)
            assert opened.count_wrong(case, backwards=backwards) == 0
            assert any("libucp" in file for file in opened.ends[0].ucx_files)
        assert len(moved.seconds) >= 5
        assert moved.transfers > len(moved.seconds)

    def test_a_peer_that_dies_is_an_error(self) -> None:
        with transfers("host", UCX).open((0, 1), Allocation.MALLOC) as opened:
            opened.move(CASE, backwards=False)
            os.kill(opened._workers[1]._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            with pytest.raises(CouldNotMeasureError, match=r"UcxError|did not answer within"):
                opened.move(CASE, backwards=False)

    def test_a_wrong_address_is_an_error(self, tmp_path: Path) -> None:
        process = TransferProcess(tmp_path / "log", {}, worker("host"))
        process.ask(60.0, "open", UCX, 0, Allocation.MALLOC, 64, 1)
        try:
            with pytest.raises(CouldNotMeasureError):
                process.ask(5.0, "connect", (b"AAAA", {"in": b"AAAA"}), {"in": 0})
        finally:
            process.close()

    def test_settings_that_leave_no_transport_are_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """UCX returns a status of one byte: read as an int, -16 was 240, and a later call crashed."""
        monkeypatch.setenv("UCX_TLS", "nothing")
        with (
            pytest.raises(CouldNotMeasureError, match="UcxError: ucp_init_version failed: No such device"),
            transfers("host", UCX).open((0, 1), Allocation.MALLOC),
        ):
            pass
