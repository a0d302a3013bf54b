"""A rank of a trial job of MPI on GPU memory, with NumPy as a GPU. Operations in CRASHES crash with a bad address."""

import os
import signal
import sys

from gpubench.backends.mpi import trial
from gpubench.backends.mpi.group import MpiCalls
from gpubench.machine.nvml import Driver
from tests.fakes import cupy_on_numpy

if __name__ == "__main__":
    patch = cupy_on_numpy.ForGood()
    cupy_on_numpy.install(patch, cupy_on_numpy.Runtime(2))
    patch.setattr(trial, "read_driver", lambda _environment: Driver(version="580", cuda=13000, gpus=2, visible=2))
    if sys.argv[1] == os.environ.get("CRASHES"):
        patch.setattr(MpiCalls, "all_reduce", lambda *_: lambda: os.kill(os.getpid(), signal.SIGSEGV))
    if sys.argv[1] == os.environ.get("CORRUPTS"):
        patch.setattr(MpiCalls, "broadcast", lambda *_: lambda: None)
    trial.main(sys.argv[1])
