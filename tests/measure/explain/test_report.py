"""Paths, causes and verdicts of NCCL logs."""

import io
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpubench.measure.explain.report import explain
from gpubench.model.results.report import Report, Table
from gpubench.model.terms.verdict import Verdict
from gpubench.readers.nccl_log.stream import NcclLogReader
from tests.examples import examples
from tests.fakes.nccl_logs import Job, Via, between
from tests.readers.nccl_log.test_stream import LOGS


def report_of(*logs: str | bytes) -> Report:
    reader = NcclLogReader()
    for log in logs:
        reader.read(io.BytesIO(log.encode() if isinstance(log, str) else log))
    return explain(reader.facts(), ["job.log"])


def rows(report: Report, section: str) -> list[dict[str, object]]:
    table = report.sections[section]
    assert isinstance(table, Table)
    found = [row.to_record() for row in table.rows()]
    assert all(list(row) == list(table.columns) for row in found)
    return found


def ids(report: Report) -> list[str]:
    return [finding.id for finding in report.findings]


def via(inside: str = "P2P/CUMEM", across: str = "NET/IB/0/GDRDMA") -> Via:
    return lambda source, destination, received: between(source, destination, received, inside=inside, across=across)


def graph(path: str, host_gpus: Sequence[int] = (0x1A000, 0x1B000)) -> list[str]:
    return [
        f"GPU/{one:x} :"
        + "".join(
            f"GPU/{other:x} ({0 if one == other else 2}/24.0/{'LOC' if one == other else path}) " for other in host_gpus
        )
        for one in host_gpus
    ]


def recorded(name: str) -> Report:
    return report_of(*(path.read_bytes() for path in sorted((LOGS / name).iterdir())))


def test_a_healthy_run() -> None:
    report = recorded("h200x4-normal")
    assert (report.verdict, report.findings) == (Verdict.PASS, ())
    first, *others = rows(report, "paths")
    assert first == {
        "communicator": "0x2e559cae77f7d5fe",
        "src": 0,
        "dst": 1,
        "src_host": "vm",
        "src_pid": 4310,
        "src_bus_id": "0000:00:06.0",
        "dst_host": "vm",
        "dst_pid": 4311,
        "dst_bus_id": "0000:00:07.0",
        "scope": "node",
        "transport": "P2P/CUMEM",
        "transport_received": None,
        "host_staged": False,
        "channels": 24,
        "peer_to_peer": False,
        "proxy_rank": None,
        "verdict": "PASS",
        "cause": None,
    }
    assert len(others) == 3
    assert rows(report, "causes") == []
    assert rows(report, "communicators")[0]["missing_ranks"] == ()
    assert [row["bus_id"] for row in rows(report, "members")] == [f"0000:00:0{number}.0" for number in range(6, 10)]


def test_a_variable_is_no_design_though_the_matrix_says_phb() -> None:
    """NCCL prints PHB between H200s with NVSwitch if NCCL_P2P_DISABLE is set."""
    report = recorded("h200x4-p2p-disabled-one-process")
    assert report.verdict is Verdict.FAIL
    assert [row["id"] for row in rows(report, "causes")] == ["nccl-p2p-disabled"]


