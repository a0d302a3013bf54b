"""Reads the node from its kernel: machine, names, kernel and NVIDIA driver settings, fabric services.

IMEX and the subnet manager were not tried on hardware.
"""

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import field

from gpubench.machine import host, pci
from gpubench.machine.nics import nic_devices, read_nics, read_rdma_ports
from gpubench.model.facts import snapshot
from gpubench.model.terms.plain import StrictStruct as Struct

_DRIVER_VERSION = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", re.ASCII)
_NUMA_NODE = re.compile(r"node(\d+)", re.ASCII)
_PEERMEM = (
    "sys/kernel/mm/memory_peers/nv_mem/version",
    "sys/kernel/mm/memory_peers/nv_mem_nc/version",
    "sys/module/nvidia_peermem/version",
)
"""NCCL checks these files to see whether a NIC can reach GPU memory through nvidia-peermem."""

_EFA_PEERMEM = "sys/module/efa_nv_peermem"

_CHASSIS = {
    **dict.fromkeys((8, 9, 10, 14, 30, 31, 32), "laptop"),
    **dict.fromkeys((3, 4, 5, 6, 7, 13, 15, 16, 24, 35), "desktop"),
    **dict.fromkeys((17, 23, 25, 28, 29), "server"),
}
"""Chassis types by the firmware's number (DMTF DSP0134, SMBIOS, 7.4.1). Others tell nothing."""


def read_machine(root: Path) -> snapshot.HostFacts:
    """Read processors, memory nodes, kernel and firmware names."""
    text = host.text_of(root / "proc/cpuinfo") or ""
    models = _values_of_processors("model name", text)
    sockets = set(_values_of_processors("physical id", text))
    names = [host.text_of(root / "sys/class/dmi/id" / name) for name in ("sys_vendor", "product_name")]
    return snapshot.HostFacts(
        kernel=host.text_of(root / "proc/sys/kernel/osrelease"),
        cpu=models[0] if models else None,
        cpus=len(_values_of_processors("processor", text)) or None,
        sockets=len(sockets) or None,
        numa_nodes=_numa_nodes(root / "sys/devices/system/node"),
        virtual_machine=_virtual_machine(root, _values_of_processors("flags", text)),
        product=" ".join(filter(None, names)) or None,
        boot_id=host.text_of(root / "proc/sys/kernel/random/boot_id"),
        chassis=_CHASSIS.get(host.number_of(root / "sys/class/dmi/id/chassis_type") or 0),
        container=host.container_around(root),
    )


def _read_kernel_driver(root: Path) -> snapshot.DriverFacts:
    """Read the version of the loaded kernel module, which is also there if the driver no longer answers."""
    text = host.text_of(root / "proc/driver/nvidia/version")
    if text is None:
        return snapshot.DriverFacts()
    version = _DRIVER_VERSION.search(text)
    return snapshot.DriverFacts(
        version=version[1] if version else None, open_kernel_module="Open Kernel Module" in text
    )


def _read_gpudirect(root: Path) -> snapshot.GpuDirectFacts:
    """Read the modules nvidia-peermem and efa_nv_peermem. CUDA reports dma-buf."""
    absent = False if host.exists(root / "sys/module") else None
    return snapshot.GpuDirectFacts(
        peermem=True if any(host.exists(root / path) for path in _PEERMEM) else absent,
        peermem_registered=_registered(root),
        efa_peermem=True if host.exists(root / _EFA_PEERMEM) else absent,
    )


def _registered(root: Path) -> bool | None:
    """True if nvidia-peermem is registered with the RDMA core. None if either is not loaded. Not tried with
    InfiniBand.
    """
    if not host.exists(root / "sys/module/nvidia_peermem") or not host.exists(root / "sys/module/ib_core/holders"):
        return None
    users = {*host.names_in(root / "sys/module/ib_core/holders"), *host.names_in(root / "sys/module/ib_uverbs/holders")}
    return "nvidia_peermem" in users


def _values_of_processors(field: str, text: str) -> list[str]:
    """Return one field of /proc/cpuinfo per processor, without keeping the rest of its megabytes."""
    return re.findall(rf"^{field}[ \t]*:[ \t]*(.*?)[ \t]*$", text, re.MULTILINE)


