"""What `--record` does while a collective is measured: nodes, processes, NCCL's logs, and a line a row, at once."""

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from gpubench.cli.presenter import OutputError
from gpubench.cli.rank import own_facts
from gpubench.cli.watching import SECONDS_TO_READ_A_NODE, NodesAndRanks
from gpubench.hardware import recorded
from gpubench.hardware.node.probe import probe
from gpubench.measure.collective.cases import Case
from gpubench.measure.collective.path_evidence import PathObservations
from gpubench.measure.collective.recording import (
    RecordedCollective,
    RecordedObservations,
    RecordedRow,
    RowWriter,
    Write,
    file_of,
)
from gpubench.measure.collective.row_collector import Measured
from gpubench.model.paths.nodes import with_own_names
from gpubench.model.results.winners import RefusedRow
from gpubench.model.terms.hang import Phase
from gpubench.model.terms.progress import Progress
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.model.terms.split import RankGroup
from gpubench.ports.group import Group


def read_nodes_and_ranks(group: Group, identity: RankIdentity) -> NodesAndRanks | None:
    """Read by the first rank of every node, and known to the first of all; every rank has to call it."""
    own = probe(SECONDS_TO_READ_A_NODE, os.environ) if identity.local_rank == 0 else None
    collected = group.collect((own, own_facts(identity)))
    if collected is None:
        return None
    nodes = with_own_names([snapshot for snapshot, _ in collected if snapshot is not None])
    return NodesAndRanks(nodes, [facts for _, facts in collected])


class CollectiveRecorder:
    """Writes on the first rank what all ranks know; a context, of every rank.

    `look` returns nodes and processes on the first rank, `log_text` what NCCL said on this rank.
    """

    def __init__(
        self,
        directory: Path,
        described: RecordedCollective,
        group: Group,
        part: RankGroup | None,
        look: Callable[[], NodesAndRanks | None],
        log_text: Callable[[], bytes] | None,
        progress: Progress,
    ) -> None:
        self._directory = directory
        self._described = described
        self._group = group
        self._part = part
        self._look = look
        self._log_text = log_text
        self._progress = progress
        self._stack = ExitStack()
        self._writer: RowWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """The last line, where the run came to its end."""
        with self._stack:
            if kind is None and self._writer is not None:
                self._writer.end()

    def begin(self, observations: PathObservations | None, refused: Sequence[RefusedRow] | None) -> None:
        """Everything but the rows; of many nodes that may take its time."""
        self._progress.enter(Phase.OUTPUT)
        logs = None if self._log_text is None else self._group.collect(zlib.compress(self._log_text()))
        around, write = self._look(), None
        if around is not None:
            first = replace(
                self._described,
                hosts=tuple(node.host for node in around.nodes),
                testimony=None if observations is None else RecordedObservations.of(observations),
                refused=None if refused is None else tuple(refused),
            )
            write = self._stack.enter_context(written(self._directory, first, around))
            with naming(self._directory):
                recorded.write_nccl_logs(self._directory, [zlib.decompress(text) for text in logs or ()])
        self._writer = RowWriter(write, self._collect, self._part)

    def row(self, case: Case, measured: Measured) -> None:
        """A line a row, and a group."""
        if self._writer is None:
            raise ValueError("what is known before comes first")
        self._writer.row(case, measured)

    def _collect(self, row: RecordedRow | None) -> Sequence[RecordedRow | None] | None:
        """Where there are groups, the first rank of the job is not the one that knows the rows of all."""
        return [row] if self._part is None else self._group.collect(row)


@contextmanager
def written(directory: Path, first: RecordedCollective, around: NodesAndRanks) -> Iterator[Write]:
    """A recording with nodes, processes and its first line; what is called writes the others.

    Raises:
        OutputError: the folder cannot be written any more.
    """
    name = file_of(first.collective)
    with naming(directory):
        recorded.write_recording(directory, around.nodes, around.processes)
    with naming(directory / name), recorded.recording_samples(directory, name) as write:

        def write_line(value: object) -> None:
            with naming(directory / name):
                write(value)

        write_line(first)
        yield write_line


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have errors of the system say which file they are about."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(error.errno, error.strerror, str(error.filename or path)) from error
