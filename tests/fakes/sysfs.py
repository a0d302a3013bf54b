"""Write a tree like /sys, /proc and /dev from a short description."""

from collections.abc import Mapping
from pathlib import Path

H200 = {"class": "0x030200", "vendor": "0x10de", "device": "0x2335"}
CONNECTX7 = {"class": "0x020700", "vendor": "0x15b3", "device": "0x1021"}
NVSWITCH = {"class": "0x068000", "vendor": "0x10de", "device": "0x22a3"}
BRIDGE = {"class": "0x060400", "vendor": "0x1000", "device": "0xc030"}


def link(
    speed: str = "32.0 GT/s PCIe", width: int = 16, max_speed: str = "32.0 GT/s PCIe", most: int = 16
) -> dict[str, str]:
    return {
        "current_link_speed": speed,
        "current_link_width": str(width),
        "max_link_speed": max_speed,
        "max_link_width": str(most),
    }


def config_space(*capabilities: tuple[int, int], size: int = 4096) -> bytes:
    """Return a configuration space with these extended capabilities: ids and the words after their headers."""
    space = bytearray(size)
    space[:4] = (0x2335_10DE).to_bytes(4, "little")
    for position, (identity, registers) in enumerate(capabilities):
        offset = 0x100 + 0x40 * position
        following = offset + 0x40 if position + 1 < len(capabilities) else 0
        space[offset : offset + 4] = (identity | 1 << 16 | following << 20).to_bytes(4, "little")
        space[offset + 4 : offset + 8] = registers.to_bytes(4, "little")
    return bytes(space[:size])


class Tree:
    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
        return file

    def symlink(self, path: str, target: Path | str) -> Path:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)
        return place

    def pci(self, path: str, files: Mapping[str, str], driver: str = "") -> Path:
        """Add a device below /sys/devices, and its link in /sys/bus/pci/devices."""
        device = self.root / "sys/devices" / path
        device.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (device / name).write_text(text + "\n")
        if driver:
            (device / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")
        self.symlink(f"sys/bus/pci/devices/{device.name}", device)
        return device

    def interface(self, name: str, device: Path, **files: str) -> Path:
        """Add a network interface to a device."""
        folder = device / "net" / name
        folder.mkdir(parents=True)
        for file, text in files.items():
            (folder / file).write_text(text + "\n")
        (folder / "device").symlink_to("../..")
        self.symlink(f"sys/class/net/{name}", folder)
        return folder

    def rdma(self, name: str, device: Path | None, *ports: Mapping[str, str], **files: str) -> Path:
        """Add an RDMA device with ports counted from 1. Without a device below it, it is an emulated one."""
        folder = (device or self.root / "sys/devices/virtual") / "infiniband" / name
        folder.mkdir(parents=True)
        for file, text in files.items():
            (folder / file).write_text(text + "\n")
        for number, port in enumerate(ports, 1):
            (folder / "ports" / str(number)).mkdir(parents=True)
            for file, text in port.items():
                (folder / "ports" / str(number) / file).write_text(text + "\n")
        if device is not None:
            (folder / "device").symlink_to("../..")
        self.symlink(f"sys/class/infiniband/{name}", folder)
        return folder


def port(state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)", link_layer: str = "InfiniBand") -> dict[str, str]:
    return {"state": state, "phys_state": "5: LinkUp", "rate": rate, "link_layer": link_layer}
