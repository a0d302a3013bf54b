"""The mpi and host backends, and the jobs that test whether MPI supports GPU memory."""

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import IO, cast

from msgspec import Struct

from gpubench.backends.cuda import CudaDevice, GpuBuffers
from gpubench.backends.mpi import group as mpi
from gpubench.backends.mpi.group import MOST_ELEMENTS, MpiCalls, MpiLaunch, MpiLoop
from gpubench.backends.mpi.trial import SIZES_BYTES
from gpubench.backends.timing import (
    BlockingClock,
    HostClockedLaunch,
    StartingLine,
    join_launches,
    no_garbage_collection,
)
from gpubench.collectives.pattern import STORAGE, ArrayPattern, Stretch
from gpubench.machine import host as host_memory
from gpubench.machine.children import module_command
from gpubench.machine.host import printable
from gpubench.model.facts.process import MpiSupport, OperationTrial, TrialOutcome
from gpubench.model.terms.operation import Block, DataPattern
from gpubench.model.terms.ranks import UNWATCHED, Progress
from gpubench.model.terms.units import plural
from gpubench.ports.backend import Array, BatchedLaunch, CollectiveCalls, Launch, Memory
from gpubench.ports.group import Group
from gpubench.ranks.launch import find_launcher, start, stop

# Elements per temporary array. For larger arrays, malloc requests new pages from the kernel every time
_CHUNK_ELEMENTS = 2**14


