"""The PCI tree, the machine and the kernel's side of the driver, on trees written for the purpose."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.machine import sysfs
from gpubench.machine.host import UnknownFields, names_in, number_of, text_of
from gpubench.machine.pci import find_nvidia_devices, link_of, pci_address, pci_folder, place_of, switches_above
from gpubench.machine.sysfs import SysfsFacts, read_sysfs
from gpubench.model.facts.snapshot import (
    DriverFacts,
    DriverSettings,
    GpuDirectFacts,
    GpuFacts,
    HostFacts,
    KernelSettings,
    NumaNode,
    PcieLink,
    PciPlace,
    PciSwitch,
)
from gpubench.model.terms.plain import from_plain, to_plain
from tests.fakes.sysfs import BRIDGE, CONNECTX7, H200, NVSWITCH, Tree, link

OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder@)"
CLOSED_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023"
X86 = "processor\t: {0}\nmodel name\t: Fast CPU\nphysical id\t: {1}\nflags\t\t: fpu sse{2}\n\n"
ARM = "processor\t: {0}\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd\n\n"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_an_empty_root_is_all_unknown(tmp_path: Path) -> None:
    facts = read_sysfs(tmp_path)
    assert replace(facts, kernel=KernelSettings(), driver_settings=DriverSettings()) == SysfsFacts()
    assert set(facts.kernel.unknown) == {"options", "wsl", "imex"}
    assert set(facts.kernel.iommu.unknown) == {"units"}
    assert {"parameters", "registry_keys", "configured"} < set(facts.driver_settings.unknown)


def test_a_gpu_on_the_root_bus_of_a_virtual_machine(tree: Tree) -> None:
    device = tree.pci("pci0000:00/0000:00:06.0", H200 | link() | {"numa_node": "-1"}, driver="nvidia")
    assert place_of(device) == PciPlace(host_bridge="pci0000:00")
    facts = read_sysfs(tree.root)
    assert facts.gpus == (
        GpuFacts(
            index=0,
            bus_id="0000:00:06.0",
            name="NVIDIA GPU 0x2335",
            pcie=PcieLink(generation=5, width=16, max_generation=5, max_width=16),
            place=PciPlace(host_bridge="pci0000:00"),
        ),
    )
    assert facts.gpu_drivers == {"0000:00:06.0": "nvidia"}
    assert facts.switches == ()


def test_bridges_are_a_root_port_then_switches_of_two_ports(tree: Tree) -> None:
    root_port, upstream, downstream = "0000:15:01.0", "0000:16:00.0", "0000:17:02.0"
    top = f"pci0000:15/{root_port}"
    tree.pci(top, BRIDGE | link(max_speed="16.0 GT/s PCIe"))
    tree.pci(f"{top}/{upstream}", BRIDGE | link("16.0 GT/s PCIe", 16) | {"numa_node": "1"})
    tree.pci(f"{top}/{upstream}/{downstream}", BRIDGE | link())
    device = tree.pci(f"{top}/{upstream}/{downstream}/0000:1b:00.0", H200 | {"numa_node": "1"})
    assert place_of(device) == PciPlace(
        host_bridge="pci0000:15", root_port=root_port, switches=(upstream,), numa_node=1
    )
    assert switches_above([device, device]) == (
        PciSwitch(
            bus_id=upstream,
            link=PcieLink(generation=4, width=16, max_generation=4, max_width=16),
            place=PciPlace(host_bridge="pci0000:15", root_port=root_port, numa_node=1),
        ),
    )


def test_switches_below_switches_are_named_outermost_first(tree: Tree) -> None:
    ports = ["0000:15:01.0", "0000:16:00.0", "0000:17:00.0", "0000:18:00.0", "0000:19:00.0", "0000:1a:00.0"]
    device = tree.pci(f"pci0000:15/{'/'.join(ports)}/0000:1b:00.0", H200)
    assert place_of(device).switches == ("0000:16:00.0", "0000:18:00.0", "0000:1a:00.0")
    switches = switches_above([device])
    assert [each.bus_id for each in switches] == ["0000:16:00.0", "0000:18:00.0", "0000:1a:00.0"]
    assert switches[1].place.switches == ("0000:16:00.0",)
    assert switches[1].link == PcieLink()


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
    assert place_of(device).host_bridge == bridge
    assert pci_address(device) == address
    folder = pci_folder(device)
    assert folder is not None
    assert folder.name == address


def test_a_path_without_a_pci_device(tmp_path: Path) -> None:
    assert place_of(tmp_path) == PciPlace()
    assert pci_address(tmp_path) is None
    assert pci_folder(tmp_path) is None
    assert switches_above([tmp_path]) == ()


def test_a_recorded_tree_without_symbolic_links(tmp_path: Path) -> None:
    """Copies by cp -rL keep a device's own files and lose its place."""
    tree = Tree(tmp_path)
    for name, text in (H200 | {"numa_node": "0"}).items():
        tree.write(f"sys/bus/pci/devices/0000:00:06.0/{name}", text)
    gpu = read_sysfs(tmp_path).gpus[0]
    assert (gpu.bus_id, gpu.place) == ("0000:00:06.0", PciPlace(numa_node=0))


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
    assert link_of(tree.pci("pci0000:00/0000:00:06.0", files)) == expected


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
    assert read_sysfs(tree.root).nvswitches == ("0000:07:00.0",)


