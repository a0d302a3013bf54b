"""Files that other tools, or an earlier run, wrote about a machine. A new kind is one file and one line here."""

import codecs
from dataclasses import replace
from pathlib import Path

from gpubench.errors import UsageError
from gpubench.model.snapshot import Snapshot
from gpubench.readers.nccl_topology import is_nccl_topology, read_nccl_topology
from gpubench.readers.reader import Reader
from gpubench.readers.recording import is_recording, read_snapshot
from gpubench.readers.topo_matrix import is_topo_matrix, read_topo_matrix

READERS: tuple[Reader, ...] = (
    Reader("nccl_topology", "NCCL's topology XML", is_nccl_topology, read_nccl_topology),
    Reader("recording", "a snapshot that gpubench recorded", is_recording, read_snapshot),
    Reader("topo_matrix", "the text of nvidia-smi topo -m", is_topo_matrix, read_topo_matrix),
)

MOST_BYTES = 4 * 2**20
"""Far more than the description of a node takes: nvidia-smi -q of eight GPUs is below 1 MiB."""

_KINDS = ", or ".join(each.summary for each in READERS)
_HOW_TO_MAKE_ONE = "nvidia-smi topo -m > topo.txt, or NCCL_TOPO_DUMP_FILE=topo.xml set for any NCCL program"
_OTHER_ENCODINGS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)


def read_file(path: Path) -> Snapshot:
    """The machine that a file describes, whichever of READERS reads it; named after the file where the text does not.

    Raises:
        UsageError: there is no such file, it is no text, none of READERS knows it, or the one that does finds it wrong.
    """
    name = str(path)
    text = _decoded(_bytes_of(path, name), name)
    if not text.strip():
        raise _unfit(f"{name} is empty", reason="the program that should have written it failed, or was not started")
    reader = next((each for each in READERS if each.recognises(text)), None)
    if reader is None:
        first = next(number for number, line in enumerate(text.split("\n"), 1) if line.strip())
        beginning = text.strip().split("\n")[0][:60]
        raise _unfit(
            f"{name}, line {first}: {beginning!r} begins no kind of file that gpubench reads",
            reason="it is another program's output",
        )
    snapshot = reader.read(text, name)
    return snapshot if snapshot.host else replace(snapshot, host=path.stem)


def _unfit(seen: str, *, reason: str, next_step: str = _HOW_TO_MAKE_ONE) -> UsageError:
    return UsageError(seen, expected=_KINDS, reason=reason, next_step=next_step)


def _bytes_of(path: Path, name: str) -> bytes:
    try:
        if path.is_dir():
            raise _unfit(f"{name} is a directory", reason="a file in it was meant", next_step=f"ls {name}")
        size_bytes = path.stat().st_size
        if size_bytes > MOST_BYTES:
            raise _too_large(name, f"{size_bytes / 2**20:.0f} MiB")
        with path.open("rb") as file:
            # A pipe, as `--from <(nvidia-smi topo -m)` gives one, has no size to ask for.
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise _unfit(
            f"{name} does not exist", reason="the path is mistyped, or relative to another directory"
        ) from None
    except (OSError, ValueError) as error:
        detail = getattr(error, "strerror", None) or str(error)
        raise _unfit(
            f"{name} cannot be read: {detail}", reason="its owner or mode forbids it, or its disk fails"
        ) from None
    if len(content) > MOST_BYTES:
        raise _too_large(name, f"more than {MOST_BYTES // 2**20} MiB")
    return content


def _too_large(name: str, size: str) -> UsageError:
    return _unfit(
        f"{name} has {size}, and {MOST_BYTES // 2**20} MiB are the most that is read",
        reason="it is a log or a binary file",
    )


def _decoded(content: bytes, name: str) -> str:
    if content.startswith(_OTHER_ENCODINGS):
        raise _unfit(
            f"{name}, line 1: the text is UTF-16 or UTF-32",
            reason="Windows PowerShell's > writes UTF-16",
            next_step=f"iconv -f UTF-16 -t UTF-8 {name} > topo.txt",
        )
    wrong, what = content.find(b"\0"), "a NUL byte"
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = error.start + (len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0)
        if wrong < 0 or start < wrong:
            wrong, what = start, "bytes that are no UTF-8"
        text = ""
    if wrong < 0:
        return text
    line = content.count(b"\n", 0, wrong) + 1
    raise _unfit(f"{name}, line {line}: {what}", reason="it is a binary or a compressed file, or a damaged one")
