"""Policy for all conditions in two tables: how severe each one is, and which paths or slow operations it can
explain.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from gpubench.model.results.report import Effect
from gpubench.model.terms.verdict import FIGURES, Finding, Verdict, exit_code


class Relation(StrEnum):
    """Location of a path's two ends relative to each other."""

    ONE_GPU = "one GPU"
    ONE_NODE = "two GPUs of one node"
    ONE_DOMAIN = "two nodes of one NVLink domain"
    TWO_NODES = "two nodes"


class Medium(StrEnum):
    """The transport of a host-staged path. HOST_MEMORY stands for copies by CUDA, and for paths that sent nothing
    yet.
    """

    HOST_MEMORY = "host memory"
    SHM = "SHM"
    SOCKET = "NET/Socket"
    RDMA = "NET/IB or a plugin, without GDRDMA"


class PathKind(NamedTuple):
    """A class of host-staged paths, by the location of their ends and by transport."""

    relation: Relation
    medium: Medium


class Slowed(StrEnum):
    """The part of an operation's time that a cause increases."""

    LAUNCHES = "kernel launches and small messages"
    NVLINK = "NVLink traffic"
    PCIE = "PCIe traffic"
    NETWORK = "traffic between nodes"


BYTES = (Slowed.NVLINK, Slowed.PCIE, Slowed.NETWORK)


class Explains(Struct, frozen=True):
    """The host-staged paths and slow operations that a cause can explain.

    `effects` lists the same in words. Of these, SLOW, WRONG and APPLICATION do not refer to host-staged paths. If
    `slows` is empty, the cause can slow down any part of an operation.
    """

    effects: tuple[Effect, ...] = ()
    paths: frozenset[PathKind] = frozenset()
    slows: tuple[Slowed, ...] = ()

    def slowing(self, *parts: Slowed) -> "Explains":
        """Return the same explanation for a cause that also slows direct paths down."""
        return replace(self, effects=(*self.effects, Effect.SLOW), slows=parts)

    def __or__(self, other: "Explains") -> "Explains":
        return replace(self, effects=(*self.effects, *other.effects), paths=self.paths | other.paths)


def _paths(relations: Iterable[Relation], *media: Medium) -> frozenset[PathKind]:
    return frozenset(PathKind(relation, medium) for relation in relations for medium in media)


_INSIDE = (Relation.ONE_GPU, Relation.ONE_NODE)
_OUTSIDE = (Relation.ONE_DOMAIN, Relation.TWO_NODES)
_NETWORKS = (Medium.SOCKET, Medium.RDMA)

_POLICY = Explains((Effect.STAGED,), _paths([Relation.ONE_NODE], Medium.HOST_MEMORY, Medium.SHM))
"""No peer access between two GPUs, by design. NCCL then uses shared memory, never a network."""
_NO_PEERS = replace(_POLICY, paths=_POLICY.paths | _paths([Relation.ONE_NODE], Medium.RDMA))
"""No peer access between two GPUs, for any other reason.

NCCL then uses shared memory. It prefers RDMA if NICs behind the GPUs' PCIe switches are faster (ncclTopoCheckNet in
src/graph/paths.cc). It uses sockets only if there is no shared memory.
"""
_NO_IPC = replace(_NO_PEERS, paths=_NO_PEERS.paths | _paths([Relation.ONE_GPU], Medium.HOST_MEMORY, Medium.SHM))
"""Processes cannot open each other's GPU memory, even if they use the same GPU. NVLink and PCIe do not matter."""
_NO_SHM = Explains((Effect.NETWORK_INSIDE,), _paths(_INSIDE, *_NETWORKS))  # NCCL can use only the network
_SPLIT = Explains(
    (Effect.NETWORK_INSIDE, Effect.STAGED), _NO_SHM.paths | _paths([Relation.ONE_NODE], Medium.HOST_MEMORY)
)
"""NCCL treats ranks of one node as ranks of several, so it uses neither peer access nor shared memory."""
_SOCKETS = Explains((Effect.SOCKETS,), _paths(_OUTSIDE, Medium.SOCKET))
_NO_GPUDIRECT = Explains((Effect.NO_GPUDIRECT,), _paths(_OUTSIDE, Medium.HOST_MEMORY, Medium.RDMA))
_NETWORK = _SOCKETS | _NO_GPUDIRECT
_NO_MNNVL = replace(_NETWORK, paths=_paths([Relation.ONE_DOMAIN], *_NETWORKS)).slowing(Slowed.NETWORK)
NOTHING = Explains()
_SLOW = NOTHING.slowing()
_WRONG, _APPLICATION = Explains((Effect.WRONG,)), Explains((Effect.APPLICATION,))
_OVER_PCIE = (Slowed.PCIE, Slowed.NETWORK)

