"""Lines made of text that others chose."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpubench.errors import CouldNotMeasureError, GpubenchError
from gpubench.model.terms.units import format_error, printable_line
from tests.formats.hostile import HOSTILE, line_problems


@given(st.one_of(st.text(), st.text(alphabet=":#[avx \t\n\r\x1b\u2028\ud800\\")))
@example("####[[")
@example(" \t ::x")
@example(":::::")
def test_a_line_is_one_does_nothing_and_stays_as_it_is(text: str) -> None:
    line = printable_line(text)
    assert "\n" not in line
    assert list(line_problems(line)) == []
    assert printable_line(line) == line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("NVIDIA H200", "NVIDIA H200"),
        ("größer → 漢字 ✓", "größer → 漢字 ✓"),
        ("fe80::1, std::string", "fe80::1, std::string"),
        ("# 1 [a] ##", "# 1 [a] ##"),
        ("a\tb", "a b"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("a\nb\r", "a\\nb\\r"),
        ("\u202e\u2028\ud800\U000e0041", "\\u202e\\u2028\\ud800\\U000e0041"),
        ("::error::x", "\\::error::x"),
        ("  ::error::x", "  \\::error::x"),
        ("a ##[error]", "a #\\#[error]"),
        ("##vso[task.x]", "#\\#vso[task.x]"),
        ("\\x1b", "\\x1b"),
    ],
)
def test_a_line_shows_what_is_in_it(text: str, line: str) -> None:
    assert printable_line(text) == line


@pytest.mark.parametrize("text", HOSTILE.values(), ids=lambda text: repr(text[:40]))
def test_an_error_has_as_many_lines_as_it_says_things(text: str) -> None:
    error = CouldNotMeasureError(text, expected=text, reason=text, next_step=text, where=text)
    error.details = (f"  missing:  {text}", f"  NCCL RAS: {text}")
    told = format_error(GpubenchError.from_record(error.to_record()))
    assert told.count("\n") == 5
    assert told.startswith("gpubench: error: ")
    assert list(line_problems(told)) == []
