"""`gpubench explain` as a user types it."""

import csv
import gzip
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from gpubench.cli.app import app
from gpubench.errors import UsageError
from gpubench.formats.registry import Presentation
from gpubench.jobs.plans import ExplainPlan
from gpubench.measure.explain.report import SECTIONS
from gpubench.model.results.fallback import CommunicatorRow, MemberRow, PathRow, TransportRow
from gpubench.model.results.report import CauseRow
from gpubench.model.terms.options import plan_from
from tests.cli.running import ROOT, SECONDS, environment, gpubench
from tests.fakes.nccl_logs import Job, between
from tests.formats.schema import SCHEMA, validate

if TYPE_CHECKING:
    from gpubench.model.results.report import Record

LOGS = ROOT / "tests" / "logs"


def written(folder: Path, job: Job) -> str:
    for rank, log in enumerate(job.logs()):
        (folder / f"nccl.{rank:03}.log").write_text(log)
    return str(folder)


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("h200x4-normal", 0, "through host memory: 0 of 4 paths, as NCCL logged them"),
        ("h200x4-tuning", 0, "PASS: "),
        ("h200x4-p2p-disabled", 1, "nccl-p2p-disabled: NCCL_P2P_DISABLE=1 is set in the environment"),
    ],
)
def test_recorded_logs(name: str, code: int, said: str) -> None:
    result = gpubench("explain", str(LOGS / name))
    assert (result.returncode, result.stderr) == (code, "")
    assert said in result.stdout
    assert "0→1, 1→2, 2→3, 3→0" in result.stdout
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 100


def test_eighty_columns() -> None:
    result = gpubench("explain", str(LOGS / "h200x4-p2p-disabled"), "--width", "80")
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80
    assert result.stdout.splitlines()[-1].startswith("FAIL: ")
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("name", ["h200x4-normal", "h200x4-p2p-disabled"])
def test_json_is_what_the_schema_says(name: str) -> None:
    result = gpubench("explain", str(LOGS / name), "--format", "json")
    document = json.loads(result.stdout)
    validate(document)
    assert document["verdict"] == ("FAIL" if result.returncode else "PASS")
    assert [(row["src"], row["dst"]) for row in document["paths"]] == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert all(row["communicator"] == document["communicators"][0]["id"] for row in document["paths"])
    assert document["metadata"]["hosts"] == ["vm"]
    assert document["metadata"]["libraries"] == {"NCCL": "2.28.9+cuda13.0", "network": "Socket"}
    assert document["metadata"]["environment"]["NCCL_NVLS_ENABLE"] == "0"
    assert list(document) == [
        *("schema_version", "complete", "verdict", "sentence", "duration_s", "metadata"),
        *SECTIONS,
    ]


def test_the_schema_knows_every_column() -> None:
    kinds: dict[str, type[Record]] = {
        "path_row": PathRow,
        "cause_row": CauseRow,
        "transport_row": TransportRow,
        "communicator_row": CommunicatorRow,
        "member_row": MemberRow,
    }
    for name, kind in kinds.items():
        assert list(SCHEMA["$defs"][name]["properties"]) == list(kind.columns())
        assert SCHEMA["$defs"][name]["required"] == list(kind.columns())
    assert set(SECTIONS) <= set(SCHEMA["properties"])


@pytest.mark.parametrize(
    ("section", "lines"),
    [(None, 4), ("paths", 4), ("causes", 1), ("transports", 1), ("communicators", 1), ("members", 4), ("findings", 1)],
)
def test_csv_shows_a_section(section: str | None, lines: int) -> None:
    chosen = [] if section is None else ["--section", section]
    result = gpubench("explain", str(LOGS / "h200x4-p2p-disabled"), "--format", "csv", *chosen)
    assert result.returncode == 1
    found = list(csv.DictReader(io.StringIO(result.stdout)))
    assert len(found) == lines
    if section in (None, "paths"):
        assert found[0]["transport"] == "SHM/direct"
        assert found[0]["host_staged"] == "true"
        assert found[0]["transport_received"] == ""


def test_outputs_beside_the_table(tmp_path: Path) -> None:
    outputs = [argument for suffix in ("json", "csv", "jsonl", "txt") for argument in ("--output", f"r.{suffix}")]
    result = gpubench("explain", str(LOGS / "h200x4-normal"), *outputs, cwd=tmp_path)
    assert result.returncode == 0
    validate(json.loads((tmp_path / "r.json").read_text()))
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 5
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert kinds == ["metadata", *["paths"] * 4, "transports", "communicators", *["members"] * 4, "report"]
    assert "PASS: " in (tmp_path / "r.txt").read_text()


def test_a_pipe_of_all_ranks() -> None:
    logs = b"".join(path.read_bytes() for path in sorted((LOGS / "h200x4-p2p-disabled").iterdir()))
    result = subprocess.run(
        [sys.executable, "-m", "gpubench", "explain", "-"],
        input=logs,
        capture_output=True,
        timeout=SECONDS,
        check=False,
        env=environment(PYTHONPATH=str(ROOT)),
    )
    assert result.returncode == 1
    assert b"standard input: 1 file" in result.stdout
    compressed = CliRunner().invoke(app, ["explain", "-"], input=gzip.compress(logs))
    assert compressed.exit_code == 1
    assert "standard input: 1 file" in compressed.stdout


