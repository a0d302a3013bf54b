"""The conditions as people read them: ids, words, links; each is reported by a check or explains a path."""

import re
from pathlib import Path

from gpubench.conditions.checks import CHECKS
from gpubench.conditions.definition.condition import Condition
from gpubench.conditions.definition.policy import SEVERITIES
from gpubench.conditions.registry import CONDITIONS, ids_now
from tests.fakes.planted import CHECKED, PLANTS, Plant
from tests.together import together

DOCS = Path(__file__).parents[2] / "docs"
_LINK = re.compile(
    r"https://(github\.com/[\w.-]+/[\w.-]+(/(issues|pull)/\d+)?"
    r"|docs\.(nvidia\.com|kernel\.org)/[\w./-]+\.html(#[\w-]+)?"
    r"|www\.open-mpi\.org/faq/\?category=runcuda"
    r"|forums\.developer\.nvidia\.com/t/[\w-]+/\d+"
    r"|pytorch\.org/docs/stable/\w+\.html)"
)


@together("condition", CONDITIONS, ids=lambda each: each.id)
def test_an_entry_is_whole(condition: Condition) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", condition.id)
    assert all((condition.title, condition.detection, condition.cure, condition.expected))
    assert _LINK.fullmatch(condition.link) or (DOCS / condition.link).exists(), f"not in _LINK: {condition.link}"
    assert all(word and "`" not in word for word in condition.seen_as)
    assert condition.check or condition.effects or condition.in_job, "needs a check, or a row of _ROWS in policy.py"
    assert bool(condition.effects) == bool(condition.settles), "what _ROWS of policy.py lists has `settles`"
    assert not condition.check or condition.check in {check.name for check in CHECKS}
    assert not condition.by_design or "nothing to repair" in condition.cure.lower()


def test_ids_are_stable_names_and_what_is_implied_exists() -> None:
    ids = [condition.id for condition in CONDITIONS]
    assert len(ids) == len(set(ids)) >= 100
    assert {name for condition in CONDITIONS for name in condition.implies} <= set(ids)


def test_every_check_has_conditions_or_what_measuring_found_out() -> None:
    assert {check.name for check in CHECKS} - {each.check for each in CONDITIONS} == {"paths"}


def test_ids_of_earlier_versions_lead_to_those_of_now() -> None:
    assert ids_now("nic-down") == ("rdma-port-down",)
    assert ids_now("acs-redirects") == ("acs-redirect", "acs-nic-redirect")
    assert {"nccl-p2p-disabled", "nccl-ib-disabled"} <= set(ids_now("fallback-expected"))
    assert ids_now("ecc-off") == ()


def test_every_finding_has_a_row_in_the_one_table_of_severities() -> None:
    ids = {each.id for each in CONDITIONS}
    assert set(SEVERITIES) <= ids
    assert {each.id for each in CONDITIONS if each.check and not each.by_design} <= set(SEVERITIES)
    assert all(grade.source for grade in SEVERITIES.values())


@together("plant", [*PLANTS, *CHECKED], ids=lambda plant: plant.id)
def test_a_condition_has_the_severity_of_the_table_and_no_other_that_it_does_not_name(plant: Plant) -> None:
    grade = SEVERITIES.get(plant.id)
    for found in plant.findings:
        if grade is not None and found.id == plant.id:
            assert found.severity is grade.severity or found.severity in grade.degrees
