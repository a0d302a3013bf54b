"""Trial jobs of MPI on GPU memory with two ranks: one right, one wrong, one crash."""

import sys

import pytest

from gpubench.backends.mpi.backends import TrialCommand, read_support
from gpubench.model.facts.process import TrialOutcome
from tests.cli.running import MPI_ENVIRONMENT, environment, mpirun_command

pytestmark = pytest.mark.mpi


def test_an_operation_is_tried_in_a_job_of_its_own_and_a_crash_ends_no_other() -> None:
    variables = environment(**MPI_ENVIRONMENT, CRASHES="allreduce", CORRUPTS="broadcast")
    words = [mpirun_command(1)[0], "-n", "2", sys.executable, "-m", "tests.mpi.trial_job"]
    support = read_support(["allreduce", "broadcast", "reduce"], TrialCommand(words, variables), 100.0)
    assert support.library.startswith("Open MPI")
    assert support.claims["MPIX_Query_cuda_support"] == "no"
    assert support.claims["threads"] == "multiple"
    assert support.failing == ["allreduce", "broadcast"]
    assert support.working == ["reduce"]
    crashed, wrong = support.find_trials("allreduce")[0], support.find_trials("broadcast")[0]
    assert (crashed.outcome, crashed.size_bytes) == (TrialOutcome.CRASHED, 1024)
    assert "signal 11 (SIGSEGV)" in crashed.said
    assert wrong.outcome is TrialOutcome.WRONG
