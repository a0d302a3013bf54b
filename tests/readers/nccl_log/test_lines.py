"""Single lines of NCCL's log, in the spelling of every version."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.model.paths.nccl_log import RemarkKind
from gpubench.model.paths.transport import TransportKind, Tuning
from gpubench.readers.nccl_log.lines import (
    parse_channel,
    parse_communicator,
    parse_connection,
    parse_head,
    parse_tuning,
)
from gpubench.readers.nccl_log.notes import OwnGpu, parse_paths, parse_remark, parse_setting

P2P, SHM, NET, COLLNET = TransportKind.P2P, TransportKind.SHM, TransportKind.NET, TransportKind.COLLNET
UNKNOWN = TransportKind.UNKNOWN


@pytest.mark.parametrize(
    ("via", "name", "kind", "staged"),
    [
        ("P2P/direct pointer", "P2P/direct pointer", P2P, False),
        ("P2P/direct pointer/read", "P2P/direct pointer", P2P, False),
        ("P2P/IPC/read", "P2P/IPC", P2P, False),
        ("P2P/IPC/CE", "P2P/IPC", P2P, False),
        ("P2P/CUMEM", "P2P/CUMEM", P2P, False),
        ("P2P/CUMEM/read/CE", "P2P/CUMEM", P2P, False),
        ("P2P/MNNVL", "P2P/MNNVL", P2P, False),
        ("P2P/indirect/4[4]", "P2P/indirect", P2P, False),
        ("P2P/indirect/4[1a000]/read", "P2P/indirect", P2P, False),
        ("direct shared memory", "SHM/direct", SHM, True),
        ("SHM/direct/direct", "SHM/direct", SHM, True),
        ("SHM/CE/direct", "SHM/direct", SHM, True),
        ("SHM/direct", "SHM/direct", SHM, True),
        ("NET/Socket/0", "NET/Socket/0", NET, True),
        ("NET/IB/0", "NET/IB/0", NET, True),
        ("NET/IB/3/Shared", "NET/IB/3", NET, True),
        ("NET/IB/0/GDRDMA", "NET/IB/0/GDRDMA", NET, False),
        ("NET/IB/2(6)/GDRDMA/Shared", "NET/IB/2/GDRDMA", NET, False),
        ("NET/IBext_v10/0/GDRDMA(PCI)/Shared", "NET/IBext_v10/0/GDRDMA", NET, False),
        ("NET/AWS Libfabric/1/GDRDMA", "NET/AWS Libfabric/1/GDRDMA", NET, False),
        ("NVLS/new", "NVLS/new", UNKNOWN, None),
        ("P2P/QUANTUM", "P2P/QUANTUM", UNKNOWN, None),
    ],
)
def test_transports(via: str, name: str, kind: TransportKind, staged: bool | None) -> None:
    connection = parse_connection(f"0[0] -> 3[3] via {via}".encode())
    assert connection is not None
    assert (connection.src, connection.dst, connection.received) == (0, 3, False)
    transport = connection.transport
    assert (transport.name, transport.kind, transport.host_staged) == (name, kind, staged)


def test_what_a_transport_says_beside_its_name() -> None:
    pxn = parse_connection(b"0[0] -> 9[1] [send] via NET/IB/2(6)/GDRDMA(PCI)/Shared")
    hop = parse_connection(b"0[1a000] -> 9[2f000] via P2P/indirect/4[1b000]/read")
    assert pxn is not None
    assert hop is not None
    assert (pxn.transport.proxy_rank, pxn.transport.network) == (6, "IB")
    assert pxn.transport.modifiers == ("PCI", "Shared")
    assert hop.transport.modifiers == ("4[1b000]", "read")
    assert (hop.device, hop.peer_device) == ("1a000", "2f000")


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"0[0] -> 1[1]", b"0[0] -> 1[1] via ", b"0[0] -> 1[1] via P2", b"0[0] -> 1[1] via P2P/CUM"),
        *(b"0[0] -> 1[1] via NET/IB/0/GDR", b"0[0] -> 1[1] [send] via NET/Soc", b"0[0] -> 1[ via P2P/CUMEM"),
        *(b"0 via P2P/CUMEM", b"0[0] -> 1[1] via COLLNET/SHARP/0", b"99999999[0] -> 1[1] via P2P/CUMEM"),
        *(b"9999999[0] -> 1[1] via P2P/CUMEM", b"0[0] -> 1[1] via P2P/\x00\xff", b"0[0] -> 1[1] via direct sha"),
    ],
)
def test_a_connection_that_is_cut_or_garbled_is_none(text: bytes) -> None:
    assert parse_connection(text) is None


def test_a_line_that_may_be_cut_counts_as_far_as_it_can_mean_nothing_else() -> None:
    whole = parse_connection(b"0[0] -> 1[1] via P2P/CUMEM", cut=True)
    assert whole is not None
    assert whole.transport.name == "P2P/CUMEM"
    # Behind this, '/GDRDMA' may be missing.
    assert parse_connection(b"0[0] -> 1[1] [send] via NET/IB/0", cut=True) is None


@given(st.binary(max_size=80))
def test_any_text_is_a_connection_or_none(text: bytes) -> None:
    parse_connection(text)
    parse_connection(b"0[0] -> 1[1] via " + text)
    parse_communicator(text)
    parse_tuning(text)
    parse_remark(text)
    parse_setting(text)
    parse_paths(text)
    parse_head(text)
    parse_channel(text)


@given(
    st.sampled_from(["P2P/IPC/read/CE", "NET/IB/10(12)/GDRDMA(PCI)/Shared", "SHM/direct/CE", "P2P/MNNVL/CE"]), st.data()
)
def test_no_beginning_of_a_transport_is_taken_for_an_unknown_one(via: str, data: st.DataObject) -> None:
    cut = via[: data.draw(st.integers(0, len(via)))]
    connection = parse_connection(f"0[0] -> 1[1] [send] via {cut}".encode())
    assert connection is None or connection.transport.kind is not UNKNOWN


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (b"Channel 00/0", (0, 0)),
        (b"Channel 03/1", (3, 1)),
        (b"Channel 31", (31, 0)),
        (b"CollNet 01/0", (1, 0)),
        (b"Channel 00/24", None),
        (b"Channel 4096/0", None),
        (b"Channel", None),
    ],
)
def test_channels(text: bytes, place: tuple[int, int] | None) -> None:
    assert parse_channel(text) == place


@pytest.mark.parametrize(
    "head",
    [
        *(b"node-1.cluster:77:78 [3]", b"[1,3]<stdout>:node-1.cluster:77:78 [3]", b"3: node-1.cluster:77:78 [3]"),
        *(b"node-1.cluster: node-1.cluster:77:78 [3]", b"[rank3]:node-1.cluster:77:78 [3]"),
        *(b"[default3]:node-1.cluster:77:78 [3]", b"[2026-11-20 10:00:00] node-1.cluster:77:78 [3]"),
        *(b"2026-11-20T10:00:00.123Z node-1.cluster:77:78 [3]", b'{"log":"node-1.cluster:77:78 [3]'),
        *(b"node-1.cluster:77:78 [3] transport/net.cc:120", b"node-1.cluster:77:78 [3] init.cc:12 (initTransports)"),
        b"node-1.cluster:77:78 [3] recvSetup(), transport/net.cc:263",
        b"\x00\xffgarbage node-1.cluster:77:78 [3]",
    ],
)
def test_who_writes_behind_whatever_a_launcher_puts_first(head: bytes) -> None:
    source = parse_head(head)
    assert source is not None
    assert (source.host, source.pid, source.tid) == ("node-1.cluster", 77, 78)


@pytest.mark.parametrize(
    ("head", "host", "pid", "tid"),
    [
        pytest.param(b"node-1:77 [3]", "node-1", 77, 77, id="no thread"),
        pytest.param(b"<cluster_name>:919:1150 [0]", "cluster_name", 919, 1150, id="placeholder"),
        pytest.param(b"[worker-0]:919:1150 [0]", "worker-0", 919, 1150, id="tag of a pod"),
        pytest.param(b"(RayWorkerWrapper pid=539) vllm-0:539:540 [6]", "vllm-0", 539, 540, id="Ray"),
        pytest.param(b"", "anonymous", 0, -1, id="nothing at all"),
        pytest.param(b"[3]", "anonymous", 0, 3, id="device alone"),
        pytest.param(b"[1] misc/shmutils.cc:103", "anonymous", 0, 1, id="device and place"),
        pytest.param(b"(RayWorkerWrapper pid=539, ip=10.0.0.2) [1]", "anonymous", 0, 1, id="Ray and device"),
    ],
)
def test_what_people_cut_away_from_heads(head: bytes, host: str, pid: int, tid: int) -> None:
    assert parse_head(head) == (host, pid, tid)


@pytest.mark.parametrize("head", [b"node:1", b"node:1:2", b"node:1:2 [x]", b"node:x:2 [0]", b"x [0]", b"a" * 5000])
def test_what_is_no_head(head: bytes) -> None:
    assert parse_head(head) is None


def test_a_communicator_whose_rank_is_beyond_its_size_is_garbled() -> None:
    assert parse_communicator(b"comm 0xfc0 rank 4 nranks 4 cudaDev 0 busId 60 - Init COMPLETE") is None


@pytest.mark.parametrize(
    ("text", "tuning"),
    [
        (
            b"AllReduce: 1024 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={0..15}",
            Tuning("AllReduce", 1024, "RING", "LL128", 16),
        ),
        (b"1024 Bytes -> Algo 1 proto 2 time 12.3", Tuning("", 1024, "RING", "SIMPLE", None)),
        (b"Broadcast: 8 Bytes -> Algo 1 proto 0 time 3.1", Tuning("Broadcast", 8, "RING", "LL", None)),
        (
            b"AllReduce [Symmetric]: 64 Bytes -> Kernel AllReduce_AGxLL_R nchannels 4 nthreads 512",
            Tuning("AllReduce", 64, "SYMMETRIC", "AllReduce_AGxLL_R", 4),
        ),
        (b"AllGather [Copy Engine]: 64 Bytes -> cudaMemcpy", Tuning("AllGather", 64, "COPY_ENGINE", None, None)),
        (b"AllReduce: 1024 Bytes", None),
    ],
)
def test_what_an_operation_runs_with(text: bytes, tuning: Tuning | None) -> None:
    assert parse_tuning(text) == tuning


@pytest.mark.parametrize(
    ("text", "kind", "about"),
    [
        (b"NET/IB : No device found.", RemarkKind.NO_RDMA_DEVICE, ()),
        (
            b"NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>",
            RemarkKind.RDMA_DEVICES,
            (" [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE",),
        ),
        (b"NET/OFI Selected Provider is efa (found 4 nics)", RemarkKind.RDMA_DEVICES, ("efa",)),
        (b"Failed to open libibverbs.so[.1]", RemarkKind.NO_VERBS_LIBRARY, ()),
        (b"NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'", RemarkKind.GDR_DISABLED, ("0", "mlx5_0")),
        (b"NET/IB : GPU Direct RDMA Enabled for HCA 1 'mlx5_1'", RemarkKind.GDR_ENABLED, ("1", "mlx5_1")),
        (b"Check P2P Type isAllDirectP2p 0 directMode 0 isAllCudaP2p 1", RemarkKind.P2P_TYPE, ("0", "1")),
        (b"Check P2P Type isAllDirectP2p 1 directMode 0", RemarkKind.P2P_TYPE, ("1", "")),
        (b"Check P2P Type intraNodeP2pSupport 0 directMode 0 ", RemarkKind.P2P_TYPE, ("0", "")),
        (b"P2P is disabled between connected GPUs 0 and 1. You can repress", RemarkKind.DRIVER_REFUSED, ("0", "1")),
        (b"P2P is disabled between NVLINK connected GPUs 1 and 0.", RemarkKind.NVLINK_REFUSED, ("1", "0")),
        (
            b"Could not enable P2P between dev 0(=1a000) and dev 1(=1b000)",
            RemarkKind.PEER_ACCESS_REFUSED,
            ("0000:1a:00.0", "0000:1b:00.0"),
        ),
        (b"NVLS multicast support is not available on dev 3", RemarkKind.MULTICAST, ("not ", "3")),
        (b"CPU/0-0 (1/2/-1)", RemarkKind.PROCESSOR, ("1/2",)),
        (b"CPU/1 (1/1/3)", RemarkKind.PROCESSOR, ("1/1",)),
        (b"MNNVL (cliqueSize 36) is available but not working on some", RemarkKind.MNNVL_BROKEN, ()),
        (
            b"MNNVL busId 0x901000 fabric UUID 3143b15bc2cd192b.28cc9b5473fb5b93 cliqueId 0x7ffe state 3",
            RemarkKind.FABRIC,
            ("3143b15bc2cd192b.28cc9b5473fb5b93", "7ffe"),
        ),
        (b"No transport found for rank 0[1a000] -> rank 1[1b000]", RemarkKind.NO_TRANSPORT, ("0", "1")),
        (b"CC On, workFifoBytes 1048576", RemarkKind.CONFIDENTIAL, ()),
    ],
)
def test_remarks(text: bytes, kind: RemarkKind, about: tuple[str, ...]) -> None:
    remark = parse_remark(text)
    assert remark is not None
    assert (remark.kind, remark.about) == (kind, about)
    assert remark.text == text.decode().strip()


@pytest.mark.parametrize("gpu", [b"1a000", b"3"])
def test_how_far_the_own_gpu_is_from_a_nic(gpu: bytes) -> None:
    """By bus id up to NCCL 2.23, by rank since then; of other processes' GPUs those say it themselves."""
    far = parse_remark(b"GPU Direct RDMA Disabled for GPU %b / HCA 1f (distance 8 > 5)" % gpu, OwnGpu(3, 0x1A000))
    near = parse_remark(
        b"GPU Direct RDMA Enabled for GPU %b / HCA 0 (distance 4 <= 5), read 0" % gpu, OwnGpu(3, 0x1A000)
    )
    assert far is not None
    assert near is not None
    assert (far.kind, far.about) == (RemarkKind.GDR_FAR, ("0000:1a:00.0", "1f"))
    assert (near.kind, near.about) == (RemarkKind.GDR_NEAR, ("0000:1a:00.0", "0"))
    assert parse_remark(b"GPU Direct RDMA Disabled for GPU 4 / HCA 0 (distance 8 > 5)", OwnGpu(3, 0x1A000)) is None
    assert parse_remark(b"GPU Direct RDMA Disabled for GPU 4 / HCA 0 (distance 8 > 5)") is None
    old = parse_remark(b"GPU Direct RDMA Disabled for GPU 4f000 / HCA 0 (distance 8 > 5)")
    assert old is not None
    assert old.about == ("0000:4f:00.0", "0")


@pytest.mark.parametrize("text", [b"CC Off, workFifoBytes 1", b"", b"GPU/60"])
def test_what_explains_nothing(text: bytes) -> None:
    assert parse_remark(text) is None
