"""The nccl backend beside torch.distributed: timed as that has to be, so that both times are of the same thing."""

from collections.abc import Mapping, Sequence
from functools import partial

from gpubench.hardware.cuda.device import CudaDevice
from gpubench.hardware.nccl.backend import NcclBackend, NcclLibrary
from gpubench.hardware.nccl.calls import call_table
from gpubench.hardware.timing.gated import GatedClock
from gpubench.model.terms.allocator import Allocator
from gpubench.model.terms.progress import UNWATCHED, Progress
from gpubench.ports.group import Group
from gpubench.ports.launch import BatchedLaunch, Launch


class GatedNccl(NcclBackend):
    """NCCL's collectives, timed by the GPU from the opening of a gate behind which they wait."""

    def __init__(
        self,
        group: Group,
        device: CudaDevice,
        library: NcclLibrary,
        allocator: Allocator = Allocator.CUDA,
        progress: Progress = UNWATCHED,
    ) -> None:
        super().__init__(group, device, library, allocator, progress)
        until_idle = partial(self.wait_for, device.stream)
        self._clock = GatedClock(device.cupy, device.stream, group, progress, self._in_one, until_idle)

    def _in_one(self, launches: Sequence[Launch]) -> Launch:
        return partial(self.issue, call_table(launches))

    def libraries(self) -> Mapping[str, str]:
        """Those of every nccl backend, and whether there is a gate."""
        return {**super().libraries(), **self._clock.gate_words()}

    def bind(self, launches: Sequence[Launch], graph_replays: int) -> Launch:
        """All launches in order on the stream; UsageError where replays are asked for."""
        return self._clock.bind(launches, graph_replays)

    def in_batches(self, launches: Sequence[Launch], operations: int) -> BatchedLaunch:
        """All launches in order on the stream, timed in batches of so many."""
        return self._clock.in_batches(launches, operations)

    def seconds(self, launch: Launch) -> float:
        """Wall time until the stream is idle."""
        return self._clock.seconds(launch)

    def together(self, launch: Launch) -> float:
        """Seconds of the GPU for all operations, each portion of them issued before it begins on any rank."""
        return self._clock.together(launch)

    def issue_seconds(self, launch: Launch, operations: int) -> float | None:
        """Seconds of the host to issue one of the operations that were timed last."""
        return self._clock.issue_seconds(launch, operations)

    def close(self) -> None:
        """Destroy the communicators, then free buffers and gate."""
        self._device.stream.synchronize()
        self._clock.free_gate()
        super().close()
