"""Columns of `nvidia-smi topo` that run together, as where a text lost its tabs: split where known words say how.

GPU0GPU1 is two devices, NV12PIX two cells, SYS0-15 a cell and processors; NV12 before 0-15 is told from NV1 before
20-15, which is no range.
"""

import re
from collections.abc import Collection, Iterator, Sequence

PATH_WORDS = r"NV\d{1,2}|PIX|PXB|PHB|NODE|SYS|SOC"
P2P_WORDS = r"OK|CNS|GNS|TNS|DR|NS|U"
SELF = "X"

_WORD = re.compile(rf"(?:{PATH_WORDS}|{P2P_WORDS}|{SELF})", re.ASCII)
_BEFORE_A_COLUMN = re.compile(
    r"(?<=[0-9])(?=(?:GPU|NIC)[0-9]|CPU Affinity|GPU NUMA|(?:mlx[0-9]_|bnxt_re|irdma|hfi1_|efa_|rocep|rdmap|ibp))"
    r"|(?<=[0-9y])(?=NUMA Affinity|GPU NUMA)"
)
_JOINED_GPUS = re.compile(r"(?<!\w)GPU[0-9]{1,4}(?:GPU|NIC)[0-9]\S{0,200}", re.ASCII)
_LONGEST_WORD = 400
"""Characters of what is taken apart: a row of 64 GPUs and 32 NICs has fewer."""

_PROCESSORS = re.compile(r"(\d{1,5})-(\d{1,5})(?:,\d{1,5}(?:-\d{1,5})?)*(?:N/A)*|(?:N/A)+", re.ASCII)
"""A single processor is none of them: NV12 would be NV1 and 2."""


def header_apart(line: str) -> str:
    """A header with blanks before the names of columns that stand right behind another one's number."""
    return _BEFORE_A_COLUMN.sub(" ", line)


def joined_in(line: str) -> str | None:
    """The first words of a line that run together as those of a header would; None where none do."""
    found = _JOINED_GPUS.search(line)
    return found[0] if found else None


def begins_with_cells(word: str) -> bool:
    """True if a word is a cell with more behind it, whether or not it can be taken apart."""
    return re.match(rf"{_WORD.pattern}(?:{_WORD.pattern}|[0-9]|N/A)", word, re.ASCII) is not None


def cells_apart(words: Sequence[str]) -> list[str]:
    """The words of a row, those that are several cells, or a cell and what follows the matrix, taken apart."""
    return [part for word in words for part in _apart(word)]


def row_apart(words: Sequence[str], columns: Collection[str]) -> list[str]:
    """A row whose first word is a device and cells."""
    for device in sorted(columns, key=len, reverse=True):
        cells = words[0].removeprefix(device) if words else ""
        if words and cells != words[0] and cells and _WORD.fullmatch(_apart(cells)[0]):
            return [device, *cells_apart([cells, *words[1:]])]
    return list(words)


def _apart(word: str) -> list[str]:
    """The cells of a word, with what follows the last; the word itself where that is neither processors nor nothing."""
    if _WORD.fullmatch(word) or len(word) > _LONGEST_WORD:
        return [word]
    ways = [way for way in _ways(word) if len(way) > 1]
    return ways[0] if len(ways) == 1 else [word]


def _ways(word: str) -> Iterator[list[str]]:
    """Every way to read a word as cells and processors: the number of an NV has one digit or two."""
    if not word:
        yield []
        return
    if _is_processors(word):
        yield [word]
        return
    found = _WORD.match(word)
    ends = {found.end()} if found else set()
    if found and found[0].startswith("NV"):
        ends |= {3, 4} & set(range(3, found.end() + 1))
    for end in ends:
        for rest in _ways(word[end:]):
            yield [word[:end], *rest]


def _is_processors(text: str) -> bool:
    found = _PROCESSORS.fullmatch(text)
    return found is not None and (found[1] is None or int(found[1]) <= int(found[2]))
