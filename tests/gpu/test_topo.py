"""On real GPUs: `gpubench topo` compared with nvidia-smi on the same machine."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpubench.machine.recorded import read_recording
from gpubench.model.paths.topology import Topology
from gpubench.model.results.topo import TOPO_SECTIONS
from gpubench.readers.machines.topo_matrix import read as read_topo_matrix
from tests.cli.running import environment, gpubench, mpirun
from tests.gpu.machine import DRIVER, has_gpu

pytestmark = [pytest.mark.gpu, has_gpu]
needs_nvidia_smi = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no nvidia-smi here")


def nvidia_smi(*arguments: str) -> str:
    return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    result = gpubench("topo", "--format", "json")
    assert result.returncode == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def hidden_from_cuda(document: dict[str, Any]) -> set[str]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES hides from CUDA."""
    hidden = {row["gpu"] for row in document["gpus"] if row["multiprocessors"] is None}
    assert len(hidden) == DRIVER.gpus - DRIVER.visible
    return hidden


@needs_nvidia_smi
def test_paths_and_peer_access_are_those_of_nvidia_smi(document: dict[str, Any]) -> None:
    peers = Topology(read_topo_matrix(nvidia_smi("topo", "-m") + nvidia_smi("topo", "-p2p", "r"), "nvidia-smi"))
    gpus = [gpu.device for gpu in peers.gpus]
    hidden = hidden_from_cuda(document)
    assert len(gpus) == DRIVER.gpus
    for source in gpus:
        for destination in gpus:
            assert document["matrix"][source][destination] == peers.matrix[source][destination]
            if source != destination:
                word = peers.peer_access(peers.gpus[gpus.index(source)], peers.gpus[gpus.index(destination)]).nvml
                assert document["peer_access"][source][destination] == {
                    "cuda": None if {source, destination} & hidden else word == "OK",
                    "nvml": word,
                    "reason": "possible",
                }


@needs_nvidia_smi
def test_devices_are_those_of_nvidia_smi(document: dict[str, Any]) -> None:
    fields = "index,name,uuid,pci.bus_id,pcie.link.gen.max,pcie.link.width.current,driver_version,memory.total"
    text = nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    hidden = hidden_from_cuda(document)
    for line, row in zip(text.splitlines(), document["gpus"], strict=True):
        index, name, uuid, bus_id, generation, width, driver, memory = (word.strip() for word in line.split(","))
        assert (row["gpu"], row["name"], row["uuid"], row["driver"]) == (f"GPU{index}", name, uuid, driver)
        assert bus_id.lower().endswith(row["bus_id"])
        assert (row["pcie_max_generation"], row["pcie_width"]) == (int(generation), int(width))
        assert row["memory_bytes"] // 2**20 == int(memory)
        assert row["gpu"] in hidden or row["multiprocessors"] > 0
        assert row["lost"] is None


@needs_nvidia_smi
def test_nvlinks_are_those_of_nvidia_smi(document: dict[str, Any]) -> None:
    for row in document["gpus"]:
        shown = nvidia_smi("nvlink", "-s", "-i", row["gpu"].removeprefix("GPU"))
        active = sum("GB/s" in line for line in shown.splitlines())
        assert row["nvlinks_active"] == active
        links = [link for link in document["nvlinks"] if link["gpu"] == row["gpu"] and link["active"]]
        assert len(links) == active
        assert all(f"{link['raw_gb_s']:.3f} GB/s" in shown for link in links)
        if active:
            assert row["nvlink_gb_s"] == active * row["nvlink_gb_s_per_link"]


def test_nothing_is_missing_on_a_machine_that_answers(document: dict[str, Any]) -> None:
    assert [name for name in TOPO_SECTIONS if name not in document] == []
    assert len(document["pairs"]) == len(document["matrix"]) * (len(document["matrix"]) - 1)
    assert {row["origin"] for row in document["pairs"]} <= {"measured"}
    assert document["metadata"]["source"] is None


def test_a_recording_shows_the_same(tmp_path: Path, document: dict[str, Any]) -> None:
    folder = tmp_path / "recorded"
    assert gpubench("topo", "--record", str(folder)).returncode == 0
    replayed = json.loads(gpubench("topo", "--replay", str(folder), "--format", "json").stdout)
    for name in ("matrix", "peer_access", "limits"):
        assert replayed[name] == document[name]
    assert len(read_recording(folder)[0]) == 1


def test_cuda_numbers_gpus_by_what_is_visible() -> None:
    last = DRIVER.gpus - 1
    result = gpubench("topo", "--format", "json", env=environment(CUDA_VISIBLE_DEVICES=str(last)))
    rows = json.loads(result.stdout)["gpus"]
    assert len(rows) == DRIVER.gpus
    assert [row["cuda_index"] for row in rows] == [None] * last + [0]


def test_ranks_of_a_node_read_it_once() -> None:
    result = mpirun(2, "topo", "--format", "json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert len(document["nodes"]) == 1
    assert len(document["ranks"]) == 2
    assert {rank["shm_device"] for rank in document["ranks"]} == {document["ranks"][0]["shm_device"]}
    assert document["ranks"][0]["device_files"]
