"""Who started this process, from the environment."""

import pytest

from gpubench.errors import UsageError
from gpubench.model.facts.environment import LaunchedRank, detect_launcher, strip_launcher


def test_torchrun_is_known_by_all_that_it_sets_and_mpi_comes_first() -> None:
    elastic = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
    assert detect_launcher(elastic) == LaunchedRank("torchrun", 3, 8)
    pod = {name: value for name, value in elastic.items() if name != "LOCAL_RANK"}
    assert detect_launcher(pod) is None, "an operator's pod: nobody has started ranks yet"
    of_mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert detect_launcher({**elastic, **of_mpi}) == LaunchedRank("Open MPI's mpirun", 1, 2)
    assert strip_launcher({**elastic, "HOME": "/root"}) == {"HOME": "/root"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "a"),
        ("RANK", "-1"),
        ("WORLD_SIZE", "two"),
        ("WORLD_SIZE", "0"),
        ("LOCAL_RANK", "x"),
        ("MASTER_PORT", "p"),
    ],
)
def test_torchruns_variables_that_are_no_numbers_are_refused(name: str, value: str) -> None:
    elastic = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
    with pytest.raises(UsageError, match=f"{name}={value} together with ") as refused:
        detect_launcher({**elastic, name: value})
    assert "unset RANK WORLD_SIZE LOCAL_RANK" in refused.value.next_step
    by_mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert detect_launcher({**elastic, name: value, **by_mpi}) == LaunchedRank("Open MPI's mpirun", 1, 2)