def _numa_nodes(folder: Path) -> tuple[snapshot.NumaNode, ...]:
    numbers = sorted(int(match[1]) for name in host.names_in(folder) if (match := _NUMA_NODE.fullmatch(name)))
    return tuple(
        snapshot.NumaNode(number=number, cpus=host.text_of(folder / f"node{number}/cpulist") or "")
        for number in numbers
    )


def _virtual_machine(root: Path, flags: list[str]) -> bool | None:
    """True in a visible virtual machine. None if unknown, because only x86 has a flag for it."""
    if host.text_of(root / "sys/hypervisor/type"):
        return True
    return "hypervisor" in flags[0].split() if flags else None


_OPTIONS = (
    *("iommu=", "iommu.", "intel_iommu=", "amd_iommu=", "arm-smmu", "pcie_acs_override=", "pcie_aspm=", "pcie_ports="),
    *("pcie_port_pm=", "swiotlb=", "numa=", "numa_balancing=", "mem_encrypt=", "nvidia.", "nvidia_peermem."),
)
_PCI_OPTIONS = (
    *("disable_acs_redir", "config_acs", "noaer", "nommconf", "realloc", "noats", "pcie_bus_", "resource_alignment"),
    *("nocrs", "assign-busses", "big_root_window"),
)
"""Values of the kernel option pci=, separated by commas (Documentation/admin-guide/kernel-parameters)."""

_IMEX = "nvidia-caps-imex-channels"
_RELEASE = re.compile(r"Linux version (\S+)", re.ASCII)
_MICROSOFT = re.compile(r"microsoft", re.IGNORECASE)


def read_kernel_settings(root: Path, devices: Iterable[snapshot.PciDevice]) -> snapshot.KernelSettings:
    """Read kernel settings below `root`, and the IOMMU group types of these devices."""
    unknown = host.UnknownFields()
    return snapshot.KernelSettings(
        options=_options(unknown.text("options", root / "proc/cmdline")),
        wsl=_wsl(root, unknown),
        imex=_imex(unknown.text("imex", root / "proc/devices")),
        iommu=_iommu(root, {device.iommu_group for device in devices if device.iommu_group is not None}),
        unknown=unknown.reasons,
    )


def _options(line: str | None) -> tuple[str, ...] | None:
    """Return the relevant kernel options, shortened. Others may contain secrets."""
    if line is None:
        return None
    found = []
    for word in line.split():
        if word.startswith("pci="):
            inner = [each for each in word.removeprefix("pci=").split(",") if each.startswith(_PCI_OPTIONS)]
            found += [f"pci={','.join(inner)}"] if inner else []
        elif word.startswith(_OPTIONS):
            found.append(word)
    return tuple(map(host.printable, found))


def _wsl(root: Path, unknown: host.UnknownFields) -> bool | None:
    """True under WSL: the kernel release names Microsoft, and the device that reaches the GPU exists."""
    if host.exists(root / "dev/dxg"):
        return True
    release = _RELEASE.match(unknown.text("wsl", root / "proc/version") or "")
    if release is None:
        unknown.reasons.setdefault("wsl", "version names no release")
        return None
    return _MICROSOFT.search(release[1]) is not None


def _imex(devices: str | None) -> bool | None:
    return None if devices is None else any(line.split()[1:] == [_IMEX] for line in devices.splitlines())


def _iommu(root: Path, groups: Iterable[int]) -> snapshot.IommuFacts:
    unknown = host.UnknownFields()
    folder = root / "sys/class/iommu"
    units = tuple(map(host.printable, host.names_in(folder))) if host.exists(folder) else None
    if units is None:
        unknown.reasons["units"] = "sys/class/iommu is not there"
    types = {}
    for group in sorted(groups):
        kind = unknown.text("group_types", root / f"sys/kernel/iommu_groups/{group}/type")
        if kind is not None:
            types[str(group)] = host.printable(kind)
    return snapshot.IommuFacts(units=units, group_types=types, unknown=unknown.reasons)


