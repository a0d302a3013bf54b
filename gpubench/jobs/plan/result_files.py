"""The stored results that --results and --overlap name: files, and folders of them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpubench.errors import UsageError
from gpubench.measure.plan.contention import MeasuredContention
from gpubench.model.results.result_file import ResultFile
from gpubench.model.results.rows.overlap import OverlapRow
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND
from gpubench.readers.results.registry import read_results
from gpubench.readers.results.stored import read_stored

_SUFFIXES = (".json", ".jsonl", ".csv", ".txt")
_MOST_FILES = 2000
_HEAD_BYTES = 2**20
_POSITIVE = (
    *("size_bytes", "partner_count", "partner_alone_us", "communication_alone_us"),
    *("compute_slowdown", "communication_slowdown"),
)
_OVERLAP = re.compile(r'"subject":\s*"overlap"')


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundResults:
    """Files of collectives, contention with where it is from, and files of a folder that could not be used.

    `contention_gpus` are the models that it was measured on, `unusable` how many of its rows tell nothing.
    """

    files: Sequence[ResultFile]
    contention: Sequence[MeasuredContention]
    contention_source: str
    contention_gpus: Sequence[str]
    unusable: int
    passed_over: Sequence[str]


def read_all(results: Sequence[Path], overlap: Sequence[Path]) -> FoundResults:
    """Read everything; in a folder what is no result is passed over, a file that was named has to be one.

    Raises UsageError where a file that was named cannot be read, or a folder holds no result at all.
    """
    files: list[ResultFile] = []
    passed_over: list[str] = []
    beside = list(overlap)
    for path in results:
        own = list(_paths(path))
        before = len(files) + len(beside)
        for each in own:
            if _holds_overlap(each):
                beside.append(each)
                continue
            try:
                file = read_results(each)
            except UsageError:
                if each == path:
                    raise
                passed_over.append(each.name)
                continue
            if file.rows:
                files.append(file)
        if len(files) + len(beside) == before:
            raise UsageError(
                f"{path} holds no results of a collective",
                expected="what gpubench allreduce --output wrote, or nccl-tests' text",
                next_step=f"gpubench allreduce --output {path}/",
            )
    stored = [_overlap_rows(path) for path in beside]
    rows = [row for own, _ in stored for row in own]
    contention = [found for row in rows if (found := _contention(row)) is not None]
    simulated = ", simulated" if any(row.origin == Origin.SIMULATED for row in rows) else ""
    return FoundResults(
        files=files,
        contention=contention,
        contention_gpus=list(dict.fromkeys(name for _, gpus in stored for name in gpus)),
        unusable=len(rows) - len(contention),
        contention_source=", ".join(path.name for path in beside) + simulated,
        passed_over=passed_over,
    )


def _paths(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    found = sorted(each for each in path.iterdir() if each.suffix in _SUFFIXES and not each.name.startswith("."))
    if len(found) > _MOST_FILES:
        raise UsageError(f"{path} holds {len(found)} files", expected=f"at most {_MOST_FILES}")
    yield from found


def _holds_overlap(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            beginning = file.read(_HEAD_BYTES)
    except OSError:
        return False
    return _OVERLAP.search(beginning) is not None


def _overlap_rows(path: Path) -> tuple[list[OverlapRow], list[str]]:
    """The rows of a file, and the GPUs that they are of; UsageError where it cannot be read, has none, or nonsense."""
    stored = read_stored(path)
    rows = [row for row in stored.rows if isinstance(row, OverlapRow)]
    if not rows:
        raise UsageError(
            f"{path} has no rows of overlap",
            expected="a result of gpubench overlap, .json or .jsonl",
            reason="it is of another command, or its run ended before the first row",
            next_step=f"gpubench overlap --output {path.name}",
        )
    for number, row in enumerate(rows):
        for name in _POSITIVE:
            value = getattr(row, name)
            if value is not None and value <= 0:
                raise UsageError(
                    f"{path}: overlap[{number}].{name} is {value}",
                    expected="a number above 0",
                    reason="edited by hand",
                    next_step="the same command again, with --output",
                )
    return rows, [each.gpu for each in stored.metadata.ranks if each.gpu]


def _contention(row: OverlapRow) -> MeasuredContention | None:
    """What the simulation needs of a row; None of wrong data, and where computation lost nearly all of its time."""
    if row.compute_slowdown is None or row.wrong:
        return None
    return MeasuredContention(
        collective=row.collective,
        size_bytes=row.size_bytes,
        partner=row.partner,
        compute_slowdown=row.compute_slowdown,
        communication_slowdown=row.communication_slowdown,
        alone_seconds=row.communication_alone_us / MICROSECONDS_PER_SECOND,
        sharing_slowdown=row.sharing_slowdown,
        kernel_seconds=row.partner_alone_us / row.partner_count / MICROSECONDS_PER_SECOND,
        ctas=row.ctas,
    )
