"""The page that a rank and its watchdog share."""

import os

import pytest

from gpubench.model.terms.ranks import Phase
from gpubench.ranks.watchdog.progress import ProgressBlock


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_a_rank_writes_is_read_in_another_process() -> None:
    block = ProgressBlock()
    block.enter(Phase.LAUNCH)
    pid = os.fork()
    if pid == 0:
        block.enter(Phase.OPERATION, "64K → in place", 20)
        block.completed()
        block.completed(3)
        block.leave()
        os._exit(0)
    os.waitpid(pid, 0)
    seen = block.read()
    assert (seen.step, seen.phase, seen.label, seen.done, seen.total) == (2, Phase.OPERATION, "64K → in place", 4, 20)
    assert block.left()


def test_a_new_phase_begins_anew() -> None:
    block = ProgressBlock()
    block.enter(Phase.OPERATION, "x" * 1000, 20)
    block.completed(20)
    assert len(block.read().label) == 256
    block.enter(Phase.OUTPUT)
    seen = block.read()
    assert (seen.step, seen.phase, seen.label, seen.done, seen.total) == (2, Phase.OUTPUT, "", 0, 0)
    assert not block.left()
