"""Print the libraries on each host: those found with the programs that use them, those missing, and those not known."""

from collections.abc import Iterator, Sequence

from gpubench.formats.layout import INDENT, Column
from gpubench.formats.table import ReportView
from gpubench.model.results.backends import LibraryKind, LibraryRow
from gpubench.model.results.report import Report
from gpubench.model.terms.units import group_by

_TITLES = {
    LibraryKind.LIBRARY: "libraries",
    LibraryKind.PACKAGE: "Python packages",
    LibraryKind.KERNEL: "kernel paths into GPU memory (GPUDirect)",
}
_COLUMNS = (
    Column("what", "library"),
    Column("version", lambda row: row.version or ("-" if row.library_kind == LibraryKind.KERNEL else "?")),
    Column("used by", lambda row: ", ".join(use.partition(" (")[0] for use in row.used_by) or "-", 1),
)


class LibrariesView(ReportView):
    """Prints libraries, Python packages and kernel modules for each host."""

    def end(self, report: Report) -> None:
        rows = report.rows(LibraryRow)
        metadata = self._metadata
        self._page.heading(metadata, "libraries", ", ".join(metadata.hosts))
        if metadata.source:
            self._page.wrap(f"{INDENT}{metadata.source}")
        for python in dict.fromkeys(metadata.options.get("python", ())):
            self._page.wrap(f"{INDENT}as found by {python}")
        self._page.software(metadata)
        for host, members in group_by(rows, lambda row: row.node).items():
            if len(metadata.hosts) > 1:
                self._page.print("")
                self._page.wrap(host)
            self._host(members)
        self._page.print("")
        self._page.outcome(report)

    def _host(self, rows: Sequence[LibraryRow]) -> None:
        for kind, members in group_by(rows, lambda row: LibraryKind(row.library_kind)).items():
            here = [row for row in members if row.found]
            self._page.print("")
            self._page.wrap(_TITLES[kind])
            if here:
                self._page.table(_COLUMNS, here)
            for row in here:
                for line in _details(row):
                    self._page.wrap(f"{INDENT}{line}", hanging=2 * len(INDENT))
            for line in _absent(members):
                self._page.wrap(f"{INDENT}{line}")


def _details(row: LibraryRow) -> Iterator[str]:
    inside = f"with {', '.join(row.transports)}" if row.transports else ""
    words = [row.path or "", f"of {row.package}" if row.package else "", inside, row.note or ""]
    if any(words):
        yield f"{row.library}: {'; '.join(filter(None, words))}"


def _absent(rows: Sequence[LibraryRow]) -> Iterator[str]:
    """Yield one line with all missing libraries, then one line per library that could not be checked."""
    missing = [row.library for row in rows if row.found is False]
    if missing:
        yield f"not here: {', '.join(missing)}"
    for row in rows:
        if row.found is None:
            yield f"{row.library}: not known: {row.note or 'no answer'}"
