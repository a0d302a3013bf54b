"""Logs of whole jobs: of every version, in every shape in which they reach a disk."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpubench.model.paths.nccl_log import Communicator, Complaint, LogFacts, RemarkKind
from gpubench.readers import limits
from gpubench.readers.nccl_log.stream import NcclLogReader
from tests.fakes.nccl_logs import Job, between, interleaved

LOGS = Path(__file__).parents[2] / "logs"
VERSIONS = [(2, minor) for minor in (10, 12, 14, 16, 17, 18, 20, 21, 23, 26, 28, 30, 32)]

Found = dict[tuple[int, int], list[tuple[str, int, bool | None]]]


def read(*contents: str | bytes) -> LogFacts:
    reader = NcclLogReader()
    for content in contents:
        reader.read(io.BytesIO(content if isinstance(content, bytes) else content.encode()))
    return reader.facts()


def paths(communicator: Communicator) -> Found:
    return {
        (source, destination): [(route.name, route.channels, route.host_staged) for route in pair.routes]
        for source, by_destination in communicator.connections.routes_by_source()
        for destination, pair in by_destination.items()
    }


def recorded(name: str) -> LogFacts:
    return read(*(path.read_bytes() for path in sorted((LOGS / name).iterdir())))


def ring(ranks: int, inside: str, across: str, channels: int = 2, per_node: int = 2) -> Found:
    """What the fake job's connections are."""
    found: Found = {}
    for rank in range(ranks):
        for pair in ((rank, (rank + 1) % ranks), ((rank + 1) % ranks, rank)):
            name = inside if pair[0] // per_node == pair[1] // per_node else across
            staged = name.startswith("SHM") or (name.startswith("NET") and "GDR" not in name)
            found[pair] = [(name, channels, staged)]
    return dict(sorted(found.items()))


@pytest.mark.parametrize("name", ["normal", "tuning"])
def test_four_gpus_over_nvlink(name: str) -> None:
    facts = recorded(f"h200x4-{name}")
    (communicator,) = facts.communicators
    assert (communicator.size, communicator.nodes, communicator.missing_ranks) == (4, 1, ())
    assert paths(communicator) == {(a, (a + 1) % 4): [("P2P/CUMEM", 24, False)] for a in range(4)}
    assert [member.bus_id for member in communicator.members] == [f"0000:00:0{number}.0" for number in range(6, 10)]
    assert [member.nvml_index for member in communicator.members] == [0, 1, 2, 3]
    assert facts.versions == ("2.28.9+cuda13.0",)
    assert facts.networks == {"Socket": 4}
    assert facts.unreadable == 0
    assert (
        facts.lines
        == facts.nccl_lines
        == sum(len(path.read_bytes().splitlines()) for path in (LOGS / f"h200x4-{name}").iterdir())
    )
    assert len(communicator.tunings) == (17 if name == "tuning" else 0)
    if name == "tuning":
        first = communicator.tunings[0]
        assert (first.function, first.size_bytes, first.algorithm, first.protocol) == ("AllReduce", 1024, "RING", "LL")


def test_four_gpus_kept_off_nvlink() -> None:
    facts = recorded("h200x4-p2p-disabled")
    (communicator,) = facts.communicators
    assert paths(communicator) == {(a, (a + 1) % 4): [("SHM/direct", 4, True)] for a in range(4)}
    disabled = next(setting for setting in facts.settings if setting.name == "NCCL_P2P_DISABLE")
    assert (disabled.value, len(disabled.processes)) == ("1", 4)
    p2p_type = next(remark for remark in facts.remarks if remark.note.kind is RemarkKind.P2P_TYPE)
    assert p2p_type.note.about == ("0", "1")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shape", ["files", "one", "mixed"])
