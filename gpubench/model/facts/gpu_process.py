"""A process that uses a GPU."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that has a context on a GPU. Inside a container its pid may be another's.

    `container` is the short id of the container that it runs in, with its runtime's name.
    """

    pid: int
    name: str | None = None
    memory_bytes: int | None = None
    container: str | None = None

    @property
    def label(self) -> str:
        """Its name in texts: 'process 8342 (python)', with its container where it has one."""
        named = f"process {self.pid}" + (f" ({self.name})" if self.name else "")
        return f"{named} in {self.container}" if self.container else named
