"""The times of each rank in each row, and the ranks that the others wait for."""

from collections.abc import Iterator, Sequence

from gpubench.model.facts.gpu_condition import GpuCondition
from gpubench.model.results.rank_times import RANK_TIMES_SECTION, RankTimeRow
from gpubench.model.results.report import CollectiveRow, Section, Table
from gpubench.model.terms.rank_identity import RankIdentity, ranks_per_gpu
from gpubench.model.terms.statistics.lateness import EntryTimes, Straggler, straggler
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND, compress_names, spans
from gpubench.model.terms.verdict import STRAGGLER, Finding, Verdict

RankPart = tuple[float, EntryTimes | None]
"""A rank's seconds an operation, and when it entered them, where that is known."""


class RankTimings:
    """Collects the times of every rank over the rows of a sweep."""

    def __init__(self, identities: Sequence[RankIdentity]) -> None:
        self._identities = identities
        self._rows: list[tuple[CollectiveRow, Sequence[RankPart]]] = []
        self._conditions: dict[int, GpuCondition] = {}

    def add_row(self, row: CollectiveRow, parts: Sequence[RankPart]) -> None:
        """Add a row with each rank's part in it, in rank order."""
        self._rows.append((row, parts))

    def add_conditions(self, conditions: Sequence[GpuCondition | None]) -> None:
        """Add the conditions of the ranks' GPUs after a row, in rank order; None is not known."""
        for rank, condition in enumerate(conditions):
            if condition is not None:
                before = self._conditions.get(rank)
                self._conditions[rank] = condition if before is None else before.together(condition)

    def sections(self) -> dict[str, Section]:
        """A line for every rank and row; no section without rows."""
        if not self._rows:
            return {}
        return {RANK_TIMES_SECTION: Table(RankTimeRow.columns(), lambda: list(self._lines()))}

    def findings(self) -> tuple[Finding, ...]:
        """The finding on ranks that are late as a rule, if there are any; ranks of one GPU are late by its turns."""
        if (ranks_per_gpu(self._identities) or 1) > 1:
            return ()
        known = []
        for row, parts in self._rows:
            entries = [each for _, each in parts if each is not None]
            if len(entries) == len(self._identities):
                known.append((entries, row.time_us / MICROSECONDS_PER_SECOND))
        found = straggler(known, [each.node for each in self._identities])
        return () if found is None else (self._finding(found),)

    def _lines(self) -> Iterator[RankTimeRow]:
        for row, parts in self._rows:
            for identity, (seconds, entries) in zip(self._identities, parts, strict=True):
                yield RankTimeRow(
                    collective=row.collective,
                    backend=row.backend,
                    origin=row.origin,
                    size_bytes=row.size_bytes,
                    dtype=row.dtype,
                    op=row.op,
                    placement=row.placement,
                    mode=row.mode,
                    rank=identity.rank,
                    host=identity.host,
                    node=identity.node,
                    gpu_bus_id=identity.gpu_bus_id,
                    time_us=seconds * MICROSECONDS_PER_SECOND,
                    late_us=None if entries is None else entries.late_seconds * MICROSECONDS_PER_SECOND,
                    clock_uncertainty_us=None if entries is None else entries.uncertainty * MICROSECONDS_PER_SECOND,
                    last_percent=None if entries is None else 100 * entries.last / entries.operations,
                    setting=row.setting,
                )

    def _finding(self, found: Straggler) -> Finding:
        late = [self._identities[rank] for rank in found.ranks]
        subject = str(late[0])
        if len(late) > 1:
            hosts = compress_names(sorted({each.host for each in late}))
            subject = f"ranks {spans([each.rank for each in late])} on {hosts}"
        usual = len(late) / len(self._identities)
        return Finding(
            id=STRAGGLER,
            severity=Verdict.WARN,
            subject=subject,
            seen=f"the last to enter {found.last} of {found.operations} operations, "
            f"{found.late_seconds * MICROSECONDS_PER_SECOND:.0f} µs behind the others in the median row, where an "
            f"operation takes {found.operation_seconds * MICROSECONDS_PER_SECOND:.0f} µs"
            + "".join(f"; {remark}" for remark in self._remarks(late)),
            expected=f"{usual:.0%} of them, as of any other; by chance it would be so with a probability of at most "
            f"{found.chance:.0e}",
            cause="its processor, its GPU or its host is slower, or busy with something else",
            next_command="gpubench topo on that host: throttling, errors and other users of its GPU; then top",
            subjects=tuple(map(str, late)),
        )

    def _remarks(self, late: Sequence[RankIdentity]) -> Iterator[str]:
        for identity in late:
            condition = self._conditions.get(identity.rank)
            if condition is None:
                continue
            gpu = f"its GPU {identity.gpu_index}" if len(late) == 1 else f"GPU {identity.gpu_index} of {identity}"
            if remarks := list(condition.remarks()):
                yield f"{gpu} {', and '.join(remarks)}"
            if condition.not_read:
                yield f"not read of {gpu}: {condition.not_read}"