def test_every_version(version: tuple[int, int], shape: str) -> None:
    shared = "direct shared memory" if version < (2, 13) else "SHM/direct/direct" if version < (2, 30) else "SHM/direct"
    job = Job(version=version, via=lambda a, b, r: between(a, b, r, inside=shared, across="NET/IB/0/GDRDMA"))
    logs = job.logs()
    contents = {"files": logs, "one": ["".join(logs)], "mixed": [interleaved(logs, 7)]}[shape]
    facts = read(*contents)
    (communicator,) = facts.communicators
    assert paths(communicator) == ring(4, "SHM/direct", "NET/IB/0/GDRDMA")
    assert (communicator.size, communicator.missing_ranks, facts.unreadable) == (4, (), 0)
    assert [member.host for member in communicator.members] == ["nodeA", "nodeA", "nodeB", "nodeB"]
    assert [member.bus_id for member in communicator.members] == ["0000:1a:00.0", "0000:1b:00.0"] * 2
    if version >= (2, 16):
        assert communicator.id == "0xabc1"
    if version >= (2, 20):
        assert communicator.nodes == 2


@pytest.mark.parametrize("version", [(2, 12), (2, 18), (2, 28)])
def test_two_communicators_of_the_same_ranks(version: tuple[int, int]) -> None:
    first = Job(version=version)
    second = Job(
        version=version,
        id="0xabc2",
        handle=0x9000,
        via=lambda a, b, r: between(a, b, r, inside="SHM/direct", across="NET/Socket/0"),
    )
    facts = read(*(one + other for one, other in zip(first.logs(), second.logs(), strict=True)))
    assert [paths(each) for each in facts.communicators] == [
        ring(4, "P2P/CUMEM", "NET/IB/0/GDRDMA"),
        ring(4, "SHM/direct", "NET/Socket/0"),
    ]


def test_lines_that_fit_two_communicators_are_kept_apart_and_name_both() -> None:
    job, other = Job(ranks=2), Job(ranks=2, id="0xabc2", handle=0x9000)
    events = [(each, event) for each in (job, other) for event in ("Init START", "Init COMPLETE")]
    heads = [
        "".join(f"{job.head(rank)}{each.communicator(rank, event)}\n" for each, event in events) for rank in range(2)
    ]
    lines = ["".join(f"{job.head(rank)}{line}\n" for line in job.connections(rank)) for rank in range(2)]
    *known, unclear = read(*heads, *lines).communicators
    assert [paths(each) for each in known] == [{}, {}]
    assert (unclear.id, unclear.candidates) == (None, ("0xabc1", "0xabc2"))
    assert paths(unclear) == {(0, 1): [("P2P/CUMEM", 2, False)], (1, 0): [("P2P/CUMEM", 2, False)]}
    assert [(member.rank, member.host) for member in unclear.members] == [(0, "nodeA"), (1, "nodeA")]
    # Seen twice, each has it once.
    twice = read(*heads, *lines, *lines).communicators
    assert [paths(each) for each in twice] == [paths(unclear)] * 2


@pytest.mark.parametrize("version", [(2, 10), (2, 18), (2, 28)])
def test_one_process_that_drives_all_gpus(version: tuple[int, int]) -> None:
    class Threads(Job, frozen=True):
        def head(self, rank: int) -> str:
            return f"vm:100:{110 + rank} [{rank}] NCCL INFO "

    job = Threads(version=version, per_node=4, via=lambda a, b, r: None if r else "P2P/direct pointer")
    (communicator,) = read(interleaved(job.logs(), 5)).communicators
    assert paths(communicator) == ring(4, "P2P/direct pointer", "", per_node=4)
    assert {member.process for member in communicator.members} == {"vm:100"}


def test_a_split_is_told_from_its_parent() -> None:
    def log(rank: int) -> str:
        job = Job(ranks=2)
        where = f"rank {rank} nranks 2 cudaDev {rank} nvmlDev {rank} busId {job.bus(rank):x}"
        parent = f"parent {job.handle + rank:#x} splitCount 1 color 0 key 0"
        split = f"ncclCommSplit comm {0x700 + rank:#x} {where} {parent} - Init"
        texts = [
            job.communicator(rank, "Init START"),
            job.communicator(rank, "Init COMPLETE"),
            f"{split} START",
            *job.connections(rank),
            f"{split} COMPLETE",
        ]
        return "".join(f"{job.head(rank)}{text}\n" for text in texts)

    parent, split = read(log(0), log(1)).communicators
    assert (parent.id, split.id) == ("0xabc1", "0xabc1/split1/color0")
    assert (paths(parent), len(paths(split))) == ({}, 2)


