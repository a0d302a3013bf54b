"""Managed memory: prefetched, fetched by page faults, or used where it is; every pass from where the pages belong."""

from collections.abc import Callable

from gpubench.measure.p2p.request import ManagedCopy, P2pRequest, random_data
from gpubench.measure.paths.counters import Meter
from gpubench.model.paths.p2p import Cell
from gpubench.model.terms.copies import Engine, HostMemory, Place
from gpubench.model.terms.data_pattern import POISON
from gpubench.model.terms.managed import ManagedWay
from gpubench.ports.copies import Copies, CopyStream
from gpubench.ports.managed import HOST, ManagedMemory
from gpubench.ports.memory import Memory, Region

_SENDER, _SENDERS = 253, 256
"""The number of managed memory as a sender of data."""

_FIRST_ROW = 1 << 20
"""Data of managed memory differ from those of every other copy of the run."""

Buffers = Callable[[Place], tuple[Memory, Memory]]
"""The plain buffers of a GPU, or pinned ones of the host: one that is sent from, one for arrivals."""


class ManagedBench:
    """One managed allocation, made before any plain one, and the passes over it."""

    def __init__(
        self, request: P2pRequest, copies: Copies, managed: ManagedMemory, meter: Meter, buffers: Buffers
    ) -> None:
        self._request, self._copies, self._managed = request, copies, managed
        self._meter, self._buffers = meter, buffers
        self._size = request.managed_bytes or 0
        self._row = _FIRST_ROW
        self._pages = managed.allocate(self._size)

    def cell(self, copy: ManagedCopy) -> Cell:
        """Samples of one pass each, after one that does not count; fresh data in the last.

        Raises:
            CouldNotMeasureError: CUDA refuses, or a quarter of what is free does not hold the memory.
        """
        pages = self._pages
        if copy.way is not ManagedWay.IN_PLACE:
            return self._passes(copy)
        self._managed.advise(pages, self._home(copy), copy.by, stays=True)
        try:
            return self._passes(copy)
        finally:
            self._managed.advise(pages, self._home(copy), copy.by, stays=False)

    def _passes(self, copy: ManagedCopy) -> Cell:
        self._ready(copy)
        self._pass(copy)
        samples = []
        for _ in range(self._request.method.samples - 1):
            self._ready_again(copy)
            samples.append(self._pass(copy))
        if self._request.check:
            self._fresh(copy)
        self._ready(copy)
        receives = copy.source is None
        reading = self._meter.read(copy.by if copy.source is None else copy.source)
        samples.append(self._pass(copy))
        carried = self._meter.since(reading, self._size, receives=receives)
        return Cell(tuple(samples), self._wrong(copy) if self._request.check else None, carried)

    def _home(self, copy: ManagedCopy) -> Place:
        """Where the pages have to be when a pass begins: where they stay, or what they leave."""
        if copy.way is ManagedWay.RESIDENT:
            return copy.by
        return HOST if copy.source is None or _writes_in_place(copy) else copy.source

    def _ready(self, copy: ManagedCopy) -> None:
        if copy.way is ManagedWay.RESIDENT:
            self._managed.prefetch(self._pages, HOST, copy.by)
        if copy.way.is_managed:
            self._managed.prefetch(self._pages, self._home(copy), copy.by)

    def _ready_again(self, copy: ManagedCopy) -> None:
        """Pages that shall stay were not to move: to put them back would hide that they did."""
        if copy.way.is_migration:
            self._ready(copy)

    def _pass(self, copy: ManagedCopy) -> float:
        """Seconds of one pass over all bytes."""
        if copy.way is ManagedWay.PREFETCH:
            return self._managed.prefetch(self._pages, _place(copy.destination), copy.by)
        source, destination = Region(self._source(copy), 0), Region(self._destination(copy), 0)
        stream = CopyStream(copy.by, Engine.SM, source, destination, self._size)
        return self._managed.seconds(stream) if copy.way.is_managed else self._copies.seconds([stream], 1)

    def _source(self, copy: ManagedCopy) -> Memory:
        if copy.way is ManagedWay.PINNED_KERNEL or _writes_in_place(copy):
            sent, _ = self._buffers(HostMemory.PINNED if copy.source is None else copy.source)
            return sent
        return self._pages

    def _destination(self, copy: ManagedCopy) -> Memory:
        if copy.destination is not None:
            return self._buffers(copy.destination)[1]
        return self._pages if copy.way.is_managed else self._buffers(HostMemory.PINNED)[1]

    def _fresh(self, copy: ManagedCopy) -> None:
        """Fresh data where the bytes come from, and nothing that could pass for them where they are to arrive.

        Managed memory is filled by a GPU: the host takes a second for what a GPU does in a millisecond.
        """
        self._row += 1
        data, block = random_data(self._size, self._row, _SENDERS)
        source = self._source(copy)
        if source is self._pages:
            source = self._on_gpu(copy)
        source.fill_sent(data, block, _SENDER)
        if copy.way is ManagedWay.PREFETCH:
            return
        destination = self._destination(copy)
        destination = self._on_gpu(copy) if destination is self._pages else destination
        destination.fill_byte(self._size, POISON)

    def _on_gpu(self, copy: ManagedCopy) -> Memory:
        """The pages on a GPU, as that GPU fills them."""
        gpu = copy.by if copy.source is None else copy.source
        self._managed.prefetch(self._pages, gpu, gpu)
        return self._managed.on(self._pages, gpu)

    def _wrong(self, copy: ManagedCopy) -> int:
        """Wrong elements, counted where they arrived."""
        data, block = random_data(self._size, self._row, _SENDERS)
        if copy.way is ManagedWay.PREFETCH:
            arrived = self._managed.on(self._pages, _place(copy.destination))
        else:
            arrived = self._destination(copy)
        return arrived.count_wrong(data, [(block, _SENDER)])


def _writes_in_place(copy: ManagedCopy) -> bool:
    return copy.way is ManagedWay.IN_PLACE and copy.destination is None


def _place(end: int | None) -> Place:
    return HOST if end is None else end
