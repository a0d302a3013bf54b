"""The PCI tree, the machine and the kernel's side of the driver, on trees written for the purpose."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.machine.host import read_number
from gpubench.machine.pci import find_nvidia_devices, pci_address, pci_folder, read_link, read_place, switches_above
from gpubench.machine.sysfs import read_sysfs
from gpubench.model.facts.snapshot import DriverFacts, GpuDirectFacts, PcieLink, PciPlace
from tests.fakes.sysfs import CONNECTX7, H200, NVSWITCH, Tree, link

OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder@)"
CLOSED_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023"
ARM = "processor\t: {0}\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd\n\n"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.mark.parametrize(
    ("path", "bridge", "address"),
    [
        ("platform/3f000000.pcie/pci0009:00/0009:00:00.0/0009:01:00.0", "pci0009:00", "0009:01:00.0"),
        ("pci0000:7e/0000:7e:00.5/pci10000:00/10000:00:01.0/10000:e1:00.0", "pci10000:00", "10000:e1:00.0"),
        ("LNXSYSTM:00/VMBUS:01/a-b-c/pcieb75:00/eb75:00:00.0", "pcieb75:00", "eb75:00:00.0"),
        ("pci0000:00/0000:00:03.0/virtio2", "pci0000:00", "0000:00:03.0"),
    ],
)
def test_places_of_other_platforms(tmp_path: Path, path: str, bridge: str, address: str) -> None:
    device = tmp_path / "sys/devices" / path
    device.mkdir(parents=True)
    assert read_place(device).host_bridge == bridge
    assert pci_address(device) == address
    folder = pci_folder(device)
    assert folder is not None
    assert folder.name == address


def test_a_path_without_a_pci_device(tmp_path: Path) -> None:
    assert read_place(tmp_path) == PciPlace()
    assert pci_address(tmp_path) is None
    assert pci_folder(tmp_path) is None
    assert switches_above([tmp_path]) == ()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (link("8 GT/s", 8, "16 GT/s", 16), PcieLink(generation=3, width=8, max_generation=4, max_width=16)),
        (link("Unknown speed", 63, "64.0 GT/s PCIe", 255), PcieLink(max_generation=6)),
        (link("2.5 GT/s PCIe", 0, "99.0 GT/s PCIe", 16), PcieLink(generation=1, max_width=16)),
        ({"current_link_speed": "", "max_link_width": "wide"}, PcieLink()),
    ],
)
def test_links(tree: Tree, files: dict[str, str], expected: PcieLink) -> None:
    assert read_link(tree.pci("pci0000:00/0000:00:06.0", files)) == expected


def test_only_nvidias_gpus_and_nvswitches_are_found(tree: Tree) -> None:
    tree.pci("pci10000:00/10000:01:00.0", H200)
    tree.pci("pci0000:00/0000:c1:00.0", H200 | {"class": "0x030000"})
    tree.pci("pci0000:00/0000:07:00.0", NVSWITCH)
    tree.pci("pci0000:00/0000:03:00.0", {"class": "0x030000", "vendor": "0x1a03"})
    tree.pci("pci0000:00/0000:05:00.0", CONNECTX7)
    tree.pci("pci0000:00/0000:06:00.0", {"vendor": "0x10de"})
    tree.pci("pci0000:00/0000:08:00.0", {"class": "what?", "vendor": "0x10de"})
    tree.pci("pci0000:00/0000:c1:00.1", {"class": "0x040300", "vendor": "0x10de"})
    tree.symlink("sys/bus/pci/devices/0000:ff:00.0", "nowhere")
    found = find_nvidia_devices(tree.root)
    assert [each.name for each in found.gpus] == ["0000:c1:00.0", "10000:01:00.0"]
    assert read_sysfs(tree.root).node.nvswitches == ("0000:07:00.0",)


def test_on_arm_nothing_shown_is_nothing_known(tree: Tree) -> None:
    tree.write("proc/cpuinfo", ARM.format(0) + ARM.format(1))
    machine = read_sysfs(tree.root).node.machine
    assert (machine.cpus, machine.cpu, machine.sockets, machine.virtual_machine) == (2, None, None, None)
    tree.write("sys/hypervisor/type", "xen")
    assert read_sysfs(tree.root).node.machine.virtual_machine is True


@pytest.mark.parametrize(("number", "chassis"), [(10, "laptop"), (3, "desktop"), (23, "server"), (1, None), (99, None)])
def test_the_firmware_numbers_its_chassis(tree: Tree, number: int, chassis: str | None) -> None:
    tree.write("sys/class/dmi/id/chassis_type", str(number))
    assert read_sysfs(tree.root).node.machine.chassis == chassis


HOST_NAMESPACES = {"pid": 4026531836, "user": 4026531837, "uts": 4026531838, "ipc": 4026531839, "cgroup": 4026531835}
DOCKER_GROUP = f"0::/system.slice/docker-{'3f' * 32}.scope"


@pytest.mark.parametrize(
    ("own", "files", "container"),
    [
        ((), {}, ""),
        (("pid", "ipc", "uts"), {".dockerenv": "", "proc/self/cgroup": "0::/"}, "docker"),
        (("pid",), {"run/.containerenv": ""}, "podman"),
        (("pid",), {".dockerenv": "", "proc/self/cgroup": "0::/kubepods.slice/kubepods-pod1.slice"}, "docker"),
        (("pid",), {"proc/self/cgroup": "0::/kubepods.slice/kubepods-pod1.slice"}, "kubernetes"),
        ((), {"proc/self/cgroup": DOCKER_GROUP}, "docker"),
        ((), {".singularity.d/env": ""}, "singularity"),
        ((), {".dockerenv": ""}, ""),
        (("user",), {}, "container"),
        (("ipc",), {}, ""),
        (("pid",), {"proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_1"}, "container"),
    ],
)
def test_a_container_is_told_by_group_mark_or_namespace(
    tree: Tree, own: tuple[str, ...], files: dict[str, str], container: str
) -> None:
    """A disk made of an image has the image's mark and no namespace of its own; a service of systemd may have one."""
    for kind, number in HOST_NAMESPACES.items():
        tree.symlink(f"proc/self/ns/{kind}", f"{kind}:[{number - (1000 if kind in own else 0)}]")
    for path, text in files.items():
        tree.write(path, text)
    assert read_sysfs(tree.root).node.machine.container == container


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OPEN_DRIVER, DriverFacts(version="580.159.04", open_kernel_module=True)),
        (CLOSED_DRIVER, DriverFacts(version="535.54.03", open_kernel_module=False)),
        ("NVRM version: something new", DriverFacts(open_kernel_module=False)),
    ],
)
def test_the_kernel_names_a_driver_that_does_not_answer(tree: Tree, text: str, expected: DriverFacts) -> None:
    tree.write("proc/driver/nvidia/version", text + "\nGCC version:  gcc version 13.2.0")
    assert read_sysfs(tree.root).node.driver == expected