def test_an_address_that_is_used_again_is_another_communicator() -> None:
    first, second = Job(ranks=2), Job(ranks=2, id="0xabc2", via=lambda a, b, r: "SHM/direct" if not r else None)
    logs = []
    for rank in range(2):
        where = f"rank {rank} nranks 2 cudaDev {rank} busId {first.bus(rank):x}"
        destroyed = f"{first.head(rank)}comm {first.handle + rank:#x} {where} - Destroy COMPLETE\n"
        logs.append(first.log(rank) + destroyed + second.log(rank))
    found = read(*logs).communicators
    assert [(each.id, {name for [(name, _, _)] in paths(each).values()}) for each in found] == [
        ("0xabc1", {"P2P/CUMEM"}),
        ("0xabc2", {"SHM/direct"}),
    ]


def test_a_communicator_without_an_id_that_is_made_again_at_its_address_lives_again() -> None:
    job = Job(version=(2, 12), ranks=2)
    destroyed = [f"{job.head(rank)}{job.communicator(rank, 'Destroy COMPLETE')}\n" for rank in range(2)]
    again = replace(job, via=lambda a, b, r: None if r else "SHM/direct")
    logs = [job.log(rank) + destroyed[rank] + again.log(rank) for rank in range(2)]
    (communicator,) = read(*logs).communicators
    assert {name for found in paths(communicator).values() for name, *_ in found} == {"P2P/CUMEM", "SHM/direct"}


LAUNCHERS = {
    "mpirun": "[1,3]<stdout>:",
    "srun": "3: ",
    "pdsh": "node1: ",
    "clock": "[2026-11-20 10:00:00.123] ",
    "iso": "2026-11-20T10:00:00.123456Z ",
    "torchrun": "[rank3]:",
    "torchrun-tee": "[default3]:",
    "kubectl": "[pod/worker-0/main] ",
    "colour": "\x1b[32m",
}


@pytest.mark.parametrize("prefix", LAUNCHERS.values())
@pytest.mark.parametrize("end", ["\n", "\r\n", "\x1b[0m\n"])
def test_what_launchers_and_terminals_add(prefix: str, end: str) -> None:
    logs = ["".join(f"{prefix}{line}{end}" for line in log.splitlines()) for log in Job().logs()]
    facts = read(*logs)
    assert paths(facts.communicators[0]) == ring(4, "P2P/CUMEM", "NET/IB/0/GDRDMA")
    assert (len(facts.communicators), facts.unreadable) == (1, 0)
    assert facts.nccl_lines == facts.lines


def test_colours_whose_escape_character_got_lost() -> None:
    log = "".join(Job().logs()).replace("NCCL INFO", "[0mNCCL INFO").replace("node", "[1;32mnode")
    assert paths(read(log).communicators[0]) == ring(4, "P2P/CUMEM", "NET/IB/0/GDRDMA")


def test_a_last_line_without_an_end_may_be_cut() -> None:
    log = Job(ranks=2, per_node=1, via=lambda a, b, r: "NET/IB/0/GDRDMA").log(0)
    assert log.endswith("via NET/IB/0/GDRDMA\n")
    assert read(log[:-8]).unreadable == 1
    whole = read(log)
    assert whole.unreadable == 0
    assert whole.lines == read(log[:-1]).lines


def test_binary_junk_is_no_log() -> None:
    junk = bytes(range(256)) * 1000
    facts = read(junk, b"\x00" * 100_000, b"\xff" * 100_000 + b"\n")
    assert facts.communicators == ()
    assert facts.nccl_lines == 0


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    endless = b"x" * 2**20
    reader = NcclLogReader()
    reader.read(io.BytesIO(endless * 8 + b"\n" + Job(ranks=2).log(0).encode()))
    assert len(reader.facts().communicators) == 1


@pytest.mark.parametrize("end", ["", "\n"])
def test_connections_lost_in_a_line_without_end_are_noticed(end: str) -> None:
    glued = "".join(Job(ranks=2).logs()).replace("\n", " ") * 1000
    assert read(f"{glued}{end}").unreadable > 0