FABRIC_MANAGER, SUBNET_MANAGER, IMEX = "nv-fabricmanager", "nvlsm", "nvidia-imex"
_PROGRAMS = (FABRIC_MANAGER, SUBNET_MANAGER, IMEX)
_KERNELS_LENGTH = 15  # Characters of a program name that the kernel keeps (TASK_COMM_LEN)
_LOGS = {
    FABRIC_MANAGER: ("var/log/fabricmanager.log", rb"[Ff]abric ?[Mm]anager(?: NVIDIA GPU driver interface)? version"),
    SUBNET_MANAGER: ("var/log/nvlsm.log", rb"(?:nvlsm|NVLSM|OpenSM) (?:version )?"),
    IMEX: ("var/log/nvidia-imex.log", rb"IMEX (?:Log )?[Vv]ersion"),
}
"""Default log files, and the text before the version in them. The fabric manager's line about a mismatched driver
is as users quote it. The others were not tried.
"""

_LOG_BYTES = 2**16
_MOST_PROCESSES = 10_000


def read_services(root: Path) -> tuple[dict[str, snapshot.Service], dict[str, str]]:
    """Return the services by name, and reasons for unknown values as `services.NAME.FIELD`. Needs no root."""
    hidden = _why_hidden(root)
    running, complete = (set[str](), False) if hidden else _running(root)
    found, unknown = {}, {}
    for name in _PROGRAMS:
        is_running = True if name in running else False if complete else None
        if is_running is None:
            unknown[f"services.{name}.running"] = hidden or f"more than {_MOST_PROCESSES} processes run"
        version, reason = _version(root, name)
        if version is None:
            unknown[f"services.{name}.version"] = reason
        found[name] = snapshot.Service(running=is_running, version=version)
    return found, unknown


def _why_hidden(root: Path) -> str:
    try:
        namespace = (root / "proc/self/ns/pid").readlink().name
    except OSError as error:
        return f"/proc/self/ns/pid: {error.strerror}"
    if namespace != host.FIRST_PID_NAMESPACE:
        return "this PID namespace is a container's own: the host's processes are not visible"
    return "" if host.text_of(root / "proc/1/comm") is not None else "/proc hides the processes of other users"


def _running(root: Path) -> tuple[set[str], bool]:
    wanted = {name[:_KERNELS_LENGTH]: name for name in _PROGRAMS}
    found: set[str] = set()
    for looked_at, pid in enumerate(_pids(root)):
        if looked_at == _MOST_PROCESSES:
            return found, False
        name = wanted.get(_name(root, pid))
        if name is not None:
            found.add(name)
            if len(found) == len(wanted):
                break
    return found, True


def _pids(root: Path) -> Iterator[str]:
    """Yield processes: first children of process 1, such as services, then all others except kernel threads, of
    which machines with thousands of CPUs have tens of thousands.
    """
    services = _children(root, "1")
    yield from services
    others = {name for name in host.names_in(root / "proc") if name.isdecimal()}
    yield from sorted(others - set(services) - set(_children(root, "2")), key=int, reverse=True)


def _children(root: Path, pid: str) -> list[str]:
    """Return the children of a process, if the kernel lists them (CONFIG_PROC_CHILDREN)."""
    return (host.text_of(root / f"proc/{pid}/task/{pid}/children") or "").split()


def _name(root: Path, pid: str) -> str:
    name = host.UnknownFields().tail("", root / f"proc/{pid}/comm", _KERNELS_LENGTH + 1) or b""
    return name.decode(errors="replace").strip()


def _version(root: Path, name: str) -> tuple[str | None, str]:
    path, before = _LOGS[name]
    unknown = host.UnknownFields()
    text = unknown.tail("version", root / path, _LOG_BYTES)
    if text is None:
        return None, unknown.reasons["version"]
    found = re.findall(before + rb"\s*:?\s*(\d+(?:\.\d+)+)", text)
    if not found:
        return None, f"{Path(path).name} names no version near its end"
    return found[-1].decode(), ""


