"""The access control (ACS) of a PCI port, read from its configuration space. Only root may read so far into it.

Offsets and bits are those of Linux' pci_regs.h (PCI_EXT_CAP_ID_ACS, PCI_ACS_CAP, PCI_ACS_CTRL). Written after that
documentation and checked against trees made of it; no port with ACS was at hand.
"""

import os
from pathlib import Path

from gpubench.hardware.system_files import UnknownFields
from gpubench.model.pci_capabilities import ACCESS_CONTROLS, AccessControl

ACCESS_CONTROL = "access_control"
NEEDS_ROOT = "needs root: others read only the first 64 bytes of the configuration space"

_OF_ALL_USERS = 64
_EXTENDED = 0x100
_END = 0x1000
_ALL_ONES = 0xFFFFFFFF
_ACS = 0x000D
_WORD_BYTES = 4


def read_access_control(device: Path, unknown: UnknownFields) -> AccessControl | None:
    """What the port's ACS registers say; None, with the reason kept, where they cannot be read.

    A few words are read, never the whole space: each costs the bus an access.
    """
    try:
        file = os.open(device / "config", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        unknown.reasons[ACCESS_CONTROL] = f"config: {error.strerror}"
        return None
    try:
        return _registers(file, unknown)
    except OSError as error:
        unknown.reasons[ACCESS_CONTROL] = f"config: {error.strerror}"
        return None
    finally:
        os.close(file)


def _registers(file: int, unknown: UnknownFields) -> AccessControl | None:
    first = _word(file, _EXTENDED)
    if first is None:
        more = _word(file, _OF_ALL_USERS) is not None
        reason = "this machine shows no extended configuration space" if more else NEEDS_ROOT
        unknown.reasons[ACCESS_CONTROL] = reason
        return None
    if first == _ALL_ONES:
        unknown.reasons[ACCESS_CONTROL] = "the port answers only ones, as one that is gone does"
        return None
    offset, seen = _EXTENDED, set[int]()
    while _EXTENDED <= offset < _END and offset not in seen:
        seen.add(offset)
        header = _word(file, offset)
        if header is None:
            unknown.reasons[ACCESS_CONTROL] = "config: it ends in the middle of the list of capabilities"
            return None
        if header & 0xFFFF == _ACS:
            return _decoded(_word(file, offset + _WORD_BYTES), unknown)
        offset = header >> 20 & 0xFFC
    return AccessControl()


def _decoded(registers: int | None, unknown: UnknownFields) -> AccessControl | None:
    """Capability in the lower half of the word, control in the upper."""
    if registers is None:
        unknown.reasons[ACCESS_CONTROL] = "config: it ends in the middle of the ACS registers"
        return None
    return AccessControl(capable=_names(registers & 0xFFFF), enabled=_names(registers >> 16))


def _names(bits: int) -> tuple[str, ...]:
    return tuple(name for position, name in enumerate(ACCESS_CONTROLS) if bits >> position & 1)


def _word(file: int, offset: int) -> int | None:
    """A word of 32 bits, None where the file ends before it does."""
    content = os.pread(file, _WORD_BYTES, offset)
    return int.from_bytes(content, "little") if len(content) == _WORD_BYTES else None
