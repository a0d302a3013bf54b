"""False alarms and planted faults on simulated machines with noise; benchmarks/check_verdicts.py has 1,000 seeds."""

import pytest

from gpubench import profiles
from tests.fakes.planted_faults import PLANTED, findings

SEEDS = (range(1, 2), pytest.param(range(2, 20), marks=pytest.mark.slow))
"""Seed 0 is in tests/cli/test_healthy_machines.py."""


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize("name", profiles.names())
def test_healthy_machines_raise_no_alarm(name: str, seeds: range) -> None:
    for seed in seeds:
        assert [each.id for each in findings(name, (), seed)] == []


@pytest.mark.parametrize(("machine", "fault", "expected"), PLANTED, ids=lambda each: str(each))
def test_a_planted_fault_is_found(machine: str, fault: str, expected: tuple[str, ...]) -> None:
    assert any(each.id in expected for each in findings(machine, (fault,), seed=1))
