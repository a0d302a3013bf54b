"""Read the node from its kernel: CPUs and memory, kernel and NVIDIA driver settings, and fabric services.

IMEX and the subnet manager were not tested on hardware.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import field
from msgspec.structs import replace

from gpubench.machine import host, pci
from gpubench.machine.nics import nic_devices, read_nics, read_rdma_ports
from gpubench.model.facts import snapshot
from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.verdict import Origin

_DRIVER_VERSION = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", re.ASCII)
_NUMA_NODE = re.compile(r"node(\d+)", re.ASCII)
_PEERMEM = (
    "sys/kernel/mm/memory_peers/nv_mem/version",
    "sys/kernel/mm/memory_peers/nv_mem_nc/version",
    "sys/module/nvidia_peermem/version",
)
"""Files that NCCL checks to find out whether a NIC can access GPU memory through nvidia-peermem."""

_CHASSIS = {
    **dict.fromkeys((8, 9, 10, 14, 30, 31, 32), "laptop"),
    **dict.fromkeys((3, 4, 5, 6, 7, 13, 15, 16, 24, 35), "desktop"),
    **dict.fromkeys((17, 23, 25, 28, 29), "server"),
}
"""Chassis types by the number that the firmware reports (DMTF DSP0134, SMBIOS, 7.4.1)."""


def read_machine(root: Path) -> snapshot.HostFacts:
    """Read CPUs, NUMA nodes, the kernel version, and the firmware's names for the machine."""
    text = host.read_text(root / "proc/cpuinfo") or ""
    models = _cpuinfo_values("model name", text)
    flags = _cpuinfo_values("flags", text)  # exists only on x86
    is_virtual = "hypervisor" in flags[0].split() if flags else None
    names = [host.read_text(root / "sys/class/dmi/id" / name) for name in ("sys_vendor", "product_name")]
    return snapshot.HostFacts(
        kernel=host.read_text(root / "proc/sys/kernel/osrelease"),
        cpu=models[0] if models else None,
        cpus=len(_cpuinfo_values("processor", text)) or None,
        sockets=len(set(_cpuinfo_values("physical id", text))) or None,
        numa_nodes=_numa_nodes(root / "sys/devices/system/node"),
        virtual_machine=True if host.read_text(root / "sys/hypervisor/type") else is_virtual,
        product=" ".join(filter(None, names)) or None,
        boot_id=host.read_text(root / "proc/sys/kernel/random/boot_id"),
        chassis=_CHASSIS.get(host.read_number(root / "sys/class/dmi/id/chassis_type") or 0),
        container=host.container_around(root),
    )


def _read_kernel_driver(root: Path) -> snapshot.DriverFacts:
    """Read the loaded kernel module's version, which is available even if the driver no longer responds."""
    text = host.read_text(root / "proc/driver/nvidia/version")
    if text is None:
        return snapshot.DriverFacts()
    version = _DRIVER_VERSION.search(text)
    return snapshot.DriverFacts(
        version=version[1] if version else None, open_kernel_module="Open Kernel Module" in text
    )


def _read_gpudirect(root: Path) -> snapshot.GpuDirectFacts:
    """Read whether nvidia-peermem and efa_nv_peermem are loaded. Support for dma-buf comes from CUDA."""
    modules = root / "sys/module"
    absent = False if host.exists(modules) else None
    registered = None
    # Not tested with InfiniBand.
    if host.exists(modules / "nvidia_peermem") and host.exists(modules / "ib_core/holders"):
        users = (*host.list_names(modules / "ib_core/holders"), *host.list_names(modules / "ib_uverbs/holders"))
        registered = "nvidia_peermem" in users
    return snapshot.GpuDirectFacts(
        peermem=True if any(host.exists(root / path) for path in _PEERMEM) else absent,
        peermem_registered=registered,
        efa_peermem=True if host.exists(modules / "efa_nv_peermem") else absent,
    )


def _cpuinfo_values(field: str, text: str) -> list[str]:
    """Return one field of /proc/cpuinfo for each processor. Parsing all fields would use megabytes on a large
    machine.
    """
    return re.findall(rf"^{field}[ \t]*:[ \t]*(.*?)[ \t]*$", text, re.MULTILINE)


def _numa_nodes(folder: Path) -> tuple[snapshot.NumaNode, ...]:
    numbers = sorted(int(match[1]) for name in host.list_names(folder) if (match := _NUMA_NODE.fullmatch(name)))
    return tuple(
        snapshot.NumaNode(number=number, cpus=host.read_text(folder / f"node{number}/cpulist") or "")
        for number in numbers
    )