@pytest.mark.parametrize(
    ("job", "verdict", "causes"),
    [
        (Job(), "PASS", []),
        (Job(via=via(inside="SHM/direct")), "FAIL", ["unknown"]),
        (Job(via=via(inside="SHM/direct"), notes=graph("PHB")), "PASS", ["nccl-default-level"]),
        (Job(via=via(inside="SHM/direct"), notes=graph("PIX")), "FAIL", ["unknown"]),
        (Job(via=via(inside="SHM/direct"), notes=[*graph("SYS"), "CPU/0-0 (1/2/-1)"]), "FAIL", ["unknown"]),
        (Job(via=via(inside="SHM/direct"), notes=[*graph("SYS"), "CPU/0-0 (1/1/-1)"]), "PASS", ["nccl-default-level"]),
        (
            Job(via=via(inside="SHM/direct"), notes=["P2P is disabled between connected GPUs 1 and 0"]),
            "WARN",
            ["gpu-without-pcie-p2p"],
        ),
        (
            Job(via=via(inside="SHM/direct"), notes=["P2P is disabled between connected GPUs 2 and 3"]),
            "FAIL",
            ["unknown"],
        ),
        (
            Job(via=via(inside="SHM/direct"), notes=["P2P is disabled between NVLINK connected GPUs 0 and 1"]),
            "FAIL",
            ["fabric-not-ready"],
        ),
        (
            Job(via=via(inside="SHM/direct"), notes=["Could not enable P2P between dev 0(=1a000) and dev 1(=1b000)"]),
            "FAIL",
            ["peer-access-refused"],
        ),
        (Job(via=via(inside="NET/Socket/0")), "FAIL", ["shm-not-shared"]),
        (Job(via=via(inside="NET/IB/0/GDRDMA")), "PASS", []),
        (Job(via=via(across="NET/Socket/0")), "FAIL", ["unknown"]),
        (Job(via=via(across="NET/Socket/0"), notes=["NET/IB : No device found."]), "WARN", ["no-rdma-nic"]),
        (
            Job(
                via=via(across="NET/Socket/0"),
                notes=["NET/IB : No device found.", "Bootstrap : Using hsn0:10.0.0.1<0>"],
            ),
            "FAIL",
            ["sockets-despite-rdma"],
        ),
        (
            Job(via=via(across="NET/Socket/0"), notes=["NET/IB : Using [0]mlx5_0:1/IB"]),
            "FAIL",
            ["sockets-despite-rdma"],
        ),
        (
            Job(via=via(across="NET/Socket/0"), notes=["NCCL_IB_DISABLE set by environment to 1"]),
            "FAIL",
            ["nccl-ib-disabled"],
        ),
        (
            Job(via=via(across="NET/IB/0"), notes=["NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"]),
            "FAIL",
            ["gpudirect-refused"],
        ),
        (
            Job(
                via=via(across="NET/IB/0"),
                notes=[
                    f"GPU Direct RDMA Disabled for GPU {bus:x} / HCA 0 (distance 8 > 5)" for bus in (0x1A000, 0x1B000)
                ],
            ),
            "WARN",
            ["gpudirect-too-far"],
        ),
        (
            Job(
                hosts=("vm", "vm"),
                one_machine=True,
                via=via(across="NET/Socket/0"),
                notes_of={rank: [f"NCCL_HOSTID set by environment to n{rank // 2}"] for rank in range(4)},
            ),
            "FAIL",
            ["nccl-hostid"],
        ),
        (Job(via=via(inside="P2P/QUANTUM")), "WARN", []),
        (
            Job(
                via=via(inside="SHM/direct", across="NET/Socket/0"),
                notes=["NCCL_SHM_DISABLE set by environment to 1", "NET/IB : No device found."],
            ),
            "FAIL",
            ["no-rdma-nic", "unknown"],
        ),
        (
            Job(version=(2, 12), via=via(inside="direct shared memory", across="NET/IB/0/GDRDMA"), notes=graph("SYS")),
            "PASS",
            ["nccl-default-level"],
        ),
    ],
)
def test_verdicts(job: Job, verdict: str, causes: list[str]) -> None:
    report = report_of(*job.logs())
    assert [row["id"] for row in rows(report, "causes")] == causes
    assert report.verdict.value == verdict
    for row in rows(report, "paths"):
        expected = {True: ("FAIL", "SKIP", "WARN"), False: ("PASS",), None: ("ERROR",)}[row["host_staged"]]  # type: ignore[index]
        assert row["verdict"] in expected
        assert (row["cause"] is not None) == (row["host_staged"] is True)


def test_the_driver_refuses_also_pairs_of_which_nccl_does_not_say_so() -> None:
    """NCCL prints a refusal only for paths shorter than SYS."""
    shared = Job(per_node=4, via=lambda a, b, r: None if r else "SHM/direct")
    between_neighbours = [f"P2P is disabled between connected GPUs {a} and {b}" for a, b in ((0, 1), (2, 3))]
    no_cuda = "Check P2P Type isAllDirectP2p 0 directMode 0 isAllCudaP2p 0"
    report = report_of(*replace(shared, notes=[*between_neighbours, no_cuda]).logs())
    assert [row["id"] for row in rows(report, "causes")] == ["gpu-without-pcie-p2p"]
    report = report_of(*replace(shared, notes=[*between_neighbours[:1], no_cuda]).logs())
    assert [row["id"] for row in rows(report, "causes")] == ["gpu-without-pcie-p2p", "peer-access-refused"]


