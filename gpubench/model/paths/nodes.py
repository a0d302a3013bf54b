"""Group nodes by their facts, so that a report shows a thousand equal nodes as one line and highlights different
nodes.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cmp_to_key
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import replace

from gpubench.model.facts.snapshot import GpuFacts, HostFacts, NicFacts, Snapshot
from gpubench.model.paths.topology import Topology, active_links, generation_and_width
from gpubench.model.terms.units import compress_names, group_by

Traits = Mapping[str, object]  # Traits of a node by name, such as 'driver' or 'GPU0 memory'
Score = tuple[int, ...]  # The score of a trait's value. A higher score is healthier.


def _numbers(value: object) -> Score:
    # Limit the digits, because Python refuses to convert numbers with thousands of digits.
    return tuple(map(int, re.findall(r"\d{1,18}", str(value), re.ASCII)))


def _is_any(good: tuple[object, ...]) -> Callable[[object], Score]:
    return lambda value: (int(value in good),)


# If a device is missing, all later devices seem to differ. So compare only these counts in that case.
_COUNTS = ("GPUs", "NICs")
_SCORES: Mapping[str, Callable[[object], Score]] = {
    **dict.fromkeys((*_COUNTS, "driver", "CUDA", "kernel", "firmware", "CPUs"), _numbers),
    **dict.fromkeys(("memory", "NVLinks", "NVLinks active", "PCIe", "PCIe at most", "PCIe width", "rate"), _numbers),
    **dict.fromkeys(("ECC", "persistence", "nvidia-peermem"), _is_any((True,))),
    **dict.fromkeys(("MIG", "row remapping pending", "row remapping failed"), _is_any((False, None))),
    "silent": _is_any((None,)),
    "state": _is_any(("present", "active")),
    "fabric": _is_any(("completed",)),
}
"""The function that scores a value, by trait. Models and products have no score, because none is healthier than
another.
"""


def compare_traits(one: Traits, other: Traits) -> int:
    """Return the number of traits that are healthier on node `one`, minus the number that are healthier on node
    `other`.
    """
    counts = [_compare_trait(name, one, other) for name in _COUNTS]
    return next(filter(None, counts), 0) or sum(_compare_trait(name, one, other) for name in one.keys() & other.keys())


def _compare_trait(name: str, one: Traits, other: Traits) -> int:
    device, space, trait = name.partition(" ")
    score = _SCORES.get(trait if space and device[-1:].isdigit() else name)
    if score is None or one.get(name) == other.get(name):
        return 0
    mine, theirs = score(one.get(name)), score(other.get(name))
    return (mine > theirs) - (mine < theirs)


Models = tuple[str, ...]

_DERIVED_TRAITS = ("paths", "peer access")  # Traits that follow from other traits
SMALLEST_SHARE = 4  # A variant is its own kind from this fraction on: one quarter of the nodes with the same GPUs


class Difference(Struct, frozen=True):
    """A trait whose value on a node differs from the value of the node's kind."""

    trait: str
    seen: object
    usual: object

    def __str__(self) -> str:
        return f"{self.trait} {_text(self.seen)} (others {_text(self.usual)})"


class MachineKind(Struct, frozen=True):
    """A kind of node, named by a letter. Nodes are numbered by position.

    - `alike`: nodes with equal traits
    - `odd`: similar nodes, with their differences
    - `differs_from`, `differs`: another kind with the same GPU models, and the differences from it
    - `rivals`: nodes that could equally be the usual ones
    """

    name: str
    alike: tuple[int, ...]
    odd: Mapping[int, tuple[Difference, ...]]
    differs_from: str | None = None
    differs: tuple[Difference, ...] = ()
    rivals: tuple[int, ...] = ()

    @property
    def representative(self) -> int:
        return self.alike[0]


