"""Every hop between a GPU or NIC and the CPU: links, access control, errors, IOMMU groups, windows."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.machine.host import UnknownFields
from gpubench.machine.pci import NEEDS_ROOT, read_access_control, read_errors
from gpubench.machine.sysfs import read_sysfs
from gpubench.model.facts.snapshot import AccessControl, PciDevice, PcieErrors
from tests.fakes.sysfs import BRIDGE, H200, Tree, config_space, link

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
    return {each.bus_id: each for each in read_sysfs(tree.root).node.pci_devices}


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
        (config_space((AER, 0), (ACS, 0))[:0x142], "config ends in the middle of the list of capabilities"),
        (config_space((AER, 0), (ACS, 0))[:0x146], "config ends in the middle of the list of capabilities"),
        (b"\xff" * 4096, "the device returns only ones, as if it were gone"),
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


def test_iommu_groups_are_read_without_root(tree: Tree) -> None:
    folder = a_switch(tree)
    (folder / "iommu_group").symlink_to("../../../kernel/iommu_groups/31")
    (folder.parent / "iommu_group").symlink_to("../../../kernel/iommu_groups/odd")
    found = devices(tree)
    assert found[GPU].iommu_group == 31
    assert found[DOWNSTREAM].unknown["iommu_group"] == "iommu_group does not point to a number"


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
    assert (gpu.bar1_most_bytes, gpu.unknown["bar1_most_bytes"]) == (None, "resource1_resize has no size")
