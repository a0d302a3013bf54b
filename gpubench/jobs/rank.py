"""Run one rank of a job: start MPI, agree with other ranks on errors, open a GPU, and shut down cleanly."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from gpubench.backends.mpi import group as mpi
from gpubench.errors import (
    FIRST_NCCL_FOR_SHARED_GPUS,
    SHARED_GPU_VARIABLE,
    CouldNotMeasureError,
    GpubenchError,
    InterruptedRunError,
    OutputError,
    UsageError,
    different_nccl,
    fewer_gpus_than_ranks,
    nccl_refuses_shared_gpu,
    no_gpu,
    shared_gpu,
    shared_gpu_is_not_enabled,
    shared_gpu_without_percentage,
)
from gpubench.formats.delivery import ReaderGoneError, full_output, interruption, tell
from gpubench.machine.children import die_with_parent
from gpubench.machine.environment import NODE_VARIABLE, nccl_settings
from gpubench.machine.host import sm_percent
from gpubench.machine.nvml import Driver, read_driver
from gpubench.model.facts.environment import CHANNEL_VARIABLE, SECONDS_FOR_THE_FIRST_RANK, TORCHRUN, LaunchedRank
from gpubench.model.terms.ranks import Phase, RankIdentity, group_by_device
from gpubench.model.terms.units import format_ranges
from gpubench.ports.group import Group
from gpubench.ranks.channel import ChannelSender
from gpubench.ranks.watchdog import rank as watchdog
from gpubench.ranks.watchdog.rank import RankProgress

if TYPE_CHECKING:
    from gpubench.backends import cuda

T = TypeVar("T")


class AgreedError(Exception):
    """An error that all ranks raise at the same point, so that the job can shut down cleanly."""

    def __init__(self, error: GpubenchError) -> None:
        super().__init__(str(error))
        self.error = error


def agree(group: Group, action: Callable[[], T], place: str = "") -> T:
    """Run `action` on all ranks and return its result on each. Raises AgreedError on all ranks if it fails on any
    rank.
    """
    outcome: T | None = None
    error: GpubenchError | None = None
    try:
        outcome = action()
    except GpubenchError as raised:
        error = raised
        error.where = error.where or place
    errors = [record for record in group.gather(error.to_record() if error else None) if record]
    if errors:
        raise AgreedError(GpubenchError.from_record(errors[0]))
    return cast("T", outcome)


def agree_on_defaults(group: Group, defaults: Mapping[str, str]) -> None:
    """Raise AgreedError if default options differ between ranks. They come from a rank's environment or a file on
    its host.
    """
    first, *others = group.gather(dict(defaults))
    for rank, other in enumerate(others, 1):
        differing = next((each for each in {**first, **other} if first.get(each) != other.get(each)), None)
        if differing is not None:
            had = [f"rank {number}: {each.get(differing, 'not set')}" for number, each in ((0, first), (rank, other))]
            raise AgreedError(
                UsageError(
                    f"ranks do not agree on {differing}: {', '.join(had)}",
                    expected="the same option on every rank",
                    reason="a launcher passes variables to other hosts only if told to, and each host reads the "
                    "file in its own current folder",
                    next_step=f"set {differing} on the command line",
                )
            )


_WHOLE_PERCENT = 100


def open_gpu(
    group: Group, identity: RankIdentity, ranks_on_node: int, driver: Driver, *, shared: bool = False
) -> "tuple[cuda.CudaDevice, RankIdentity]":
    """Open the GPU of this rank, and return it with the rank's identity.

    Raises AgreedError if there is no GPU, or if ranks share a GPU and `shared` is false.
    """
    from gpubench.backends import cuda

    device = agree(
        group,
        lambda: cuda.open_device(identity.local_rank, ranks_on_node, identity.host, driver, shared=shared),
        place=str(identity),
    )
    driving = identify(identity, device.identity)
    all_driving = group.gather(driving)
    if not shared:
        agree(group, lambda: check_one_rank_a_gpu(all_driving, driver.gpus))
    device.sharing = sum(each.device == driving.device for each in all_driving)
    return device, driving


def identify(identity: RankIdentity, gpu: "cuda.GpuIdentity") -> RankIdentity:
    """Return the rank's identity, completed with the GPU that it uses."""
    return replace(
        identity,
        gpu=gpu.name,
        gpu_index=gpu.index,
        gpu_bus_id=gpu.bus_id,
        gpu_uuid=gpu.uuid,
        sm_percent=sm_percent(os.environ) if gpu.mps else None,
    )


