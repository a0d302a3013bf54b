"""The past runs of one machine in a folder of dated results, for the trend on a page."""

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from gpubench.errors import UsageError
from gpubench.model.results.history import DatedName, ResultHead
from gpubench.model.results.report import Metadata
from gpubench.model.results.trends import headline_figures
from gpubench.model.terms.verdict import Verdict
from gpubench.readers.results.history import Kept, list_results, read_head
from gpubench.readers.results.registry import read_results

MOST_RUNS = 30
"""Runs of a command that are read."""

MOST_LOOKED_AT = 200
"""Names of a command whose beginnings are read to find them."""

PastRun = tuple[str, Verdict, Mapping[str, float]]
"""The time when a run began, its verdict, its headline figures."""


def past_runs(folder: Path, metadata: Metadata) -> list[PastRun]:
    """The runs before one on its machine: of its command those of its kind, of other commands those of the newest kind.

    Files that cannot be used tell nothing; `gpubench compare --last` says why. Raises UsageError where the folder
    cannot be read.
    """
    kept = list_results(folder)
    own = ResultHead.of(metadata.to_record(), "", Verdict.ERROR, complete=False)
    host = DatedName.host_of(metadata.hosts)
    by_command: dict[str, list[DatedName]] = {}
    for name in kept.names:
        if name.host == host:
            by_command.setdefault(name.command, []).append(name)
    return [run for command, names in by_command.items() for run in islice(_runs(kept, command, names, own), MOST_RUNS)]


def _runs(kept: Kept, command: str, names: list[DatedName], own: ResultHead) -> Iterator[PastRun]:
    kind = own.kind if command == own.command else None
    for name in names[:MOST_LOOKED_AT]:
        try:
            head = read_head(kept.path(name))
            if not _is_past(head, own) or kind not in (None, head.kind):
                continue
            file = read_results(kept.path(name))
        except UsageError:
            continue
        figures = headline_figures([*file.rows, *file.pairs])
        if not figures:
            continue
        kind = head.kind
        yield head.started_at, Verdict(head.verdict), figures


def _is_past(head: ResultHead, own: ResultHead) -> bool:
    """True if it is a whole run of that machine, before this one; a file without GPUs may be of any."""
    if not head.complete or head.run_id == own.run_id or head.started_at > own.started_at:
        return False
    known = set(head.models), set(own.models)
    return head.machine == own.machine and (known[0] == known[1] or not all(known))