@pytest.mark.parametrize(
    ("path", "refused", "causes"),
    [
        ("SYS", (0, 1, 2, 3), ["gpu-without-pcie-p2p"]),
        ("PIX", (0, 1, 2, 3), ["gpu-without-pcie-p2p", "unknown"]),
        ("SYS", (0, 1), ["gpu-without-pcie-p2p", "nccl-default-level"]),
    ],
)
def test_a_refusal_of_both_gpus_explains_their_pair_if_its_path_is_sys(
    path: str, refused: tuple[int, ...], causes: list[str]
) -> None:
    notes = [f"P2P is disabled between connected GPUs {a} and {a + 1}" for a in refused[::2]]
    buses = [0x1A000 + number * 0x1000 for number in range(4)]
    shared = Job(per_node=4, via=lambda a, b, r: None if r else "SHM/direct", notes=[*graph(path, buses), *notes])
    assert [row["id"] for row in rows(report_of(*shared.logs()), "causes")] == causes


def test_of_a_machine_that_has_several_names_peer_access_is_expected() -> None:
    named = {rank: [f"NCCL_HOSTID set by environment to n{rank}"] for rank in range(2)}
    job = Job(ranks=2, per_node=1, via=lambda a, b, r: "NET/Socket/0", hosts=("a", "a"), one_machine=True)
    (finding,) = report_of(*replace(job, notes_of=named).logs()).findings
    assert (finding.cause.partition(":")[0], finding.expected) == ("nccl-hostid", "peer access (P2P)")


def test_ranks_of_one_gpu_take_sockets_where_somebody_made_them_hosts() -> None:
    """One H100 with NCCL 2.32.3: both hosts have the same address and GPU, and need no RDMA device."""
    logs = sorted((LOGS / "h100x1-two-hosts-of-two").glob("*.log"))
    found = rows(report_of(*(path.read_text() for path in logs)), "paths")
    assert {(row["src"], row["dst"]): (row["transport"], row["verdict"], row["cause"]) for row in found} == {
        **dict.fromkeys(((0, 1), (2, 3)), ("P2P/CUMEM", "PASS", None)),
        **dict.fromkeys(((1, 2), (3, 0)), ("NET/Socket/0", "SKIP", "nccl-hostid")),
    }


@pytest.mark.parametrize("job", ["h100x1-four-ranks-one-gpu", "h100x1-two-hosts-of-two"])
def test_a_warning_of_every_healthy_job_is_no_doubt(job: str) -> None:
    """NCCL 2.32 warns that one-sided operations over sockets lack GDRCopy, which collectives do not need."""
    report = report_of(*(path.read_text() for path in sorted((LOGS / job).glob("*.log"))))
    assert (report.verdict, [finding.id for finding in report.findings if finding.severity is not Verdict.SKIP]) == (
        "PASS",
        [],
    )


def test_pairs_of_one_host_are_never_judged_with_those_between_hosts() -> None:
    notes = {rank: [f"NCCL_DEBUG_FILE set by environment to {rank}"] for rank in range(3)}
    job = Job(ranks=3, via=via("NET/Socket/0", "NET/Socket/0"), notes_of=notes)
    found = {(row["src"], row["dst"]): row for row in rows(report_of(*job.logs()), "paths")}
    assert {pair: (row["scope"], row["cause"]) for pair, row in found.items()} == {
        (0, 1): ("node", "shm-not-shared"),
        (1, 0): ("node", "shm-not-shared"),
        **dict.fromkeys(((0, 2), (2, 0), (1, 2), (2, 1)), ("network", "unknown")),
    }


@pytest.mark.parametrize(("across", "evidence"), [(False, "CUDA grants these GPUs"), (True, "nothing in the log")])
def test_what_cuda_grants_is_said_of_gpus_of_one_node(across: bool, evidence: str) -> None:
    inside, network = ("P2P/CUMEM", "NET/Socket/0") if across else ("SHM/direct", "NET/IB/0/GDRDMA")
    notes = ["Check P2P Type isAllDirectP2p 0 directMode 0 isAllCudaP2p 1"]
    (finding,) = report_of(*Job(via=via(inside, network), notes=notes).logs()).findings
    assert evidence in finding.cause


