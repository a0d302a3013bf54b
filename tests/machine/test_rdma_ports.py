"""Ports of RDMA devices: their words, counters, addresses and device files."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.machine.nics import read_rdma_ports
from gpubench.machine.sysfs import read_sysfs
from gpubench.model.facts.snapshot import Gid, RdmaPort
from gpubench.model.terms.plain import from_plain, to_plain
from tests.fakes.sysfs import CONNECTX7, Tree, port

GIDS = (
    ("fe80:0000:0000:0000:ba3f:d2ff:fe00:0001", "IB/RoCE v1", "link_local"),
    ("fe80:0000:0000:0000:ba3f:d2ff:fe00:0001", "RoCE v2", "link_local"),
    ("0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1", "ipv4"),
    ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2", "ipv4"),
    ("2001:0db8:0000:0000:0000:0000:0000:0001", "RoCE v2", "global"),
)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def a_nic(tree: Tree, *ports: dict[str, str]) -> Path:
    """The folder of its first port."""
    device = tree.pci("pci0000:15/0000:18:00.0", CONNECTX7)
    return tree.rdma("mlx5_0", device, *(ports or (port(),))) / "ports/1"


def only(tree: Tree) -> RdmaPort:
    (found,) = read_rdma_ports(tree.root)
    return found


def test_a_port_with_everything(tree: Tree) -> None:
    folder = a_nic(tree, port(link_layer="Ethernet"))
    for name, text in (("counters/link_downed", "3"), ("counters/port_xmit_data", "9"), ("counters/symbol_error", "?")):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text + "\n")
    (folder / "hw_counters").mkdir()
    (folder / "hw_counters/out_of_sequence").write_text("12\n")
    (folder / "hw_counters/lifespan").write_text("10\n")
    (folder / "gids").mkdir()
    (folder / "gid_attrs/types").mkdir(parents=True)
    for index, (address, kind, _) in enumerate(GIDS):
        (folder / f"gids/{index}").write_text(address + "\n")
        (folder / f"gid_attrs/types/{index}").write_text(kind + "\n")
    (folder / "gids/7").write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    (folder / "gid_attrs/types/7").write_text("RoCE v2\n")
    tree.write("sys/class/infiniband_verbs/uverbs3/ibdev", "mlx5_0")
    tree.write("sys/class/infiniband_verbs/abi_version", "6")
    facts = read_sysfs(tree.root).node
    assert facts.rdma_ports == (
        RdmaPort(
            nic="mlx5_0",
            physical_state="linkup",
            link_layer="Ethernet",
            counters={"link_downed": 3},
            hardware_counters={"out_of_sequence": 12},
            gids=tuple(Gid(index=i, kind=kind, address=sort) for i, (_, kind, sort) in enumerate(GIDS)),
            device_file="/dev/infiniband/uverbs3",
        ),
    )
    assert facts.nics[0].name == "mlx5_0"
    assert from_plain(RdmaPort, to_plain(facts.rdma_ports[0])) == facts.rdma_ports[0]


def test_several_ports_are_named_as_their_nics_are(tree: Tree) -> None:
    a_nic(tree, port(), {"phys_state": "2: Polling"})
    facts = read_sysfs(tree.root).node
    assert [each.nic for each in facts.rdma_ports] == [each.name for each in facts.nics] == ["mlx5_0:1", "mlx5_0:2"]
    assert facts.rdma_ports[1].physical_state == "polling"


def test_a_device_that_is_gone_costs_no_other(tree: Tree) -> None:
    tree.symlink("sys/class/infiniband/mlx5_gone", "nowhere")
    a_nic(tree)
    assert [each.nic for each in read_rdma_ports(tree.root)] == ["mlx5_0", "mlx5_gone"]


@given(st.text(max_size=40), st.text(max_size=40))
def test_no_text_of_a_port_is_an_error(tmp_path_factory: pytest.TempPathFactory, text: str, address: str) -> None:
    tree = Tree(tmp_path_factory.mktemp("port"))
    folder = tree.rdma("mlx5_0", None, {}) / "ports/1"
    (folder / "gid_attrs/types").mkdir(parents=True)
    (folder / "gids").mkdir()
    (folder / "hw_counters").mkdir()
    for name in ("phys_state", "link_layer", "gid_attrs/types/0", "hw_counters/out_of_sequence"):
        (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    (folder / "gids/0").write_bytes(address.encode("utf-8", "surrogatepass"))
    found = only(tree)
    assert (found.physical_state or "").isprintable()
    assert all(gid.kind.isprintable() for gid in found.gids or ())
