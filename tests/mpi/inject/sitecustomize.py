"""Python runs this at start in every process that has this folder on its path: it gives ranks four GPUs to believe in.

GPUBENCH_TEST_LOGS names a folder of recorded logs. NCCL is then MPI on CPU buffers which writes, line by line, what
that rank's NCCL wrote, and reads NCCL_DEBUG and its like as NCCL does. With `refused`, two ranks have no path.
"""

import os

_logs = os.environ.get("GPUBENCH_TEST_LOGS")

if _logs:
    from tests.mpi.believed_gpus import install

    install(_logs)
