"""Files that a stranger may prepare to break a reader, with the expected answers.

Every attack has its full size, for `pytest -m slow` and `benchmarks/hostile_files.py`, and a small size for tests that
lower the limits.
"""

import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.cli.running import ROOT

Arguments = list[str]

SNAPSHOT = ROOT / "tests" / "machines" / "h200x4-vm"
"""A valid recording"""

NEVER = "Traceback"
"""What no attack may make a command print"""


@dataclass(frozen=True)
class HostileFile:
    """An attack: `write` puts files into a folder and returns the command line. `code` and `said` are the answer."""

    name: str
    write: Callable[[Path], Arguments]
    code: int
    said: str


def _log(*messages: str, host: str = "a", pid: int = 1) -> str:
    return "".join(f"{host}:{pid}:{pid} [0] NCCL INFO {each}\n" for each in messages)


def _init(rank: int, size: int, number: int, event: str = "Init COMPLETE") -> str:
    where = f"comm {0x1000 + number:#x} rank {rank} nranks {size} cudaDev 0 nvmlDev 0 busId 1a000"
    return f"ncclCommInitRankConfig {where} commId {0x9000 + number:#x} - {event}"


def _explained(text: Callable[[], Iterable[str]]) -> Callable[[Path], Arguments]:
    """Return the command line for a log in one file."""

    def write(folder: Path) -> Arguments:
        path = folder / "job.log"
        with path.open("w") as file:
            file.writelines(text())
        return ["explain", str(path)]

    return write


def _named(command: Arguments, name: str, content: Callable[[], bytes]) -> Callable[[Path], Arguments]:
    """Return a command line that ends with a file with this content."""

    def write(folder: Path) -> Arguments:
        path = folder / name
        path.write_bytes(content())
        return [*(each.replace("OTHER", str(SNAPSHOT)) for each in command), str(path)]

    return write


def _pipe(*command: str) -> Callable[[Path], Arguments]:
    """Return a command line that ends with a pipe without a writer."""

    def write(folder: Path) -> Arguments:
        os.mkfifo(folder / "pipe")
        return [*command, str(folder / "pipe")]

    return write


def _loop(*command: str) -> Callable[[Path], Arguments]:
    """Return a command line that ends with a link to itself."""

    def write(folder: Path) -> Arguments:
        (folder / "loop").symlink_to("loop")
        return [*command, str(folder / "loop")]

    return write


def _recording(change: Callable[[Path], object]) -> Callable[[Path], Arguments]:
    """Return the command line for a recording with a change."""

    def write(folder: Path) -> Arguments:
        shutil.copytree(SNAPSHOT, folder / "recording")
        change(folder / "recording")
        return ["topo", "--replay", str(folder / "recording")]

    return write


def _replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink(missing_ok=True)
    make(path)


def _node_of(recording: Path) -> Path:
    return next((recording / "nodes").iterdir())


def _many_nodes(recording: Path, count: int = 100_000) -> None:
    node = _node_of(recording)
    for number in range(count):
        (recording / "nodes" / f"n{number}.json").symlink_to(node)


def _looped_nodes(recording: Path) -> None:
    shutil.rmtree(recording / "nodes")
    (recording / "nodes").symlink_to("nodes")


def _many_pairs(path: Path) -> None:
    plain = json.loads(path.read_text())
    pair = {"source": "GPU0", "destination": "GPU1", "path": "SYS"}
    plain["pairs"] = [pair] * 1_000_000
    path.write_text(json.dumps(plain))


def _many_logs(folder: Path, count: int = 100_000) -> Arguments:
    for number in range(count):
        (folder / f"{number}.log").write_text(_log("NET/Socket : Using [0]eth0:10.0.0.1<0>", pid=number))
    return ["explain", str(folder)]


def _gzip_of(piece: bytes, count: int) -> bytes:
    """Return gzip members with the same text, which is fast to write."""
    return gzip.compress(piece, 9) * count


def _matrix(gpus: int) -> bytes:
    names = [f"GPU{number}" for number in range(gpus)]
    rows = (
        "\t".join([name, *("X" if other == place else "SYS" for other in range(gpus))])
        for place, name in enumerate(names)
    )
    return ("\t" + "\t".join(names) + "\n" + "\n".join(rows) + "\n").encode()


