"""The output of nccl-tests before 2.11, nccl-tests 1.x and rccl-tests, generated from their sources."""

from collections.abc import Sequence

COLUMNS = {
    "all_reduce": ("redop",),
    "reduce_scatter": ("redop",),
    "alltoall": ("redop",),
    "all_gather": (),
    "sendrecv": (),
    "hypercube": (),
    "broadcast": ("root",),
    "gather": ("root",),
    "scatter": ("root",),
    "reduce": ("redop", "root"),
}
"""The columns of nccl-tests 2.10 after the type. alltoall has an empty redop."""

_CELLS = {"redop": "sum", "root": "0"}


def old_output(program: str, sizes: Sequence[int] = (1024, 33554432), ranks: int = 8, wrong: str = "0e+00") -> str:
    """Return a run of nccl-tests 2.10 with `ranks` GPUs of one process."""
    columns = COLUMNS[program]
    blocks = program not in ("all_reduce", "reduce", "broadcast", "sendrecv")
    words = "".join(f"  {_CELLS[name] if program != 'alltoall' else '':>6s}" for name in columns)
    factor = 2 * (ranks - 1) / ranks if program == "all_reduce" else 1.0
    rows = []
    for size in sizes:
        time_us = 20 + size / 1e5
        time = f"{time_us:7.0f}" if time_us > 10000 else f"{time_us:7.1f}" if time_us > 100 else f"{time_us:7.2f}"
        algbw = size / time_us / 1e3
        half = f"  {time}  {algbw:6.2f}  {factor * algbw:6.2f}  {wrong:>5s}"
        rows.append(f"{size:12d}  {size // 4 // (ranks if blocks else 1):12d}  {'float':>8s}{words}{half}{half}")
    named = "".join(f"  {name:>6s}" for name in columns)
    return "\n".join(
        [
            f"# nThread 1 nGpus {ranks} minBytes 8 maxBytes 8 step: 2(factor) warmup iters: 5 iters: 20 validation: 1 ",
            "#",
            "# Using devices",
            *(
                f"#   Rank {gpu:2d} Pid {812:6d} on {'38ab0':>10s} device {gpu:2d} [0x0{gpu}] V100"
                for gpu in range(ranks)
            ),
            "#",
            "#                           out-of-place                       in-place          ",
            f"#       size         count      type{named}{2 * '     time   algbw   busbw  error'}",
            f"#        (B)    (elements)          {'        ' * len(columns)}     (us)  (GB/s)  (GB/s)",
            *rows,
            "# Out of bounds values : 0 OK",
            "# Avg bus bandwidth    : 12.5 ",
            "#",
            "",
        ]
    )


RCCL = """# nThread 1 nGpus 2 minBytes 8 maxBytes 8 step: 2(factor) warmup iters: 5 iters: 20 validation: 1 graph: 0
#
rccl-tests: Version develop:12ab34c
# Using devices
#   Rank  0 Pid   4791 on     n1 device  0 [0000:05:00.0] AMD Instinct MI300X
#   Rank  1 Pid   4791 on     n1 device  1 [0000:26:00.0] AMD Instinct MI300X
RCCL version : 2.22.3-develop:77abcd0
#
#                                                     {placements}
#       size         count      type   redop    root{columns}
#        (B)    (elements)
     1048576        131072     float    none      -1{values}
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 20.1
"""
"""rccl-tests with an allgather without its name"""

RCCL_OLD = """\
# nThreads: 1 nGpus: 1 nRanks: 2 minBytes: 8 maxBytes: 8 step: 2(factor) warmupIters: 5 iters: 20 validation: 1
#
# Using devices
#   Rank  0 Pid   4791 on     n1 device  0 [0000:05:00.0] Device 738c
#   Rank  1 Pid   4791 on     n1 device  0 [0000:05:00.0] Device 738c
#
#                                                       out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                       (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum       0    60.00   17.48   17.48  4e-02*   59.00   17.77   17.77  0e+00
# Errors with asterisks indicate errors that have exceeded the maximum threshold.
# Out of bounds values : 1 FAILED
# Avg bus bandwidth    : 0.7
"""
"""rccl-tests of 2022, with several ranks per GPU"""