_PARAMETERS = frozenset(
    (
        *("NvLinkDisable", "RmNvlinkBandwidth", "RmNvlinkBandwidthLinkCount", "GrdmaPciTopoCheckOverride"),
        *("DmaRemapPeerMmio", "EnableResizableBar", "EnablePCIERelaxedOrderingMode", "EnableStreamMemOPs"),
        *("EnableUserNUMAManagement", "CoherentGPUMemoryMode", "EnableGpuFirmware", "EnablePCIeGen3"),
        *("ImexChannelCount", "CreateImexChannel0", "OpenRmEnableUnsupportedGpus", "ExcludedGpus", "GpuBlacklist"),
    )
)
"""Names in /proc/driver/nvidia/params. RmNvlinkBandwidth is not on that page, but NVML knows the mode."""

_REGISTRY_KEYS = (
    *("forcep2p", "rmforcep2p", "rmpciep2p", "rmp2p", "rmdisablep2p", "rmnvlink", "nvlink", "peermapping"),
    *("rmforcestaticbar1", "rmbar1", "rmpcie", "enableresizablebar", "grdma", "rmconfcompute", "rmconfidential"),
)
"""Prefixes of registry keys that change how GPUs and NICs reach each other. Case does not matter."""

_REGISTRY = "RegistryDwords"
_REGISTRY_PER_DEVICE = "RegistryDwordsPerDevice"
_MODPROBE = ("etc/modprobe.d", "run/modprobe.d", "usr/lib/modprobe.d")
_MOST_FILES = 256
_DRIVER_OPTIONS = re.compile(r"^\s*options\s+nvidia(?:[-_][\w-]+)?\s+(.*)$", re.ASCII | re.MULTILINE)
_OPTION = re.compile(r'NVreg_(\w+)=(?:"([^"]*)"|(\S*))', re.ASCII)


def read_driver_settings(root: Path) -> snapshot.DriverSettings:
    """Read the driver settings below `root`, without those that only NVML knows."""
    unknown = host.UnknownFields()
    lines = _lines(unknown.text("parameters", root / "proc/driver/nvidia/params"))
    if lines is None:
        unknown.reasons["registry_keys"] = unknown.reasons["parameters"]
    services, reasons = read_services(root)
    return snapshot.DriverSettings(
        parameters=None if lines is None else _allowed(lines),
        registry_keys=None if lines is None else _registry_keys(lines),
        configured=_configured(root, unknown),
        services=services,
        unknown=unknown.reasons | reasons,
    )


def _lines(text: str | None) -> dict[str, str] | None:
    """Parse 'Name: value' lines with quoted texts (nv_procfs_read_params of the open kernel module)."""
    if text is None:
        return None
    settings = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip().strip('"') for name, colon, value in settings if colon}


def _allowed(settings: dict[str, str]) -> dict[str, str]:
    return {name: host.printable(value) for name, value in settings.items() if name in _PARAMETERS}


def _registry_keys(settings: dict[str, str]) -> dict[str, str]:
    found = {}
    for name in (_REGISTRY, _REGISTRY_PER_DEVICE):
        device = ""
        for entry in settings.get(name, "").split(";"):
            key, _, value = (part.strip() for part in entry.partition("="))
            if name == _REGISTRY_PER_DEVICE and key.lower() == "pci":
                device = f"@{value.lower()}"
            elif key.lower().startswith(_REGISTRY_KEYS):
                found[host.printable(key + device)] = host.printable(value)
    return found


def _configured(root: Path, unknown: host.UnknownFields) -> dict[str, str] | None:
    """Read options in modprobe's files. For equal file names, the first folder counts (modprobe.d(5))."""
    files: dict[str, Path] = {}
    for folder in _MODPROBE:
        for name in host.names_in(root / folder):
            if name.endswith(".conf") and len(files) < _MOST_FILES:
                files.setdefault(name, root / folder / name)
    if not any(host.exists(root / folder) for folder in _MODPROBE):
        unknown.reasons["configured"] = "this root has no modprobe.d"
        return None
    found: dict[str, str] = {}
    for name in sorted(files):
        for options in _DRIVER_OPTIONS.findall(host.text_of(files[name]) or ""):
            settings = {option: quoted or bare for option, quoted, bare in _OPTION.findall(options)}
            found |= _allowed(settings) | _registry_keys(settings)
    return found