def _nested(levels: int, opened: str, closed: str) -> str:
    return opened * levels + closed * levels


def _result(**changed: object) -> bytes:
    metadata: dict[str, object] = {
        "ranks": [], "options": {}, "profile": None, "gpubench_version": "1", "hosts": ["a"], "origin": "measured",
        "started_at": "", "libraries": {}, "environment": {}, "topology": None,
    }  # fmt: skip
    return json.dumps({"schema_version": 1, "metadata": metadata, "complete": True, **changed}).encode()


def _nested_result(levels: int) -> bytes:
    return b'{"schema_version": 1, "metadata": ' + _nested(levels, "[", "]").encode() + b"}"


_ROW = b"8 2 float sum -1 1 1 1 0 1 1 1 0\n"


def _twice(name: str, content: Callable[[], bytes]) -> Callable[[Path], Arguments]:
    """Return the command line that compares a file with itself."""

    def write(folder: Path) -> Arguments:
        (folder / name).write_bytes(content())
        return ["compare", str(folder / name), str(folder / name)]

    return write


def _many_ranks(claimed: int, communicators: int) -> Iterable[str]:
    return (_log(_init(0, claimed, number)) for number in range(communicators))


MANY = 300_000

LOGS = (
    HostileFile("2,000,000,000 ranks", _explained(lambda: _many_ranks(2_000_000_000, 1)), 3, "2000000000"),
    HostileFile("1,000 communicators of 1,000,000 ranks", _explained(lambda: _many_ranks(1_000_000, 1000)), 3, "ranks"),
    HostileFile("300,000 communicators", _explained(lambda: _many_ranks(2, MANY)), 3, "communicators"),
    HostileFile(
        "300,000 communicators of one rank each, NCCL 2.16",
        _explained(
            lambda: (
                _log(f"comm {0x1000 + n:#x} rank 0 nranks 2 cudaDev 0 busId 1a000 - Init COMPLETE", pid=n)
                for n in range(MANY)
            )
        ),
        3,
        "communicators",
    ),
    HostileFile(
        "300,000 hosts", _explained(lambda: (_log(_init(0, 2, 1), host=f"h{n}") for n in range(MANY))), 3, "processes"
    ),
    HostileFile(
        "300,000 threads",
        _explained(lambda: (f"a:1:{n} [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\n" for n in range(MANY))),
        3,
        "threads",
    ),
    HostileFile(
        "300,000 variables",
        _explained(lambda: (_log(f"NCCL_V{n} set by environment to {n}") for n in range(MANY))),
        3,
        "settings",
    ),
    HostileFile(
        "300,000 warnings", _explained(lambda: (f"a:1:1 [0] NCCL WARN w{n}\n" for n in range(MANY))), 3, "warnings"
    ),
    HostileFile(
        "1,000,000 pairs of ranks before any communicator",
        _explained(
            lambda: (
                f"a:1:1 [0] NCCL INFO Channel 00/0 : {n % 1000}[0] -> {n // 1000 + 5000}[0] via P2P/IPC\n"
                for n in range(1_000_000)
            )
        ),
        0,
        "",
    ),
    HostileFile(
        "300,000 channels that may belong to several communicators",
        _explained(
            lambda: (
                _log(*(_init(0, 1_000, number) for number in range(8))),
                *(
                    f"a:1:2 [0] NCCL INFO Channel {n % 64:02}/0 : {n % 1000}[0] -> {n // 999 % 1000}[0] via P2P/IPC\n"
                    for n in range(MANY)
                ),
            )
        ),
        0,
        "",
    ),
    HostileFile("100,000 files", _many_logs, 3, "files"),
    HostileFile("a pipe without a writer", _pipe("explain"), 2, "without a writer"),
    HostileFile("/dev/zero", lambda _: ["explain", "/dev/zero"], 2, "/dev/zero"),
    HostileFile("a symlink loop", _loop("explain"), 2, "loop"),
    HostileFile(
        "1 GiB of zeros in a gzip", _named(["explain"], "a.gz", lambda: _gzip_of(b"\0" * 2**26, 16)), 2, "no line end"
    ),
    HostileFile(
        "1 GiB of empty lines in a gzip", _named(["explain"], "a.gz", lambda: _gzip_of(b"\n" * 2**26, 16)), 3, ""
    ),
    HostileFile(
        "1 GiB of lines of one letter in a gzip",
        _named(["explain"], "a.gz", lambda: _gzip_of(b"x\n" * 2**25, 16)),
        3,
        "",
    ),
    HostileFile(
        "16 MiB of heads without an end",
        _named(["explain"], "a.log", lambda: (b"a" * 500 + b"!:1:1 [0] NCCL INFO x\n") * 2**15),
        3,
        "",
    ),
    HostileFile(
        "16 MiB of lines of 3,000 messages",
        _named(["explain"], "a.log", lambda: (b" NCCL INFO " * 2900 + b"\n") * 500),
        3,
        "",
    ),
)

