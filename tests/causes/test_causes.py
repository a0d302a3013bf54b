"""What a log says of a staged pair, and the cause that follows: by design only where something shows it."""

import pytest

from gpubench.causes import CAUSES
from gpubench.causes.cause import Staged, Teller, explain
from gpubench.causes.path_types import is_within, level
from gpubench.model.nccl_log import Note, RemarkKind

Kind = RemarkKind


def told(*notes: Note, **settings: str) -> Teller:
    return Teller(tuple(settings.items()), notes)


def note(kind: RemarkKind, *about: str) -> Note:
    return Note(kind, about, f"{kind} {' '.join(about)}")


def inside(
    *notes: Note,
    path: str | None = None,
    gpus: int = 8,
    teller: Teller | None = None,
    network: str | None = None,
    one_node: bool = True,
) -> Staged:
    teller = teller or Teller()
    return Staged(
        one_node=one_node,
        same_host=True,
        network=network,
        path=path,
        gpus=gpus,
        notes=notes,
        source=teller,
        destination=teller,
    )


def across(
    teller: Teller, other: Teller | None = None, *notes: Note, network: str = "Socket", rdma: bool = False
) -> Staged:
    return Staged(
        one_node=False,
        same_host=False,
        network=network,
        notes=notes,
        source=teller,
        destination=other or teller,
        rdma=rdma,
    )


NOTHING = Teller()
NO_RDMA = told(note(Kind.NO_RDMA_DEVICE))
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
        (inside(teller=POLICY), "unknown"),
        (inside(path="NVL"), "unknown"),
        (inside(path="PIX"), "unknown"),
        (inside(path="XYZ"), "by-design"),
        (inside(path="PHB"), "by-design"),
        (inside(path="SYS"), "by-design"),
        (inside(path="SYS", gpus=2, teller=INTEL), "by-design"),
        (inside(path="SYS", gpus=2, teller=AMD), "unknown"),
        (inside(path="SYS", gpus=4, teller=AMD), "by-design"),
        (inside(path="PHB", teller=told(NCCL_P2P_LEVEL="SYS")), "unknown"),
        (inside(path="SYS", teller=told(NCCL_P2P_LEVEL="PHB")), "by-design"),
        (inside(path="SYS", teller=told(NCCL_P2P_LEVEL="4")), "unknown"),
        (inside(path="SYS", teller=told(NCCL_P2P_LEVEL="nonsense")), "by-design"),
        (inside(teller=told(NCCL_P2P_DISABLE="1")), "environment"),
        (inside(teller=told(NCCL_P2P_DISABLE="0")), "unknown"),
        (inside(path="NVL", teller=told(NCCL_P2P_DISABLE="1")), "environment"),
        (inside(path="SYS", teller=told(NCCL_P2P_DISABLE="1")), "by-design"),
        (inside(teller=told(NCCL_P2P_LEVEL="NVL")), "environment"),
        (inside(path="PIX", teller=told(NCCL_P2P_LEVEL="NVL")), "environment"),
        (inside(path="NVL", teller=told(NCCL_P2P_LEVEL="NVL")), "unknown"),
        (inside(teller=told(NCCL_P2P_LEVEL="PXB")), "unknown"),
        (inside(teller=told(NCCL_P2P_LEVEL="0")), "environment"),
        (inside(teller=told(NCCL_P2P_LEVEL="1")), "environment"),
        (inside(teller=told(NCCL_P2P_LEVEL="2")), "unknown"),
        (inside(REFUSED), "by-design"),
        (inside(REFUSED, path="NVL"), "refused"),
        (inside(REFUSED, teller=told(note(Kind.MULTICAST, "", "0"))), "refused"),
        (inside(REFUSED, teller=told(note(Kind.MULTICAST, "not ", "0"))), "by-design"),
        (inside(note(Kind.NVLINK_REFUSED, "0", "1")), "refused"),
        (inside(note(Kind.PEER_ACCESS_REFUSED, "a", "b")), "refused"),
        (inside(teller=told(note(Kind.LEGACY_IPC_REFUSED))), "refused"),
        (inside(teller=told(note(Kind.CONFIDENTIAL))), "refused"),
        (inside(teller=NO_CUDA), "refused"),
        (inside(network="Socket"), "shm-not-shared"),
        (inside(network="IB", path="SYS"), "shm-not-shared"),
        (inside(network="Socket", teller=told(NCCL_SHM_DISABLE="1")), "environment"),
        (inside(network="Socket", teller=told(NCCL_HOSTID="a"), one_node=False), "environment"),
        (inside(network="Socket", teller=NO_RDMA, one_node=False), "by-design"),
        (across(NOTHING), "unknown"),
        (across(NO_RDMA), "by-design"),
        (across(NO_RDMA, NOTHING), "unknown"),
        (across(NO_RDMA, RDMA, rdma=True), "sockets"),
        (across(NO_RDMA, rdma=True), "sockets"),
        (across(RDMA, rdma=True), "sockets"),
        (across(told(note(Kind.NO_RDMA_DEVICE), note(Kind.NO_VERBS_LIBRARY))), "sockets"),
        (across(told(note(Kind.NO_RDMA_DEVICE), NCCL_IB_DISABLE="1")), "environment"),
        (across(told(note(Kind.RDMA_DEVICES), NCCL_NET="Socket")), "environment"),
        (across(told(note(Kind.NO_RDMA_DEVICE), NCCL_IB_HCA="mlx9")), "environment"),
        (across(told(note(Kind.RDMA_DEVICES), NCCL_IB_HCA="mlx9"), rdma=True), "sockets"),
        (across(told(note(Kind.MNNVL_BROKEN)), network="IB"), "mnnvl"),
        (across(RDMA, network="IB", rdma=True), "unknown"),
        (across(told(note(Kind.GDR_DISABLED, "0", "mlx5_0")), network="IB"), "gpudirect"),
        (across(NOTHING, NOTHING, FAR, network="IB"), "by-design"),
        (across(NOTHING, NOTHING, FAR, NEAR, network="IB"), "unknown"),
        (across(told(note(Kind.GDR_DISABLED, "0", "mlx5_0")), None, FAR, network="IB"), "gpudirect"),
        (across(told(NCCL_NET_GDR_LEVEL="LOC"), network="IB"), "environment"),
        (across(told(NCCL_NET_GDR_LEVEL="SYS"), network="IB"), "unknown"),
        (across(told(NCCL_NET_GDR_READ="0"), network="IB"), "environment"),
        (across(told(NCCL_NET_GDR_READ="1"), network="IB"), "unknown"),
        (across(told(NCCL_P2P_DISABLE="1"), network="IB"), "unknown"),
    ],
)
def test_the_first_cause(staged: Staged, cause: str) -> None:
    found = explain(CAUSES, staged)
    assert found.id == cause
    assert found.evidence
    assert found.advice


