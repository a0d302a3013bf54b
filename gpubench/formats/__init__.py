"""The output formats. A new one is one file and one line here."""

from gpubench.formats.csv import CSV
from gpubench.formats.json import JSON
from gpubench.formats.jsonl import JSONL
from gpubench.formats.table import TABLE
from gpubench.formats.writer import Format

FORMATS: tuple[Format, ...] = (TABLE, CSV, JSON, JSONL)
