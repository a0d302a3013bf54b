"""What a launched rank knows of the plan of the process that launched it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpubench.formats.registry import DATED, Output, Presentation
from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.model.terms.options import plan_from
from gpubench.model.terms.settings import OWN_CHOICE
from tests.cli.running import environment, gpubench
from tests.cli.test_commands import options


def in_a_rank(plan: CollectivePlan) -> CollectivePlan:
    typed = json.loads(plan.for_ranks())
    return plan_from(CollectivePlan, typed, typed["command"])


@pytest.mark.parametrize("folder", [Path("results"), None])
def test_a_rank_knows_the_folder_of_earlier_results(folder: Path | None) -> None:
    outputs = () if folder is None else (Output(folder, DATED),)
    plan = replace(options(sizes="1K"), presentation=Presentation(outputs=outputs))
    of_rank = in_a_rank(plan)
    assert plan.history == of_rank.history == folder
    assert of_rank.presentation.outputs == ()


def test_a_rank_has_the_same_request_as_the_process_that_launched_it() -> None:
    plan = options("broadcast", smallest="8", largest="4G", factor="2", gpu_count=3, dtypes=["half"], root=2, iters="7")
    of_rank = in_a_rank(plan)
    assert of_rank.request == plan.request
    assert (of_rank.ranks, of_rank.request.sizes[-1]) == (3, 2**32)


def test_a_job_of_a_turn_has_the_settings_of_its_communicators() -> None:
    plan = options(algo=["ring,tree"], sets=["NCCL_MAX_NCHANNELS=4,8"])
    assert [process.name for process in plan.processes] == ["NCCL_MAX_NCHANNELS=4", "NCCL_MAX_NCHANNELS=8"]
    assert len(plan.settings) == 4
    of_turn = in_a_rank(replace(plan, turn="NCCL_MAX_NCHANNELS=8", checks_sets=True))
    assert [setting.name for setting in of_turn.settings] == ["ring", "tree"]
    assert of_turn.variants.set_variables == ("NCCL_MAX_NCHANNELS",)
    assert of_turn.processes == ()
    assert in_a_rank(replace(plan, turn=OWN_CHOICE)).settings == ()


def test_a_rank_beyond_the_job_says_so_itself() -> None:
    """Else nobody would: there may be no first rank."""
    beyond = {"RANK": "5", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    result = gpubench("allreduce", "--backend", "torch:gloo", env={**environment(), **beyond})
    assert result.returncode == 2
    assert "rank 5 of 2, according to torchrun" in result.stderr


def test_variables_of_torchruns_that_are_no_numbers_are_an_error_of_the_command_alone() -> None:
    """Else gpubench would start a job of its own beside the one that they are of."""
    odd = {"RANK": "a", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    result = gpubench("allreduce", "--backend", "torch:gloo", env={**environment(), **odd})
    assert result.returncode == 2
    assert "RANK=a together with WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT" in result.stderr
    assert "Traceback" not in result.stderr
    assert gpubench("--version", env={**environment(), **odd}).returncode == 0
