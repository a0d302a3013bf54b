"""NICs of every kind, and odd ones that must not hide the others."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.machine.nics import read_nics
from gpubench.machine.sysfs import read_sysfs
from gpubench.model.facts.snapshot import SOFTWARE_RDMA, NicFacts, NicKind, PcieLink, PciPlace
from tests.fakes.sysfs import BRIDGE, CONNECTX7, H200, Tree, link, port

EFA = {"class": "0x020000", "vendor": "0x1d0f", "device": "0xefa2"}
VIRTIO = {"class": "0x020000", "vendor": "0x1af4", "device": "0x1041"}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def only(tree: Tree) -> NicFacts:
    (nic,) = read_nics(tree.root)
    return nic


def test_infiniband_with_its_interface(tree: Tree) -> None:
    device = tree.pci(
        "pci0000:15/0000:15:01.0/0000:18:00.0", CONNECTX7 | link(width=8) | {"numa_node": "0"}, driver="mlx5_core"
    )
    tree.rdma("mlx5_0", device, port(), fw_ver="28.39.1002", hca_type="MT4129")
    tree.interface("ib0", device, operstate="up", speed="400000", mtu="2044", dev_port="0")
    assert only(tree) == NicFacts(
        name="mlx5_0",
        kind=NicKind.INFINIBAND,
        state="active",
        rate_gbit_s=400.0,
        interfaces=("ib0",),
        bus_id="0000:18:00.0",
        model="ConnectX-7 (MT4129)",
        driver="mlx5_core",
        firmware="28.39.1002",
        mtu=2044,
        pcie=PcieLink(generation=5, width=8, max_generation=5, max_width=16),
        place=PciPlace(host_bridge="pci0000:15", root_port="0000:15:01.0", numa_node=0),
    )


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


def test_roce_takes_its_interface_and_leaves_the_others(tree: Tree) -> None:
    tree.rdma("rocep1s0", tree.pci("pci0000:15/0000:18:00.0", CONNECTX7), port(link_layer="Ethernet"))
    tree.interface("eth1", tree.root / "sys/devices/pci0000:15/0000:18:00.0", operstate="up", speed="200000")
    tree.interface("eth0", tree.pci("pci0000:00/0000:00:04.0", VIRTIO), operstate="up", speed="25000")
    roce, ethernet = read_nics(tree.root)
    assert (roce.kind, roce.interfaces, roce.rdma) == (NicKind.ROCE, ("eth1",), True)
    assert (ethernet.name, ethernet.kind, ethernet.rate_gbit_s, ethernet.rdma) == (
        "eth0",
        NicKind.ETHERNET,
        25.0,
        False,
    )


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


def test_emulated_rdma_is_kept_and_called_so(tree: Tree) -> None:
    """The device that made `nvidia-smi topo -m` fail as a whole (NVSentinel issue 1485)."""
    ethernet = tree.pci("pci0000:00/0000:00:04.0", VIRTIO, driver="virtio_net")
    tree.interface("eth0", ethernet, operstate="up", speed="10000", mtu="9000")
    tree.rdma("siw_eth0", ethernet, port(rate="2.5 Gb/sec (1X SDR)", link_layer="Ethernet"))
    tree.rdma("mine", None, port(link_layer="Ethernet"))
    mine, siw, eth0 = read_nics(tree.root)
    assert (mine.name, mine.bus_id, mine.model) == ("mine", None, SOFTWARE_RDMA)
    assert (siw.name, siw.bus_id, siw.model, siw.interfaces) == ("siw_eth0", None, SOFTWARE_RDMA, ())
    assert (eth0.name, eth0.bus_id, eth0.mtu) == ("eth0", "0000:00:04.0", 9000)


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


def test_hardware_that_is_not_on_pci_is_kept(tree: Tree) -> None:
    device = tree.root / "sys/devices/vmbus/a-b"
    tree.interface("eth0", device, operstate="up", speed="50000")
    (device / "driver").symlink_to("../../bus/vmbus/drivers/hv_netvsc")
    nic = only(tree)
    assert (nic.bus_id, nic.driver, nic.model, nic.place) == (None, "hv_netvsc", None, PciPlace())


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


def test_switches_above_nics_belong_to_the_node(tree: Tree) -> None:
    path = "pci0000:15/0000:15:01.0/0000:16:00.0"
    tree.pci(path, BRIDGE | link())
    device = tree.pci(f"{path}/0000:17:00.0/0000:18:00.0", CONNECTX7)
    tree.rdma("mlx5_0", device, port())
    tree.interface("ib0", device)
    facts = read_sysfs(tree.root)
    assert [each.bus_id for each in facts.switches] == ["0000:16:00.0"]
    assert facts.nics[0].place.switches == ("0000:16:00.0",)


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
        (
            link("2.5 GT/s PCIe", 1, "2.5 GT/s PCIe", 1),
            PcieLink(generation=4, width=8, max_generation=5, max_width=16),
        ),
    ],
    ids=["unknown", "narrow slot", "wide slot", "port of a hypervisor"],
)
def test_a_card_can_do_no_more_than_its_slot(tree: Tree, slot: dict[str, str], expected: PcieLink) -> None:
    tree.pci("pci0000:15/0000:15:01.0", BRIDGE | slot)
    here = link("16.0 GT/s PCIe", 8)
    tree.rdma("mlx5_0", tree.pci("pci0000:15/0000:15:01.0/0000:18:00.0", CONNECTX7 | here), port())
    tree.pci("pci0000:15/0000:15:01.0/0000:19:00.0", H200 | here)
    facts = read_sysfs(tree.root)
    assert facts.nics[0].pcie == facts.gpus[0].pcie == expected


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_no_text_of_a_port_is_an_error(
    tmp_path_factory: pytest.TempPathFactory, state: str, rate: str, link_layer: str
) -> None:
    tree = Tree(tmp_path_factory.mktemp("nic"))
    tree.rdma("mlx5_0", None, {})
    ports = tree.root / "sys/devices/virtual/infiniband/mlx5_0/ports/1"
    for name, text in (("state", state), ("rate", rate), ("link_layer", link_layer)):
        (ports / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    nic = only(tree)
    assert nic.name == "mlx5_0"
    assert (nic.rate_gbit_s is None) == ("rate_gbit_s" in nic.unknown)


def test_devices_of_one_physical_port_are_told_by_adapter_and_port(tree: Tree) -> None:
    """A DGX Spark reaches each port of its ConnectX-7 by two PCIe devices."""
    for domain, name in (("0000", "rocep1s0f"), ("0002", "roceP2p1s0f")):
        for port_number in (0, 1):
            device = tree.pci(f"pci{domain}:00/{domain}:01:00.{port_number}", CONNECTX7 | link(width=4))
            tree.rdma(f"{name}{port_number}", device, port(link_layer="Ethernet"), sys_image_guid="4cbb:4703:0001")
            tree.interface(f"{name}{port_number}-net", device, operstate="up", phys_port_name=f"p{port_number}")
    ports = {nic.name: nic.port for nic in read_nics(tree.root)}
    assert ports["rocep1s0f0"] == ports["roceP2p1s0f0"] == "4cbb:4703:0001 p0"
    assert ports["rocep1s0f1"] == ports["roceP2p1s0f1"] == "4cbb:4703:0001 p1"


def test_a_port_is_not_known_without_adapter_or_name(tree: Tree) -> None:
    device = tree.pci("pci0000:15/0000:18:00.0", CONNECTX7)
    tree.rdma("mlx5_0", device, port(), sys_image_guid="4cbb:4703:0001")
    assert only(tree).port is None
