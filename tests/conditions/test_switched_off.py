"""Every condition of a check is planted, and then everything that shows it is taken away, one by one: no plain PASS."""

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from typing import Any

import pytest

from gpubench.conditions.checks import CHECKS, Check, found_by
from gpubench.conditions.definition.circumstances import Facts
from gpubench.conditions.registry import CONDITIONS
from gpubench.measure.check.health import judge
from gpubench.model.paths.nodes import group
from gpubench.model.paths.topology import Topology
from gpubench.model.results.report import CHECKS_SECTION, CheckRow
from gpubench.model.terms.verdict import Verdict
from tests.fakes.planted import CHECKED, PLANTS, Job, Plant

CHECK_OF = {each.id: each.check for each in CONDITIONS if each.check}
BY_NAME = {check.name: check for check in CHECKS}
Path = tuple[str, ...]

LISTS = {"pairs", "pci_devices", "rdma_ports", "ranks", "nvlinks", "collectives"}
"""Of other lists an empty one says that there is nothing, as of failures or of GPUs."""

NONE_IS_WELL: dict[str, str] = {
    "nodes.gpus.lost": "a GPU that answers is not lost",
    "nodes.gpus.retirement_pending": "GPUs with remapped rows retire no pages",
    "nodes.machine.virtual_machine": "only bare metal shows all GPUs of a board: how many there must be, the user says",
    "nodes.machine": "the same",
    "nodes.driver.cuda": "what no node tells is the same on all",
    "nodes.driver": "the same, of nodes_alike",
    "ranks.environment": "no variable is set",
    "measurements.failed": "nothing failed",
    "measurements.collectives.slowest_rank": "its number says nothing without its time",
    "measurements.collectives.expected_gb_s": "it stands beside expected_us, always",
}


WELL_WITHOUT: dict[str, tuple[str, ...]] = {
    "above-limit": ("measurements.collectives", "measurements.collectives.limit_gb_s")
}
"""Of one condition alone: a figure without a limit is above none, and what was not measured is a finding of its own."""


def absent(field: "Field[Any]") -> Any:
    """The value of a field that nobody filled."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def paths(value: Any, before: Path = ()) -> Iterator[Path]:
    """The filled fields in a value, down to its parts, that might as well not be known."""
    if isinstance(value, tuple):
        yield from (path for each in value for path in paths(each, before))
    if not is_dataclass(value):
        return
    for field in fields(value):
        path, own = (*before, field.name), getattr(value, field.name)
        default = absent(field)
        nothing = default is None or default == {} or is_dataclass(default) or field.name in LISTS
        if nothing and default is not MISSING and own != default:
            yield path
        yield from paths(own, path)


def without(value: Any, path: Path) -> Any:
    """A value of which a field, and that of all its siblings, is not known."""
    if isinstance(value, tuple):
        return tuple(without(each, path) for each in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    field = next((each for each in fields(value) if each.name == path[0]), None)
    if field is None:
        return value
    rest = path[1:]
    return replace(value, **{field.name: without(getattr(value, field.name), rest) if rest else absent(field)})


def is_plain_pass(job: Job, check: Check) -> bool:
    """True if a check finds nothing in a job, and says neither that it did not look nor that it looked in part."""
    nodes = [Topology(node) for node in job.nodes]
    profiles = [job.profile] * len(nodes)
    facts = Facts(nodes, group(nodes), job.ranks, profiles, job.measurements, job.asked)
    if found_by(check, facts):
        return False
    row = judge(facts, checks=(check,)).rows(CHECKS_SECTION, CheckRow)[0]
    return row.verdict == Verdict.PASS and not row.note


def shown(job: Job) -> set[Path]:
    """All that shows what a job is like, but what is there to be well."""
    parts = {"nodes": job.nodes, "ranks": job.ranks, "measurements": job.measurements}
    found = {path for name, part in parts.items() for path in paths(part, (name,))} | {("ranks",)}
    return {path for path in found if ".".join(path) not in NONE_IS_WELL}


@pytest.mark.parametrize(
    "plant", [each for each in (*PLANTS, *CHECKED) if each.id in CHECK_OF], ids=lambda plant: plant.id
)
def test_a_condition_that_nothing_shows_any_more_is_no_plain_pass(plant: Plant) -> None:
    job, check = plant.make(), BY_NAME[CHECK_OF[plant.id]]
    assert not is_plain_pass(job, check)
    taken = {name: path for path in shown(job) if (name := ".".join(path)) not in WELL_WITHOUT.get(plant.id, ())}
    left = {name: replace(job, ranks=()) if name == "ranks" else without(job, taken[name]) for name in sorted(taken)}
    assert [name for name in left if is_plain_pass(left[name], check)] == []
