"""An MPI that a rank believes to take GPU memory. A module of its own, as it is made of what it stands in for."""

import os
from collections.abc import Sequence
from typing import Any

from gpubench.backends.mpi.backends import HostBackend
from gpubench.model.facts.process import MpiSupport, OperationTrial, TrialOutcome
from gpubench.model.terms.ranks import Progress
from tests.mpi.believed_driver import RANKS


class HandedMpi(HostBackend):
    """MPI on CPU buffers that says they are a GPU's."""

    name = "mpi"

    def __init__(self, group: Any, _device: object, progress: Progress) -> None:
        super().__init__(group, RANKS, progress=progress)


def tried(operations: Sequence[str], _command: object, completed: Any) -> MpiSupport:
    """An MPI that crashes in the operations that are named, and does the others right."""
    bad = os.environ.get("GPUBENCH_TEST_MPI_CRASHES", "").split(",")
    trials = []
    for name in operations:
        completed()
        ends = (TrialOutcome.CRASHED, TrialOutcome.UNKNOWN) if name in bad else (TrialOutcome.RIGHT,) * 2
        said = "signal 11 (SIGSEGV)" if name in bad else ""
        trials += [
            OperationTrial(operation=name, size_bytes=size, outcome=end, seconds=2.5, said=said)
            for size, end in zip((1024, 2**20), ends, strict=True)
        ]
    claims = {"MPIX_Query_cuda_support": "no"}
    return MpiSupport(library="Open MPI v4.1.6", asked=operations[0], trials=trials, claims=claims, seconds=5.0)