def group_nodes(nodes: Sequence[Topology]) -> tuple[MachineKind, ...]:
    """Group nodes into kinds, largest kind first. Nodes with equal traits form a variant.

    For each set of GPU models, the largest variant becomes a kind. So does every variant with at least a quarter of
    these nodes. All other nodes become odd nodes of the most similar kind. Of equally large variants, the healthier one
    comes first.
    """
    models = [tuple(sorted({gpu.name or "" for gpu in topology.snapshot.gpus if not gpu.lost})) for topology in nodes]
    all_traits: list[Traits] = []
    # If all nodes share facts, there is no need to read their traits.
    are_alike = len({id(topology.like) for topology in nodes}) == 1
    known: dict[int, Traits] = {id(nodes[0].like): {}} if are_alike else {}
    for topology in nodes:
        like = id(topology.like)
        traits = known[like] = known[like] if like in known else node_traits(topology)
        all_traits.append(traits)
    variants = group_by(range(len(nodes)), lambda node: tuple(all_traits[node].items())).values()

    def smaller(one: list[int], other: list[int]) -> int:
        return len(other) - len(one) or compare_traits(all_traits[other[0]], all_traits[one[0]])

    same_models = group_by(sorted(variants, key=cmp_to_key(smaller)), lambda members: models[members[0]])
    groups = [kind for members in same_models.values() for kind in _find_kinds(members, all_traits)]
    groups.sort(key=_size_and_place)
    groups = sorted(_merge_strays(groups, models, all_traits), key=_size_and_place)
    kinds: dict[Models, MachineKind] = {}
    named = []
    for number, (alike, odd) in enumerate(groups):
        first = kinds.get(models[alike[0]])
        usual = all_traits[alike[0]]
        rivals = tuple(node for node in odd if len(alike) == 1 and not compare_traits(all_traits[node], usual))
        kind = MachineKind(_letter(number), tuple(alike), odd, rivals=rivals)
        if first is not None:
            found = differences(usual, all_traits[first.representative])
            rivals = first.alike if len(first.alike) == len(alike) else ()
            kind = replace(kind, differs_from=first.name, differs=found, rivals=rivals)
        kinds.setdefault(models[alike[0]], kind)
        named.append(kind)
    return tuple(named)


_Group = tuple[list[int], dict[int, tuple[Difference, ...]]]  # Equal nodes, and odd nodes with their differences


def _size_and_place(group: _Group) -> tuple[int, int]:
    return -len(group[0]) - len(group[1]), group[0][0]


def _merge_strays(groups: Sequence[_Group], models: Sequence[Models], all_traits: Sequence[Traits]) -> list[_Group]:
    """Merge small groups with other GPU models, or without GPUs, into the largest group. Their nodes become odd
    nodes.
    """
    if not groups:
        return []
    (alike, odd), *others = groups
    kept = [groups[0]]
    for members, odd_members in others:
        nodes = sorted((*members, *odd_members))
        few = len(nodes) == 1 or len(nodes) * SMALLEST_SHARE < len(models)
        if len(alike) > 1 and few and models[nodes[0]] != models[alike[0]]:
            for node in nodes:
                seen, usual = (", ".join(models[each]) or "none" for each in (node, alike[0]))
                changes = [
                    difference
                    for difference in differences(all_traits[node], all_traits[alike[0]])
                    if not difference.trait.partition(" ")[0][-1].isdigit()
                    and difference.trait not in ("GPUs", "devices", *_DERIVED_TRAITS)
                ]
                odd[node] = (Difference("GPU models", seen, usual), *changes)
        else:
            kept.append((members, odd_members))
    return kept


def _find_kinds(variants: Sequence[list[int]], all_traits: Sequence[Traits]) -> list[_Group]:
    """Form kinds from variants with the same GPU models, given largest first. Small variants become odd nodes of a
    kind.
    """
    total = sum(map(len, variants))
    kinds: list[_Group] = []
    small: list[list[int]] = []
    for members in variants:
        if not kinds or (len(members) > 1 and len(members) * SMALLEST_SHARE >= total):
            kinds.append((members, {}))
        else:
            small.append(members)
    for members in small:
        compared = [(differences(all_traits[members[0]], all_traits[alike[0]]), odd) for alike, odd in kinds]
        fewest, odd = min(compared, key=lambda pair: len(pair[0]))
        odd.update(dict.fromkeys(members, fewest))
    return kinds


def _all_but(kind: type[Struct], *left_out: str) -> Callable[[object], tuple[object, ...]]:
    return attrgetter(*(name for name in kind.__struct_fields__ if name not in left_out))


_GPU_FACTS = _all_but(GpuFacts, "uuid")
_HOST_FACTS = _all_but(HostFacts, "boot_id")
_NODE_FACTS = _all_but(Snapshot, "host", "taken_at", "machine", "gpus")


def build_topologies(snapshots: Sequence[Snapshot]) -> list[Topology]:
    """Return one Topology per snapshot.

    If consecutive nodes have equal facts, `like` of the later ones refers to the first.
    """
    found: list[Topology] = []
    previous: list[tuple[object, ...]] = []
    for snapshot in snapshots:
        facts = [_NODE_FACTS(snapshot), _HOST_FACTS(snapshot.machine), *map(_GPU_FACTS, snapshot.gpus)]
        found.append(Topology(snapshot, found[-1].like if facts == previous else None))
        previous = facts
    return found


