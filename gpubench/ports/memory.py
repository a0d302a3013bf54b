"""Memory that operations read and write, and arrays of NumPy and CuPy over it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from gpubench.model.terms.operation import Block, DataPattern

Array = Any
"""A NumPy or CuPy array."""


ArrayNamespace = Any
"""The module of an array: `numpy` or `cupy`."""


class Memory(Protocol):
    """One plain allocation of a backend, and the test data in it."""

    @property
    def size_bytes(self) -> int:
        """Bytes that were asked for."""

    def array(self, offset_bytes: int, count: int, dtype: str) -> Array:
        """`count` elements of a NumPy `dtype` from `offset_bytes` on, as a writable view."""

    def fill_sent(self, data: DataPattern, block: Block, rank: int) -> None:
        """Write what `rank` sends into a block."""

    def fill_byte(self, size_bytes: int, value: int) -> None:
        """Set the first `size_bytes` bytes to a value."""

    def count_wrong(self, data: DataPattern, blocks: Sequence[tuple[Block, int | None]]) -> int:
        """Elements that differ from what their block must hold: what that rank sent, or, with None, the reduction."""


class BufferSource(Protocol):
    """The memory that a rank can take for the buffers of a sweep."""

    @property
    def buffers(self) -> int:
        """Buffers of the largest size that a sweep holds at once, the backend's own working space included."""

    def free_bytes(self) -> int:
        """Memory this rank can still take for buffers."""

    def allocate(self, size_bytes: int) -> Memory:
        """A plain allocation of that size, kept until the backend is closed."""


@runtime_checkable
class SharedMemory(Protocol):
    """A source of memory that several backends may have in common: then they can work in the same buffers."""

    @property
    def memory_source(self) -> object:
        """What the memory is taken from."""


@dataclass(frozen=True, slots=True)
class Region:
    """A place in a memory that an operation reads or writes."""

    memory: Memory
    offset_bytes: int
