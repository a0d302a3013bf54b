"""The schema by which every JSON of a run is valid. `test_formats.py` looks once whether it is a schema itself."""

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

import jsonschema

SCHEMA: dict[str, Any] = json.loads(files("gpubench.formats").joinpath("report.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
"""`jsonschema.validate` looks at the schema each time, which takes four times as long as a document."""


def validate(document: Mapping[str, Any]) -> None:
    """Raise ValidationError for what is not by the schema, of all sections and of their rows that differ in kind.

    A row is left out that has no value of another kind than earlier rows have under its key: every text is looked at,
    and numbers by their type, sign and digits. Whoever says a hundred times the same is looked at once.
    """
    VALIDATOR.validate({name: _unlike(value) if isinstance(value, list) else value for name, value in document.items()})


def _unlike(rows: Sequence[Any]) -> list[Any]:
    found, known = list[Any](), set[Hashable]()
    for row in rows:
        kinds = set(_kinds(row))
        if not kinds or not kinds <= known:
            found.append(row)
        known |= kinds
    return found


def _kinds(value: Any, *path: str) -> Iterator[Hashable]:
    if isinstance(value, dict):
        yield path, frozenset(value)
        for key, each in value.items():
            yield from _kinds(each, *path, key)
    elif isinstance(value, list):
        yield path, not value
        for each in value:
            yield from _kinds(each, *path, "[]")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, type(value), value < 0, len(f"{abs(value):.0f}") if value else 0
    else:
        yield path, value
