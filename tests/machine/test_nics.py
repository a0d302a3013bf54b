"""NICs of every kind, and odd ones that must not hide the others."""

from pathlib import Path

import pytest

from gpubench.machine.nics import read_nics
from gpubench.machine.sysfs import read_sysfs
from gpubench.model.facts.snapshot import NicFacts, NicKind, PcieLink
from tests.fakes.sysfs import BRIDGE, CONNECTX7, H200, Tree, link, port

EFA = {"class": "0x020000", "vendor": "0x1d0f", "device": "0xefa2"}
VIRTIO = {"class": "0x020000", "vendor": "0x1af4", "device": "0x1041"}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def only(tree: Tree) -> NicFacts:
    (nic,) = read_nics(tree.root)
    return nic


@pytest.mark.parametrize(
    ("text", "state"), [("4: ACTIVE", "active"), ("2: INIT", "init"), ("3: ARMED", "armed"), ("odd", "odd")]
)
def test_states_are_the_kernels_words(tree: Tree, text: str, state: str) -> None:
    tree.rdma("mlx5_0", tree.pci("pci0000:15/0000:18:00.0", CONNECTX7), port(text))
    assert only(tree).state == state


def test_a_port_without_a_link_has_no_rate(tree: Tree) -> None:
    tree.rdma("mlx5_0", tree.pci("pci0000:15/0000:18:00.0", CONNECTX7), port("1: DOWN", "10 Gb/sec (4X SDR)"))
    nic = only(tree)
    assert (nic.state, nic.rate_gbit_s, nic.unknown["rate_gbit_s"]) == ("down", None, "the port is down")


def test_several_ports_share_their_interfaces_out(tree: Tree) -> None:
    device = tree.pci("pci0000:15/0000:18:00.0", CONNECTX7)
    tree.rdma("mlx4_0", device, port(), port("1: DOWN", link_layer="Ethernet"), hca_type="MT26428")
    tree.interface("ib0", device, dev_port="0", mtu="2044")
    tree.interface("eth7", device, dev_port="1", mtu="1500")
    first, second = read_nics(tree.root)
    assert (first.name, first.kind, first.interfaces) == ("mlx4_0:1", NicKind.INFINIBAND, ("ib0",))
    assert (second.name, second.kind, second.interfaces) == ("mlx4_0:2", NicKind.ROCE, ("eth7",))
    assert (first.model, second.mtu) == ("MT26428", 1500)


@pytest.mark.parametrize(
    ("files", "driver", "kind"),
    [
        (EFA, "", NicKind.EFA),
        (VIRTIO, "efa", NicKind.EFA),
        (EFA | {"device": "0xec20"}, "ena", NicKind.ROCE),
        ({}, "", NicKind.ROCE),
    ],
)
def test_efa_is_known_by_driver_or_device(tree: Tree, files: dict[str, str], driver: str, kind: NicKind) -> None:
    device = tree.pci("pci0000:00/0000:00:1b.0", files, driver=driver)
    tree.rdma("rdmap0s27", device, port(rate="100 Gb/sec (4X EDR)", link_layer="Unspecified"))
    assert only(tree).kind is kind


def test_a_virtio_interface_is_named_by_the_pci_device_above_it(tree: Tree) -> None:
    device = tree.pci("pci0000:00/0000:00:03.0", VIRTIO | {"numa_node": "-1"}, driver="virtio-pci")
    virtio = device / "virtio2"
    virtio.mkdir()
    (virtio / "driver").symlink_to("../../../../bus/virtio/drivers/virtio_net")
    tree.interface("eth0", virtio, operstate="up", speed="-1", mtu="1400")
    nic = only(tree)
    assert (nic.bus_id, nic.driver, nic.model) == ("0000:00:03.0", "virtio_net", "PCI 1af4:1041")
    assert (nic.rate_gbit_s, nic.unknown["rate_gbit_s"]) == (None, "speed is -1")


