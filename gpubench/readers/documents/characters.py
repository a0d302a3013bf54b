"""Refusal of text that no output can hold."""

import re
from typing import Any

from gpubench.errors import UsageError

_SURROGATE = re.compile("[\ud800-\udfff]")


def check_text(plain: Any, where: str) -> None:
    """Refuse half characters anywhere in a document: JSON can spell them, and no output can hold them.

    Raises:
        UsageError: there is one; `where` leads to it.
    """
    if isinstance(plain, str) and _SURROGATE.search(plain):
        raise UsageError(f"{where} has half a character in it: {plain[:40]!a}", expected="text that UTF-8 can hold")
    if isinstance(plain, dict):
        for key, held in plain.items():
            check_text(key, f"a name in {where}")
            check_text(held, f"{where}.{key}")
    if isinstance(plain, list):
        for number, held in enumerate(plain):
            check_text(held, f"{where}[{number}]")
