"""One line for monitoring: a Nagios plugin's, with performance data, and a node-problem-detector plugin's.

They come with `--exit-style`, which also chooses the exit code; they are no formats of their own.
"""

from collections.abc import Iterator
from typing import NamedTuple

from gpubench.formats.document import DocumentRun, documents
from gpubench.formats.exit_style import STATES, nagios_line, npd_line
from gpubench.model.results.report import CollectiveRow, PairRow


class _Figure(NamedTuple):
    """A performance figure: a name that says its unit, since Nagios has none for bandwidth; its least and most."""

    label: str
    value: float
    most: float | None = None

    def __str__(self) -> str:
        return f"'{self.label}'={self.value:g};;;0;{'' if self.most is None else f'{self.most:g}'}"


def _nagios(run: DocumentRun) -> Iterator[str]:
    """Nothing of a run that was cut short: whoever ends it says why, in the one line there is."""
    if not run.report.complete:
        return
    from gpubench.formats.blocks import title

    figures = " ".join(map(str, _figures(run)))
    yield nagios_line(title(run.metadata), STATES[run.report.verdict], summary(run), figures)


def _npd(run: DocumentRun) -> Iterator[str]:
    if run.report.complete:
        yield npd_line(f"{run.report.verdict}: {summary(run)}")


def summary(run: DocumentRun) -> str:
    """The report's sentence without its verdict, which the line has already."""
    return run.report.sentence.removeprefix(f"{run.report.verdict}: ")


def _figures(run: DocumentRun) -> Iterator[_Figure]:
    from gpubench.model.results.curves import HOST

    rows = [row for row in run.rows if isinstance(row, CollectiveRow)]
    if rows:
        peak = max(rows, key=lambda row: row.reached_gb_s)
        if peak.busbw_gb_s is not None:
            yield _Figure("peak_busbw_gb_s", round(peak.busbw_gb_s, 3), peak.limit_gb_s)
        yield _Figure("time_us_smallest", round(min(rows, key=lambda row: (row.size_bytes, row.time_us)).time_us, 3))
        if any(row.wrong is not None for row in rows):
            yield _Figure("wrong_elements", sum(row.wrong or 0 for row in rows))
    pairs = [row for row in run.rows if isinstance(row, PairRow) and HOST not in (row.source, row.destination)]
    reached = [row for row in pairs if row.peer != "off" and row.bandwidth_gb_s is not None]
    largest = max((row.size_bytes or 0 for row in reached), default=0)
    slowest = min(
        (row for row in reached if row.size_bytes == largest), key=lambda row: row.bandwidth_gb_s or 0.0, default=None
    )
    if slowest is not None and slowest.bandwidth_gb_s is not None:
        yield _Figure("slowest_pair_gb_s", round(slowest.bandwidth_gb_s, 3), slowest.limit_gb_s)
    yield _Figure("findings", len(run.report.findings))


nagios_writer, npd_writer = documents(_nagios), documents(_npd)
