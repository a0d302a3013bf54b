"""Two processes that move GPU memory between each other, started, commanded and ended by this one."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import Pipe
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec.structs import replace

from gpubench.errors import CouldNotMeasureError
from gpubench.model.paths.p2p import Pair
from gpubench.model.paths.ucx import Allocation, is_gpu_memory
from gpubench.model.terms.operation import CopyGpu, Direction
from gpubench.ports.transfers import Moved, OpenTransfers, ProcessEnd, TransferCase
from gpubench.readers.ucx_log import read_tables

_STARTING_SECONDS = 60.0  # Importing CuPy and creating a CUDA context takes 2 s, and much longer on a busy machine
_SAMPLING_SECONDS = 0.1
_LAST_LINES = 3
_FIRST_SEED = 1  # Of the data of the first process. The second one has the next seed.
_OWN_SETTINGS = {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": ""}
_OPERATIONS = {Direction.WRITE: "ucp_put", Direction.READ: "ucp_get"}


class TransferProcess:
    """A child process that runs `gpubench.backends.kv_worker`. Its messages and UCX's tables go to the file `log`."""

    def __init__(self, log: Path, environment: Mapping[str, str], prefix: Sequence[str] = ()) -> None:
        self._log = log
        self._pipe, theirs = Pipe()
        with theirs, log.open("wb") as messages:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "gpubench.backends.kv_worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=messages,
                stderr=messages,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def ask(self, timeout_s: float, do: str, *arguments: Any) -> Any:
        """Send a command and return its answer.

        Raises CouldNotMeasureError if the command fails, the process ends, or no answer comes in time.
        """
        self.send(do, *arguments)
        return self.answer(timeout_s, do)

    def send(self, do: str, *arguments: Any) -> None:
        """Call a method of the worker without waiting for the answer."""
        try:
            self._pipe.send((do, arguments))
        except OSError as error:
            raise self._ended(do) from error

    def answer(self, timeout_s: float, do: str) -> Any:
        """Return the answer to the last command."""
        if not self._pipe.poll(timeout_s):
            raise CouldNotMeasureError(
                f"a process did not answer within {timeout_s:g} s during {do}",
                reason="the transfer does not complete, or the other process died",
            )
        try:
            value, failure = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._ended(do) from error
        if failure:
            raise CouldNotMeasureError(failure)
        return value

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
        if "UCX_LOG_LEVEL" in os.environ:  # Whoever sets it wants to read what UCX says
            sys.stderr.write(self.messages())
        self._pipe.close()


class ProcessTransfers:
    """Transfers between two child processes, by UCX or NIXL, between GPUs of this machine."""

    def __init__(
        self,
        library: Path | None,
        gpus: Sequence[CopyGpu],
        size_bytes: int,
        timeout_s: float,
        *,
        own_gpu_only: bool = False,
        prefix: Sequence[str] = (),
    ) -> None:
        """Use the UCX at `library`, or NIXL if it is None. `size_bytes` is the size of the largest transfer.

        `prefix` is a command that starts each process.
        """
        self._library, self._gpus = library, gpus
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
            for seed, (worker, gpu) in enumerate(zip(workers, pair, strict=True), _FIRST_SEED):
                device = 0 if self._own_gpu_only else self._gpus[gpu].index
                worker.send("open", self._library, device, allocation, self._size_bytes, seed)
            first, second = (worker.answer(_STARTING_SECONDS, "open") for worker in workers)
            for worker, (peer, _) in zip(workers, (second, first), strict=True):
                worker.ask(self._timeout_s, "connect", *peer)
            yield _OpenPair(workers, (first[1], second[1]), self._timeout_s)


class _OpenPair:
    """Two processes that are connected to each other."""

    def __init__(
        self, workers: Sequence[TransferProcess], ends: tuple[ProcessEnd, ProcessEnd], timeout_s: float
    ) -> None:
        self._workers, self.ends, self._timeout_s = workers, ends, timeout_s

    def clear(self, case: TransferCase, *, backwards: bool) -> None:
        self._workers[not backwards].ask(self._timeout_s, "clear", case)

    def move(self, case: TransferCase, *, backwards: bool) -> Moved:
        initiator = self._workers[backwards is (case.direction is Direction.WRITE)]
        timeout_s = self._timeout_s + 2 * _SAMPLING_SECONDS
        moved: Moved = initiator.ask(timeout_s, "transfer", case, _SAMPLING_SECONDS)
        tables = [
            table
            for table in read_tables(initiator.messages().splitlines())
            if _OPERATIONS[case.direction] in table.operation
            and is_gpu_memory(table.local)
            and is_gpu_memory(table.remote) is not case.to_host
        ]
        return replace(moved, chosen=tables[-1].at(case.size_bytes // case.blocks) if tables else None)

    def count_wrong(self, case: TransferCase, *, backwards: bool) -> int:
        wrong: int = self._workers[not backwards].ask(self._timeout_s, "count_wrong", case, _FIRST_SEED + backwards)
        return wrong
