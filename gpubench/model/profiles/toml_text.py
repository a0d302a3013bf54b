"""Plain data as TOML: what the standard library reads and does not write."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character, which TOML cannot hold."""


def toml_text(plain: Mapping[str, Any]) -> str:
    """A document: values first, then tables, then lists of tables; what is None is left out."""
    return "\n".join(_table(plain, "")).strip("\n") + "\n"


def _table(plain: Mapping[str, Any], prefix: str) -> Iterator[str]:
    tables = {key: value for key, value in plain.items() if isinstance(value, Mapping)}
    lists = {key: value for key, value in plain.items() if _is_list_of_tables(value)}
    for key, value in plain.items():
        if value is not None and key not in tables and key not in lists:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in tables.items():
        yield from ("", f"[{prefix}{_key(key)}]")
        yield from _table(value, f"{prefix}{_key(key)}.")
    for key, value in lists.items():
        for each in value:
            yield from ("", f"[[{prefix}{_key(key)}]]")
            yield from _table(each, f"{prefix}{_key(key)}.")


def _is_list_of_tables(value: object) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(isinstance(each, Mapping) for each in value)


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if bare else _quoted(key)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:_}"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"TOML has no {type(value).__name__}")


def _quoted(text: str) -> str:
    """A string with JSON's escapes, and TOML's for what cannot be printed; no line of it is a runner's command."""
    shown = json.dumps(_SURROGATE.sub("\ufffd", text), ensure_ascii=False).replace("##", "#\\u0023")
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in shown)
