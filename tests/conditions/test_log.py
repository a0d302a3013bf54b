"""The causes that a log shows for a staged pair; a cause is by design only if the log proves it."""

import pytest
from msgspec.structs import replace

from gpubench.conditions.logged import ProcessLog, Staged
from gpubench.conditions.ranking import explain
from gpubench.conditions.registry import CAUSES
from gpubench.model.paths.nccl_log import Note, RemarkKind

Kind = RemarkKind


def told(*notes: Note, **settings: str) -> ProcessLog:
    return ProcessLog(tuple(settings.items()), notes)


def note(kind: RemarkKind, *about: str) -> Note:
    return Note(kind, about, f"{kind} {' '.join(about)}")


def inside(
    *notes: Note,
    path: str | None = None,
    gpus: int = 8,
    process: ProcessLog | None = None,
    network: str | None = None,
    one_node: bool = True,
) -> Staged:
    process = process or ProcessLog()
    return Staged(
        one_node=one_node,
        same_machine=True,
        network=network,
        path=path,
        gpus=gpus,
        notes=notes,
        source=process,
        destination=process,
    )


def across(
    process: ProcessLog, other: ProcessLog | None = None, *notes: Note, network: str = "Socket", rdma: bool = False
) -> Staged:
    return Staged(
        one_node=False,
        same_machine=False,
        network=network,
        notes=notes,
        source=process,
        destination=other or process,
        rdma=rdma,
    )


NOTHING = ProcessLog()
NO_RDMA = told(note(Kind.NO_RDMA_DEVICE))
SPARK_NICS = told(note(Kind.RDMA_DEVICES, " [0]rocep1s0f1:1/RoCE [1]roceP2p1s0f1:1/RoCE"))
RDMA = told(note(Kind.RDMA_DEVICES))
POLICY = told(note(Kind.P2P_TYPE, "0", "1"))
NO_CUDA = told(note(Kind.P2P_TYPE, "0", "0"))
AMD = told(note(Kind.PROCESSOR, "1/2"))
INTEL = told(note(Kind.PROCESSOR, "1/1"))
REFUSED = note(Kind.DRIVER_REFUSED, "0", "1")
FAR, NEAR = note(Kind.GDR_FAR, "0000:1a:00.0", "0"), note(Kind.GDR_NEAR, "0000:1a:00.0", "1")


