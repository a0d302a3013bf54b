"""The settings of the NVIDIA driver, from files that everyone may read."""

import re
from pathlib import Path

from gpubench.hardware.node.services import read_services
from gpubench.hardware.system_files import UnknownFields, exists, names_in, printable, text_of
from gpubench.model.facts.driver_settings import DriverSettings

_PARAMETERS = frozenset(
    (
        *("NvLinkDisable", "RmNvlinkBandwidth", "RmNvlinkBandwidthLinkCount", "GrdmaPciTopoCheckOverride"),
        *("DmaRemapPeerMmio", "EnableResizableBar", "EnablePCIERelaxedOrderingMode", "EnableStreamMemOPs"),
        *("EnableUserNUMAManagement", "CoherentGPUMemoryMode", "EnableGpuFirmware", "EnablePCIeGen3"),
        *("ImexChannelCount", "CreateImexChannel0", "OpenRmEnableUnsupportedGpus", "ExcludedGpus", "GpuBlacklist"),
    )
)
"""Of /proc/driver/nvidia/params. RmNvlinkBandwidth is a module parameter and not on that page: NVML knows the mode."""

_REGISTRY_KEYS = (
    *("forcep2p", "rmforcep2p", "rmpciep2p", "rmp2p", "rmdisablep2p", "rmnvlink", "nvlink", "peermapping"),
    *("rmforcestaticbar1", "rmbar1", "rmpcie", "enableresizablebar", "grdma", "rmconfcompute", "rmconfidential"),
)
"""Beginnings of registry keys that decide how GPUs and NICs reach each other; case does not count."""

_REGISTRY = "RegistryDwords"
_REGISTRY_PER_DEVICE = "RegistryDwordsPerDevice"
_MODPROBE = ("etc/modprobe.d", "run/modprobe.d", "usr/lib/modprobe.d")
_MOST_FILES = 256
_OPTIONS = re.compile(r"^\s*options\s+nvidia(?:[-_][\w-]+)?\s+(.*)$", re.ASCII | re.MULTILINE)
_OPTION = re.compile(r'NVreg_(\w+)=(?:"([^"]*)"|(\S*))', re.ASCII)


def read_driver_settings(root: Path) -> DriverSettings:
    """The settings below `root`; what NVML has to tell of them is left open."""
    unknown = UnknownFields()
    lines = _lines(unknown.text("parameters", root / "proc/driver/nvidia/params"))
    if lines is None:
        unknown.reasons["registry_keys"] = unknown.reasons["parameters"]
    services, reasons = read_services(root)
    return DriverSettings(
        parameters=None if lines is None else _allowed(lines),
        registry_keys=None if lines is None else _registry_keys(lines),
        configured=_configured(root, unknown),
        services=services,
        unknown=unknown.reasons | reasons,
    )


def _lines(text: str | None) -> dict[str, str] | None:
    """'Name: value' lines, texts in quotation marks (nv_procfs_read_params of the open kernel module)."""
    if text is None:
        return None
    settings = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip().strip('"') for name, colon, value in settings if colon}


def _allowed(settings: dict[str, str]) -> dict[str, str]:
    return {name: printable(value) for name, value in settings.items() if name in _PARAMETERS}


def _registry_keys(settings: dict[str, str]) -> dict[str, str]:
    """'key=value;key=value', and for single GPUs 'pci=0000:1b:00.0;key=value;pci=...'."""
    found = {}
    for name in (_REGISTRY, _REGISTRY_PER_DEVICE):
        device = ""
        for entry in settings.get(name, "").split(";"):
            key, _, value = (part.strip() for part in entry.partition("="))
            if name == _REGISTRY_PER_DEVICE and key.lower() == "pci":
                device = f"@{value.lower()}"
            elif key.lower().startswith(_REGISTRY_KEYS):
                found[printable(key + device)] = printable(value)
    return found


def _configured(root: Path, unknown: UnknownFields) -> dict[str, str] | None:
    """Options in modprobe's files; of two files of one name that in the first folder counts (modprobe.d(5))."""
    files: dict[str, Path] = {}
    for folder in _MODPROBE:
        for name in names_in(root / folder):
            if name.endswith(".conf") and len(files) < _MOST_FILES:
                files.setdefault(name, root / folder / name)
    if not any(exists(root / folder) for folder in _MODPROBE):
        unknown.reasons["configured"] = "this root has no modprobe.d"
        return None
    found: dict[str, str] = {}
    for name in sorted(files):
        for options in _OPTIONS.findall(text_of(files[name]) or ""):
            settings = {option: quoted or bare for option, quoted, bare in _OPTION.findall(options)}
            found |= _allowed(settings) | _registry_keys(settings)
    return found
