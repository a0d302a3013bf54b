import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.machine.process import read_rank_facts
from gpubench.machine.recorded import check_recordable, read_recording, write_recording
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.terms.verdict import Origin
from gpubench.readers import limits

NODE = Snapshot(host="node1", origin=Origin.SIMULATED, source="a test")


def test_looking_whether_a_folder_can_be_written_leaves_nothing(tmp_path: Path) -> None:
    check_recordable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").write_text("kept")
    check_recordable(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_empty_folder_of_nodes_is_none(tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    check_recordable(tmp_path)
    assert (tmp_path / "nodes").is_dir()
    write_recording(tmp_path, [NODE], [])
    with pytest.raises(UsageError, match="already has a recording"):
        check_recordable(tmp_path)
    assert read_recording(tmp_path)[0] == [NODE]


@pytest.mark.parametrize("inner", [".", "deep/er"])
def test_a_folder_in_a_file_cannot_be_written(tmp_path: Path, inner: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written: Not a directory"):
        check_recordable(tmp_path / "file" / inner)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_recording_is_read_up_to_a_size(tmp_path: Path) -> None:
    write_recording(tmp_path, [NODE], [])
    with (tmp_path / "nodes" / "node1.json").open("ab") as file:
        file.truncate(limits.MOST_NODE_BYTES + 1)
    with pytest.raises(UsageError, match=r"node1\.json has more than 16 MiB"):
        read_recording(tmp_path)


def test_half_characters_in_a_rank_are_refused(tmp_path: Path) -> None:
    rank = replace(read_rank_facts(0, 0, 0, {}), host="node1")
    write_recording(tmp_path, [NODE], [rank])
    assert read_recording(tmp_path)[1] == [rank]
    line = json.loads((tmp_path / "ranks.jsonl").read_text())
    (tmp_path / "ranks.jsonl").write_text(json.dumps(line | {"environment": {"NCCL_ALGO": "\ud800"}}))
    with pytest.raises(UsageError, match=r"line 1: no JSON \(a lone surrogate in"):
        read_recording(tmp_path)


def test_texts_of_a_rank_that_cannot_be_shown_are_refused(tmp_path: Path) -> None:
    rank = replace(read_rank_facts(0, 0, 0, {}), nccl_files={"/etc/nccl.conf": {"NCCL_ALGO": "\x1b[2J"}})
    write_recording(tmp_path, [NODE], [rank])
    with pytest.raises(UsageError, match=r"ranks.jsonl, line 1: nccl_files\./etc/nccl\.conf\.NCCL_ALGO is '\\x1b\[2J'"):
        read_recording(tmp_path)