SECONDS_FOR_NAMES = 2.0  # Reading a GPU's name in /proc takes the driver's lock, so a wedged driver blocks the reader
_DEVICE_FILE = re.compile(r"nvidia\d+", re.ASCII)
_MINOR = re.compile(r"\d{1,6}", re.ASCII)


class SysfsFacts(Struct, frozen=True, kw_only=True):
    """The node according to the kernel. `gpu_drivers` and `device_files` distinguish lost GPUs from other machines'
    GPUs.
    """

    machine: snapshot.HostFacts = field(default_factory=snapshot.HostFacts)
    driver: snapshot.DriverFacts = field(default_factory=snapshot.DriverFacts)
    driver_settings: snapshot.DriverSettings = field(default_factory=snapshot.DriverSettings)
    gpudirect: snapshot.GpuDirectFacts = field(default_factory=snapshot.GpuDirectFacts)
    gpus: tuple[snapshot.GpuFacts, ...] = ()
    nics: tuple[snapshot.NicFacts, ...] = ()
    switches: tuple[snapshot.PciSwitch, ...] = ()
    pci_devices: tuple[snapshot.PciDevice, ...] = ()
    rdma_ports: tuple[snapshot.RdmaPort, ...] = ()
    kernel: snapshot.KernelSettings = field(default_factory=snapshot.KernelSettings)
    nvswitches: tuple[str, ...] = ()
    gpu_drivers: Mapping[str, str] = field(default_factory=dict)
    device_files: int = 0


def read_sysfs(root: Path = Path("/")) -> SysfsFacts:
    """Read /sys, /proc and /dev below `root`. Missing files are unknown facts."""
    devices = pci.find_nvidia_devices(root)
    drivers = {snapshot.normalize_bus_id(each.name): pci.driver_of(each) for each in devices.gpus}
    pages = _driver_pages(root) if devices.gpus else {}
    nics = nic_devices(root)
    pci_devices = pci.read_pci_devices(devices.gpus, nics, _minors(pages))
    return SysfsFacts(
        machine=read_machine(root),
        driver=_read_kernel_driver(root),
        driver_settings=read_driver_settings(root),
        gpudirect=_read_gpudirect(root),
        gpus=tuple(_gpus(devices.gpus, pages)),
        nics=read_nics(root),
        switches=pci.switches_above((*devices.gpus, *nics)),
        pci_devices=pci_devices,
        rdma_ports=read_rdma_ports(root),
        kernel=read_kernel_settings(root, pci_devices),
        nvswitches=tuple(snapshot.normalize_bus_id(nvswitch.name) for nvswitch in devices.nvswitches),
        gpu_drivers={address: driver for address, driver in drivers.items() if driver is not None},
        device_files=sum(_DEVICE_FILE.fullmatch(name) is not None for name in host.names_in(root / "dev")),
    )


def _gpus(folders: Sequence[Path], pages: Mapping[str, Mapping[str, str]]) -> Iterator[snapshot.GpuFacts]:
    for index, folder in enumerate(folders):
        address = pci.pci_address(folder) or snapshot.normalize_bus_id(folder.name)
        information = pages.get(address, {})
        uuid = information.get("GPU UUID", "")
        yield snapshot.GpuFacts(
            index=index,
            bus_id=address,
            name=information.get("Model") or f"NVIDIA GPU 0x{host.number_of(folder / 'device') or 0:04x}",
            uuid=uuid if uuid and "?" not in uuid else None,
            pcie=pci.trained_link(folder),
            place=pci.place_of(folder),
        )


def _minors(pages: Mapping[str, Mapping[str, str]]) -> dict[str, int]:
    minors = {address: information.get("Device Minor", "") for address, information in pages.items()}
    return {address: int(text) for address, text in minors.items() if _MINOR.fullmatch(text)}


def _driver_pages(root: Path) -> dict[str, dict[str, str]]:
    folder = root / "proc/driver/nvidia/gpus"
    named: dict[str, dict[str, str]] = {}

    def read() -> None:
        for name in host.names_in(folder):
            lines = (host.text_of(folder / name / "information") or "").split("\n")
            named[snapshot.normalize_bus_id(name)] = {
                key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
            }

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(SECONDS_FOR_NAMES)
    return dict(named)