_OPTIONS = (
    *("iommu=", "iommu.", "intel_iommu=", "amd_iommu=", "arm-smmu", "pcie_acs_override=", "pcie_aspm=", "pcie_ports="),
    *("pcie_port_pm=", "swiotlb=", "numa=", "numa_balancing=", "mem_encrypt=", "nvidia.", "nvidia_peermem."),
)
_PCI_OPTIONS = (
    *("disable_acs_redir", "config_acs", "noaer", "nommconf", "realloc", "noats", "pcie_bus_", "resource_alignment"),
    *("nocrs", "assign-busses", "big_root_window"),
)
"""Comma-separated values of the kernel option pci= (Documentation/admin-guide/kernel-parameters)."""

_RELEASE = re.compile(r"Linux version (\S+)", re.ASCII)


def read_kernel_settings(root: Path, devices: Iterable[snapshot.PciDevice]) -> snapshot.KernelSettings:
    """Read the kernel settings below `root`, and the types of these devices' IOMMU groups."""
    unknown = host.UnknownFields()
    drivers = unknown.text("imex", root / "proc/devices")
    return snapshot.KernelSettings(
        options=_options(unknown.text("options", root / "proc/cmdline")),
        wsl=_wsl(root, unknown),
        imex=None
        if drivers is None
        else any(line.split()[1:] == ["nvidia-caps-imex-channels"] for line in drivers.splitlines()),
        iommu=_iommu(root, {device.iommu_group for device in devices if device.iommu_group is not None}),
        unknown=unknown.reasons,
    )


def _options(line: str | None) -> tuple[str, ...] | None:
    """Return the relevant kernel options only, because others may contain secrets. Long ones are truncated."""
    if line is None:
        return None
    found = []
    for word in line.split():
        if word.startswith("pci="):
            values = [value for value in word.removeprefix("pci=").split(",") if value.startswith(_PCI_OPTIONS)]
            found += [f"pci={','.join(values)}"] if values else []
        elif word.startswith(_OPTIONS):
            found.append(word)
    return tuple(map(host.printable, found))


def _wsl(root: Path, unknown: host.UnknownFields) -> bool | None:
    """True under WSL, if /dev/dxg exists or the kernel release contains 'microsoft'."""
    if host.exists(root / "dev/dxg"):
        return True
    release = _RELEASE.match(unknown.text("wsl", root / "proc/version") or "")
    if release is None:
        unknown.reasons.setdefault("wsl", "version contains no release")
        return None
    return "microsoft" in release[1].lower()


def _iommu(root: Path, groups: Iterable[int]) -> snapshot.IommuFacts:
    unknown = host.UnknownFields()
    folder = root / "sys/class/iommu"
    units = tuple(map(host.printable, host.list_names(folder))) if host.exists(folder) else None
    if units is None:
        unknown.reasons["units"] = "sys/class/iommu does not exist"
    types = {}
    for group in sorted(groups):
        kind = unknown.text("group_types", root / f"sys/kernel/iommu_groups/{group}/type")
        if kind is not None:
            types[str(group)] = host.printable(kind)
    return snapshot.IommuFacts(units=units, group_types=types, unknown=unknown.reasons)


_COMM_LENGTH = 15  # The kernel truncates program names to this many characters (TASK_COMM_LEN)
_LOGS = {
    "nv-fabricmanager": (
        "var/log/fabricmanager.log",
        rb"[Ff]abric ?[Mm]anager(?: NVIDIA GPU driver interface)? version",
    ),
    "nvlsm": ("var/log/nvlsm.log", rb"(?:nvlsm|NVLSM|OpenSM) (?:version )?"),
    "nvidia-imex": ("var/log/nvidia-imex.log", rb"IMEX (?:Log )?[Vv]ersion"),
}
"""The services' default log files, and a pattern for the text before the version. The fabric manager's pattern
matches a line that users quote in public reports. The other patterns are untested.
"""

_LOG_BYTES = 2**16
_MOST_PROCESSES = 10_000


def read_services(root: Path) -> tuple[dict[str, snapshot.Service], dict[str, str]]:
    """Return the services by name, and reasons for unknown values by `services.NAME.FIELD`. Does not need root."""
    hidden = _why_processes_hidden(root)
    running, is_complete = (set[str](), False) if hidden else _find_services(root)
    found, unknown = {}, {}
    for name in _LOGS:
        is_running = True if name in running else False if is_complete else None
        if is_running is None:
            unknown[f"services.{name}.running"] = hidden or f"more than {_MOST_PROCESSES} processes run"
        version, reason = _version_in_log(root, name)
        if version is None:
            unknown[f"services.{name}.version"] = reason
        found[name] = snapshot.Service(running=is_running, version=version)
    return found, unknown


