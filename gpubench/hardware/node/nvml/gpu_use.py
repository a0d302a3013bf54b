"""The use that processes of nobody in this job make of GPUs, from NVML."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpubench.hardware.node.nvml.answers import Answers, text
from gpubench.hardware.node.nvml.gpu import MEMORY_VERSION, read_processes
from gpubench.hardware.node.nvml.library import open_library
from gpubench.hardware.process.names import container_of, process_name, sees_all_pids
from gpubench.model.facts.gpu_process import GpuProcess
from gpubench.model.facts.idle_gpu import GpuUse
from gpubench.model.facts.snapshot import bus_id


class NvmlUse:
    """Knows who had a context on the GPUs of this host when it was made: that is, before this job has.

    Inside a container NVML's pids may be the host's. They are known to be this container's own where a process of this
    job is among them, and where this process is in the host's PID namespace; else only processes that were there before
    are sure to be somebody else's, and /proc is not asked for their names.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._library = open_library()
        self._before: dict[str, tuple[tuple[GpuProcess, ...], int | None]] = {}
        for name, answers in self._every_gpu():
            self._before[name] = read_processes(answers) or (), _used_bytes(answers)

    def of(self, bus_ids: Sequence[str], own_pids: Collection[int]) -> "OthersOnGpus":
        """The use of GPUs with these PCI bus ids, without that of these processes."""
        return OthersOnGpus(self, bus_ids, own_pids)

    def read(self, name: str, own_pids: Collection[int]) -> GpuUse:
        """The use of the GPU with a PCI bus id by others, while this job is idle."""
        answers = self._answers(name)
        if answers is None:
            return GpuUse()
        rates = answers.call("nvmlDeviceGetUtilizationRates").value
        before, held = self._before.get(bus_id(name), ((), None))
        if held is not None:  # an MPI that knows CUDA may have put ranks on their GPUs already
            held -= sum(each.memory_bytes or 0 for each in before if each.pid in own_pids)
        return GpuUse(
            utilization_percent=None if rates is None else rates.gpu,
            users=self._others(read_processes(answers) or (), own_pids, {each.pid for each in before}),
            held_bytes=held,
        )

    def close(self) -> None:
        """Shut NVML down; nothing is known of GPUs from then on."""
        if self._library is not None:
            self._library.nvmlShutdown()
        self._library = None

    def _others(
        self, processes: Sequence[GpuProcess], own_pids: Collection[int], before: Collection[int]
    ) -> tuple[GpuProcess, ...]:
        if sees_all_pids(self._root) or any(each.pid in own_pids for each in processes):
            named = (self._named(each) for each in processes if each.pid not in own_pids)
            return tuple(each for each in named if not each.is_mps_server)
        return tuple(each for each in processes if each.pid in before and not each.is_mps_server)

    def _named(self, process: GpuProcess) -> GpuProcess:
        name = process_name(process.pid, self._root) or process.name
        return replace(process, name=name, container=container_of(process.pid, self._root))

    def _every_gpu(self) -> Iterator[tuple[str, Answers]]:
        """The GPUs of this host by their PCI bus ids, those that answer."""
        library: Any = self._library
        if library is None:
            return
        try:
            count = library.nvmlDeviceGetCount()
        except library.NVMLError:
            return
        for index in range(count):
            try:
                answers = Answers(library, library.nvmlDeviceGetHandleByIndex(index))
            except library.NVMLError:
                continue
            place = answers.call("nvmlDeviceGetPciInfo").value
            if place is not None:
                yield bus_id(text(place.busId) or ""), answers

    def _answers(self, name: str) -> Answers | None:
        if self._library is None:
            return None
        try:
            return Answers(self._library, self._library.nvmlDeviceGetHandleByPciBusId(name))
        except self._library.NVMLError:
            return None


class OthersOnGpus:
    """`ports.GpuUsers` of some GPUs, by their position."""

    def __init__(self, use: NvmlUse, bus_ids: Sequence[str], own_pids: Collection[int]) -> None:
        self._use, self._bus_ids, self._own_pids = use, bus_ids, own_pids

    def read(self, gpu: int) -> GpuUse:
        """The use of the GPU at that position."""
        return self._use.read(self._bus_ids[gpu], self._own_pids)


def _used_bytes(answers: Answers) -> int | None:
    ways = ("nvmlDeviceGetMemoryInfo", MEMORY_VERSION), ("nvmlDeviceGetMemoryInfo",)
    memory = answers.ask_in_turn("memory_used_bytes", *ways)
    return None if memory is None else int(memory.used)
