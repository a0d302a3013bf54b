"""`gpubench topo` as a user types it, on machines that are files, simulated, or this one."""

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpubench.backends.mpi.group import AloneGroup
from gpubench.cli.commands.machine import checked_topo as checked
from gpubench.errors import UsageError
from gpubench.jobs import topo as topo_job
from gpubench.jobs.plans import TopoPlan
from gpubench.jobs.sources import Here, Simulated, choose_source, gathered
from gpubench.machine.probe import Probe, stage_commands
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.results.report import PAIR_COLUMNS
from gpubench.model.results.topo import TOPO_SECTIONS
from gpubench.model.terms.options import plan_from
from tests.cli.running import ROOT, SECONDS, environment, gpubench, planned
from tests.formats.schema import VALIDATOR, validate

MACHINES = ROOT / "tests" / "machines"
XML = MACHINES / "h200x4-nccl-xml" / "from.xml"
TEXT = MACHINES / "h200x4-smi-text" / "from.txt"


def test_this_machine_is_shown() -> None:
    result = gpubench("topo", "--format", "json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    VALIDATOR.validate(document)
    assert document["metadata"]["origin"] == "measured"
    assert len(document["nodes"]) == 1
    assert document["nodes"][0]["kernel"] == os.uname().release
    assert [row["rank"] for row in document["ranks"]] == [0]


@pytest.mark.parametrize("path", [XML, TEXT], ids=["xml", "text"])
def test_a_file_is_shown_as_the_machine_is(path: Path) -> None:
    result = gpubench("topo", "--from", str(path))
    assert result.returncode == 0
    assert "(RECORDED)" in result.stdout
    assert "GPU3  NV18  NV18  NV18     X" in result.stdout
    assert "450 GB/s per direction between two GPUs" in result.stdout
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 100


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "topo.bad is empty"),
        (b"\x7fELF\0\0\1", "topo.bad, line 1: a NUL byte"),
        (b"<system version='1'>\n<cpu numaid='0'>\n", "topo.bad, line 3"),
        (b'<?xml version="1.0"?>\n<!DOCTYPE a [<!ENTITY b "bbb">]>\n<system>&b;</system>', "topo.bad, line 2"),
        (b"\tGPU0\tGPU1\tGPU2\nGPU0\t X \tNV4\tNV4\n", "topo.bad, line"),
        (b"hello\n", "topo.bad, line 1"),
        (b'{"schema_version": 1, "host": "a"}', "topo.bad"),
    ],
)
def test_a_file_that_is_none_is_one_clear_message(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "topo.bad").write_bytes(content)
    result = gpubench("topo", "--from", "topo.bad", cwd=tmp_path)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "a", "--replay", "b"], "--from and --replay exclude each other"),
        (["--fault", "gpu0:nvlink=1"], "--fault gpu0:nvlink=1 without --simulate"),
        (["--simulate", "hgx-h200-5"], "hgx-h200-4"),
        (["--simulate", "hgx-h200-4*0"], "0 nodes"),
        (["--simulate", "hgx-h200-4", "--fault", "gpu4:nvlink=1"], "gpu4"),
        (["--simulate", "hgx-h200-4", "--fault", "gpu0:nvlnk=1"], "nvlink"),
        (["--section", "gpu"], "try:      --section gpus"),
        (["--section", "gpus"], "--section gpus without csv"),
        (["--section", "gpus", "--format", "json", "--output", "x.jsonl"], "--section gpus without csv"),
        (["--replay", "nowhere"], "--replay nowhere has no recording"),
        (["--record", "/proc/x"], "--record /proc/x cannot be written"),
        (["--output", "topo.yaml"], "no format has this suffix"),
        (["--timeout", "0"], "--timeout"),
        (["--timeout", "86401"], "--timeout"),
    ],
)
def test_wrong_usage_is_one_clear_message(arguments: list[str], said: str) -> None:
    result = gpubench("topo", *arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_csv_is_pairs_and_sections_are_chosen() -> None:
    rows = list(csv.DictReader(io.StringIO(gpubench("topo", "--from", str(XML), "--format", "csv").stdout)))
    assert tuple(rows[0]) == PAIR_COLUMNS
    assert [row["path_class"] for row in rows if row["source"] == row["destination"]] == []
    assert {row["limit_gb_s"] for row in rows if "eth0" not in (row["source"], row["destination"])} == {"450.0"}
    result = gpubench("topo", "--from", str(XML), "--format", "csv", "--section", "matrix")
    assert result.stdout.splitlines()[:2] == [",GPU0,GPU1,GPU2,GPU3,eth0", "GPU0,X,NV18,NV18,NV18,PHB"]
    assert "--section" not in gpubench("topo", "--from", str(XML), "--format", "csv", "--section", "findings").stderr


def test_a_simulated_machine_says_so_in_every_row(tmp_path: Path) -> None:
    output = tmp_path / "topo.json"
    arguments = ("--simulate", "hgx-h100-8*3", "--fault", "node1.gpu5:nvlink=12", "--output", str(output))
    result = gpubench("topo", *arguments)
    assert result.returncode == 1
    assert "3 nodes  24 GPUs  (SIMULATED)" in result.stdout
    assert "and node1: GPU5 NVLinks active 12 (others 18)" in result.stdout
    document = json.loads(output.read_text())
    validate(document)
    for section in ("gpus", "nvlinks", "nics", "nodes", "pairs"):
        assert {row["origin"] for row in document[section]} == {"simulated"}
    assert document["metadata"]["profile"]["name"] == "hgx-h100-8"
    assert document["metadata"]["source"] == "--simulate hgx-h100-8*3 --fault node1.gpu5:nvlink=12"
    assert document["verdict"] == "FAIL"


def test_a_link_that_is_down_fails() -> None:
    broken = gpubench("topo", "--simulate", "hgx-h200-4", "--fault", "gpu2:nvlink=17")
    assert broken.returncode == 1
    assert "FAIL nvlink-down: GPU2" in broken.stdout
    assert gpubench("topo", "--simulate", "hgx-h200-4", "--strict").returncode == 0


def test_a_driver_that_does_not_answer_is_an_error_and_the_rest_is_shown() -> None:
    result = gpubench("topo", "--simulate", "hgx-h200-4", "--fault", "node0:silent=nvml")
    assert result.returncode == 3
    assert "ERROR driver-silent: node0, nvml" in result.stdout
    assert "GPU3" in result.stdout


def test_a_real_stage_that_hangs_is_an_error_within_the_timeout(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    asked: list[float] = []
    real, commands = Probe.snapshot, stage_commands()

    def hanging() -> dict[str, list[str]]:
        return {**commands, "nvml": [sys.executable, "-c", "import time; time.sleep(600)"]}

    def snapshot(probe: Probe, timeout_s: float) -> Snapshot:
        asked.append(timeout_s)
        return real(probe, 3.0)

    monkeypatch.setattr("gpubench.machine.probe.stage_commands", hanging)
    monkeypatch.setattr(Probe, "snapshot", snapshot)
    assert topo_job.run(plan_from(TopoPlan, {"timeout_s": 7.0}), ["topo"]) == 3
    assert asked == [7.0]
    assert "driver-silent" in capsys.readouterr().out


def test_options_are_read() -> None:
    given = {"simulate": "hgx-h200-2*2", "fault": ["gpu1:width=8"], "section": "gpus", "output": ["x.csv"]}
    options = planned(TopoPlan, checked, given)
    assert isinstance(options.source, Simulated)
    assert (options.source.simulation.machine.nodes, len(options.source.simulation.faults)) == (2, 1)
    assert options.presentation.section == "gpus"
    for section in TOPO_SECTIONS:
        planned(TopoPlan, checked, {"section": section, "format": "csv"})
    with pytest.raises(UsageError):
        planned(TopoPlan, checked, {"section": "rows"})


def test_what_was_recorded_is_replayed(tmp_path: Path) -> None:
    machine = ("--simulate", "hgx-a100-8*2", "--fault", "node1.nic0:state=down")
    folder = tmp_path / "recorded"
    shown = json.loads(gpubench("topo", *machine, "--record", str(folder), "--format", "json").stdout)
    replayed = json.loads(gpubench("topo", "--replay", str(folder), "--format", "json").stdout)
    for section in TOPO_SECTIONS:
        assert replayed[section] == shown[section]
    assert replayed["verdict"] == shown["verdict"]
    again = gpubench("topo", *machine, "--record", str(folder))
    assert again.returncode == 2
    assert "already has a recording" in again.stderr


def test_a_run_that_fails_leaves_no_half_recording(tmp_path: Path) -> None:
    folder = tmp_path / "recorded"
    assert gpubench("topo", "--from", "/nonexist", "--record", str(folder)).returncode == 2
    assert not folder.exists()
    assert gpubench("topo", "--from", str(XML), "--record", str(folder)).returncode == 0


@pytest.fixture(scope="module")
def recorded_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("here") / "recorded"
    assert gpubench("topo", "--record", str(folder)).returncode == 0
    return folder


def test_recorded_here_replays_as_recorded(recorded_here: Path) -> None:
    document = json.loads(gpubench("topo", "--replay", str(recorded_here), "--format", "json").stdout)
    assert document["metadata"]["origin"] == "recorded"
    assert [row["rank"] for row in document["ranks"]] == [0]


@pytest.mark.parametrize("bad", ["{", '{"schema_version": 99, "host": "a"}', '{"schema_version": 1, "host": 3}'])
def test_a_damaged_recording_names_its_file(tmp_path: Path, bad: str) -> None:
    nodes = tmp_path / "nodes"
    nodes.mkdir()
    (nodes / "a.json").write_text(bad)
    result = gpubench("topo", "--replay", str(tmp_path))
    assert result.returncode == 2
    assert "a.json" in result.stderr
    assert "Traceback" not in result.stderr


def test_damaged_rank_facts_name_their_line(recorded_here: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(recorded_here, tmp_path / "recorded"))
    facts = folder / "ranks.jsonl"
    facts.write_text(facts.read_text() + "{]\n")
    result = gpubench("topo", "--replay", str(folder))
    assert result.returncode == 2
    assert "ranks.jsonl, line 2" in result.stderr


def test_an_interrupt_is_one_line() -> None:
    environ = environment(PYTHONPATH=str(ROOT))
    code = (
        "import sys, time; import gpubench.machine.probe as probe; from gpubench.cli.app import main; "
        "probe.stage_commands = dict; probe.Probe.snapshot = lambda *_: (print('ready', flush=True), time.sleep(60)); "
        "sys.argv = ['gpubench', 'topo']; main()"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, cwd=ROOT
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGINT)
    _, stderr = job.communicate(timeout=SECONDS)
    assert job.returncode == 130
    assert stderr == "gpubench: interrupted before the first result. Try: gpubench topo\n"


@pytest.mark.parametrize("width", [80, 100, 160])
def test_tables_keep_to_the_width(width: int) -> None:
    result = gpubench("topo", "--simulate", "hgx-h100-8*4", "--fault", "node2.gpu1:ecc=off", "--width", str(width))
    assert max(map(len, result.stdout.splitlines()[:-1])) <= width


def test_ranks_know_nothing_of_machines_that_are_simulated_or_described() -> None:
    """Under mpirun or srun libibverbs-missing of this host was a FAIL of the simulated one."""
    rank = RankFacts(rank=0, host="here", node=0, local_rank=0, pid=1, loadable={"libibverbs.so.1": None})
    plan = plan_from(TopoPlan, {"simulate": "hgx-h100-8*2"})
    for source in (plan.source, choose_source(1, file=Path("topo.xml"))):
        machines = gathered(AloneGroup(), [], rank, source)
        assert machines is not None
        assert machines.processes == []
    here = gathered(AloneGroup(), [], rank, Here(1))
    assert here is not None
    assert here.processes == [rank]
