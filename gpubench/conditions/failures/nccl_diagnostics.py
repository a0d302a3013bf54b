"""What NCCL's own checks found: NCCL_RUN_DIAGNOSTICS (2.31) and its RAS diagnostics, which only inform.

The forms are those of the library's own text in NCCL 2.32.3; nothing of it ran here, where NCCL is 2.28.9.
"""

from gpubench.conditions.definition.complaints import complaint
from gpubench.conditions.definition.condition import Condition, Family

_GUIDE = "https://github.com/NVIDIA/nccl"


def _reported(id_: str, title: str, pattern: str, *, expected: str, likely: str, cure: str) -> Condition:
    """A condition that NCCL's checks report in some words."""
    return complaint(
        id_,
        title,
        rf"^NCCL DIAG \[INFO\] {pattern}",
        cure=cure,
        likely=likely,
        expected=expected,
        link=_GUIDE,
        seen_as=("NCCL DIAG [INFO]",),
        detection="`NCCL DIAG [INFO]` lines of NCCL 2.31 and later",
    )


NCCL_DIAGNOSTICS = Family.of(
    "nccl_diagnostics",
    "What NCCL's own checks report",
    _reported(
        "nccl-diag-p2p",
        "NCCL's P2P check: peer access between GPUs does not work, or data arrive wrong",
        r"p2p: (?:only \d|read mismatch|write mismatch|peer-memory import failed|launch/check failed"
        r"|topology check failed|destination buffer unavailable|local CUDA setup failed)",
        expected="every peer access passes verification",
        likely="a link, an IOMMU or ACS that redirects, a fabric that is not ready, or a container that parts the GPUs",
        cure="gpubench p2p on these GPUs: it verifies every byte; gpubench topo --causes; dmesg | grep -i xid",
    ),
    _reported(
        "nccl-diag-hardware",
        "NCCL's RAS check: ECC errors, or NVLinks that are not active",
        r"(?:ECC|NVLink): (?!.*(?:unavailable|incomplete|not supported))",
        expected="no uncorrected errors, all links active",
        likely="a GPU or link that is about to fail",
        cure="nvidia-smi -q -d ECC; nvidia-smi nvlink -s; gpubench check on that node",
    ),
    _reported(
        "nccl-diag-network",
        "NCCL's network check: ranks whose bandwidth is more than 30 % off the median, or runs that failed",
        r"net bw: (?:.*off median|.*failed|.*timed out|.*cannot|.*unable|.*missing|mode=)",
        expected="all ranks within 30 % of the median",
        likely="a slow NIC, port or cable where it is below; perftest that is not installed where it could not run",
        cure="ib_write_bw between the nodes named; gpubench p2p under mpirun over these nodes",
    ),
    _reported(
        "nccl-diag-ranks-differ",
        "NCCL's RAS check: GPUs, drivers or NCCL_* variables differ between ranks",
        r"(?:GPU inventory|CUDA driver version|NCCL environment): ",
        expected="the same on all ranks",
        likely="an image, a driver or a launcher's environment that differs between nodes",
        cure="make the ranks named like the others",
    ),
)
