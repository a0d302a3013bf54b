"""PyTorch in this Python environment: its import, its errors, torchrun's job, and process groups."""

import os
import re
import socket
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from time import monotonic, sleep
from typing import Any, NoReturn, TypeVar

from msgspec import Struct

from gpubench.backends.mpi.group import host_name, measure_clock_offset
from gpubench.errors import DISTRIBUTION, CouldNotMeasureError
from gpubench.machine.environment import mapped_files
from gpubench.model.facts.environment import LaunchedRank
from gpubench.model.terms.statistics import ClockOffset
from gpubench.model.terms.units import format_ranges, plural, shorten
from gpubench.ports.group import Group

_WITHOUT = "--backend nccl and --backend host need no torch"

_GLOO_LOST = re.compile(
    r"(?P<peer>\[[^\s\]]+\]:\d+): (?P<said>Connection (?:closed|reset) by peer|Broken pipe|Connection timed out)"
    r"|(?P<closed>Connection closed by peer) (?P<other>\[[^\s\]]+\]:\d+)"
)
"""Gloo's errors after the process at the other end of a connection has exited."""


def first_line(error: BaseException) -> str:
    """Return the first line of a torch error, without the C++ traceback that follows."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def lost_connection(error: BaseException) -> CouldNotMeasureError | None:
    """Return the error for a closed Gloo connection. None for any other error."""
    said = first_line(error)
    found = _GLOO_LOST.search(said) if isinstance(error, RuntimeError) and "gloo" in said else None
    if found is None:
        return None
    return CouldNotMeasureError(
        f"the rank at {found['peer'] or found['other']} is gone. Gloo reports: {found['said'] or found['closed']}",
        expected="every rank to run until the last row",
        reason="it crashed or was ended, or the network between the two hosts failed",
        next_step="look at its last output, and on its host run dmesg to find an out-of-memory kill or Xid errors",
    )


def torch_without(version: str, what: str) -> CouldNotMeasureError:
    """Return the error for a feature `what` that this torch build lacks."""
    return CouldNotMeasureError(
        f"torch {version} was built without {what}",
        expected=f"a build that has {what}",
        reason="there are different wheels for CPUs, CUDA, ROCm and Intel GPUs",
        next_step=f"https://pytorch.org/get-started lists the wheels (all have Gloo), and {_WITHOUT}",
    )


def torch_refused(backend: str, said: str) -> CouldNotMeasureError:
    """Return the error for ranks that torch.distributed cannot connect."""
    if "EADDRINUSE" in said or "already in use" in said:
        return CouldNotMeasureError(
            f"torch.distributed cannot start with {backend}: {said}",
            expected="a port that no other process uses",
            reason="MASTER_PORT belongs to another job, or an earlier job has not ended",
            next_step="torchrun --master-port N, or --standalone, which picks one",
        )
    gloo = "GLOO_SOCKET_IFNAME=lo on one host, or the interface that connects the hosts"
    return CouldNotMeasureError(
        f"torch.distributed cannot start with {backend}: {said}",
        expected="a process group of all ranks",
        reason="Gloo cannot find the address of this host by its name (for NCCL, see its log)",
        next_step=gloo if backend == "gloo" else "NCCL_DEBUG=WARN gpubench ... shows NCCL's warnings",
    )


_NCCL_FILE = r"libnccl\.so"
_LINKED_IN = "libtorch_cuda.so"


class TorchDistributed(Struct, frozen=True):
    """The torch module and one torch.distributed backend. `backend` is torch's name for it, such as 'nccl'."""

    torch: Any
    backend: str

    @property
    def distributed(self) -> Any:
        return self.torch.distributed

    @property
    def built_for(self) -> str:
        """Platform of this torch build: 'CUDA 13.0', 'ROCm 6.4', 'XPU' or 'CPUs alone'."""
        version = self.torch.version
        if version.cuda:
            return f"CUDA {version.cuda}"
        if version.hip:
            return f"ROCm {version.hip}"
        return f"XPU {version.xpu}" if getattr(version, "xpu", None) else "CPUs alone"

    @property
    def version(self) -> str:
        """Version and platform of this torch build, for example '2.11.0 (CUDA 13.0)'."""
        return f"{str(self.torch.__version__).partition('+')[0]} ({self.built_for})"

    def nccl(self) -> str:
        """Return the version and file of the NCCL that torch calls, for example '2.28.9 from
        /usr/lib/libnccl.so.2'.

        Returns '' if torch has no NCCL.
        """
        if not self.torch.version.cuda or not self.distributed.is_nccl_available():
            return ""
        version = ".".join(map(str, self.torch.cuda.nccl.version()))
        return f"{version} from {' and '.join(mapped_files(_NCCL_FILE)) or _LINKED_IN}"


