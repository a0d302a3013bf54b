"""Settings of the NVIDIA driver, and the programs that must run beside it, that decide which GPUs reach each other."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A program beside the driver. `running` is None where the host's processes are not visible from here; the host is
    what boots this kernel, so a virtual machine that leaves its NVSwitches to what is below it runs none.

    `version` is the one that it last wrote of itself into its log.
    """

    running: bool | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidentialComputing:
    """Confidential computing as NVML tells it: with it on, transfers are encrypted, or staged in memory of the host.

    `environment` is unavailable, simulation or production; `multi_gpu` is none, protected_pcie or nvle, which say how
    GPUs may reach each other.
    """

    enabled: bool | None = None
    developer_tools: bool | None = None
    environment: str | None = None
    multi_gpu: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """The settings of the driver of a node. None is unknown, and `unknown` says why, by field.

    `parameters` are those of the loaded module that bear on peer access, NVLink, BAR 1 and IMEX, by their names without
    NVreg_; `registry_keys` such keys of RegistryDwords, those of one GPU as 'key@bus id'; `configured` what files of
    modprobe will set when the module is loaded again (in a container, its own files). `services` are by the names of
    their programs. `nvlink_bandwidth_mode` is full, off, min, half or 3quarter, for the whole node;
    `nvlink_bandwidth_reduced` names the GPUs (GPU3) whose own mode is below the best.
    """

    parameters: Mapping[str, str] | None = None
    registry_keys: Mapping[str, str] | None = None
    configured: Mapping[str, str] | None = None
    services: Mapping[str, Service] = field(default_factory=dict)
    confidential_computing: ConfidentialComputing | None = None
    nvlink_bandwidth_mode: str | None = None
    nvlink_bandwidth_reduced: tuple[str, ...] | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def nvlink_disabled(self) -> str:
        """The setting that disables NVLink on the whole node, in words; empty where none does."""
        parameter = (self.parameters or {}).get("NvLinkDisable")
        if parameter not in (None, "", "0"):
            return f"NvLinkDisable: {parameter} in the driver's parameters"
        return "NVML says that the NVLink bandwidth mode is off" if self.nvlink_bandwidth_mode == "off" else ""
