"""Conditions of hardware that the kernel reports in the text of a job."""

from gpubench.conditions.definition.condition import Family, complaint
from gpubench.model.terms.verdict import Cure

_XID = "https://docs.nvidia.com/deploy/xid-errors/index.html"
_AER = "https://docs.kernel.org/PCI/pcieaer-howto.html"

_OF_HARDWARE = "46|48|54|62|64|74|79|94|95|109|110|119|120|136|140|143|151|156|158|167|169|171|172"
"""Numbers of Xid that NVIDIA's catalogue answers with a reset of the GPU, a restart of the machine or a look at its
connectors; 94, which ends the application alone for an error of memory; and those from 167 on that are fatal by name.

Source: docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, of Ampere and newer, read in 2026."""

_OF_NVLINK = r"14[4-9]|150|155"
"""Of these the line says whether they are fatal."""

_RECOVERY = r"154, .* to 0x\w+ \((?!None)"
"""What the driver wants done for another Xid: reset, reboot, drain."""

HARDWARE_ERRORS = Family.of(
    "hardware_errors",
    "Hardware errors in the text of a job",
    complaint(
        "gpu-xid",
        "The kernel reports an error of a GPU, an NVLink or an NVSwitch: Xid, SXid, fallen off the bus",
        rf"NVRM: Xid [^:]*[^)]*\): (?:(?:{_OF_HARDWARE})\b|(?:{_OF_NVLINK}), (?!.*non-?fatal)|{_RECOVERY})"
        rf"|caused by previous Xid (?:{_OF_HARDWARE}|{_OF_NVLINK})\b|SXid [^)]*\): \d+, Fatal|fallen off the bus",
        expected="no Xid",
        likely="the GPU or link in the line; Xid 45 and CUDA errors on other GPUs are consequences",
        cure=Cure.of(
            "dmesg | grep -i xid",
            comment="NVIDIA's Xid catalogue says for each number whether to reset or replace the GPU.",
        ),
        link=_XID,
    ),
    complaint(
        "gpu-xid-doubt",
        "The kernel reports an Xid that a program may have caused, or that is not fatal",
        r"NVRM: Xid |SXid \(PCI",
        expected="no Xid",
        likely="13, 31, 43: a kernel of the program; 45: another Xid ended it; 63, 92, 121: errors corrected",
        cure=Cure(
            comment="Check whether the process in the line belongs to this job. If it does, run the program "
            "under `compute-sanitizer`."
        ),
        link=_XID,
        general=True,
    ),
    complaint(
        "pcie-fatal-error",
        "The kernel reports a fatal PCIe error (AER), or a link taken out of service because of one (DPC)",
        r"severity=uncorrect\w+ \(fatal\)|uncorrect\w+ \(fatal\) error|DPC: containment event",
        expected="no fatal PCIe errors",
        likely="a GPU, NIC, switch or riser below the port in the line; the devices behind it were reset",
        cure=Cure.of(
            "lspci -tv",
            comment="It shows the devices below the port; if errors return (dmesg -T | grep -E 'AER|DPC'), "
            "reseat or replace them.",
        ),
        link=_AER,
        of_programs=True,
    ),
    complaint(
        "pcie-error-doubt",
        "The kernel reports corrected or nonfatal PCIe errors (AER)",
        r"PCIe Bus Error: severity=|AER: (?:multiple )?(?:un)?correct\w+ ",
        expected="no PCIe errors",
        likely="a link that repeats packets and so slows down, or a device that this job does not use",
        cure=Cure.of(
            "lspci -tv",
            comment="It shows the devices below the port; `gpubench topo` shows replays and widths of the GPUs' links.",
        ),
        link=_AER,
        general=True,
        of_programs=True,
    ),
    complaint(
        "network-link-down",
        "The kernel reports a network interface without link, or a cable error",
        r"mlx\d_core .*(?:link down|cable unplugged)|port module event\[error\]|link is down",
        expected="links that stay up",
        likely="the cable, transceiver or switch port of this interface; harmless if the interface is unused",
        cure=Cure.of(
            "gpubench check --quick",
            comment="It shows the ports' errors and rates; run it, and ibstat or ethtool, on that node.",
        ),
        link="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
        of_programs=True,
    ),
    complaint(
        "nvlink-uncorrectable",
        "CUDA error: uncorrectable NVLink error detected during the execution",
        r"uncorrectable NVLink error",
        expected="links without errors",
        likely="a link, bridge or switch of this GPU or of its peer",
        cure=Cure.of(
            "nvidia-smi nvlink -e",
            comment="Run it on that node: growing errors show the faulty link; dmesg shows Xid and SXid.",
        ),
        link=_XID,
    ),
    complaint(
        "ecc-uncorrectable",
        "CUDA error: uncorrectable ECC error encountered",
        r"uncorrectable ECC error",
        expected="memory without uncorrectable errors",
        likely="faulty memory of this GPU",
        cure=Cure.of(
            "nvidia-smi -q -d ECC,ROW_REMAPPER",
            comment="Run it on that node; reset the GPU, and replace it if the errors return.",
        ),
        link="https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html",
    ),
)
