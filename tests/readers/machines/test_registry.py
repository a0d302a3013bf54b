import codecs
import contextlib
import os
import re
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubench.errors import UsageError
from gpubench.model.terms.verdict import Origin
from gpubench.readers.limits import MOST_MACHINE_BYTES
from gpubench.readers.registry import read_file
from tests.examples import examples

MACHINES = Path(__file__).parents[2] / "machines"
MATRIX = b"\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tNV4\t X \n"


def refusal(path: Path) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read_file(path)
    assert caught.value.seen.startswith(str(path))
    assert caught.value.expected
    assert caught.value.reason
    assert caught.value.next_step
    return caught.value


def written(folder: Path, content: bytes) -> Path:
    path = folder / "topo.txt"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("file", "source"), [("h200x4-smi-text/from.txt", "nvidia-smi text"), ("h200x4-nccl-xml/from.xml", "NCCL")]
)
def test_the_content_picks_the_reader_and_the_file_names_the_host(file: str, source: str) -> None:
    snapshot = read_file(MACHINES / file)
    assert snapshot.host == "from"
    assert snapshot.source.startswith(source)
    assert snapshot.origin is Origin.RECORDED
    assert len(snapshot.gpus) == 4


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(MATRIX,))
    writer.start()
    assert len(read_file(path).gpus) == 2
    writer.join()


def test_what_is_no_readable_file_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none").seen == f"{tmp_path}/none does not exist"
    assert refusal(tmp_path).seen == f"{tmp_path} is a directory"
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "cannot be read: " in refusal(loop).seen
    assert re.search("cannot be read: .*embedded null", refusal(Path("a\0b")).seen), "in words of Python's"


def test_a_forbidden_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, MATRIX)

    def forbidden(*_arguments: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", forbidden)
    assert refusal(path).seen == f"{path} cannot be read: Permission denied"


@pytest.mark.parametrize("content", [b"", b" \n\t\n", codecs.BOM_UTF8])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    assert refusal(written(tmp_path, content)).seen == f"{tmp_path}/topo.txt is empty"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"GPU0\nGPU1\0\n", "line 2: a NUL byte"),
        (b"GPU0\n\nGPU1 \xff\n", "line 3: bytes that are not UTF-8"),
        (codecs.BOM_UTF8 + b"\n\xff\0", "line 2: bytes that are not UTF-8"),
        (b"\0\n\xff", "line 1: a NUL byte"),
        (codecs.BOM_UTF16_LE + "GPU0".encode("utf-16-le"), "line 1: the text is UTF-16 or UTF-32"),
        (codecs.BOM_UTF16_BE + "GPU0".encode("utf-16-be"), "line 1: the text is UTF-16 or UTF-32"),
        (codecs.BOM_UTF32_BE + "GPU0".encode("utf-32-be"), "line 1: the text is UTF-16 or UTF-32"),
        (b"\n\nhello world\n", "line 3: 'hello world' is not the start of a file that gpubench can read"),
    ],
)
def test_what_is_no_text_of_ours_is_refused_with_its_line(tmp_path: Path, content: bytes, what: str) -> None:
    assert refusal(written(tmp_path, content)).seen == f"{tmp_path}/topo.txt, {what}"


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(40 * 2**20)
    monkeypatch.delattr(Path, "open")
    assert refusal(path).seen == f"{path} has 40 MiB, but gpubench reads at most 4 MiB"


def test_an_endless_file_is_not_opened() -> None:
    assert refusal(Path("/dev/zero")).seen == "/dev/zero is a device, not a file"
    assert MOST_MACHINE_BYTES == 4 * 2**20


SEEDS = [MATRIX, (MACHINES / "h200x4-nccl-xml" / "from.xml").read_bytes(), b'{"schema_version": 1, "host": "a"}']


@settings(max_examples=examples(40))
@given(
    st.binary()
    | st.tuples(st.sampled_from(SEEDS), st.binary(max_size=4), st.integers(0, 200)).map(
        lambda drawn: drawn[0][: drawn[2]] + drawn[1] + drawn[0][drawn[2] :]
    )
)
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(UsageError):
        read_file(written(Path(folder), content))
