"""TOML of our own."""

import tomllib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpubench.model.profiles.learning import format_toml
from tests.formats.hostile import line_problems


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
@example("##[error]")
@example("\x7f\u202e::x")
def test_text_is_read_back_and_does_nothing(text: str) -> None:
    document = format_toml({"title": text, "x": [{f"key {text}": text}]})
    assert list(line_problems(document)) == []
    assert tomllib.loads(document) == {"title": text, "x": [{f"key {text}": text}]}


@pytest.mark.parametrize("character", ["\x7f", "\u202e", "\U000e0041"])
def test_what_cannot_be_printed_is_escaped(character: str) -> None:
    assert format_toml({"title": character}) == f'title = "\\U{ord(character):08x}"\n'
