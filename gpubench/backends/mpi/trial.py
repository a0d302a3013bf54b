"""Test one MPI operation on GPU memory, with verified data, in a job that may crash.

`mpirun -n 2 python -m gpubench.backends.mpi.trial OPERATION` prints JSON objects, one per line, for each message size.
"""

import faulthandler
import json
import os
import sys
import time

from gpubench.backends.cuda import CudaDevice, open_device
from gpubench.backends.mpi import group as mpi
from gpubench.backends.mpi.group import MpiCalls
from gpubench.collectives.record import Call
from gpubench.collectives.registry import collective_named
from gpubench.machine.environment import mapped_files, read_mpi
from gpubench.machine.nvml import read_driver
from gpubench.model.facts.environment import LaunchedRank
from gpubench.model.terms.operation import POISON, Block, DataPattern, DataType, ReduceOp
from gpubench.ports.backend import Region

SIZES_BYTES = (2**10, 2**20)

_SECONDS_TO_BE_HEARD = 0.3  # Wait before a step that may crash. The launcher drops unread output when a rank crashes
_LIBMPI = r"libmpi(ch)?\.so"


def main(operation: str, sizes_bytes: tuple[int, ...] = SIZES_BYTES) -> None:
    faulthandler.disable()
    group = mpi.start(LaunchedRank("gpubench", 0, 1))
    _, local_rank = mpi.nodes(group)
    device = open_device(local_rank, group.size, mpi.host_name(), read_driver(os.environ))
    _say(group, library=mpi.library_version(), claims=_claims())
    for size_bytes in sizes_bytes:
        _say(group, begins=size_bytes)
        group.barrier()
        time.sleep(_SECONDS_TO_BE_HEARD)
        _say(
            group, size_bytes=size_bytes, wrong=sum(group.gather(wrong_elements(operation, size_bytes, group, device)))
        )
    mpi.finish()


def wrong_elements(operation: str, size_bytes: int, group: mpi.MpiGroup, device: CudaDevice) -> int:
    """Run one operation out of place. Return the number of wrong elements on this rank."""
    collective, dtype = collective_named(operation), DataType.FLOAT32
    layout = collective.layout(size_bytes // dtype.size_bytes, dtype, group.size)
    send, receive = device.allocate(size_bytes), device.allocate(size_bytes)
    data = DataPattern(dtype, ReduceOp.SUM if collective.reduces else None, group.size)
    send.fill_sent(data, Block(0, 1, layout.largest, 0, layout.send), group.rank)
    receive.fill_byte(size_bytes, POISON)
    device.stream.synchronize()
    call = Call(
        send=Region(send, 0),
        receive=Region(receive, 0),
        count=layout.count,
        dtype=dtype,
        op=ReduceOp.SUM,
        root=0,
        rank=group.rank,
        ranks=group.size,
    )
    collective.issue(MpiCalls(group.communicator, settle=device.stream.synchronize), call)()
    expected = collective.expected(layout, group.rank, group.size, 0)
    blocks = [(Block(0, 1, layout.largest, part.offset, part.count, part.start), part.source) for part in expected]
    return receive.count_wrong(data, blocks)


def _claims() -> dict[str, str]:
    path = next(iter(mapped_files(_LIBMPI)), None)
    facts = read_mpi(path)
    said = {"MPIX_Query_cuda_support": facts.cuda_aware, "built with CUDA": facts.cuda_built}
    named = {name: "yes" if value else "no" for name, value in said.items() if value is not None}
    chosen = {"pml": facts.pml, "accelerator": facts.accelerator}
    kinds = mpi.memory_kinds()
    others = {name: value for name, value in chosen.items() if value}
    return named | others | {"mpi_memory_alloc_kinds": kinds or "not answered", "threads": mpi.thread_level()}


def _say(group: mpi.MpiGroup, **what: object) -> None:
    if group.rank == 0:
        sys.stdout.write(f"{json.dumps(what)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
