"""The file from which NCCL takes a topology, right, stale and broken."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.machine.process import read_topology_file
from gpubench.model.facts.process import TopologyFile
from gpubench.model.terms.plain import from_plain, to_plain
from tests.fakes.sysfs import Tree

XML = """\
<system version="1">
  <cpu numaid="0" arch="x86_64"><pci busid="ffff:ff:01.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">
    <pci busid="0001:00:00.0" class="0x030200" link_speed="2.5 GT/s" link_width="1"><gpu dev="0"/></pci></pci></cpu>
  <cpu numaid="-1"><pci busid="0000:1B:00.0" class="0x020700"/></cpu><cpu numaid="odd"/>
</system>
"""
DEFAULT = "var/run/nvidia-topologyd/virtualTopology.xml"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_what_is_in_a_file_that_is_set(tree: Tree) -> None:
    tree.write("opt/topo.xml", XML)
    file = read_topology_file({"NCCL_TOPO_FILE": "/opt/topo.xml"}, tree.root)
    assert file == TopologyFile(
        path="/opt/topo.xml",
        by="NCCL_TOPO_FILE",
        links={"ffff:ff:01.0": "16.0 GT/s PCIe x16", "0001:00:00.0": "2.5 GT/s x1", "0000:1b:00.0": "? x?"},
        numa_nodes=(0, -1),
    )
    assert from_plain(TopologyFile, to_plain(file)) == file


def test_nccls_own_default_counts_where_it_is_there(tree: Tree) -> None:
    assert read_topology_file({}, tree.root) is None
    tree.write(DEFAULT, XML)
    file = read_topology_file({}, tree.root)
    assert file is not None
    assert (file.path, file.by, len(file.links)) == (f"/{DEFAULT}", "NCCL's default", 3)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "topo.xml: No such file or directory"),
        ("", "the file, line 2: the XML is broken at column 1: no element found"),
        (XML[:200], "the file, line 3: the XML is broken at column 5: unclosed token"),
        ("<graphs/>", "the file, line 1: <graphs> instead of <system>"),
        ("<system>" + "<a>" * 100, "the file, line 1: <a>: elements are nested more than 64 deep"),
        ("<system>" + " " * 4 * 2**20, "it has more than 4 MiB"),
    ],
    ids=["missing", "empty", "cut", "another root", "nested", "long"],
)
def test_a_file_that_is_of_no_use_says_why(tree: Tree, text: str | None, reason: str) -> None:
    if text is not None:
        tree.write("topo.xml", text)
    file = read_topology_file({"NCCL_TOPO_FILE": "/topo.xml"}, tree.root)
    assert file is not None
    assert file.links == {}
    assert (file.unusable or "").startswith(reason)


@given(st.text(max_size=80), st.sampled_from(["", "<system><pci busid='", XML[:120]]))
def test_no_text_is_an_error(tmp_path_factory: pytest.TempPathFactory, text: str, head: str) -> None:
    tree = Tree(tmp_path_factory.getbasetemp() / "topology")
    tree.write("topo.xml", "").write_bytes((head + text).encode("utf-8", "surrogatepass"))
    file = read_topology_file({"NCCL_TOPO_FILE": "/topo.xml"}, tree.root)
    assert file is not None
    assert (file.unusable or "").isprintable()
