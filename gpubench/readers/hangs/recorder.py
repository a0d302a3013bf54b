"""A dump of PyTorch's Flight Recorder, as JSON or pickle. Nothing in a pickle is executed: it may hold plain data only.

The form is that of versions 2.x of the dump (torch/csrc/distributed/c10d/FlightRecorder.hpp).
"""

import io
import json
import pickle
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gpubench.errors import UsageError
from gpubench.model.paths.hang import RankRecord, RecordedCall
from gpubench.readers.documents import load_json

_PICKLE = b"\x80"
_DAMAGED = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
)
"""What a pickle that was cut off or made up raises, and a dictionary of another form."""

_WORDS = (b'"pg_config"', b'"pg_status"', b'"entries"')
_EXPECTED = "a dump of PyTorch's Flight Recorder, as TORCH_NCCL_DUMP_ON_TIMEOUT=1 writes one for every rank"
_RANK = re.compile(r"(\d{1,7})(?:\.\w+)*$")
_LIBRARIES = ("-packages/torch/", "/torch/distributed/")
_PREFIX = re.compile(r"^[\w-]{1,20}:")


def recognises(beginning: bytes) -> bool:
    """True if a file begins as a pickle does, or as JSON with the words of a dump."""
    text = beginning.lstrip()
    return beginning.startswith(_PICKLE) or (text.startswith(b"{") and any(word in text for word in _WORDS))


class _PlainData(pickle.Unpickler):
    """Reads dictionaries, lists, numbers and text, and refuses whatever else a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is no plain data")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"it refers to {str(pid)[:40]!r} outside of it")


def read(data: bytes, name: str) -> RankRecord:
    """The record in a dump. Its rank is the number at the end of the name of the file.

    Raises UsageError where it holds anything but plain data, is damaged, or is no dump.
    """
    found = _RANK.search(name)
    try:
        plain = not data.startswith(_PICKLE)
        dump = load_json(data.decode("utf-8")) if plain else _PlainData(io.BytesIO(data)).load()
        if found is None:
            raise ValueError("its name does not end with the number of a rank")
        return _record(int(found[1]), dump)
    except _DAMAGED as error:
        raise UsageError(
            f"{name} is no dump that can be read: {str(error) or type(error).__name__}",
            expected=_EXPECTED,
            reason="a file that was cut off, of another kind, or made to run code in who reads it",
            next_step="ls -l. Give the files as PyTorch wrote them, with the rank at the end of their names",
        ) from None


def _record(rank: int, dump: Mapping[str, Any]) -> RankRecord:
    groups = {}
    for key, config in dump.get("pg_config", {}).items():
        ranks = config.get("ranks", [])
        listed = json.loads(ranks) if isinstance(ranks, str) and ranks else ranks
        if listed:
            groups[str(key)] = tuple(int(each) for each in listed)
    entries = list(dump.get("entries", ()))
    unfinished = sum(1 for each in entries if each.get("is_p2p") and not _is_done(each))
    return RankRecord(rank, tuple(_calls(entries)), groups, unfinished)


def _is_done(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _calls(entries: list[Any]) -> Iterator[RecordedCall]:
    for each in entries:
        if each.get("is_p2p"):
            continue
        group, _ = each["process_group"]
        yield RecordedCall(
            group=str(group),
            sequence=int(each["collective_seq_id"]),
            operation=_PREFIX.sub("", str(each["profiling_name"])),
            sizes=tuple(tuple(int(side) for side in size) for size in each.get("input_sizes", ())),
            types=tuple(str(kind) for kind in each.get("input_dtypes", ())),
            done=_is_done(each),
            called_ns=int(each.get("time_created_ns") or 0),
            place=_place(each.get("frames", ())),
        )


def _place(frames: Any) -> str:
    """The innermost line that is not PyTorch's own."""
    for frame in frames:
        file = str(frame["filename"])
        if not any(library in file for library in _LIBRARIES):
            return f"{file}:{int(frame['line'])} ({frame['name']})"
    return ""
