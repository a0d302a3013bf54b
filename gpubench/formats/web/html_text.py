"""Words in a page: the only way for text into HTML."""

from html import escape

from gpubench.model.terms.foreign_text import printable_line


def html_text(text: str) -> str:
    """A text as HTML shows it, in an element or an attribute: no markup, no control characters, no runner's command."""
    return escape(printable_line(text))
