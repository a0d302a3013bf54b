"""Shared objects without code: a header, a segment, and a dynamic section with their needs and search paths."""

import struct
from pathlib import Path

_HEADER_BYTES, _PROGRAM_BYTES, _ENTRY_BYTES = 64, 56, 16
_BASE = 0x10000


def shared_object(*needed: str, rpath: str = "", runpath: str = "") -> bytes:
    """Return a file for which readelf -d shows these entries."""
    strings = b"\0"
    entries: list[tuple[int, int]] = []
    for tag, text in [*((1, name) for name in needed), (15, rpath), (29, runpath)]:
        if text:
            entries.append((tag, len(strings)))
            strings += text.encode() + b"\0"
    dynamic_at = _HEADER_BYTES + 2 * _PROGRAM_BYTES
    strings_at = dynamic_at + (len(entries) + 3) * _ENTRY_BYTES
    entries += [(5, _BASE + strings_at), (10, len(strings)), (0, 0)]
    dynamic = b"".join(struct.pack("<qQ", *entry) for entry in entries)
    total = strings_at + len(strings)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, _HEADER_BYTES, 0, 0, _HEADER_BYTES, _PROGRAM_BYTES, 2, 0, 0, 0
    )
    load = struct.pack("<IIQQQQQQ", 1, 4, 0, _BASE, _BASE, total, total, 4096)
    section = struct.pack(
        "<IIQQQQQQ", 2, 4, dynamic_at, _BASE + dynamic_at, _BASE + dynamic_at, len(dynamic), len(dynamic), 8
    )
    return header + load + section + dynamic + strings


def wheel(site: Path, name: str, version: str, file: str, content: bytes = b"") -> Path:
    """Install a wheel with one file in `site`, and return the file's path."""
    path = site / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content or shared_object("libc.so.6"))
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{file},,\n{info.name}/METADATA,,\n")
    return path


def torch(site: Path, version: str = "2.11.0+cu130", cuda: str | None = "13.0", **parts: bytes) -> Path:
    """Install a PyTorch that must not be imported, with these libraries, and return its folder."""
    folder = site / "torch"
    (folder / "lib").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('torch was imported')\n")
    built = "None" if cuda is None else f"'{cuda}'"
    (folder / "version.py").write_text(
        f"from typing import Optional\n__version__ = '{version}'\ncuda: Optional[str] = {built}\n"
    )
    for name, content in parts.items():
        (folder / "lib" / f"{name}.so").write_bytes(content)
    return folder
