"""Read and write recordings of machines.

A recording is a directory with one snapshot per node (`nodes/HOST.json`) and the facts of every rank (`ranks.jsonl`).
It may also contain a sample file per command (`p2p.jsonl`, `libraries.jsonl`) and each rank's NCCL log
(`nccl/rank0.log`).
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path

from gpubench.errors import UsageError, add_advice, name_output
from gpubench.model.facts.process import LIBRARIES_VERSION, LibrariesFacts, RankFacts
from gpubench.model.facts.snapshot import Snapshot
from gpubench.readers import limits
from gpubench.readers.documents import check_version, json_line, open_file, read_json_line
from gpubench.readers.machines.snapshot import check_rank, write_snapshot
from gpubench.readers.machines.snapshot import read as read_snapshot

_NODES = "nodes"
_RANKS = "ranks.jsonl"
_LIBRARIES = "libraries.jsonl"
_EXPECTED = "a file that --record wrote"
_DIGITS = re.compile(r"(\d+)", re.ASCII)

_REASON, _ADVICE = (
    "the recording was edited by hand, is cut off, or comes from a newer gpubench",
    "record it again: --record DIR",
)
"""Likely reason and advice for errors in a recording, if there is nothing more specific."""


def check_recordable(directory: Path) -> None:
    """Check that a recording can be written to a directory, and leave the directory unchanged. Raise UsageError if
    it cannot.
    """
    nodes = directory / _NODES
    if any(nodes.glob("*.json")):
        raise UsageError(
            f"--record {directory} already has a recording",
            expected="a new or empty folder",
            next_step=f"rm -r {directory}, or name another",
        )
    missing = [folder for folder in (nodes, *nodes.parents) if not folder.exists()]
    try:
        nodes.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=nodes).close()
    except OSError as error:
        raise UsageError(
            f"--record {directory} cannot be written: {os.strerror(error.errno or 0)}",
            next_step="name a folder that you own",
        ) from error
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()


def write_recording(directory: Path, snapshots: Sequence[Snapshot], ranks: Sequence[RankFacts]) -> None:
    """Write nodes and ranks into a directory, which is created if needed. Raise OutputError if writing fails."""
    with name_output(directory):
        (directory / _NODES).mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    for snapshot in snapshots:
        name = _file_name(snapshot.host, taken)
        _write(directory / _NODES / f"{name}.json", write_snapshot(snapshot).encode())
    _write(directory / _RANKS, "".join(map(json_line, ranks)).encode())


def _write(path: Path, content: bytes) -> None:
    with name_output(path):
        path.write_bytes(content)


def write_libraries(directory: Path, hosts: Sequence[LibrariesFacts]) -> None:
    """Add each host's libraries to a recording. Raise OutputError if writing fails."""
    _write(directory / _LIBRARIES, "".join(map(json_line, hosts)).encode())


def read_libraries(directory: Path) -> list[LibrariesFacts]:
    """Read each host's libraries from a recording. Raise UsageError if they are missing or unreadable."""
    lines = read_samples(directory, _LIBRARIES, "topo")
    hosts = []
    with add_advice(reason=_REASON, next_step=_ADVICE):
        for line, where in lines:
            hosts.append(read_json_line(LibrariesFacts, line, where))
            check_version(hosts[-1].schema_version, LIBRARIES_VERSION, where)
    return hosts


def write_nccl_logs(directory: Path, texts: Sequence[bytes]) -> None:
    """Add each rank's NCCL log to a recording, for people and for `gpubench explain`. Raise OutputError if writing
    fails.
    """
    folder = directory / "nccl"
    for rank, text in enumerate(texts):
        if text:
            with name_output(folder):
                folder.mkdir(exist_ok=True)
            _write(folder / f"rank{rank}.log", text)


