"""Reading NCCL's log together with all log settings of a user."""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from gpubench.backends.nccl.debug_log import LogAccess, NcclLog, plan_log, shows
from gpubench.machine.host import list_names
from tests.fakes.nccl_log import HEAD, FakeNcclLog

OLD = 22105
CHANNEL = "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"
TUNING = "AllReduce: 1024 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}"


class Process:
    """A process with NCCL, and its stdout."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], version: int = 22809, conf: Mapping[str, str] | None = None
    ) -> None:
        self.environment = dict(environment)
        self._stdout = folder / "stdout"
        self.descriptor = os.open(self._stdout, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.nccl = FakeNcclLog(self.environment, self.descriptor, version, conf or {})
        self.settings = {**(conf or {}), **environment}

    def listen(self, ranks_on_node: int = 4) -> NcclLog:
        return NcclLog(self.nccl, self.settings, ranks_on_node, self.environment, self.descriptor)

    def start(self) -> None:
        """Write what NCCL writes for a new communicator and its first operation."""
        self.nccl.info("BOOTSTRAP", "Bootstrap: Using eth0")
        self.nccl.show_version()
        self.nccl.info("INIT|P2P", CHANNEL)
        self.operation()

    def operation(self) -> None:
        self.nccl.info("COLL", "AllReduce: opCount 0")
        self.nccl.info("TUNING", TUNING)

    def stdout(self) -> str:
        return self._stdout.read_text()

    def close(self) -> None:
        self.nccl.end()
        os.close(self.descriptor)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[list[Process]]:
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.close()


def process(
    made: list[Process], folder: Path, version: int = 22809, conf: Mapping[str, str] | None = None, **environment: str
) -> Process:
    made.append(Process(folder, environment, version, conf))
    return made[-1]


def messages(log: NcclLog) -> list[str]:
    return [line.decode().partition(" NCCL INFO ")[2] for line in log.lines()]


def line(text: str) -> str:
    return f"{HEAD} NCCL INFO {text}\n"


@pytest.mark.parametrize("version", [22403, 22809])
@pytest.mark.parametrize("level", [None, "", "nonsense", "NONE"])
def test_a_user_who_asked_for_nothing_sees_nothing(
    made: list[Process], tmp_path: Path, version: int, level: str | None
) -> None:
    own = process(made, tmp_path, version)
    if level is not None:
        own.environment["NCCL_DEBUG"] = own.settings["NCCL_DEBUG"] = level
    before = dict(own.environment)
    with own.listen() as log:
        own.start()
        assert log.is_readable()
        assert messages(log) == ["NCCL version 2.28.9+cuda13.0", CHANNEL, TUNING]
        own.operation()
        assert messages(log) == [TUNING]
        log.switch_off()
        own.operation()
        assert messages(log) == []
        assert log.no_tuning == ""
    assert own.nccl.resets == 1
    assert own.environment == before
    assert own.stdout() == ""
    assert list(tmp_path.iterdir()) == [tmp_path / "stdout"]


def test_nothing_stays_behind_where_the_run_breaks(made: list[Process], tmp_path: Path) -> None:
    own = process(made, tmp_path)
    descriptors = len(list_names(Path("/proc/self/fd")))

    def break_down() -> None:
        with own.listen():
            own.start()
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        break_down()
    own.nccl.warn("after the end")
    own.nccl.end()
    assert len(list_names(Path("/proc/self/fd"))) == descriptors
    assert (own.environment, own.nccl.resets) == ({}, 1)


@pytest.mark.parametrize("version", [OLD, 22403, 22809])
def test_a_user_who_asked_for_warnings_gets_them(made: list[Process], tmp_path: Path, version: int) -> None:
    own = process(made, tmp_path, version, NCCL_DEBUG="WARN")
    with own.listen() as log:
        own.start()
        own.nccl.warn("first")
        assert log.warnings() == ["first"]
        log.switch_off()
        assert own.stdout().count("NCCL WARN first") == 1
        own.nccl.warn("second")
    told = own.stdout()
    assert told.index("NCCL version 2.28.9+cuda13.0") < told.index("NCCL WARN first") < told.index("NCCL WARN second")
    assert told.count("\n[") + told.startswith("[") == 2
    assert "NCCL INFO" not in told


@pytest.mark.parametrize("version", [OLD, 22403, 22809])
def test_warnings_go_to_the_users_file_though_nccl_empties_it(
    made: list[Process], tmp_path: Path, version: int
) -> None:
    own = process(made, tmp_path, version, NCCL_DEBUG="warn", NCCL_DEBUG_FILE=str(tmp_path / "mine.%p"))
    with own.listen() as log:
        own.start()
        own.nccl.warn("first")
        log.switch_off()
        own.nccl.warn("second")
    text = (tmp_path / f"mine.{os.getpid()}").read_text()
    assert (text.count("NCCL WARN first"), text.count("NCCL WARN second")) == (1, 1)
    assert "NCCL INFO" not in text
    assert own.stdout() == ""


def test_a_user_who_asked_for_the_version_gets_it_at_stdout(made: list[Process], tmp_path: Path) -> None:
    own = process(made, tmp_path, NCCL_DEBUG="VERSION", NCCL_DEBUG_FILE=str(tmp_path / "unused"))
    with own.listen() as log:
        own.start()
        own.nccl.warn("not asked for")
        log.switch_off()
    assert own.stdout() == "NCCL version 2.28.9+cuda13.0\n"
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize("level", ["INFO", "info", "TRACE", "ABORT"])
def test_a_user_who_asked_for_everything_gets_it_live_and_so_do_we(
    made: list[Process], tmp_path: Path, level: str
) -> None:
    own = process(made, tmp_path, NCCL_DEBUG=level)
    with own.listen() as log:
        own.start()
        deadline = time.monotonic() + 300
        while CHANNEL not in own.stdout():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert own.stdout().endswith(line(CHANNEL)), "passed on while NCCL is still at it"
        assert log.is_readable()
        assert messages(log) == ["Bootstrap: Using eth0", "NCCL version 2.28.9+cuda13.0", CHANNEL]
        assert "TUNING is not among" in log.no_tuning
        own.nccl.warn("first")
        log.switch_off()
        assert own.stdout().count("NCCL WARN first") == 1
        own.nccl.info("INIT", "from now on directly")
    assert own.stdout().endswith(line("from now on directly"))
    assert own.stdout().count(CHANNEL) == 1
    assert own.environment == {"NCCL_DEBUG": level}


def test_a_user_who_asked_for_tuning_gives_us_algorithms(made: list[Process], tmp_path: Path) -> None:
    own = process(made, tmp_path, NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,TUNING")
    with own.listen() as log:
        own.start()
        assert messages(log) == ["NCCL version 2.28.9+cuda13.0", CHANNEL, TUNING]
        assert log.no_tuning == ""


def test_a_users_own_file_is_read_and_left_alone(made: list[Process], tmp_path: Path) -> None:
    own = process(made, tmp_path, NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=str(tmp_path / "%h.%p.log"))
    own.nccl.host = os.uname().nodename.split(".")[0]
    before = dict(own.environment)
    with own.listen() as log:
        assert own.environment == before
        own.start()
        assert log.is_readable()
        assert messages(log) == ["Bootstrap: Using eth0", "NCCL version 2.28.9+cuda13.0", CHANNEL]
        log.switch_off()
        own.nccl.info("INIT", "later")
        own.nccl.warn("and a warning")
        assert log.warnings() == ["and a warning"]
    text = next(tmp_path.glob(f"*.{os.getpid()}.log")).read_text()
    assert text.count(CHANNEL) == text.count("later") == text.count("NCCL WARN") == 1
    assert own.nccl.resets == 0
    assert own.stdout() == ""


def test_a_log_that_does_not_appear_is_said_so(made: list[Process], tmp_path: Path) -> None:
    own = process(made, tmp_path)
    own.nccl.opens_files = False
    with own.listen() as log:
        own.start()
        assert not log.is_readable()
        assert "did not open the log" in log.no_log
        assert log.lines() == []
    assert own.environment == {}
    no_file = process(made, tmp_path, NCCL_DEBUG="INFO", NCCL_DEBUG_FILE="/dev/null")
    with no_file.listen(1) as log:
        no_file.start()
        assert not log.is_readable()
        assert "/dev/null, NCCL's log, is not a readable file" in log.no_log
    unreadable = process(made, tmp_path, NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=str(tmp_path / "gone"))
    with unreadable.listen(1) as log:
        assert not log.is_readable()
        assert "is not a readable file" in log.no_log


def test_a_system_without_memory_files_is_measured_all_the_same(
    made: list[Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_name: str) -> int:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    own = process(made, tmp_path)
    with own.listen() as log:
        own.start()
        assert not log.is_readable()
        assert log.no_log == "this system cannot create a memory file for NCCL's log: Operation not permitted"
    assert (own.environment, own.nccl.resets, own.stdout()) == ({}, 0, "")


@pytest.mark.parametrize(
    ("settings", "ranks", "can_reset", "how", "said"),
    [
        ({}, 4, True, LogAccess.PRIVATE, ""),
        ({}, 4, False, LogAccess.PRIVATE, ""),
        ({"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": "/one"}, 4, True, LogAccess.PRIVATE, ""),
        ({"NCCL_DEBUG_FILE": "/one"}, 4, True, LogAccess.PRIVATE, ""),
        ({"NCCL_DEBUG": "INFO"}, 4, True, LogAccess.FORWARDED, ""),
        ({"NCCL_DEBUG": "INFO"}, 4, False, LogAccess.NOT, "NCCL_DEBUG=INFO sends the log of this NCCL to stdout"),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/l.%p"}, 4, False, LogAccess.USERS_FILE, ""),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/one"}, 4, True, LogAccess.NOT, "/one is one file for several"),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/one"}, 1, True, LogAccess.USERS_FILE, ""),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "COLL"}, 4, True, LogAccess.NOT, "=COLL leaves INIT out"),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "^INIT"}, 4, True, LogAccess.NOT, "leaves INIT out"),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "all"}, 4, True, LogAccess.FORWARDED, ""),
    ],
)
def test_what_the_user_set_decides(
    settings: dict[str, str], ranks: int, can_reset: bool, how: LogAccess, said: str
) -> None:
    chosen = plan_log(settings, ranks, can_reset=can_reset)
    assert chosen.how is how
    assert said in chosen.why_not
    assert bool(said) == bool(chosen.why_not)


@pytest.mark.parametrize(
    ("subsystems", "name", "shown"),
    [
        ("", "INIT", True),
        ("", "TUNING", False),
        ("init,Tuning", "TUNING", True),
        ("^TUNING", "INIT", True),
        ("^TUNING,NET", "TUNING", False),
        ("ALL", "TUNING", True),
        ("^ALL", "INIT", False),
    ],
)
def test_subsystems_read_as_nccl_reads_them(subsystems: str, name: str, shown: bool) -> None:
    assert shows(subsystems, name) is shown
