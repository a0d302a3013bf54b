"""Files that say which leaf a node hangs on."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.errors import UsageError
from gpubench.measure.scan.report import slurm_hostlist
from gpubench.readers.leaves import expand_hostlist, find_leaves, read_leaves

TOPOLOGY = """
# two leaves and a spine
SwitchName=leaf1 Nodes=node[00-03],login \\
  LinkSpeed=400
switchname=leaf2 nodes=rack[1-2]n[1,3-4]
SwitchName=spine Switches=leaf[1-2]
"""


def test_topology_conf(tmp_path: Path) -> None:
    (tmp_path / "t").write_text(TOPOLOGY)
    found = read_leaves(tmp_path / "t")
    assert [host for host, leaf in found.items() if leaf == "leaf1"] == [
        "node00",
        "node01",
        "node02",
        "node03",
        "login",
    ]
    assert [host for host, leaf in found.items() if leaf == "leaf2"] == [
        *("rack1n1", "rack1n3", "rack1n4", "rack2n1", "rack2n3", "rack2n4")
    ]


@pytest.mark.parametrize("between", [" ", "\t", ",", ", ", ";"])
def test_two_columns(tmp_path: Path, between: str) -> None:
    (tmp_path / "t").write_text(f"# node leaf\na{between}one\nb{between}two  # far\n\n")
    assert read_leaves(tmp_path / "t") == {"a": "one", "b": "two"}


def test_names_with_and_without_their_domain_are_the_same() -> None:
    assert find_leaves(["a.cluster", "b"], {"a": "one", "b.cluster": "two"}, "file") == ("one", "two")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a b c\n", "has no leaf"),
        ("Nodes=a\n", "has no leaf"),
        ("a one\na two\n", "is connected to one and to two"),
        ("SwitchName=s Switches=a\n", "has no leaf"),
        ("node[0-] x\n", "not a list of nodes|not a range"),
        ("node[3-1] x\n", "not a range"),
        ("node[0-9999999999] x\n", "not a range"),
        ("n[0-99999]m[0-99999] x\n", "more than"),
        ("n[[0]] x\n", "not a list of nodes"),
        ("", "is empty"),
    ],
)
def test_what_is_no_list_of_leaves_is_told(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(UsageError, match=said):
        read_leaves(tmp_path / "t")


@given(st.lists(st.tuples(st.sampled_from(["n", "gpu-", "r1n"]), st.integers(0, 200)), min_size=1, max_size=30))
def test_what_is_excluded_is_read_back(named: list[tuple[str, int]]) -> None:
    hosts = {f"{stem}{number}" for stem, number in named} | {"login", "x007", "x008"}
    assert set(expand_hostlist(slurm_hostlist(sorted(hosts)), "here")) == hosts


@given(st.text(max_size=40))
def test_no_text_breaks_the_reader_of_lists(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert len(expand_hostlist(text, "here")) <= 2**17