def check_one_rank_a_gpu(identities: Sequence[RankIdentity], gpus_on_host: int) -> None:
    """Raise UsageError if two ranks use the same GPU, or if a host has more ranks than GPUs."""
    for first, *others in group_by_device(identities):
        if not others:
            continue
        ranks = sum(identity.node == first.node for identity in identities)
        if ranks > gpus_on_host:
            raise fewer_gpus_than_ranks(ranks, gpus_on_host, first.host)
        raise _same_gpu(first, others[0])


class NcclVersion(Protocol):
    """The version and file of a loaded NCCL library."""

    @property
    def version(self) -> str:
        """The NCCL version as text, for example '2.28.9'."""

    @property
    def version_code(self) -> int:
        """The NCCL version as an integer, for example 22809."""

    @property
    def path(self) -> str:
        """The file that the library was loaded from."""


class RankNccl(Struct, frozen=True):
    """A rank and the NCCL library that it loaded. `shares_gpus` is true if the user allows NCCL ranks to share a
    GPU.
    """

    rank: RankIdentity
    version: str
    code: int
    path: str
    shares_gpus: bool


def check_nccl_of_ranks(
    group: Group, identity: RankIdentity, library: NcclVersion, driver: Driver, kernels_at_once: int = 1
) -> None:
    """Raise AgreedError if ranks loaded different NCCL versions, or if NCCL does not support their shared GPU."""
    enabled = nccl_settings(os.environ).get(SHARED_GPU_VARIABLE, "0") not in ("0", "")
    own = RankNccl(identity, library.version, library.version_code, library.path, enabled)
    ranks = group.gather(own)
    agree(group, lambda: check_versions(ranks))
    agree(group, lambda: check_shared_gpus(ranks, driver, kernels_at_once))


def check_versions(ranks: Sequence[RankNccl]) -> None:
    """Raise UsageError if ranks loaded different NCCL versions."""
    found: dict[str, list[int]] = {}
    for rank in ranks:
        found.setdefault(f"{rank.version} from {rank.path}", []).append(rank.rank.rank)
    if len({rank.code for rank in ranks}) > 1:
        raise different_nccl([f"rank {format_ranges(numbers)} {text}" for text, numbers in found.items()])


def check_shared_gpus(ranks: Sequence[RankNccl], driver: Driver, kernels_at_once: int = 1) -> None:
    """Raise UsageError if NCCL does not support ranks on a shared GPU, or if their kernels may not fit on it at
    once.
    """
    for sharing in group_by_device([rank.rank for rank in ranks]):
        total = sum(each.sm_percent or 0 for each in sharing)
        if len(sharing) > 1 and total > _WHOLE_PERCENT / kernels_at_once:
            raise shared_gpu_without_percentage(_who(sharing), total, len(sharing), kernels_at_once)
        theirs = [rank for rank in ranks if rank.rank in sharing]
        for host in dict.fromkeys(each.nccl_host for each in sharing):
            alike = [their for their in theirs if their.rank.nccl_host == host]
            if len(alike) > 1:
                on_node = sum(rank.rank.node == sharing[0].node for rank in ranks)
                _check_sharing(alike, driver, is_needed=on_node > driver.gpus)


