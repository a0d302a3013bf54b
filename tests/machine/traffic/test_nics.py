"""Byte counters of ports and interfaces, from trees made of the kernel's documentation."""

from pathlib import Path

import pytest

from gpubench.machine.nics import NicCounters
from tests.fakes.sysfs import Tree, port


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    made = Tree(tmp_path)
    hca = made.pci("pci0000:00/0000:1b:00.0", {"vendor": "0x15b3"})
    ethernet = made.pci("pci0000:00/0000:02:00.0", {"vendor": "0x8086"})
    rdma = made.rdma("mlx5_0", hca, port(), port(state="1: DOWN"))
    for number in ("1", "2"):
        counters = rdma / "ports" / number / "counters"
        counters.mkdir()
        (counters / "port_xmit_data").write_text(f"{number}000\n")
        (counters / "port_rcv_data").write_text("8\n")
        (counters / "port_rcv_errors").write_text("3\n")
    for name, device in (("ib0", hca), ("eth0", ethernet)):
        folder = made.interface(name, device, operstate="up")
        (folder / "statistics").mkdir()
        (folder / "statistics/tx_bytes").write_text("77\n")
        (folder / "statistics/rx_bytes").write_text("88\n")
    made.write("sys/class/net/lo/statistics/tx_bytes", "5")
    made.write("sys/class/net/lo/statistics/rx_bytes", "5")
    return made


def test_a_counter_that_is_full_or_gone_is_unknown(tree: Tree) -> None:
    counters = NicCounters(tree.root)
    folder = tree.root / "sys/class/infiniband/mlx5_0/ports/1/counters"
    (folder / "port_xmit_data").write_text(f"{2**32 - 1}\n")
    (folder / "port_rcv_data").unlink()
    (tree.root / "sys/class/net/eth0/statistics/tx_bytes").unlink()
    found = {each.name: each for each in counters.read()}
    assert (found["mlx5_0:1"].sent_bytes, found["mlx5_0:1"].received_bytes) == (None, None)
    assert found["mlx5_0:1"].unknown == {
        "sent": "the counter has 32 bits and has reached its maximum",
        "received": "port_rcv_data: No such file or directory",
    }
    assert found["eth0"].unknown == {"sent": "tx_bytes cannot be read"}


def test_errors_are_read_seldom(tree: Tree) -> None:
    counters = NicCounters(tree.root)
    errors = tree.root / "sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_errors"
    seen = []
    for number in range(11):
        seen.append(counters.read()[0].errors["port_rcv_errors"])
        errors.write_text(f"{number + 4}\n")
    assert seen == [3] * 10 + [13]
