"""Logs as people have them: prefixes cut off, lines left out, several communicators a process, other programs' text."""

import pytest

from gpubench.model.paths.nccl_log import Complaint, FailedCall, LogFacts, RemarkKind
from tests.fakes.nccl_logs import Job, between
from tests.readers.nccl_log.test_stream import paths, read

JOB = Job(ranks=2)
BOTH_WAYS = {(0, 1): [("P2P/CUMEM", 2, False)], (1, 0): [("P2P/CUMEM", 2, False)]}


def connections(job: Job, rank: int, head: str | None = None) -> str:
    return "".join(f"{job.head(rank) if head is None else head}{line}\n" for line in job.connections(rank))


@pytest.mark.parametrize(
    "heads",
    [
        pytest.param(["NCCL INFO "] * 2, id="nothing but the level"),
        pytest.param(["[0] NCCL INFO ", "[1] NCCL INFO "], id="devices"),
        pytest.param([":101:101 [0] NCCL INFO ", ":102:102 [1] NCCL INFO "], id="processes without a host"),
        pytest.param(["<host>:101:101 [0] NCCL INFO ", "<host>:102:102 [1] NCCL INFO "], id="a placeholder"),
        pytest.param(["nodeA:101 [0] NCCL INFO ", "nodeA:102 [1] NCCL INFO "], id="no threads"),
        pytest.param([f"(Worker pid={pid}) nodeA:{pid}:{pid} [0] NCCL INFO " for pid in (1, 2)], id="Ray"),
    ],
)
def test_connections_of_writers_whose_names_were_cut_off(heads: list[str]) -> None:
    facts = read("".join(connections(JOB, rank, head) for rank, head in enumerate(heads)))
    (communicator,) = facts.communicators
    assert (communicator.id, paths(communicator)) == (None, BOTH_WAYS)
    assert facts.unreadable == 0


def test_processes_without_init_lines_are_of_the_only_communicator_that_there_is() -> None:
    first, second = JOB.logs()[0], connections(JOB, 1)
    (communicator,) = read(first, second).communicators
    assert (communicator.missing_ranks, paths(communicator)) == ((), BOTH_WAYS)
    large = Job(ranks=8, per_node=8)
    *_, unknown = read(first, connections(large, 5)).communicators
    assert unknown.id is None


def test_what_ray_left_out_is_counted_and_what_it_wrote_is_read() -> None:
    logs = [log.replace("- Init COMPLETE", "- Init COMPLETE [repeated 15x across cluster]") for log in JOB.logs()]
    facts = read(*logs)
    assert facts.left_out == 30
    assert [paths(each) for each in facts.communicators] == [BOTH_WAYS]
    assert facts.communicators[0].unfinished_ranks == ()


def test_rccl_names_the_communicator_behind_the_transport() -> None:
    head = "g1:{0}:{0} [{1}] NCCL INFO Channel 0{2}/0 : {3} via {4} comm {5} nRanks 08\n"
    lines = [
        head.format(10, 0, 0, "0[c1000] -> 1[c6000]", "P2P/IPC", "0x95"),
        head.format(10, 0, 0, "0[c1000] -> 2[c9000]", "P2P/IPC", "0x77"),
        head.format(10, 0, 1, "0[c1000] -> 4[c1000] [send]   ", "NET/Socket/1", "0x95"),
        head.format(11, 1, 0, "1[c6000] -> 0[c1000]", "P2P/direct pointer", "0x99"),
    ]
    facts = read("".join(lines))
    assert [(each.size, paths(each)) for each in facts.communicators] == [
        (
            8,
            {
                (0, 1): [("P2P/IPC", 1, False)],
                (0, 4): [("NET/Socket/1", 1, True)],
                (1, 0): [("P2P/direct pointer", 1, False)],
            },
        ),
        (8, {(0, 2): [("P2P/IPC", 1, False)]}),
    ]
    hidden = head.format(10, 0, 0, "0[c1000] -> 1[c6000]", "P2P/IPC", "0x...")
    assert [paths(each) for each in read(hidden).communicators] == [{(0, 1): [("P2P/IPC", 1, False)]}]


def test_rings_of_nccl_2_4() -> None:
    head = "n1:7:8 [0] NCCL INFO "
    facts = read(
        f"{head}Ring 00 : 3 -> 0 -> 1\n"
        f"{head}Ring 00 : 0[0] -> 1[1] via P2P/IPC\n{head}Ring 01 : 3 -> 0 [receive] via NET/IB/0/GDRDMA\n"
        f"{head}comm 0x7f rank 0 nranks 4 cudaDev 0 nvmlDev 0 - Init COMPLETE\n"
    )
    (communicator,) = facts.communicators
    assert paths(communicator) == {(0, 1): [("P2P/IPC", 1, False)], (3, 0): [("NET/IB/0/GDRDMA", 1, False)]}
    assert facts.unreadable == 0


def started(job: Job, rank: int) -> str:
    return "".join(f"{job.head(rank)}{job.communicator(rank, f'Init {end}')}\n" for end in ("START", "COMPLETE"))


def test_channels_without_which_one_rank_would_be_silent_are_that_ranks() -> None:
    """In rings and trees every rank sends. The lines of rank 1 may be of either communicator, and one lacks it."""
    one, other = JOB, Job(ranks=2, id="0xabc2", handle=0x9000)
    first = "".join(f"{JOB.head(0)}{line}\n" for job in (one, other) for line in job.messages(0))
    tree = f"{JOB.head(1)}Channel 05/0 : 1[1] -> 0[0] via P2P/CUMEM\n"
    second = started(one, 1) + tree + started(other, 1) + connections(one, 1)
    found = {each.id: paths(each) for each in read(first, second).communicators}
    assert set(found) == {"0xabc1", "0xabc2"}
    assert all((1, 0) in pairs for pairs in found.values())


