"""Python runs this at start in every process that has this folder on its path: it gives ranks four GPUs to believe in.

GPUBENCH_TEST_LOGS names a folder of recorded logs. NCCL is then MPI on CPU buffers which writes, line by line, what
that rank's NCCL wrote, and reads NCCL_DEBUG and its like as NCCL does. With `refused`, two ranks have no path.
GPUBENCH_TEST_GPUS is how many GPUs there are, in the place of four, and GPUBENCH_TEST_NCCL_CODE what NCCL's version is;
with GPUBENCH_TEST_MPS ranks run under MPS.
GPUBENCH_TEST_NODES names a simulated machine and its faults: `check` then finds its nodes on the hosts of the job.
GPUBENCH_TEST_SLOW_HOST names one whose memory takes four times as long to copy; with `none` all take as long.
The rank that GPUBENCH_TEST_STUCK names does not come back from its first operation; GPUBENCH_TEST_START_SECONDS is what
an initialisation has, in the place of 300.
GPUBENCH_TEST_TRAFFIC names a simulated machine and its faults: `watch` then sees one of its nodes on each rank.
GPUBENCH_TEST_RANKS_A_NODE is how many ranks in a row are told that they are on a node of their own.
A rank's watchdog, which knows of no GPU, is left alone: to load all this takes a third of a second.
"""

import os
import sys

_is_watchdog = "gpubench.ranks.watchdog.main" in sys.orig_argv
_is_rank = "OMPI_COMM_WORLD_RANK" in os.environ and not _is_watchdog

if _is_rank and "GPUBENCH_TEST_RANKS_A_NODE" in os.environ:
    _node = int(os.environ["OMPI_COMM_WORLD_RANK"]) // int(os.environ["GPUBENCH_TEST_RANKS_A_NODE"])
    os.environ["NCCL_HOSTID"] = f"node{_node}"

_logs = os.environ.get("GPUBENCH_TEST_LOGS")

if _logs and "GPUBENCH_TEST_START_SECONDS" in os.environ:
    from gpubench.model.terms import ranks

    ranks.SECONDS_TO_START = float(os.environ["GPUBENCH_TEST_START_SECONDS"])

if _logs and not _is_watchdog:
    from tests.mpi.on_import import StandIns

    _driver, _gpus, _mpi, _steps = (f"tests.mpi.believed_{name}" for name in ("driver", "gpus", "mpi", "steps"))
    StandIns(
        {
            "gpubench.jobs.collective.job": {"read_driver": (_driver, "read_driver")},
            "gpubench.backends.cuda": {"check_installed": (_driver, "check_installed")},
            "gpubench.jobs.collective.opening_gpu": {
                "open_gpu": (_gpus, "open_gpu"),
                "NcclLibrary": (_gpus, "Library"),
                "Probe": (_gpus, "Probe"),
                "NvmlCounters": (_gpus, "Counters"),
            },
            "gpubench.backends.nccl.backend": {"NcclBackend": (_gpus, "Backend")},
            "gpubench.backends.nccl.communicator": {"open_requested": (_gpus, "open_requested")},
            "gpubench.backends.mpi.backends": {
                "MpiOnCuda": (_mpi, "HandedMpi"),
                "read_support": (_mpi, "tried"),
            },
            "gpubench.jobs.collective.overlap": {
                "GpuSteps": (_steps, "BelievedSteps"),
                "NvmlLoad": (_steps, "BelievedLoad"),
                "GroupCommunicator": (_steps, "capped"),
                "usable_driver": (_driver, "usable_driver"),
            },
            "gpubench.jobs.collective.rank_job": {"read_driver": (_driver, "read_driver")},
            "gpubench.measure.collective.paths": {"COUNTED_BYTES": (_gpus, "COUNTED_BYTES")},
            "gpubench.measure.overlap": {
                "_SECONDS_A_BATCH": (_steps, "OPERATION_SECONDS"),
                "_MOST_SETTLING_SECONDS": (_steps, "OPERATION_SECONDS"),
            },
        }
    ).install()

_nodes = os.environ.get("GPUBENCH_TEST_NODES")

_slow_host = os.environ.get("GPUBENCH_TEST_SLOW_HOST")

if _slow_host and _is_rank:
    from tests.mpi.believed_nodes import slow_down

    slow_down(_slow_host)

if _nodes and _is_rank:
    from tests.mpi.believed_nodes import install as install_nodes

    install_nodes(*_nodes.split(), hosts=os.environ["GPUBENCH_TEST_HOSTS"].split(","))

_traffic = os.environ.get("GPUBENCH_TEST_TRAFFIC")

if _traffic and _is_rank:
    from tests.mpi.believed_traffic import install as install_traffic

    install_traffic(int(os.environ["OMPI_COMM_WORLD_RANK"]), *_traffic.split())
