"""The output formats. A new one is one file and one line here."""

from gpubench.formats.csv import CSV
from gpubench.formats.github import GITHUB
from gpubench.formats.html import HTML
from gpubench.formats.json import JSON
from gpubench.formats.jsonl import JSONL
from gpubench.formats.junit import JUNIT
from gpubench.formats.markdown import MARKDOWN
from gpubench.formats.prometheus import PROMETHEUS
from gpubench.formats.table import TABLE
from gpubench.formats.writer import Format

FORMATS: tuple[Format, ...] = (TABLE, CSV, JSON, JSONL, JUNIT, PROMETHEUS, MARKDOWN, GITHUB, HTML)
