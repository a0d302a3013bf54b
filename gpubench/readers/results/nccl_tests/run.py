"""One run of an nccl-tests program, from text, JSON or a shortened table, and its conversion to result rows."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NoReturn

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.errors import IncompleteResultError, UsageError
from gpubench.model.paths.transport import Transport, is_staged, join_names, parse_transport
from gpubench.model.results.report import CollectiveRow, Verified
from gpubench.model.results.result_file import (
    CPU_TIME,
    NO_USER_FACTS,
    FileCircumstances,
    ResultFile,
    RunPlace,
    UserFacts,
    left_out_remark,
)
from gpubench.model.terms.units import plural, shorten
from gpubench.model.terms.verdict import Origin
from gpubench.readers import limits
from gpubench.readers.results.nccl_tests import table
from gpubench.readers.results.nccl_tests.cut import CutLine, cut_collectives

_MOVES_ONLY = ("allgather", "broadcast", "alltoall", "alltoallv", "gather", "scatter", "sendrecv", "hypercube")
_AVERAGES: Mapping[int | None, str] = {
    0: "time of rank 0 (-a 0)",
    2: "time of the fastest rank (-a 2)",
    3: "time of the slowest rank (-a 3)",
}
_Z95 = 1.96


class NcclTestsRun(Struct, kw_only=True):
    """A run of an nccl-tests program, filled in while its output is read.

    - `program`: nccl-tests or rccl-tests
    - `library`: name and version of the library that was measured
    - `average`: the value of -a (0 rank 0, 1 mean, 2 fastest rank, 3 slowest rank), or None if unknown
    - `halves`: rows without their second placement, by line number
    - `left_out`: the reason for each unreadable row, by line number
    - `transports`: transport names in NCCL's log lines
    - `ends`: how many times the last line of a run was found, which can exceed 1 for parallel runs
    - `is_elided`: True if a person omitted some devices from the list
    """

    program: str = "nccl-tests"
    collective: str | None = None
    version: str | None = None
    library: tuple[str, str] | None = None
    settings: dict[str, int] = field(default_factory=dict)
    blocking: bool = False
    cpu_time: bool = False
    average: int | None = None
    devices: list[table.Device] = field(default_factory=list)
    lines: list[table.OutputLine] = field(default_factory=list)
    halves: dict[int, table.OutputLine] = field(default_factory=dict)
    left_out: dict[int, str] = field(default_factory=dict)
    cut: list[CutLine] = field(default_factory=list)
    transports: set[str] = field(default_factory=set)
    out_of_bounds: int | None = None
    complete: bool = False
    ends: int = 0
    first_line: int = 0
    listed: set[int] = field(default_factory=set)
    is_elided: bool = False
    is_halved: bool = False

    @property
    def has_begun(self) -> bool:
        """True if the run has devices or rows, so that the next header belongs to a new run."""
        return bool(self.devices or self.lines or self.cut)

    @property
    def samples(self) -> int | None:
        """Number of operations in the statistics of option -I, or None if unknown."""
        iterations = self.settings.get("iterations")
        return None if iterations is None else iterations - self.settings.get("skipped", 0)

    @property
    def measured(self) -> list[table.OutputLine]:
        """The rows that can be judged. Rows of size 0 are left out, because a small size may have been rounded down
        to 0.
        """
        return [line for line in self.lines if line.size_bytes > 0]

    @property
    def lacks_devices(self) -> bool:
        """True if the device list is incomplete, for example in an excerpt that starts in the middle of the list."""
        if self.is_elided:
            return True
        processes = len({(device.host, device.pid) for device in self.devices})
        listed = max(len(self.devices), processes * self.ranks_a_process)
        return max((device.rank for device in self.devices), default=-1) >= listed

    def rows(self, where: str, user_facts: UserFacts = NO_USER_FACTS) -> list[CollectiveRow]:
        """Return one result row per line and placement. `user_facts` supplies facts that the run lacks.

        `where` is the file name for error messages.

        Raises:
            IncompleteResultError: The number of ranks or the collective is unknown.
            UsageError: The values contradict each other or `user_facts`.
        """
        lines = self.measured
        if not (lines or self.cut):
            return []
        named = self.collective or user_facts.collective
        shape = self._shape(where, user_facts)
        possible = [named] if named else table.possible_collectives(lines, None) if lines else cut_collectives(self.cut)
        if shape is None:
            raise self._not_said(where, possible)
        if not lines and len(possible) > 1:
            raise self._not_said(where, possible)
        lines = lines or [cut.whole(possible[0], shape[0]) for cut in self.cut]
        if len(possible) == 1 and self.devices and not self.lacks_devices:
            self._check_devices(lines, where, shape[0])
        elif len(possible) == 1 and user_facts.ranks is not None:
            self._check_user_facts(lines, where, user_facts, possible[0])
        collective = self.collective or (
            possible[0] if self.cut else table.collective_of(lines, shape[0], user_facts.collective, where)
        )
        how = "--collective" if user_facts.collective else "the shape of its rows"
        by = None if self.collective else f"{collective} by {how}: nccl-tests did not name it"
        return [self._row(collective, by, shape, line, placed) for line in lines for placed in line.placed]

    def _check_devices(self, lines: Sequence[table.OutputLine], where: str, ranks: int) -> None:
        """Raise UsageError if the rows do not match the number of devices.

        For all-reduce, the ratio of its bandwidths shows the number of ranks. For other collectives, the element count
        shows it, but not in output without a version, because the meaning of the count has changed.
        """
        large = [line for line in lines if line.size_bytes >= table.LARGE_BYTES]
        tells = self.collective == "allreduce" or self.version is not None
        likely = table.likely_ranks(large, self.collective) if large and tells and self.collective else None
        if likely not in (None, ranks):
            raise UsageError(
                f"{where}, line {self.first_line}: the list of devices names {plural(ranks, 'rank')}, but its rows "
                f"are those of {likely}",
                expected="one run, with its devices",
                reason="devices were left out, or two runs were pasted into one",
                next_step="use the complete output of one run",
            )

    def _check_user_facts(
        self, lines: Sequence[table.OutputLine], where: str, user_facts: UserFacts, collective: str
    ) -> None:
        likely = table.likely_ranks(lines, collective)
        if likely is not None and likely != user_facts.ranks:
            a_node, rest = divmod(likely, user_facts.nodes)
            raise UsageError(
                f"{where}: its ratio of busbw to algbw is that of {likely} ranks, but --machine has {user_facts.ranks}",
                expected=f"the machine that the table is of{'' if rest else f': {a_node} ranks on each node'}",
                reason="a different number of GPUs or nodes took part",
                next_step=f"--machine NAME/{a_node} is that part of each node" if not rest and a_node else "",
            )

    def _not_said(self, where: str, collectives: list[str]) -> IncompleteResultError:
        error = IncompleteResultError(
            f"{where}: rows without the lines with the number of ranks and iterations",
            expected="the lines '# nThread ...' and '#  Rank  0 ...' above them",
            reason="the beginning of the output is missing",
            next_step="use the complete output of nccl-tests",
        )
        error.ranks, error.collectives = True, collectives
        error.models = tuple(dict.fromkeys(device.name for device in self.devices))
        if len(collectives) == 1 and self.measured:
            error.likely_ranks = table.likely_ranks(self.measured, collectives[0])
        if self.devices and error.likely_ranks is None:
            error.likely_ranks = 1 + max(device.rank for device in self.devices)
        return error

    def _shape(self, where: str, user_facts: UserFacts) -> tuple[int, int, str | None] | None:
        """Return the number of ranks, the number of nodes, and a note about groups. None if the number of ranks is
        unknown.
        """
        if user_facts.ranks is None and not self.devices:
            return self._shape_of_process(user_facts.collective)
        if user_facts.ranks is None and self.lacks_devices:
            return self._shape_by_gaps()
        if not self.devices or self.lacks_devices:
            ranks = max((device.rank + 1 for device in self.devices), default=user_facts.ranks)
            return None if ranks is None or user_facts.ranks is None else (ranks, user_facts.nodes, None)
        groups = sorted({device.group for device in self.devices})
        own = [device for device in self.devices if device.group == self.devices[0].group]
        nodes = len({device.host for device in own})
        # Text lists at most 2 kB of devices per process, and JSON lists only the first device of each process.
        processes = len({(device.host, device.pid) for device in own})
        ranks = max(len(own), processes * self.ranks_a_process)
        if not 0 < ranks <= limits.MOST_RESULT_RANKS:
            raise UsageError(f"{where}: a run with {ranks} ranks", expected=f"1 to {limits.MOST_RESULT_RANKS}")
        return ranks, nodes, f"each of {len(groups)} groups, as one" if len(groups) > 1 else None

    def _shape_of_process(self, collective: str | None) -> tuple[int, int, None] | None:
        """Return the ranks and nodes of a single process, if its rows match the number of GPUs in its '# nThread'
        line.
        """
        if "gpus" not in self.settings or not self.measured:
            return None
        possible = table.possible_collectives(self.measured, None)
        named = self.collective or collective or (possible[0] if len(possible) == 1 else None)
        ranks = self.ranks_a_process
        return (ranks, 1, None) if named and table.likely_ranks(self.measured, named) == ranks else None

    def _shape_by_gaps(self) -> tuple[int, int, None] | None:
        """Return the ranks and nodes for a device list with gaps.

        None unless the list has its first two devices and its last one, and they leave no other possibility.
        """
        per_node = 1 + max(device.index for device in self.devices)
        ranks = 1 + max(device.rank for device in self.devices)
        likely = table.likely_ranks(self.measured, self.collective) if self.measured and self.collective else None
        if likely is not None and likely != ranks:
            return None
        hosts = {device.rank // per_node: device.host for device in self.devices}
        is_regular = all(
            device.rank % per_node == device.index and hosts[device.rank // per_node] == device.host
            for device in self.devices
        )
        starts = {0, 1} <= self.listed
        is_known = (
            starts and ranks > len(self.devices) and ranks % per_node == 0 and len(set(hosts.values())) == len(hosts)
        )
        return (ranks, ranks // per_node, None) if is_known and is_regular else None

    def machine(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the host names, and the GPU model of each rank. Both are empty if the device list does not show
        them.
        """
        hosts, names = (
            tuple(dict.fromkeys(device.host for device in self.devices)),
            [device.name for device in self.devices],
        )
        if self.lacks_devices:
            shape = self._shape_by_gaps()
            if shape is None or len(set(names)) != 1:
                return (), ()
            return hosts if len(hosts) == shape[1] else (), (names[0],) * shape[0]
        # JSON lists only the first device of each process, and text at most 2 kB. Assume that the other GPUs are the
        # same.
        processes = len({(device.host, device.pid) for device in self.devices})
        unnamed = max(0, processes * self.ranks_a_process - len(names))
        per_name = self.ranks_a_process if len(names) == processes else 1
        whole = tuple(name for name in names for _ in range(per_name))
        return hosts, whole + (names[0],) * unnamed if per_name == 1 and len(set(names)) == 1 else whole

    @property
    def ranks_a_process(self) -> int:
        """Number of ranks per process: its GPUs, times the ranks per GPU in rccl-tests."""
        return math.prod(self.settings.get(name, 1) for name in ("threads", "gpus", "ranks_a_gpu"))

    @property
    def launches(self) -> int:
        """Number of GPUs on which one thread launches operations.

        It is from the '# nThread' line, or else from the number of ranks that share a process.
        """
        if "gpus" in self.settings:
            return self.ranks_a_process // self.settings.get("threads", 1)
        shared = Counter((device.group, device.host, device.pid) for device in self.devices if device.pid)
        return max(shared.values(), default=1)

    @property
    def _paths(self) -> list[Transport]:
        """The transports in NCCL's log lines among the rows, without NIC numbers."""
        return [replace(transport, name=transport.family) for transport in map(parse_transport, self.transports)]

    @property
    def _iterations(self) -> int | None:
        counted = self.settings.get("iterations")
        return None if counted is None else counted * self.settings.get("aggregated", 1)

    def _row(
        self,
        collective: str,
        by: str | None,
        shape: tuple[int, int, str | None],
        line: table.OutputLine,
        placed: table.Placed,
    ) -> CollectiveRow:
        ranks, nodes, group = shape
        statistics = placed.per_iteration or table.PerIteration()
        fastest, slowest, slowest_rank = self._extremes(placed, statistics)
        return CollectiveRow(
            collective=collective,
            backend="rccl" if self.program == "rccl-tests" else "nccl",
            origin=Origin.RECORDED,
            group=group,
            ranks=ranks,
            nodes=nodes,
            size_bytes=line.size_bytes,
            count=line.count,
            dtype=table.ELEMENT_TYPES[line.element_type][0],
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
            batch_cv=None if statistics.cv_percent is None else statistics.cv_percent / 100,
            ci95_percent=_ci95_percent(statistics),
            p50_us=statistics.p50_us,
            p95_us=statistics.p95_us,
            p99_us=statistics.p99_us,
            transport=join_names(self._paths),
            host_staged=is_staged(self._paths),
            verdict=None,
            note=self._note(by, placed),
        )

    def _extremes(
        self, placed: table.Placed, statistics: table.PerIteration
    ) -> tuple[float | None, float | None, int | None]:
        means = statistics.mean_us_by_process
        if means:
            slowest = max(range(len(means)), key=means.__getitem__)
            return min(means), means[slowest], slowest * self.ranks_a_process
        return (
            placed.time_us if self.average == 2 else None,
            placed.time_us if self.average == 3 else None,
            None,
        )

    def _note(self, by: str | None, placed: table.Placed) -> str | None:
        statistics = placed.per_iteration
        slowest = ", slowest GPU of each" if statistics and statistics.mean_us_by_process else ""
        notes = (
            _AVERAGES.get(self.average, ""),
            CPU_TIME if self.cpu_time else "",
            "waits after each operation (-z)" if self.blocking else "",
            f"statistics of single operations between CUDA events{slowest}" if statistics else "",
            by,
        )
        return "; ".join(filter(None, notes)) or None