def node_traits(topology: Topology) -> Traits:
    """Return the traits that healthy nodes of one kind have in common.

    Serial numbers, bus ids, load and error counters are left out.
    """
    snapshot = topology.snapshot
    traits: dict[str, object] = {
        "GPUs": len(snapshot.gpus),
        "driver": snapshot.driver.version or snapshot.driver.absent,
        "CUDA": snapshot.driver.cuda,
        "CPU": snapshot.machine.cpu,
        "CPUs": snapshot.machine.cpus,
        "NUMA nodes": len(snapshot.machine.numa_nodes),
        "kernel": snapshot.machine.kernel,
        "product": snapshot.machine.product,
        "nvidia-peermem": snapshot.gpudirect.peermem,
        "silent": ", ".join(failure.stage for failure in snapshot.failures) or None,
        "NICs": len(snapshot.nics),
    }
    for gpu in snapshot.gpus:
        traits |= {f"{gpu.device} {name}": value for name, value in _gpu_traits(gpu).items()}
    for nic in snapshot.nics:
        traits |= {f"{nic.device} {name}": value for name, value in _nic_traits(nic).items()}
    traits["paths"] = tuple(tuple(row.values()) for row in topology.matrix.values())
    traits["peer access"] = tuple((pair.cuda, pair.read, pair.write) for pair in snapshot.pairs)
    return traits


def _gpu_traits(gpu: GpuFacts) -> dict[str, object]:
    return {
        "model": gpu.name,
        "state": "lost" if gpu.lost else "present",
        "memory": gpu.memory_bytes,
        "MIG": gpu.mig,
        "ECC": gpu.ecc,
        "persistence": gpu.persistence,
        "NVLinks active": active_links(gpu),
        "NVLinks": None if gpu.nvlinks is None else len(gpu.nvlinks),
        "fabric": gpu.fabric and gpu.fabric.state,
        "fabric health": gpu.fabric and gpu.fabric.health_mask,
        "PCIe width": gpu.pcie.width,
        "PCIe at most": generation_and_width(gpu.pcie.max_generation, gpu.pcie.max_width),
        "NUMA node": gpu.place.numa_node,
        "row remapping pending": gpu.remapped_rows and gpu.remapped_rows.pending,
        "row remapping failed": gpu.remapped_rows and gpu.remapped_rows.failure,
    }


def _nic_traits(nic: NicFacts) -> dict[str, object]:
    return {
        "kind": nic.kind,
        "state": nic.state,
        "rate": nic.rate_gbit_s,
        "model": nic.model,
        "firmware": nic.firmware,
        "PCIe": generation_and_width(nic.pcie.generation, nic.pcie.width),
        "NUMA node": nic.place.numa_node,
    }


def differences(seen: Traits, usual: Traits) -> tuple[Difference, ...]:
    """Return the traits in which two nodes differ. Include derived traits (paths, peer access) only if no other
    trait differs.
    """
    found = [
        Difference(name, seen[name], usual[name])
        for name in usual
        if name in seen and name not in _DERIVED_TRAITS and seen[name] != usual[name]
    ]
    found = found or [
        Difference(name, "differ", "as in the matrix") for name in _DERIVED_TRAITS if seen[name] != usual[name]
    ]
    if found:
        return tuple(found)
    # Nothing else differs, so the nodes have different devices. Every device has a NUMA node trait.
    suffix = " NUMA node"
    devices = (
        compress_names([name.removesuffix(suffix) for name in traits if name.endswith(suffix)])
        for traits in (seen, usual)
    )
    return (Difference("devices", *devices),)


def describe_differences(found: Sequence[Difference], others: str = "others") -> list[str]:
    """Describe differences. Combine devices with the same difference: 'GPU0, GPU1 ECC off (others on)'."""
    shared: dict[tuple[str, str, str], list[str]] = {}
    for difference in found:
        device, space, trait = difference.trait.partition(" ")
        is_device = bool(space) and device[-1:].isdigit()
        key = (trait if is_device else difference.trait, _text(difference.seen), _text(difference.usual))
        shared.setdefault(key, []).append(device if is_device else "")
    return [
        f"{', '.join(filter(None, devices))} {trait} {seen} ({others} {usual})".strip()
        for (trait, seen, usual), devices in shared.items()
    ]


def _text(value: object) -> str:
    if value is None:
        return "unknown"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _letter(number: int) -> str:
    head, last = divmod(number, 26)
    return (_letter(head - 1) if head else "") + chr(ord("A") + last)


def rename_duplicates(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Rename nodes whose host name occurs more than once: 'gpu', 'gpu~2'."""
    seen: Counter[str] = Counter()
    named = []
    for snapshot in snapshots:
        seen[snapshot.host] += 1
        is_repeated = seen[snapshot.host] > 1
        named.append(replace(snapshot, host=f"{snapshot.host}~{seen[snapshot.host]}") if is_repeated else snapshot)
    return named