@pytest.mark.parametrize(
    "path",
    [
        "sys/kernel/mm/memory_peers/nv_mem/version",
        "sys/kernel/mm/memory_peers/nv_mem_nc/version",
        "sys/module/nvidia_peermem/version",
    ],
)
def test_peermem_is_any_of_three_files(tree: Tree, path: str) -> None:
    (tree.root / "sys/module").mkdir(parents=True)
    assert read_sysfs(tree.root).node.gpudirect == GpuDirectFacts(peermem=False, efa_peermem=False)
    tree.write(path, "1.0")
    assert read_sysfs(tree.root).node.gpudirect == GpuDirectFacts(peermem=True, efa_peermem=False)


def test_peermem_that_found_no_rdma_core_does_nothing(tree: Tree) -> None:
    tree.write("sys/module/nvidia_peermem/version", "1.0")
    assert read_sysfs(tree.root).node.gpudirect.peermem_registered is None
    (tree.root / "sys/module/ib_core/holders").mkdir(parents=True)
    assert read_sysfs(tree.root).node.gpudirect.peermem_registered is False
    (tree.root / "sys/module/ib_core/holders/nvidia_peermem").mkdir()
    assert read_sysfs(tree.root).node.gpudirect.peermem_registered is True


@given(st.integers(0, 2**32), st.booleans())
def test_numbers_are_read_in_both_spellings(
    tmp_path_factory: pytest.TempPathFactory, number: int, hexadecimal: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "number"
    path.write_text(f"{number:#010x}\n" if hexadecimal else f"{number}\n")
    assert read_number(path) == number
