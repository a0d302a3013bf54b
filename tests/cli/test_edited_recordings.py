"""A recording is input from a stranger: what was edited, cut or contradicts itself passes no gate."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gpubench.cli.app import app
from gpubench.errors import GpubenchError
from tests.machines.test_machines import FOLDER

Edit = Callable[[dict[str, Any]], object]
RECORDED = FOLDER / "h200x4-vm"


def gate(path: Path, node: dict[str, Any], *command: str) -> int:
    """The exit code of a strict gate over the recorded machine with another node in it."""
    folder = path / "machine"
    shutil.copytree(RECORDED, folder)
    (folder / "nodes" / "vm.json").write_text(json.dumps(node))
    result = CliRunner().invoke(app, [*command, "--strict", "--replay", str(folder)])
    assert result.exception is None or isinstance(result.exception, SystemExit | GpubenchError), result.exception
    return result.exception.exit_code if isinstance(result.exception, GpubenchError) else result.exit_code


def recorded() -> dict[str, Any]:
    """The node as it was recorded."""
    node: dict[str, Any] = json.loads((RECORDED / "nodes" / "vm.json").read_text())
    return node


def of_gpu(**changed: Any) -> Edit:
    return lambda node: node["gpus"][1].update(changed)


def of_all_gpus(**changed: Any) -> Edit:
    return lambda node: [gpu.update(changed) for gpu in node["gpus"]]


def of_links(**changed: Any) -> Edit:
    return lambda node: [link.update(changed) for link in node["gpus"][1]["nvlinks"]]


EDITED: dict[str, Edit] = {
    "a pair is gone": lambda node: node["pairs"].pop(),
    "all pairs are gone": lambda node: node["pairs"].clear(),
    "a pair of one GPU": lambda node: node["pairs"][0].update(destination="GPU0"),
    "NVLinks of one GPU are null": of_gpu(nvlinks=None),
    "NVLinks of all GPUs are null": of_all_gpus(nvlinks=None),
    "NVLinks of one GPU are none": of_gpu(nvlinks=[]),
    "half of one GPU's NVLinks are cut off": lambda node: node["gpus"][1].update(
        nvlinks=node["gpus"][1]["nvlinks"][:9]
    ),
    "NVLinks at half their rate": of_links(raw_gb_s=13.281),
    "NVLinks without a rate": of_links(raw_gb_s=0.0),
    "NVLinks at a rate below 0": of_links(raw_gb_s=-26.562),
    "NVLinks faster than any": of_links(raw_gb_s=1e6),
    "NVLinks of another version": of_links(version="3.0"),
    "one NVLink many times": of_links(number=0),
    "half the memory": of_gpu(memory_bytes=75377410048),
    "more memory in use than there is": of_gpu(memory_used_bytes=10**12),
    "half the multiprocessors": of_gpu(multiprocessors=66),
    "another compute capability": of_gpu(compute_capability="8.0"),
    "more PCIe lanes than the slot has": of_gpu(
        pcie={"generation": 5, "width": 32, "max_generation": 5, "max_width": 16}
    ),
    "a bus id twice": of_gpu(bus_id="0000:00:06.0"),
    "another clique": of_gpu(fabric={"state": "completed", "status": "success", "clique": 7, "cluster_uuid": "0-0"}),
    "no fabric": of_gpu(fabric=None),
    "another number of a GPU": of_gpu(index=5),
}


@pytest.mark.parametrize("edit", EDITED.values(), ids=EDITED)
def test_an_edited_recording_passes_no_gate(edit: Edit, tmp_path: Path) -> None:
    node = recorded()
    edit(node)
    assert gate(tmp_path, node, "check", "--quick") != 0


@pytest.mark.parametrize(
    "name", ["a pair is gone", "all pairs are gone", "NVLinks of one GPU are null", "another clique"]
)
def test_what_wiring_rests_on_is_missed_by_topo_too(name: str, tmp_path: Path) -> None:
    """It said PASS: `paths unknown`, and `host memory by design`."""
    node = recorded()
    EDITED[name](node)
    assert gate(tmp_path, node, "topo") != 0


def test_the_recording_itself_passes(tmp_path: Path) -> None:
    assert gate(tmp_path, recorded(), "check", "--quick") == 0
    assert gate(tmp_path / "again", recorded(), "topo") == 0