@pytest.mark.parametrize(
    ("staged", "cause"),
    [
        (inside(), "unknown"),
        (inside(process=POLICY), "unknown"),
        (inside(path="NVL"), "unknown"),
        (inside(path="PIX"), "unknown"),
        (inside(path="XYZ"), "nccl-default-level"),
        (inside(path="PHB"), "nccl-default-level"),
        (inside(path="SYS"), "nccl-default-level"),
        (inside(path="SYS", gpus=2, process=INTEL), "nccl-default-level"),
        (inside(path="SYS", gpus=2, process=AMD), "unknown"),
        (inside(path="SYS", gpus=4, process=AMD), "nccl-default-level"),
        (inside(path="PHB", process=told(NCCL_P2P_LEVEL="SYS")), "unknown"),
        (inside(path="SYS", process=told(NCCL_P2P_LEVEL="PHB")), "nccl-default-level"),
        (inside(path="SYS", process=told(NCCL_P2P_LEVEL="4")), "unknown"),
        (inside(path="SYS", process=told(NCCL_P2P_LEVEL="nonsense")), "nccl-default-level"),
        (inside(process=told(NCCL_P2P_DISABLE="1")), "nccl-p2p-disabled"),
        (inside(process=told(NCCL_P2P_DISABLE="0")), "unknown"),
        (inside(path="NVL", process=told(NCCL_P2P_DISABLE="1")), "nccl-p2p-disabled"),
        (inside(path="SYS", process=told(NCCL_P2P_DISABLE="1")), "nccl-p2p-disabled"),
        (inside(path="PHB", process=told(NCCL_P2P_LEVEL="NVL")), "nccl-p2p-disabled"),
        (inside(path="PHB", process=told(NCCL_P2P_LEVEL="PXB")), "unknown"),
        (inside(process=told(NCCL_P2P_LEVEL="NVL")), "nccl-p2p-disabled"),
        (inside(path="PIX", process=told(NCCL_P2P_LEVEL="NVL")), "nccl-p2p-disabled"),
        (inside(path="NVL", process=told(NCCL_P2P_LEVEL="NVL")), "unknown"),
        (inside(process=told(NCCL_P2P_LEVEL="PXB")), "unknown"),
        (inside(process=told(NCCL_P2P_LEVEL="0")), "nccl-p2p-disabled"),
        (inside(process=told(NCCL_P2P_LEVEL="1")), "nccl-p2p-disabled"),
        (inside(process=told(NCCL_P2P_LEVEL="2")), "unknown"),
        (inside(REFUSED), "gpu-without-pcie-p2p"),
        (inside(REFUSED, path="NVL"), "peer-access-refused"),
        (inside(REFUSED, process=told(note(Kind.MULTICAST, "", "0"))), "peer-access-refused"),
        (inside(REFUSED, process=told(note(Kind.MULTICAST, "not ", "0"))), "gpu-without-pcie-p2p"),
        (inside(note(Kind.NVLINK_REFUSED, "0", "1")), "fabric-not-ready"),
        (inside(note(Kind.PEER_ACCESS_REFUSED, "a", "b")), "peer-access-refused"),
        (inside(process=told(note(Kind.LEGACY_IPC_REFUSED))), "cuda-ipc-refused"),
        (inside(process=told(note(Kind.CONFIDENTIAL))), "confidential-computing"),
        (inside(process=NO_CUDA), "peer-access-refused"),
        (inside(network="Socket"), "shm-not-shared"),
        (inside(network="IB", path="SYS"), "shm-not-shared"),
        (inside(network="Socket", process=told(NCCL_SHM_DISABLE="1")), "nccl-shm-disabled"),
        (inside(network="Socket", process=told(NCCL_P2P_DISABLE="1")), "shm-not-shared"),
        (inside(network="Socket", process=told(NCCL_HOSTID="a"), one_node=False), "nccl-hostid"),
        (inside(network="Socket", process=told(NCCL_HOSTID="a")), "unknown"),
        (inside(process=told(NCCL_HOSTID="a"), one_node=False), "unknown"),
        (inside(network="Socket", process=NO_RDMA, one_node=False), "shm-not-shared"),
        (across(NOTHING), "unknown"),
        (across(NO_RDMA), "no-rdma-nic"),
        (across(NO_RDMA, NOTHING), "no-rdma-nic"),
        (across(NOTHING, NOTHING), "unknown"),
        (across(NO_RDMA, RDMA, rdma=True), "sockets-despite-rdma"),
        (across(NO_RDMA, rdma=True), "sockets-despite-rdma"),
        (across(RDMA, rdma=True), "sockets-despite-rdma"),
        (across(told(note(Kind.NO_RDMA_DEVICE), note(Kind.NO_VERBS_LIBRARY))), "libibverbs-missing"),
        (across(told(note(Kind.NO_RDMA_DEVICE), NCCL_IB_DISABLE="1")), "nccl-ib-disabled"),
        (across(told(note(Kind.RDMA_DEVICES), NCCL_NET="Socket")), "nccl-ib-disabled"),
        (across(told(note(Kind.NO_RDMA_DEVICE), NCCL_IB_HCA="mlx9")), "nccl-ib-hca"),
        (across(told(note(Kind.RDMA_DEVICES), NCCL_IB_HCA="mlx9"), rdma=True), "sockets-despite-rdma"),
        (across(told(note(Kind.MNNVL_BROKEN)), network="IB"), "imex-service-stopped"),
        (across(RDMA, network="IB", rdma=True), "unknown"),
        (across(told(note(Kind.GDR_DISABLED, "0", "mlx5_0")), network="IB"), "gpudirect-refused"),
        (across(NOTHING, NOTHING, FAR, network="IB"), "gpudirect-too-far"),
        (across(NOTHING, NOTHING, FAR, NEAR, network="IB"), "unknown"),
        (across(told(note(Kind.GDR_DISABLED, "0", "mlx5_0")), None, FAR, network="IB"), "gpudirect-refused"),
        (across(told(NCCL_NET_GDR_LEVEL="LOC"), network="IB"), "nccl-gdr-disabled"),
        (across(told(NCCL_NET_GDR_LEVEL="SYS"), network="IB"), "unknown"),
        (across(told(NCCL_NET_GDR_LEVEL="PIX"), None, FAR, network="IB"), "nccl-gdr-disabled"),
        (across(told(NCCL_NET_GDR_LEVEL="PXB"), None, FAR, network="IB"), "gpudirect-too-far"),
        (inside(path="PHB", process=told(NCCL_TOPO_FILE="/etc/topo.xml")), "nccl-default-level"),
        (across(told(NCCL_NET_GDR_READ="0"), network="IB"), "nccl-gdr-disabled"),
        (across(told(NCCL_NET_GDR_READ="1"), network="IB"), "unknown"),
        (across(told(NCCL_P2P_DISABLE="1"), network="IB"), "unknown"),
        (across(told(note(Kind.GDR_DISTANT)), network="IB"), "gpudirect-too-far"),
        (replace(across(NO_RDMA), interfaces=("hsn0", "lo")), "sockets-despite-rdma"),
        (replace(across(NO_RDMA), interfaces=("ibs85f0",)), "sockets-despite-rdma"),
        (replace(across(NO_RDMA), interfaces=("eth0", "bond0")), "no-rdma-nic"),
        (replace(across(NO_RDMA), plugin=True), "sockets-despite-rdma"),
        (replace(inside(path="PHB"), nvlinks=True), "unknown"),
        (replace(inside(path="PHB"), models=("NVIDIA A100-SXM4-40GB",)), "unknown"),
        (replace(inside(REFUSED), models=("NVIDIA H200",)), "peer-access-refused"),
        (replace(inside(), models=("NVIDIA GeForce RTX 4090",)), "gpu-without-pcie-p2p"),
        (replace(inside(), models=("NVIDIA GeForce RTX 2080 Ti",)), "unknown"),
        (replace(inside(), models=("NVIDIA GeForce RTX 4090", "NVIDIA L40S")), "unknown"),
        (replace(inside(process=NO_CUDA), models=("NVIDIA GeForce RTX 4090",)), "gpu-without-pcie-p2p"),
        (replace(inside(process=POLICY), models=("NVIDIA GeForce RTX 4090",)), "unknown"),
        (replace(inside(), peers_elsewhere=True), "nccl-default-level"),
        (replace(inside(), peers_elsewhere=True, nvlinks=True), "unknown"),
        (replace(across(NOTHING, network="IB"), models=("NVIDIA GB10",)), "gb10-no-gpudirect"),
        (replace(across(NOTHING, network="IB"), bus_ids=("000f:01:00.0",) * 2), "gb10-no-gpudirect"),
        (replace(across(NOTHING, network="IB"), bus_ids=("000f:01:00.0", "0000:01:00.0")), "unknown"),
        (replace(across(SPARK_NICS, network="IB"), one_per_host=True), "gb10-no-gpudirect"),
        (replace(across(SPARK_NICS, network="IB"), one_per_host=False), "unknown"),
        (replace(across(SPARK_NICS, network="IB"), one_per_host=True, models=("NVIDIA A100-PCIE-40GB",)), "unknown"),
        (replace(across(SPARK_NICS, network="IB"), one_per_host=True, bus_ids=("0000:01:00.0",)), "unknown"),
    ],
)
def test_the_first_cause(staged: Staged, cause: str) -> None:
    found = explain(CAUSES, staged)
    if cause == "unknown":
        assert found is None
        return
    assert found is not None
    assert found.id == cause
    assert found.evidence
    assert found.cure
    assert (found.by_design or found.in_doubt) == next(each.by_design for each in CAUSES if each.id == cause)


