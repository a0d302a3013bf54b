"""Libraries for people: what is here with who uses it, what is not, and what differs."""

from collections.abc import Iterator, Sequence

from gpubench.formats.lines import INDENT, Column, fitting, heading, lines
from gpubench.formats.table import ReportView
from gpubench.model.results.backends import LibraryKind, LibraryRow
from gpubench.model.results.report import Report
from gpubench.model.terms.units import grouped

_TITLES = {
    LibraryKind.LIBRARY: "libraries",
    LibraryKind.PACKAGE: "packages of Python",
    LibraryKind.KERNEL: "ways into GPU memory (GPUDirect)",
}


class LibrariesView(ReportView):
    """A block a host: libraries, packages, the kernel's part."""

    def end(self, report: Report) -> None:
        """The whole; of a run that was cut short there is nothing but the verdict."""
        rows = report.rows(LibraryRow)
        metadata = self._metadata
        self._page.wrap(heading(metadata, "libraries", ", ".join(metadata.hosts)))
        if metadata.source:
            self._page.wrap(f"{INDENT}{metadata.source}")
        for python in dict.fromkeys(metadata.options.get("python", ())):
            self._page.wrap(f"{INDENT}as {python} finds them")
        self._page.software(metadata)
        for host, members in grouped(rows, lambda row: row.node).items():
            if len(metadata.hosts) > 1:
                self._page.print("")
                self._page.wrap(host)
            self._host(members)
        self._page.print("")
        self._page.outcome(report)

    def _host(self, rows: Sequence[LibraryRow]) -> None:
        for kind, members in grouped(rows, lambda row: LibraryKind(row.library_kind)).items():
            here = [row for row in members if row.found]
            self._page.print("")
            self._page.wrap(_TITLES[kind])
            if here:
                self._page.table(lines(fitting(_columns(here), self._page.width - len(INDENT))))
            for row in here:
                for line in _details(row):
                    self._page.wrap(f"{INDENT}{line}", hanging=2 * len(INDENT))
            for line in _absent(members):
                self._page.wrap(f"{INDENT}{line}")


def _columns(rows: Sequence[LibraryRow]) -> list[Column]:
    return [
        Column("what", [row.library for row in rows]),
        Column("version", [row.version or ("-" if row.library_kind == LibraryKind.KERNEL else "?") for row in rows]),
        Column("used by", [", ".join(use.partition(" (")[0] for use in row.used_by) or "-" for row in rows], spare=1),
    ]


def _details(row: LibraryRow) -> Iterator[str]:
    words = [row.path or "", f"of {row.package}" if row.package else "", row.note or ""]
    if any(words):
        yield f"{row.library}: {'; '.join(filter(None, words))}"


def _absent(rows: Sequence[LibraryRow]) -> Iterator[str]:
    """What is not there, together; what is not known, each with its reason."""
    missing = [row.library for row in rows if row.found is False]
    if missing:
        yield f"not here: {', '.join(missing)}"
    for row in rows:
        if row.found is None:
            yield f"{row.library}: not known: {row.note or 'no answer'}"
