"""`gpubench p2p` on ranks: under mpirun without GPUs, and as threads with fake GPUs."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from msgspec.structs import replace

from gpubench.backends.cuda import GpuIdentity
from gpubench.cli.commands.machine import checked_p2p as checked
from gpubench.jobs import p2p as p2p_ranks
from gpubench.jobs.p2p import STEPS, request_for_ranks
from gpubench.jobs.plans import P2pPlan
from gpubench.jobs.rank import AgreedError, identify
from gpubench.jobs.runner import CommandRankJob
from gpubench.machine.nvml import Driver
from gpubench.measure.p2p.request import CopyMachine, machine_of_ranks
from gpubench.model.facts.process import GpuProcess, RankFacts
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.topology import Topology
from gpubench.model.terms.ranks import Phase, RankIdentity
from gpubench.model.terms.verdict import Origin
from gpubench.ports.copies import LinkBytes
from gpubench.simulated.machine import parse_machine, snapshots
from tests.cli.running import gpubench, mpirun, planned
from tests.fakes.library_log import FakeLog, sent_between
from tests.fakes.progress import FakeProgress
from tests.fakes.rank_copies import Fabric, FakeRankCopies
from tests.fakes.ranks import ThreadGroup, run_ranks
from tests.formats.schema import VALIDATOR

if TYPE_CHECKING:
    from gpubench.backends.mpi.group import MpiGroup
    from gpubench.ranks.watchdog.rank import RankProgress


def said_once(result: Any, text: str) -> bool:
    return bool((result.stdout + result.stderr).count(text) == 1 and "Traceback" not in result.stderr)


@pytest.mark.slow
@pytest.mark.mpi
def test_ranks_without_gpus_end_with_one_message() -> None:
    result = mpirun(3, "p2p")
    if result.returncode == 0:
        pytest.skip("this machine has GPUs")
    assert result.returncode == 3
    assert said_once(result, "at least one NVIDIA GPU for p2p")


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pairs", "0-1,1-2"], "there is no rank 2"),
        pytest.param(["--output", "/nowhere/p2p.csv"], "cannot be written", marks=pytest.mark.slow),
        pytest.param(["--simulate", "hgx-h200-4"], "p2p --simulate under Open MPI's mpirun", marks=pytest.mark.slow),
    ],
)
def test_wrong_usage_is_said_once_and_every_rank_ends_with_it(arguments: list[str], said: str) -> None:
    result = mpirun(2, "p2p", *arguments)
    assert result.returncode == 2
    assert said_once(result, said)


@pytest.mark.slow
@pytest.mark.mpi
def test_a_single_rank_measures_as_if_it_were_started_alone() -> None:
    machine = ("p2p", "--simulate", "hgx-h200-4", "--format", "csv")
    result = mpirun(1, *machine)
    assert result.returncode == 0, result.stderr
    assert len(rows(result.stdout)) == len(rows(gpubench(*machine).stdout))


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


class Copies(FakeRankCopies):
    def libraries(self) -> Mapping[str, str]:
        return {"driver": "580"}

    def exchange(self, *arguments: Any, sends: bool) -> float:
        assert self.network, "NCCL was not started"
        return super().exchange(*arguments, sends=sends)

    network: object = None


class Cluster:
    """Nodes of two H200s with a thread per rank, and fakes of all that the job reads from the machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nodes: int, fabric: Fabric | None = None) -> None:
        self.size = 2 * nodes
        self.fabric = fabric or Fabric()
        self.identities: list[RankIdentity | None] = [None] * self.size
        self.driver = Driver(version="580", cuda=13000, gpus=2, visible=2)
        self.node: Snapshot = snapshots(parse_machine("hgx-h200-2"))[0]
        places = [rank // 2 for rank in range(self.size)]
        across = [pair for pair in permutations(range(self.size), 2) if places[pair[0]] != places[pair[1]]]
        self.via = "NET/Socket/0"
        monkeypatch.delenv("COLUMNS", raising=False)  # set by pytest-xdist
        monkeypatch.setattr("gpubench.jobs.rank._nodes_by_name", lambda group: (places, group.rank % 2))
        monkeypatch.setattr("gpubench.backends.mpi.group.library_version", lambda: "Open MPI of a test")
        monkeypatch.setattr("gpubench.backends.cuda.check_installed", lambda _driver: None)
        monkeypatch.setattr("gpubench.jobs.rank.read_driver", lambda _environment: self.driver)
        monkeypatch.setattr("gpubench.machine.probe.probe", lambda _seconds, _environment: self.node)
        stubs: dict[str, Any] = {
            "open_gpu": self.open_gpu,
            "NcclLibrary": lambda: SimpleNamespace(trouble=str, abort=lambda: None),
            "NcclLog": lambda *_: nullcontext(FakeLog(sent_between(across, self.via))),
            "Network": lambda _group, library: library,
            "NvmlCounters": lambda _bus_ids: SimpleNamespace(read=lambda _gpu: LinkBytes(), close=lambda: None),
            "CudaRankCopies": self.open_copies,
        }
        for name, stub in stubs.items():
            monkeypatch.setattr(p2p_ranks, name, stub)

    def open_gpu(self, _group: object, identity: RankIdentity, ranks: int, _driver: object) -> tuple[int, RankIdentity]:
        assert ranks == 2
        gpu = self.node.gpus[identity.local_rank]
        found = GpuIdentity(str(gpu.name), identity.local_rank, str(gpu.bus_id).upper(), str(gpu.uuid))
        driving = self.identities[identity.rank] = identify(identity, found)
        return identity.rank, driving

    def open_copies(self, rank: int, network: object) -> Copies:
        copies = Copies(self.fabric, rank)
        copies.network = network
        return copies

    def run(self, **given: Any) -> int:
        asked = options(**given)

        self.progress = [FakeProgress(rank) for rank in range(self.size)]

        def body(group: ThreadGroup) -> int:
            progress = cast("RankProgress", self.progress[group.rank])
            return CommandRankJob(STEPS, asked, ["p2p"], cast("MpiGroup", group), progress).run(None)

        codes = run_ranks(self.size, body)
        assert len(set(codes)) == 1
        return codes[0]


def options(**given: Any) -> P2pPlan:
    return planned(P2pPlan, checked, {"sizes": "64K"} | given)


def test_ranks_of_one_node(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert Cluster(monkeypatch, 1).run() == 0
    text = capsys.readouterr().out
    assert "p2p  2 ranks on node0" in text
    assert "  rank 0-1 on node0: NVIDIA H200" in text
    assert "64K, copy engine, written by the source, peer access on, between processes (CUDA IPC)" in text
    assert text.count("PASS: ") == 1
    assert "MPI Open MPI of a test" in text


def test_matrices_of_two_nodes_hold_the_pairs_of_a_node_or_those_between_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Cluster(monkeypatch, 2).run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert "p2p  4 ranks on 2 nodes" in lines[0]
    on_a_node = next(number for number, line in enumerate(lines) if line.startswith("64K, copy engine"))
    between = lines.index("64K, NCCL send and receive, between nodes")
    for title, measured in ((on_a_node, {(0, 1), (1, 0), (2, 3), (3, 2)}), (between, {(0, 2), (2, 0), (1, 3), (3, 0)})):
        cells = [line.split()[1:] for line in lines[title + 2 : title + 6]]
        for pair in permutations(range(4), 2):
            is_on_a_node = pair[0] // 2 == pair[1] // 2
            assert (cells[pair[0]][pair[1]] == "-") == (is_on_a_node != (title == on_a_node))
        assert all(float(cells[one][other]) > 0 for one, other in measured)
        assert [cells[rank][rank] for rank in range(4)] == ["X"] * 4


def test_ranks_of_two_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = tmp_path / "p2p.json"
    assert Cluster(monkeypatch, 2).run(output=[str(output)], format="csv") == 0
    document = json.loads(output.read_text())
    VALIDATOR.validate(document)
    hosts = document["metadata"]["hosts"]
    assert len(set(hosts)) == 2
    pairs = document["pairs"]
    assert {row["source_node"] for row in pairs} == set(hosts)
    assert {(row["scope"], row["engine"]) for row in pairs} == {("ipc", "ce"), ("network", "nccl")}
    assert len(pairs) == 4 * 3
    assert [rank["gpu_bus_id"] for rank in document["metadata"]["ranks"]] != [None] * 4
    found = {(row["scope"], row["transport"], row["host_staged"]) for row in pairs}
    assert found == {("ipc", None, None), ("network", "NET/Socket/0", True)}
    staged = next(row for row in document["fallback"] if row["conclusion"] == "staged")
    assert (staged["transport"], staged["verdict"], staged["cause"]) == ("NET/Socket/0", "SKIP", "no-rdma-nic")
    assert staged["cause_seen"].startswith("no RDMA NIC is active on ")
    assert document["metadata"]["profile"]["name"] == "hgx-h200-2"


def profile_of_ranks(monkeypatch: pytest.MonkeyPatch, output: Path, **given: Any) -> dict[str, str]:
    """Return the profile of two A100s with NVSwitches. Without NVSwitches they would be half of a board of four."""
    cluster = Cluster(monkeypatch, 1, Fabric(slow=dict.fromkeys([(0, 1), (1, 0)], 0.6)))
    board = snapshots(parse_machine("hgx-a100-8"))[0]
    cluster.node = replace(board, gpus=board.gpus[:2], pairs=board.pairs[:1])
    assert cluster.run(output=[str(output)], **given) == 1, "both pairs are slow"
    return dict(json.loads(output.read_text())["metadata"]["profile"])


def test_ranks_are_judged_by_the_profile_of_a_board_with_their_switches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profile = profile_of_ranks(monkeypatch, tmp_path / "p2p.json")
    assert (profile["name"], profile["note"]) == ("hgx-a100-8", "2 of 8 GPUs: a slice of the board")


def test_ranks_are_judged_by_a_users_own_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = Path("profiles/hgx-a100-8.toml").read_text().replace('name = "hgx-a100-8"', 'name = "ours"')
    (tmp_path / "ours.toml").write_text(text)
    monkeypatch.setenv("GPUBENCH_PROFILES", str(tmp_path))
    assert profile_of_ranks(monkeypatch, tmp_path / "p2p.json")["name"] == "ours"


def test_chosen_pairs_of_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert Cluster(monkeypatch, 2).run(pairs=["3-2"], format="csv") == 0
    assert [(row["source"], row["destination"]) for row in rows(capsys.readouterr().out)] == [("3", "2")]


def test_what_ranks_recorded_is_replayed_by_one_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "recorded"
    fabric = Fabric(slow={(3, 0): 0.4}, closed_to={(0, 1)})
    cluster = Cluster(monkeypatch, 2, fabric)
    asked = {"sizes": "64M", "pairs": ["0-1", "2-0", "2-1", "3-0"], "check": False, "record": str(folder)}
    assert cluster.run(**asked, format="csv") == 1
    measured = rows(capsys.readouterr().out)
    assert len((folder / "ranks.jsonl").read_text().splitlines()) == 4
    result = gpubench("p2p", "--replay", str(folder), "--format", "csv")
    assert result.returncode == 1, result.stderr
    replayed = rows(result.stdout)
    assert {row.pop("origin") for row in measured} == {"measured"}
    assert {row.pop("origin") for row in replayed} == {"recorded"}
    assert replayed == measured
    assert {row["verdict"] for row in replayed} >= {"ERROR", "FAIL"}
    text = gpubench("p2p", "--replay", str(folder)).stdout
    assert "p2p  4 ranks on 2 nodes  (RECORDED)" in text
    assert "MPI Open MPI of a test" in text


def test_wrong_data_fail_the_job_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Cluster(monkeypatch, 1, Fabric(wrong={(1, 0)})).run() == 1
    assert "FAIL wrong-data: rank 1 → rank 0" in capsys.readouterr().out


def test_refused_sharing_ends_with_could_not_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Cluster(monkeypatch, 1, Fabric(closed_to={(0, 1)})).run() == 3
    assert "different containers" in capsys.readouterr().out


def test_one_node_without_gpus_stops_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, 1)
    cluster.driver = replace(cluster.driver, visible=0)
    with pytest.raises(AgreedError, match="CUDA_VISIBLE_DEVICES hides the 2 GPUs of this host"):
        cluster.run()


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"sizes": None}, [16, 2**28]),
        ({"sizes": None, "like": "nvbandwidth"}, [2**29]),
        ({"sizes": "1K,4K"}, [1024, 4096]),
    ],
)
def test_what_is_asked_for(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], sizes: list[int]) -> None:
    Cluster(monkeypatch, 1)
    node = snapshots(parse_machine("hgx-h200-2"))[0]
    machine = machine_of([node, node], rank_of(node, 0, 0), rank_of(node, 1, 0), rank_of(node, 2, 1))
    request = request_for_ranks(options(**given), ((0, 1), (1, 2)), machine)
    assert sorted({series.size_bytes for series in request.series}) == sizes
    assert {series.direction for series in request.series if series.network} == {"write"}
    assert (request.method.repeats == 16) == ("like" in given)
    assert request.host_bytes is None