@add_advice(reason=_REASON, next_step=_ADVICE)
def read_recording(directory: Path, host: str | None = None) -> tuple[list[Snapshot], list[RankFacts]]:
    """Read a recording's nodes, sorted by file name, and its ranks. With `host`, return only that host's.

    Raise UsageError if there is no recording, or it is unreadable or too large.
    """
    paths = sorted(_node_files(directory), key=_natural_order)
    if not paths:
        raise UsageError(
            f"--replay {directory} has no recording",
            expected=f"a folder from --record that contains {_NODES}/HOST.json",
            reason="it is a different folder, or only part of it was copied"
            if directory.exists()
            else "there is no such folder, because it is mistyped or relative to another directory",
            next_step=f"run the command on the machine in question, with --record {directory}",
        )
    snapshots = list(_read_nodes(paths, directory))
    ranks = []
    path = directory / _RANKS
    for line, where in _lines(path, limits.MOST_RANKS_BYTES, limits.MOST_RECORDED_RANKS) if path.exists() else ():
        ranks.append(read_json_line(RankFacts, line, where))
        check_rank(ranks[-1], where)
    if host is None:
        return snapshots, ranks
    matching = [snapshot for snapshot in snapshots if snapshot.host == host]
    if not matching:
        raise UsageError(
            f"--replay {directory} has no host {host}",
            expected=f"one of {', '.join(snapshot.host for snapshot in snapshots[:8])}",
            reason="under a launcher every host replays the node with its own name",
            next_step=f"gpubench topo --replay {directory} without mpirun shows them all",
        )
    return matching, [rank for rank in ranks if rank.host == host]


def _node_files(directory: Path) -> list[Path]:
    """Return the node files, or [] if there is no directory for them. Raise UsageError if there are too many."""
    with contextlib.suppress(OSError), os.scandir(directory / _NODES) as entries:
        names = (entry.name for entry in entries if entry.name.endswith(".json"))
        found = list(islice(names, limits.MOST_NODES + 1))
        if len(found) > limits.MOST_NODES:
            raise _too_much(f"{directory / _NODES} has more than {limits.MOST_NODES} nodes")
        return [directory / _NODES / name for name in found]
    return []


def _read_nodes(paths: Sequence[Path], directory: Path) -> Iterator[Snapshot]:
    left = limits.MOST_NODES_BYTES
    for path in paths:
        text = "".join(line for line, _ in _lines(path, limits.MOST_NODE_BYTES, limits.MOST_NODE_BYTES))
        left -= len(text)
        if left < 0:
            raise _too_much(f"the nodes of {directory} have more than {_mib(limits.MOST_NODES_BYTES)}")
        yield read_snapshot(text, str(path))


@contextlib.contextmanager
def recording_samples(directory: Path, name: str) -> Iterator[Callable[[object], None]]:
    """Add a file of raw samples to a recording. Write each record immediately, as one line. Raise OutputError if
    writing fails.
    """
    path = directory / name
    with name_output(path):
        file = path.open("xb", buffering=0)

    def write(value: object) -> None:
        with name_output(path):
            left = json_line(value).encode()
            while left:
                left = left[file.write(left) :]

    with file:
        yield write


def read_samples(directory: Path, name: str, command: str) -> list[tuple[str, str]]:
    """Read a sample file's complete lines, each with its file name and line number. Raise UsageError if it is
    unreadable.
    """
    path = directory / name
    if not path.exists():
        raise UsageError(
            f"--replay {directory} has no samples for {command}",
            expected=f"{name}, which gpubench {command} --record writes",
            reason="another command recorded it",
            next_step=f"gpubench {command} --record {directory}-{command} on the machine in question",
        )
    with add_advice(reason=_REASON, next_step=_ADVICE):
        lines = _lines(path, limits.MOST_SAMPLES_BYTES, limits.MOST_SAMPLES)
        return [(line[:-1], where) for line, where in lines if line.endswith("\n")]


def _lines(path: Path, most_bytes: int, most_lines: int) -> Iterator[tuple[str, str]]:
    left = most_bytes
    try:
        with open_file(path, _EXPECTED, pipes=False) as file:
            for number in count(1):
                line = file.readline(left + 1)
                left -= len(line)
                if left < 0:
                    raise _too_much(f"{path} has more than {_mib(most_bytes)}")
                if not line.rstrip(b"\0"):  # end of the file, or zero padding after a power failure
                    return
                if number > most_lines:
                    raise _too_much(f"{path} has more than {most_lines} lines")
                yield line.decode(), f"{path}, line {number}"
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", expected=_EXPECTED) from error


def _too_much(seen: str) -> UsageError:
    return UsageError(
        f"{seen}, which is the limit",
        expected=_EXPECTED,
        reason="it is not a recording, or it has more machines than a single run",
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes // 2**20} MiB"


def _file_name(host: str, taken: set[str]) -> str:
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", host).lstrip(".") or "node"
    names = (stem if number == 1 else f"{stem}~{number}" for number in count(1))
    name = next(name for name in names if name not in taken)
    taken.add(name)
    return name


def _natural_order(path: Path) -> list[tuple[bool, int, str]]:
    """Return a sort key by which node2 comes before node10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in _DIGITS.split(path.stem)]