def is_installed() -> bool:
    """Return True if torch is installed, even if it cannot be imported."""
    return find_spec("torch") is not None


def check_installed() -> None:
    """Raise CouldNotMeasureError if torch is not installed."""
    if not is_installed():
        raise CouldNotMeasureError(
            "torch is not installed in this Python",
            expected="PyTorch for --backend torch:... (gpubench measures your PyTorch and does not install one)",
            reason="gpubench runs in a different environment than the training",
            next_step=f"pip install {DISTRIBUTION} in the environment that has torch, or {_WITHOUT}",
        )


def import_torch() -> Any:
    """Import torch. Raise CouldNotMeasureError if it is not installed or cannot be imported."""
    check_installed()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
            import torch.distributed
    except (ImportError, OSError, RuntimeError) as error:
        raise CouldNotMeasureError(
            f"torch cannot be imported: {first_line(error)}",
            expected="an import without an error",
            reason="one of its libraries is missing, or a different version was loaded before",
            next_step=f"python -c 'import torch, torch.distributed' shows the error alone, and {_WITHOUT}",
        ) from error
    return torch


def import_symmetric_memory(found: "TorchDistributed") -> None:
    """Import `torch.distributed._symmetric_memory`. Raise CouldNotMeasureError if this torch lacks the module."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_module("torch.distributed._symmetric_memory")
    except ImportError as error:
        raise torch_without(found.version, "torch.distributed._symmetric_memory") from error


def import_fully_shard() -> Any:
    """Import `fully_shard` (FSDP2). Raise ImportError before torch 2.6."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.fsdp import fully_shard
    return fully_shard


# Torch's backend names. Symmetric memory needs a process group only to exchange addresses, so it uses Gloo.
_PROCESS_GROUPS = {"rccl": "nccl", "symm": "gloo"}


def load_torch(backend: str, *, for_cuda: bool = False, driver_cuda: int = 0) -> TorchDistributed:
    """Import torch and check that it supports this backend.

    With `for_cuda`, check CUDA too. `driver_cuda` is the newest CUDA version that the driver supports (13000 for 13.0).

    Raises:
        CouldNotMeasureError: torch cannot be imported, or lacks the backend or a usable CUDA.
    """
    torch = import_torch()
    found = TorchDistributed(torch, _PROCESS_GROUPS.get(backend, backend))
    if not torch.distributed.is_available():
        raise torch_without(found.version, "torch.distributed")
    if for_cuda:
        _check_cuda(found, driver_cuda)
    if backend == "rccl" and not torch.version.hip:
        raise torch_without(found.version, "RCCL")
    available = getattr(torch.distributed, f"is_{found.backend}_available", lambda: False)
    if not available():
        raise torch_without(found.version, f"the {found.backend} backend of torch.distributed")
    return found


def _check_cuda(found: TorchDistributed, driver_cuda: int) -> None:
    built_for = found.torch.version.cuda
    if not built_for:
        raise torch_without(found.version, "CUDA")
    if driver_cuda and int(built_for.partition(".")[0]) > driver_cuda // 1000:
        major, minor = driver_cuda // 1000, driver_cuda % 1000 // 10
        raise CouldNotMeasureError(
            f"torch {found.version} needs a newer CUDA than the driver has, {major}.{minor}",
            expected="a torch for the driver's major version or older",
            next_step=f"pip install torch --index-url https://download.pytorch.org/whl/cu{major}{minor}, or a newer "
            f"driver ({_WITHOUT})",
        )
    if not found.torch.cuda.is_available():
        raise CouldNotMeasureError(
            f"torch {found.version} sees no GPU, but the driver lists some",
            expected="torch.cuda.is_available()",
            reason="the driver is too old for it, or torch cannot read this form of CUDA_VISIBLE_DEVICES",
            next_step="python -c 'import torch; torch.cuda.init()' shows why",
        )


LEAST_SECONDS = 60.0  # On a slow file system, most of this time passes while all ranks import torch
_ARRIVED, _ALL_THERE = "arrived", "all there"
_SECONDS_TO_CONNECT, _SECONDS_BETWEEN_TRIES = 5.0, 0.2


class RanksMissingError(CouldNotMeasureError):
    """Some ranks did not connect to the store. Rank `speaker` reports this on behalf of the ranks that did."""

    speaker = 0


