"""NCCL's RAS service: the protocol and answers of src/ras/client_support.cc, as text or JSON, by version."""

import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from msgspec import Struct, field

GONE = "gone"
"""The service closes its port"""

_ERRORS = {1: "Unhandled CUDA error", 6: "Remote process error"}


class FakeRank(Struct, frozen=True):
    """A rank of the fake's only communicator. A silent rank has no counts."""

    number: int
    counts: Mapping[str, int] = field(default_factory=dict)
    status: str = "RUNNING"
    error: int = 0
    silent: bool = False
    dead: bool = False

    @property
    def managed(self) -> str:
        """Return its place as the text names it."""
        return f" -- GPU {self.number} managed by process {self.pid} on node 10.0.0.1"

    @property
    def pid(self) -> int:
        return 100 + self.number


def as_json(ranks: Sequence[FakeRank], id_: str = "0xae", communicators: int = 1) -> str:
    """Format ranks as rasDumpCommsToJSON of NCCL 2.28.9 does: without a comma before the status of a missing rank."""

    def where(each: FakeRank) -> dict[str, object]:
        return {"rank": each.number, "host": "10.0.0.1", "pid": each.pid, "cuda_dev": each.number, "nvml_dev": 0}

    there = [each for each in ranks if not each.silent and each.status != "NOCOMM"]
    missing = [each for each in ranks if each not in there]
    communicator = {
        "hash": id_,
        "secondary_hash": "0x1:0x2",
        "size": len(ranks),
        "ranks_count": len(there),
        "missing_ranks_count": len(missing),
        "ranks": [
            where(each)
            | {
                "status": {
                    "init_state": 0,
                    "async_error": each.error,
                    "finalize_called": each.status == "FINALIZE",
                    "destroy_flag": False,
                    "abort_flag": each.status == "ABORT",
                },
                "collective_counts": each.counts,
            }
            for each in there
        ],
        "missing_ranks": [
            where(each) | {"status": {"unresponsive": each.silent, "considered_dead": each.dead}} for each in missing
        ],
    }
    head = {"nccl_version": "2.28.9", "timestamp": "2026-11-24 12:00:00", "communicators_count": communicators}
    whole = json.dumps(head | {"communicators": [communicator] * communicators, "ras": {"timeouts_count": 0}}, indent=2)
    return re.sub(r',(?=\s+"status": \{\s+"unresponsive")', "", whole) + "\n"


def as_text(ranks: Sequence[FakeRank], version: str = "2.27.7") -> str:
    """Format ranks as rasClientRunComms does for VERBOSE STATUS. NCCL 2.24 counts all operations together."""
    there = [each for each in ranks if not each.silent and each.status != "NOCOMM"]
    lacking = [each for each in ranks if each.silent]
    errors = ["INCOMPLETE"] * bool(lacking) + ["ERROR"] * any(each.error for each in there)
    names = sorted({name for each in there for name in each.counts})
    statuses = Counter(each.status for each in ranks if not each.silent)
    differ = [name for name in names if len({each.counts[name] for each in there}) > 1]
    errors += ["MISMATCH"] * bool(differ or len(statuses) > 1)
    lines = [f"NCCL version {version} compiled with CUDA 12.9", "CUDA runtime version 12090, driver version 12090", ""]
    lines += [
        "Communicators... (0.00s)",
        "=============",
        "",
        "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors",
    ]
    worst = next((each for each in ("ABORT", "FINALIZE", "RUNNING") if each in statuses), "RUNNING")
    sizes = "".join(f"{size:8}  " for size in (len(ranks), len(ranks), len(there)))
    lines += [f"    0         1         1  {sizes}{worst:>8}  {','.join(errors) or 'OK'}"]
    lines += ["", "Errors", "======", ""]
    if dead := [each for each in lacking if each.dead]:
        lines += ["DEAD", f"  {len(dead)} job process is considered dead (unreachable via the RAS network)"]
        lines += [f"  Process {each.pid} on node 10.0.0.1 managing GPU {each.number}" for each in dead] + [""]
    if lacking:
        lines += ["#0-0 (00000000000000ae) INCOMPLETE", f"  Missing communicator data from {len(lacking)} rank"]
        lines += [f"  Rank {each.number}{each.managed}" for each in lacking] + [""]
    if "ERROR" in errors:
        lines += ["#0-0 (00000000000000ae) ERROR", "  Asynchronous error on 1 rank"]
        lines += [f"  Rank {each.number} reported {_ERRORS[each.error]}{each.managed}" for each in there if each.error]
    lines += ["", "Warnings", "========", ""]
    if "MISMATCH" in errors:
        lines += ["#0-0 (00000000000000ae) MISMATCH"]
    if len(statuses) > 1:
        lines += ["  Communicator ranks have different status"]
        of_status = {each.number: each.status for each in ranks if not each.silent}
        lines += _outliers(ranks, of_status, "{} ranks have status {}", " has status {}")
    for name in differ:
        lines += [f"  Communicator ranks have different {name} operation counts"]
        counts = {each.number: each.counts[name] for each in there}
        lines += _outliers(
            ranks, counts, "{} ranks have launched up to operation {}", " has launched up to operation {}"
        )
    none = "have not launched any operations"
    text = "\n".join(lines) + "\n"
    return text.replace("have launched up to operation 0\n", f"{none}\n").replace(
        " has launched up to operation 0 ", " has not launched any operations "
    )


def _outliers(ranks: Sequence[FakeRank], values: Mapping[int, object], several: str, one: str) -> Iterator[str]:
    """Yield each value with its ranks, if they are fewer than half of all."""
    for value, count in Counter(values.values()).most_common():
        if count > 1:
            yield "  " + several.format(count, value)
        if count == 1 or count < len(ranks) / 2:
            for each in ranks:
                if values.get(each.number) == value:
                    yield f"  Rank {each.number}{one.format(value) if count == 1 else ''}{each.managed}"


class _Service:
    """A listener with a thread per connection."""

    def __init__(self, answers: Sequence[str]) -> None:
        self._left = list(answers)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rwb", buffering=0) as stream, suppress(OSError):
            for line in stream:
                if line == b"VERBOSE STATUS\n":
                    stream.write(self._next().encode())
                    return
                is_unknown = line == b"SET FORMAT json\n" and not self._left[0].startswith("{")
                stream.write(b"ERROR: Unknown command SET FORMAT json\n" if is_unknown else b"OK\n")

    def _next(self) -> str:
        answer = self._left[0]
        del self._left[: len(self._left) > 1]
        if self._left[0] == GONE:
            self.close()
        return answer


@contextmanager
def service(answers: Sequence[str]) -> Iterator[str]:
    """Yield the service's address. Every query gets the next answer, and the last one is repeated. GONE closes the
    port.

    A text answer to a JSON query is that of a version before 2.28.7.
    """
    running = _Service(answers)
    try:
        yield running.address
    finally:
        running.close()
