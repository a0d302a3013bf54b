"""The keys of rows: what has to be the same of two rows for their figures to be comparable."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from gpubench.model.results.report import CollectiveRow, PairRow, made_of
from gpubench.model.results.rows.comparison import RowKey
from gpubench.model.terms.copies import HostMemory
from gpubench.model.terms.grouping import grouped


def collective_key(row: CollectiveRow) -> RowKey:
    """The key of a row of a collective. A model of NCCL is compared with NCCL, where that is asked for at all."""
    return made_of(RowKey, row, backend="nccl" if row.backend == "simulated" else row.backend)


def pair_key(row: PairRow, nodes: Sequence[str] | None = None) -> RowKey:
    """The key of a pair. `nodes` are the hosts of a side where the other side has others: then their places count."""

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


def siblings(keys: Iterable[RowKey]) -> Iterator[list[RowKey]]:
    """Keys that differ in size and placement alone, or of pairs in the pair alone: those with noise in common."""
    yield from grouped(keys, lambda key: replace(key, **(_PAIR if key.collective is None else _SIZE))).values()


_SIZE = {"size_bytes": None, "placement": None}
_PAIR = {"source": None, "destination": None, "source_node": None, "destination_node": None}
