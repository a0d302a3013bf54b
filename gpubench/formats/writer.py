"""The parts of every output format: its entry in the registry, and a writer that takes rows as they are measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from gpubench.model.results.report import Metadata, Report, Row


class Writer(Protocol):
    """One output. `begin`, then rows, then `end`; `end` is called also when the run was cut short."""

    def begin(self, metadata: "Metadata", columns: Sequence[str]) -> None:
        """The run is set up. `columns` are those of the rows that follow; none where all comes with the report."""
        ...

    def row(self, row: "Row") -> None:
        """One more row; on disk when this returns."""
        ...

    def end(self, report: "Report") -> None:
        """The run is over."""
        ...


@dataclass(frozen=True, slots=True)
class Style:
    """The look of an output: columns of the terminal or page, and whether colours may be used.

    `section` is what formats show that show only one; None is the report's main one. `plot` adds curves to a table.
    `history` is a folder of dated results, whose trend a page shows; `verbose` has headers in full; `wide` has every
    line of CSV say of which run it is.
    """

    width: int = 100
    color: bool = False
    section: str | None = None
    plot: bool = False
    history: Path | None = None
    verbose: bool = False
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """The place of an output: an open stream, or a file that is opened when the run begins."""

    stream: TextIO | None = None
    path: Path | None = None

    def open(self) -> TextIO:
        """The stream to write to."""
        if self.stream is not None:
            return self.stream
        if self.path is None:
            raise ValueError("a target has a stream or a path")
        return self.path.open("w", encoding="utf-8", newline="")


@dataclass(frozen=True, slots=True)
class Format:
    """An output format: its name on the command line, the file suffix that picks it, and what makes its writers.

    A format without a suffix is for stdout alone. `maker` is 'module:name', imported when the first writer is made.
    """

    name: str
    suffix: str | None
    summary: str
    maker: str

    @property
    def writer(self) -> Callable[[Target, Style], Writer]:
        """Makes a writer for a target."""
        module, _, name = self.maker.partition(":")
        make: Callable[[Target, Style], Writer] = getattr(import_module(f"gpubench.formats.{module}"), name)
        return make
