"""Files of results, of gpubench's own and of other programs. A new kind is one file and one line here."""

from pathlib import Path

from gpubench.errors import UsageError, advising
from gpubench.model.results.result_file import NOTHING_TOLD, ResultFile, Told
from gpubench.readers.documents.file_kind import FileKind, read_text_of
from gpubench.readers.documents.text_files import Wanted, read_text
from gpubench.readers.results import limits

RESULT_READERS: tuple[FileKind[ResultFile], ...] = (
    FileKind("gpubench.readers.results.gpubench_json", "gpubench's JSON, or its JSON Lines"),
    FileKind("gpubench.readers.results.gpubench_csv", "its CSV"),
    FileKind("gpubench.readers.results.nccl_tests.json", "nccl-tests' JSON", takes=("told",)),
    FileKind("gpubench.readers.results.nccl_tests.text", "nccl-tests' text", takes=("told",)),
    FileKind("gpubench.readers.results.nvbandwidth", "nvbandwidth's text or JSON"),
    FileKind("gpubench.readers.results.osu", "OSU's text of a collective, or of osu_bw", takes=("told",)),
)

_LOOKED_AT_BYTES = 2**18
"""Of a file whose kind is asked for: a table stands at its beginning."""

WANTED = Wanted(
    kinds=", or ".join(each.summary for each in RESULT_READERS),
    how_to_make_one="gpubench allreduce --output base.json, or all_reduce_perf -b 8 -e 4G -f 2 -g 8 > base.txt",
    most_bytes=limits.MOST_BYTES,
    example="results.txt",
)


def read_results(path: Path, told: Told = NOTHING_TOLD) -> ResultFile:
    """The rows of a file; `told` is what a person says of rows that do not say it.

    Raises UsageError where there is no such file, no reader knows it, or the one that does finds it wrong.
    """
    return results_in(read_text(path, WANTED), str(path), told)


def results_in(text: str, name: str, told: Told = NOTHING_TOLD) -> ResultFile:
    """The rows of a text that was read already; raises as `read_results`."""
    with advising(reason="the file was cut off, or edited by hand", next_step="the same command again, with --output"):
        file = read_text_of(RESULT_READERS, text, name, WANTED, told=told)
        count = len(file.measured)
        if count > limits.MOST_ROWS:
            raise UsageError(
                f"{name} has {count} rows",
                expected=f"at most {limits.MOST_ROWS}",
                reason="it is many runs in one, or was made to hold up who reads it",
                next_step="a file a run",
            )
        return file


def is_result(path: Path) -> bool:
    """True of a file that begins as one of results does; of what cannot be read, or read twice, it is false."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            text = file.read(_LOOKED_AT_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return False
    return any(kind.recognises(text) for kind in RESULT_READERS)