def test_a_far_nic_explains_the_connections_of_its_gpu_alone() -> None:
    far = {0: ["GPU Direct RDMA Disabled for GPU 1a000 / HCA 0 (distance 7 > 4)"]}
    job = Job(per_node=1, via=lambda a, b, r: "NET/IB/0", notes_of=far, notes=["NET/IB : Using [0]mlx5_0:1/IB"])
    found = {(row["src"], row["dst"]): row["cause"] for row in rows(report_of(*job.logs()), "paths")}
    assert (found[0, 1] == found[3, 0], found[1, 2] == found[2, 3], found[0, 1] == found[1, 2]) == (True, True, False)


def test_connections_of_either_communicator_are_named_after_both() -> None:
    job, other = Job(ranks=2, via=via("SHM/direct")), Job(ranks=2, id="0xabc2", handle=0x9000)
    events = [(each, event) for each in (job, other) for event in ("Init START", "Init COMPLETE")]
    logs = [
        "".join(
            f"{job.head(rank)}{line}\n"
            for line in (*(each.communicator(rank, event) for each, event in events), *job.connections(rank))
        )
        for rank in range(2)
    ]
    assert report_of(*logs).findings[0].subject == "0 → 1, 1 → 0 of communicator 0xabc1 or 0xabc2"


def test_four_are_named_and_more_are_counted() -> None:
    nothing = NcclLogReader().facts()
    assert explain(nothing, ["a", "b", "c", "d"]).findings[0].subject == "a, b, c, d"
    assert explain(nothing, ["a", "b", "c", "d", "e"]).findings[0].subject == "a, b, c, d and 1 more"
    ring = Job(ranks=6, per_node=6, via=lambda a, b, r: None if r or b != (a + 1) % 6 else f"NEW/{a}")
    *named, more = report_of(*ring.logs()).findings
    assert [finding.subject for finding in named] == [f"{a} → {a + 1} of communicator 0xabc1" for a in range(4)]
    assert (more.subject, more.seen) == ("more", "2 more unknown transports")


def test_a_rank_whose_connections_are_lost_is_no_healthy_one() -> None:
    logs = Job(ranks=3, per_node=3, via=lambda a, b, r: None if r else "P2P/CUMEM").logs()
    cut = "".join(line for line in logs[1].splitlines(keepends=True) if " via " not in line)
    assert report_of(*logs).verdict is Verdict.PASS
    report = report_of(logs[0], cut, logs[2])
    assert (report.verdict, ids(report)) == (Verdict.WARN, ["ranks-silent"])


def test_unreadable_lines_are_a_doubt_where_every_pair_was_heard() -> None:
    logs = Job().logs()
    report = report_of(*logs, f"{Job().head(0)}Channel 00/0 : 0[0] -> 1[1] via P2\n")
    assert (report.verdict, ids(report)) == (Verdict.WARN, ["lines-unreadable"])


@pytest.mark.parametrize(
    ("log", "seen"),
    [
        ("", "0 lines, none from NCCL"),
        ("hello\nworld\n", "2 lines, none from NCCL"),
        ("vm:1:1 [0] NCCL INFO Bootstrap: Using eth0\n", "1 NCCL line, but no connection line"),
        (
            f"{Job(ranks=2).head(0)}{Job(ranks=2).communicator(0, 'Init COMPLETE')}\n",
            "1 communicator, none of them connected",
        ),
    ],
)
def test_no_connection_says_how_to_get_them(log: str, seen: str) -> None:
    report = report_of(log)
    assert report.verdict is Verdict.ERROR
    (finding,) = report.findings
    assert (finding.id, finding.seen) == ("no-connections", seen)
    for word in ("NCCL_DEBUG=INFO", "NCCL_DEBUG_SUBSYS=INIT,GRAPH,ENV", "NCCL_DEBUG_FILE=/tmp/nccl.%h.%p.log"):
        assert word in finding.next_command


def test_an_operation_without_the_connections_that_carry_it() -> None:
    used = Job(
        ranks=2,
        id="0xabc2",
        handle=0x9000,
        via=lambda a, b, r: None,
        ops=["AllReduce: 8 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}"],
    )
    log = [one + other for one, other in zip(Job(ranks=2).logs(), used.logs(), strict=True)]
    operation = f"{used.head(0)}AllReduce: opCount 0 comm {used.handle:#x} stream 0x1\n"
    tuning = f"{used.head(0)}AllReduce: 16 Bytes -> Algo TREE proto LL channel{{Lo..Hi}}={{0..0}}\n"
    assert ids(report_of(log[0] + operation + tuning, log[1])) == ["no-connections"]
    nvls = tuning.replace("TREE", "NVLS")
    assert report_of(Job(ranks=2).log(0) + operation + nvls, Job(ranks=2).log(1)).verdict is Verdict.PASS


