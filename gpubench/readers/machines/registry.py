"""Files that other tools, or an earlier run, wrote about a machine. A new kind is one file and one line here."""

from dataclasses import replace
from pathlib import Path

from gpubench.model.facts.snapshot import Snapshot
from gpubench.readers.documents.text_files import Wanted, read_text
from gpubench.readers.machines.nccl_topology import is_nccl_topology, read_nccl_topology
from gpubench.readers.machines.reader import Reader
from gpubench.readers.machines.snapshot import is_recording, read_snapshot
from gpubench.readers.machines.topo_matrix import is_topo_matrix, read_topo_matrix

READERS: tuple[Reader, ...] = (
    Reader("nccl_topology", "NCCL's topology XML", is_nccl_topology, read_nccl_topology),
    Reader("snapshot", "a snapshot that gpubench recorded", is_recording, read_snapshot),
    Reader("topo_matrix", "the text of nvidia-smi topo -m", is_topo_matrix, read_topo_matrix),
)

MOST_BYTES = 4 * 2**20
"""Far more than the description of a node takes: nvidia-smi -q of eight GPUs is below 1 MiB."""

_WANTED = Wanted(
    kinds=", or ".join(each.summary for each in READERS),
    how_to_make_one="nvidia-smi topo -m > topo.txt, or NCCL_TOPO_DUMP_FILE=topo.xml set for any NCCL program",
    most_bytes=MOST_BYTES,
    example="topo.txt",
)


def read_file(path: Path) -> Snapshot:
    """The machine that a file describes, whichever of READERS reads it; named after the file where the text does not.

    Raises:
        UsageError: there is no such file, it is no text, none of READERS knows it, or the one that does finds it wrong.
    """
    text, name = read_text(path, _WANTED), str(path)
    reader = next((each for each in READERS if each.recognises(text)), None)
    if reader is None:
        raise _WANTED.unknown(text, name)
    snapshot = reader.read(text, name)
    return snapshot if snapshot.host else replace(snapshot, host=path.stem)
