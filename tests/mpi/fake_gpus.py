"""gpubench on four fake H200s: `mpirun -n 4 python -m tests.mpi.fake_gpus allreduce ...`, or without mpirun.

NCCL is MPI on CPU buffers, which writes what a rank's real NCCL wrote into the log. These variables change it:

- GPUBENCH_TEST_LOGS: the folder in tests/logs whose lines NCCL writes; with `refused` two ranks find no path
- GPUBENCH_TEST_GPUS: the number of GPUs, GPUBENCH_TEST_NCCL_CODE: NCCL's version, GPUBENCH_TEST_MPS: ranks use MPS
- GPUBENCH_TEST_STUCK: the rank that never returns from its first operation
- GPUBENCH_TEST_BROKEN_NET: with this value of NCCL_NET NCCL finds no path
- GPUBENCH_TEST_MPI_CRASHES: the operations in which MPI crashes on GPU memory
- GPUBENCH_TEST_STUCK_STEPS, GPUBENCH_TEST_SPOILED_STEPS: the rank that hangs in, and that loses, overlapped operations
"""

import os
from collections.abc import Mapping, Sequence
from functools import cache, partial
from time import sleep
from types import SimpleNamespace
from typing import Any, cast

from gpubench.__main__ import main
from gpubench.backends.mpi.backends import HostBackend
from gpubench.backends.mpi.group import MpiCalls
from gpubench.jobs import rank
from gpubench.jobs.collective import job, opening_gpu, rank_job  # noqa: F401 - they import what is replaced
from gpubench.machine.children import module_command
from gpubench.machine.nvml import Driver
from gpubench.model.facts.process import MpiSupport, OperationTrial, TrialOutcome
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.terms.operation import DataType, ReduceOp, nccl_version
from gpubench.model.terms.ranks import Progress, RankIdentity
from gpubench.model.terms.settings import Algorithm, NcclSetting, Registration
from gpubench.ports.backend import Launch, Region
from gpubench.ports.copies import LinkBytes
from gpubench.ports.group import Group
from gpubench.ranks.launch import Launcher
from gpubench.simulated.machine import parse_machine, snapshots
from tests.fakes.library_log import recorded
from tests.fakes.nccl_log import FakeNcclLog
from tests.fakes.stand_in import stand_in

RANKS = 4
GPUS = int(os.environ.get("GPUBENCH_TEST_GPUS", RANKS))
DRIVER = Driver(version="580.159.04", cuda=13000, gpus=GPUS, visible=GPUS)
REFUSED = "refused"
COUNTED_BYTES = 2**24
"""Bytes that a counter must see, because there is no other traffic"""

_LOGS = os.environ.get("GPUBENCH_TEST_LOGS", "tuning")


@cache
def h200s() -> Snapshot:
    return snapshots(parse_machine("hgx-h200-4"), [])[0]


class NcclError(Exception):
    pass


class Library:
    path = "/fake/libnccl.so.2"
    version_code = int(os.environ.get("GPUBENCH_TEST_NCCL_CODE", "22809"))
    version = nccl_version(version_code)
    can_reset_log = True
    error = NcclError

    def __init__(self, _asked: str | None) -> None:
        self.log = FakeNcclLog(cast("dict[str, str]", os.environ), 1)
        self.warning = ""

    def reset_log(self) -> None:
        self.log.reset_log()

    def last_error(self) -> str:
        return self.warning

    def has(self, _name: str) -> bool:
        return True


