"""Text in cells of CSV."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpubench.model.results.result_file import mark_text, unmark_text


@given(st.one_of(st.text(), st.text(alphabet="=+-@'\\:#[xuU019afnrt \t\r\n\ud800\u202e")))
@example("'\\x41")
@example("\\x41")
@example("=\\x41")
def test_a_cell_is_read_back(text: str) -> None:
    cell = mark_text(text)
    assert unmark_text(cell) == text
    assert cell.isprintable()
    assert cell.lstrip()[:1] not in set("=+-@")


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("", ""),
        ("NVIDIA H200", "NVIDIA H200"),
        ("C:\\x1b", "C:\\x1b"),
        ("=1+1", "'=1+1"),
        (" -1", "' -1"),
        ("'a", "''a"),
        ("a\nb\\", "'a\\nb\\\\"),
        ("::error::x", "'::error::x"),
        ("a ##[error]x", "'a #\\x23[error]x"),
    ],
)
def test_what_could_do_harm_is_marked(text: str, cell: str) -> None:
    assert mark_text(text) == cell


def test_what_a_person_wrote_behind_an_apostrophe_is_kept() -> None:
    assert unmark_text("'C:\\new \\q") == "C:\new \\q"