def _ci95_percent(statistics: table.PerIteration) -> float | None:
    """Return half the 95 % confidence interval of the mean in percent: 1.96 standard errors of independent
    operations.
    """
    if statistics.cv_percent is None or not statistics.samples:
        return None
    return _Z95 * statistics.cv_percent / math.sqrt(statistics.samples)


def result_file(
    runs: Sequence[NcclTestsRun],
    name: str,
    kind: str,
    remarks: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    user_facts: UserFacts = NO_USER_FACTS,
) -> ResultFile:
    """Return the rows of all runs, and the machine and settings of the first run that has rows. `kind` is text or
    JSON.

    `user_facts` supplies facts that the runs lack.

    Raises:
        UsageError: There are no rows to judge.
        IncompleteResultError: The number of ranks or the collective of some rows is unknown.
    """
    measured = [run for run in runs if run.measured or run.cut]
    left_out = tuple(fault for run in runs for fault in run.left_out.values())
    if not measured:
        _refuse(runs, name, left_out)
    by_run = [run.rows(name, user_facts) for run in measured]
    unfinished = sum(not run.complete for run in measured)
    unended = f"{unfinished} of {len(measured)} runs" if measured[1:] else "the run"
    more = [f"{unended} did not end (its last lines are missing)"] if unfinished else []
    empty = sum(not run.lines and bool(run.settings) for run in runs) - sum(max(0, run.ends - 1) for run in measured)
    more += [f"{plural(empty, 'run')} without a row"] if empty > 0 else []
    zero = sum(len(run.lines) - len(run.measured) for run in runs)
    more += [f"{plural(zero, 'row')} of size 0 left out, because no data moved"] if zero else []
    more += (
        ["some columns were cut off, and their values were derived from the rest"]
        if any(run.cut for run in runs)
        else []
    )
    more += ["its rows have only one half, read as out of place"] if any(run.is_halved for run in runs) else []
    more += (
        ["some devices were left out, and assumed to be like the others"]
        if any(run.is_elided for run in measured)
        else []
    )
    places = tuple(_place(run, rows) for run, rows in zip(measured, by_run, strict=True) if rows)
    more += [f"{len(places)} runs, from {shorten([f'line {place.line}' for place in places])}"] if places[1:] else []
    return ResultFile(
        name=name,
        kind=f"{measured[0].program} {kind}",
        circumstances=_circumstances(measured, environment),
        rows=tuple(row for rows in by_run for row in rows),
        complete=not (unfinished or empty > 0 or left_out),
        remarks=(*remarks, *([left_out_remark(left_out)] if left_out else []), *more),
        left_out=left_out,
        runs=places,
    )


