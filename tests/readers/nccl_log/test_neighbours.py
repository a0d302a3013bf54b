"""Neighbours in rings and trees, from lines that NCCL 2.28.9 wrote on four H200s and from mangled ones."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.readers.nccl_log.lines import ring_pairs, tree_pairs

LOGS = Path(__file__).parents[2] / "logs"
HEAD = b"vm:4310:4310 [0] NCCL INFO "


def test_the_chain_of_four_h200s() -> None:
    pairs: set[tuple[int, int]] = set()
    for path in sorted((LOGS / "h200x4-normal").glob("*.log")):
        for line in path.read_bytes().splitlines():
            pairs.update(tree_pairs(line))
    assert pairs == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)}


def test_the_last_tree_of_a_line_that_was_cut_off_is_not_believed() -> None:
    trees = b"".join(b" [%d] 12/-1/-1->3->1" % channel for channel in range(64))
    whole = (HEAD + b"Trees" + trees)[:1023]
    cut = whole[: whole.rindex(b"->3->1") + len(b"->3->")]
    assert tree_pairs(whole) == ((1, 3), (3, 1), (3, 12), (12, 3))
    assert tree_pairs(cut + b"14") == ((1, 3), (3, 1), (3, 12), (12, 3))


@pytest.mark.parametrize(
    "text", [b"", b"Ring", b"Ring 00 : 3 -> 0", b"Channel 00/24 : 0 1 2 3", b"Trees", b"Trees [0]"]
)
def test_other_lines_name_nobody(text: bytes) -> None:
    assert ring_pairs(HEAD + text) == ()
    assert tree_pairs(HEAD + text) == ()


@given(st.binary(max_size=200))
def test_junk_never_raises(junk: bytes) -> None:
    for lead in (b"", HEAD + b"Ring ", HEAD + b"Trees [0] "):
        assert all(source != destination for source, destination in ring_pairs(lead + junk))
        tree_pairs(lead + junk)
