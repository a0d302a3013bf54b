"""The rows of both sides by key, each with the figures of every run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gpubench.model.paths.transport import is_staged, parse_transport
from gpubench.model.results.above_limit import times_limit
from gpubench.model.results.latencies import LatencyRow
from gpubench.model.results.report import CollectiveRow, PairRow, made_of
from gpubench.model.results.result_file import ResultFile
from gpubench.model.results.row_keys import collective_key, pair_key
from gpubench.model.results.rows.comparison import RowKey


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """The figures of one row of one run. `time_us` is None where it was not measured."""

    time_us: float | None
    gb_s: float | None
    error_of_mean: float | None = None
    origin: str
    transport: str | None
    host_staged: bool | None
    verdict: str | None
    wrong: int | None = None
    verified: bool
    path_class: str | None = None
    limit_gb_s: float | None = None
    times_limit: float | None = None
    note: str | None = None


RunsByRow = dict[RowKey, list[RunFigures]]
"""The figures of every run by row key, in the order of files and rows."""


def gather(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> tuple[RunsByRow, RunsByRow]:
    """Both sides by key. Pairs are known by bus id where the hosts are the same, else by the devices' names."""
    settings = _swept([*base, *new])
    same_hosts = _pair_nodes(base) == _pair_nodes(new)
    sides: list[RunsByRow] = []
    for files in (base, new):
        measured: RunsByRow = {}
        nodes = _pair_nodes(files)
        for file in files:
            for row in file.rows:
                key = collective_key(row)
                if key in settings:
                    key = replace(key, setting=_setting(row))
                measured.setdefault(key, []).append(_of_collective(row))
            for latency in file.latencies:
                measured.setdefault(made_of(RowKey, latency), []).append(_of_latency(latency))
            for pair in file.pairs:
                measured.setdefault(pair_key(pair, None if same_hosts else nodes), []).append(_of_pair(pair))
        sides.append(measured)
    return sides[0], sides[1]


def _swept(files: Iterable[ResultFile]) -> set[RowKey]:
    """Keys of which one file has rows with several algorithms or protocols: these were asked for, and not chosen."""
    found = set()
    for file in files:
        settings: dict[RowKey, set[str | None]] = {}
        for row in file.rows:
            settings.setdefault(collective_key(row), set()).add(_setting(row))
        found |= {key for key, each in settings.items() if len(each) > 1}
    return found


def _setting(row: CollectiveRow) -> str | None:
    return " ".join(filter(None, (row.algorithm, row.protocol))) or None


def _pair_nodes(files: Iterable[ResultFile]) -> list[str]:
    pairs = [pair for file in files for pair in file.pairs]
    return sorted({host for pair in pairs for host in (pair.source_node, pair.destination_node)})


def _of_collective(row: CollectiveRow) -> RunFigures:
    return made_of(
        RunFigures,
        row,
        gb_s=row.busbw_gb_s,
        error_of_mean=_error_of_mean(row),
        host_staged=_staged(row.host_staged, row.transport),
        verified=row.verified != "no",
        limit_gb_s=None,
        times_limit=times_limit(row),
    )


def _of_latency(row: LatencyRow) -> RunFigures:
    return made_of(
        RunFigures,
        row,
        gb_s=row.busbw_gb_s,
        transport=None,
        host_staged=None,
        verdict=None,
        verified=row.verified != "no",
    )


def _of_pair(row: PairRow) -> RunFigures:
    return made_of(
        RunFigures,
        row,
        time_us=row.latency_us if row.latency_us is not None else _time_us(row),
        gb_s=row.bandwidth_gb_s,
        host_staged=_staged(row.host_staged, row.transport),
        verified=row.verified not in (None, "no"),
        times_limit=times_limit(row),
    )


def _time_us(row: PairRow) -> float | None:
    """The time that a copy of many at once takes, where only their bandwidth was measured."""
    return row.size_bytes / row.bandwidth_gb_s / 1e3 if row.size_bytes and row.bandwidth_gb_s else None


def _error_of_mean(row: CollectiveRow) -> float | None:
    """The standard error of a row's time as a part of it: of its interval, else the whole spread of its batches."""
    if row.ci95_percent is not None:
        return row.ci95_percent / 100 / 1.96
    return row.batch_cv


def _staged(in_row: bool | None, transport: str | None) -> bool | None:  # noqa: FBT001 - a column's three answers
    """True where the bytes went through host memory: as the row says, else as any of its transports must."""
    if in_row is not None or not transport:
        return in_row
    return is_staged([parse_transport(each) for each in transport.split("+")])
