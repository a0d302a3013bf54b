"""A very large machine as a tree like /sys, /proc and /dev: every second GPU has a NIC next to it."""

from dataclasses import dataclass
from pathlib import Path

from tests.fakes.sysfs import BRIDGE, CONNECTX7, H200, Tree, config_space, link, port

_PROCESSOR = (
    "processor\t: {0}\nmodel name\t: Fast CPU\nphysical id\t: {1}\nflags\t\t: fpu sse\n" + "bogus\t: 1\n" * 22 + "\n"
)
_AER = {
    "aer_dev_correctable": "RxErr 0\nBadTLP 0\nBadDLLP 0\nRollover 0\nTimeout 0\nNonFatalErr 0\nTOTAL_ERR_COR 0",
    "aer_dev_nonfatal": "Undefined 0\nDLP 0\nTLP 0\nACSViol 0\nTOTAL_ERR_NONFATAL 0",
    "aer_dev_fatal": "Undefined 0\nDLP 0\nTLP 0\nACSViol 0\nTOTAL_ERR_FATAL 0",
}
_RESOURCE = (
    "0x00000000b2000000 0x00000000b2ffffff 0x0000000000040200\n0x000038a000000000 0x000038bfffffffff 0x000000000014220c"
)
_COUNTERS = ("symbol_error", "link_downed", "port_rcv_errors", "port_xmit_wait", "port_xmit_data", "port_rcv_data")
_HARDWARE_COUNTERS = ("out_of_sequence", "packet_seq_err", "rnr_nak_retry_err", "np_cnp_sent", "lifespan")
_ACS, _REDIRECTING = 0x0D, 0x001D_005F
_MEMORY_NODES = 16
_CHANNELS_APART = 16


@dataclass(frozen=True, slots=True)
class LargeMachine:
    """The numbers of GPUs (and NICs), PCI devices, CPUs and processes."""

    gpus: int = 64
    pci_devices: int = 1000
    cpus: int = 4096
    processes: int = 20_000

    def build(self, root: Path) -> Tree:
        tree = Tree(root)
        for number in range(self.gpus):
            self._switch(tree, number)
        used = self.gpus * 6
        for number in range(used, self.pci_devices):
            tree.pci(
                f"pci00ff:00/00ff:{number // 32:02x}:{number % 32:02x}.0", {"class": "0x010802", "vendor": "0x144d"}
            )
        self._machine(tree)
        self._processes(tree)
        _driver(tree)
        return tree

    def _switch(self, tree: Tree, number: int) -> None:
        """Add a root port with a switch, a GPU and a NIC."""
        domain = f"{number:04x}"
        top = f"pci{domain}:00/{domain}:00:01.0"
        gpu = f"{top}/{domain}:01:00.0/{domain}:02:00.0/{domain}:03:00.0"
        nic = f"{top}/{domain}:01:00.0/{domain}:02:01.0/{domain}:04:00.0"
        for path, files in ((gpu, H200 | {"resource": _RESOURCE, "resource1_resize": "7fc0"}), (nic, CONNECTX7)):
            for bridge in (top, str(Path(top) / f"{domain}:01:00.0"), str(Path(path).parent)):
                if not (tree.root / "sys/devices" / bridge / "class").exists():
                    self._device(tree, bridge, BRIDGE)
            self._device(tree, path, files, driver="nvidia" if files is not CONNECTX7 else "mlx5_core")
        device = tree.root / "sys/devices" / nic
        folder = tree.rdma(
            f"mlx5_{number}", device, port(link_layer="Ethernet"), hca_type="MT4129", fw_ver="28.39.1002"
        )
        self._port(folder / "ports/1")
        tree.write(f"sys/class/infiniband_verbs/uverbs{number}/ibdev", f"mlx5_{number}")
        tree.interface(f"eth{number}", device, operstate="up", speed="400000", mtu="9000", dev_port="0")
        information = f"Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-{number}\nDevice Minor: \t {number}"
        tree.write(f"proc/driver/nvidia/gpus/{domain}:03:00.0/information", information)
        tree.write(f"dev/nvidia{number}", "")

    def _device(self, tree: Tree, path: str, files: dict[str, str], driver: str = "") -> None:
        folder = tree.pci(path, files | link() | _AER | {"numa_node": "0"}, driver)
        (folder / "config").write_bytes(config_space((0x01, 0), (0x19, 0), (_ACS, _REDIRECTING)))
        group = int(folder.name.split(":")[0], 16) * _CHANNELS_APART + int(folder.name.split(":")[1], 16)
        (folder / "iommu_group").symlink_to(f"../../../kernel/iommu_groups/{group}")
        tree.write(f"sys/kernel/iommu_groups/{group}/type", "DMA-FQ")

    def _port(self, folder: Path) -> None:
        for name in ("counters", "hw_counters", "gids", "gid_attrs/types"):
            (folder / name).mkdir(parents=True)
        for name in _COUNTERS:
            (folder / "counters" / name).write_text("0\n")
        for name in _HARDWARE_COUNTERS:
            (folder / "hw_counters" / name).write_text("0\n")
        for index in range(32):
            address = f"0000:0000:0000:0000:0000:ffff:0a00:{index:04x}" if index < 8 else "::"
            (folder / f"gids/{index}").write_text(address + "\n")
            (folder / f"gid_attrs/types/{index}").write_text("RoCE v2\n")

    def _machine(self, tree: Tree) -> None:
        tree.write("proc/cpuinfo", "".join(_PROCESSOR.format(cpu, cpu % 8) for cpu in range(self.cpus)))
        tree.write("proc/cmdline", "BOOT_IMAGE=/vmlinuz iommu=pt quiet")
        tree.write("proc/version", "Linux version 6.8.0-40-generic (buildd@host)")
        tree.write("proc/devices", "Character devices:\n195 nvidia")
        for unit in range(32):
            tree.write(f"sys/class/iommu/dmar{unit}/x", "")
        for node in range(_MEMORY_NODES):
            tree.write(f"sys/devices/system/node/node{node}/cpulist", f"{node * 256}-{node * 256 + 255}")

    def _processes(self, tree: Tree) -> None:
        """Add processes, of which nine tenths are kernel threads."""
        threads = range(100, 100 + self.processes * 9 // 10)
        tree.symlink("proc/self/ns/pid", "pid:[4026531836]")
        tree.write("proc/1/comm", "systemd")
        tree.write("proc/2/task/2/children", " ".join(map(str, threads)))
        tree.write("proc/self/status", "CapEff:\t0000000000000000\nMems_allowed_list:\t0-15")
        for pid in range(100, 100 + self.processes):
            folder = tree.root / f"proc/{pid}"
            folder.mkdir()
            (folder / "comm").write_text("kworker\n")


def _driver(tree: Tree) -> None:
    tree.write(
        "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release"
    )
    tree.write("proc/driver/nvidia/params", 'NvLinkDisable: 0\nRegistryDwords: ""')
    for number in range(30):
        tree.write(f"etc/modprobe.d/{number}.conf", "options other x=1")
    tree.write(
        "etc/ld.so.cache", "\0" + "\0".join(f"/usr/lib/libsomething{number}.so.1" for number in range(5000)) + "\0"
    )