def _place(run: NcclTestsRun, rows: Sequence[CollectiveRow]) -> RunPlace:
    table = rows[0].collective, rows[0].ranks, rows[0].nodes
    return RunPlace(run.first_line, table, run.machine(), run.launches, len(rows), run.out_of_bounds)


def _refuse(runs: Sequence[NcclTestsRun], name: str, left_out: Sequence[str]) -> NoReturn:
    seen, reason = f"{name} has no measured values", "the run ended before its first size"
    if left_out:
        seen = f"{name} has no complete row: {plural(len(left_out), 'row')} damaged, the first on {left_out[0]}"
        reason = "values are missing, or mixed with other output"
    elif any(run.lines for run in runs):
        seen, reason = f"{name} has only rows of size 0", "with many ranks, small sizes are rounded down to 0"
    raise UsageError(
        seen,
        expected="rows of nccl-tests: size, count, type, redop, root, time, algbw, busbw, #wrong",
        reason=reason,
        next_step=f"tail {name} shows the end of the run, and -e 1G measures larger sizes",
    )


def _circumstances(runs: Sequence[NcclTestsRun], environment: Mapping[str, str] | None) -> FileCircumstances:
    first = runs[0]
    bounds = [run.out_of_bounds for run in runs if run.out_of_bounds is not None]
    hosts, gpus = first.machine()
    return FileCircumstances(
        tool=" ".join(filter(None, (first.program, first.version))),
        hosts=hosts,
        gpus=gpus,
        libraries=dict([first.library]) if first.library else {},
        environment=environment,
        options={key: str(first.settings[key]) for key in ("warmup", "validation") if key in first.settings},
        wrong_elements=sum(bounds) if bounds else None,
    )