def test_names_come_from_the_driver_where_it_says_them(tree: Tree) -> None:
    tree.pci("pci0000:00/0000:06:00.0", H200)
    tree.pci("pci0000:00/0000:07:00.0", H200)
    tree.pci("pci0000:00/0000:08:00.0", {"class": "0x030200", "vendor": "0x10de"})
    info = "Model: \t\t {0}\nIRQ:   \t\t 41\nGPU UUID: \t {1}\nVideo BIOS: \t 96.00.a5.00.1a"
    tree.write("proc/driver/nvidia/gpus/0000:06:00.0/information", info.format("NVIDIA H200", "GPU-f0371bb6"))
    tree.write("proc/driver/nvidia/gpus/0000:07:00.0/information", info.format("NVIDIA H200", "GPU-????????-????"))
    gpus = read_sysfs(tree.root).gpus
    assert [(gpu.name, gpu.uuid) for gpu in gpus] == [
        ("NVIDIA H200", "GPU-f0371bb6"),
        ("NVIDIA H200", None),
        ("NVIDIA GPU 0x0000", None),
    ]


def test_a_driver_that_never_says_them_costs_only_the_names(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysfs, "SECONDS_FOR_NAMES", 0.05)
    tree.pci("pci0000:00/0000:06:00.0", H200)
    pipe = tree.root / "proc/driver/nvidia/gpus/0000:06:00.0/information"
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    gpus = read_sysfs(tree.root).gpus
    pipe.write_text("let the reader go")
    assert [gpu.name for gpu in gpus] == ["NVIDIA GPU 0x2335"]


def test_device_files_are_counted(tree: Tree) -> None:
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        tree.write(f"dev/{name}", "")
    assert read_sysfs(tree.root).device_files == 2