_ROWS: tuple[tuple[Explains, str], ...] = (
    (_POLICY, "wsl gpu-without-pcie-p2p nvlink-mesh nccl-default-level"),
    (_NO_PEERS, "p2p-registry-key p2p-virtual-machine p2p-chipset p2p-across-sockets"),
    (_NO_PEERS, "mixed-gpu-models bar1-small cuda-nvml-disagree staged-despite-grant peer-access-refused"),
    (_NO_PEERS, "fabric-manager-stopped fabric-manager-version fabric-not-ready fabric-differs"),
    (_NO_PEERS, "nccl-p2p-disabled confidential-computing gpus-not-visible device-file-denied"),
    (_NO_PEERS.slowing(Slowed.NVLINK), "nvlink-disabled nvlinks-all-down nvlink-down"),
    (_NO_IPC, "mig-on cuda-ipc-refused"),
    (_NO_SHM, "nccl-shm-disabled shm-too-small nccl-net-in-node"),
    (_SPLIT, "nccl-hostid shm-not-shared"),
    (_SOCKETS, "memlock-limited nccl-ib-disabled nccl-ib-hca libibverbs-missing verbs-provider-missing"),
    (_SOCKETS, "infiniband-files-missing efa-plugin-missing sockets-despite-rdma"),
    (_NETWORK, "no-rdma-nic"),
    (_SOCKETS.slowing(Slowed.NETWORK), "rdma-port-down"),
    (_NO_GPUDIRECT, "nccl-gdr-disabled gpudirect-module-missing"),
    (_NO_GPUDIRECT, "peermem-not-registered gb10-no-gpudirect gpudirect-too-far"),
    (_NO_GPUDIRECT, "gpudirect-one-side gpudirect-refused"),
    (_NO_GPUDIRECT.slowing(Slowed.NETWORK), "vm-flat-topology"),
    (_SLOW | _NO_GPUDIRECT, "topology-file-wrong"),
    (_NO_MNNVL, "imex-service-stopped imex-channel-missing nccl-mnnvl-disabled"),
    (replace(_NO_MNNVL, paths=_paths([Relation.TWO_NODES], *_NETWORKS)), "mnnvl-clique-differs"),
    (_SLOW, "gpu-hw-slowdown gpu-throttled clocks-capped clocks-held-down power-limited row-remap-failed"),
    (_SLOW, "row-remap-pending gpu-hot gpu-in-use memory-in-use host-bound"),
    (_SLOW, "foreign-nvlink-traffic foreign-pcie-traffic nccl-algorithm-forced nccl-plugin"),
    (NOTHING.slowing(Slowed.LAUNCHES), "cuda-launch-blocking cuda-max-connections"),
    (NOTHING.slowing(Slowed.LAUNCHES), "cores-shared cpu-quota cpu-oversubscribed"),
    (NOTHING.slowing(Slowed.LAUNCHES, Slowed.PCIE), "numa-far"),
    (NOTHING.slowing(*BYTES), "nccl-few-channels nccl-p2p-memcpy nccl-small-buffers nccl-few-threads"),
    (NOTHING.slowing(Slowed.NVLINK), "nvlink-bandwidth-limited fabric-unhealthy nvlink-errors nccl-nvls-off"),
    (
        NOTHING.slowing(Slowed.NETWORK),
        "rdma-port-unused nic-below-card rdma-port-slow nic-absent rdma-port-errors rdma-file-denied",
    ),
    (NOTHING.slowing(Slowed.NETWORK), "roce-mtu-small nics-differ mnnvl-no-domain mnnvl-unused"),
    (NOTHING.slowing(Slowed.NETWORK), "nccl-ib-hca-half-port"),
    (NOTHING.slowing(Slowed.NETWORK) | _WRONG, "roce-gid-index"),
    (NOTHING.slowing(*_OVER_PCIE), "acs-nic-redirect pcie-width pcie-uplink pcie-generation pcie-errors"),
    (NOTHING.slowing(*_OVER_PCIE), "posted-write-collapse staging-shares-uplink"),
    (NOTHING.slowing(*_OVER_PCIE) | _WRONG, "acs-redirect iommu-translating"),
    (_WRONG, "peer-access-corrupts"),
    (_APPLICATION, "namespaces-differ ptrace-blocked visible-devices-differ mpi-cuda-off ucx-tls"),
    (_APPLICATION, "ucx-without-cuda mpi-not-cuda-aware peer-access-not-enabled"),
    (_APPLICATION, "kv-no-peer-access kv-memory-expandable kv-memory-pool kv-memory-managed kv-pid-namespaces"),
    (_APPLICATION, "kv-get-without-nvlink kv-no-rdma-device kv-no-gpudirect kv-staged-unexplained"),
    (_SLOW, "kv-nic-inside-node"),
)