def _why_processes_hidden(root: Path) -> str:
    try:
        namespace = (root / "proc/self/ns/pid").readlink().name
    except OSError as error:
        return f"/proc/self/ns/pid: {error.strerror}"
    if namespace != host.FIRST_PID_NAMESPACE:
        return "this is the PID namespace of a container, so the host's processes are not visible"
    return "" if host.read_text(root / "proc/1/comm") is not None else "/proc hides the processes of other users"


def _find_services(root: Path) -> tuple[set[str], bool]:
    """Return the services that are running. The second value is False if some processes were not checked."""
    wanted = {name[:_COMM_LENGTH]: name for name in _LOGS}
    found: set[str] = set()
    for count, pid in enumerate(_pids(root)):
        if count == _MOST_PROCESSES:
            return found, False
        comm = host.UnknownFields().tail("", root / f"proc/{pid}/comm", _COMM_LENGTH + 1) or b""
        found |= {wanted.get(comm.decode(errors="replace").strip(), "")} - {""}
        if len(found) == len(wanted):
            break
    return found, True


def _pids(root: Path) -> Iterator[str]:
    """Yield the PIDs of process 1's children, such as services, and then of all others except kernel threads.

    Kernel threads are children of process 2. Machines with thousands of CPUs have tens of thousands of them.
    """
    services = _children(root, "1")
    yield from services
    others = {name for name in host.list_names(root / "proc") if name.isdecimal()}
    yield from sorted(others - set(services) - set(_children(root, "2")), key=int, reverse=True)


def _children(root: Path, pid: str) -> list[str]:
    """Return the PIDs of a process's children. Empty if the kernel does not list them (CONFIG_PROC_CHILDREN)."""
    return (host.read_text(root / f"proc/{pid}/task/{pid}/children") or "").split()


def _version_in_log(root: Path, service: str) -> tuple[str | None, str]:
    """Return the last version in a service's log, or None and the reason."""
    path, prefix = _LOGS[service]
    unknown = host.UnknownFields()
    text = unknown.tail("version", root / path, _LOG_BYTES)
    if text is None:
        return None, unknown.reasons["version"]
    found = re.findall(prefix + rb"\s*:?\s*(\d+(?:\.\d+)+)", text)
    if not found:
        return None, f"{Path(path).name} has no version at its end"
    return found[-1].decode(), ""


_PARAMETERS = frozenset(
    (
        *("NvLinkDisable", "RmNvlinkBandwidth", "RmNvlinkBandwidthLinkCount", "GrdmaPciTopoCheckOverride"),
        *("DmaRemapPeerMmio", "EnableResizableBar", "EnablePCIERelaxedOrderingMode", "EnableStreamMemOPs"),
        *("EnableUserNUMAManagement", "CoherentGPUMemoryMode", "EnableGpuFirmware", "EnablePCIeGen3"),
        *("ImexChannelCount", "CreateImexChannel0", "OpenRmEnableUnsupportedGpus", "ExcludedGpus", "GpuBlacklist"),
    )
)
"""Names in /proc/driver/nvidia/params. RmNvlinkBandwidth is not in that file, but NVML reports the mode."""

_REGISTRY_KEYS = (
    *("forcep2p", "rmforcep2p", "rmpciep2p", "rmp2p", "rmdisablep2p", "rmnvlink", "nvlink", "peermapping"),
    *("rmforcestaticbar1", "rmbar1", "rmpcie", "enableresizablebar", "grdma", "rmconfcompute", "rmconfidential"),
)
"""Prefixes of registry keys that change how GPUs and NICs reach each other, in lower case. Matching ignores case."""

_MODPROBE = ("etc/modprobe.d", "run/modprobe.d", "usr/lib/modprobe.d")
_MOST_FILES = 256
_DRIVER_OPTIONS = re.compile(r"^\s*options\s+nvidia(?:[-_][\w-]+)?\s+(.*)$", re.ASCII | re.MULTILINE)
_OPTION = re.compile(r'NVreg_(\w+)=(?:"([^"]*)"|(\S*))', re.ASCII)


def read_driver_settings(root: Path) -> snapshot.DriverSettings:
    """Read the driver settings below `root`, except those that only NVML reports."""
    unknown = host.UnknownFields()
    text = unknown.text("parameters", root / "proc/driver/nvidia/params")
    if text is None:
        unknown.reasons["registry_keys"] = unknown.reasons["parameters"]
    # Strings are quoted (nv_procfs_read_params in the open kernel module).
    settings = {name: value.strip('"') for name, value in host.parse_fields(text).items()}
    services, reasons = read_services(root)
    return snapshot.DriverSettings(
        parameters=None if text is None else _known_parameters(settings),
        registry_keys=None if text is None else _registry_keys(settings),
        configured=_read_modprobe(root, unknown),
        services=services,
        unknown=unknown.reasons | reasons,
    )


