"""`gpubench overlap` under mpirun, on a machine without GPUs, and what NCCL's settings of the user mean for caps."""

import os

import pytest

from gpubench.errors import UsageError
from gpubench.hardware.node.nvml.library import read_driver
from gpubench.jobs.collective.overlap.rank_job import check_caps, check_ranks
from gpubench.model.terms.overlap.asked import OverlapAsked
from tests.cli.running import mpirun


@pytest.mark.mpi
@pytest.mark.skipif(read_driver(os.environ).visible > 0, reason="this machine has GPUs")
def test_ranks_without_gpus_refuse_once_and_name_the_simulation() -> None:
    result = mpirun(2, "overlap", "--sizes", "1M")
    assert result.returncode == 3
    assert result.stderr.count("no usable GPU") == 1
    assert "--simulate hgx-h200-4" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.mpi
def test_ranks_do_not_simulate() -> None:
    result = mpirun(2, "overlap", "--simulate", "hgx-h200-4")
    assert result.returncode == 2
    assert result.stderr.count("overlap --simulate under") == 1


@pytest.mark.parametrize("name", ["NCCL_MAX_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"])
def test_caps_beside_a_cap_of_the_user_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}=8 set already") as caught:
        check_caps(OverlapAsked(), {name: "8"})
    assert "--ctas own" in str(caught.value.next_step)
    check_caps(OverlapAsked(ctas=(None,)), {name: "8"})
    check_caps(OverlapAsked(), {"NCCL_DEBUG": "INFO"})


def test_one_rank_has_nobody_to_talk_to() -> None:
    with pytest.raises(UsageError, match="one rank"):
        check_ranks(1)
    check_ranks(2)