def test_a_machine_of_two_sockets(tree: Tree) -> None:
    tree.write("proc/cpuinfo", "".join(X86.format(cpu, cpu // 2, "") for cpu in range(4)))
    tree.write("proc/sys/kernel/osrelease", "6.8.0-40-generic")
    tree.write("proc/sys/kernel/random/boot_id", "b0074d1d")
    tree.write("sys/devices/system/node/node1/cpulist", "2-3")
    tree.write("sys/devices/system/node/node0/cpulist", "0-1")
    tree.write("sys/devices/system/node/node10/cpulist", "")
    tree.write("sys/devices/system/node/online", "0-1")
    tree.write("sys/class/dmi/id/sys_vendor", "Maker")
    tree.write("sys/class/dmi/id/product_name", "Box 8")
    assert read_sysfs(tree.root).machine == HostFacts(
        kernel="6.8.0-40-generic",
        cpu="Fast CPU",
        cpus=4,
        sockets=2,
        numa_nodes=(NumaNode(number=0, cpus="0-1"), NumaNode(number=1, cpus="2-3"), NumaNode(number=10)),
        virtual_machine=False,
        product="Maker Box 8",
        boot_id="b0074d1d",
    )


def test_a_virtual_machine_shows_by_the_flag(tree: Tree) -> None:
    tree.write("proc/cpuinfo", X86.format(0, 0, " hypervisor"))
    assert read_sysfs(tree.root).machine.virtual_machine is True


def test_on_arm_nothing_shown_is_nothing_known(tree: Tree) -> None:
    tree.write("proc/cpuinfo", ARM.format(0) + ARM.format(1))
    machine = read_sysfs(tree.root).machine
    assert (machine.cpus, machine.cpu, machine.sockets, machine.virtual_machine) == (2, None, None, None)
    tree.write("sys/hypervisor/type", "xen")
    assert read_sysfs(tree.root).machine.virtual_machine is True


@pytest.mark.parametrize(("number", "chassis"), [(10, "laptop"), (3, "desktop"), (23, "server"), (1, None), (99, None)])
def test_the_firmware_numbers_its_chassis(tree: Tree, number: int, chassis: str | None) -> None:
    tree.write("sys/class/dmi/id/chassis_type", str(number))
    assert read_sysfs(tree.root).machine.chassis == chassis


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
    assert read_sysfs(tree.root).machine.container == container


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
    assert read_sysfs(tree.root).driver == expected


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
    assert read_sysfs(tree.root).gpudirect == GpuDirectFacts(peermem=False, efa_peermem=False)
    tree.write(path, "1.0")
    assert read_sysfs(tree.root).gpudirect == GpuDirectFacts(peermem=True, efa_peermem=False)


def test_peermem_that_found_no_rdma_core_does_nothing(tree: Tree) -> None:
    tree.write("sys/module/nvidia_peermem/version", "1.0")
    assert read_sysfs(tree.root).gpudirect.peermem_registered is None
    (tree.root / "sys/module/ib_core/holders").mkdir(parents=True)
    assert read_sysfs(tree.root).gpudirect.peermem_registered is False
    (tree.root / "sys/module/ib_core/holders/nvidia_peermem").mkdir()
    assert read_sysfs(tree.root).gpudirect.peermem_registered is True


def test_efa_has_a_module_of_its_own(tree: Tree) -> None:
    assert read_sysfs(tree.root).gpudirect == GpuDirectFacts()
    (tree.root / "sys/module/efa_nv_peermem").mkdir(parents=True)
    assert read_sysfs(tree.root).gpudirect == GpuDirectFacts(peermem=False, efa_peermem=True)


def test_what_is_read_survives_being_sent(tree: Tree) -> None:
    tree.pci("pci0000:00/0000:00:06.0", H200 | link(), driver="nvidia")
    tree.write("proc/cpuinfo", X86.format(0, 0, ""))
    facts = read_sysfs(tree.root)
    assert from_plain(SysfsFacts, to_plain(facts)) == facts


@given(st.integers(0, 2**32), st.booleans())
def test_numbers_are_read_in_both_spellings(
    tmp_path_factory: pytest.TempPathFactory, number: int, hexadecimal: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "number"
    path.write_text(f"{number:#010x}\n" if hexadecimal else f"{number}\n")
    assert number_of(path) == number


@given(st.binary(max_size=40))
def test_no_content_of_a_file_is_an_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "content"
    path.write_bytes(content)
    text = text_of(path)
    assert text is None or text.strip("\0 \t\r\n") == text
    number_of(path)
    link_of(path.parent)


def test_why_a_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    unknown = UnknownFields()
    assert unknown.text("one", tmp_path / "missing") is None
    assert unknown.text("two", tmp_path / "empty") is None
    assert unknown.text("three", tmp_path / "a\0b") is None
    assert unknown.reasons["one"] == "missing: No such file or directory"
    assert unknown.reasons["two"] == "empty is empty"
    assert "three" in unknown.reasons
    assert names_in(tmp_path / "missing") == []
