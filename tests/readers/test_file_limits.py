"""Machines, recordings, results and profiles beyond the limits of what is read: refused, with the limit named."""

import json
import os
from itertools import permutations
from pathlib import Path

import pytest

from gpubench import profiles as profile_limits
from gpubench.errors import UsageError
from gpubench.machine.process import read_rank_facts
from gpubench.machine.recorded import read_recording, read_samples, write_recording
from gpubench.model.facts.snapshot import GpuFacts, PairFacts, Snapshot
from gpubench.model.terms.verdict import Origin
from gpubench.profiles import folder, read_file, read_profile, user_profiles
from gpubench.readers import limits as document_limits
from gpubench.readers import limits as machine_limits
from gpubench.readers import limits as result_limits
from gpubench.readers.documents import load_json
from gpubench.readers.registry import read_file as read_machine
from gpubench.readers.registry import read_results
from tests.cli.running import ROOT

NODES = [
    Snapshot(
        host=f"n{n}",
        origin=Origin.SIMULATED,
        source="a test",
        gpus=tuple(GpuFacts(index=index, bus_id=f"0000:0{index}:00.0") for index in range(4)),
        pairs=tuple(
            PairFacts(source=f"GPU{one}", destination=f"GPU{other}") for one, other in permutations(range(4), 2)
        ),
    )
    for n in range(3)
]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    write_recording(tmp_path, NODES, [read_rank_facts(rank, 0, 0, {}) for rank in range(3)])
    (tmp_path / "p2p.jsonl").write_text("{}\n{}\n{}")
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("MOST_NODES", "has more than 2 nodes"),
        ("MOST_MACHINE_PAIRS", "snapshot.pairs has 12 entries"),
        ("MOST_NODE_BYTES", "n0.json has more than 0 MiB"),
        ("MOST_NODES_BYTES", "have more than 0 MiB"),
        ("MOST_RECORDED_RANKS", "has more than 2 lines"),
        ("MOST_RANKS_BYTES", "ranks.jsonl has more than 0 MiB"),
    ],
)
def test_a_recording_is_read_within_limits(
    limit: str, said: str, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(read_recording(recording)[0]) == 3
    monkeypatch.setattr(machine_limits, limit, 2)
    with pytest.raises(UsageError, match=said):
        read_recording(recording)


def test_samples_are_read_within_limits(recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [line for line, _ in read_samples(recording, "p2p.jsonl", "p2p")] == ["{}", "{}"]
    monkeypatch.setattr(machine_limits, "MOST_SAMPLES", 1)
    with pytest.raises(UsageError, match="has more than 1 lines"):
        read_samples(recording, "p2p.jsonl", "p2p")


@pytest.mark.parametrize("place", ["nodes/n1.json", "ranks.jsonl"])
def test_a_pipe_in_a_recording_is_not_waited_for(place: str, recording: Path) -> None:
    (recording / place).unlink()
    os.mkfifo(recording / place)
    with pytest.raises(UsageError, match=rf"{place} is a pipe, not a file"):
        read_recording(recording)


def test_a_line_of_a_matrix_that_is_too_long_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("nvidia-smi\n" + "GPU0 " * 2000)
    with pytest.raises(UsageError, match="line 2: 10000 characters, but gpubench reads at most 8192"):
        read_machine(tmp_path / "a.txt")


def test_xml_of_too_many_elements_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_limits, "MOST_ELEMENTS", 2)
    (tmp_path / "a.xml").write_text("<system>\n<cpu/>\n<cpu/></system>")
    with pytest.raises(UsageError, match="line 3: <cpu>: the file has more than 2 elements"):
        read_machine(tmp_path / "a.xml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 65 + "]" * 65, "nested more than 64 deep"),
        ("[" * 200_000, "nested more than 64 deep"),
        ("-" + "1" * 41, "a number of 42 digits"),
        ("[" + "[]," * 3_000_000 + "[]]", "MiB of values in memory"),
    ],
    ids=["deep", "deeper", "long", "many"],
)
def test_json_is_read_within_limits(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_json(text)


def test_json_within_the_limits_is_read() -> None:
    assert load_json("-" + "1" * 40) == -int("1" * 40)
    assert json.dumps(load_json("[" * 64 + "]" * 64)) == "[" * 64 + "]" * 64


@pytest.mark.parametrize(
    ("limit", "source", "said"),
    [
        ("MOST_RESULT_LINES", "all_reduce.txt", r"all_reduce.txt has \d+ lines"),
        ("MOST_ROWS", "all_reduce.txt", r"all_reduce.txt has \d+ rows"),
        ("MOST_RESULT_RANKS", "all_reduce.txt", "a run with 4 ranks"),
    ],
)
def test_results_are_read_within_limits(limit: str, source: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "tests" / "results" / "h200x4" / source
    assert read_results(path).rows
    monkeypatch.setattr(result_limits, limit, 2)
    with pytest.raises(UsageError, match=said):
        read_results(path)


@pytest.mark.parametrize(("limit", "said"), [("MOST_COLUMNS", "has 3 columns"), ("MOST_CELLS", "has 4 cells")])
def test_csv_is_read_within_limits(limit: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_limits, limit, 2)
    (tmp_path / "a.csv").write_text("collective,backend,ranks\n1\n")
    with pytest.raises(UsageError, match=said):
        read_results(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = " + "[" * 17 + "]" * 17, "nested more than 16 deep"),
        ("a = " + "[" * 9000, "nested more than 16 deep"),
        (".".join("a" * 17) + " = 1", "a key of more than 16 parts"),
        ("[" + ".".join("a" * 17) + "]", "a key of more than 16 parts"),
        ("a = " + "9" * 5000, "digits"),
    ],
    ids=["deep", "deeper", "key", "table", "digits"],
)
def test_profiles_nest_no_deeper_than_they_do(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_profile(text.encode(), "mine.toml")


def test_profiles_are_small_regular_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large.toml").write_bytes(b"#" * (profile_limits.MOST_BYTES + 1))
    os.mkfifo(tmp_path / "pipe.toml")
    for name, said in (("large", "but gpubench reads at most 256 KiB"), ("pipe", "not a file")):
        with pytest.raises(UsageError, match=said):
            read_file(tmp_path / f"{name}.toml")
    monkeypatch.setattr(profile_limits, "MOST_FILES", 1)
    with pytest.raises(UsageError, match="has more than 1 profiles"):
        user_profiles({"GPUBENCH_PROFILES": str(tmp_path)})
    assert max(path.stat().st_size for path in folder().glob("*.toml")) * 10 < profile_limits.MOST_BYTES
