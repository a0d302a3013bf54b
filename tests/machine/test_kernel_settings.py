"""Boot options, IOMMU, Windows' Linux and IMEX, on trees written for the purpose."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.machine.sysfs import read_kernel_settings
from gpubench.model.facts.snapshot import KernelSettings, PciDevice, PciKind
from tests.fakes.sysfs import Tree


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def read(tree: Tree, *groups: int | None) -> KernelSettings:
    devices = [
        PciDevice(bus_id=f"0000:{number:02x}:00.0", kind=PciKind.GPU, iommu_group=group)
        for number, group in enumerate(groups)
    ]
    return read_kernel_settings(tree.root, devices)


def test_of_the_boot_line_only_what_counts_is_kept(tree: Tree) -> None:
    tree.write(
        "proc/cmdline",
        "BOOT_IMAGE=/vmlinuz root=UUID=12 ro iommu=pt intel_iommu=on iommufd token=secret pci=noaer,nomsi,"
        "disable_acs_redir=pci:12d8:0 pci=nomsi pcie_acs_override=downstream,multifunction nvidia.NVreg_X=1 quiet",
    )
    assert read(tree).options == (
        "iommu=pt",
        "intel_iommu=on",
        "pci=noaer,disable_acs_redir=pci:12d8:0",
        "pcie_acs_override=downstream,multifunction",
        "nvidia.NVreg_X=1",
    )


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("Linux version 5.15.90.1-microsoft-standard-WSL2 (oe-user@oe-host) (gcc)", True),
        ("Linux version 4.4.0-19041-Microsoft (Microsoft@Microsoft.com)", True),
        ("Linux version 6.6.64.2-1.azl3 (root@microsoft.com) (gcc)", False),
        ("Linux version 6.8.0-1021-azure (buildd@lcy02)", False),
        ("nonsense", None),
        ("", None),
    ],
)
def test_windows_linux_by_its_release(tree: Tree, version: str, expected: bool | None) -> None:
    tree.write("proc/version", version)
    settings = read(tree)
    assert settings.wsl is expected
    assert ("wsl" in settings.unknown) == (expected is None)


def test_windows_linux_by_its_gpu_device(tree: Tree) -> None:
    tree.write("proc/version", "Linux version 6.1.0-custom")
    tree.write("dev/dxg", "")
    assert read(tree).wsl is True


@given(st.text(max_size=60))
def test_no_text_is_an_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    tree = Tree(tmp_path_factory.getbasetemp() / "kernel")
    for name in ("cmdline", "version", "devices"):
        tree.write(f"proc/{name}", "").write_bytes(b"iommu=" + text.encode("utf-8", "surrogatepass"))
    assert all(option.isprintable() for option in read(tree).options or ())
