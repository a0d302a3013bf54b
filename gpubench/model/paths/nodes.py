"""Groups nodes by their facts, so that a thousand equal ones are one line and a different one stands out."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cmp_to_key
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import replace

from gpubench.model.facts.snapshot import GpuFacts, HostFacts, NicFacts, Snapshot
from gpubench.model.paths.topology import Topology, active_links, generation_and_width
from gpubench.model.terms.units import compress_names

Traits = Mapping[str, object]  # Traits of a node by name; of pairs as 'GPU0 GPU1 path'
Place = tuple[int, ...]  # The rank of a value among others of its trait: the higher, the more of a healthy machine
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)  # Python reads no number of thousands of digits


def _numbers(value: object) -> Place:
    return tuple(int(each) for each in _NUMBER.findall(str(value)))


def _one_of(good: tuple[object, ...]) -> Callable[[object], Place]:
    return lambda value: (int(value in good),)


_COUNTS = ("GPUs", "NICs")  # Traits that decide alone: with a device less, all that are counted after it seem to differ
_PLACES: Mapping[str, Callable[[object], Place]] = {
    **dict.fromkeys((*_COUNTS, "driver", "CUDA", "kernel", "firmware", "CPUs"), _numbers),
    **dict.fromkeys(("memory", "NVLinks", "NVLinks active", "PCIe", "PCIe at most", "PCIe width", "rate"), _numbers),
    **dict.fromkeys(("ECC", "persistence", "nvidia-peermem"), _one_of((True,))),
    **dict.fromkeys(("MIG", "row remapping pending", "row remapping failed"), _one_of((False, None))),
    "silent": _one_of((None,)),
    "state": _one_of(("present", "active")),
    "fabric": _one_of(("completed",)),
}
"""What a higher value means by trait, without its device. No model or product is better than another."""


def compare_traits(one: Traits, other: Traits) -> int:
    """Return how many more traits of a healthy machine one node has than the other, negative if fewer."""
    counts = [_compared(name, one, other) for name in _COUNTS]
    return next(filter(None, counts), 0) or sum(_compared(name, one, other) for name in one.keys() & other.keys())


def _compared(name: str, one: Traits, other: Traits) -> int:
    device, space, trait = name.partition(" ")
    place = _PLACES.get(trait if space and device[-1:].isdigit() else name)
    if place is None or one.get(name) == other.get(name):
        return 0
    mine, theirs = place(one.get(name)), place(other.get(name))
    return (mine > theirs) - (mine < theirs)


Models = tuple[str, ...]

_IN_EVERY_DEVICE = " NUMA node"

_EXPLAINED = ("paths", "peer access")  # Traits that follow from others, where those differ
SMALLEST_SHARE = 4  # A variant is a kind from a quarter of the nodes with the same GPUs on


class Difference(Struct, frozen=True):
    """A trait in which a node differs from its kind."""

    trait: str
    seen: object
    usual: object

    def __str__(self) -> str:
        return f"{self.trait} {_text(self.seen)} (others {_text(self.usual)})"


class MachineKind(Struct, frozen=True):
    """Equal nodes (`alike`) and similar ones (`odd`), by position. `name` is a letter.

    `differs` is the difference from `differs_from`. `rivals` are nodes that may as well be the usual ones.
    """

    name: str
    alike: tuple[int, ...]
    odd: Mapping[int, tuple[Difference, ...]]
    differs_from: str | None = None
    differs: tuple[Difference, ...] = ()
    rivals: tuple[int, ...] = ()

    @property
    def representative(self) -> int:
        """The first node that is exactly of this kind."""
        return self.alike[0]


def group_nodes(nodes: Sequence[Topology]) -> tuple[MachineKind, ...]:
    """Group nodes into kinds, largest first. Nodes with equal traits form a variant.

    A kind is the largest variant of each set of GPU models, or one with a quarter of those nodes. Other nodes are odd
    ones of the nearest kind. Among equally large variants, the one with more traits of a healthy machine comes first.
    """
    models = [tuple(sorted({gpu.name or "" for gpu in topology.snapshot.gpus if not gpu.lost})) for topology in nodes]
    variants: dict[tuple[tuple[str, object], ...], list[int]] = {}
    traits_of: list[Traits] = []
    are_alike = len({id(topology.like) for topology in nodes}) == 1  # Nothing to tell them apart by is looked for
    known: dict[int, Traits] = {id(nodes[0].like): {}} if are_alike else {}
    for position, topology in enumerate(nodes):
        like = id(topology.like)
        traits = known[like] = known[like] if like in known else node_traits(topology)
        traits_of.append(traits)
        variants.setdefault(tuple(traits.items()), []).append(position)
    by_models: dict[Models, list[list[int]]] = {}

    def smaller(one: list[int], other: list[int]) -> int:
        return len(other) - len(one) or compare_traits(traits_of[other[0]], traits_of[one[0]])

    for members in sorted(variants.values(), key=cmp_to_key(smaller)):
        by_models.setdefault(models[members[0]], []).append(members)
    groups = [kind for same_models in by_models.values() for kind in _kinds_of(same_models, traits_of)]
    groups.sort(key=_size_and_place)
    groups = sorted(_merge_strays(groups, models, traits_of), key=_size_and_place)
    kinds: dict[Models, MachineKind] = {}
    named = []
    for number, (alike, odd) in enumerate(groups):
        first = kinds.get(models[alike[0]])
        usual = traits_of[alike[0]]
        rivals = tuple(node for node in odd if len(alike) == 1 and not compare_traits(traits_of[node], usual))
        kind = MachineKind(_letter(number), tuple(alike), odd, rivals=rivals)
        if first is not None:
            found = differences(usual, traits_of[first.representative])
            rivals = first.alike if len(first.alike) == len(alike) else ()
            kind = replace(kind, differs_from=first.name, differs=found, rivals=rivals)
        kinds.setdefault(models[alike[0]], kind)
        named.append(kind)
    return tuple(named)


_Group = tuple[list[int], dict[int, tuple[Difference, ...]]]  # Alike nodes, and odd ones with differences


def _size_and_place(group: _Group) -> tuple[int, int]:
    return -len(group[0]) - len(group[1]), group[0][0]


def _merge_strays(groups: Sequence[_Group], models: Sequence[Models], traits_of: Sequence[Traits]) -> list[_Group]:
    """Merge small groups with other GPU models, or without GPUs, into the largest group as odd nodes."""
    if not groups:
        return []
    (alike, odd), *others = groups
    kept = [groups[0]]
    for members, odd_members in others:
        nodes = sorted((*members, *odd_members))
        few = len(nodes) == 1 or len(nodes) * SMALLEST_SHARE < len(models)
        if len(alike) > 1 and few and models[nodes[0]] != models[alike[0]]:
            for node in nodes:
                odd[node] = _other_models(node, alike[0], models, traits_of)
        else:
            kept.append((members, odd_members))
    return kept


def _other_models(
    node: int, usual: int, models: Sequence[Models], traits_of: Sequence[Traits]
) -> tuple[Difference, ...]:
    seen = Difference("GPU models", *(", ".join(models[each]) or "none" for each in (node, usual)))
    return seen, *(
        difference
        for difference in differences(traits_of[node], traits_of[usual])
        if not difference.trait.partition(" ")[0][-1].isdigit()
        and difference.trait not in ("GPUs", "devices", *_EXPLAINED)
    )


def _kinds_of(variants: Sequence[list[int]], traits_of: Sequence[Traits]) -> list[_Group]:
    """Group variants of the same GPU models, largest first, into kinds with their odd nodes."""
    total = sum(map(len, variants))
    kinds = [
        (members, dict[int, tuple[Difference, ...]]())
        for number, members in enumerate(variants)
        if number == 0 or (len(members) > 1 and len(members) * SMALLEST_SHARE >= total)
    ]
    for members in variants[1:]:
        if any(members is alike for alike, _ in kinds):
            continue
        against = [(differences(traits_of[members[0]], traits_of[alike[0]]), odd) for alike, odd in kinds]
        fewest, odd = min(against, key=lambda each: len(each[0]))
        odd.update(dict.fromkeys(members, fewest))
    return kinds


def _all_but(kind: type[Struct], *left_out: str) -> Callable[[object], tuple[object, ...]]:
    return attrgetter(*(name for name in kind.__struct_fields__ if name not in left_out))


_GPU_FACTS = _all_but(GpuFacts, "uuid")
_HOST_FACTS = _all_but(HostFacts, "boot_id")
_NODE_FACTS = _all_but(Snapshot, "host", "taken_at", "machine", "gpus")


def build_topologies(snapshots: Sequence[Snapshot]) -> list[Topology]:
    """Return one Topology per snapshot. Consecutive nodes with equal facts share the first one's."""
    found: list[Topology] = []
    facts: list[tuple[object, ...]] = []
    for snapshot in snapshots:
        own = [_NODE_FACTS(snapshot), _HOST_FACTS(snapshot.machine), *map(_GPU_FACTS, snapshot.gpus)]
        found.append(Topology(snapshot, found[-1].like if own == facts else None))
        facts = own
    return found


