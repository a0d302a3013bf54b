"""The lines of a log as nccl-tests wrote them: without lines of NCCL's own, which tear rows apart."""

import re
from collections.abc import Collection

from gpubench.readers.results.nccl_tests.names import ELEMENT_TYPES, REDUCTIONS

TORN = "\ufffd"
"""Stands where digits may be of a row or of a host's name. No value looks like it, so that such a row is damaged."""

_NCCL_LINE = re.compile(
    r"(?:\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[\d.]*\]? )?(?P<glued>(?<![\w.-])[\w.-]{0,280}):\d{1,10}:\d{1,10} "
    r"\[-?\d{1,9}\](?: \S+:\d{1,9}(?: \([^()]*\))?)? NCCL [A-Z]+ .*"
)
_CELL = re.compile(rf"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|N/A|{'|'.join((*REDUCTIONS, *ELEMENT_TYPES))}")


def without_nccl(text: str, hosts: Collection[str]) -> str:
    """A text without the line that NCCL wrote into it; `hosts` tell the row's last digits from a host that has some."""
    return _NCCL_LINE.sub(lambda found: _of_row(found["glued"], text[: found.start()], hosts), text)


def _of_row(glued: str, before: str, hosts: Collection[str]) -> str:
    """The beginning of a word that is a cell of a row; the rest is a host's name, which NCCL wrote right behind."""
    for host in sorted(hosts, key=len, reverse=True):
        cell = glued.removesuffix(host)
        if cell != glued and (not cell or _CELL.fullmatch(cell)):
            return cell
    return TORN if before.strip() and _CELL.match(glued) else ""
