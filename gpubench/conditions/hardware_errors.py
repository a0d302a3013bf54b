"""Errors in a job's log that the kernel or NCCL's built-in checks reported."""

from gpubench.conditions.condition import Family
from gpubench.conditions.failures import logged_condition

_OF_HARDWARE = "46|48|54|62|64|74|79|94|95|109|110|119|120|136|140|143|151|156|158|167|169|171|172"
"""Xids that NVIDIA's catalogue attributes to hardware: it recommends a GPU reset, a reboot or checking the
connectors.

The list also has 94 (a memory error that ends only the application) and the fatal Xids from 167 on. Source:
docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, for Ampere and newer, read in 2026.
"""

_OF_NVLINK = r"14[4-9]|150|155"
"""NVLink Xids. The log line shows whether the error was fatal."""

_RECOVERY = r"154, .* to 0x\w+ \((?!None)"
"""Xid 154, which reports the recovery action for another Xid: reset, reboot or drain."""

HARDWARE_ERRORS = Family.of(
    "hardware_errors",
    "Errors that the kernel or NCCL's built-in checks report in a job's log",
    logged_condition(
        "nccl-diag-failed",
        "NCCL's built-in checks found broken peer access, wrong data, ECC errors or inactive NVLinks",
        r"^NCCL DIAG \[INFO\] (?:p2p: (?:only \d|read mismatch|write mismatch|peer-memory import failed"
        r"|launch/check failed|topology check failed|destination buffer unavailable|local CUDA setup failed)"
        r"|(?:ECC|NVLink): (?!.*(?:unavailable|incomplete|not supported)))",
        "a GPU or link that fails, an IOMMU, ACS redirection, or a fabric that is not ready",
        "gpubench p2p",
        "It verifies every byte on these GPUs. `gpubench check` looks at ECC and NVLinks on that node.",
        expected="NCCL's checks pass",
        link="https://github.com/NVIDIA/nccl",
        aliases=("nccl-diag-p2p", "nccl-diag-hardware"),
    ),
    logged_condition(
        "nccl-diag-doubt",
        "NCCL's built-in checks found ranks far from the median bandwidth, or with different GPUs, drivers or "
        "NCCL_* variables",
        r"^NCCL DIAG \[INFO\] (?:net bw: (?:.*off median|.*failed|.*timed out|.*cannot|.*unable|.*missing|mode=)"
        r"|(?:GPU inventory|CUDA driver version|NCCL environment): )",
        "a slow NIC, port or cable, a missing perftest package, or different images or launcher environments",
        "mpirun gpubench p2p",
        "Run it on these nodes, and use the same image, driver and environment for all ranks.",
        expected="ranks that are alike, within 30 % of the median",
        link="https://github.com/NVIDIA/nccl",
        aliases=("nccl-diag-network", "nccl-diag-ranks-differ"),
    ),
    logged_condition(
        "gpu-xid",
        "The kernel reports a GPU, NVLink or NVSwitch error: Xid, SXid, fallen off the bus",
        rf"NVRM: Xid [^:]*[^)]*\): (?:(?:{_OF_HARDWARE})\b|(?:{_OF_NVLINK}), (?!.*non-?fatal)|{_RECOVERY})"
        rf"|caused by previous Xid (?:{_OF_HARDWARE}|{_OF_NVLINK})\b|SXid [^)]*\): \d+, Fatal|fallen off the bus",
        "the GPU or link in the line (Xid 45 and CUDA errors on other GPUs are consequences)",
        "dmesg | grep -i xid",
        "NVIDIA's Xid catalogue shows for each number whether to reset or replace the GPU.",
        expected="no Xid",
        link="https://github.com/NVIDIA/open-gpu-kernel-modules/issues/507",
    ),
    logged_condition(
        "gpu-xid-doubt",
        "The kernel reports an Xid that a program may have caused, or that is not fatal",
        r"NVRM: Xid |SXid \(PCI",
        "a CUDA kernel of the program (Xid 13, 31 and 43), another Xid before it (45), or corrected errors (63, "
        "92 and 121)",
        "",
        "Check whether the process in the line belongs to this job. If it does, run the program "
        "under `compute-sanitizer`.",
        expected="no Xid",
        link="https://github.com/NVIDIA/NVSentinel/issues/271",
        general=True,
    ),
    logged_condition(
        "pcie-fatal-error",
        "The kernel reports a fatal PCIe error (AER), or a link taken out of service because of one (DPC)",
        r"severity=uncorrect\w+ \(fatal\)|uncorrect\w+ \(fatal\) error|DPC: containment event",
        "a GPU, NIC, switch or riser behind the port in the line (these devices were reset)",
        "lspci -tv",
        "It shows the devices behind it. If errors return (dmesg -T | grep -E 'AER|DPC'), reseat or replace them.",
        expected="no fatal PCIe errors",
        link="https://github.com/rwth-i6/returnn/issues/1500",
        of_programs=True,
    ),
    logged_condition(
        "pcie-error-doubt",
        "The kernel reports corrected or nonfatal PCIe errors (AER)",
        r"PCIe Bus Error: severity=|AER: (?:multiple )?(?:un)?correct\w+ ",
        "a link that is slower because it resends packets, or a device that this job does not use",
        "lspci -tv",
        "It shows the devices behind the port. `gpubench topo` shows the replays and widths of the GPUs' links.",
        expected="no PCIe errors",
        link="https://github.com/rwth-i6/returnn/issues/1486",
        general=True,
        of_programs=True,
    ),
    logged_condition(
        "network-link-down",
        "The kernel reports a network interface without link, or a cable error",
        r"mlx\d_core .*(?:link down|cable unplugged)|port module event\[error\]|link is down",
        "the cable, transceiver or switch port of this interface (harmless if the interface is unused)",
        "gpubench check --quick",
        "Run it on that node, and also run ibstat or ethtool. It shows the ports' errors and rates.",
        expected="all links up",
        link="https://github.com/NVIDIA/NVSentinel/issues/1236",
        of_programs=True,
    ),
    logged_condition(
        "nvlink-uncorrectable",
        "CUDA error: uncorrectable NVLink error detected during the execution",
        r"uncorrectable NVLink error",
        "a link, bridge or switch of this GPU or of its peer",
        "nvidia-smi nvlink -e",
        "Run it on that node. Growing counters show the faulty link, and dmesg shows Xid and SXid errors.",
        expected="links without errors",
        link="https://github.com/pytorch/pytorch/issues/58155",
    ),
    logged_condition(
        "ecc-uncorrectable",
        "CUDA error: uncorrectable ECC error encountered",
        r"uncorrectable ECC error",
        "faulty memory of this GPU",
        "nvidia-smi -q -d ECC,ROW_REMAPPER",
        "Run it on that node. Reset the GPU, and replace it if the errors return.",
        expected="memory without uncorrectable errors",
        link="https://github.com/vllm-project/vllm/issues/5222",
    ),
)
