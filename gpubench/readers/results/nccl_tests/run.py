"""One run of a program of nccl-tests, from its text or its JSON, and the rows that it becomes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpubench.errors import NotSaidError, UsageError
from gpubench.model.paths.selection import names
from gpubench.model.paths.transport import Transport, is_staged, parse_transport
from gpubench.model.results.report import CollectiveRow, Verified
from gpubench.model.results.result_file import CPU_TIME, NOTHING_TOLD, Told
from gpubench.model.terms.origin import Origin
from gpubench.readers.results import limits
from gpubench.readers.results.nccl_tests.cut_table import CutLine, cut_collectives
from gpubench.readers.results.nccl_tests.names import ELEMENT_TYPES, Device, OutputLine, PerIteration, Placed
from gpubench.readers.results.nccl_tests.shape import collective_of, likely_ranks, possible_collectives

_MOVES_ONLY = ("allgather", "broadcast", "alltoall", "alltoallv", "gather", "scatter", "sendrecv", "hypercube")
_AVERAGES: Mapping[int | None, str] = {
    0: "time of rank 0 (-a 0)",
    2: "time of the fastest rank (-a 2)",
    3: "time of the slowest rank (-a 3)",
}
_Z95 = 1.96


@dataclass(slots=True, kw_only=True)
class NcclTestsRun:
    """A run while it is read. `average` is -a: 0 rank 0, 1 mean, 2 fastest, 3 slowest; None where nothing says.

    `program` is nccl-tests or rccl-tests, `library` the name and version of what it measured. `halves` are lines of
    which the second half is missing; `transports` are those that NCCL's lines name, as they name them.
    """

    program: str = "nccl-tests"
    collective: str | None = None
    version: str | None = None
    library: tuple[str, str] | None = None
    settings: dict[str, int] = field(default_factory=dict)
    blocking: bool = False
    cpu_time: bool = False
    average: int | None = None
    devices: list[Device] = field(default_factory=list)
    lines: list[OutputLine] = field(default_factory=list)
    halves: list[OutputLine] = field(default_factory=list)
    cut: list[CutLine] = field(default_factory=list)
    transports: set[str] = field(default_factory=set)
    out_of_bounds: int | None = None
    complete: bool = False

    @property
    def measured(self) -> list[OutputLine]:
        """The lines of which something can be judged: small sizes are rounded down to 0, where nothing moves."""
        return [line for line in self.lines if line.size_bytes > 0]

    @property
    def lacks_devices(self) -> bool:
        """True where the list of devices is not whole, as in an excerpt that begins with the last of them."""
        processes = len({(device.host, device.pid) for device in self.devices})
        listed = max(len(self.devices), processes * self.ranks_a_process)
        return max((device.rank for device in self.devices), default=-1) >= listed

    def rows(self, where: str, told: Told = NOTHING_TOLD) -> list[CollectiveRow]:
        """Its lines as rows, one a placement; `told` is what a person says of a run that does not say it.

        Raises NotSaidError where nothing says how many ranks there were, or which collective it was, and UsageError
        where figures contradict each other or what was told; `where` names the file.
        """
        lines = self.measured
        if not (lines or self.cut):
            return []
        named = self.collective or told.collective
        shape = self._shape(where, told)
        possible = [named] if named else possible_collectives(lines, None) if lines else cut_collectives(self.cut)
        if shape is None:
            raise self._not_said(where, possible)
        if not lines and len(possible) > 1:
            raise self._not_said(where, possible)
        lines = lines or [each.whole(possible[0], shape[0]) for each in self.cut]
        if (not self.devices or self.lacks_devices) and len(possible) == 1:
            self._check_told(lines, where, told, possible[0])
        collective = self.collective or (
            possible[0] if self.cut else collective_of(lines, shape[0], told.collective, where)
        )
        how = "--collective" if told.collective else "the shape of its rows"
        by = None if self.collective else f"{collective} by {how}: nccl-tests did not name it"
        return [self._row(collective, by, shape, line, placed) for line in lines for placed in line.placed]

    def _check_told(self, lines: Sequence[OutputLine], where: str, told: Told, collective: str) -> None:
        """Raise UsageError where figures are those of another number of ranks than a person says."""
        likely = likely_ranks(lines, collective)
        if likely is not None and likely != told.ranks:
            a_node, rest = divmod(likely, told.nodes)
            raise UsageError(
                f"{where}: its busbw over algbw is that of {likely} ranks, and --machine has {told.ranks}",
                expected=f"the machine that the table is of{'' if rest else f': {a_node} ranks on each node'}",
                reason="another number of GPUs or nodes took part",
                next_step=f"--machine NAME/{a_node} is that part of each node" if not rest and a_node else "",
            )

    def _not_said(self, where: str, collectives: list[str]) -> NotSaidError:
        error = NotSaidError(
            f"{where}: rows without the lines that say how many ranks there were and of how many iterations",
            expected="the lines '# nThread ...' and '#  Rank  0 ...' above them",
            reason="the beginning of the output is missing",
            next_step="give the whole output of nccl-tests",
        )
        error.ranks, error.collectives = True, collectives
        if len(collectives) == 1 and self.measured:
            error.likely_ranks = likely_ranks(self.measured, collectives[0])
        return error

    def _shape(self, where: str, told: Told) -> tuple[int, int, str | None] | None:
        """Ranks and nodes of a communicator, and which part of the job it is: None where it is the whole.

        None where neither the run nor a person says how many ranks there were.
        """
        if not self.devices or self.lacks_devices:
            ranks = max((device.rank + 1 for device in self.devices), default=told.ranks)
            return None if ranks is None or told.ranks is None else (ranks, told.nodes, None)
        groups = sorted({device.group for device in self.devices})
        own = [device for device in self.devices if device.group == self.devices[0].group]
        nodes = len({device.host for device in own})
        # A list of devices is cut at 2 kB a process, and JSON names only the first of each.
        processes = len({(device.host, device.pid) for device in own})
        ranks = max(len(own), processes * self.ranks_a_process)
        if not 0 < ranks <= limits.MOST_RANKS:
            raise UsageError(f"{where}: a run of {ranks} ranks", expected=f"1 to {limits.MOST_RANKS}")
        return ranks, nodes, f"each of {len(groups)} groups, as one" if len(groups) > 1 else None

    @property
    def ranks_a_process(self) -> int:
        """GPUs that a process drives, several ranks on each where rccl-tests has that."""
        return math.prod(self.settings.get(name, 1) for name in ("threads", "gpus", "ranks_a_gpu"))

    @property
    def _paths(self) -> list[Transport]:
        """The transports of NCCL's own lines among the rows, without the numbers of NICs."""
        return [replace(each, name=each.family) for each in map(parse_transport, self.transports)]

    @property
    def _iterations(self) -> int | None:
        counted = self.settings.get("iterations")
        return None if counted is None else counted * self.settings.get("aggregated", 1)

    def _row(
        self,
        collective: str,
        by: str | None,
        shape: tuple[int, int, str | None],
        line: OutputLine,
        placed: Placed,
    ) -> CollectiveRow:
        ranks, nodes, group = shape
        each = placed.per_iteration or PerIteration()
        fastest, slowest, slowest_rank = self._extremes(placed, each)
        return CollectiveRow(
            collective=collective,
            backend="rccl" if self.program == "rccl-tests" else "nccl",
            origin=Origin.RECORDED,
            group=group,
            ranks=ranks,
            nodes=nodes,
            size_bytes=line.size_bytes,
            count=line.count,
            dtype=ELEMENT_TYPES[line.element_type][0],
            op=None if line.reduction == "none" or collective in _MOVES_ONLY else line.reduction,
            root=None if line.root < 0 else line.root,
            placement=placed.placement,
            mode="latency" if self.blocking else "throughput",
            graph=self.settings.get("graph", 0),
            iterations=self._iterations,
            time_us=placed.time_us,
            time_us_fastest_rank=fastest,
            time_us_slowest_rank=slowest,
            slowest_rank=slowest_rank,
            algbw_gb_s=placed.algbw_gb_s,
            busbw_gb_s=placed.busbw_gb_s,
            wrong=placed.wrong,
            verified=Verified.NO if placed.wrong is None else Verified.REPEAT,
            batch_cv=None if each.cv_percent is None else each.cv_percent / 100,
            ci95_percent=_ci95_percent(each),
            p50_us=each.p50_us,
            p95_us=each.p95_us,
            p99_us=each.p99_us,
            transport=names(self._paths),
            host_staged=is_staged(self._paths),
            verdict=None,
            note=self._note(by, placed),
        )

    def _extremes(self, placed: Placed, each: PerIteration) -> tuple[float | None, float | None, int | None]:
        """The fastest and slowest rank's time, and which rank that was: of a process that drives several, the first."""
        means = each.mean_us_by_process
        if means:
            slowest = max(range(len(means)), key=means.__getitem__)
            return min(means), means[slowest], slowest * self.ranks_a_process
        return (
            placed.time_us if self.average == 2 else None,
            placed.time_us if self.average == 3 else None,
            None,
        )

    def _note(self, by: str | None, placed: Placed) -> str | None:
        each = placed.per_iteration
        slowest = ", slowest GPU of each" if each and each.mean_us_by_process else ""
        notes = (
            _AVERAGES.get(self.average, ""),
            CPU_TIME if self.cpu_time else "",
            "waits after each operation (-z)" if self.blocking else "",
            f"statistics of single operations between CUDA events{slowest}" if each else "",
            by,
        )
        return "; ".join(filter(None, notes)) or None


def _ci95_percent(each: PerIteration) -> float | None:
    """Half the 95 % interval of the mean, as if operations were independent: 1.96 standard errors."""
    if each.cv_percent is None or not each.samples:
        return None
    return _Z95 * each.cv_percent / math.sqrt(each.samples)
