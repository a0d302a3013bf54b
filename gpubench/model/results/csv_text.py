r"""Text in a cell of gpubench's CSV: no spreadsheet computes it, no terminal or runner obeys it, and it is read back.

A text that could do harm gets an apostrophe before it, as spreadsheets mark text, and escapes in the place of its
backslashes and of what cannot be printed: `=1+1` is `'=1+1`, and ESC `'\x1b`. Of a text that begins with an apostrophe
nobody could tell whether it was marked, so it is marked too.
"""

import re
from collections.abc import Sequence

from gpubench.model.results.report import Metadata
from gpubench.model.results.result_file import MODELS
from gpubench.model.terms.foreign_text import escaped

_MARK = "'"
_HARMFUL = re.compile(r"\s*(?:[=+\-@']|::)|.*##[A-Za-z]*\[", re.DOTALL)
"""The beginnings of formulas, of marked texts and of GitHub's commands, and Azure's commands anywhere."""

_ESCAPE = re.compile(r"\\(?:\\|t|n|r|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
_SPELLED = {"\\\\": "\\", "\\t": "\t", "\\n": "\n", "\\r": "\r"}


def marked_text(text: str) -> str:
    """A text as a cell that does nothing; `unmarked_text` is the inverse."""
    if text.isprintable() and not _HARMFUL.match(text):
        return text
    shown = "".join(map(escaped, text.replace("\\", "\\\\")))
    return _MARK + shown.replace("##", r"#\x23")


def unmarked_text(cell: str) -> str:
    """The text that a cell was made of."""
    return _ESCAPE.sub(_character, cell[1:]) if cell.startswith(_MARK) else cell


def _character(escape: re.Match[str]) -> str:
    return _SPELLED.get(escape[0]) or chr(int(escape[0][2:], 16))


WIDE_COLUMNS = ("run_id", "run_started_at", "run_hosts", "run_gpus", "run_driver", "run_nccl")
"""Run and time (UTC); hosts and models of GPUs, with semicolons between; versions of driver and NCCL."""


def wide_cells(metadata: Metadata) -> Sequence[str]:
    """The cells of these columns; empty where it is not known."""
    libraries = metadata.libraries
    hosts = dict.fromkeys(metadata.hosts)
    driver, nccl = (libraries.get(name, "").split(" ")[0] for name in ("driver", "NCCL"))
    return metadata.run_id, metadata.started_at, ";".join(hosts), ";".join(_gpus(metadata)), driver, nccl


def _gpus(metadata: Metadata) -> list[str]:
    """The models of the GPUs: of ranks, of copies, or of the nodes that were checked."""
    named = [rank.gpu for rank in metadata.ranks if rank.gpu]
    described = metadata.options.get("gpus")
    if not named and isinstance(described, dict):
        named = [str(each).partition(" ")[2] for each in described.values()]
    return list(dict.fromkeys(named or map(str, metadata.options.get(MODELS) or ())))
