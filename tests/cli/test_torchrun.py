"""A shell, or a program, that a rank of torchrun's started: what its variables mean to each command."""

import pytest

from gpubench.cli.process import COMMANDS
from gpubench.model.terms.commands import UnderTorchrun
from tests.cli.running import environment, gpubench

INHERITED = environment(RANK="3", WORLD_SIZE="8", LOCAL_RANK="3", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
LOOKS = {
    "topo": ("--simulate", "hgx-h200-4"),
    "watch": ("--simulate", "hgx-h200-4", "--for", "2s"),
    "explain": ("{log}",),
    "compare": ("{result}", "{result}"),
    "report": ("{result}",),
    "plan": ("--parameters", "7B", "--simulate", "hgx-h200-4"),
    "profiles": ("list",),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A result and a log."""
    folder = tmp_path_factory.mktemp("stored")
    result, log = folder / "result.json", folder / "nccl.log"
    asked = ("allreduce", "--simulate", "hgx-h200-4", "--sizes", "1M", "--output", str(result), "--quiet")
    assert gpubench(*asked).returncode == 0
    log.write_text("n0:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n")
    return {"result": str(result), "log": str(log)}


def test_every_command_that_looks_alone_is_tried_here() -> None:
    alone = {each.name for each in COMMANDS if each.under_torchrun is UnderTorchrun.ALONE}
    assert alone == LOOKS.keys()


@pytest.mark.parametrize("command", LOOKS)
def test_what_starts_no_ranks_works_in_it_as_elsewhere(command: str, files: dict[str, str]) -> None:
    asked = [command, *(word.format(**files) for word in LOOKS[command])]
    inside = gpubench(*asked, env=INHERITED)
    assert inside.stdout
    outside = gpubench(*asked)
    assert (inside.returncode, inside.stderr) == (outside.returncode, outside.stderr)
    assert len(inside.stdout.splitlines()) == len(outside.stdout.splitlines())


@pytest.mark.parametrize(
    "asked", [("p2p",), ("check", "--simulate", "hgx-h200-4"), ("scan", "--simulate", "hgx-h200-4")]
)
def test_what_measures_refuses_aloud_and_says_how_to_leave(asked: tuple[str, ...]) -> None:
    refused = gpubench(*asked, env=INHERITED)
    assert refused.returncode == 2
    assert "under torchrun" in refused.stderr
    assert "env -u LOCAL_RANK gpubench" in refused.stderr


def test_of_ranks_that_can_meet_the_first_alone_speaks_of_wrong_usage() -> None:
    asked = ("allreduce", "--sizes", "nonsense")
    assert gpubench(*asked, env=INHERITED).stderr == ""
    assert "nonsense" in gpubench(*asked, env=INHERITED | {"RANK": "0", "LOCAL_RANK": "0"}).stderr


def test_help_is_there_for_every_rank() -> None:
    assert "Usage:" in gpubench("--help", env=INHERITED).stdout
