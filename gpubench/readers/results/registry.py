"""Files of results, of gpubench's own and of other programs. A new kind is one file and one line here."""

from pathlib import Path

from gpubench.errors import advising
from gpubench.model.results.result_file import ResultFile
from gpubench.readers.documents.file_kind import FileKind, read_file_of
from gpubench.readers.documents.text_files import Wanted

RESULT_READERS: tuple[FileKind[ResultFile], ...] = (
    FileKind("gpubench.readers.results.gpubench_json", "gpubench's JSON, or its JSON Lines"),
    FileKind("gpubench.readers.results.gpubench_csv", "its CSV"),
    FileKind("gpubench.readers.results.nccl_tests.json", "nccl-tests' JSON", takes=("collective",)),
    FileKind("gpubench.readers.results.nccl_tests.text", "nccl-tests' text", takes=("collective",)),
    FileKind("gpubench.readers.results.osu", "OSU's text of a collective, or of osu_bw"),
)

MOST_BYTES = 256 * 2**20
"""nccl-tests' JSON with -I holds every iteration of every process: 1,000 of 1,024 at 30 sizes are 500 MB as text, which
nobody compares; 64 processes' are 30 MB."""

_WANTED = Wanted(
    kinds=", or ".join(each.summary for each in RESULT_READERS),
    how_to_make_one="gpubench allreduce --output base.json, or all_reduce_perf -b 8 -e 4G -f 2 -g 8 > base.txt",
    most_bytes=MOST_BYTES,
    example="results.txt",
)


def read_results(path: Path, collective: str | None = None) -> ResultFile:
    """The rows of a file; `collective` is what a person says of rows that do not name theirs.

    Raises UsageError where there is no such file, no reader knows it, or the one that does finds it wrong.
    """
    with advising(reason="the file was cut off, or edited by hand", next_step="the same command again, with --output"):
        return read_file_of(RESULT_READERS, path, _WANTED, collective=collective)
