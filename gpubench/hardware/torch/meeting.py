"""The store at which the ranks of torchrun's job meet, and the error that names those who do not come."""

import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

from gpubench.errors import CouldNotMeasureError
from gpubench.hardware.mpi.group import host_name
from gpubench.hardware.torch.refusals import first_line, torch_refused
from gpubench.model.facts.launched_by import LaunchedBy
from gpubench.model.terms.units import counted, some_of, spans

LEAST_SECONDS = 60.0
"""torchrun starts all ranks of a host at once, and to import torch from a slow file system takes most of this."""

_ARRIVED, _ALL_THERE = "arrived", "all there"
_SECONDS_TO_CONNECT, _SECONDS_BETWEEN_TRIES = 5.0, 0.2


class RanksMissingError(CouldNotMeasureError):
    """Ranks did not come to the store; rank `speaker` reports it for all that did."""

    speaker = 0


def store_place(environment: Mapping[str, str]) -> str:
    """'node0:29500', as torchrun tells its processes."""
    return f"{environment.get('MASTER_ADDR', '')}:{environment.get('MASTER_PORT', '')}"


def meet(distributed: Any, launched_by: LaunchedBy, environment: Mapping[str, str], seconds: float) -> Any:
    """The store of torchrun's agent, else of rank 0, once every rank has come to it.

    Raises:
        RanksMissingError: within `seconds` the store did not answer, or a rank did not come.
        CouldNotMeasureError: the store cannot begin, as where another listens on its port.
    """
    store = _open_store(distributed, launched_by, environment, seconds)
    rank, size = launched_by.rank, launched_by.size
    store.set(str(rank), host_name())
    if store.add(_ARRIVED, 1) == size:
        store.set(_ALL_THERE, "")
    try:
        store.wait([_ALL_THERE], timedelta(seconds=seconds))
    except RuntimeError as error:
        came = [each for each in range(size) if store.check([str(each)])]
        if len(came) == size:
            return store
        hosts = [store.get(str(each)).decode() for each in came]
        raise _missing(store_place(environment), launched_by, came, hosts, seconds) from error
    return store


def _open_store(distributed: Any, launched_by: LaunchedBy, environment: Mapping[str, str], seconds: float) -> Any:
    """A store of this attempt: after a restart torchrun's agent still has the keys of those before."""
    is_of_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = launched_by.rank == 0 and not is_of_agent
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    silence = "" if serves else why_silent(host, port, seconds)
    if silence:
        raise _unreachable(launched_by, environment, silence, seconds)
    try:
        store = distributed.TCPStore(
            host,
            port,
            launched_by.size,
            is_master=serves,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise torch_refused("gloo", first_line(error)) from error
    return distributed.PrefixStore(f"gpubench/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def why_silent(host: str, port: int, seconds: float) -> str:
    """Why nobody took a connection within so many seconds, in the system's words; empty where somebody did.

    torch itself tries for up to twice its time-out, and logs a stack of C++ calls for each.
    """
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
    place: str, launched_by: LaunchedBy, came: Sequence[int], hosts: Sequence[str], seconds: float
) -> RanksMissingError:
    others = [rank for rank in range(launched_by.size) if rank not in came]
    error = RanksMissingError(
        f"{len(came)} of {launched_by.size} ranks came to the store at {place} within {seconds:g} s",
        expected=f"{counted(launched_by.size, 'rank')}, as WORLD_SIZE says",
        reason="torchrun was not started on every host, or there with another address, port or number of nodes",
        next_step=_next_step(launched_by),
    )
    error.details = [
        f"  missing:  rank {spans(others)}",
        f"  arrived:  rank {spans(came)} on {some_of(list(dict.fromkeys(hosts)))}",
    ]
    error.speaker = came[0]
    return error


def _unreachable(
    launched_by: LaunchedBy, environment: Mapping[str, str], said: str, seconds: float
) -> RanksMissingError:
    """The error of a rank that finds no store; of the ranks of a host the first one speaks."""
    error = RanksMissingError(
        f"nobody answered at {store_place(environment)}, where rank 0 keeps the store, within {seconds:g} s: {said}",
        expected=f"rank 0 of {launched_by.size} there, and a way to it",
        reason="rank 0 was not started, has ended, or MASTER_ADDR and MASTER_PORT are another job's",
        next_step=_next_step(launched_by),
    )
    error.speaker = launched_by.rank if environment.get("LOCAL_RANK") == "0" else -1
    return error


def _next_step(launched_by: LaunchedBy) -> str:
    return (
        "the same torchrun command on every host; on this host alone: "
        f"torchrun --standalone --nproc-per-node {launched_by.size} -m gpubench ...; --timeout S waits longer"
    )
