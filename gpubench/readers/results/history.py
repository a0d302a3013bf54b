"""Reads a user's stored results: folders of dated results, past runs in such a folder, and named baselines."""

import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from gpubench.errors import UsageError
from gpubench.model.results import history
from gpubench.model.results.report import Metadata
from gpubench.model.terms.verdict import Verdict
from gpubench.readers.documents import load_json
from gpubench.readers.registry import read_results
from gpubench.readers.results.gpubench_json import check_version

_EXPECTED = "the output of gpubench --output FOLDER/"
_HOW_TO_KEEP = "gpubench allreduce --output results/ keeps one there"
_END_OF_METADATA = re.compile(r"  \},?\s*")
_BEGINNING_OF_METADATA = '  "metadata": {'
_MOST_HEAD_BYTES = 16 * 2**20  # 1,000 ranks have 300 KB of metadata


class Kept(Struct, frozen=True):
    """The file names in a folder: dated results (newest first), and all other visible files."""

    folder: Path
    names: tuple[history.DatedName, ...]
    others: tuple[str, ...]

    def path(self, name: history.DatedName) -> Path:
        return self.folder / str(name)


def list_results(folder: Path) -> Kept:
    """List the results in a folder by their file names. Hidden files are skipped, because they are still being
    written.

    Raises UsageError if the folder is missing or cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            texts = sorted(entry.name for entry in entries if not entry.name.startswith("."))
    except OSError as error:
        raise _no_folder(folder, error) from None
    dated = {text: history.DatedName.parse(text) for text in texts}
    names = sorted((name for name in dated.values() if name is not None), reverse=True)
    return Kept(folder, tuple(names), tuple(text for text, name in dated.items() if name is None))


def _no_folder(folder: Path, error: OSError) -> UsageError:
    seen = f"{folder} cannot be read: {os.strerror(error.errno or 0)}"
    reason = "its owner or mode forbids it, or its disk is failing"
    next_step = f"ls -ld {folder}"
    if isinstance(error, NotADirectoryError):
        seen, reason = f"{folder} is not a folder", "it should be a single result"
        next_step = f"gpubench compare BASE {folder} compares two files"
    elif isinstance(error, FileNotFoundError):
        seen, reason = f"there is no folder {folder}", "the path is mistyped, or nothing was kept yet"
        next_step = _HOW_TO_KEEP
    return UsageError(seen, expected="a folder of dated results", reason=reason, next_step=next_step)


def read_head(path: Path) -> history.ResultHead:
    """Read the metadata and verdict of a result. Its rows are not read if gpubench itself wrote the file.

    Raises UsageError if the file cannot be read, is not a gpubench result, or has a newer schema version.
    """
    with _naming(path):
        document = load_json(_beginning(path))
        if not isinstance(document, dict):
            raise ValueError("not a JSON object")
        check_version(document.get("schema_version"), str(path))
        return history.ResultHead.of(
            document["metadata"],
            path.name,
            Verdict(document["verdict"]),
            complete=document["complete"] is True,
        )


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {os.strerror(error.errno or 0)}", expected=_EXPECTED) from None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{path} is not a result: {type(error).__name__}: {error}",
            expected=_EXPECTED,
            reason="the file was cut off, or edited by hand",
        ) from None


def _beginning(path: Path) -> str:
    """Return the JSON of a document up to the end of its metadata. In another layout, return the whole document."""
    lines: list[str] = []
    read_bytes, within = 0, False
    kind = path.stat().st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        # Reading a pipe without a writer would block forever.
        raise ValueError("a pipe, socket or device of that name")
    with path.open(encoding="utf-8") as file:
        while read_bytes < _MOST_HEAD_BYTES and (line := file.readline(_MOST_HEAD_BYTES)):
            lines.append(line)
            read_bytes += len(line)
            within = within or line.startswith(_BEGINNING_OF_METADATA)
            if within and _END_OF_METADATA.fullmatch(line):
                lines[-1] = "  }\n}\n"
                return "".join(lines)
    if not lines:
        raise UsageError(f"{path} is empty", expected=_EXPECTED, reason="its run has just started, or it crashed")
    if read_bytes >= _MOST_HEAD_BYTES:
        raise ValueError(f"its metadata do not end within {_MOST_HEAD_BYTES // 2**20} MiB")
    return "".join(lines)


MOST_RESULTS_LOOKED_AT = 200  # Results per command and host whose metadata are read
MOST_RESULTS_READ = 30  # Results whose rows are read
MOST_BYTES_OF_A_RESULT = 32 * 2**20  # Size of one result. A sweep over 1,000 ranks has a few MiB
MOST_SECONDS = 3.0  # Time for reading results, half of it for their metadata, because all ranks wait meanwhile
T = TypeVar("T")


def past_figures(folder: Path, metadata: Metadata) -> history.PastFigures:
    """Return the values in earlier results of the same command on the same machine with the same settings.

    Unreadable files are skipped and counted. Raises UsageError if the folder cannot be read.
    """
    reader = _Reader(
        list_results(folder), history.ResultHead.of(metadata.to_record(), "", Verdict.ERROR, complete=False)
    )
    results = list(reader.results(history.DatedName.format_hosts(metadata.hosts)))
    shown = str(folder).rstrip("/") + "/"
    return history.PastFigures.of(results, reader.own, shown, reader.left_out)


def newest_and_spread(newest_first: Sequence[T], most: int) -> list[T]:
    """Select `most` results: one half are the newest, the other half are spread evenly over the older ones.

    The older results show a slow decline.
    """
    if len(newest_first) <= most:
        return list(newest_first)
    recent = most - most // 2
    older = newest_first[recent:]
    last, steps = len(older) - 1, max(1, most // 2 - 1)
    return [*newest_first[:recent], *(older[number * last // steps] for number in range(most // 2))]


class _Reader:
    def __init__(self, kept: Kept, own: history.ResultHead) -> None:
        self._kept, self.own = kept, own
        self._reasons: list[tuple[str, str]] = []
        self._not_opened = 0
        self._began_at = time.monotonic()

    @property
    def left_out(self) -> tuple[history.LeftOut, ...]:
        """The skipped results, counted by reason."""
        more = (
            (history.LeftOut("not opened, because there are too many or the disk is slow", "", self._not_opened),)
            if self._not_opened
            else ()
        )
        return (*history.count_reasons(self._reasons), *more)

    def results(self, host: str) -> Iterator[history.PastResult]:
        command_record = [name for name in self._kept.names if name.command == self.own.command]
        others = [name for name in command_record if name.host != host]
        self._reasons += [("of another machine", f"{name.host}, not {host}") for name in others]
        own = [name for name in command_record if name.host == host]
        fit = [
            found
            for name in self._bounded(own, MOST_RESULTS_LOOKED_AT, MOST_SECONDS / 2)
            if (found := self._fit(name)) is not None
        ]
        for name, head in self._bounded(fit, MOST_RESULTS_READ, MOST_SECONDS):
            yield from self._read(name, head)

    def _bounded(self, newest_first: Sequence[T], most: int, seconds: float) -> Iterator[T]:
        """Yield at most `most` results, and stop `seconds` after the reader was created."""
        chosen = newest_and_spread(newest_first, most)
        self._not_opened += len(newest_first) - len(chosen)
        for number, result in enumerate(chosen):
            if time.monotonic() > self._began_at + seconds:
                self._not_opened += len(chosen) - number
                return
            yield result

    def _fit(self, name: history.DatedName) -> tuple[history.DatedName, history.ResultHead] | None:
        """Read the metadata of a result. Return None if it is not comparable with this run, or is this run itself."""
        try:
            head = read_head(self._kept.path(name))
        except UsageError:
            self._reasons.append(self._why_unread(name))
            return None
        unfit = history.why_unfit(head, self.own)
        if unfit is not None and head.run_id != self.own.run_id:
            self._reasons.append(unfit)
        return (name, head) if unfit is None and head.run_id != self.own.run_id else None

    def _why_unread(self, name: history.DatedName) -> tuple[str, str]:
        path = self._kept.path(name)
        with suppress(OSError):
            if path.is_file() and path.stat().st_size == 0:
                return history.CUT_SHORT, ""
        return "that cannot be read", str(name)

    def _read(self, name: history.DatedName, head: history.ResultHead) -> Iterator[history.PastResult]:
        path = self._kept.path(name)
        try:
            if path.stat().st_size > MOST_BYTES_OF_A_RESULT:
                self._reasons.append((f"larger than {MOST_BYTES_OF_A_RESULT // 2**20} MiB", str(name)))
                return
            file = read_results(path)
        except (UsageError, OSError):
            self._reasons.append(("that cannot be read", str(name)))
            return
        yield history.PastResult(head, file.rows, file.pairs)


MOST_RUNS = 30  # Runs per command that are read
MOST_RUNS_LOOKED_AT = 200  # Results per command whose metadata are read to find runs
PastRun = tuple[str, Verdict, Mapping[str, float]]  # The start time, verdict and main values of a run


def past_runs(folder: Path, metadata: Metadata) -> list[PastRun]:
    """Return earlier runs on the same machine, for all commands.

    For this run's command, return only runs with the same GPUs and options. For each other command, return only runs
    with the same GPUs and options as its newest run. Unusable files are ignored, and `gpubench compare --last` shows
    the reasons.

    Raises UsageError if the folder cannot be read.
    """
    kept = list_results(folder)
    own = history.ResultHead.of(metadata.to_record(), "", Verdict.ERROR, complete=False)
    host = history.DatedName.format_hosts(metadata.hosts)
    by_command: dict[str, list[history.DatedName]] = {}
    for name in kept.names:
        if name.host == host:
            by_command.setdefault(name.command, []).append(name)
    return [run for command, names in by_command.items() for run in islice(_runs(kept, command, names, own), MOST_RUNS)]


def _runs(kept: Kept, command: str, names: list[history.DatedName], own: history.ResultHead) -> Iterator[PastRun]:
    kind = own.kind if command == own.command else None
    for name in names[:MOST_RUNS_LOOKED_AT]:
        try:
            head = read_head(kept.path(name))
            if not _is_past(head, own) or kind not in (None, head.kind):
                continue
            file = read_results(kept.path(name))
        except UsageError:
            continue
        figures = history.headline_figures([*file.rows, *file.pairs])
        if not figures:
            continue
        kind = head.kind
        yield head.started_at, Verdict(head.verdict), figures


def _is_past(head: history.ResultHead, own: history.ResultHead) -> bool:
    """Return True for a complete, earlier run on the same machine. A result without GPU models may be from any
    machine.
    """
    if not head.complete or head.run_id == own.run_id or head.started_at > own.started_at:
        return False
    known = set(head.models), set(own.models)
    return head.machine == own.machine and (known[0] == known[1] or not all(known))


FOLDER_VARIABLE = "GPUBENCH_BASELINES"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_SUFFIX = ".json"
_MOST_NAMES = 1000
_MOST_SHOWN = 8


def baseline_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder for a user's baselines, which may not exist yet.

    Raises UsageError if no environment variable gives its path.
    """
    named = environment.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    data, home = environment.get("XDG_DATA_HOME"), environment.get("HOME")
    if not data and not home:
        raise UsageError(
            "there is no HOME folder to keep baselines in",
            expected=f"HOME, XDG_DATA_HOME or {FOLDER_VARIABLE}",
            next_step=f"{FOLDER_VARIABLE}=/var/lib/gpubench, or use --output FILE.json",
        )
    return (Path(data) if data else Path(home or "") / ".local" / "share") / "gpubench" / "baselines"


