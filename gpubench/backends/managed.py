"""Managed memory for the GPUs of one process, through driver functions that exist since CUDA 8."""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from gpubench.errors import CouldNotMeasureError
from gpubench.machine import host as host_memory
from gpubench.machine.drivers import load_cuda, read_attribute
from gpubench.model.terms.operation import MANAGED_MEMORY_SHARE, ManagedSupport, Place
from gpubench.model.terms.units import format_size
from gpubench.ports.backend import Memory
from gpubench.ports.copies import CopyStream

if TYPE_CHECKING:
    from gpubench.backends.copies import CudaCopies, GpuMemory, ManagedPages

_ATTRIBUTES = {"managed": 83, "pageable": 88, "concurrent": 89, "host_page_tables": 100}
"""CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, _PAGEABLE_MEMORY_ACCESS, _CONCURRENT_MANAGED_ACCESS and
_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES in cuda.h."""

_CPU = -1  # CU_DEVICE_CPU
_SET_PREFERRED, _UNSET_PREFERRED, _SET_ACCESSED_BY, _UNSET_ACCESSED_BY = 3, 4, 5, 6  # CUmem_advise in cuda.h


class CudaManaged:
    """`ports.copies.ManagedMemory` for the GPUs, streams and clock of a `CudaCopies`."""

    def __init__(self, copies: "CudaCopies", driver: Any) -> None:
        self._copies = copies
        self._driver = driver
        self._views: dict[tuple[int, int], GpuMemory] = {}

    def support(self) -> Sequence[ManagedSupport]:
        """Return each GPU's support for managed memory, from device attributes. Attributes unknown to the driver
        are None.
        """
        return [
            ManagedSupport(
                device=gpu.device,
                **{
                    name: None if (value := read_attribute(self._driver, number, gpu.index)) is None else bool(value)
                    for name, number in _ATTRIBUTES.items()
                },
            )
            for gpu in self._copies.gpus
        ]

    def allocate(self, size_bytes: int) -> Memory:
        """Allocate managed memory, at most a quarter of the free memory on any GPU and on the host."""
        free = {**self._copies.free_bytes(), "the host": host_memory.free_bytes()}
        least = min(free, key=free.__getitem__)
        most = int(free[least] * MANAGED_MEMORY_SHARE)
        if size_bytes > most:
            raise CouldNotMeasureError(
                f"{format_size(size_bytes)} of managed memory is more than {most / 2**30:.3g} GiB, "
                f"{MANAGED_MEMORY_SHARE:.0%} of the free memory of {least}",
                expected="an amount that never evicts a page, because eviction can hang a GPU",
                next_step="use smaller --sizes. nvidia-smi shows what uses the memory",
            )
        return self._copies.allocate_managed(size_bytes)

    def on(self, memory: Memory, place: Place) -> Memory:
        """Return a view through which a GPU or the host fills and checks the allocation."""
        if not isinstance(place, int):
            return memory
        pages = cast("ManagedPages", memory)
        key = pages.address, place
        if key not in self._views:
            self._views[key] = self._copies.view(place, pages)
        return self._views[key]

    def prefetch(self, memory: Memory, place: Place, by: int) -> float:
        """Return the time of a prefetch in seconds, from two events on the stream of GPU `by`."""
        pages, target = cast("ManagedPages", memory), self._ordinal(place)
        doing = f"prefetching {format_size(pages.size_bytes)} of managed memory to {self._name(place)}"

        def issue(stream: int) -> None:
            self._call(
                doing,
                "cuMemPrefetchAsync",
                ctypes.c_uint64(pages.address),
                ctypes.c_size_t(pages.size_bytes),
                ctypes.c_int(target),
                ctypes.c_void_p(stream),
            )

        return self._copies.time_call(by, doing, issue)

    def advise(self, memory: Memory, place: Place, accessor: int, *, stays: bool) -> None:
        """Set (`stays`) or unset the preferred location, and the mapping for the accessing GPU."""
        self._advise(memory, _SET_PREFERRED if stays else _UNSET_PREFERRED, place)
        self._advise(memory, _SET_ACCESSED_BY if stays else _UNSET_ACCESSED_BY, accessor)

    def seconds(self, stream: CopyStream) -> float:
        """Return the time of a copy in seconds. Managed memory needs no special call, because its address is the
        same everywhere.
        """
        return self._copies.seconds([stream], 1)

    def _advise(self, memory: Memory, advice: int, place: Place) -> None:
        pages = cast("ManagedPages", memory)
        self._call(
            f"advising the driver about managed memory of {self._name(place)}",
            "cuMemAdvise",
            ctypes.c_uint64(pages.address),
            ctypes.c_size_t(pages.size_bytes),
            ctypes.c_int(advice),
            ctypes.c_int(self._ordinal(place)),
        )

    def _call(self, doing: str, function: str, *arguments: Any) -> None:
        status = getattr(self._driver, function)(*arguments)
        if status:
            raise CouldNotMeasureError(f"{doing} failed: {function} answered {status}")

    def _ordinal(self, place: Place) -> int:
        return self._copies.gpus[place].index if isinstance(place, int) else _CPU

    def _name(self, place: Place) -> str:
        return self._copies.gpus[place].device if isinstance(place, int) else "the host"


def open_managed(copies: "CudaCopies") -> CudaManaged:
    return CudaManaged(copies, load_cuda())
