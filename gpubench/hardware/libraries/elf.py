"""What a shared object needs and where it has that looked for, read from its file: nothing of it is loaded.

Executable and Linking Format, 64-bit, little endian (gABI, "Dynamic Section"); other files have nothing to say.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_IDENT = b"\x7fELF\x02\x01"
_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_ENTRY = struct.Struct("<qQ")
_LOAD, _DYNAMIC = 1, 2
_NEEDED, _STRINGS, _STRINGS_SIZE, _RPATH, _RUNPATH = 1, 5, 10, 15, 29
_MOST_PROGRAMS, _MOST_DYNAMIC_BYTES, _MOST_STRINGS_BYTES = 256, 2**20, 64 * 2**20


@dataclass(frozen=True, slots=True)
class SharedObject:
    """Names that the loader has to find, and folders for that: `rpath` before LD_LIBRARY_PATH, `runpath` after it."""

    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()

    def needs(self, prefix: str) -> str | None:
        """The first needed name that begins so."""
        return next((name for name in self.needed if name.startswith(prefix)), None)


def read_shared_object(path: Path) -> SharedObject:
    """The dynamic section of a file; an empty one of a file that is none, or cannot be read."""
    try:
        with path.open("rb") as file:
            return _read(file, path.resolve().parent)
    except (OSError, struct.error, ValueError):
        return SharedObject()


def _read(file: BinaryIO, origin: Path) -> SharedObject:
    head = file.read(_HEADER.size)
    if not head.startswith(_IDENT):
        return SharedObject()
    fields = _HEADER.unpack(head)
    offset, count = fields[4], min(fields[9], _MOST_PROGRAMS)
    file.seek(offset)
    programs = [_PROGRAM.unpack(file.read(_PROGRAM.size)) for _ in range(count)]
    dynamic = next((each for each in programs if each[0] == _DYNAMIC), None)
    if dynamic is None:
        return SharedObject()
    file.seek(dynamic[2])
    data = file.read(min(dynamic[5], _MOST_DYNAMIC_BYTES))
    entries = list(_ENTRY.iter_unpack(data[: len(data) // _ENTRY.size * _ENTRY.size]))
    values = dict(entries)
    file.seek(_offset_of(programs, values.get(_STRINGS, 0)))
    strings = file.read(min(values.get(_STRINGS_SIZE, 0), _MOST_STRINGS_BYTES))

    def text(at: int) -> str:
        return strings[at : strings.index(b"\0", at)].decode(errors="replace")

    def folders(tag: int) -> tuple[str, ...]:
        found = text(values[tag]).split(":") if tag in values else []
        return tuple(
            folder.replace("$ORIGIN", str(origin)).replace("${ORIGIN}", str(origin)) for folder in found if folder
        )

    needed = tuple(text(value) for tag, value in entries if tag == _NEEDED)
    runpath = folders(_RUNPATH)
    return SharedObject(needed, () if runpath else folders(_RPATH), runpath)


def _offset_of(programs: Sequence[tuple[int, ...]], address: int) -> int:
    """The place in the file of an address in memory."""
    for kind, _, offset, virtual, _, size, *_ in programs:
        if kind == _LOAD and virtual <= address < virtual + size:
            return int(address - virtual + offset)
    raise ValueError(f"no segment holds {address:#x}")