EXPLAINS: Mapping[str, Explains] = {id_: row for row, ids in _ROWS for id_ in ids.split()}
"""What each condition can explain, by condition id.

A condition without an entry explains no path or slow operation. It only belongs to a check, or it ends jobs.
"""

FAIL, WARN, ERROR, SKIP = Verdict.FAIL, Verdict.WARN, Verdict.ERROR, Verdict.SKIP


class Grade(Struct, frozen=True):
    """The severity of a condition and the reason or source for it.

    `degrees` lists the cases with another severity. `own_fault` is False if the job, not the node, is at fault, or if a
    measurement failed.
    """

    severity: Verdict
    source: str
    degrees: str = ""
    own_fault: bool = True

    @property
    def drains(self) -> bool:
        """True if a gate takes a node with this condition out of service."""
        return self.own_fault and exit_code(self.severity) != 0


_NOT_READ = Grade(ERROR, "a health check that passes without a measurement certifies broken nodes", own_fault=False)
_DRIVER_IS_DOWN = Grade(ERROR, "a job that gets these GPUs fails or hangs")
_NO_JOB = Grade(FAIL, "NCCL stops the job", own_fault=False)
_JOB_HANGS = Grade(FAIL, "the job hangs", own_fault=False)
_ON_THE_WAY = Grade(WARN, "some NCCL releases continue after it, and others stop")
_NO_MANAGER = Grade(
    FAIL, "CUDA error 802, and no peer access over NVLink", "WARN if the fabric is up, because the next reset fails"
)
_COUNTED = Grade(WARN, "a total does not show when the errors occurred", "FAIL if it grows during the run")
_NO_CUDA_IPC = Grade(
    FAIL,
    "the KV cache takes 150 to 900 times longer than over NVLink",
    "WARN if the path is a NIC",
    own_fault=False,
)
_OF_A_BOARD = "SKIP if no sibling has more (the board's limit), WARN if only a slot or one card has less"
_FIGURE = "WARN between 90 % and 75 % of the expected value"

