"""The ranks of this job as torch.distributed knows them: one store, and a process group for each backend of it."""

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from gpubench.hardware.torch.group import TorchGroup
from gpubench.hardware.torch.library import TorchDistributed
from gpubench.hardware.torch.refusals import first_line, torch_refused
from gpubench.ports.group import Group

_HERE = "127.0.0.1"
_HOURS = timedelta(hours=6)
"""For torch's own time-outs: it is gpubench's watchdog that ends what hangs, and says who is missing."""


def open_group(found: TorchDistributed, group: Group, *, one_node: bool, device: Any = None) -> Any:
    """The process group of these ranks for a backend; the first that is opened is torch's default one.

    `device` is the torch device that NCCL is to be bound to. Raises CouldNotMeasureError: torch cannot connect ranks.
    """
    distributed = found.distributed
    try:
        if distributed.is_initialized():
            if isinstance(group, TorchGroup) and group.size < distributed.get_world_size():
                return open_part(found, group.members)
            return distributed.new_group(backend=found.word, timeout=_HOURS)
        distributed.init_process_group(
            found.word,
            store=_store(distributed, group, one_node=one_node),
            rank=group.rank,
            world_size=group.size,
            timeout=_HOURS,
            device_id=device,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise torch_refused(found.word, first_line(error)) from error
    return distributed.group.WORLD


def open_part(found: TorchDistributed, ranks: Sequence[int]) -> Any:
    """A process group of some of the ranks; only they call this."""
    return found.distributed.new_group(list(ranks), backend=found.word, timeout=_HOURS, use_local_synchronization=True)


def close(found: TorchDistributed, process_group: Any) -> None:
    """Destroy a process group; with torch's default one all others go, and then there is nothing left to destroy."""
    if process_group is not None and found.distributed.is_initialized():
        found.distributed.destroy_process_group(process_group)


def _store(distributed: Any, group: Group, *, one_node: bool) -> Any:
    """A store on a port that the first rank's system picked, whose number the others get over MPI."""
    host = _HERE if one_node else socket.gethostname()
    store = None
    if group.rank == 0:
        store = distributed.TCPStore(host, 0, group.size, is_master=True, timeout=_HOURS, wait_for_workers=False)
    host, port = group.broadcast(None if store is None else (host, int(store.port)))
    return store or distributed.TCPStore(
        host, port, group.size, is_master=False, timeout=_HOURS, wait_for_workers=False
    )
