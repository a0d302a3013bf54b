"""The recording of a collective while it is measured: nodes, processes, NCCL's logs, and a line for each row."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from gpubench.hardware import recorded
from gpubench.jobs.machines import Machines
from gpubench.measure.collective import recording
from gpubench.measure.collective.cases import Case
from gpubench.measure.collective.described import DescribedCollective
from gpubench.measure.collective.path_evidence import PathObservations
from gpubench.measure.collective.recording import RecordedCollective, RowWriter, Write
from gpubench.measure.collective.row_collector import MeasuredRow, Recorder
from gpubench.model.facts.idle_gpu import IdleGpu
from gpubench.model.results.winners import RefusedRow
from gpubench.model.terms.hang import Phase
from gpubench.model.terms.progress import Progress
from gpubench.model.terms.split import RankGroup
from gpubench.ports.group import Group


@dataclass
class CollectiveRecorder(Recorder):
    """Writes on the first rank what all ranks know; a context, of every rank.

    `read_machines` returns nodes and processes on the first rank, `log_text` what NCCL logged on this rank.
    """

    directory: Path
    described: DescribedCollective
    group: Group
    part: RankGroup | None
    read_machines: Callable[[], Machines | None]
    log_text: Callable[[], bytes] | None
    progress: Progress
    _stack: ExitStack = field(default_factory=ExitStack)
    _writer: RowWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The last line, where the run came to its end."""
        with self._stack:
            if kind is None and self._writer is not None:
                self._writer.end()

    def begin(self, observations: PathObservations | None, refused: Sequence[RefusedRow] | None) -> None:
        """Everything but the rows; of many nodes that may take its time."""
        self.progress.enter(Phase.OUTPUT)
        logs = None if self.log_text is None else self.group.collect(zlib.compress(self.log_text()))
        machines, write = self.read_machines(), None
        if machines is not None:
            first = RecordedCollective.of(
                self.described,
                hosts=tuple(node.host for node in machines.snapshots),
                testimony=None if observations is None else recording.RecordedObservations.of(observations),
                refused=None if refused is None else tuple(refused),
            )
            write = self._stack.enter_context(written(self.directory, first, machines))
            recorded.write_nccl_logs(self.directory, [zlib.decompress(text) for text in logs or ()])
        # Of several groups the first rank of the job knows only the rows of its own.
        self._writer = RowWriter(write, (lambda row: [row]) if self.part is None else self.group.collect, self.part)

    def row(self, case: Case, measured: MeasuredRow) -> None:
        """A line a row, and a group."""
        if self._writer is None:
            raise ValueError("what is known before comes first")
        self._writer.row(case, measured)

    def end(self, idle: Sequence[IdleGpu]) -> None:
        """What was seen of GPUs after the last row comes with the last line."""
        if self._writer is not None:
            self._writer.after_rows(idle)


@contextmanager
def written(directory: Path, first: RecordedCollective, machines: Machines) -> Iterator[Write]:
    """A recording with nodes, processes and its first line; what is called writes the others.

    Raises OutputError: the folder cannot be written any more.
    """
    name = recording.file_of(first.collective)
    recorded.write_recording(directory, machines.snapshots, machines.processes)
    with recorded.recording_samples(directory, name) as write:
        write(first)
        yield write