class Backend(HostBackend):
    """MPI on CPU buffers that claims to be NCCL, and writes NCCL's log."""

    name = "nccl"

    def __init__(self, group: Any, rank: int, library: Library, _allocator: object, progress: Progress) -> None:
        super().__init__(group, RANKS, progress=progress)
        self._library = library
        self._rank = rank
        self._refuses = _LOGS == REFUSED
        lines = recorded("tuning" if self._refuses else _LOGS, rank)
        texts = [line.partition(b" NCCL INFO ")[2].decode() for line in lines]
        connecting = next(number for number, text in enumerate(texts) if " via " in text)
        self._before, self._first = texts[:connecting], [text for text in texts[connecting:] if " via " in text]
        self._tunings = [text for text in texts if text.startswith("AllReduce: ") and "-> Algo" in text]
        for text in self._before:
            library.log.info("INIT", text)

    def open(self, group: Group) -> MpiCalls:
        told = bool({"NCCL_ALGO", "NCCL_PROTO"} & set(os.environ))
        return ToldCalls(cast("Any", group).communicator, self._library) if told else super().open(group)

    def adopt(self, communicator: tuple[Any, int]) -> MpiCalls:
        group, most_ctas = communicator
        return CappedCalls(group.communicator, self._library, most_ctas)

    def trouble(self) -> str:
        return ""

    def abort(self) -> None:
        pass

    def seconds(self, launch: Launch) -> float:
        if self._refuses or os.environ.get("NCCL_NET") == os.environ.get("GPUBENCH_TEST_BROKEN_NET", "none is"):
            self._library.warning = "No transport found for rank 0[60] -> rank 1[70]"
            raise NcclError("NCCL_ERROR_SYSTEM_ERROR: unhandled system error")
        for text in self._first:
            self._library.log.info("INIT", text)
        self._first = []
        if self._tunings:
            self._library.log.info("TUNING", self._tunings.pop(0))
        seconds = super().seconds(launch)
        if os.environ.get("GPUBENCH_TEST_STUCK") == str(self._rank):
            sleep(60)
        return seconds


class ToldCalls(MpiCalls):
    """A communicator with a requested algorithm. The last line about each operation names it."""

    def __init__(self, communicator: Any, library: Library) -> None:
        super().__init__(communicator)
        self._library = library
        self._told = NcclSetting.parse("/".join(os.environ.get(name, "") for name in ("NCCL_ALGO", "NCCL_PROTO")))

    def all_reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch:
        return partial(self._run, super().all_reduce(send, receive, count, dtype, op), count * dtype.size_bytes)

    def _run(self, launch: Launch, size_bytes: int) -> None:
        algorithm, protocol = self._told.algorithm or "ring", self._told.protocol or "simple"
        if algorithm is Algorithm.NVLS:
            self._library.warning = "Error : no algorithm/protocol available for function AllReduce with datatype "
            self._library.warning += "ncclFloat32. NCCL_ALGO was set to nvls."
            raise NcclError("NCCL_ERROR_INVALID_USAGE: invalid usage (run with NCCL_DEBUG=WARN for details)")
        name = "RING" if algorithm is Algorithm.PAT else algorithm.upper()
        line = f"AllReduce: {size_bytes} Bytes -> Algo {name} proto {protocol.upper()} channel{{Lo..Hi}}={{0..23}}"
        self._library.log.info("TUNING", line)
        launch()


def open_requested(
    _backend: Backend, library: Library, group: Any, requests: dict[str, str]
) -> tuple[MpiCalls, Registration]:
    """Open a communicator that has symmetric windows, but registers no user memory."""
    how = Registration(requests.get("register", "none"))
    in_windows = how is Registration.SYMMETRIC
    if not in_windows and "max-ctas" in requests:
        return CappedCalls(group.communicator, library, int(requests["max-ctas"])), Registration.NONE
    return WindowCalls(group.communicator, library, in_windows=in_windows), how if in_windows else Registration.NONE


class WindowCalls(MpiCalls):
    """A communicator whose buffers may be windows."""

    def __init__(self, communicator: Any, library: Library, *, in_windows: bool) -> None:
        super().__init__(communicator)
        self._library, self._in_windows = library, in_windows

    def all_reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch:
        return partial(self._run, super().all_reduce(send, receive, count, dtype, op), count * dtype.size_bytes)

    def _run(self, launch: Launch, size_bytes: int) -> None:
        how = f"AllReduce: {size_bytes} Bytes -> Algo RING proto LL channel{{Lo..Hi}}={{0..0}}"
        if self._in_windows:
            kernel = "Kernel AllReduce_AGxLL_R nchannels 1 nthreads 512 nWorks 1"
            how = f"AllReduce [Symmetric]: {size_bytes} Bytes -> {kernel}"
        self._library.log.info("TUNING", how)
        launch()


class CappedCalls(MpiCalls):
    """A communicator with a limit on CTAs. NCCL refuses a limit of one."""

    def __init__(self, communicator: Any, library: Library, most_ctas: int) -> None:
        if most_ctas == 1:
            library.warning = "Error : maxCTAs 1 is less than minCTAs"
            raise NcclError("NCCL_ERROR_INVALID_ARGUMENT: invalid argument")
        super().__init__(communicator)
        self._library, self._most_ctas = library, most_ctas

    def all_reduce(self, send: Region, receive: Region, count: int, dtype: DataType, op: ReduceOp) -> Launch:
        return partial(self._run, super().all_reduce(send, receive, count, dtype, op), count * dtype.size_bytes)

    def _run(self, launch: Launch, size_bytes: int) -> None:
        channels = f"channel{{Lo..Hi}}={{0..{self._most_ctas - 1}}}"
        self._library.log.info("TUNING", f"AllReduce: {size_bytes} Bytes -> Algo RING proto SIMPLE {channels}")
        launch()


