"""Names of dated results, and which results are of one kind."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpubench.model.results.history import DatedName, ResultHead
from gpubench.model.results.report import Metadata
from tests.formats.sample import METADATA


def head(metadata: Metadata = METADATA, **options: Any) -> ResultHead:
    changed = replace(metadata, options=dict(metadata.options) | options)
    return ResultHead.of(json.loads(json.dumps(changed.to_record())), "x.json", "PASS", complete=True)


@given(st.text(min_size=1), st.integers(1, 999), st.integers(0, 3))
def test_a_name_is_read_as_it_was_written_whatever_a_host_is_called(host: str, number: int, others: int) -> None:
    hosts = (host, *(f"other{each}" for each in range(others)))
    name = DatedName.of(replace(METADATA, hosts=hosts), number)
    assert DatedName.parse(str(name)) == name
    assert "/" not in str(name)
    assert len(str(name)) < 255


@pytest.mark.parametrize("text", ["base.json", ".2026-11-20T080000Z-allreduce-n1.json.x", "2026-11-20.json", ""])
def test_other_names_say_nothing(text: str) -> None:
    assert DatedName.parse(text) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (head(dtypes=["bfloat16"]), "other options: dtypes bfloat16, not float32"),
        (head(sizes=list(range(40))), "other options: sizes"),
        (head(replace(METADATA, hosts=("n2",))), "another machine: n2, not n1"),
        (head(replace(METADATA, hosts=("n1", "n2"))), "another machine: n1 and 1 more, not n1"),
        (head(replace(METADATA, origin="simulated")), "another origin: simulated, not measured"),
        (head(replace(METADATA, backend="host")), "other options: backend host, not nccl"),
    ],
)
def test_another_kind_says_in_what(changed: ResultHead, words: str) -> None:
    assert changed.kind != head().kind
    assert list(changed.find_differences(head())) == [words]


def test_a_lost_gpu_is_another_kind_on_the_same_machine() -> None:
    fewer = head(replace(METADATA, ranks=METADATA.ranks[:1]))
    assert fewer.machine == head().machine
    assert list(fewer.find_differences(head())) == [
        "other GPUs: 1 × NVIDIA H200, not 2 × NVIDIA H200",
        "other options: ranks 1, not 2",
    ]
