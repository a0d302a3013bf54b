"""Plant every condition of a check, then remove one by one the facts that show it: the check must never simply pass."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from msgspec import NODEFAULT, Struct
from msgspec.structs import FieldInfo, fields, replace

from gpubench.conditions.checks import CHECKS, Check, check_findings
from gpubench.conditions.circumstances import Facts
from gpubench.conditions.registry import CONDITIONS
from gpubench.measure.check.health import _judge_check, _Outcome
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.nodes import MachineKind, build_topologies, group_nodes
from gpubench.model.paths.topology import Topology
from gpubench.model.terms.verdict import Verdict
from tests.fakes.planted import CHECKED, PLANTS, Job, Plant

CHECK_OF = {condition.id: condition.check for condition in CONDITIONS if condition.check}
BY_NAME = {check.name: check for check in CHECKS}
Path = tuple[str, ...]

LISTS = {"pairs", "pci_devices", "rdma_ports", "ranks", "nvlinks", "collectives"}
"""Lists that are never known to be empty. Other empty lists, as of failures or GPUs, mean that there are none."""

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
    "above-limit": ("measurements.collectives", "measurements.collectives.limit_gb_s"),
    "rdma-file-denied": ("nodes.nics.state", "nodes.rdma_ports", "nodes.rdma_ports.device_file"),
}
"""Fields without which the check of a condition may pass: no figure is above an unknown limit, failed measurements
have their own finding, and nic_state reports missing ports and states.
"""


_FIELDS: dict[type, tuple[FieldInfo, ...]] = {}


def fields_of(kind: type) -> tuple[FieldInfo, ...]:
    """Return the fields of a record type; none for other types."""
    if kind not in _FIELDS:
        _FIELDS[kind] = fields(kind) if issubclass(kind, Struct) else ()
    return _FIELDS[kind]


def absent(field: FieldInfo) -> Any:
    """Return the value of an unknown field."""
    return field.default if field.default_factory is NODEFAULT else field.default_factory()


def paths(value: Any, before: Path = ()) -> Iterator[Path]:
    """Yield the paths of all known fields in a value and its parts."""
    if isinstance(value, tuple):
        yield from (path for each in value for path in paths(each, before))
    for field in fields_of(type(value)):
        path, own = (*before, field.name), getattr(value, field.name)
        default = absent(field)
        nothing = default is None or default == {} or isinstance(default, Struct) or field.name in LISTS
        if nothing and default is not NODEFAULT and own != default:
            yield path
        yield from paths(own, path)


def without(value: Any, path: Path) -> Any:
    """Return the value with this field unknown, in all siblings too."""
    if isinstance(value, tuple):
        return tuple(without(each, path) for each in value)
    field = next((each for each in fields_of(type(value)) if each.name == path[0]), None)
    if field is None:
        return value
    own, rest = getattr(value, field.name), path[1:]
    left = without(own, rest) if rest else absent(field)
    return value if left is own else replace(value, **{field.name: left})


_examined: list[tuple[Sequence[Snapshot], list[Topology], tuple[MachineKind, ...]]] = []
"""Cache of the last examination: most edits do not change the nodes."""


def examined(
    snapshots: Sequence[Snapshot], kinds: tuple[MachineKind, ...] | None = None
) -> tuple[list[Topology], tuple[MachineKind, ...]]:
    if not _examined or _examined[0][0] is not snapshots:
        nodes = build_topologies(snapshots)
        _examined[:] = [(snapshots, nodes, group_nodes(nodes) if kinds is None else kinds)]
    return _examined[0][1:]


def is_plain_pass(job: Job, check: Check, kinds: tuple[MachineKind, ...] | None = None) -> bool:
    """True if a check finds nothing in a job, and claims to have examined all of it.

    `kinds` are the kinds of the nodes, if the check does not read the nodes.
    """
    nodes, kinds = examined(job.nodes, kinds)
    facts = Facts(nodes, kinds, job.ranks, [job.profile] * len(nodes), job.measurements, job.asked)
    if check_findings(check, facts):
        return False
    row = _judge_check(facts, _Outcome.of(check, facts), "")
    return row.verdict == Verdict.PASS and not row.note


def shown(job: Job) -> set[Path]:
    """Return the paths of a job's known facts, except those in NONE_IS_WELL."""
    parts = {"nodes": job.nodes, "ranks": job.ranks, "measurements": job.measurements}
    found = {path for name, part in parts.items() for path in paths(part, (name,))} | {("ranks",)}
    return {path for path in found if ".".join(path) not in NONE_IS_WELL}


def types_of(value: Any) -> set[type]:
    """Return the record types in a value and its parts."""
    if isinstance(value, tuple):
        return {kind for each in value for kind in types_of(each)}
    known = fields_of(type(value))
    return {type(value)}.union(*(types_of(getattr(value, field.name)) for field in known)) if known else set()


def read_by(check: Check, job: Job, patch: pytest.MonkeyPatch) -> set[str]:
    """Return the names of all fields that a check reads of a job; other fields cannot matter."""
    names = set[str]()

    def read(record: object, name: str) -> Any:
        names.add(name)
        return object.__getattribute__(record, name)

    with patch.context() as patched:
        for kind in {MachineKind, *types_of((job.nodes, job.ranks, job.measurements))}:
            patched.setattr(kind, "__getattribute__", read, raising=False)
        assert not is_plain_pass(job, check)
    return names | {"ranks"}


@pytest.mark.parametrize(
    "plant", [plant for plant in (*PLANTS, *CHECKED) if plant.id in CHECK_OF], ids=lambda plant: plant.id
)
def test_a_condition_that_nothing_shows_any_more_is_no_plain_pass(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, check = plant.job, BY_NAME[CHECK_OF[plant.id]]
    read = read_by(check, job, monkeypatch)
    paths_read = [path for path in shown(job) if path[-1] in read]
    taken = {name: path for path in paths_read if (name := ".".join(path)) not in WELL_WITHOUT.get(plant.id, ())}
    assert taken
    left = {name: replace(job, ranks=()) if name == "ranks" else without(job, taken[name]) for name in sorted(taken)}
    kinds = None if read & {"alike", "odd"} else examined(job.nodes)[1]
    assert [name for name in left if is_plain_pass(left[name], check, kinds)] == []