def node_traits(topology: Topology) -> Traits:
    """The traits that are equal for two nodes of a kind: no serial numbers, bus ids, load, or error counters."""
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
    """Return the traits in which two nodes differ. Paths count only if nothing else explains them."""
    found = [
        Difference(name, seen[name], usual[name])
        for name in usual
        if name in seen and name not in _EXPLAINED and seen[name] != usual[name]
    ]
    if not found:
        found = [Difference(name, "differ", "as in the matrix") for name in _EXPLAINED if seen[name] != usual[name]]
    return tuple(found) or (Difference("devices", _devices(seen), _devices(usual)),)


def _devices(traits: Traits) -> str:
    return compress_names([name.removesuffix(_IN_EVERY_DEVICE) for name in traits if name.endswith(_IN_EVERY_DEVICE)])


def describe_differences(found: Sequence[Difference], others: str = "others") -> list[str]:
    """Describe differences, with equal ones of several devices together: 'GPU0-7 ECC False (others True)'."""
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
    """Rename nodes that share a host name: `gpu`, `gpu~2`."""
    seen: Counter[str] = Counter()
    named = []
    for snapshot in snapshots:
        seen[snapshot.host] += 1
        is_repeated = seen[snapshot.host] > 1
        named.append(replace(snapshot, host=f"{snapshot.host}~{seen[snapshot.host]}") if is_repeated else snapshot)
    return named
