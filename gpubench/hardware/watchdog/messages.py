"""The messages of watchdogs as bytes: fields of fixed width and texts of bounded length.

There is no grammar that nests and no number without bounds, so reading one costs the same whatever is in it.
"""

import math
import struct
from dataclasses import dataclass
from enum import IntEnum

from gpubench.model.terms.hang import PHASES, RankState

MOST_BYTES = 2048
"""No message is longer."""

_HEADER = struct.Struct("!BIIQQ")
_NUMBERS = struct.Struct("!IBqqqd")
_SECONDS = struct.Struct("!d")
_RANK = struct.Struct("!I")
_LENGTH = struct.Struct("!H")
_MOST_TEXT_BYTES = {"place": 256, "label": 256, "process": 1, "trouble": 1024}
_MOST_HOST_BYTES = 256


class MessageKind(IntEnum):
    """The kinds of messages."""

    ASK = 1
    STATE = 2
    LOST = 3
    FIRST = 4
    END = 5


@dataclass(frozen=True, slots=True)
class LossClaim:
    """A rank's claim that it was lost, at a time by its host's monotonic clock."""

    at_seconds: float
    host: str


Content = RankState | LossClaim | int | None
"""Of STATE, LOST, FIRST (a rank), and of the others."""


@dataclass(frozen=True, slots=True)
class WatchdogMessage:
    """A message of one rank's watchdog to another's; `answers` is the counter of the message that it answers, or 0."""

    kind: MessageKind
    sender: int
    receiver: int
    counter: int
    answers: int = 0
    content: Content = None

    def to_bytes(self) -> bytes:
        """The message as `from_bytes` reads it; texts that are too long are cut."""
        head = _HEADER.pack(self.kind, self.sender, self.receiver, self.counter, self.answers)
        return head + _packed(self.content)

    @classmethod
    def from_bytes(cls, data: bytes) -> "WatchdogMessage":
        """The message in those bytes. Raises ValueError, IndexError or struct.error: they hold none."""
        number, sender, receiver, counter, answers = _HEADER.unpack_from(data)
        kind = MessageKind(number)
        return cls(kind, sender, receiver, counter, answers, _content(kind, sender, data[_HEADER.size :]))


def _packed(content: Content) -> bytes:
    if isinstance(content, RankState):
        phase = PHASES.index(content.phase)
        numbers = (content.pid, phase, content.step, content.done, content.total, content.idle_seconds)
        texts = (_packed_text(getattr(content, name), most) for name, most in _MOST_TEXT_BYTES.items())
        return _NUMBERS.pack(*numbers) + b"".join(texts)
    if isinstance(content, LossClaim):
        return _SECONDS.pack(content.at_seconds) + _packed_text(content.host, _MOST_HOST_BYTES)
    return b"" if content is None else _RANK.pack(content)


def _content(kind: MessageKind, sender: int, data: bytes) -> Content:
    if kind is MessageKind.STATE:
        pid, phase, step, done, total, idle_seconds = _NUMBERS.unpack_from(data)
        texts, rest = {}, data[_NUMBERS.size :]
        for name, most in _MOST_TEXT_BYTES.items():
            texts[name], rest = _text(rest, most)
        return RankState(
            rank=sender,
            pid=pid,
            phase=PHASES[phase],
            step=step,
            done=done,
            total=total,
            idle_seconds=_finite(idle_seconds),
            **texts,
        )
    if kind is MessageKind.LOST:
        return LossClaim(_finite(*_SECONDS.unpack_from(data)), _text(data[_SECONDS.size :], _MOST_HOST_BYTES)[0])
    return int(_RANK.unpack(data)[0]) if kind is MessageKind.FIRST else None


def _packed_text(text: str, most: int) -> bytes:
    data = text.encode(errors="replace")[:most]
    return _LENGTH.pack(len(data)) + data


def _text(data: bytes, most: int) -> tuple[str, bytes]:
    """A text, and what follows it."""
    length = _LENGTH.unpack_from(data)[0]
    end = _LENGTH.size + length
    if length > most or end > len(data):
        message = f"a text of {length} bytes where {most} are allowed and {len(data)} are there"
        raise ValueError(message)
    return data[_LENGTH.size : end].decode(errors="replace"), data[end:]


def _finite(seconds: float) -> float:
    if not math.isfinite(seconds):
        message = f"{seconds} is no time"
        raise ValueError(message)
    return seconds