def test_what_was_seen_and_what_to_do_are_named() -> None:
    found = explain(CAUSES, inside(teller=told(NCCL_P2P_DISABLE="1", NCCL_P2P_LEVEL="LOC")))
    assert found.evidence == "NCCL_P2P_DISABLE=1, NCCL_P2P_LEVEL=LOC set by the environment"
    assert found.advice.startswith("unset NCCL_P2P_DISABLE NCCL_P2P_LEVEL;")
    assert "isAllCudaP2p 1" in explain(CAUSES, inside(teller=POLICY)).evidence
    assert "NCCL_DEBUG_SUBSYS" in explain(CAUSES, inside()).advice


def test_the_last_cause_always_applies() -> None:
    assert CAUSES[-1].find(inside()) is not None
    assert CAUSES[-1].find(across(NOTHING)) is not None


def test_ids_and_summaries() -> None:
    assert len({cause.id for cause in CAUSES}) == len(CAUSES)
    assert all(cause.summary for cause in CAUSES)
    assert "shm-not-shared" in {cause.id for cause in CAUSES}


def test_levels() -> None:
    assert [level(word) for word in ("LOC", "nvl", "0", "1", "2", "3", "4", "9", "")] == [
        *("LOC", "NVL", "LOC", "PIX", "PXB", "PHB", "SYS", None, None)
    ]
    assert is_within("PXB")
    assert not is_within("PHB")
    assert is_within("PHB", "SYS")
    assert not is_within("new")
