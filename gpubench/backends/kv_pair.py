"""Two processes that move GPU memory between each other, started, commanded and ended by this one."""

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from gpubench.backends.nixl_agent import HOST_BUFFER
from gpubench.errors import CouldNotMeasureError
from gpubench.model.paths.p2p import Pair
from gpubench.model.paths.ucx import Allocation, is_gpu_memory
from gpubench.model.terms.operation import CopyGpu, Direction
from gpubench.ports.transfers import Moved, OpenTransfers, ProcessEnd, TransferCase
from gpubench.readers.ucx_log import read_tables

_STARTING_SECONDS = 60.0  # Importing CuPy and creating a CUDA context takes 2 s, and much longer on a busy machine
_SAMPLING_SECONDS = 0.1
_LAST_LINES = 3
_MOST_SHOWN = 100  # Characters of an answer that cannot be parsed
_OWN_SETTINGS = {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": ""}
_RELEVANT = ("UCX_", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "NIXL_")
_OPERATIONS = {Direction.WRITE: "ucp_put", Direction.READ: "ucp_get"}


class TransferProcess:
    """A child process that runs `gpubench.backends.kv_worker`. Its messages and UCX's tables go to the file `log`."""

    def __init__(self, log: Path, environment: Mapping[str, str], prefix: Sequence[str] = ()) -> None:
        self._log = log
        with log.open("wb") as messages:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "gpubench.backends.kv_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                env={**os.environ, **environment},
                start_new_session=True,
                bufsize=0,  # So that closing the pipe to a dead process has nothing left to write
            )
        self._held = b""

    def ask(self, timeout_s: float, do: str, **arguments: Any) -> Any:
        """Send a command and return its answer.

        Raises CouldNotMeasureError if the command fails, the process ends, or no answer comes in time.
        """
        self.send(do, **arguments)
        return self.answer(timeout_s, do)

    def send(self, do: str, **arguments: Any) -> None:
        """Send a command without waiting for the answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        except BrokenPipeError as error:
            raise self._ended(do) from error

    def answer(self, timeout_s: float, do: str) -> Any:
        """Return the answer to the last command."""
        line = self._line(timeout_s, do)
        try:
            answer: dict[str, Any] = json.loads(line)
            if "error" not in answer:
                return answer["value"]
        except (ValueError, TypeError, KeyError) as error:
            shown = line.decode(errors="replace")[:_MOST_SHOWN]
            raise CouldNotMeasureError(f"a process answered {shown!r} to {do}, which is no answer") from error
        raise CouldNotMeasureError(str(answer["error"]))

    def _line(self, timeout_s: float, do: str) -> bytes:
        assert self._process.stdout is not None
        end = monotonic() + timeout_s
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._held:
                left = end - monotonic()
                if left <= 0 or not ready.select(left):
                    raise CouldNotMeasureError(
                        f"no answer within {timeout_s:g} s: {do}",
                        reason="the transfer does not complete, or the other process died",
                    )
                read = os.read(self._process.stdout.fileno(), 2**20)
                if not read:
                    raise self._ended(do)
                self._held += read
        line, _, self._held = self._held.partition(b"\n")
        return line

    def _ended(self, do: str) -> CouldNotMeasureError:
        code = self._process.wait()
        said = "; ".join(self.messages().splitlines()[-_LAST_LINES:])
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        return CouldNotMeasureError(f"a process {how} during {do}" + (f": {said}" if said else ""))

    def messages(self) -> str:
        """Return what the process and its libraries printed."""
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        """End the process. Transfers may hang, so it is killed."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class ProcessTransfers:
    """Transfers between two child processes, by UCX or NIXL, between GPUs of this machine."""

    def __init__(
        self,
        backend: str,
        library: Path | None,
        gpus: Sequence[CopyGpu],
        size_bytes: int,
        timeout_s: float,
        *,
        own_gpu_only: bool = False,
        prefix: Sequence[str] = (),
    ) -> None:
        """`size_bytes` is the size of the largest transfer. `prefix` is a command that starts each process."""
        self._backend, self._library, self._gpus = backend, library, gpus
        self._size_bytes, self._timeout_s = size_bytes, timeout_s
        self._own_gpu_only, self._prefix = own_gpu_only, prefix

    @contextmanager
    def open(self, pair: Pair, allocation: Allocation) -> Iterator[OpenTransfers]:
        """Start two processes and connect them. Raises CouldNotMeasureError."""
        with TemporaryDirectory(prefix="gpubench-kv-") as folder, ExitStack() as stack:
            workers = []
            for number, gpu in enumerate(pair):
                own = {"CUDA_VISIBLE_DEVICES": self._gpus[gpu].uuid} if self._own_gpu_only else {}
                log = Path(folder) / f"{number}.log"
                workers.append(TransferProcess(log, {**_OWN_SETTINGS, **own}, self._prefix))
                stack.callback(workers[-1].close)
            for number, (worker, gpu) in enumerate(zip(workers, pair, strict=True)):
                worker.send(
                    "open",
                    backend=self._backend,
                    library=str(self._library or ""),
                    device=0 if self._own_gpu_only else self._gpus[gpu].index,
                    allocation=allocation,
                    size_bytes=self._size_bytes,
                    seed=number + 1,
                )
            facts = [worker.answer(_STARTING_SECONDS, "open") for worker in workers]
            for worker, peer in zip(workers, reversed(facts), strict=True):
                peers = {name: peer[name] for name in ("address", "keys", "buffers")}
                worker.ask(self._timeout_s, "connect", **peers)
            yield _OpenPair(workers, facts, self._timeout_s)


