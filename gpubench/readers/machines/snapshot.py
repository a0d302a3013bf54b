"""A recorded snapshot: the JSON that `--record` writes and `--replay` and `--from` read."""

import json
from dataclasses import replace
from typing import Any

from gpubench.errors import UsageError
from gpubench.model.facts.snapshot import SNAPSHOT_VERSION, Snapshot
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.plain import from_plain, to_plain
from gpubench.readers.documents.characters import check_text
from gpubench.readers.documents.json_lines import load_json
from gpubench.readers.machines.snapshot_rules import check_snapshot

_EXPECTED = "a snapshot that gpubench recorded"
_NEXT_STEP = "record it again: gpubench topo --record DIRECTORY"
_WIDTH = 160


def recognises(text: str) -> bool:
    """True if a text begins as a JSON object does."""
    return text.lstrip("\ufeff \t\r\n").startswith("{")


def read(text: str, name: str) -> Snapshot:
    """The snapshot in a text of the file `name`. What was measured when it was written is recorded now.

    Raises UsageError where it is no JSON (with line and column), no snapshot (with the field), or one of a newer
    gpubench.
    """
    document = _parsed(text.lstrip("\ufeff"), name)
    _check_version(document, name)
    try:
        check_text(document, "snapshot")
        snapshot = from_plain(Snapshot, document, "snapshot")
        check_snapshot(snapshot)
    except UsageError as error:
        raise _refused(
            f"{name}: {error.seen}",
            expected=error.expected or _EXPECTED,
            reason=error.reason or "it was edited by hand, or is another program's JSON",
        ) from None
    return replace(snapshot, origin=Origin.RECORDED) if snapshot.origin is Origin.MEASURED else snapshot


def write_snapshot(snapshot: Snapshot) -> str:
    """A snapshot as JSON that people can read and compare: one GPU, NIC or pair a line; `read` reads it."""
    document = {"schema_version": snapshot.schema_version} | to_plain(snapshot)
    entries = [f"  {json.dumps(key)}: {_entry(held)}" for key, held in document.items()]
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _entry(held: Any) -> str:
    if isinstance(held, list) and any(isinstance(each, dict) for each in held):
        return _one_a_line(held, indent=2)
    return _rendered(held, indent=2)


def _rendered(value: Any, *, indent: int) -> str:
    """A value on one line where that is short enough, else with the elements of its lists one a line."""
    line = json.dumps(value, allow_nan=False)
    if indent + len(line) <= _WIDTH or not value:
        return line
    if isinstance(value, list):
        return _one_a_line(value, indent=indent)
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{json.dumps(key)}: {_rendered(held, indent=indent)}" for key, held in value.items()) + "}"
        )
    return line


def _one_a_line(values: list[Any], *, indent: int) -> str:
    inner = " " * (indent + 2)
    return "[\n" + ",\n".join(inner + _rendered(each, indent=indent + 2) for each in values) + f"\n{' ' * indent}]"


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        document = load_json(text)
    except json.JSONDecodeError as error:
        raise _refused(
            f"{name}, line {error.lineno}: the JSON is broken at column {error.colno}: {error.msg}",
            reason="the file was cut off, or edited by hand",
        ) from None
    except ValueError as error:
        raise _refused(f"{name}: the JSON has {error}", reason="it was edited by hand") from None
    if not isinstance(document, dict):
        raise _refused(f"{name}, line 1: the JSON is no object", reason="it is another program's JSON")
    return document


def _check_version(document: dict[str, Any], name: str) -> None:
    version = document.get("schema_version")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        seen = "has no schema_version" if version is None else f"has schema_version {version!r}"
        raise _refused(f"{name}: the JSON {seen}", reason="it is another program's JSON")
    if version > SNAPSHOT_VERSION:
        raise _refused(
            f"{name}: the snapshot has schema_version {version}",
            expected=f"at most {SNAPSHOT_VERSION}, which this gpubench reads",
            reason="a newer gpubench recorded it",
            next_step="pip install --upgrade gpubench",
        )


def _refused(seen: str, *, reason: str, expected: str = _EXPECTED, next_step: str = _NEXT_STEP) -> UsageError:
    return UsageError(seen, expected=expected, reason=reason, next_step=next_step)