def baseline_path(name: str, environment: Mapping[str, str]) -> Path:
    """Return the path of a baseline, which may not exist yet. Raises UsageError for an invalid name."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a valid name for a baseline",
            expected="letters, digits, '.', '-' and '_', beginning with a letter or a digit",
            next_step="--save-baseline good, or use --output FILE.json",
        )
    return baseline_folder(environment) / f"{name}{_SUFFIX}"


def baseline_names(environment: Mapping[str, str]) -> list[str]:
    """Return the names of all baselines."""
    try:
        folder = baseline_folder(environment)
    except UsageError:
        return []
    return sorted(path.stem for path in islice(folder.glob(f"*{_SUFFIX}"), _MOST_NAMES))


def find_baseline(name: str, environment: Mapping[str, str]) -> Path:
    """Return the path of an existing baseline. If it does not exist, raise UsageError with the names of those that
    do.
    """
    path = baseline_path(name, environment)
    if not path.is_file():
        known = baseline_names(environment)
        more = f" and {len(known) - _MOST_SHOWN} more" if len(known) > _MOST_SHOWN else ""
        raise UsageError(
            f"--against {name}: there is no such baseline",
            expected=f"one of {', '.join(known[:_MOST_SHOWN])}{more}" if known else "a saved baseline (there is none)",
            reason=f"they are kept in {path.parent}",
            next_step=f"gpubench allreduce --save-baseline {name} on a healthy machine",
        )
    return path
