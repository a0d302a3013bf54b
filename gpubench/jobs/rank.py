"""One rank of a job from its first line to its last, whether it ends in order or not."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

from gpubench.errors import CouldNotMeasureError, GpubenchError, InterruptedRunError, OutputError, UsageError
from gpubench.formats.delivery import ReaderGoneError, full_output, tell
from gpubench.hardware.launch import launcher
from gpubench.hardware.launch.channel_sender import ChannelSender
from gpubench.hardware.mpi import group as mpi
from gpubench.hardware.process.nccl_settings import NODE_VARIABLE, nccl_settings
from gpubench.hardware.torch.meeting import RanksMissingError
from gpubench.hardware.torch.refusals import lost_connection
from gpubench.hardware.watchdog import rank as watchdog
from gpubench.hardware.watchdog.rank import RankProgress
from gpubench.jobs.agreement import AgreedError, agree_on_defaults
from gpubench.model.facts.launched_by import CHANNEL_VARIABLE, SECONDS_FOR_THE_FIRST_RANK, TORCHRUN, LaunchedBy
from gpubench.model.terms.hang import Phase
from gpubench.model.terms.rank_identity import RankIdentity
from gpubench.ports.group import Group

SECONDS_TO_BE_HEARD = 0.5
"""Between a rank's last words on stderr and its abort: a launcher's daemon on another host drops what it has not yet
passed on when the job ends."""

SECONDS_TO_BE_ENDED = 30.0

SECONDS_FOR_A_LOST_RANK = 3.0
"""The watchdog of a rank that was lost says within a second which rank that was, and how it ended; a rank that only
found a connection closed lets it speak first."""

TRACEBACK_VARIABLE = "GPUBENCH_TRACEBACK"


class RankJob(Protocol):
    """One rank's part in what all of them do."""

    @property
    def identity(self) -> RankIdentity:
        """The identity of this rank."""

    def run(self, channel: str | None) -> int:
        """Do it; the exit code, the same on every rank. `channel` leads to the gpubench that launched this one."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The way in which the ranks of a job meet and part; `place` is where, of MPI's nobody knows it."""

    start: Callable[[LaunchedBy, Sequence[str]], Any]
    finish: Callable[[], None]
    abort: Callable[[Any, int], NoReturn]
    place: str = ""


BY_MPI = Rendezvous(mpi.start, mpi.finish, mpi.abort)


def rendezvous_of(launched_by: LaunchedBy, timeout_s: float) -> Rendezvous:
    """MPI's, or torch's where torchrun started the ranks; to start takes twice `timeout_s` at the most, or a minute."""
    if launched_by.launcher != TORCHRUN:
        return BY_MPI
    from gpubench.hardware.torch import group, meeting

    start = partial(group.start, seconds=max(meeting.LEAST_SECONDS, 2 * timeout_s))
    place = f"torch.distributed at {meeting.store_place(os.environ)}"
    return Rendezvous(start, group.finish, group.abort, place)


def _check_launch(launched_by: LaunchedBy, rendezvous: Rendezvous) -> None:
    """Raise UsageError for ranks that cannot meet."""
    if launched_by.launcher == TORCHRUN and rendezvous is BY_MPI:
        raise UsageError(
            "this command under torchrun",
            expected="ranks that MPI started; the collectives alone take torchrun's",
            next_step=f"mpirun -n {launched_by.size} gpubench ...; {launched_by.without_it}",
        )
    if launched_by.rank >= launched_by.size:
        raise UsageError(
            f"rank {launched_by.rank} of {launched_by.size}, says {launched_by.launcher}",
            expected=f"a rank from 0 to {launched_by.size - 1}",
            reason="its variables in the environment were set by hand, or are another job's",
        )


def run(
    make_job: Callable[[Any, RankProgress], RankJob],
    launched_by: LaunchedBy,
    timeout_s: float,
    defaults: Mapping[str, str],
    imports: Sequence[str] = (),
    rendezvous: Rendezvous = BY_MPI,
) -> int:
    """Be a rank: do the job with the others, and return the exit code that all of them return.

    `defaults` are options that stand in the environment or a file, each with where: the same on every rank.
    A job that shows no progress for `timeout_s` seconds, longer while it starts, is ended with exit code 3.

    What goes wrong on all ranks alike is told once, by the first. A rank that breaks on its own says so, with its host
    and GPU, and ends the whole job at once.
    """
    _check_launch(launched_by, rendezvous)
    channel = os.environ.get(CHANNEL_VARIABLE)
    if channel:
        launcher.die_with_parent()
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
            time.sleep(SECONDS_TO_BE_ENDED)  # what broke is what the watchdog aborted, and it has told why
        lost = lost_connection(broken)
        if lost is not None:
            time.sleep(SECONDS_FOR_A_LOST_RANK)
        progress.leave()
        place = str(job.identity) if job else f"rank {launched_by.rank} on {mpi.host_name()}"
        error = _located(lost or broken, place)
        speaks = job is not None and not isinstance(broken, KeyboardInterrupt)  # which all ranks were sent
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


def own_identity(group: Group) -> tuple[RankIdentity, list[int]]:
    """The identity of this rank, before it has a GPU, and the node of every rank."""
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
    """Each rank's node, numbered by its first rank, and this rank's place within its node; hosts by their names."""
    hosts = group.gather(mpi.host_name())
    order = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return [order[host] for host in hosts], hosts[: group.rank].count(hosts[group.rank])


def _located(broken: BaseException, place: str) -> GpubenchError:
    if isinstance(broken, GpubenchError):
        broken.where = broken.where or place
        return broken
    if isinstance(broken, KeyboardInterrupt):
        return InterruptedRunError("interrupted; the run was ended, and rows measured before are in the outputs")
    if isinstance(broken, BrokenPipeError):
        return ReaderGoneError("the reader of the output went away", where=place)
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
        next_step=f"NCCL_DEBUG=WARN shows what NCCL says, {TRACEBACK_VARIABLE}=1 where gpubench was",
    )


def _tell(error: GpubenchError, channel: str | None) -> None:
    """Report to the gpubench that launched this rank, else on stderr."""
    if channel:
        try:
            sender = ChannelSender(channel)
            sender.error(error)
            sender.close()
        except OSError:
            return
    elif sys.__stderr__ is not None:
        tell(error, sys.__stderr__)