def test_ranks_that_are_missing(tmp_path: Path) -> None:
    log = str(LOGS / "h200x4-normal" / "normal.4310.log")
    result = gpubench("explain", log)
    assert result.returncode == 0
    assert "WARN ranks-missing" in result.stdout
    assert "no log of rank 1-3" in result.stdout
    assert gpubench("explain", log, "--strict").returncode == 1
    assert gpubench("explain", log, "--exit-style", "nagios").stdout.startswith(
        "GPUBENCH EXPLAIN (RECORDED) WARNING - "
    )


def test_a_part_of_a_log_passes_no_gate(tmp_path: Path) -> None:
    lines = (LOGS / "h200x4-normal" / "normal.4310.log").read_text().splitlines(keepends=True)
    part = tmp_path / "part.log"
    part.write_text("".join(line for line in lines if " via " in line))
    result = gpubench("explain", str(part))
    assert result.returncode == 0
    assert "PASS: " in result.stdout.splitlines()[-1]
    assert "SKIP excerpt" in result.stdout
    assert gpubench("explain", str(part), "--strict").returncode == 3
    assert gpubench("explain", str(part), "--exit-style", "nagios").stdout.startswith(
        "GPUBENCH EXPLAIN (RECORDED) UNKNOWN - 1 pair in this part of a log"
    )


def test_by_design_is_no_failure(tmp_path: Path) -> None:
    paths = "GPU/1a000 :GPU/1a000 (0/5000.0/LOC) GPU/1b000 (4/24.0/PHB) "
    job = Job(
        ranks=2,
        via=lambda a, b, r: between(a, b, r, inside="SHM/direct", across=""),
        notes=[paths, "GPU/1b000 :GPU/1a000 (4/24.0/PHB) GPU/1b000 (0/5000.0/LOC) "],
    )
    result = gpubench("explain", written(tmp_path, job))
    assert result.returncode == 0
    assert "SKIP host-staged" in result.stdout
    assert "by design" in result.stdout
    assert "through host memory: 2 of 2 paths, 2 of them by design" in result.stdout


@pytest.mark.parametrize("content", [b"", b"loss 0.5\n" * 50, bytes(range(256)) * 400], ids=["empty", "text", "junk"])
def test_a_file_that_is_no_log_says_how_to_get_one(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "job.log").write_bytes(content)
    result = gpubench("explain", str(tmp_path / "job.log"), "--width", "80")
    assert result.returncode == 3
    assert "ERROR no-connections" in result.stdout
    assert "NCCL_DEBUG=INFO" in result.stdout
    assert "Traceback" not in result.stderr
    document = json.loads(gpubench("explain", str(tmp_path / "job.log"), "--format", "json").stdout)
    validate(document)
    assert document["verdict"] == "ERROR"


def test_what_cannot_be_read_is_one_clear_message(tmp_path: Path) -> None:
    result = gpubench("explain", "missing.log")
    assert (result.returncode, result.stdout) == (2, "")
    assert "missing.log does not exist" in result.stderr
    assert "Traceback" not in result.stderr
    assert gpubench("explain").returncode == 2


def test_a_gzip_that_was_cut_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    logs = b"".join(path.read_bytes() for path in sorted((LOGS / "h200x4-normal").iterdir()))
    (tmp_path / "cut.log.gz").write_bytes(gzip.compress(logs + b"loss 0.5 0123456789\n" * 999)[:-40])
    result = gpubench("explain", str(tmp_path / "cut.log.gz"))
    assert result.returncode == 0
    assert "WARN log-cut-off" in result.stdout
    assert "4 pairs of 1 communicator" not in result.stderr


def test_a_job_of_a_thousand_ranks_is_a_page(tmp_path: Path) -> None:
    hosts = [f"node{number:03}" for number in range(128)]
    job = Job(
        ranks=1024,
        per_node=8,
        hosts=hosts,
        notes=["NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>"],
        via=lambda a, b, r: between(a, b, r, inside="P2P/CUMEM", across="NET/Socket/0", ranks_per_node=8),
    )
    (tmp_path / "all.log").write_text("".join(job.logs()))
    result = gpubench("explain", str(tmp_path / "all.log"), "--width", "80")
    assert result.returncode == 1
    assert len(result.stdout.splitlines()) < 30
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80
    assert "1,024 ranks on node000-127" in result.stdout
    assert "sockets between nodes, although the log lists RDMA devices" in result.stdout.replace("\n            ", " ")


def test_options() -> None:
    given = {"logs": ["a", "b"]}
    assert plan_from(ExplainPlan, given).logs == ["a", "b"]
    with pytest.raises(UsageError, match="--section"):
        plan_from(Presentation, {"section": "pairs", "format": "csv"}).checked(SECTIONS)
