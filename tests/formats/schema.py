"""The schema by which every JSON of a run is valid. `test_formats.py` looks once whether it is a schema itself."""

import json
from importlib.resources import files
from typing import Any

import jsonschema

SCHEMA: dict[str, Any] = json.loads(files("gpubench.formats").joinpath("report.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
"""`jsonschema.validate` looks at the schema each time, which takes four times as long as a document."""
