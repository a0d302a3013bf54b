"""Every hop between a GPU or NIC and the CPU: links, access control, errors, IOMMU groups, windows."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.machine.host import UnknownFields
from gpubench.machine.pci import NEEDS_ROOT, read_access_control, read_errors, read_pci_devices
from gpubench.machine.sysfs import read_sysfs
from gpubench.model.facts.snapshot import AccessControl, PciDevice, PcieErrors, PcieLink, PciKind
from gpubench.model.terms.plain import from_plain, to_plain
from tests.fakes.sysfs import BRIDGE, CONNECTX7, H200, Tree, config_space, link, port

ROOT_PORT, UPSTREAM, DOWNSTREAM, GPU = "0000:15:01.0", "0000:16:00.0", "0000:17:02.0", "0000:1b:00.0"
ACS, AER, ATS = 0x0D, 0x01, 0x0F
REDIRECTING = 0x001D_005F
"""ACS as a firmware sets it: control 0x1d over capability 0x5f."""

CORRECTABLE = "RxErr 2\nBadTLP 0\nBadDLLP 1\nRollover 0\nTimeout 0\nTOTAL_ERR_COR 3"
NONFATAL = "Undefined 0\nACSViol 4\nTOTAL_ERR_NONFATAL 4"
FATAL = "Undefined 0\nDLP 0\nTOTAL_ERR_FATAL 0"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def a_switch(tree: Tree) -> Path:
    """A GPU below a switch."""
    top = f"pci0000:15/{ROOT_PORT}"
    tree.pci(top, BRIDGE | link(max_speed="64.0 GT/s PCIe"))
    tree.pci(f"{top}/{UPSTREAM}", BRIDGE | link("16.0 GT/s PCIe", 8))
    tree.pci(f"{top}/{UPSTREAM}/{DOWNSTREAM}", BRIDGE | link())
    return tree.pci(f"{top}/{UPSTREAM}/{DOWNSTREAM}/{GPU}", H200 | link())


def devices(tree: Tree) -> dict[str, PciDevice]:
    return {each.bus_id: each for each in read_sysfs(tree.root).pci_devices}


def test_every_hop_is_there_once_with_its_own_link(tree: Tree) -> None:
    path = a_switch(tree)
    nic = tree.pci(f"pci0000:15/{ROOT_PORT}/{UPSTREAM}/0000:17:03.0/0000:1c:00.0", CONNECTX7)
    tree.rdma("mlx5_0", nic, port())
    tree.interface("ib0", nic)
    found = devices(tree)
    assert {name: (each.kind, each.above) for name, each in found.items()} == {
        ROOT_PORT: (PciKind.ROOT_PORT, None),
        UPSTREAM: (PciKind.UPSTREAM_PORT, ROOT_PORT),
        DOWNSTREAM: (PciKind.DOWNSTREAM_PORT, UPSTREAM),
        "0000:17:03.0": (PciKind.DOWNSTREAM_PORT, UPSTREAM),
        GPU: (PciKind.GPU, DOWNSTREAM),
        "0000:1c:00.0": (PciKind.NIC, "0000:17:03.0"),
    }
    assert list(found) == sorted(found)
    assert found[UPSTREAM].link == PcieLink(generation=4, width=8, max_generation=5, max_width=16)
    assert found[ROOT_PORT].link.max_generation == 6
    assert read_pci_devices([path, path], [], {}) == read_pci_devices([path], [], {})


def test_a_gpu_on_the_root_bus_has_nothing_above_it(tree: Tree) -> None:
    tree.pci("pci0000:00/0000:00:06.0", H200)
    (only,) = devices(tree).values()
    assert (only.bus_id, only.kind, only.above) == ("0000:00:06.0", PciKind.GPU, None)
    assert only.unknown == {
        "address_translation": "config: No such file or directory",
        "errors": "aer_dev_correctable: No such file or directory",
        "iommu_group": "iommu_group: No such file or directory",
        "bar1_bytes": "resource: No such file or directory",
        "bar1_most_bytes": "resource1_resize: No such file or directory",
        "minor": "the driver's page of this GPU in /proc does not tell it",
    }


def test_access_control_of_bridges_as_root_reads_it(tree: Tree) -> None:
    folder = a_switch(tree).parent
    (folder / "config").write_bytes(config_space((AER, 0), (ACS, REDIRECTING)))
    (folder.parent / "config").write_bytes(config_space((AER, 0)))
    (folder.parent.parent / "config").write_bytes(config_space())
    found = devices(tree)
    assert found[DOWNSTREAM].access_control == AccessControl(
        capable=(
            "source_validation",
            "translation_blocking",
            "request_redirect",
            "completion_redirect",
            "upstream_forwarding",
            "direct_translated",
        ),
        enabled=("source_validation", "request_redirect", "completion_redirect", "upstream_forwarding"),
    )
    assert found[UPSTREAM].access_control == AccessControl()
    assert found[ROOT_PORT].access_control == AccessControl()
    assert found[GPU].access_control is None
    assert (found[GPU].identity, found[DOWNSTREAM].identity) == ("10de:2335", "1000:c030")
    assert found[DOWNSTREAM].address_translation is None


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (config_space((AER, 0), (ATS, 0x8000_0020)), True),
        (config_space((ATS, 0x0000_0020)), False),
        (config_space((AER, 0)), False),
        (config_space()[:64], None),
    ],
)
def test_address_translation_of_devices(tree: Tree, space: bytes, expected: bool | None) -> None:
    (a_switch(tree) / "config").write_bytes(space)
    gpu = devices(tree)[GPU]
    assert gpu.address_translation is expected
    assert gpu.unknown.get("address_translation") == (NEEDS_ROOT if expected is None else None)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (config_space((ACS, REDIRECTING))[:64], NEEDS_ROOT),
        (b"", NEEDS_ROOT),
        (config_space(size=256), "this machine shows no extended configuration space"),
        (config_space((AER, 0), (ACS, 0))[:0x142], "config: it ends in the middle of the list of capabilities"),
        (config_space((AER, 0), (ACS, 0))[:0x146], "config: it ends in the middle of the list of capabilities"),
        (b"\xff" * 4096, "the device answers only ones, as one that is gone does"),
    ],
)
def test_access_control_that_cannot_be_read_says_why(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "config").write_bytes(content)
    unknown = UnknownFields()
    assert read_access_control(tmp_path, unknown) is None
    assert unknown.reasons == {"access_control": reason}


def test_a_configuration_space_that_is_no_file(tmp_path: Path) -> None:
    unknown = UnknownFields()
    assert read_access_control(tmp_path, unknown) is None
    assert unknown.reasons == {"access_control": "config: No such file or directory"}
    (tmp_path / "config").mkdir()
    assert read_access_control(tmp_path, unknown) is None
    assert unknown.reasons == {"access_control": "config: Is a directory"}
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "config").rmdir()
    (tmp_path / "config").symlink_to("pipe")
    assert read_access_control(tmp_path, unknown) is None
    assert unknown.reasons == {"access_control": "config: Illegal seek"}


def test_capabilities_in_a_circle_come_to_an_end(tmp_path: Path) -> None:
    space = bytearray(config_space((AER, 0), (AER, 0)))
    space[0x140:0x144] = (AER | 1 << 16 | 0x100 << 20).to_bytes(4, "little")
    (tmp_path / "config").write_bytes(space)
    assert read_access_control(tmp_path, UnknownFields()) == AccessControl()


@given(st.binary(max_size=64).flatmap(lambda head: st.binary(max_size=200).map(lambda tail: (head, tail))))
def test_no_configuration_space_is_an_error(
    tmp_path_factory: pytest.TempPathFactory, content: tuple[bytes, bytes]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "config-space"
    folder.mkdir(exist_ok=True)
    head, tail = content
    (folder / "config").write_bytes(head.ljust(0x100, b"\0") + tail)
    unknown = UnknownFields()
    assert (read_access_control(folder, unknown) is None) == bool(unknown.reasons)


def test_errors_are_counted_in_all_and_by_name(tmp_path: Path) -> None:
    for severity, text in (("correctable", CORRECTABLE), ("nonfatal", NONFATAL), ("fatal", FATAL)):
        (tmp_path / f"aer_dev_{severity}").write_text(text + "\n")
    unknown = UnknownFields()
    assert read_errors(tmp_path, unknown) == PcieErrors(
        correctable=3,
        nonfatal=4,
        fatal=0,
        named={"correctable.RxErr": 2, "correctable.BadDLLP": 1, "nonfatal.ACSViol": 4},
    )
    assert unknown.reasons == {}


def test_half_written_errors_cost_only_themselves(tmp_path: Path) -> None:
    (tmp_path / "aer_dev_correctable").write_text("RxErr 2\nBadT")
    (tmp_path / "aer_dev_fatal").write_text(FATAL)
    unknown = UnknownFields()
    assert read_errors(tmp_path, unknown) == PcieErrors(fatal=0)
    assert unknown.reasons == {"errors": "aer_dev_correctable has no total"}


@given(st.text(max_size=60))
def test_no_text_of_errors_is_an_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "aer"
    folder.mkdir(exist_ok=True)
    (folder / "aer_dev_correctable").write_bytes(text.encode("utf-8", "surrogatepass"))
    unknown = UnknownFields()
    errors = read_errors(folder, unknown)
    assert (errors is None or errors.nonfatal is None) == ("errors" in unknown.reasons)


def test_iommu_groups_are_read_without_root(tree: Tree) -> None:
    folder = a_switch(tree)
    (folder / "iommu_group").symlink_to("../../../kernel/iommu_groups/31")
    (folder.parent / "iommu_group").symlink_to("../../../kernel/iommu_groups/odd")
    found = devices(tree)
    assert found[GPU].iommu_group == 31
    assert found[DOWNSTREAM].unknown["iommu_group"] == "iommu_group leads to no number"


RESOURCE = """\
0x00000000b2000000 0x00000000b2ffffff 0x0000000000040200
{0} 0x000000000014220c
0x0000000000000000 0x0000000000000000 0x0000000000000000"""


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ("0x000038a000000000 0x000038a00fffffff", 256 * 2**20),
        ("0x0000000000000000 0x0000000000000000", None),
        ("0x0000000000000fff 0x0000000000000000", None),
        ("nonsense", None),
    ],
)
def test_the_window_onto_a_gpus_memory(tree: Tree, addresses: str, expected: int | None) -> None:
    folder = tree.pci("pci0000:00/0000:00:06.0", H200 | {"resource": RESOURCE.format(addresses)})
    (folder / "resource1_resize").write_text("0000000000007fc0\n")
    gpu = devices(tree)["0000:00:06.0"]
    assert gpu.bar1_bytes == expected
    assert gpu.bar1_most_bytes == 16 * 2**30
    assert ("bar1_bytes" in gpu.unknown) == (expected is None)


@pytest.mark.parametrize("text", ["0", "wide", "-1", "ffffffffffffffff", "1" * 30])
def test_sizes_of_windows_that_are_none(tree: Tree, text: str) -> None:
    tree.pci("pci0000:00/0000:00:06.0", H200 | {"resource1_resize": text})
    gpu = devices(tree)["0000:00:06.0"]
    assert (gpu.bar1_most_bytes, gpu.unknown["bar1_most_bytes"]) == (None, "resource1_resize names no size")


def test_the_number_of_a_gpus_device_file(tree: Tree) -> None:
    tree.pci("pci0000:00/0000:06:00.0", H200)
    tree.pci("pci0000:00/0000:07:00.0", H200)
    tree.write("proc/driver/nvidia/gpus/0000:06:00.0/information", "Model: \t\t NVIDIA H200\nDevice Minor: \t 3")
    tree.write("proc/driver/nvidia/gpus/0000:07:00.0/information", "Device Minor: \t many")
    found = devices(tree)
    assert (found["0000:06:00.0"].minor, found["0000:07:00.0"].minor) == (3, None)
    assert "minor" not in found["0000:06:00.0"].unknown


def test_devices_survive_being_sent(tree: Tree) -> None:
    folder = a_switch(tree)
    (folder.parent / "config").write_bytes(config_space((ACS, REDIRECTING)))
    (folder / "aer_dev_correctable").write_text(CORRECTABLE)
    found = tuple(devices(tree).values())
    assert tuple(from_plain(PciDevice, to_plain(each)) for each in found) == found
