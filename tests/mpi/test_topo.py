"""`gpubench topo` under mpirun: each node is read once, nodes are grouped, and the odd one is named."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpubench.machine.recorded import check_recordable, read_recording, write_recording
from gpubench.model.facts.snapshot import Snapshot
from tests.cli.running import environment, mpirun
from tests.mpi.hosts import connected

pytestmark = pytest.mark.mpi

MACHINES = Path(__file__).parents[1] / "machines"


def machine(name: str) -> Snapshot:
    return read_recording(MACHINES / name)[0][0]


def recorded(folder: Path, snapshots: Sequence[Snapshot]) -> str:
    check_recordable(folder)
    write_recording(folder, snapshots, ())
    return str(folder)


def test_ranks_of_one_node_read_it_once(tmp_path: Path) -> None:
    output = tmp_path / "topo.json"
    result = mpirun(3, "topo", "--output", str(output), env=environment(NCCL_ALGO="Ring"))
    assert result.returncode == 0, result.stderr
    assert "1 node " in result.stdout
    document = json.loads(output.read_text())
    assert len(document["nodes"]) == 1
    assert [row["rank"] for row in document["ranks"]] == [0, 1, 2]
    assert {row["shm_device"] for row in document["ranks"]} == {document["ranks"][0]["shm_device"]}
    assert all(row["environment"]["NCCL_ALGO"] == "Ring" for row in document["ranks"])
    assert document["metadata"]["origin"] == "measured"


def test_facts_of_processes_are_recorded_and_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "recorded"
    result = mpirun(2, "topo", "--record", str(folder), env=environment(NCCL_P2P_LEVEL="PIX"))
    assert result.returncode == 0, result.stderr
    snapshots, ranks = read_recording(folder)
    assert snapshots[0].kernel.options is not None or "options" in snapshots[0].kernel.unknown
    assert set(snapshots[0].driver_settings.services) == {"nv-fabricmanager", "nvlsm", "nvidia-imex"}
    for rank in ranks:
        assert rank.environment["NCCL_P2P_LEVEL"] == "PIX"
        assert rank.mpi is not None
        assert rank.mpi.version is not None
        if rank.mpi.version.startswith("Open MPI"):
            assert rank.mpi.cuda_aware in (True, False)
            assert rank.mpi.cuda_built in (True, False)
            assert rank.mpi.pml in ("ob1", "cm", "ucx")
    again = tmp_path / "again"
    write_recording(again, snapshots, ranks)
    assert read_recording(again) == (snapshots, ranks)


@pytest.mark.slow
def test_wrong_usage_is_said_once_and_every_rank_ends_with_it(tmp_path: Path) -> None:
    result = mpirun(2, "topo", "--replay", str(tmp_path / "nothing"))
    assert result.returncode == 2
    assert result.stderr.count("has no recording") + result.stdout.count("has no recording") == 1


def test_one_of_three_hosts_differs(tmp_path: Path) -> None:
    with connected(3, tmp_path) as hosts:
        node = machine("h100x4-gpu-lost")
        healthy = replace(node, gpus=tuple(gpu for gpu in node.gpus if not gpu.lost)[:2], pairs=())
        gpus = (healthy.gpus[0], replace(healthy.gpus[1], nvlinks=(healthy.gpus[1].nvlinks or ())[:12]))
        odd = replace(healthy, host=hosts.names[1], gpus=gpus)
        nodes = [replace(healthy, host=hosts.names[0]), odd, replace(healthy, host=hosts.names[2])]
        folder = recorded(tmp_path / "recorded", nodes)
        output = tmp_path / "topo.json"
        text = hosts.run("topo", "--replay", folder, "--output", str(output), until="verdict:")
        assert f"2 nodes alike: {hosts.names[0]}, {hosts.names[2]}" in text
        assert f"and {hosts.names[1]}: GPU1 NVLinks active 12 (others 18)" in text
        document = json.loads(output.read_text())
        assert {row["node"]: row["node_kind"] for row in document["nodes"]} == dict.fromkeys(hosts.names, "A")
        assert [row["node"] for row in document["ranks"]] == [name for name in hosts.names for _ in range(2)]
        (found,) = (finding for finding in document["findings"] if finding["id"] == "nvlink-down")
        assert (found["node"], found["devices"]) == (hosts.names[1], ["GPU1"])
        assert {row["source_node"] for row in document["pairs"]} == set(hosts.names)


@pytest.mark.slow
def test_a_host_that_was_not_recorded_is_named(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "recorded", [replace(machine("no-gpu"), host="elsewhere")])
    result = mpirun(2, "topo", "--replay", folder)
    assert result.returncode == 2
    assert "has no host" in result.stderr + result.stdout
    assert "elsewhere" in result.stderr + result.stdout
