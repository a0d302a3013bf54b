"""Tags and labels of launchers, between which a program's own words stand."""

import pytest

from gpubench.readers.documents import prefix_shape, split_by_tag, strip_prefix


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("64 16 float", [("", "64 16 float")]),
        ("[1,0]<stdout>:64[1,0]<stdout>:  16", [("[1,0]<stdout>:", "64  16")]),
        ("[1,0]<stdout>:6[1,0]<stdout>:4", [("[1,0]<stdout>:", "64")]),
        ("[1,3]<stderr>:warn[1,0]<stdout>:64", [("[1,3]<stderr>:", "warn"), ("[1,0]<stdout>:", "64")]),
        ("job 7[1,0]<stdout>:64", [("", "job 7"), ("[1,0]<stdout>:", "64")]),
        ("[prterun-n1-7@1,0]<stdout>: 64", [("[prterun-n1-7@1,0]<stdout>:", " 64")]),
        ("\x1b[32m64\x1b[0m\r", [("", "64")]),
        ("", [("", "")]),
    ],
)
def test_pieces(line: str, expected: list[tuple[str, str]]) -> None:
    assert list(split_by_tag(line)) == expected


@pytest.mark.parametrize(
    ("first", "line", "words"),
    [
        ("", "  65.12  1", ["65.12", "1"]),
        ("0: ", "1:  65.12", ["65.12"]),
        ("[rank0]: ", "[rank0]: 65.12", ["65.12"]),
        ("2026-01-02 08:00:00 ", "2026-01-02 08:00:07  65.12", ["65.12"]),
        ("0: ", "  65.12", None),
        ("", "0: 65.12", ["0:", "65.12"]),
    ],
)
def test_words_behind_a_prefix(first: str, line: str, words: list[str] | None) -> None:
    assert strip_prefix(line, prefix_shape(first)) == words
