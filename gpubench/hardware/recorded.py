"""Machines on disk: a folder with a snapshot a node (`nodes/HOST.json`), the facts of every rank (`ranks.jsonl`), and
what was measured there, a file a command (`p2p.jsonl`), with NCCL's log of every rank (`nccl/rank0.log`).
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gpubench.errors import UsageError, advising
from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.facts.snapshot import Snapshot
from gpubench.readers.documents.json_lines import json_line, read_json_line
from gpubench.readers.machines.snapshot import read as read_snapshot
from gpubench.readers.machines.snapshot import write_snapshot
from gpubench.readers.machines.snapshot_rules import check_rank

_NODES = "nodes"
_RANKS = "ranks.jsonl"
_LOGS = "nccl"
MOST_BYTES = 128 * 2**20
"""Of one file of a recording: the facts of thirty thousand ranks."""

MOST_SAMPLE_BYTES = 8 * MOST_BYTES
"""Of one file of samples: thirty thousand ranks that say of fifty rows when they came."""

_DIGITS = re.compile(r"(\d+)", re.ASCII)

_REASON, _ADVICE = (
    "the recording was edited by hand, cut off, or is of a newer gpubench",
    "record it again: --record DIR",
)
"""Of errors in a recording that say no more than what is wrong."""


def check_recordable(directory: Path) -> None:
    """Check that a recording can be written to a folder, which is left as it was.

    Raises UsageError where it cannot be made or written, or holds a recording already.
    """
    nodes = directory / _NODES
    if any(nodes.glob("*.json")):
        raise UsageError(
            f"--record {directory} holds a recording already",
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
    """Write nodes and ranks into a folder, which is made where there is none."""
    (directory / _NODES).mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    for snapshot in snapshots:
        name = _file_name(snapshot.host, taken)
        (directory / _NODES / f"{name}.json").write_text(write_snapshot(snapshot), encoding="utf-8")
    (directory / _RANKS).write_text("".join(map(json_line, ranks)), encoding="utf-8")


def write_nccl_logs(directory: Path, texts: Sequence[bytes]) -> None:
    """Add to a recording NCCL's log of every rank, for people and for `gpubench explain`."""
    for rank, text in enumerate(texts):
        if text:
            (directory / _LOGS).mkdir(exist_ok=True)
            (directory / _LOGS / f"rank{rank}.log").write_bytes(text)


@advising(reason=_REASON, next_step=_ADVICE)
def read_recording(directory: Path, host: str | None = None) -> tuple[list[Snapshot], list[RankFacts]]:
    """Nodes and ranks of a recording, in the order of the hosts' names; with `host`, of that host alone.

    Raises UsageError for no such folder, no recording in it, a file that cannot be read, or a host that is not in it.
    """
    paths = sorted((directory / _NODES).glob("*.json"), key=lambda path: _natural(path.stem))
    if not paths:
        raise UsageError(
            f"--replay {directory} holds no recording",
            expected=f"a folder that --record wrote, with {_NODES}/HOST.json in it",
            reason="it is another folder, or only a part of one was copied"
            if directory.exists()
            else "there is no such folder: it is mistyped, or relative to another directory",
            next_step=f"the same on the machine in question, with --record {directory}",
        )
    snapshots = [read_snapshot(_text(path), str(path)) for path in paths]
    ranks = list(_read_ranks(directory / _RANKS))
    if host is None:
        return snapshots, ranks
    mine = [snapshot for snapshot in snapshots if snapshot.host == host]
    if not mine:
        raise UsageError(
            f"--replay {directory} has no host {host}",
            expected=f"one of {', '.join(snapshot.host for snapshot in snapshots[:8])}",
            reason="under a launcher every host replays the node of its own name",
            next_step=f"gpubench topo --replay {directory} without mpirun shows them all",
        )
    return mine, [rank for rank in ranks if rank.host == host]


def _read_ranks(path: Path) -> Iterator[RankFacts]:
    for number, line in enumerate(_text(path).splitlines() if path.exists() else (), 1):
        rank = read_json_line(RankFacts, line, f"{path}, line {number}")
        check_rank(rank, f"{path}, line {number}")
        yield rank


@contextlib.contextmanager
def recording_samples(directory: Path, name: str) -> Iterator[Callable[[object], None]]:
    """Add a file of raw samples to a recording; what is called with a dataclass writes it, at once, as a line."""
    with (directory / name).open("x", encoding="utf-8", buffering=1) as file:
        yield lambda value: print(json_line(value), end="", file=file)


def read_samples(directory: Path, name: str, command: str) -> list[tuple[str, str]]:
    """The lines of a file of raw samples, each with its place; a last line that was cut off is left out.

    Raises UsageError where the recording has no such file, for another command made it, or the file cannot be read.
    """
    path = directory / name
    if not path.exists():
        raise UsageError(
            f"--replay {directory} holds no samples of {command}",
            expected=f"{name}, which gpubench {command} --record writes",
            reason="another command recorded it",
            next_step=f"gpubench {command} --record {directory}-{command} on the machine in question",
        )
    with advising(reason=_REASON, next_step=_ADVICE):
        *lines, _ = _text(path, MOST_SAMPLE_BYTES).split("\n")
    return [(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise UsageError(
                f"{path} has more than {most_bytes // 2**20} MiB, the most that is read",
                expected="a file that --record wrote",
            )
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", expected="a file that --record wrote") from error


def _file_name(host: str, taken: set[str]) -> str:
    """The host's name as a file's, with a number behind it where two hosts have the same."""
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", host).lstrip(".") or "node"
    name, number = stem, 1
    while name in taken:
        number += 1
        name = f"{stem}~{number}"
    taken.add(name)
    return name


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """node2 before node10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in _DIGITS.split(name)]