def facts_of(*messages: str, job: Job = JOB) -> LogFacts:
    return read(*job.logs(), *(f"{message}\n" for message in messages))


def test_calls_that_failed_before_the_end_and_complaints_of_programs() -> None:
    head = JOB.head(0)
    facts = facts_of(
        f"{head}transport/shm.cc:551 -> 2",
        f"{head}group.cc:73 -> 2 [Async thread]",
        f"{head}enqueue.cc:9 -> 7",
        f"{head}misc/socket.cc:9 -> 3",
        "nodeA: Test NCCL failure common.cu:958 'unhandled system error'",
        "nodeA: Test NCCL failure common.cu:958 'unhandled system error'",
    )
    assert facts.failed_calls == (
        FailedCall("transport/shm.cc:551", 2, ("nodeA:100",)),
        FailedCall("group.cc:73", 2, ("nodeA:100",)),
    )
    assert facts.complaints == (Complaint("Test NCCL failure common.cu:958 'unhandled system error'", 2, ()),)


@pytest.mark.parametrize(
    ("message", "kind", "about"),
    [
        ("Bootstrap : Using [0]eth0:172.17.0.2<0>", RemarkKind.BOOTSTRAP, ("eth0", "172.17.0.2")),
        ("Bootstrap: Using ib0:fe80::1%ib0<0>", RemarkKind.BOOTSTRAP, ("ib0", "fe80::1")),
        ("NET/Socket : Using [0]eth0:10.0.0.1<0> [1]hsn0:10.1.0.1<0>", RemarkKind.SOCKET_INTERFACES, ("eth0", "hsn0")),
        ("P2P not supported between GPU3 and GPU0", RemarkKind.DRIVER_REFUSED, ("3", "0")),
        ("NET/IB : GPU Direct RDMA Disabled for GPU 2[2] / HCA 0 (distance 3 >= 2)", RemarkKind.GDR_DISTANT, ()),
        ("NET/OFI Need to force simple protocol: GDR not supported", RemarkKind.GDR_DISABLED, ("", "")),
        ("NET/OFI Initializing aws-ofi-nccl 1.9.1", RemarkKind.NETWORK_PLUGIN, ()),
    ],
)
def test_lines_about_networks(message: str, kind: RemarkKind, about: tuple[str, ...]) -> None:
    found = [each.note for each in facts_of(f"{JOB.head(0)}{message}").remarks]
    assert [(note.kind, note.about) for note in found] == [(kind, about)]


@pytest.mark.parametrize(
    "message",
    [
        "          + NVL[264.0] - NVS/0",
        "GPU/1a000 :GPU/1a000 (0/5000.0/LOC) GPU/1b000 (4/24.0/PHB) NVS/0 (1/480.0/NVL) CPU/0 (1/24.0/PHB) ",
        "Pattern 4, crossNic 0, nChannels 12, bw 20.0/20.0, type NVL/PIX, sameChannels 1",
    ],
)
def test_any_line_that_shows_nvlinks_is_of_its_host(message: str) -> None:
    assert facts_of(f"{JOB.head(0)}{message}").nvlink_hosts == {"nodeA"}
    assert facts_of(f"{JOB.head(0)}{message.replace('NV', 'QQ')}").nvlink_hosts == frozenset()


VM = Job(
    hosts=("vm", "vm"),
    one_machine=True,
    via=lambda a, b, r: between(a, b, r, inside="SHM/direct", across="NET/Socket/0"),
)


def machines(job: Job, *lines: str, **notes_of: object) -> list[str]:
    (communicator,) = read(*job.logs(), *lines).communicators
    return [member.machine for member in communicator.members]


def addresses(job: Job, *found: str) -> list[str]:
    return [f"{job.head(rank)}Bootstrap : Using eth0:{address}<0>\n" for rank, address in enumerate(found)]


def test_machines_are_told_by_more_than_a_name() -> None:
    assert machines(JOB) == ["nodeA", "nodeA"]
    assert machines(Job()) == ["nodeA", "nodeA", "nodeB", "nodeB"]
    # The first rank of the second "node" is on GPU 2: NCCL counts two machines where there is one.
    assert machines(VM) == ["vm"] * 4
    # Bus ids that come twice, and addresses that differ, are of two machines.
    twice = Job(hosts=("vm", "vm"), via=VM.via)
    assert machines(twice) == ["vm", "vm", "vm~2", "vm~2"]
    assert machines(VM, *addresses(VM, *["10.0.0.1"] * 2, *["10.0.0.2"] * 2)) == ["vm", "vm", "vm~2", "vm~2"]
    assert machines(VM, *addresses(VM, *["10.0.0.1"] * 4)) == ["vm"] * 4


def test_peer_access_and_shared_memory_join_what_names_part() -> None:
    job = Job(ranks=2, per_node=1, one_machine=True, via=lambda a, b, r: None if r else "P2P/IPC")
    assert machines(job) == ["nodeA", "nodeA"]
    between_machines = Job(ranks=2, per_node=1, via=lambda a, b, r: None if r else "P2P/MNNVL")
    assert machines(between_machines) == ["nodeA", "nodeB"]
