"""Launchers' tags and NCCL's lines in the middle of rows."""

import re
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.result_file import UserFacts
from gpubench.readers.results.nccl_tests.text import TORN, read, strip_nccl
from tests.fakes.old_nccl_tests import old_output

SAID = "NCCL INFO Channel 00/0 : 3[3] -> 0[0] via P2P/CUMEM"
TEXT = old_output("all_reduce")
"""Its only host is 38ab0."""


def without_paths(rows: Sequence[CollectiveRow]) -> tuple[CollectiveRow, ...]:
    """The rows without what NCCL's lines among them say."""
    return tuple(replace(row, transport=None, host_staged=None) for row in rows)


@pytest.mark.parametrize(
    ("text", "row"),
    [
        (f"38ab0:26:26 [0] {SAID}", ""),
        (f"  0.00      038ab0:26:26 [0] {SAID}", "  0.00      0"),
        (f"  0.00  0.0038ab0:26:26 [0] {SAID}", "  0.00  0.00"),
        (f"  0.00  38ab0:26:26 [0] {SAID}", "  0.00  "),
        (f"  0.00  0n1:26:26 [0] {SAID}", "  0.00  0"),
        (f"  0.00  other:26:26 [0] {SAID}", "  0.00  "),
        (f"  0.00  38dcf1:26:26 [0] {SAID}", f"  0.00  {TORN}"),
        (f"38dcf1:26:26 [0] {SAID}", ""),
        (f"  0.00  [2026-01-02 08:00:00] n1:26:26 [0] misc/x.cc:12 (f) {SAID}", "  0.00  "),
    ],
)
def test_lines_of_nccl(text: str, row: str) -> None:
    assert strip_nccl(text, {"38ab0", "n1"}) == row


def test_tags_in_the_middle_of_rows_change_nothing() -> None:
    torn = re.sub(r"(sum)(  .{7})", r"\1[1,0]<stdout>:\2[1,0]<stdout>:", TEXT)
    tagged = "\n".join(f"[1,0]<stdout>:{line}" for line in torn.split("\n"))
    assert tagged.count("<stdout>") > len(TEXT.split("\n")) + 2
    assert without_paths(read(tagged, "x").rows) == read(TEXT, "x").rows


def test_a_row_goes_on_behind_lines_of_other_ranks() -> None:
    said = f"\n[1,3]<stderr>:something of rank 3\n[1,3]<stdout>:38ab0:26:26 [0] {SAID}\n[1,0]<stdout>:"
    torn = re.sub(r"(  sum)(  )", rf"\1{said}\2", TEXT)
    tagged = "\n".join(line if line.startswith("[1,") else f"[1,0]<stdout>:{line}" for line in torn.split("\n"))
    assert without_paths(read(tagged, "x").rows) == read(TEXT, "x").rows


@pytest.mark.parametrize("host", ["38ab0", "38dcf168f605"])
def test_a_host_that_begins_with_a_digit_is_no_wrong_element(host: str) -> None:
    plain = old_output("all_reduce", wrong="0")
    whole = read(plain, "x")
    assert len(whole.rows) == 4
    for place in range(1, 9):
        torn = re.sub(rf"(33554432 .* sum(?: +\S+){{{place}}})", rf"\g<1>{host}:26:26 [0] {SAID}\n", plain)
        found = read(torn, "x", UserFacts(collective="allreduce"))
        assert {row.wrong for row in found.rows} == {0}
        if host == "38ab0":
            assert without_paths([replace(found.rows[-1], note=None)]) == (replace(whole.rows[-1], note=None),)
        else:
            assert len(found.rows) == 2
            assert len(found.left_out) == 1


def test_a_line_behind_a_launchers_prefix_goes_on_with_a_row_of_the_same_prefix_alone() -> None:
    torn = re.sub(r"(33554432 .* sum)(  )", rf"\g<1>38ab0:1:1 [0] {SAID}\n\2", TEXT)
    labelled = "\n".join(f"0: {line}" for line in torn.split("\n"))
    assert without_paths(read(labelled, "x").rows) == read(TEXT, "x").rows
    foreign = torn.replace(SAID + "\n", SAID + "\nprogress ")
    assert len(read(foreign, "x", UserFacts(collective="allreduce")).left_out) == 1