class Probe:
    def __init__(self, _environment: object) -> None:
        pass

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def snapshot(self, _timeout_s: float) -> Snapshot:
        return h200s()


class Counters:
    """NVLinks that carry the expected traffic. With P2P off, PCIe carries it."""

    def __init__(self, _bus_ids: Sequence[str]) -> None:
        self._readings = 0

    def read(self, _gpu: int) -> LinkBytes:
        self._readings += 1
        moved = self._readings * 2 * COUNTED_BYTES
        return LinkBytes(0, 0, moved, moved) if _LOGS == "p2p-disabled" else LinkBytes(moved, moved, 0, 0)

    def close(self) -> None:
        pass


def open_gpu(
    _group: Group, identity: RankIdentity, _ranks: int, _driver: Driver, *, shared: bool
) -> tuple[int, RankIdentity]:
    assert shared
    gpu = h200s().gpus[identity.rank % GPUS]
    mps = "GPUBENCH_TEST_MPS" in os.environ
    found = SimpleNamespace(name=gpu.name, index=gpu.index, bus_id=gpu.bus_id, uuid=gpu.uuid, mps=mps)
    return identity.rank, rank.identify(identity, cast("Any", found))


class MpiOnGpus(HostBackend):
    """MPI on CPU buffers that claims they are GPU memory."""

    name = "mpi"

    def __init__(self, group: Any, _device: object, progress: Progress) -> None:
        super().__init__(group, RANKS, progress=progress)


def try_operations(operations: Sequence[str], _command: object, completed: Any) -> MpiSupport:
    """Report crashes for the operations in GPUBENCH_TEST_MPI_CRASHES, right data for the others."""
    bad = os.environ.get("GPUBENCH_TEST_MPI_CRASHES", "").split(",")
    trials = []
    for name in operations:
        completed()
        ends = (TrialOutcome.CRASHED, TrialOutcome.UNKNOWN) if name in bad else (TrialOutcome.RIGHT,) * 2
        said = "signal 11 (SIGSEGV)" if name in bad else ""
        trials += [
            OperationTrial(operation=name, size_bytes=size, outcome=end, seconds=2.5, said=said)
            for size, end in zip((1024, 2**20), ends, strict=True)
        ]
    claims = {"MPIX_Query_cuda_support": "no"}
    return MpiSupport(library="Open MPI v4.1.6", asked=operations[0], trials=trials, claims=claims, seconds=5.0)


class FakeLauncher(Launcher, frozen=True):
    """Start this program as the ranks."""

    program = "tests.mpi.fake_gpus"

    def command(self, ranks: int, arguments: Sequence[str]) -> list[str]:
        return [self.path, "-n", str(ranks), *module_command(self.program, *arguments)]


def read_driver(_environment: Mapping[str, str]) -> Driver:
    return DRIVER


def check_installed(_driver: Driver) -> None:
    pass


def install() -> None:
    """Replace driver, CUDA, NCCL and the launcher."""
    fakes = {
        "gpubench.ranks.launch.Launcher": FakeLauncher,
        "gpubench.machine.nvml.read_driver": read_driver,
        "gpubench.backends.cuda.check_installed": check_installed,
        "gpubench.jobs.rank.open_gpu": open_gpu,
        "gpubench.backends.nccl.library.NcclLibrary": Library,
        "gpubench.machine.probe.Probe": Probe,
        "gpubench.machine.nvml.NvmlCounters": Counters,
        "gpubench.backends.nccl.backend.NcclBackend": Backend,
        "gpubench.backends.nccl.communicator.open_requested": open_requested,
        "gpubench.backends.mpi.backends.MpiOnCuda": MpiOnGpus,
        "gpubench.backends.mpi.backends.read_support": try_operations,
        "gpubench.measure.collective.paths.COUNTED_BYTES": COUNTED_BYTES,
    }
    for path, fake in fakes.items():
        stand_in(path, fake)


if __name__ == "__main__":
    install()
    main()
