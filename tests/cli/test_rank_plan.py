"""What a launched rank knows of the plan of the process that launched it."""

import json
from pathlib import Path

import pytest

from gpubench.collectives.record import SweepRequest
from gpubench.collectives.registry import collective_named
from gpubench.formats.presentation import Output, Presentation
from gpubench.formats.registry import DATED
from gpubench.jobs.collective.job import RankPlan, write_plan
from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.model.terms.plain import from_plain
from tests.cli.running import environment, gpubench


@pytest.mark.parametrize("folder", [Path("results"), None])
def test_a_rank_knows_the_folder_of_earlier_results(tmp_path: Path, folder: Path | None) -> None:
    outputs = () if folder is None else (Output(folder, DATED),)
    plan = CollectivePlan(
        request=SweepRequest(collective=collective_named("allreduce"), sizes=(1024,)),
        presentation=Presentation(outputs=outputs),
    )
    write_plan(str(tmp_path / "socket"), plan, ("allreduce",))
    of_rank = from_plain(RankPlan, json.loads((tmp_path / "plan").read_text())).plan()
    assert plan.history == of_rank.history == folder
    assert of_rank.presentation.outputs == ()


def test_a_rank_beyond_the_job_says_so_itself() -> None:
    """Else nobody would: there may be no first rank."""
    beyond = {"RANK": "5", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    result = gpubench("allreduce", "--backend", "torch:gloo", env={**environment(), **beyond})
    assert result.returncode == 2
    assert "rank 5 of 2, says torchrun" in result.stderr


def test_variables_of_torchruns_that_are_no_numbers_are_an_error_of_the_command_alone() -> None:
    """Else gpubench would start a job of its own beside the one that they are of."""
    odd = {"RANK": "a", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    result = gpubench("allreduce", "--backend", "torch:gloo", env={**environment(), **odd})
    assert result.returncode == 2
    assert "RANK=a beside WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT" in result.stderr
    assert "Traceback" not in result.stderr
    assert gpubench("--version", env={**environment(), **odd}).returncode == 0