def store_place(environment: Mapping[str, str]) -> str:
    """Return the address of the store from torchrun's variables, for example 'node0:29500'."""
    return f"{environment.get('MASTER_ADDR', '')}:{environment.get('MASTER_PORT', '')}"


def meet(distributed: Any, launch: LaunchedRank, environment: Mapping[str, str], seconds: float) -> Any:
    """Wait for all ranks at the TCP store of torchrun's agent or of rank 0. Return the store.

    Raises:
        RanksMissingError: Not all ranks connected within `seconds`.
        CouldNotMeasureError: torch cannot open the store.
    """
    store = _open_store(distributed, launch, environment, seconds)
    rank, size = launch.rank, launch.size
    store.set(str(rank), host_name())
    if store.add(_ARRIVED, 1) == size:
        store.set(_ALL_THERE, "")
    try:
        store.wait([_ALL_THERE], timedelta(seconds=seconds))
    except RuntimeError as error:
        came = [rank for rank in range(size) if store.check([str(rank)])]
        if len(came) == size:
            return store
        hosts = [store.get(str(rank)).decode() for rank in came]
        raise _missing(store_place(environment), launch, came, hosts, seconds) from error
    return store


def _open_store(distributed: Any, launch: LaunchedRank, environment: Mapping[str, str], seconds: float) -> Any:
    """Open a store with keys for this attempt only. After a restart, torchrun's agent still has keys of earlier
    attempts.
    """
    is_of_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = launch.rank == 0 and not is_of_agent
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    silence = "" if serves else why_silent(host, port, seconds)
    if silence:
        raise _unreachable(launch, environment, silence, seconds)
    try:
        store = distributed.TCPStore(
            host,
            port,
            launch.size,
            is_master=serves,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise torch_refused("gloo", first_line(error)) from error
    return distributed.PrefixStore(f"gpubench/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def why_silent(host: str, port: int, seconds: float) -> str:
    """Try to connect to a port for `seconds`. Return '' if it accepts, else the system's error message."""
    deadline = monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(_SECONDS_TO_CONNECT, seconds))).close()
        except OSError as error:
            if monotonic() + _SECONDS_BETWEEN_TRIES > deadline:
                return error.strerror or str(error)
            sleep(_SECONDS_BETWEEN_TRIES)
        else:
            return ""


def _missing(
    place: str, launch: LaunchedRank, came: Sequence[int], hosts: Sequence[str], seconds: float
) -> RanksMissingError:
    others = [rank for rank in range(launch.size) if rank not in came]
    error = RanksMissingError(
        f"{len(came)} of {launch.size} ranks came to the store at {place} within {seconds:g} s",
        expected=f"{plural(launch.size, 'rank')}, as set in WORLD_SIZE",
        reason="torchrun was not started on every host, or with a different address, port or number of nodes",
        next_step=_next_step(launch),
    )
    error.details = [
        f"  missing:  rank {format_ranges(others)}",
        f"  arrived:  rank {format_ranges(came)} on {shorten(list(dict.fromkeys(hosts)))}",
    ]
    error.speaker = came[0]
    return error


def _unreachable(launch: LaunchedRank, environment: Mapping[str, str], said: str, seconds: float) -> RanksMissingError:
    """Return the error for a rank that cannot reach the store. Only the first rank on each host reports it."""
    error = RanksMissingError(
        f"no answer from the store of rank 0 at {store_place(environment)} within {seconds:g} s: {said}",
        expected=f"rank 0 of {launch.size} there, and a network path to it",
        reason="rank 0 was not started, has ended, or MASTER_ADDR and MASTER_PORT belong to another job",
        next_step=_next_step(launch),
    )
    error.speaker = launch.rank if environment.get("LOCAL_RANK") == "0" else -1
    return error


def _next_step(launch: LaunchedRank) -> str:
    return (
        "run the same torchrun command on every host, or on this host alone: torchrun --standalone --nproc-per-node "
        f"{launch.size} -m gpubench ... (--timeout S waits longer)"
    )


T = TypeVar("T")

_HOURS = timedelta(hours=6)  # Timeout of torch's operations. gpubench's watchdog ends hangs much sooner