@pytest.mark.parametrize("speed", ["-1", "0", "65535", "4294967295", "fast"])
def test_speeds_that_are_none(tree: Tree, speed: str) -> None:
    tree.interface("eth0", tree.pci("pci0000:00/0000:00:04.0", VIRTIO), operstate="down", speed=speed)
    nic = only(tree)
    assert (nic.state, nic.rate_gbit_s, nic.unknown["rate_gbit_s"]) == ("down", None, f"speed is {speed}")


def test_a_speed_that_cannot_be_read(tree: Tree) -> None:
    """The kernel answers EINVAL for an interface that is down; a folder cannot be read either."""
    folder = tree.interface("eth0", tree.pci("pci0000:00/0000:00:04.0", VIRTIO), operstate="down")
    (folder / "speed").mkdir()
    assert only(tree).unknown["rate_gbit_s"] == "speed: Is a directory"


def test_interfaces_without_hardware_are_left_out(tree: Tree) -> None:
    for name in ("lo", "docker0", "bond0"):
        tree.write(f"sys/devices/virtual/net/{name}/operstate", "up")
        tree.symlink(f"sys/class/net/{name}", tree.root / f"sys/devices/virtual/net/{name}")
    tree.write("sys/class/net/bonding_masters", "bond0")
    assert read_nics(tree.root) == ()


def test_odd_devices_are_shown_with_what_is_unknown_of_them(tree: Tree) -> None:
    tree.symlink("sys/class/infiniband/mlx5_gone", "nowhere")
    tree.symlink("sys/class/net/eth_gone", "nowhere")
    broken = tree.pci("pci0000:15/0000:18:00.0", {"vendor": "?", "device": "\x00"})
    tree.rdma("mlx5_odd", broken, port("", "fast", "?"))
    good = tree.pci("pci0000:15/0000:19:00.0", CONNECTX7)
    tree.rdma("mlx5_9", good, port())
    nics = {nic.name: nic for nic in read_nics(tree.root)}
    assert set(nics) == {"mlx5_gone", "mlx5_odd", "mlx5_9", "eth_gone"}
    assert nics["mlx5_9"].rate_gbit_s == 400.0
    assert (nics["mlx5_gone"].state, nics["mlx5_gone"].model) == (None, None)
    assert set(nics["mlx5_gone"].unknown) == {"state", "rate_gbit_s", "kind", "firmware"}
    assert nics["mlx5_odd"].unknown["rate_gbit_s"] == "rate is 'fast'"
    assert (nics["mlx5_odd"].model, nics["mlx5_odd"].bus_id) == (None, "0000:18:00.0")
    assert nics["eth_gone"].unknown["state"] == "operstate: No such file or directory"


@pytest.mark.parametrize(
    ("slot", "expected"),
    [
        ({}, PcieLink(generation=4, width=8, max_generation=5, max_width=16)),
        (
            link("16.0 GT/s PCIe", 8, "16.0 GT/s PCIe", 8),
            PcieLink(generation=4, width=8, max_generation=4, max_width=8),
        ),
        (
            link("32.0 GT/s PCIe", 16, "64.0 GT/s PCIe", 32),
            PcieLink(generation=4, width=8, max_generation=5, max_width=16),
        ),
        (link("2.5 GT/s PCIe", 1, "2.5 GT/s PCIe", 1), PcieLink(generation=4, width=8, max_generation=5, max_width=16)),
    ],
    ids=["unknown", "narrow slot", "wide slot", "port of a hypervisor"],
)
def test_a_card_can_do_no_more_than_its_slot(tree: Tree, slot: dict[str, str], expected: PcieLink) -> None:
    tree.pci("pci0000:15/0000:15:01.0", BRIDGE | slot)
    here = link("16.0 GT/s PCIe", 8)
    tree.rdma("mlx5_0", tree.pci("pci0000:15/0000:15:01.0/0000:18:00.0", CONNECTX7 | here), port())
    tree.pci("pci0000:15/0000:15:01.0/0000:19:00.0", H200 | here)
    facts = read_sysfs(tree.root).node
    assert facts.nics[0].pcie == facts.gpus[0].pcie == expected
