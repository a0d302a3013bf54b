"""The one table of what each cause can explain: on which paths, over which transports, and what it slows down.

`check`, `topo`, `explain` and every measurement name a cause for a path only where this table has the path's kind.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from gpubench.model.results.rows.causes import Effect


class Relation(StrEnum):
    """Where the two ends of a path are."""

    ONE_GPU = "one GPU"
    ONE_NODE = "two GPUs of one node"
    ONE_DOMAIN = "two nodes of one NVLink domain"
    TWO_NODES = "two nodes"


class Medium(StrEnum):
    """What carries the bytes of a path through host memory. HOST_MEMORY: a copy of CUDA's, or nothing was sent yet."""

    HOST_MEMORY = "host memory"
    SHM = "SHM"
    SOCKET = "NET/Socket"
    RDMA = "NET/IB or a plugin, without GDRDMA"


class PathKind(NamedTuple):
    """A path that goes through host memory, as seen from outside."""

    relation: Relation
    medium: Medium


class Slowed(StrEnum):
    """The part of an operation that a cause of a slower path makes longer."""

    LAUNCHES = "launches and small sizes"
    NVLINK = "bytes over NVLink"
    PCIE = "bytes over PCIe"
    NETWORK = "bytes between nodes"


BYTES = (Slowed.NVLINK, Slowed.PCIE, Slowed.NETWORK)


@dataclass(frozen=True, slots=True)
class Explains:
    """What a cause can explain: the kinds of paths through host memory, and the part of slow operations (empty: any).

    `effects` are the same in words; SLOW, WRONG and APPLICATION among them are no path through host memory.
    """

    effects: tuple[Effect, ...] = ()
    paths: frozenset[PathKind] = frozenset()
    slows: tuple[Slowed, ...] = ()

    def slowing(self, *parts: Slowed) -> "Explains":
        """The same of a cause that makes direct paths slow, too."""
        return replace(self, effects=(*self.effects, Effect.SLOW), slows=parts)

    def __or__(self, other: "Explains") -> "Explains":
        return replace(self, effects=(*self.effects, *other.effects), paths=self.paths | other.paths)


def _paths(relations: Iterable[Relation], *media: Medium) -> frozenset[PathKind]:
    return frozenset(PathKind(relation, medium) for relation in relations for medium in media)


_INSIDE = (Relation.ONE_GPU, Relation.ONE_NODE)
_OUTSIDE = (Relation.ONE_DOMAIN, Relation.TWO_NODES)
_NETWORKS = (Medium.SOCKET, Medium.RDMA)

_POLICY = Explains((Effect.STAGED,), _paths([Relation.ONE_NODE], Medium.HOST_MEMORY, Medium.SHM))
"""No peer access between two GPUs, by design: NCCL takes shared memory. No design has it take a network."""
_NO_PEERS = replace(_POLICY, paths=_POLICY.paths | _paths([Relation.ONE_NODE], Medium.RDMA))
"""No peer access between two GPUs: NCCL takes shared memory, or RDMA where NICs behind the GPUs' PCIe switches are
faster (ncclTopoCheckNet in src/graph/paths.cc). Sockets it takes only where there is no shared memory either."""
_NO_IPC = replace(_NO_PEERS, paths=_NO_PEERS.paths | _paths([Relation.ONE_GPU], Medium.HOST_MEMORY, Medium.SHM))
"""Processes cannot open each other's GPU memory, not even that of one GPU. NVLink and PCIe have no part in that."""
_NO_SHM = Explains((Effect.NETWORK_INSIDE,), _paths(_INSIDE, *_NETWORKS))
"""No shared memory: the network where peer access is not used either."""
_SPLIT = Explains(
    (Effect.NETWORK_INSIDE, Effect.STAGED), _NO_SHM.paths | _paths([Relation.ONE_NODE], Medium.HOST_MEMORY)
)
"""NCCL takes ranks of one node for ranks of several: neither peer access nor shared memory."""
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
    (_NO_PEERS, "p2p-of-some-alike p2p-registry-key p2p-virtual-machine p2p-chipset p2p-across-sockets"),
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
    (_NO_GPUDIRECT, "nccl-gdr-disabled nccl-gdr-read nccl-dmabuf-disabled gpudirect-module-missing"),
    (_NO_GPUDIRECT, "peermem-not-registered grdma-override gb10-no-gpudirect gpudirect-too-far"),
    (_NO_GPUDIRECT, "gpudirect-one-side gpudirect-refused nccl-gdr-c2c-disabled"),
    (_NO_GPUDIRECT.slowing(Slowed.NETWORK), "vm-flat-topology"),
    (_SLOW | _NO_GPUDIRECT, "topology-file-wrong"),
    (_NO_MNNVL, "imex-service-stopped imex-channel-missing nccl-mnnvl-disabled nccl-cumem-disabled"),
    (replace(_NO_MNNVL, paths=_paths([Relation.TWO_NODES], *_NETWORKS)), "mnnvl-clique-differs"),
    (_SLOW, "gpu-hw-slowdown gpu-throttled clocks-capped clocks-held-down power-limited row-remap-failed"),
    (_SLOW, "row-remap-pending clock-limited gpu-hot gpu-in-use memory-in-use host-bound"),
    (_SLOW, "foreign-nvlink-traffic foreign-pcie-traffic nccl-algorithm-forced nccl-plugin tool-attached"),
    (NOTHING.slowing(Slowed.LAUNCHES), "nccl-debug-trace cuda-launch-blocking cuda-max-connections"),
    (NOTHING.slowing(Slowed.LAUNCHES), "cores-shared cpu-quota cpu-oversubscribed"),
    (NOTHING.slowing(Slowed.LAUNCHES, Slowed.PCIE), "numa-far"),
    (NOTHING.slowing(*BYTES), "nccl-few-channels nccl-p2p-memcpy nccl-small-buffers nccl-few-threads"),
    (NOTHING.slowing(Slowed.NVLINK), "nvlink-bandwidth-limited fabric-unhealthy nvlink-errors nccl-nvls-off"),
    (NOTHING.slowing(Slowed.NETWORK), "rdma-port-unused nic-below-card rdma-port-slow nic-absent rdma-port-errors"),
    (NOTHING.slowing(Slowed.NETWORK), "roce-mtu-small nics-differ mnnvl-clique-small mnnvl-no-domain mnnvl-unused"),
    (NOTHING.slowing(Slowed.NETWORK), "nccl-ib-hca-half-port"),
    (NOTHING.slowing(Slowed.NETWORK) | _WRONG, "roce-gid-index"),
    (NOTHING.slowing(*_OVER_PCIE), "acs-nic-redirect pcie-width pcie-uplink pcie-generation pcie-errors"),
    (NOTHING.slowing(*_OVER_PCIE), "posted-write-collapse staging-shares-uplink"),
    (NOTHING.slowing(*_OVER_PCIE) | _WRONG, "acs-redirect iommu-translating"),
    (_WRONG, "peer-access-corrupts"),
    (_APPLICATION, "namespaces-differ ptrace-blocked visible-devices-differ mpi-cuda-off ucx-tls"),
    (_APPLICATION, "ucx-without-cuda mpi-not-cuda-aware peer-access-not-enabled"),
)

EXPLAINS: Mapping[str, Explains] = {id_: row for row, ids in _ROWS for id_ in ids.split()}
"""By the id of a condition. A condition without a row explains nothing of paths: it is a check, or ends jobs."""
