"""Asking NVML about one GPU: each question on its own, so that one it does not answer costs one fact."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
GPU_IS_LOST = 15
"""Error codes (`nvmlReturn_t` in nvml.h)."""

_VALUE_BY_TYPE = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""The member of the union that holds a field's value, by `nvmlValueType_t`."""


class Reply(NamedTuple):
    """NVML's answer to a call: a value, or the reason why there is none, with its error code."""

    value: Any
    reason: str = ""
    code: int = 0


class Answers:
    """Questions about one GPU, and why some had no answer: `unknown`, by the name of the fact.

    Once NVML says that the GPU is lost, `lost` holds that, and NVML is not asked again: every call would wait for it.
    """

    def __init__(self, library: Any, handle: object) -> None:
        self.library = library
        self.unknown: dict[str, str] = {}
        self.lost: str | None = None
        self._handle = handle

    def call(self, function: str, *arguments: object) -> Reply:
        """The reply to one call; never raises for what NVML answers, or for a function that pynvml does not have."""
        if self.lost is not None:
            return Reply(None, self.lost, GPU_IS_LOST)
        asked = getattr(self.library, function, None)
        if asked is None:
            return Reply(None, f"this nvidia-ml-py has no {function}")
        try:
            return Reply(asked(self._handle, *arguments))
        except self.library.NVMLError as error:
            code = getattr(error, "value", 0)
            if code == GPU_IS_LOST:
                self.lost = str(error)
            return Reply(None, str(error), code)

    def ask(self, fact: str, function: str, *arguments: object) -> Any:
        """The answer to one call, None where there is none."""
        return self.ask_in_turn(fact, (function, *arguments))

    def ask_in_turn(self, fact: str, *questions: tuple[Any, ...]) -> Any:
        """The first answer to several calls, each a function's name and its arguments; None where there is none."""
        reason = ""
        for function, *arguments in questions:
            reply = self.call(function, *arguments)
            if reply.value is not None:
                return reply.value
            reason = reason or reply.reason
        self.unknown.setdefault(fact, reason)
        return None

    def fields(self, wanted: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
        """Values by field number and scope, all in one call; those that NVML does not have are left out."""
        asked = list(wanted)
        answered = self.call("nvmlDeviceGetFieldValues", asked).value or ()
        return {
            key: int(getattr(each.value, _VALUE_BY_TYPE[each.valueType]))
            for key, each in zip(asked, answered, strict=False)
            if each.nvmlReturn == 0 and each.valueType < len(_VALUE_BY_TYPE)
        }


def word_of(words: Sequence[str], number: int | None) -> str | None:
    """The word for a number of one of NVML's enumerations, which count from 0; None for a number without one."""
    return words[number] if number is not None and 0 <= number < len(words) else None


def text(answer: str | bytes | None) -> str | None:
    """A text from NVML, which older pynvml hands out as bytes."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer
