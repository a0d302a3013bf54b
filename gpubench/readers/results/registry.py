"""Files of results, of gpubench's own and of nccl-tests. A new kind is one file and one line here."""

from pathlib import Path

from gpubench.errors import advising
from gpubench.model.results.result_file import ResultFile
from gpubench.readers.documents.text_files import Wanted, read_text
from gpubench.readers.results.gpubench_csv import is_gpubench_csv, read_gpubench_csv
from gpubench.readers.results.gpubench_json import (
    is_gpubench_json,
    is_gpubench_jsonl,
    read_gpubench_json,
    read_gpubench_jsonl,
)
from gpubench.readers.results.nccl_tests.json import is_nccl_tests_json, read_nccl_tests_json
from gpubench.readers.results.nccl_tests.text import is_nccl_tests, read_nccl_tests
from gpubench.readers.results.result_reader import ResultReader

RESULT_READERS: tuple[ResultReader, ...] = (
    ResultReader("gpubench_json", "gpubench's JSON", is_gpubench_json, read_gpubench_json),
    ResultReader("gpubench_json", "its JSON Lines", is_gpubench_jsonl, read_gpubench_jsonl),
    ResultReader("gpubench_csv", "its CSV", is_gpubench_csv, read_gpubench_csv),
    ResultReader("nccl_tests", "nccl-tests' JSON", is_nccl_tests_json, read_nccl_tests_json),
    ResultReader("nccl_tests", "nccl-tests' text", is_nccl_tests, read_nccl_tests),
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


def read_results(path: Path) -> ResultFile:
    """The rows of a file, whichever of RESULT_READERS reads it.

    Raises:
        UsageError: there is no such file, none of RESULT_READERS knows it, or the one that does finds it wrong.
    """
    text, name = read_text(path, _WANTED), str(path)
    reader = next((each for each in RESULT_READERS if each.recognises(text)), None)
    if reader is None:
        raise _WANTED.unknown(text, name)
    with advising(reason="the file was cut off, or edited by hand", next_step="the same command again, with --output"):
        return reader.read(text, name)