MACHINES = (
    HostileFile("a pipe without a writer", _pipe("topo", "--from"), 2, "without a writer"),
    HostileFile("/dev/zero", lambda _: ["topo", "--from", "/dev/zero"], 2, "/dev/zero"),
    HostileFile("a symlink loop", _loop("topo", "--from"), 2, "symbolic links"),
    HostileFile(
        "JSON nested 200,000 deep",
        _named(["topo", "--from"], "a.json", lambda: b'{"a":' + _nested(200_000, "[", "]").encode() + b"}"),
        2,
        "deep",
    ),
    HostileFile(
        "JSON nested 950 deep",
        _named(
            ["topo", "--from"],
            "a.json",
            lambda: b'{"schema_version": 1, "host": ' + _nested(950, "[", "]").encode() + b"}",
        ),
        2,
        "deep",
    ),
    HostileFile(
        "XML nested 200,000 deep",
        _named(["topo", "--from"], "a.xml", lambda: _nested(200_000, "<system>", "</system>").encode()),
        2,
        "deep",
    ),
    HostileFile(
        "XML of 500,000 elements",
        _named(["topo", "--from"], "a.xml", lambda: b"<system>" + b"<cpu/>" * 500_000 + b"</system>"),
        2,
        "elements",
    ),
    HostileFile("a matrix of 2,000 GPUs", _named(["topo", "--from"], "a.txt", lambda: _matrix(2_000)), 2, "MiB"),
    HostileFile("a matrix of 900 GPUs", _named(["topo", "--from"], "a.txt", lambda: _matrix(900)), 2, "128"),
    HostileFile(
        "a line of GPUs without an end",
        _named(["topo", "--from"], "a.txt", lambda: (b"GPU 1: a" * 1000 + b"\n") * 500),
        2,
        "",
    ),
    HostileFile(
        "rows of a table without an end",
        _named(["topo", "--from"], "a.txt", lambda: (b"|  1  a" * 1000 + b"\n") * 500),
        2,
        "",
    ),
    HostileFile("100,000 nodes in a recording", _recording(_many_nodes), 2, "nodes"),
    HostileFile("a pipe in a recording", _recording(lambda path: _replaced(_node_of(path), os.mkfifo)), 2, "pipe"),
    HostileFile(
        "a pipe for the ranks of a recording",
        _recording(lambda path: _replaced(path / "ranks.jsonl", os.mkfifo)),
        2,
        "pipe",
    ),
    HostileFile(
        "/dev/zero in a recording",
        _recording(lambda path: _replaced(_node_of(path), partial(os.symlink, "/dev/zero"))),
        2,
        "",
    ),
    HostileFile(
        "a symlink loop in a recording",
        _recording(lambda path: _replaced(_node_of(path), partial(os.symlink, "vm.json"))),
        2,
        "symbolic links",
    ),
    HostileFile("a folder of nodes that is a loop", _recording(_looped_nodes), 2, ""),
    HostileFile("1,000,000 pairs in a snapshot", _recording(lambda path: _many_pairs(_node_of(path))), 2, ""),
    HostileFile(
        "40,000,000 empty lists in a snapshot",
        _recording(lambda path: _node_of(path).write_text('{"a": [' + "[]," * 40_000_000 + "[]]}")),
        2,
        "",
    ),
    HostileFile(
        "40,000,000 lines of ranks",
        _recording(lambda path: (path / "ranks.jsonl").write_text("[]\n" * 40_000_000)),
        2,
        "",
    ),
)