class TorchGroup:
    """A group of ranks with a Gloo process group. `members` are their ranks in the whole job."""

    def __init__(self, torch: Any, process_group: Any, members: Sequence[int]) -> None:
        self._torch, self._distributed = torch, torch.distributed
        self._process_group, self.members = process_group, members
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()

    def gather(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        self._distributed.all_gather_object(found, value, group=self._process_group)
        return found

    def collect(self, value: T) -> list[T] | None:
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._distributed.gather_object(value, found, self.members[0], group=self._process_group)
        return found

    def broadcast(self, value: T | None, root: int = 0) -> T:
        held: list[Any] = [value]
        self._distributed.broadcast_object_list(held, self.members[root], group=self._process_group)
        received: T = held[0]
        return received

    def barrier(self) -> None:
        self._distributed.barrier(group=self._process_group)

    def largest(self, values: Sequence[float]) -> Sequence[float]:
        found = self._torch.tensor(list(values), dtype=self._torch.float64)
        self._distributed.all_reduce(found, self._distributed.ReduceOp.MAX, group=self._process_group)
        largest: list[float] = found.tolist()
        return largest

    def clock_offset(self) -> ClockOffset:
        return measure_clock_offset(self)

    def send(self, seconds: float, peer: int) -> None:
        tensor = self._torch.tensor([seconds], dtype=self._torch.float64)
        self._distributed.send(tensor, self.members[peer], group=self._process_group)

    def receive(self, peer: int) -> float:
        taken = self._torch.zeros(1, dtype=self._torch.float64)
        self._distributed.recv(taken, self.members[peer], group=self._process_group)
        return float(taken[0])

    def split(self, color: int, key: int) -> "TorchGroup":
        keyed = self.gather((color, key, self.members[self.rank]))
        members = [member for own, _, member in sorted(keyed) if own == color]
        part = self._distributed.new_group(
            sorted(members), backend="gloo", timeout=_HOURS, use_local_synchronization=True
        )
        if members != sorted(members):
            raise ValueError("torch keeps the rank order of the job in a group")
        return TorchGroup(self._torch, part, members)


def start(launch: LaunchedRank, _imports: Sequence[str] = (), seconds: float = LEAST_SECONDS) -> TorchGroup:
    """Connect to the other ranks of torchrun's job within `seconds`. Raise CouldNotMeasureError."""
    found = load_torch("gloo")
    store = meet(found.distributed, launch, os.environ, seconds)
    try:
        found.distributed.init_process_group(
            "gloo", store=store, rank=launch.rank, world_size=launch.size, timeout=_HOURS
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise torch_refused("gloo", first_line(error)) from error
    return TorchGroup(found.torch, found.distributed.group.WORLD, range(launch.size))


def finish() -> None:
    """Destroy torch's process groups, unless a backend has done so already."""
    found = load_torch("gloo")
    if found.distributed.is_initialized():
        found.distributed.destroy_process_group()


def abort(_group: object, exit_code: int) -> NoReturn:
    """End this process at once. torchrun then ends the other ranks."""
    os._exit(exit_code)


def open_group(found: TorchDistributed, group: Group, *, one_node: bool, device: Any = None) -> Any:
    """Open a process group for the ranks of `group`. For NCCL, it is bound to `device`.

    Raises:
        CouldNotMeasureError: torch cannot connect the ranks.
    """
    distributed = found.distributed
    try:
        if distributed.is_initialized():
            if isinstance(group, TorchGroup) and group.size < distributed.get_world_size():
                return open_part(found, group.members)
            return distributed.new_group(backend=found.backend, timeout=_HOURS)
        distributed.init_process_group(
            found.backend,
            store=_share_store(distributed, group, one_node=one_node),
            rank=group.rank,
            world_size=group.size,
            timeout=_HOURS,
            device_id=device,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise torch_refused(found.backend, first_line(error)) from error
    return distributed.group.WORLD


def open_part(found: TorchDistributed, ranks: Sequence[int]) -> Any:
    """Open a process group for some ranks. Only these ranks must call this."""
    new_group = found.distributed.new_group
    return new_group(list(ranks), backend=found.backend, timeout=_HOURS, use_local_synchronization=True)


def close(found: TorchDistributed, process_group: Any) -> None:
    """Destroy a process group. Destroying torch's default group also destroys all others."""
    if process_group is not None and found.distributed.is_initialized():
        found.distributed.destroy_process_group(process_group)


def _share_store(distributed: Any, group: Group, *, one_node: bool) -> Any:
    """Open a store on a free port of rank 0's host, and broadcast the port to all ranks."""
    host = "127.0.0.1" if one_node else socket.gethostname()
    store = None
    if group.rank == 0:
        store = distributed.TCPStore(host, 0, group.size, is_master=True, timeout=_HOURS, wait_for_workers=False)
    host, port = group.broadcast(None if store is None else (host, int(store.port)))
    return store or distributed.TCPStore(
        host, port, group.size, is_master=False, timeout=_HOURS, wait_for_workers=False
    )
