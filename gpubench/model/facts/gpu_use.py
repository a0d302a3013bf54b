"""The processes that use a GPU, CUDA's MPS among them, and the condition of a GPU at work."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

_MPS_SERVER = "nvidia-cuda-mps-server"
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that has a context on a GPU. Inside a container its pid may be another's.

    `container` is the short id of the container that it runs in, with its runtime's name; `mps` is whether NVML lists
    it among those that an MPS server runs.
    """

    pid: int
    name: str | None = None
    memory_bytes: int | None = None
    container: str | None = None
    mps: bool = False

    @property
    def label(self) -> str:
        """Its name in texts: 'process 8342 (python)', with its container where it has one."""
        named = f"process {self.pid}" + (f" ({self.name})" if self.name else "")
        return " ".join(
            filter(None, (named, "under MPS" if self.mps else "", f"in {self.container}" if self.container else ""))
        )

    @property
    def is_mps_server(self) -> bool:
        """True of an MPS server, which does no work of its own: its clients are listed beside it."""
        return (self.name or "").rpartition("/")[2] == _MPS_SERVER

    @property
    def shows_mps(self) -> bool:
        """True of a process that an MPS server runs, and of the server."""
        return self.mps or self.is_mps_server


class _UsedGpu(Protocol):
    @property
    def device(self) -> str: ...

    @property
    def processes(self) -> tuple[GpuProcess, ...] | None: ...


def mps_in_use(gpus: Iterable[_UsedGpu], environment: Mapping[str, str]) -> str:
    """Where CUDA's MPS is in use: 'in use on GPU0', by NVML's processes, and what the environment asks for; else ''."""
    seen = [gpu.device for gpu in gpus if any(each.shows_mps for each in gpu.processes or ())]
    asked = [f"{name}={value}" for name, value in environment.items() if name == _PIPES]
    found = [f"in use on {', '.join(dict.fromkeys(seen))}"] if seen else []
    return "; ".join([*found, *(f"asked for by {each}" for each in asked)])


THROTTLE_REASONS = (
    *("sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake"),
)
"""The reasons for which a GPU's clocks are held down, in the order of their bits in NVML, 0x04 to 0x80."""

LEAST_CLOCK_SHARE = 0.9
"""Of the highest clock: a GPU at work below that is worth naming."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCondition:
    """A GPU right after the operations of a row, as far as it can slow them down.

    `throttle_reasons` leaves out idling and clocks that somebody asked for; `clock_mhz` is None while it idles.
    `memory_errors` are uncorrectable ones since the driver was loaded. `others` are processes that have a context on
    it, beside its rank. `unread` are the facts that could not be read, each with the reason.
    """

    throttle_reasons: tuple[str, ...] = ()
    clock_mhz: int | None = None
    most_clock_mhz: int | None = None
    memory_errors: int = 0
    others: tuple[GpuProcess, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)

    def together(self, later: "GpuCondition") -> "GpuCondition":
        """Two readings as one: the worse of each fact."""
        clocks = [each for each in (self.clock_mhz, later.clock_mhz) if each is not None]
        return GpuCondition(
            throttle_reasons=tuple(dict.fromkeys((*self.throttle_reasons, *later.throttle_reasons))),
            clock_mhz=min(clocks, default=None),
            most_clock_mhz=later.most_clock_mhz or self.most_clock_mhz,
            memory_errors=max(self.memory_errors, later.memory_errors),
            others=later.others or self.others,
            unread={name: later.unread[name] for name in self.unread if name in later.unread},
        )

    @property
    def not_read(self) -> str:
        """The facts that could not be read, with the reasons; empty where all are known."""
        if not self.unread:
            return ""
        return f"{', '.join(self.unread).replace('_', ' ')} ({'; '.join(dict.fromkeys(self.unread.values()))})"

    def remarks(self) -> Iterator[str]:
        """Predicates for a GPU that say what is wrong with it: 'runs at 600 of 1980 MHz'; none where nothing is."""
        clock = f"{self.clock_mhz} of {self.most_clock_mhz} MHz"
        slow = self.clock_mhz and self.most_clock_mhz and self.clock_mhz < LEAST_CLOCK_SHARE * self.most_clock_mhz
        if self.throttle_reasons:
            reasons = ", ".join(self.throttle_reasons).replace("_", " ")
            yield f"is throttled: {reasons}" + (f"; {clock}" if slow else "")
        elif slow:
            yield f"runs at {clock}"
        if self.memory_errors:
            yield f"had {self.memory_errors} uncorrectable memory errors since the driver was loaded"
        if self.others:
            yield f"is used by {' and '.join(map(_user, self.others))} too"


def _user(process: GpuProcess) -> str:
    held = f", which holds {process.memory_bytes / 2**30:.1f} GiB," if process.memory_bytes else ""
    return f"{process.label}{held}"
