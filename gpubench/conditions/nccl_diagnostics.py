"""Conditions that the own checks of NCCL 2.31 and later report in the log of a job."""

from functools import partial

from gpubench.conditions.definition.condition import Family, complaint
from gpubench.model.terms.verdict import Cure

_DIAG = r"^NCCL DIAG \[INFO\] "
_reported = partial(
    complaint,
    link="https://github.com/NVIDIA/nccl",
)

NCCL_DIAGNOSTICS = Family.of(
    "nccl_diagnostics",
    "What NCCL's own checks report",
    _reported(
        "nccl-diag-p2p",
        "NCCL's P2P check: peer access between GPUs does not work, or data arrive wrong",
        rf"{_DIAG}p2p: (?:only \d|read mismatch|write mismatch|peer-memory import failed|launch/check failed"
        r"|topology check failed|destination buffer unavailable|local CUDA setup failed)",
        expected="every peer access passes verification",
        likely="a link, an IOMMU, ACS redirection, a fabric that is not ready, or a container that separates the GPUs",
        cure=Cure.of(
            "gpubench p2p",
            comment="It verifies every byte on these GPUs; `gpubench topo --causes` looks for the reason.",
        ),
    ),
    _reported(
        "nccl-diag-hardware",
        "NCCL's RAS check: ECC errors, or NVLinks that are not active",
        rf"{_DIAG}(?:ECC|NVLink): (?!.*(?:unavailable|incomplete|not supported))",
        expected="no uncorrected errors, all links active",
        likely="a GPU or link that is about to fail",
        cure=Cure.of(
            "gpubench check", comment="Run it on that node; nvidia-smi -q -d ECC and nvidia-smi nvlink -s show details."
        ),
    ),
    _reported(
        "nccl-diag-network",
        "NCCL's network check: ranks whose bandwidth is more than 30 % off the median, or runs that failed",
        rf"{_DIAG}net bw: (?:.*off median|.*failed|.*timed out|.*cannot|.*unable|.*missing|mode=)",
        expected="all ranks within 30 % of the median",
        likely="a slow NIC, port or cable; for failed runs, perftest that is not installed",
        cure=Cure(
            comment="Test the path between these nodes with `ib_write_bw`, or run `mpirun gpubench p2p` on them."
        ),
    ),
    _reported(
        "nccl-diag-ranks-differ",
        "NCCL's RAS check: GPUs, drivers or NCCL_* variables differ between ranks",
        rf"{_DIAG}(?:GPU inventory|CUDA driver version|NCCL environment): ",
        expected="the same on all ranks",
        likely="different images, drivers or launcher environments on the nodes",
        cure=Cure(comment="Make these ranks equal to the others: image, driver and environment."),
    ),
)