GEFORCE = ("NVIDIA GeForce RTX 3090",)
VIRTUAL = ("0000:00:05.0", "0000:00:06.0")


@pytest.mark.parametrize(
    ("staged", "is_proven"),
    [
        pytest.param(replace(inside(REFUSED), models=GEFORCE), True, id="GeForce that the driver refuses"),
        pytest.param(inside(REFUSED), False, id="refused, of a model that nobody names"),
        pytest.param(replace(inside(REFUSED), models=("NVIDIA L40S",)), False, id="refused, and no GeForce"),
        pytest.param(
            replace(inside(REFUSED), models=GEFORCE, bus_ids=VIRTUAL), False, id="GeForce in a virtual machine"
        ),
        pytest.param(replace(inside(), models=GEFORCE), True, id="a model that never has any"),
        pytest.param(inside(path="PHB"), True, id="a path beyond the default level"),
        pytest.param(replace(inside(path="PHB"), bus_ids=VIRTUAL), False, id="such a path in a virtual machine"),
        pytest.param(inside(path="SYS", process=told(NCCL_P2P_LEVEL="PHB")), False, id="a level that was raised"),
        pytest.param(inside(path="PHB", process=told(NCCL_IGNORE_DISABLED_P2P="1")), False, id="refusals are not said"),
        pytest.param(inside(path="PHB", process=told(NCCL_TOPO_FILE="/t.xml")), False, id="paths are those of a file"),
        pytest.param(
            replace(inside(REFUSED), models=("NVIDIA GeForce GTX 1080 Ti",)), False, id="a GeForce that had it"
        ),
        pytest.param(replace(inside(), peers_elsewhere=True), False, id="peers elsewhere"),
        pytest.param(across(NO_RDMA), False, id="no RDMA device, as in a container without its files"),
        pytest.param(across(NOTHING, NOTHING, FAR, network="IB"), False, id="a far NIC"),
        pytest.param(replace(across(NOTHING, network="IB"), models=("NVIDIA GB10",)), True, id="GB10"),
    ],
)
def test_by_design_is_what_is_proven(staged: Staged, is_proven: bool) -> None:
    found = explain(CAUSES, staged)
    assert found is not None
    assert (found.by_design, found.in_doubt) == (is_proven, not is_proven)


def test_both_variables_are_named_that_leave_the_network_alone() -> None:
    found = explain(CAUSES, inside(network="Socket", process=told(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")))
    assert found is not None
    assert (found.id, found.evidence) == (
        "nccl-shm-disabled",
        "NCCL_SHM_DISABLE=1, NCCL_P2P_DISABLE=1 are set in the environment",
    )


def test_what_was_seen_and_what_to_do_are_named() -> None:
    found = explain(CAUSES, inside(process=told(NCCL_P2P_DISABLE="1", NCCL_P2P_LEVEL="LOC")))
    assert found is not None
    assert found.evidence == "NCCL_P2P_DISABLE=1, NCCL_P2P_LEVEL=LOC are set in the environment"
    assert found.cure.commands[0] == "gpubench p2p && unset NCCL_P2P_DISABLE NCCL_P2P_LEVEL"
