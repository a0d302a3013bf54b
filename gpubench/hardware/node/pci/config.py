"""Access control (ACS) of a PCI port and address translation (ATS) of a device, from the configuration space.

Only root may read so far into it. Offsets and bits are those of Linux' pci_regs.h (PCI_EXT_CAP_ID_ACS, PCI_ACS_CTRL,
PCI_EXT_CAP_ID_ATS, PCI_ATS_CTRL). Written after that documentation and checked against trees made of it; no device with
either was at hand.
"""

import os
from pathlib import Path

from gpubench.hardware.system_files import UnknownFields
from gpubench.model.facts.pci_capabilities import ACCESS_CONTROLS, AccessControl

ACCESS_CONTROL, ADDRESS_TRANSLATION = "access_control", "address_translation"
NEEDS_ROOT = "needs root: others read only the first 64 bytes of the configuration space"

_OF_ALL_USERS = 64
_EXTENDED = 0x100
_END = 0x1000
_ALL_ONES = 0xFFFFFFFF
_ACS, _ATS = 0x000D, 0x000F
_ATS_ENABLED = 1 << 31
"""The highest bit of the control register, in the upper half of the word."""

_WORD_BYTES = 4


def read_access_control(device: Path, unknown: UnknownFields) -> AccessControl | None:
    """The port's ACS registers; None, with the reason kept, where they cannot be read."""
    registers = _capability(device, _ACS, ACCESS_CONTROL, unknown)
    if registers is None:
        return None if ACCESS_CONTROL in unknown.reasons else AccessControl()
    return AccessControl(capable=_names(registers & 0xFFFF), enabled=_names(registers >> 16))


def read_address_translation(device: Path, unknown: UnknownFields) -> bool | None:
    """True where the device asks the IOMMU for addresses itself (ATS); None, with the reason kept, where it is unknown.

    With it on, a switch can send a transfer straight to the other device although access control redirects it.
    """
    registers = _capability(device, _ATS, ADDRESS_TRANSLATION, unknown)
    if registers is None:
        return None if ADDRESS_TRANSLATION in unknown.reasons else False
    return bool(registers & _ATS_ENABLED)


def _capability(device: Path, identity: int, field: str, unknown: UnknownFields) -> int | None:
    """The word behind a capability's header; None where there is none, or where that cannot be read, with its reason.

    A few words are read, never the whole space: each costs the bus an access.
    """
    try:
        file = os.open(device / "config", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return _found(file, identity)
        finally:
            os.close(file)
    except OSError as error:
        unknown.reasons[field] = f"config: {error.strerror}"
    except _UnreadableError as unreadable:
        unknown.reasons[field] = str(unreadable)
    return None


class _UnreadableError(Exception):
    """A configuration space that cannot be read, with the reason."""


def _found(file: int, identity: int) -> int | None:
    first = _word(file, _EXTENDED)
    if first is None:
        more = _word(file, _OF_ALL_USERS) is not None
        raise _UnreadableError("this machine shows no extended configuration space" if more else NEEDS_ROOT)
    if first == _ALL_ONES:
        raise _UnreadableError("the device answers only ones, as one that is gone does")
    offset, seen = _EXTENDED, set[int]()
    while _EXTENDED <= offset < _END and offset not in seen:
        seen.add(offset)
        header = _whole_word(file, offset)
        if header & 0xFFFF == identity:
            return _whole_word(file, offset + _WORD_BYTES)
        offset = header >> 20 & 0xFFC
    return None


def _whole_word(file: int, offset: int) -> int:
    word = _word(file, offset)
    if word is None:
        raise _UnreadableError("config: it ends in the middle of the list of capabilities")
    return word


def _names(bits: int) -> tuple[str, ...]:
    return tuple(name for position, name in enumerate(ACCESS_CONTROLS) if bits >> position & 1)


def _word(file: int, offset: int) -> int | None:
    """A word of 32 bits, None where the file ends before it does."""
    content = os.pread(file, _WORD_BYTES, offset)
    return int.from_bytes(content, "little") if len(content) == _WORD_BYTES else None
