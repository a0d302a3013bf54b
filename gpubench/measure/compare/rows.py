"""The rows of both sides by key, each with the figures of every run."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gpubench.model.paths.transport import is_staged, parse_transport
from gpubench.model.results.report import CollectiveRow, PairRow, made_of
from gpubench.model.results.result_file import ResultFile
from gpubench.model.results.rows.comparison import RowKey
from gpubench.model.terms.copies import HostMemory
from gpubench.model.terms.grouping import grouped


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
                key = _collective_key(row)
                if key in settings:
                    key = replace(key, setting=_setting(row))
                measured.setdefault(key, []).append(_of_collective(row))
            for pair in file.pairs:
                measured.setdefault(_pair_key(pair, None if same_hosts else nodes), []).append(_of_pair(pair))
        sides.append(measured)
    return sides[0], sides[1]


def _swept(files: Iterable[ResultFile]) -> set[RowKey]:
    """Keys of which one file has rows with several algorithms or protocols: these were asked for, and not chosen."""
    found = set()
    for file in files:
        settings: dict[RowKey, set[str | None]] = {}
        for row in file.rows:
            settings.setdefault(_collective_key(row), set()).add(_setting(row))
        found |= {key for key, each in settings.items() if len(each) > 1}
    return found


def _setting(row: CollectiveRow) -> str | None:
    return " ".join(filter(None, (row.algorithm, row.protocol))) or None


def _collective_key(row: CollectiveRow) -> RowKey:
    # A model of NCCL is compared with NCCL, where that is asked for at all.
    return made_of(RowKey, row, backend="nccl" if row.backend == "simulated" else row.backend)


def _pair_nodes(files: Iterable[ResultFile]) -> list[str]:
    pairs = [pair for file in files for pair in file.pairs]
    return sorted({host for pair in pairs for host in (pair.source_node, pair.destination_node)})


def _pair_key(row: PairRow, nodes: Sequence[str] | None) -> RowKey:
    """`nodes` are the hosts of a side where the other side has others: then their places count."""

    def end(device: str, bus_id: str | None) -> str:
        return bus_id if nodes is None and bus_id is not None else device

    def host(name: str) -> str:
        return name if nodes is None else f"node {nodes.index(name)}"

    memory = HostMemory.of_note(row.note)
    return made_of(
        RowKey,
        row,
        source=end(row.source, row.source_bus_id),
        destination=end(row.destination, row.destination_bus_id),
        source_node=host(row.source_node),
        destination_node=host(row.destination_node),
        setting=memory.full_name if memory else None,
    )


def _of_collective(row: CollectiveRow) -> RunFigures:
    return made_of(
        RunFigures,
        row,
        gb_s=row.busbw_gb_s,
        error_of_mean=_error_of_mean(row),
        host_staged=_staged(row.host_staged, row.transport),
        verified=row.verified != "no",
        limit_gb_s=None,
    )


def _of_pair(row: PairRow) -> RunFigures:
    return made_of(
        RunFigures,
        row,
        time_us=row.latency_us,
        gb_s=row.bandwidth_gb_s,
        host_staged=_staged(row.host_staged, row.transport),
        verified=row.verified not in (None, "no"),
    )


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


def siblings(keys: Iterable[RowKey]) -> Iterator[list[RowKey]]:
    """Keys that differ in size and placement alone, or of pairs in the pair alone: those with noise in common."""
    yield from grouped(keys, lambda key: replace(key, **(_PAIR if key.collective is None else _SIZE))).values()


_SIZE = {"size_bytes": None, "placement": None}
_PAIR = {"source": None, "destination": None, "source_node": None, "destination_node": None}
