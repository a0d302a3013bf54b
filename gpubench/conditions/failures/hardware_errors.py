"""Faults of GPUs, links and switches that the kernel, CUDA or the driver tell in the text of a job."""

from gpubench.conditions.definition.complaints import complaint
from gpubench.conditions.definition.condition import Family

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
        likely="the GPU or link that the line names; what follows from it on other GPUs are Xid 45 and CUDA errors",
        cure="nvidia-smi -q -i BUSID; nvidia-smi nvlink -e; NVIDIA's catalogue says by number: reset, or replace",
        link=_XID,
        seen_as=("NVRM: Xid (PCI:0000:1b:00): 79", "NVRM: Xid (PCI:0000:1b:00): 149, NETIR_LINK_EVT Fatal"),
        detection="the kernel's lines in the same text",
    ),
    complaint(
        "gpu-xid-doubt",
        "The kernel reports an Xid that a program may be the reason of, or one that is not fatal",
        r"NVRM: Xid |SXid \(PCI",
        expected="no Xid",
        likely="13, 31, 43: a kernel of the program; 45: another Xid ended it; 63, 92, 121: errors corrected",
        cure="look whether the process that the line names is of this job; compute-sanitizer on the program",
        link=_XID,
        seen_as=("NVRM: Xid (PCI:0000:1b:00): 31",),
        detection="the kernel's lines in the same text",
        general=True,
    ),
    complaint(
        "pcie-fatal-error",
        "The kernel reports a fatal PCIe error (AER), or that it took a link out of service for one (DPC)",
        r"severity=uncorrect\w+ \(fatal\)|uncorrect\w+ \(fatal\) error|DPC: containment event",
        expected="no fatal errors of PCIe",
        likely="a GPU, NIC, switch or riser below the port that the line names: what is behind it was reset",
        cure="lspci -tv shows what is below that port; dmesg -T | grep -E 'AER|DPC'; reseat or replace what errs again",
        link=_AER,
        seen_as=("PCIe Bus Error: severity=Uncorrected (Fatal)", "AER: Uncorrectable (Fatal) error message"),
        detection="the kernel's lines in the same text",
        of_programs=True,
    ),
    complaint(
        "pcie-error-doubt",
        "The kernel reports PCIe errors that it corrected, or that were not fatal (AER)",
        r"PCIe Bus Error: severity=|AER: (?:multiple )?(?:un)?correct\w+ ",
        expected="no errors of PCIe",
        likely="a link that repeats packets, which slows it; or a device that has nothing to do with this job",
        cure="lspci -tv shows what is below that port; gpubench topo shows replays and widths of the GPUs' links",
        link=_AER,
        seen_as=("AER: Corrected error received: 0000:1b:00.0",),
        detection="the kernel's lines in the same text",
        general=True,
        of_programs=True,
    ),
    complaint(
        "network-link-down",
        "The kernel reports a network interface that lost its link, or a cable with an error",
        r"mlx5_core .*link down|port module event\[error\]|link is down",
        expected="links that stay up",
        likely="cable, transceiver or switch port of that interface; one that is not used is harmless",
        cure="ibstat, or ethtool INTERFACE, on that node; gpubench check --quick shows the ports' errors and rates",
        link="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
        seen_as=("mlx5_core 0000:5e:00.0 ens1np0: Link down",),
        detection="the kernel's lines in the same text",
        of_programs=True,
    ),
    complaint(
        "nvlink-uncorrectable",
        "CUDA error: uncorrectable NVLink error detected during the execution",
        r"uncorrectable NVLink error",
        expected="links without errors",
        likely="a link, bridge or switch of the GPU on which it was seen, or of the one that it talked to",
        cure="dmesg -T | grep -i -E 'xid|sxid'; nvidia-smi nvlink -e on that node: errors that grow name the link",
        link=_XID,
        seen_as=("uncorrectable NVLink error detected during the execution",),
    ),
    complaint(
        "ecc-uncorrectable",
        "CUDA error: uncorrectable ECC error encountered",
        r"uncorrectable ECC error",
        expected="memory without uncorrectable errors",
        likely="the memory of the GPU on which it was seen",
        cure="nvidia-smi -q -d ECC,ROW_REMAPPER on that node; reset the GPU, replace it where the errors come back",
        link="https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html",
        seen_as=("uncorrectable ECC error encountered",),
    ),
)