def test_a_line_without_end_is_one_line() -> None:
    facts = read("x" * 2**22 + "\n" + "".join(Job().logs()))
    assert (facts.lines, facts.nccl_lines) == (read(*Job().logs()).lines + 1, read(*Job().logs()).nccl_lines)
    assert len(facts.communicators) == 1


def test_remarks_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_REMARKS", 64)
    head = Job().head(0).replace(" INFO ", " WARN ")
    lines = (f"{head}No transport found for rank {rank}[1000] -> rank 0[2000]\n" for rank in range(100))
    assert len(read("".join(lines)).remarks) == 64


def test_warnings_are_counted() -> None:
    job = Job(ranks=2)
    warning = f"\n{job.head(0).replace(' INFO ', ' WARN ').replace('[0]', '[0] net.cc:1')}Call to connect failed\n"
    facts = read(*job.logs(), warning, warning)
    assert facts.complaints == (Complaint("Call to connect failed", 2, ("nodeA:100",)),)


def test_what_comes_again_and_again_is_of_the_communicator_that_its_thread_is_at() -> None:
    """Blocks of a few lines that are all known are passed over, and another communicator's first ones are not."""
    job, other = Job(ranks=2), Job(ranks=2, id="0xabc2", handle=0x9000)
    head = job.head(0)
    begin = [*job.messages(0), *other.messages(0)]
    tunings = [
        f"AllReduce: {size} Bytes -> Algo RING proto {protocol} channel{{Lo..Hi}}={{0..15}}"
        for size, protocol in ((1024, "LL"), (4096, "LL128"), (65536, "SIMPLE"))
    ]
    blocks = []
    for each, known in ((job, tunings[:2]), (other, tunings[1:]), (job, tunings[:2])):
        blocks.append(f"AllReduce: opCount 0 sendbuff 0x1 count 9 comm {each.handle:#x} [nranks=2] stream 0x2")
        blocks += known * 20_000
    text = "".join(f"{head}{line}\n" for line in [*begin, *blocks, tunings[2]])
    found = {each.id: [tuning.size_bytes for tuning in each.tunings] for each in read(text).communicators}
    assert found == {"0xabc1": [1024, 4096, 65536], "0xabc2": [4096, 65536]}


@given(st.integers(0, 2**32), st.sampled_from(VERSIONS), st.integers(1, 3))
def test_the_order_of_lines_of_different_ranks_changes_nothing(
    seed: int, version: tuple[int, int], per_node: int
) -> None:
    job = Job(
        version=version,
        ranks=3,
        per_node=per_node,
        via=lambda a, b, r: between(a, b, r, inside="P2P/IPC", across="NET/Socket/0", ranks_per_node=per_node),
    )
    facts = read(interleaved(job.logs(), seed))
    assert [paths(each) for each in facts.communicators] == [paths(each) for each in read(*job.logs()).communicators]


@given(st.data())
def test_a_mangled_log_is_read_without_an_error(data: st.DataObject) -> None:
    log = bytearray("".join(Job(ranks=2).logs()).encode())
    for _ in range(data.draw(st.integers(1, 12))):
        start = data.draw(st.integers(0, len(log) - 1))
        log[start : start + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=12))
        if not log:
            return
    facts = read(bytes(log))
    for communicator in facts.communicators:
        paths(communicator)


@given(st.data())
def test_a_cut_connection_line_is_never_taken_for_a_better_transport(data: st.DataObject) -> None:
    job = Job(ranks=2, per_node=1, channels=1, via=lambda a, b, r: "NET/IB/0/GDRDMA/Shared")
    lines = "".join(job.logs()).splitlines()
    place = data.draw(st.sampled_from([number for number, line in enumerate(lines) if " via " in line]))
    whole = lines[place]
    lines[place] = whole[: data.draw(st.integers(0, len(whole) - 1))]
    facts = read("\n".join(lines) + "\n")
    for communicator in facts.communicators:
        for found in paths(communicator).values():
            for name, _, _ in found:
                assert set(name.split(", received ")) <= {"NET/IB/0/GDRDMA", "NET/IB/0"}, lines[place]
