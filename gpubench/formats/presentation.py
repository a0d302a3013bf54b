"""Formats, files and looks that a run was asked to present its report in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from gpubench.formats.exit_style import ExitStyle
from gpubench.formats.registry import DATED, TABLE
from gpubench.formats.writer import Format

if TYPE_CHECKING:
    from gpubench.model.results.report import Metadata, Report


class Color(StrEnum):
    """The choice of colours in the table."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Output:
    """A file to write, in the format that its suffix picks; or a folder, to keep a dated result in."""

    path: Path
    format: Format


@dataclass(frozen=True, slots=True, kw_only=True)
class Presentation:
    """The outputs and the look of a report. `section`, `width` and `exit_style` are None where nobody chose.

    `defaults` are the options that stand in the environment or in `defaults_file`, each with where; `job_defaults`
    those of them that ranks have to agree about.
    """

    format: Format = TABLE
    outputs: tuple[Output, ...] = ()
    section: str | None = None
    color: Color = Color.AUTO
    width: int | None = None
    verbose: bool = False
    show_progress: bool = True
    exit_style: ExitStyle | None = None
    plot: bool = False
    wide: bool = False
    defaults: Mapping[str, str] = field(default_factory=dict)
    defaults_file: str | None = None
    job_defaults: Mapping[str, str] = field(default_factory=dict)

    @property
    def history(self) -> Path | None:
        """The folder that keeps dated results."""
        return next((output.path for output in self.outputs if output.format is DATED), None)

    def exit_code(self, metadata: "Metadata", report: "Report") -> int:
        """The exit code of the process."""
        from gpubench.model.results.ending import exit_code_of, is_strict

        if self.exit_style is None:
            return exit_code_of(metadata, report)
        return self.exit_style.code(report.verdict, strict=is_strict(metadata.options))
