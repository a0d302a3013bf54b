"""NCCL's logs as they lie on disks."""

import bz2
import gzip
import io
import lzma
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpubench.errors import WRONG_USAGE, GpubenchError, UsageError
from gpubench.readers.nccl_log.files import LogFile, read_logs
from gpubench.readers.nccl_log.stream import NcclLogReader
from tests.fakes.nccl_logs import Job

LOGS = [log.encode() for log in Job(ranks=2).logs()]
LINES = [log.count(b"\n") for log in LOGS]


def read(names: Sequence[object], stdin: bytes = b"") -> tuple[NcclLogReader, tuple[LogFile, ...]]:
    reader = NcclLogReader()
    files = read_logs([str(name) for name in names], reader, io.BytesIO(stdin))
    return reader, files


def pairs(reader: NcclLogReader) -> int:
    return sum(len(found) for each in reader.facts().communicators for _, found in each.connections.routes_by_source())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank, log in enumerate(LOGS):
        (tmp_path / f"nccl.{rank}.log").write_bytes(log)
    return tmp_path


def test_a_file_that_is_named_twice_is_read_once(folder: Path) -> None:
    (folder / "link.log").symlink_to(folder / "nccl.0.log")
    reader, files = read([folder / "nccl.0.log", folder, folder / "link.log"])
    assert len(files) == 2
    assert reader.lines == sum(LINES)


def test_standard_input() -> None:
    reader, files = read(["-", "-"], b"".join(LOGS))
    assert files == (LogFile("-", sum(LINES)),)
    assert pairs(reader) == 2
    assert pairs(read(["-"], gzip.compress(b"".join(LOGS)))[0]) == 2


@pytest.mark.parametrize("zeros", [0, 20, 5000])
@pytest.mark.parametrize("members", [[b"".join(LOGS)], LOGS, [*LOGS, b""]], ids=["one", "two", "an empty one"])
def test_whole_gzips_are_not_damaged(folder: Path, members: Sequence[bytes], zeros: int) -> None:
    packed = folder / "all.log"
    packed.write_bytes(b"".join(gzip.compress(member) + bytes(zeros) for member in members))
    reader, files = read([packed])
    assert (pairs(reader), files) == (2, (LogFile(str(packed), sum(LINES)),))
    assert not read(["-"], packed.read_bytes())[1][0].is_damaged


@pytest.mark.parametrize("damage", ["cut", "changed", "followed"])
def test_a_damaged_gzip_is_read_as_far_as_it_goes(folder: Path, damage: str) -> None:
    packed = bytearray(gzip.compress(b"".join(LOGS) * 500))
    whole = len(packed)
    if damage == "cut":
        del packed[whole // 2 :]
    elif damage == "changed":
        packed[whole // 2 : whole // 2 + 40] = bytes(40)
    else:
        packed += b"junk"
    (folder / "all.log.gz").write_bytes(bytes(packed))
    reader, (file,) = read([folder / "all.log.gz"])
    assert file.is_damaged
    assert 0 < file.nccl_lines == reader.nccl_lines <= 500 * sum(LINES)
    assert (damage == "followed") == (reader.nccl_lines == 500 * sum(LINES))


@pytest.mark.parametrize(
    ("content", "command"),
    [
        (lzma.compress(LOGS[0]), "xz -dc"),
        (bz2.compress(LOGS[0]), "bzip2 -dc"),
        (b"\x28\xb5\x2f\xfd1234", "zstd -dc"),
        (LOGS[0].decode().encode("utf-16"), "iconv -f UTF-16"),
    ],
)
def test_what_is_packed_in_another_way_says_how_to_unpack_it(tmp_path: Path, content: bytes, command: str) -> None:
    (tmp_path / "a.log").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read([tmp_path / "a.log"])
    assert caught.value.next_step.startswith(command)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read([tmp_path / "missing.log"])
    with pytest.raises(UsageError, match=r"cannot be read: .*embedded null"):
        read(["a\0b"])
    with pytest.raises(UsageError, match="name of a log is empty"):
        read([""])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"folder without files\n"):
        read([tmp_path / "empty"])
    (tmp_path / "empty" / "logs").mkdir()
    with pytest.raises(UsageError, match="without files, but with folders in it"):
        read([tmp_path / "empty"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(folder: Path) -> None:
    (folder / "nccl.0.log").chmod(0)
    with pytest.raises(UsageError, match="Permission denied"):
        read([folder])


def test_a_file_whose_disk_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(NcclLogReader, "read", fail)
    with pytest.raises(GpubenchError, match="cannot be read: Input/output error") as caught:
        read([folder])
    assert caught.value.exit_code == WRONG_USAGE


def test_what_tells_no_size_is_read_with_a_total_that_grows() -> None:
    told: list[tuple[int, int, str]] = []
    text = io.BytesIO(b"x" * 3000 + b"\n")
    read_logs(["-"], NcclLogReader(), text, lambda *each: told.append(each))
    assert told[-1][:2] == (3001, 3001)