def _known_parameters(settings: Mapping[str, str]) -> dict[str, str]:
    return {name: host.printable(value) for name, value in settings.items() if name in _PARAMETERS}


def _registry_keys(settings: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for name in ("RegistryDwords", "RegistryDwordsPerDevice"):
        device = ""
        for entry in settings.get(name, "").split(";"):
            key, _, value = (part.strip() for part in entry.partition("="))
            if name == "RegistryDwordsPerDevice" and key.lower() == "pci":
                device = f"@{value.lower()}"
            elif key.lower().startswith(_REGISTRY_KEYS):
                found[host.printable(key + device)] = host.printable(value)
    return found


def _read_modprobe(root: Path, unknown: host.UnknownFields) -> dict[str, str] | None:
    """Read the NVIDIA options in modprobe.d. If several directories have a file of the same name, the first
    directory wins (modprobe.d(5)).
    """
    files: dict[str, Path] = {}
    for folder in _MODPROBE:
        for name in host.list_names(root / folder):
            if name.endswith(".conf") and len(files) < _MOST_FILES:
                files.setdefault(name, root / folder / name)
    if not any(host.exists(root / folder) for folder in _MODPROBE):
        unknown.reasons["configured"] = "there is no modprobe.d"
        return None
    found: dict[str, str] = {}
    for _, file in sorted(files.items()):
        for options in _DRIVER_OPTIONS.findall(host.read_text(file) or ""):
            settings = {option: quoted or bare for option, quoted, bare in _OPTION.findall(options)}
            found |= _known_parameters(settings) | _registry_keys(settings)
    return found


# Reading a GPU's name in /proc needs the driver's lock, so a driver that hangs blocks the reader.
_SECONDS_FOR_NAMES = 2.0
_DEVICE_FILE = re.compile(r"nvidia\d+", re.ASCII)
_MINOR = re.compile(r"\d{1,6}", re.ASCII)


_NO_FACTS = snapshot.Snapshot(host="", origin=Origin.MEASURED, source="")


class SysfsFacts(Struct, frozen=True, kw_only=True):
    """A node's facts from the kernel. `gpu_drivers` and `device_files` help to detect lost GPUs."""

    node: snapshot.Snapshot = _NO_FACTS
    gpu_drivers: Mapping[str, str] = field(default_factory=dict)
    device_files: int = 0


def read_sysfs(root: Path = Path("/")) -> SysfsFacts:
    """Read /sys, /proc and /dev below `root`. Facts whose files are missing stay unknown."""
    devices = pci.find_nvidia_devices(root)
    drivers = {snapshot.normalize_bus_id(gpu.name): pci.driver_name(gpu) for gpu in devices.gpus}
    pages = _read_driver_pages(root) if devices.gpus else {}
    minors = {address: page.get("Device Minor", "") for address, page in pages.items()}
    nics = nic_devices(root)
    pci_devices = pci.read_pci_devices(
        devices.gpus, nics, {address: int(text) for address, text in minors.items() if _MINOR.fullmatch(text)}
    )
    node = replace(
        _NO_FACTS,
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
    )
    return SysfsFacts(
        node=node,
        gpu_drivers={address: driver for address, driver in drivers.items() if driver is not None},
        device_files=sum(_DEVICE_FILE.fullmatch(name) is not None for name in host.list_names(root / "dev")),
    )


def _gpus(folders: Sequence[Path], pages: Mapping[str, Mapping[str, str]]) -> Iterator[snapshot.GpuFacts]:
    for index, folder in enumerate(folders):
        address = pci.pci_address(folder) or snapshot.normalize_bus_id(folder.name)
        page = pages.get(address, {})
        uuid = page.get("GPU UUID", "")
        yield snapshot.GpuFacts(
            index=index,
            bus_id=address,
            name=page.get("Model") or f"NVIDIA GPU 0x{host.read_number(folder / 'device') or 0:04x}",
            uuid=uuid if uuid and "?" not in uuid else None,
            pcie=pci.trained_link(folder),
            place=pci.read_place(folder),
        )


def _read_driver_pages(root: Path) -> dict[str, dict[str, str]]:
    """Read the driver's information file in /proc for each GPU. If the driver hangs, return those read so far."""
    folder = root / "proc/driver/nvidia/gpus"
    pages: dict[str, dict[str, str]] = {}

    def read() -> None:
        for name in host.list_names(folder):
            pages[snapshot.normalize_bus_id(name)] = host.parse_fields(host.read_text(folder / name / "information"))

    host.call_with_deadline(read, _SECONDS_FOR_NAMES)
    return dict(pages)
