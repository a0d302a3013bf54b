"""Raw samples of a run of copies: written as they are measured, and later played in the place of GPUs or ranks."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpubench.errors import UsageError
from gpubench.measure.p2p.request import Bench, Copy, P2pRequest
from gpubench.model.facts.idle_gpu import IdleGpu
from gpubench.model.paths.p2p import Cell, Pair
from gpubench.model.terms.copies import CopyGpu
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.readers.documents.json_lines import read_json_line

FILE = "p2p.jsonl"
VERSION = 1
_IDLE = "idle GPUs"
_CUT_SHORT = "not recorded: the run was cut short"

Write = Callable[[object], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedP2p:
    """The first line: what was asked for, and of whom. `gpus` are those of one process; or there are `ranks`.

    `hosts` are the nodes in their order, by the names that the recording gives them; `like` is the peer whose
    parameters were used, `unreachable` are pairs that CUDA keeps apart, `strict` is how the run was judged.
    """

    schema_version: int
    origin: Origin
    request: P2pRequest
    hosts: tuple[str, ...]
    gpus: tuple[CopyGpu, ...] = ()
    ranks: tuple[RankIdentity, ...] = ()
    unreachable: tuple[Pair, ...] = ()
    like: str | None = None
    strict: bool = False
    libraries: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecordedCopy:
    """Every other line: what was measured, and the cell; a cell that was measured again comes again, with all of it.

    Before the first copy and after the last, `idle` are the GPUs while none was made.
    """

    of: str
    cell: Cell
    idle: tuple[IdleGpu, ...] = ()


class RecordingBench(Bench):
    """Writes down what another bench measures."""

    def __init__(self, bench: Bench, write: Write) -> None:
        self._bench = bench
        self._write = write

    def enable_peer_access(self) -> dict[Pair, str]:
        """Enabled by the other; a sample for each pair that was refused."""
        refused = self._bench.enable_peer_access()
        for pair, error in refused.items():
            self._write(RecordedCopy(_access(pair), Cell(error=error)))
        return refused

    def measure(self, copies: Sequence[Copy]) -> Iterator[Cell]:
        """A sample of each copy, as soon as it is measured."""
        for copy, cell in zip(copies, self._bench.measure(copies), strict=True):
            self._write(RecordedCopy(str(copy), cell))
            yield cell

    def measure_again(self, copy: Copy, before: Cell) -> Cell:
        """Another sample of a copy, which holds those before."""
        cell = self._bench.measure_again(copy, before)
        self._write(RecordedCopy(str(copy), cell))
        return cell

    def look_while_idle(self) -> tuple[IdleGpu, ...]:
        """A sample of all GPUs, where the other can look."""
        idle = self._bench.look_while_idle()
        if idle:
            self._write(RecordedCopy(_IDLE, Cell(), idle))
        return idle


class ReplayedBench(Bench):
    """A recording in the place of GPUs, of one process or of ranks: each sample as often as it was measured."""

    def __init__(self, recorded: RecordedP2p, samples: Iterable[RecordedCopy]) -> None:
        self._pairs = recorded.request.pairs
        self._cells: dict[str, deque[Cell]] = defaultdict(deque)
        self._idle: deque[tuple[IdleGpu, ...]] = deque()
        for sample in samples:
            if sample.of == _IDLE:
                self._idle.append(sample.idle)
            else:
                self._cells[sample.of].append(sample.cell)

    def enable_peer_access(self) -> dict[Pair, str]:
        """The errors of then."""
        refused = {pair: self._next(_access(pair)) for pair in self._pairs}
        return {pair: cell.error for pair, cell in refused.items() if cell is not None and cell.error}

    def measure(self, copies: Sequence[Copy]) -> Iterator[Cell]:
        """The first sample of each copy; an error where the run ended before."""
        return (self._next(str(copy)) or Cell(error=_CUT_SHORT) for copy in copies)

    def measure_again(self, copy: Copy, before: Cell) -> Cell:
        """The next sample of a copy; the same again where it was not measured again, for thresholds change."""
        cell = self._next(str(copy))
        if cell is None:
            return before
        # Of copies with host memory, recordings from before 2026 hold the new samples alone.
        has_all = cell.seconds[: len(before.seconds)] == before.seconds
        return cell if has_all else before.extended(cell)

    def look_while_idle(self) -> tuple[IdleGpu, ...]:
        """The GPUs of then; nothing where the run was cut short, or nobody looked."""
        return self._idle.popleft() if self._idle else ()

    def _next(self, name: str) -> Cell | None:
        cells = self._cells[name]
        return cells.popleft() if cells else None


def read_samples(lines: Sequence[tuple[str, str]], name: str) -> tuple[RecordedP2p, list[RecordedCopy]]:
    """A recording from its lines, each with its place.

    Raises:
        UsageError: it is empty, from a newer gpubench, no recording, or contradicts itself.
    """
    if not lines:
        raise UsageError(f"{name}, {FILE}: empty", expected="a recorded run of p2p", reason="it was interrupted")
    recorded = read_json_line(RecordedP2p, *lines[0])
    _check(recorded, lines[0][1])
    samples = []
    for line, where in lines[1:]:
        sample = read_json_line(RecordedCopy, line, where)
        if not all(seconds > 0 for seconds in sample.cell.seconds):
            raise UsageError(f"{where}: a copy that took no time", expected="seconds above 0")
        if len(sample.idle) not in (0, len(recorded.gpus or recorded.ranks)):
            raise UsageError(f"{where}: {len(sample.idle)} idle GPUs", expected="those of the first line")
        samples.append(sample)
    return recorded, samples


def _check(recorded: RecordedP2p, where: str) -> None:
    """Refuse what no run can have been."""
    if recorded.schema_version != VERSION:
        raise UsageError(
            f"{where}: schema_version {recorded.schema_version}",
            expected=f"{VERSION}, which this gpubench reads",
            reason="a newer gpubench recorded it",
            next_step="pip install --upgrade gpubench",
        )
    count = len(recorded.gpus or recorded.ranks)
    pairs: tuple[tuple[int, ...], ...] = (*recorded.request.pairs, *recorded.unreachable)
    for ends in pairs:
        if len(ends) != 2 or ends[0] == ends[1] or not all(0 <= end < count for end in ends):
            raise UsageError(
                f"{where}: the pair {list(ends)}", expected=f"two different of {count} GPUs, counted from 0"
            )
    if not recorded.hosts or not all(0 <= rank.node < len(recorded.hosts) for rank in recorded.ranks):
        raise UsageError(f"{where}: ranks on more nodes than {len(recorded.hosts)}", expected="a host for each")
    sizes = [each.size_bytes for each in recorded.request.series]
    if any(size < 1 for size in sizes) or recorded.request.pattern_bytes < 1:
        raise UsageError(f"{where}: a copy of no bytes", expected="sizes above 0")


def _access(pair: Pair) -> str:
    return f"enable {pair[0]}-{pair[1]}"