class NumpyMemory:
    """A NumPy buffer. Each piece that is filled or checked counts as progress, because gigabytes take long."""

    def __init__(self, size_bytes: int, progress: Progress = UNWATCHED) -> None:
        import numpy

        self._numpy = numpy
        self._progress = progress
        self.size_bytes = size_bytes
        self._bytes = numpy.empty(size_bytes, "uint8")
        self.address = int(self._bytes.ctypes.data)

    def array(self, offset_bytes: int, count: int, dtype: str) -> Array:
        width = self._numpy.dtype(dtype).itemsize
        return self._bytes[offset_bytes : offset_bytes + count * width].view(dtype)

    def fill_sent(self, data: DataPattern, block: Block, rank: int) -> None:
        pattern = ArrayPattern(self._numpy, data)
        for elements, stretch in self._pieces(data, block):
            elements[:] = pattern.sent(rank, stretch)

    def fill_byte(self, size_bytes: int, value: int) -> None:
        self._bytes[:size_bytes] = value

    def count_wrong(self, data: DataPattern, blocks: Sequence[tuple[Block, int | None]]) -> int:
        pattern = ArrayPattern(self._numpy, data)
        return sum(
            pattern.wrong(elements, pattern.reduced(stretch) if source is None else pattern.sent(source, stretch))
            for block, source in blocks
            for elements, stretch in self._pieces(data, block)
        )

    def _pieces(self, data: DataPattern, block: Block) -> Iterator[tuple[Array, Stretch]]:
        """Split a block into pieces, so that temporary arrays stay small."""
        storage, seeds = STORAGE[data.dtype.size_bytes], block.seeds()
        table = self.array(0, block.buffers * block.stride, storage).reshape(block.buffers, block.stride)
        buffers_at_once = max(1, _CHUNK_ELEMENTS // block.count)
        for buffer in range(0, block.buffers, buffers_at_once):
            rows = slice(buffer, min(buffer + buffers_at_once, block.buffers))
            for first in range(0, block.count, _CHUNK_ELEMENTS):
                count = min(_CHUNK_ELEMENTS, block.count - first)
                begin = block.offset + first
                yield table[rows, begin : begin + count], Stretch(block.start + first, count, seeds[rows])
                self._progress.completed()


class HostBuffers:
    """Base class for backends whose buffers are NumPy arrays."""

    _ranks_on_node: int
    _progress: Progress

    def free_bytes(self) -> int:
        """Return this rank's share of the free memory in bytes, on the host or in its control group."""
        return int(host_memory.free_bytes() * host_memory.USABLE_SHARE) // self._ranks_on_node

    def allocate(self, size_bytes: int) -> Memory:
        return NumpyMemory(size_bytes, self._progress)


class _MpiClock(BlockingClock):
    """Measure MPI calls that are made without Python in between. Work after MPI's calls is not timed."""

    def __init__(self, group: Group, progress: Progress, no_graphs: str) -> None:
        super().__init__(group, progress, no_graphs)
        self._starting_line = StartingLine(group)

    def chain(self, launches: Sequence[Launch]) -> Launch:
        return mpi.join_mpi_launches(launches)

    def drop(self, calls: CollectiveCalls) -> None:
        """Do nothing, because MPI communicators last as long as the job."""

    def seconds(self, launch: Launch) -> float:
        with mpi.raising_mpi_errors():
            seconds = super().seconds(launch)
        _complete(launch)
        return seconds

    def together(self, launch: Launch) -> float:
        """Return the wall time from a barrier in seconds. The first call follows the barrier immediately."""
        behind = self._starting_line.before(launch) if isinstance(launch, MpiLoop) else None
        if behind is None:
            return super().together(launch)
        with mpi.raising_mpi_errors(), no_garbage_collection():
            behind()
            seconds = self._seconds_since(self._starting_line.barrier_passed_s)
        _complete(launch)
        return seconds

    def _loop(self, launches: Sequence[Launch]) -> Launch:
        calls = [launch for launch in launches if isinstance(launch, MpiLaunch)]
        return MpiLoop(calls) if len(calls) == len(launches) else join_launches(launches)


def _complete(launch: Launch) -> None:
    parts = [part for part, _ in launch.parts] if isinstance(launch, HostClockedLaunch) else [launch]
    for part in dict.fromkeys(parts):
        if isinstance(part, MpiLoop):
            part.complete()


class HostBackend(HostBuffers, _MpiClock):
    """MPI collectives on CPU buffers."""

    name = "host"
    buffers = 3  # For a reduction, Open MPI and MPICH may need one more buffer of the message size

    def __init__(
        self,
        group: mpi.MpiGroup,
        ranks_on_node: int,
        most_elements: int = MOST_ELEMENTS,
        progress: Progress = UNWATCHED,
    ) -> None:
        super().__init__(group, progress, "the host backend has no CUDA graphs")
        self.calls = MpiCalls(group.communicator, most_elements)
        self._most_elements = most_elements
        self._ranks_on_node = ranks_on_node
        self._progress = progress

    def open(self, group: Group) -> MpiCalls:
        return MpiCalls(cast("mpi.MpiGroup", group).communicator, self._most_elements)

    def libraries(self) -> dict[str, str]:
        import numpy

        return {"numpy": numpy.__version__}

    def close(self) -> None:
        """Do nothing, because NumPy frees its buffers."""


class MpiOnCuda(GpuBuffers, _MpiClock):
    """MPI collectives on GPU memory, measured in host time. An MPI that is not CUDA-aware would crash."""

    name = "mpi"
    buffers = 2

    def __init__(self, group: mpi.MpiGroup, device: CudaDevice, progress: Progress = UNWATCHED) -> None:
        super().__init__(group, progress, "the host makes MPI's calls")
        self._device = device
        self.calls = self._calls(group)

    def open(self, group: Group) -> MpiCalls:
        return self._calls(cast("mpi.MpiGroup", group))

    def libraries(self) -> Mapping[str, str]:
        return self._device.libraries()

    def bind(self, launches: Sequence[Launch], graph_replays: int) -> Launch:
        """Join launches once the stream is idle. MPI does not wait for kernels that are still filling buffers."""
        self._device.stream.synchronize()
        return super().bind(launches, graph_replays)

    def batch_launches(self, launches: Sequence[Launch], operations: int) -> BatchedLaunch:
        self._device.stream.synchronize()
        return super().batch_launches(launches, operations)

    def together(self, launch: Launch) -> float:
        self._device.stream.synchronize()
        return super().together(launch)

    def close(self) -> None:
        self._device.close()

    def _calls(self, group: mpi.MpiGroup) -> MpiCalls:
        return MpiCalls(group.communicator, settle=self._device.stream.synchronize)


_MODULE = "gpubench.backends.mpi.trial"
_RANKS = 2
_SECONDS_TO_END = 60.0
_SECONDS_TO_ANSWER = 20
_SECONDS_BETWEEN_LOOKS = 0.05
_CORES_PER_JOB = 2
_LONGEST_SAID = 200
_MOST_BYTES = 1 << 20

_SIGNAL = re.compile(r"exited on signal (\d+)")
_CRASH = re.compile(r"Segmentation fault|Bus error|address not mapped to object", re.IGNORECASE)
_ERROR = re.compile(r"^.*(?:MPI_ERR_\w+|mpi4py\.MPI\.Exception: .*|\w*Error: .*)$", re.MULTILINE)
_INFO = re.compile(r"^mca:mpi:base:param:mpi_built_with_cuda_support:value:(\w+)$", re.MULTILINE)


class TrialCommand(Struct, frozen=True):
    """Command line and environment of the test jobs. `info` is the path of `ompi_info` of the same MPI, if it
    exists.
    """

    words: Sequence[str]
    environment: Mapping[str, str]
    info: str | None = None

    @classmethod
    def of_launcher(cls, environment: Mapping[str, str] = os.environ) -> "TrialCommand":
        """Return the command for gpubench's default mpirun. Raise CouldNotMeasureError if there is no launcher."""
        launcher = find_launcher()
        words = [launcher.path, "-n", str(_RANKS), *module_command(_MODULE)]
        info = Path(launcher.path).with_name("ompi_info")
        return cls(words, launcher.environment(environment, ""), str(info) if os.access(info, os.X_OK) else None)


class _TrialJob(Struct):
    operation: str
    output: IO[bytes]
    process: "subprocess.Popen[bytes]"
    began: float

    @classmethod
    def started(cls, operation: str, command: TrialCommand) -> "_TrialJob":
        output = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        process = start([*command.words, operation], command.environment, output)
        return cls(operation, output, process, time.monotonic())

    def is_over(self, timeout_s: float) -> bool:
        return self.process.poll() is not None or time.monotonic() - self.began > timeout_s

    def end(self) -> "_JobEnd":
        late, seconds = self.process.poll() is None, time.monotonic() - self.began
        code = stop(self.process)
        with self.output as output:
            output.seek(0)
            text = output.read(_MOST_BYTES).decode(errors="replace")
        return _JobEnd(list(_objects(text)), text, code, late, seconds)


class _JobEnd(Struct, frozen=True):
    lines: Sequence[Mapping[str, object]]
    text: str
    code: int
    late: bool
    seconds: float


def read_support(
    operations: Sequence[str],
    command: TrialCommand,
    timeout_s: float = _SECONDS_TO_END,
    completed: Callable[[], object] = lambda: None,
) -> MpiSupport:
    """Test operations on GPU memory in concurrent jobs. A job that is still running after `timeout_s` counts as
    hung.
    """
    began = time.monotonic()
    ends = dict(_all_ends(operations, command, timeout_s, completed))
    first = next((line for end in ends.values() for line in end.lines if "library" in line), {})
    claims = first.get("claims")
    said = claims if isinstance(claims, dict) else {}
    return MpiSupport(
        library=printable(str(first.get("library", "MPI"))),
        asked=operations[0],
        trials=[trial for name in operations for trial in _trials(name, ends[name])],
        claims={str(name): printable(str(value)) for name, value in said.items()} | _info(command.info),
        seconds=time.monotonic() - began,
    )


def _all_ends(
    operations: Sequence[str], command: TrialCommand, timeout_s: float, completed: Callable[[], object]
) -> Iterator[tuple[str, _JobEnd]]:
    waiting, running = list(operations), list[_TrialJob]()
    most_running = max(1, len(os.sched_getaffinity(0)) // _CORES_PER_JOB)
    try:
        while waiting or running:
            while waiting and len(running) < most_running:
                running.append(_TrialJob.started(waiting.pop(0), command))
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            for job in [job for job in running if job.is_over(timeout_s)]:
                running.remove(job)
                yield job.operation, job.end()
                completed()
    finally:
        for job in running:
            job.end()


def _objects(text: str) -> Iterator[Mapping[str, object]]:
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found


def _trials(operation: str, end: _JobEnd) -> Iterator[OperationTrial]:
    """Yield the outcome for each size. The first size without a result gets the job's exit status as its outcome."""
    counted = (line for line in end.lines if "size_bytes" in line)
    wrong = {line["size_bytes"]: count for line in counted if isinstance(count := line.get("wrong"), int)}
    badly = ""
    if wrong.keys() >= set(SIZES_BYTES):
        if end.late:
            badly = "right, but the job did not end"
        elif end.code:
            badly = f"right, but the job ended with exit code {end.code}"
    is_announced = False
    for size_bytes in SIZES_BYTES:
        if size_bytes in wrong:
            outcome = TrialOutcome.WRONG if wrong[size_bytes] else TrialOutcome.RIGHT
            said = plural(wrong[size_bytes], "wrong element") if wrong[size_bytes] else badly
        elif is_announced:
            outcome, said = TrialOutcome.UNKNOWN, ""
        else:
            outcome, said = _outcome(end)
            is_announced = True
        yield OperationTrial(
            operation=operation,
            size_bytes=size_bytes,
            outcome=outcome,
            seconds=None if outcome is TrialOutcome.UNKNOWN else end.seconds,
            said=said,
        )


def _outcome(end: _JobEnd) -> tuple[TrialOutcome, str]:
    found = _SIGNAL.search(end.text)
    number = int(found[1]) if found else end.code - 128 if end.code > 128 else -end.code if end.code < 0 else 0
    begun = any("begins" in line for line in end.lines)
    if end.late:
        return TrialOutcome.HUNG, f"no end after {end.seconds:.0f} s"
    if begun and (number or _CRASH.search(end.text)):
        crash = _CRASH.search(end.text)
        return TrialOutcome.CRASHED, ": ".join(filter(None, (_signal(number), crash[0] if crash else "")))
    error = _ERROR.search(end.text)
    words = printable(error[0].strip())[:_LONGEST_SAID] if error else f"exit code {end.code}"
    return (TrialOutcome.REFUSED if begun else TrialOutcome.UNKNOWN), words


def _signal(number: int) -> str:
    if not number:
        return ""
    try:
        return f"signal {number} ({Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _info(program: str | None) -> dict[str, str]:
    if program is None:
        return {}
    try:
        answer = subprocess.run(
            [program, "--parsable", "--all"], capture_output=True, text=True, timeout=_SECONDS_TO_ANSWER, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found = _INFO.search(answer)
    return {"ompi_info": f"mpi_built_with_cuda_support: {found[1]}"} if found else {}
