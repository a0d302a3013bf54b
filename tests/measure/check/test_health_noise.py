"""False alarms and planted faults on simulated machines with noise. benchmarks/check_verdicts.py runs 1,000 seeds."""

import pytest

from gpubench import profiles
from gpubench.jobs.plans import Depth
from tests.fakes.planted_faults import PLANTED, findings

USUAL = ("a100-pcie-2", "gb200-nvl-4", "hgx-a100-4", "hgx-b200-8", "hgx-h100-8", "hgx-h200-4", "l4-8", "l40s-8")
"""One machine per kind. tests/cli/test_healthy_machines.py has all others."""


@pytest.mark.parametrize("name", USUAL)
def test_healthy_machines_raise_no_alarm(name: str) -> None:
    assert [finding.id for finding in findings(name, (), 1)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", profiles.profile_names())
def test_healthy_machines_raise_no_alarm_whatever_the_noise(name: str) -> None:
    for seed in range(1, 20):
        assert [finding.id for finding in findings(name, (), seed)] == []


@pytest.mark.parametrize(("machine", "fault", "expected"), PLANTED, ids=lambda each: str(each))
def test_a_planted_fault_is_found(machine: str, fault: str, expected: tuple[str, ...]) -> None:
    found = (finding.id for depth in (Depth.QUICK, Depth.DEFAULT) for finding in findings(machine, (fault,), 1, depth))
    assert any(each in expected for each in found)