class _OpenPair:
    """Two processes that are connected to each other."""

    def __init__(
        self, workers: Sequence[TransferProcess], facts: Sequence[Mapping[str, Any]], timeout_s: float
    ) -> None:
        self._workers, self._timeout_s = workers, timeout_s
        variables = {name: value for name, value in os.environ.items() if name.startswith(_RELEVANT)}
        first, second = (
            ProcessEnd(
                version=fact["version"],
                ucx_files=tuple(fact["ucx"]),
                exportable=fact["exportable"],
                pid_namespace=fact["pid_namespace"],
                rdma_devices=fact["rdma_devices"],
                variables=variables,
            )
            for fact in facts
        )
        self.ends = first, second

    def clear(self, case: TransferCase, *, backwards: bool) -> None:
        destination = self._workers[0 if backwards else 1]
        destination.ask(self._timeout_s, "clear", to=_buffer(case), size_bytes=case.size_bytes)

    def move(self, case: TransferCase, *, backwards: bool) -> Moved:
        writes = case.direction is Direction.WRITE
        initiator = self._workers[int(backwards is writes)]
        found = initiator.ask(
            self._timeout_s + 2 * _SAMPLING_SECONDS,
            "transfer",
            to=_buffer(case),
            size_bytes=case.size_bytes,
            blocks=case.blocks,
            seconds=_SAMPLING_SECONDS,
            writes=writes,
        )
        tables = [
            table
            for table in read_tables(initiator.messages().splitlines())
            if _OPERATIONS[case.direction] in table.operation
            and is_gpu_memory(table.local)
            and is_gpu_memory(table.remote) is not case.to_host
        ]
        table = tables[-1] if tables else None
        return Moved(
            seconds=tuple(found["seconds"]),
            transfers=found["transfers"],
            chosen=None if table is None else table.at(case.size_bytes // case.blocks),
            local="" if table is None else table.local,
            remote="" if table is None else table.remote,
        )

    def count_wrong(self, case: TransferCase, *, backwards: bool) -> int:
        destination, seed = self._workers[0 if backwards else 1], 2 if backwards else 1
        wrong: int = destination.ask(
            self._timeout_s, "count_wrong", to=_buffer(case), seed=seed, size_bytes=case.size_bytes
        )
        return wrong


def _buffer(case: TransferCase) -> str:
    return HOST_BUFFER if case.to_host else "in"
