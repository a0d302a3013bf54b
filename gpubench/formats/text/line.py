"""The lines of a page: the only place where text becomes what a terminal is sent."""

from typing import TYPE_CHECKING

from gpubench.model.terms.foreign_text import printable_line

if TYPE_CHECKING:
    from rich.text import Text


def line_text(line: str, style: str = "") -> "Text":
    """A line as rich prints it; whatever others wrote into it, it is one line and only shows something."""
    from rich.text import Text

    return Text(printable_line(line), style=style)