def _check_sharing(ranks: Sequence[RankNccl], driver: Driver, *, is_needed: bool) -> None:
    """Raise UsageError if NCCL does not support these ranks of one host on one GPU. `is_needed` is true if the host
    has fewer GPUs than ranks.
    """
    nccl, members = ranks[0], [rank.rank for rank in ranks]
    enabled = all(rank.shares_gpus for rank in ranks)
    if not enabled and not is_needed:
        first, second = members[:2]
        raise _same_gpu(first, second)
    if nccl.code < FIRST_NCCL_FOR_SHARED_GPUS:
        raise nccl_refuses_shared_gpu(_who(members), f"{nccl.version} from {nccl.path}", driver.cuda // 1000)
    if not enabled:
        raise shared_gpu_is_not_enabled(_who(members), len(members))


def _who(ranks: Sequence[RankIdentity]) -> str:
    numbers = format_ranges([rank.rank for rank in ranks])
    return f"rank {numbers} on {ranks[0].host} share GPU {ranks[0].gpu_bus_id}"


def _same_gpu(first: RankIdentity, second: RankIdentity) -> UsageError:
    return shared_gpu(f"rank {first.rank}", f"rank {second.rank} on {second.host}", str(second.gpu_bus_id))


def usable_driver(for_what: str) -> Driver:
    """Return the GPU driver of this host. Raises CouldNotMeasureError if no GPU is visible or a Python package is
    missing.
    """
    from gpubench.backends.cuda import check_installed

    driver = read_driver(os.environ)
    if not driver.visible:
        raise no_gpu(driver.hidden_gpus() or driver.absent or "the driver finds none on this host", for_what=for_what)
    check_installed(driver)
    return driver


SECONDS_TO_BE_HEARD = 0.5
"""Delay between a rank's last line on stderr and its abort. At the end of a job, a launcher's daemon on another
host drops lines that it has not yet forwarded.
"""

SECONDS_TO_BE_ENDED = 30.0

SECONDS_FOR_A_LOST_RANK = 3.0
"""Delay before a rank reports an error that the death of another rank may have caused. The watchdog reports within
a second how a rank died. Ranks that only lost a connection, or had a CUDA error under MPS, wait so that this
report comes first.
"""

TRACEBACK_VARIABLE = "GPUBENCH_TRACEBACK"


class RankJob(Protocol):
    """The work of one rank in a job."""

    @property
    def identity(self) -> RankIdentity: ...

    def run(self, channel: str | None) -> int:
        """Do this rank's work and return the exit code, which is the same on all ranks. `channel` is the address of
        the process that launched the ranks.
        """


class Rendezvous(Struct, frozen=True):
    """The functions that start, finish and abort the ranks of a job. `place` is the address where ranks connect, if
    known.
    """

    start: Callable[[LaunchedRank, Sequence[str]], Any]
    finish: Callable[[], None]
    abort: Callable[[Any, int], NoReturn]
    place: str = ""


BY_MPI = Rendezvous(mpi.start, mpi.finish, mpi.abort)


def choose_rendezvous(launched_by: LaunchedRank, timeout_s: float) -> Rendezvous:
    """Return the rendezvous by MPI, or by torch.distributed under torchrun. The latter has a timeout of twice
    `timeout_s` and at least a minute.
    """
    if launched_by.launcher != TORCHRUN:
        return BY_MPI
    from gpubench.backends.torch import distributed

    start = partial(distributed.start, seconds=max(distributed.LEAST_SECONDS, 2 * timeout_s))
    place = f"torch.distributed at {distributed.store_place(os.environ)}"
    return Rendezvous(start, distributed.finish, distributed.abort, place)


def _check_launch(launched_by: LaunchedRank, rendezvous: Rendezvous) -> None:
    if launched_by.launcher == TORCHRUN and rendezvous is BY_MPI:
        raise UsageError(
            "this command under torchrun",
            expected="ranks started by MPI, because only collectives support torchrun",
            next_step=f"mpirun -n {launched_by.size} gpubench ...; {launched_by.advice_without_launcher}",
        )
    if launched_by.rank >= launched_by.size:
        raise UsageError(
            f"rank {launched_by.rank} of {launched_by.size}, according to {launched_by.launcher}",
            expected=f"a rank from 0 to {launched_by.size - 1}",
            reason="its variables in the environment were set by hand, or belong to another job",
        )


def run(
    make_job: Callable[[Any, RankProgress], RankJob],
    launched_by: LaunchedRank,
    timeout_s: float,
    defaults: Mapping[str, str],
    imports: Sequence[str] = (),
    rendezvous: Rendezvous = BY_MPI,
) -> int:
    """Run a job as one rank and return the exit code, which is the same on all ranks.

    Without progress for `timeout_s` seconds, the job ends with exit code 3. An error that all ranks agree on is printed
    once. A rank that fails alone ends the job. `defaults` are options from the environment or a file.
    """
    from gpubench.backends.torch.distributed import RanksMissingError, lost_connection

    _check_launch(launched_by, rendezvous)
    channel = os.environ.get(CHANNEL_VARIABLE)
    if channel:
        die_with_parent()
    group: Any = None
    job: RankJob | None = None
    progress = watchdog.start(launched_by.rank, launched_by.size, mpi.host_name(), timeout_s, channel)
    try:
        progress.enter(Phase.MPI_INIT, rendezvous.place)
        group = rendezvous.start(launched_by, imports)
        progress.exchange_addresses(group)
        progress.enter(Phase.SET_UP)
        if channel is None:
            agree_on_defaults(group, defaults)
        job = make_job(group, progress)
        code = job.run(channel)
    except AgreedError as agreed:
        if launched_by.rank == 0:
            _tell(agreed.error, channel)
        code = agreed.error.exit_code
    except BaseException as broken:  # noqa: BLE001 - whatever broke, the job must end
        if progress.is_ending:
            time.sleep(SECONDS_TO_BE_ENDED)  # The watchdog has reported the cause and is ending this job
        lost = lost_connection(broken)
        if lost is not None or (job is not None and may_come_of_another_rank(broken, job.identity)):
            time.sleep(SECONDS_FOR_A_LOST_RANK)
        progress.leave()
        place = str(job.identity) if job else f"rank {launched_by.rank} on {mpi.host_name()}"
        error = _located(lost or broken, place)
        # Ctrl-C reaches all ranks, so one rank reports it
        speaks = job is not None and not isinstance(broken, KeyboardInterrupt)
        speaker = broken.speaker if isinstance(broken, RanksMissingError) else 0
        if speaks or launched_by.rank == speaker:
            _tell(error, channel)
            time.sleep(0 if channel else SECONDS_TO_BE_HEARD)
        else:
            time.sleep(SECONDS_FOR_THE_FIRST_RANK)
        rendezvous.abort(group, error.exit_code)
    progress.enter(Phase.MPI_FINALIZE)
    rendezvous.finish()
    progress.close()
    return code


def may_come_of_another_rank(error: BaseException, identity: RankIdentity) -> bool:
    """Return true if the death of another rank may have caused this CUDA or NCCL error.

    Under MPS, a dying process causes errors in all clients of its GPU before its watchdog can detect its death.
    """
    return isinstance(error, RuntimeError) and identity.sm_percent is not None


def read_identity(group: Group) -> tuple[RankIdentity, list[int]]:
    """Return the identity of this rank, still without its GPU, and the node number of every rank."""
    node_by_rank, local_rank = mpi.nodes(group) if isinstance(group, mpi.MpiGroup) else _nodes_by_name(group)
    identity = RankIdentity(
        rank=group.rank,
        host=mpi.host_name(),
        node=node_by_rank[group.rank],
        local_rank=local_rank,
        pid=os.getpid(),
        nccl_host=nccl_settings(os.environ).get(NODE_VARIABLE),
    )
    return identity, node_by_rank


def _nodes_by_name(group: Group) -> tuple[list[int], int]:
    """Return the node number of every rank, derived from host names, and the local rank of this rank."""
    hosts = group.gather(mpi.host_name())
    order = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return [order[host] for host in hosts], hosts[: group.rank].count(hosts[group.rank])


def _located(broken: BaseException, place: str) -> GpubenchError:
    if isinstance(broken, GpubenchError):
        broken.where = broken.where or place
        return broken
    if isinstance(broken, KeyboardInterrupt):
        return InterruptedRunError(interruption())
    if isinstance(broken, BrokenPipeError):
        return ReaderGoneError("the reader of the output has closed the pipe", where=place)
    if isinstance(broken, OutputError):
        return full_output(broken)
    import traceback

    frame = traceback.extract_tb(broken.__traceback__)[-1]
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exception(broken, file=sys.__stderr__)
    return CouldNotMeasureError(
        f"{type(broken).__name__}: {broken}",
        where=place,
        reason=f"raised in {Path(frame.filename).name}, line {frame.lineno}",
        next_step=f"NCCL_DEBUG=WARN shows NCCL's warnings, and {TRACEBACK_VARIABLE}=1 the traceback of gpubench",
    )


def _tell(error: GpubenchError, channel: str | None) -> None:
    if channel:
        try:
            sender = ChannelSender(channel)
            sender.error(error)
            sender.close()
        except OSError:
            return
    elif sys.__stderr__ is not None:
        tell(error, sys.__stderr__)