@pytest.mark.parametrize("connected", [1, 2])
def test_operations_of_any_of_several_communicators_are_carried_by_those_that_are_connected(connected: int) -> None:
    jobs = [
        Job(ranks=2, id=f"0xabc{number}", handle=0x1000 * number, via=via() if number <= connected else lambda *_: None)
        for number in (1, 2)
    ]
    log = [one + other for one, other in zip(*(job.logs() for job in jobs), strict=True)]
    tuning = f"{jobs[0].head(0)}AllReduce: 1024 Bytes -> Algo RING proto LL channel{{Lo..Hi}}={{0..0}}\n"
    report = report_of(log[0] + tuning, log[1])
    assert (report.verdict, ids(report)) == (Verdict.PASS, [])
    assert [row["id"] for row in rows(report, "communicators")] == ["0xabc1", "0xabc2"]


def test_one_rank_has_nothing_to_connect() -> None:
    job = Job(ranks=1)
    report = report_of("".join(f"{job.head(0)}{job.communicator(0, f'Init {end}')}\n" for end in ("START", "COMPLETE")))
    assert (report.verdict, ids(report)) == (Verdict.SKIP, ["nothing-to-connect"])
    started = report_of(f"{job.head(0)}{job.communicator(0, 'Init START')}\n")
    assert (started.verdict, ids(started)) == (Verdict.SKIP, ["nothing-to-connect"])


def test_an_excerpt_passes_for_what_is_in_it() -> None:
    job = Job()
    logs = ["".join(f"{job.head(rank)}{line}\n" for line in job.connections(rank)) for rank in range(4)]
    report = report_of(*logs)
    assert (report.verdict, ids(report)) == (Verdict.PASS, ["excerpt"])
    assert report.findings[0].seen.startswith("8 pairs of ranks, out of an unknown total")
    whole = [*Job(ranks=2, id="0xabc9", handle=0x9000, hosts=("nodeE",), first_pid=500).logs(), *logs]
    report = report_of(*whole)
    assert (report.verdict, ids(report)) == (Verdict.WARN, ["communicator-unknown"])


@pytest.mark.parametrize("version", [(2, 12), (2, 28)])
def test_two_jobs_in_one_file(version: tuple[int, int]) -> None:
    jobs = Job(version=version), Job(version=version, id="0xabc2", handle=0x9000, first_pid=300)
    report = report_of("".join(log for job in jobs for log in job.logs()))
    assert (report.verdict, ids(report)) == (Verdict.PASS, [])
    assert [row["pairs"] for row in rows(report, "communicators")] == [8, 8]


def test_a_switch_that_reduces_is_between_nodes() -> None:
    job = Job(ranks=2, per_node=1, via=lambda a, b, r: "NET/IB/0/GDRDMA")
    more = "".join(f"{job.head(0)}CollNet 00/0 : 0 [{end}] via COLLNET/SHARP/0\n" for end in ("send", "receive"))
    report = report_of(*job.logs(), more)
    (row,) = [row for row in rows(report, "paths") if row["host_staged"]]
    assert (row["src"], row["dst"], row["scope"], row["cause"]) == (0, 0, "network", "unknown")
    named = f"{job.head(0)}NCCL_HOSTID set by environment to a\n"
    (finding,) = report_of(*job.logs(), named, more).findings
    assert finding.comment.endswith("`gpubench topo` shows the NICs of a node.")


@settings(max_examples=examples(50))
@given(st.data())
def test_lines_that_were_written_into_each_other_do_not_pass(data: st.DataObject) -> None:
    job = Job(ranks=2, per_node=2, channels=1, via=lambda a, b, r: None if r else "P2P/CUMEM")
    lines = "".join(job.logs()).splitlines()
    place = data.draw(st.sampled_from([number for number, line in enumerate(lines) if " via " in line]))
    whole = lines[place]
    cut = data.draw(st.integers(1, len(whole) - len("via P2P/CUMEM")))
    between_them = f"{job.head(1)}Bootstrap: Using eth0:10.0.0.1<0>"
    lines[place] = f"{whole[:cut]}{between_them}\n{whole[cut:]}"
    assert report_of("\n".join(lines) + "\n").verdict is not Verdict.PASS