SEVERITIES: Mapping[str, Grade] = {
    "driver-silent": _DRIVER_IS_DOWN,
    "driver-missing": _DRIVER_IS_DOWN,
    "probe-failed": _NOT_READ,
    "not-measured": _NOT_READ,
    "above-limit": Grade(
        ERROR, "no link exceeds its limit, so the facts or the measurement are wrong", own_fault=False
    ),
    "topology-text-cut": Grade(
        WARN, "paths are the same in both directions, so the other rows have the missing values"
    ),
    "cuda-refuses": Grade(FAIL, "CUDA error 802: no program that uses the GPUs starts"),
    "gpu-lost": Grade(FAIL, "NVIDIA's Xid catalogue: Xid 79 needs a reset; AzNHC fails check_gpu_count"),
    "gpu-missing": Grade(FAIL, "AzNHC fails check_gpu_count", "ERROR if a node has no GPU and other nodes have some"),
    "gpu-model": Grade(WARN, "a mixed node may be intended", "FAIL if a requested profile or number differs"),
    "mnnvl-unused": Grade(
        FAIL, "racks reach 834 to 847 GB/s, but 184 to 200 over their NICs (coreweave/nccl-tests#43)", own_fault=False
    ),
    "mnnvl-no-domain": Grade(WARN, "a rack may be used as single trays"),
    "gpu-differs": Grade(
        FAIL,
        "GPUs of one model have the same parts, and the slowest GPU slows the job down",
        "WARN for another model or compute capability",
    ),
    "profile-unknown": Grade(SKIP, "less is known about the machine, but nothing is wrong with it"),
    "below-profile": Grade(
        FAIL,
        "DCGM_FR_NVLINK_DOWN (triage), DCGM_FR_PCIE_WIDTH (configuration)",
        "SKIP for a slot with less, which is the board's limit",
    ),
    "gpu-hw-slowdown": Grade(FAIL, "NVML: a hardware slowdown divides clocks by 2 or more"),
    "gpu-throttled": Grade(WARN, "DCGM_FR_CLOCKS_EVENT_THERMAL (monitor); AzNHC logs it and continues"),
    "clocks-capped": Grade(WARN, "DCGM_FR_CLOCKS_EVENT_POWER (monitor); AzNHC logs it and continues"),
    "clocks-held-down": Grade(WARN, "a setting is not a fault; AzNHC logs it and continues"),
    "power-limited": Grade(WARN, "DCGM_FR_ENFORCED_POWER_LIMIT (configuration)"),
    "gpu-hot": Grade(WARN, "DCGM_FR_TEMP_VIOLATION (monitor)"),
    "row-remap-failed": Grade(FAIL, "DCGM_FR_ROW_REMAP_FAILURE (isolate); AzNHC fails check_gpu_ecc"),
    "row-remap-pending": Grade(FAIL, "DCGM_FR_PENDING_ROW_REMAP (drain and reset); AzNHC fails check_gpu_ecc"),
    "memory-errors": Grade(FAIL, "DCGM_FR_VOLATILE_DBE_DETECTED (isolate); AzNHC fails check_gpu_ecc"),
    "ecc-off": Grade(WARN, "DCGM_FR_ECC_DISABLED (configuration); a setting is not a fault"),
    "gpu-in-use": Grade(WARN, "another program is not a fault of the node, and measurements count as contended"),
    "memory-in-use": Grade(WARN, "another program is not a fault of the node, and measurements count as contended"),
    "mig-on": Grade(WARN, "a setting is not a fault", "SKIP unless a profile was requested"),
    "nvlinks-all-down": Grade(FAIL, "DCGM_FR_NVLINK_DOWN (triage); AzNHC fails check_nvlink_status"),
    "nvlink-down": Grade(
        FAIL,
        "DCGM_FR_NVLINK_DOWN (triage); AzNHC fails check_nvlink_status",
        "WARN if the machine may have been built without that bridge",
    ),
    "nvlink-errors": _COUNTED,
    "nvlink-bandwidth-limited": Grade(WARN, "a setting is not a fault"),
    "nvlink-doubtful": Grade(WARN, "one of the sources is wrong, and measurements show which one"),
    "fabric-manager-stopped": _NO_MANAGER,
    "fabric-manager-version": _NO_MANAGER,
    "fabric-differs": Grade(FAIL, "GPUs of one board in two NVLink domains have no peer access over NVLink"),
    "fabric-not-ready": Grade(FAIL, "CUDA error 802, and the driver refuses peer access over NVLink"),
    "fabric-unhealthy": Grade(
        FAIL, "DCGM_FR_NVSWITCH_NVLINK_DOWN (isolate)", "WARN if only the profile has more NVSwitches"
    ),
    "cuda-nvml-disagree": Grade(
        FAIL, "CUDA refuses the peer access that NVML grants, so copies go through host memory"
    ),
    "peer-access-refused": Grade(
        FAIL,
        "copies use host memory instead of NVLink, or instead of the peer access that other GPUs of this model have",
        "WARN for CNS, NS, TNS and DR without NVLinks (slots or a hypervisor may not allow it), SKIP if by design",
    ),
    "pcie-width": Grade(FAIL, "DCGM_FR_PCIE_WIDTH (configuration)", _OF_A_BOARD),
    "pcie-uplink": Grade(
        FAIL, "DCGM_FR_PCIE_WIDTH (configuration) for the switch above", f"WARN for the generation; {_OF_A_BOARD}"
    ),
    "pcie-generation": Grade(WARN, "DCGM_FR_PCIE_GENERATION (triage)", _OF_A_BOARD),
    "pcie-errors": _COUNTED,
    "rdma-port-down": Grade(FAIL, "AzNHC fails check_hw_ib; NHC fails a port that is not ACTIVE"),
    "rdma-port-unused": Grade(SKIP, "a second port without a cable is normal, and the GPUs have enough other ports"),
    "rdma-port-slow": Grade(FAIL, "AzNHC fails check_hw_ib if state or rate differ"),
    "nic-absent": Grade(FAIL, "AzNHC fails check_hw_ib for a missing device"),
    "nics-missing": Grade(
        WARN,
        "AzNHC fails check_hw_ib for a missing device, but some nodes have none by design",
        "SKIP for a single node, which needs no network",
    ),
    "nics-differ": Grade(
        FAIL,
        "AzNHC fails check_hw_ib for a missing device",
        "WARN for a port that differs from its siblings, or for fewer NICs than in the profile",
    ),
    "nic-below-card": Grade(WARN, "a card on a slower switch is not a fault of the node"),
    "network-down": Grade(
        WARN,
        "it is unknown whether the node needs a network",
        "FAIL if the network of other nodes of the job is up, SKIP for a single node",
    ),
    "nic-below-profile": Grade(FAIL, "AzNHC fails check_hw_ib against the machine type's configuration"),
    "rdma-port-errors": _COUNTED,
    "peermem-not-registered": Grade(WARN, "jobs run, but RDMA uses host memory"),
    "rdma-file-denied": Grade(WARN, "jobs use the other devices"),
    "gpudirect-module-missing": Grade(WARN, "jobs run, but RDMA uses host memory"),
    "gpudirect-one-side": Grade(WARN, "jobs run, but RDMA uses host memory"),
    "vm-flat-topology": Grade(WARN, "jobs run, but NCCL may choose a distant NIC"),
    "acs-redirect": Grade(WARN, "peer copies run more slowly, and speed and data are judged separately"),
    "acs-nic-redirect": Grade(WARN, "peer copies run more slowly, and speed and data are judged separately"),
    "iommu-translating": Grade(WARN, "peer copies run more slowly, and speed and data are judged separately"),
    "node-differs": Grade(WARN, "a difference alone is not a fault"),
    "settings-differ": Grade(WARN, "the job's environment is at fault, not the node"),
    "library-differs": Grade(WARN, "the job's environment is at fault, not the node"),
    "driver-differs": Grade(FAIL, "DCGM_FR_DENYLISTED_DRIVER (configuration); the node missed an update"),
    "shm-not-shared": Grade(FAIL, "NCCL uses the network between ranks of one host", own_fault=False),
    "p2p-slow": Grade(FAIL, "DCGM_FR_LOW_BANDWIDTH (triage)", _FIGURE),
    "p2p-asymmetric": Grade(FAIL, "DCGM_FR_LOW_BANDWIDTH (triage)", _FIGURE),
    "host-copies-slow": Grade(FAIL, "DCGM_FR_LOW_BANDWIDTH (triage)", _FIGURE),
    "host-memory-slow": Grade(
        FAIL, "the node reaches half the bandwidth of nodes with the same CPU", "WARN between 75 % and 50 %"
    ),
    "slow-unexplained": Grade(FAIL, "AzNHC fails check_nccl_allreduce", "WARN closer to the expected value"),
    "wrong-data": Grade(FAIL, "DCGM_FR_BROKEN_P2P_MEMORY_DEVICE (isolate)"),
    "straggler": Grade(WARN, "a busy host may be the reason for one late rank"),
    "slow-range": Grade(WARN, "the other sizes are as fast as they should be"),
    "figures-too-noisy": Grade(Verdict.INCONCLUSIVE, "noise does not show whether a machine is healthy"),
    "kv-memory-expandable": _NO_CUDA_IPC,
    "kv-memory-pool": _NO_CUDA_IPC,
    "kv-memory-managed": _NO_CUDA_IPC,
    "kv-pid-namespaces": _NO_CUDA_IPC,
    "kv-get-without-nvlink": _NO_CUDA_IPC,
    "kv-staged-unexplained": _NO_CUDA_IPC,
    "kv-transfer-failed": Grade(FAIL, "the KV cache did not arrive", own_fault=False),
    "kv-mnnvl-refused": Grade(WARN, "UCX continues without it", own_fault=False),
    "kv-no-peer-access": Grade(WARN, "the hardware may not allow it, which gpubench p2p shows", own_fault=False),
    "kv-no-rdma-device": Grade(WARN, "the node may have no RDMA NIC", own_fault=False),
    "kv-no-gpudirect": Grade(FAIL, "RDMA through host memory is slower than the NIC and PCIe allow", own_fault=False),
    "kv-nic-inside-node": Grade(WARN, "the path is direct", own_fault=False),
    "nccl-diag-failed": Grade(FAIL, "DCGM_FR_NVLINK_DOWN (triage), DCGM_FR_VOLATILE_DBE_DETECTED (isolate)"),
    "nccl-diag-doubt": Grade(WARN, "NCCL reports it and continues"),
    "gpu-xid": Grade(FAIL, "NVIDIA's Xid catalogue: reset, or replace"),
    "gpu-xid-doubt": Grade(WARN, "NVIDIA's Xid catalogue: the program may be at fault"),
    "pcie-fatal-error": Grade(FAIL, "AER: fatal; the link was reset"),
    "pcie-error-doubt": Grade(WARN, "AER: corrected, or not fatal"),
    "network-link-down": _ON_THE_WAY,
    "nvlink-uncorrectable": Grade(FAIL, "DCGM_FR_NVLINK_ERROR_CRITICAL (isolate)"),
    "ecc-uncorrectable": Grade(FAIL, "DCGM_FR_CUDA_DBE (isolate)"),
    "program-exception": _ON_THE_WAY,
    "nccl-tests-apart": Grade(WARN, "parallel runs may be intended"),
    "nccl-tests-unfinished": Grade(WARN, "the text may end before the run did"),
    "nccl-warning": _ON_THE_WAY,
    "rank-calls-other": _JOB_HANGS,
    "rank-is-gone": replace(_JOB_HANGS, degrees="WARN if the job may be about to end"),
    "rank-did-not-join": replace(
        _JOB_HANGS, degrees="WARN for a single RAS answer, because the rank may join a moment later"
    ),
    "collective-stuck": replace(_JOB_HANGS, degrees="WARN for RAS alone, because jobs that compute look the same"),
    "rank-waits-elsewhere": _JOB_HANGS,
    "rank-is-slow": Grade(WARN, "the job makes progress"),
    "nic-failed-over": Grade(WARN, "the job continues with fewer NICs (nccl#2157)"),
    "gin-not-enabled": Grade(WARN, "collectives do not need GIN, but a program that requests it may end"),
    "nccl-nics-differ": Grade(WARN, "some jobs run despite it, and others hang (nccl#2428)"),
    "rdma-nic-not-opened": Grade(WARN, "jobs use the other devices, or sockets"),
    "nccl-init-unfinished": replace(_JOB_HANGS, degrees="WARN if the log may be truncated"),
    "nccl-tests-wrong-data": Grade(FAIL, "DCGM_FR_BROKEN_P2P_MEMORY_DEVICE (isolate)"),
    **dict.fromkeys(
        (
            *("rdma-registration-failed", "network-plugin-failed", "rdma-connect-failed", "rdma-retry-exceeded"),
            *("rdma-completion-error", "collective-timed-out", "remote-process-exited", "nccl-call-failed"),
            *("program-failed", "nccl-version-mismatch", "nccl-duplicate-gpu", "cuda-device-missing"),
            *("nccl-no-socket-interface", "nccl-connect-failed", "nccl-no-transport", "cuda-out-of-memory"),
            *("nvls-slots-used-up", "nvls-setup-failed", "nccl-cuda-call-failed", "nccl-invalid-usage"),
        ),
        _NO_JOB,
    ),
}
"""Severity by condition id.

Words in brackets after a DCGM error are DCGM's own severities (dcgm_errors.c): monitor (can work), triage,
configuration, reset (drain and reset) and isolate (cannot work).

A condition without an entry is only a cause. It is a FAIL if it prevents a direct path, and a WARN if it makes a path
slower. `degrees` lists every other severity that the detector can return.
"""


def drains(finding: Finding) -> bool:
    """True if a gate takes the finding's node out of service, because its hardware, driver or fabric is at fault.

    A node without GPUs, among nodes with GPUs, is an ERROR but stays in service.
    """
    grade = SEVERITIES.get(finding.id)
    if grade is None:
        return finding.severity is FAIL and finding.id in FIGURES
    return grade.own_fault and (finding.severity is FAIL or (finding.severity is ERROR and grade.severity is ERROR))
