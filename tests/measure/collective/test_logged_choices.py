"""Choices from complete, truncated and garbled logs."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.collectives.allreduce import ALLREDUCE
from gpubench.measure.collective.cases import Case, cases
from gpubench.measure.collective.paths import LoggedChoices, read_choices
from tests.fakes.library_log import FakeLog, recorded, said
from tests.fakes.ranks import ThreadGroup, run_ranks
from tests.measure.collective.test_sweep import request_for

RANKS = 4


def read(logs: Sequence[FakeLog], sizes: tuple[int, ...] = (1024,)) -> tuple[LoggedChoices, list[Case]]:
    request = request_for(ALLREDUCE, sizes=sizes)
    every_case = tuple(cases(request, len(logs)))
    tried: list[Case] = []

    def body(group: ThreadGroup) -> LoggedChoices | None:
        def try_once(case: Case) -> None:
            if group.rank == 0:
                tried.append(case)

        return read_choices(request, group, [0] * len(logs), logs[group.rank], every_case, try_once)

    first, *others = run_ranks(len(logs), body)
    assert others == [None] * (len(logs) - 1)
    assert first is not None
    return first, tried


@pytest.mark.parametrize("name", ["normal", "tuning", "p2p-disabled"])
def test_recorded_logs_name_the_ring(name: str) -> None:
    found, _ = read([FakeLog(recorded(name, rank)) for rank in range(RANKS)])
    (choice,) = found.by_operation.values()
    assert set(choice.used.pairs) == {(0, 1), (1, 2), (2, 3), (3, 0)}
    assert choice.used.unconnected == ()
    assert choice.used.host_staged is (name == "p2p-disabled")


@given(st.lists(st.binary(max_size=80), max_size=20))
def test_garbage_lines_add_no_connection(junk: list[bytes]) -> None:
    found, _ = read([FakeLog([*junk, *said("Channel 00/0 : 0[0] -> ", "Channel", "via P2P/CUMEM")]), FakeLog(junk)])
    for choice in found.by_operation.values():
        assert choice.used.host_staged in (None, True)


@given(st.integers(0, 2**32), st.sampled_from(["normal", "p2p-disabled"]))
def test_truncated_lines_add_no_connection(seed: int, name: str) -> None:
    random = Random(seed)

    def mangled(rank: int) -> list[bytes]:
        share = random.random()
        lines = recorded(name, rank)
        return [line[: random.randrange(len(line) + 1)] if random.random() < share else line for line in lines]

    logs = [mangled(rank) for rank in range(RANKS)]
    found, _ = read([FakeLog(log) for log in logs])
    (choice,) = found.by_operation.values()
    assert choice.used.host_staged in (name == "p2p-disabled", None)
    every_rank_is_left = all(any(line.endswith(b" via P2P/CUMEM") for line in log) for log in logs)
    assert choice.used.host_staged is not False or every_rank_is_left