def machine_of(nodes: Sequence[Snapshot], *identities: RankIdentity) -> CopyMachine:
    own = [
        RankFacts(rank=each.rank, host=each.host, node=each.node, local_rank=each.local_rank, pid=each.pid)
        for each in identities
    ]
    return machine_of_ranks([Topology(node) for node in nodes], identities, own, None, Origin.MEASURED)


def rank_of(node: Snapshot, rank: int, number: int) -> RankIdentity:
    gpu = node.gpus[rank % 2]
    found = GpuIdentity(str(gpu.name), 0, str(gpu.bus_id), str(gpu.uuid))
    return identify(RankIdentity(rank=rank, host=node.host, node=number, local_rank=rank % 2, pid=100 + rank), found)


def test_a_gpu_that_others_use_is_known_and_ranks_are_no_others() -> None:
    node = snapshots(parse_machine("hgx-h200-2"))[0]
    users = ((GpuProcess(pid=100),), (GpuProcess(pid=7, name="train.py"), GpuProcess(pid=8)))
    used = [replace(gpu, processes=processes, idle=False) for gpu, processes in zip(node.gpus, users, strict=True)]
    machine = machine_of([replace(node, gpus=tuple(used))], rank_of(node, 0, 0), rank_of(node, 1, 0))
    assert machine.users(0) == ""
    assert machine.users(0, 1) == "rank 1 is in use by process 7 (train.py), process 8"


def test_a_rank_that_nccl_cannot_connect_is_seen_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, 2)
    assert cluster.run() == 0
    for progress in cluster.progress:
        assert progress.phases[:3] == [Phase.OPENING, Phase.CONNECTING, Phase.OPERATION]
        assert set(progress.phases[3:-1]) == {Phase.OPERATION, Phase.CONNECTING}
        assert progress.phases[-1] == Phase.OUTPUT
        assert len(progress.help) == 2
        assert progress.places == [str(identity) for identity in cluster.identities]