RESULTS = (
    HostileFile(
        "a pipe without a writer",
        lambda path: [*_pipe("compare")(path), str(SNAPSHOT / "topo.json")],
        2,
        "without a writer",
    ),
    HostileFile("/dev/zero", lambda _: ["compare", "/dev/zero", "/dev/zero"], 2, "/dev/zero"),
    HostileFile("a symlink loop", lambda path: [*_loop("compare")(path), "b.json"], 2, "symbolic links"),
    HostileFile("JSON nested 200,000 deep", _twice("a.json", lambda: _nested_result(200_000)), 2, "deep"),
    HostileFile("JSON nested 950 deep", _twice("a.json", lambda: _nested_result(950)), 2, "deep"),
    HostileFile(
        "40,000,000 empty lists",
        _twice("a.json", lambda: b'{"schema_version": 1, "rows": [' + b"[]," * 30_000_000 + b"[]]}"),
        2,
        "",
    ),
    HostileFile(
        "a number of 4,000 digits",
        _twice(
            "a.json",
            lambda: _result(rows=[], schema_version=1).replace(
                b'"options": {}', b'"options": {"a": ' + b"9" * 4000 + b"}"
            ),
        ),
        2,
        "digits",
    ),
    HostileFile(
        "100,000,000 columns", _twice("a.csv", lambda: b"collective,backend" + b"," * 100_000_000 + b"\n"), 2, ""
    ),
    HostileFile(
        "100,000,000 cells", _twice("a.csv", lambda: b"collective,backend\n" + (b"," * 2000 + b"\n") * 50_000), 2, ""
    ),
    HostileFile(
        "100 MiB of empty lines in JSON Lines",
        _twice("a.jsonl", lambda: b'{"kind": "metadata"}' + b"\n" * 100 * 2**20),
        2,
        "",
    ),
    HostileFile(
        "OSU's line of buffers again and again",
        _twice("a.txt", lambda: b"# OSU MPI Allreduce Latency Test v7\n" + b"# Send Buffer on HOST " * 50_000),
        2,
        "",
    ),
    HostileFile(
        "titles of a terminal without an end", _twice("a.txt", lambda: b"# Using devices\n" + b"\x1b]" * 2**19), 2, ""
    ),
    HostileFile(
        "100 MiB of rows of nccl-tests", _twice("a.txt", lambda: b"# Using devices\n" + _ROW * 3_500_000), 2, ""
    ),
    HostileFile(
        "100 MiB of lines of nccl-tests", _twice("a.txt", lambda: b"# Using devices\n" + b"x\n" * 50_000_000), 2, ""
    ),
)

PROFILES = (
    HostileFile("a pipe without a writer", lambda path: _pipe("profiles", "lint")(path), 2, "pipe"),
    HostileFile("/dev/zero", lambda _: ["profiles", "lint", "/dev/zero"], 2, "/dev/zero"),
    HostileFile("a symlink loop", _loop("profiles", "lint"), 2, "symbolic links"),
    HostileFile(
        "TOML nested 200,000 deep",
        _named(["profiles", "lint"], "a.toml", lambda: b"a = " + _nested(200_000, "[", "]").encode()),
        2,
        "KiB",
    ),
    HostileFile(
        "TOML nested 20,000 deep",
        _named(["profiles", "lint"], "a.toml", lambda: b"a = " + _nested(20_000, "[", "]").encode()),
        2,
        "deep",
    ),
    HostileFile(
        "TOML of 20,000 dotted keys",
        _named(["profiles", "lint"], "a.toml", lambda: b".".join([b"a"] * 20_000) + b" = 1"),
        2,
        "",
    ),
    HostileFile(
        "a whole number of 5,000 digits",
        _named(["profiles", "lint"], "a.toml", lambda: b"a = " + b"9" * 5000),
        2,
        "digits",
    ),
    HostileFile(
        "100 MiB of TOML", _named(["profiles", "lint"], "a.toml", lambda: b"# comment\n" * 10 * 2**20), 2, "KiB"
    ),
)

HOSTILE = {"logs": LOGS, "machines": MACHINES, "results": RESULTS, "profiles": PROFILES}
"""By kind of reader"""
