"""Files that other tools, or an earlier run, wrote about a machine. A new kind is one file and one line here."""

from dataclasses import replace
from pathlib import Path

from gpubench.model.facts.snapshot import Snapshot
from gpubench.readers.documents.file_kind import FileKind, read_file_of
from gpubench.readers.documents.text_files import Wanted
from gpubench.readers.machines import limits

READERS: tuple[FileKind[Snapshot], ...] = (
    FileKind("gpubench.readers.machines.nccl_topology", "NCCL's topology XML"),
    FileKind("gpubench.readers.machines.snapshot", "a snapshot that gpubench recorded"),
    FileKind("gpubench.readers.machines.topo_matrix", "the text of nvidia-smi topo -m"),
)

_WANTED = Wanted(
    kinds=", or ".join(each.summary for each in READERS),
    how_to_make_one="nvidia-smi topo -m > topo.txt, or NCCL_TOPO_DUMP_FILE=topo.xml set for any NCCL program",
    most_bytes=limits.MOST_BYTES,
    example="topo.txt",
)


def read_file(path: Path) -> Snapshot:
    """The machine that a file describes; named after the file where its text names no host.

    Raises UsageError where there is no such text, none of READERS knows it, or the one that does finds it wrong.
    """
    snapshot = read_file_of(READERS, path, _WANTED)
    return snapshot if snapshot.host else replace(snapshot, host=path.stem)
