"""What `gpubench p2p` knows of its own process when it runs as one: everything that a rank knows of its own."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.cli.commands.machine import checked_p2p as checked
from gpubench.jobs import p2p as p2p_job
from gpubench.jobs.plans import P2pPlan
from gpubench.jobs.runner import run_alone
from gpubench.machine.nvml import Driver
from gpubench.machine.process import read_rank_facts
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.terms.operation import CopyGpu
from gpubench.model.terms.verdict import Origin
from gpubench.simulated.machine import parse_machine, snapshots
from tests.cli.running import planned
from tests.fakes.copies import FakeCopies

LARGE = 2**26
"""From here on a slow copy is a failure."""

QUICK: dict[str, Any] = {"sizes": "64K,8M", "pairs": ["0-1"], "check": False}
"""The bytes of these copies are not what is looked at, and take as long to make as all the rest."""


def here() -> Snapshot:
    node = replace(snapshots(parse_machine("hgx-h100-8"))[0], origin=Origin.MEASURED)
    gpus = node.gpus[:2]
    names = {gpu.device for gpu in gpus}
    pairs = tuple(pair for pair in node.pairs if {pair.source, pair.destination} <= names)
    return replace(node, gpus=gpus, pairs=pairs)


class Copies(FakeCopies):
    def __init__(self) -> None:
        super().__init__(2)
        self.gpus = tuple(
            CopyGpu(gpu.device, gpu.index, gpu.bus_id or "", gpu.uuid or "", gpu.name or "") for gpu in here().gpus
        )

    def libraries(self) -> Mapping[str, str]:
        return {"CuPy": "0"}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs that copy, on a machine whose facts are a simulated one's; the process is this one."""
    monkeypatch.setattr("gpubench.jobs.rank.read_driver", lambda _: Driver(version="580", gpus=2, visible=2))
    monkeypatch.setattr("gpubench.machine.probe.probe", lambda *_: here())
    monkeypatch.setattr(p2p_job, "watch_errors", lambda before, *_: replace(before, errors_grown={}))
    monkeypatch.setattr("gpubench.backends.cuda.check_installed", lambda _: None)
    copies = Copies()
    monkeypatch.setattr("gpubench.backends.copies.open_copies", lambda *_: copies)
    monkeypatch.setattr("gpubench.machine.nvml.NvmlCounters", lambda _: copies)


def measured(tmp_path: Path, **given: object) -> dict[str, Any]:
    output = tmp_path / "p2p.json"
    options = planned(P2pPlan, checked, QUICK | {"output": [str(output)]} | given)
    code = run_alone(p2p_job.STEPS, options, ["p2p"])
    document: dict[str, Any] = json.loads(output.read_text())
    assert code == (document["verdict"] == "FAIL")
    return document


def processes(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
    """What is read of the process, with some of it as given."""

    def read(rank: int, node: int, local_rank: int, environment: Mapping[str, str]) -> RankFacts:
        return replace(read_rank_facts(rank, node, local_rank, environment), **facts)

    monkeypatch.setattr("gpubench.machine.process.read_rank_facts", read)


def causes(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(row["id"], row["subject"]) for row in document["causes"]]


def test_a_process_that_lacks_nothing_is_no_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes(monkeypatch, affinity="0-223")
    assert causes(measured(tmp_path)) == []


def test_a_process_bound_far_from_its_gpus_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far = next(node.cpus for node in here().machine.numa_nodes if node.number == 1)
    processes(monkeypatch, affinity=far)
    assert causes(measured(tmp_path)) == [("numa-far", "GPU0, GPU1")]


def test_a_variable_of_this_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("UCX_TLS", "rc,sm")
    processes(monkeypatch, affinity="0-223")
    found = [id_ for id_, _ in causes(measured(tmp_path))]
    assert found == ["cuda-launch-blocking"], "UCX_TLS has no part in copies of CUDA's"


def test_errors_that_come_while_it_runs_are_named_and_old_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes(monkeypatch, affinity="0-223")
    recording, output = tmp_path / "run", tmp_path / "replayed.json"
    grown = {"GPU1": {"PCIe replays": 400}, "GPU0": {"PCIe replays": 0}}
    monkeypatch.setattr(p2p_job, "watch_errors", lambda before, *_: replace(before, errors_grown=grown))
    document = measured(tmp_path, record=str(recording))
    (row,) = document["causes"]
    assert (row["id"], row["subject"], row["confidence"]) == ("pcie-errors", "GPU1", "likely")
    assert row["evidence"] == "400 PCIe replays during this run"
    options = planned(P2pPlan, checked, {"replay": str(recording), "output": [str(output)]})
    assert run_alone(p2p_job.STEPS, options, ["p2p"]) == 1, "the copies of the stand-in are slow"
    assert json.loads(output.read_text())["causes"] == document["causes"]


def test_the_facts_are_recorded_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    far = next(node.cpus for node in here().machine.numa_nodes if node.number == 1)
    processes(monkeypatch, affinity=far)
    recording, output = tmp_path / "run", tmp_path / "replayed.json"
    first = measured(tmp_path, record=str(recording))
    assert len((recording / "ranks.jsonl").read_text().splitlines()) == 1
    options = planned(P2pPlan, checked, {"replay": str(recording), "output": [str(output)]})
    assert run_alone(p2p_job.STEPS, options, ["p2p"]) == 1, "the copies of the stand-in are slow"
    assert causes(json.loads(output.read_text())) == causes(first) == [("numa-far", "GPU0, GPU1")]
    assert "numa-far" not in capsys.readouterr().out, "it explains no path that was staged"


def test_a_users_own_profile_is_the_one_to_judge_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Path("profiles/hgx-h100-8.toml").read_text().replace('name = "hgx-h100-8"', 'name = "ours"')
    (tmp_path / "ours.toml").write_text(text)
    assert measured(tmp_path)["metadata"]["profile"]["name"] != "ours"
    monkeypatch.setenv("GPUBENCH_PROFILES", str(tmp_path))
    assert measured(tmp_path)["metadata"]["profile"]["name"] == "ours"


def test_a_profile_that_is_asked_for_is_the_one_to_judge_by(tmp_path: Path) -> None:
    output = tmp_path / "p2p.json"
    plan = planned(P2pPlan, checked, QUICK | {"sizes": str(LARGE), "output": [str(output)]})
    assert run_alone(p2p_job.STEPS, dataclasses.replace(plan, profile="hgx-b200-8", strict=True), ["p2p"]) == 1
    document = json.loads(output.read_text())
    profile = document["metadata"]["profile"]
    assert (profile["name"], profile["note"]) == ("hgx-b200-8", "requested")
    slow = [row["verdict"] for row in document["pairs"] if row["size_bytes"] == LARGE and row["peer"] == "on"]
    assert slow == ["FAIL"]


def test_gpus_of_a_model_that_nobody_knows_are_judged_by_the_profile_of_any_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = here()
    unknown = replace(node, gpus=tuple(replace(gpu, name="NVIDIA X1") for gpu in node.gpus))
    monkeypatch.setattr("gpubench.machine.probe.probe", lambda *_: unknown)
    document = measured(tmp_path, sizes=str(LARGE))
    assert document["metadata"]["profile"]["name"] == "generic-nvlink"
    judged = [row["verdict"] for row in document["pairs"] if row["size_bytes"] == LARGE and row["peer"] == "on"]
    assert judged == ["PASS"]
