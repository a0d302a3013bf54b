"""Refusal of text that no output can hold."""

import re
from collections.abc import Iterator
from typing import Any

from gpubench.errors import UsageError

_SURROGATE = re.compile("[\ud800-\udfff]")


def leaves(plain: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Every name and value in plain data that is no list or dictionary, with the place that leads to it."""
    if isinstance(plain, dict):
        for key, held in plain.items():
            yield f"a name in {where}", key
            yield from leaves(held, f"{where}.{key}")
    elif isinstance(plain, list):
        for number, held in enumerate(plain):
            yield from leaves(held, f"{where}[{number}]")
    else:
        yield where, plain


def check_text(plain: Any, where: str) -> None:
    """Raise UsageError for half characters anywhere in a document: JSON can spell them, and no output can hold them."""
    for place, text in leaves(plain, where):
        if isinstance(text, str) and _SURROGATE.search(text):
            raise UsageError(f"{place} has half a character in it: {text[:40]!a}", expected="text that UTF-8 can hold")


def check_printable(plain: Any, where: str) -> None:
    """Raise UsageError for a text that a terminal cannot show; `where` leads to it."""
    for place, text in leaves(plain, where):
        if isinstance(text, str) and not text.isprintable():
            raise UsageError(f"{place} is {text[:40]!a}", expected="printable characters")
