"""Words that an option takes, and the nearest one for a word that it does not know."""

import difflib
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TypeVar

from gpubench.errors import UsageError, invalid_choice

Choice = TypeVar("Choice", bound=StrEnum)


def parse_choices(option: str, texts: Iterable[str], choices: type[Choice]) -> tuple[Choice, ...]:
    """The members that comma-separated texts name, each once, in their order; UsageError for a word that names none."""
    words = dict.fromkeys(word.strip() for text in texts for word in text.split(","))
    for word in words:
        if word not in tuple(choices):
            raise unknown_word(option, word, tuple(choices))
    return tuple(map(choices, words))


def unknown_word(option: str, word: str, choices: Sequence[str]) -> UsageError:
    """A word that an option does not know, with the nearest one that it does."""
    error = invalid_choice(option, word, choices)
    nearest = difflib.get_close_matches(word, choices, n=1)
    if nearest:
        error.next_step = f"{option} {nearest[0]}"
    return error


def parse_collective(text: str | None) -> str | None:
    """The collective of --collective as gpubench calls it, of its own name or nccl-tests'; UsageError for no name."""
    from gpubench.readers.results.nccl_tests.names import COLLECTIVE_NAMES

    if text is None:
        return None
    word = text.lower().removesuffix("_perf")
    name = COLLECTIVE_NAMES.get(word, word)
    if name not in COLLECTIVE_NAMES.values():
        raise unknown_word("--collective", text, tuple(COLLECTIVE_NAMES.values()))
    return name
