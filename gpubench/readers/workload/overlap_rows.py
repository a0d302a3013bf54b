"""The section `overlap` of a gpubench document: what a collective and a partner cost each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpubench.errors import UsageError
from gpubench.readers.documents.text_files import Wanted, read_text
from gpubench.readers.results import limits
from gpubench.readers.results.gpubench_document import document_of, is_lines

SECTION = "overlap"

_WANTED = Wanted(
    kinds="a result of gpubench overlap, .json or .jsonl",
    how_to_make_one="gpubench overlap --output overlap.json",
    most_bytes=limits.MOST_BYTES,
    example="overlap.json",
)
_NUMBERS = ("communication_alone_us", "compute_slowdown", "communication_slowdown")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredContention:
    """A row: a collective of a size beside a partner; `ctas` is NCCL's cap on thread blocks, None for its own.

    The slow-down of communication, less 1, is that of waiting for multiprocessors and that of sharing, where they were
    told apart, as parts of the time alone.
    """

    collective: str
    size_bytes: int
    partner: str
    ctas: int | None
    communication_alone_us: float
    compute_slowdown: float
    communication_slowdown: float
    partner_kernel_us: float = 0.0
    waiting_slowdown: float | None = None
    sharing_slowdown: float | None = None


def holds_overlap(text: str) -> bool:
    """True for a document of gpubench's that has such a section."""
    return f'"{SECTION}"' in text and ('"schema_version"' in text or is_lines(text))


def read_overlap(path: Path) -> list[StoredContention]:
    """The rows of a file.

    Raises UsageError where it cannot be read, has no such section, or a row lacks what a plan needs.
    """
    name = str(path)
    document = document_of(read_text(path, _WANTED), name)
    rows = document.get(SECTION)
    if not isinstance(rows, list) or not rows:
        raise UsageError(
            f"{name} has no rows of overlap",
            expected=_WANTED.kinds,
            reason="it is of another command, or its run ended before the first row",
            next_step=_WANTED.how_to_make_one,
        )
    found = [_row(each, f"{name}: {SECTION}[{number}]") for number, each in enumerate(rows)]
    return [each for each in found if each is not None]


def _row(row: Any, where: str) -> StoredContention | None:
    """A row; None where its times could not be measured."""
    if not isinstance(row, Mapping):
        raise UsageError(f"{where} is no row", expected=_WANTED.kinds)
    if any(row.get(key) is None for key in _NUMBERS):
        return None
    wrong = [key for key in _NUMBERS if not _is_number(row[key])]
    collective, size, ctas = row.get("collective"), row.get("size_bytes"), row.get("ctas")
    if wrong or not isinstance(collective, str) or not isinstance(size, int) or size <= 0:
        bad = wrong[0] if wrong else "collective" if not isinstance(collective, str) else "size_bytes"
        raise UsageError(
            f"{where}: {bad} is {row.get(bad)!r}",
            expected="a number above 0" if bad != "collective" else "the name of a collective",
            reason="the file was edited by hand",
        )
    alone, count = row.get("partner_alone_us"), row.get("partner_count")
    kernel = float(alone) / float(count) if alone and count and _is_number(alone) and _is_number(count) else 0.0
    parts = {key: row.get(key) for key in ("waiting_slowdown", "sharing_slowdown")}
    return StoredContention(
        collective=collective,
        size_bytes=size,
        partner=str(row.get("partner", "")),
        ctas=ctas if isinstance(ctas, int) else None,
        partner_kernel_us=kernel,
        **{key: float(row[key]) for key in _NUMBERS},
        **{key: float(value) for key, value in parts.items() if isinstance(value, (int, float))},
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