@settings(max_examples=examples(60))
@given(st.data())
def test_a_network_line_that_is_lost_without_a_trace_does_not_pass(data: st.DataObject) -> None:
    job = Job(ranks=3, per_node=1, channels=2, via=lambda a, b, r: "NET/IB/0/GDRDMA")
    lines = "".join(job.logs()).splitlines(keepends=True)
    lines.pop(data.draw(st.sampled_from([number for number, line in enumerate(lines) if " via " in line])))
    assert ids(report_of("".join(lines))) == ["ends-missing"]


def test_unknown_transports_are_counted() -> None:
    report = report_of(*Job(via=via(inside="P2P/QUANTUM")).logs())
    (finding,) = report.findings
    assert finding.id == "path-unknown"
    assert "'P2P/QUANTUM'" in finding.seen
    assert finding.subject == "0 → 1, 1 → 0, 2 → 3, 3 → 2 of communicator 0xabc1"
    many = report_of(*Job(channels=8, via=lambda a, b, r: None if r else f"X/{a}{b}").logs())
    assert len(many.findings) == 5


def test_pairs_with_fewer_channels_than_others_count_for_the_least() -> None:
    logs = Job(per_node=4, channels=3, via=lambda _a, _b, received: None if received else "P2P/CUMEM").logs()
    fewer = "\n".join(line for line in logs[2].splitlines() if "Channel 01" not in line and "Channel 02" not in line)
    (row,) = rows(report_of(*logs[:2], fewer, logs[3]), "transports")
    assert (row["channels_least"], row["channels_most"], row["pairs"]) == (1, 3, 8)


@settings(max_examples=examples(60))
@given(st.data())
def test_a_log_that_lost_lines_is_never_better_than_the_whole(data: st.DataObject) -> None:
    job = Job(ranks=4, per_node=1, channels=1, via=lambda a, b, r: "NET/Socket/0")
    lines = [log.splitlines(keepends=True) for log in job.logs()]
    for _ in range(data.draw(st.integers(1, 8))):
        rank = data.draw(st.integers(0, 3))
        if lines[rank]:
            lines[rank].pop(data.draw(st.integers(0, len(lines[rank]) - 1)))
    report = report_of(*("".join(line) for line in lines))
    assert report.verdict in (Verdict.FAIL, Verdict.ERROR)


@settings(max_examples=examples(50))
@given(st.data())
def test_a_healthy_log_with_lines_cut_in_the_middle_does_not_pass(data: st.DataObject) -> None:
    job = Job(ranks=2, per_node=1, channels=1, via=lambda a, b, r: "NET/IB/0/GDRDMA")
    lines = "".join(job.logs()).splitlines()
    place = data.draw(st.sampled_from([number for number, line in enumerate(lines) if " via " in line]))
    lines[place] = lines[place][: data.draw(st.integers(0, len(lines[place]) - 1))]
    assert report_of("\n".join(lines) + "\n").verdict is not Verdict.PASS


@settings(max_examples=examples(60))
@given(st.data())
def test_a_mangled_log_has_a_report(data: st.DataObject) -> None:
    log = bytearray("".join(Job(via=via(inside="SHM/direct")).logs()).encode())
    for _ in range(data.draw(st.integers(1, 12))):
        start = data.draw(st.integers(0, len(log) - 1))
        log[start : start + data.draw(st.integers(0, 60))] = data.draw(st.binary(max_size=12))
        if not log:
            return
    report = report_of(bytes(log))
    for section in report.sections:
        rows(report, section)


@pytest.mark.parametrize(
    ("variables", "cause"),
    [
        pytest.param(("NCCL_IB_DISABLE",), "nccl-ib-disabled", id="between machines, where no variable forbids more"),
        pytest.param(("NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), "nccl-shm-disabled", id="wherever the other rank is"),
        pytest.param(("NCCL_SHM_DISABLE",), "unknown", id="inside alone, and nobody knows where the other is"),
    ],
)
def test_ranks_without_a_log_take_away_no_cause_that_the_others_prove(variables: tuple[str, ...], cause: str) -> None:
    job = Job(
        ranks=2,
        per_node=1,
        via=lambda *_: "NET/Socket/0",
        notes=[f"{name} set by environment to 1" for name in variables],
    )
    report = report_of(job.log(0))
    assert [row["id"] for row in rows(report, "causes")] == [cause]
    assert report.verdict is Verdict.FAIL
