"""Raw samples of a run of copies: written as they are measured, and later played in the place of GPUs or ranks."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpubench.errors import UsageError
from gpubench.measure.p2p.bench import Bench, P2pRequest, PatternResult
from gpubench.measure.p2p.ranks import Rounds
from gpubench.model.paths.p2p import Cell, Pair, Series
from gpubench.model.terms.copies import CopyGpu, CopyPattern, Direction, HostMemory, pairs_of
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.readers.documents.json_lines import read_json_line

FILE = "p2p.jsonl"
VERSION = 1
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
    """Every other line: what was measured, and the cell; a cell that was measured again comes again, with all of it."""

    of: str
    cell: Cell


class RecordingBench:
    """Writes down what another bench measures."""

    def __init__(self, bench: Bench, write: Write) -> None:
        self._bench = bench
        self._write = write

    def enable_peer_access(self) -> dict[Pair, str]:
        """What was refused is a sample too."""
        refused = self._bench.enable_peer_access()
        for pair, error in refused.items():
            self._write(RecordedCopy(_access(pair), Cell(error=error)))
        return refused

    def can_reach(self, pair: Pair) -> bool:
        """Not written: the first line says it of all pairs."""
        return self._bench.can_reach(pair)

    def measure(self, series: Series, pair: Pair) -> Cell:
        """A sample of a pair."""
        return self._wrote(_copy(series, pair), self._bench.measure(series, pair))

    def measure_again(self, series: Series, pair: Pair, before: Cell) -> Cell:
        """Another one of it."""
        return self._wrote(_copy(series, pair), self._bench.measure_again(series, pair, before))

    def measure_host(self, memory: HostMemory, gpu: int, *, to_gpu: bool) -> Cell:
        """A sample of a GPU and host memory."""
        return self._wrote(_host(memory, gpu, to_gpu=to_gpu), self._bench.measure_host(memory, gpu, to_gpu=to_gpu))

    def measure_pattern(self, pattern: CopyPattern, direction: Direction) -> PatternResult:
        """A sample of several pairs at once."""
        result = self._bench.measure_pattern(pattern, direction)
        self._write(RecordedCopy(_pattern(pattern, direction), result.cell))
        return result

    def _wrote(self, what: str, cell: Cell) -> Cell:
        self._write(RecordedCopy(what, cell))
        return cell


class RecordingRounds:
    """Writes down what ranks measure."""

    def __init__(self, rounds: Rounds, write: Write) -> None:
        self._rounds = rounds
        self._write = write

    def measure(self, series: Series, pairs: Sequence[Pair]) -> dict[Pair, Cell]:
        """A sample of each pair, once all rounds of the matrix are over."""
        cells = self._rounds.measure(series, pairs)
        for pair, cell in cells.items():
            self._write(RecordedCopy(_copy(series, pair), cell))
        return cells

    def measure_again(self, series: Series, pair: Pair, before: Cell) -> Cell:
        """Another one of a pair."""
        cell = self._rounds.measure_again(series, pair, before)
        self._write(RecordedCopy(_copy(series, pair), cell))
        return cell


class Replayed:
    """The samples of a recording, each as often as it was measured."""

    def __init__(self, recorded: RecordedP2p, samples: Iterable[RecordedCopy]) -> None:
        self._recorded = recorded
        self._cells: dict[str, deque[Cell]] = defaultdict(deque)
        for sample in samples:
            self._cells[sample.of].append(sample.cell)

    def cell(self, what: str) -> Cell:
        """The first sample of it; an error where the run ended before."""
        return self._next(what) or Cell(error=_CUT_SHORT)

    def measure_again(self, series: Series, pair: Pair, before: Cell) -> Cell:
        """The next sample of a pair; the same again where it was not measured again, for thresholds change."""
        return self._next(_copy(series, pair)) or before

    def _next(self, what: str) -> Cell | None:
        cells = self._cells[what]
        return cells.popleft() if cells else None


class ReplayedBench(Replayed):
    """A recording in the place of GPUs."""

    def enable_peer_access(self) -> dict[Pair, str]:
        """What was refused then."""
        refused = {pair: self._next(_access(pair)) for pair in self._recorded.request.pairs}
        return {pair: cell.error for pair, cell in refused.items() if cell is not None and cell.error}

    def can_reach(self, pair: Pair) -> bool:
        """As CUDA said then."""
        return pair not in self._recorded.unreachable

    def measure(self, series: Series, pair: Pair) -> Cell:
        """The sample of a pair."""
        return self.cell(_copy(series, pair))

    def measure_host(self, memory: HostMemory, gpu: int, *, to_gpu: bool) -> Cell:
        """The sample of a GPU and host memory."""
        return self.cell(_host(memory, gpu, to_gpu=to_gpu))

    def measure_pattern(self, pattern: CopyPattern, direction: Direction) -> PatternResult:
        """The sample of several pairs at once."""
        pairs = pairs_of(pattern, len(self._recorded.gpus))
        return PatternResult(pattern, direction, self.cell(_pattern(pattern, direction)), pairs)


class ReplayedRounds(Replayed):
    """A recording in the place of ranks."""

    def measure(self, series: Series, pairs: Sequence[Pair]) -> dict[Pair, Cell]:
        """The samples of a matrix."""
        return {pair: self.cell(_copy(series, pair)) for pair in pairs}


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


def _copy(series: Series, pair: Pair) -> str:
    return f"{series.name} {series.size_bytes} {pair[0]}-{pair[1]}"


def _access(pair: Pair) -> str:
    return f"enable {pair[0]}-{pair[1]}"


def _host(memory: HostMemory, gpu: int, *, to_gpu: bool) -> str:
    return f"{memory} host memory {'to' if to_gpu else 'from'} {gpu}"


def _pattern(pattern: CopyPattern, direction: Direction) -> str:
    return f"{pattern} {direction}"
