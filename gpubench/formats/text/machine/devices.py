"""GPUs and NICs in columns, and in sentences what all GPUs have alike."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from gpubench.formats.text.columns import Column
from gpubench.model.facts.snapshot import PcieLink
from gpubench.model.paths.links import pcie_text
from gpubench.model.results.topo.rows import GpuRow, NicRow
from gpubench.model.terms.grouping import grouped
from gpubench.model.terms.units import compress_names, counted, format_memory

_UNKNOWN = "?"
_NONE = "-"
_COMMON = 3
"""A column that says the same of all GPUs may go this early: a sentence says it."""


def gpu_columns(gpus: Sequence[GpuRow]) -> list[Column]:
    """A line a GPU; what nobody knows has no column."""
    if not gpus:
        return []
    columns = [
        Column("GPU", [row.gpu for row in gpus]),
        Column("bus id", [row.bus_id or _UNKNOWN for row in gpus]),
        _column("name", gpus, 1),
        _column("memory", gpus, 2),
        Column("PCIe", [_pcie(row) for row in gpus]),
        Column("NUMA", [_UNKNOWN if row.numa_node is None else str(row.numa_node) for row in gpus]),
        Column("NVLinks", [_nvlinks(row) for row in gpus]),
        Column("UUID", [row.uuid or _UNKNOWN for row in gpus], spare=9),
    ]
    return [column for column in columns if set(column.cells) != {_UNKNOWN}]


def gpu_sentences(gpus: Sequence[GpuRow], shown: Sequence[Column]) -> Iterator[str]:
    """Facts without a column: what all GPUs have alike, what some have, and what is not known and why."""
    heads = {column.head for column in shown}
    common: dict[str, str] = {}
    peculiar: dict[str, list[str]] = {}
    for head, word in _FACTS.items():
        words = {row.gpu: word(row) for row in gpus if not row.lost}
        known = Counter(each for each in words.values() if each != _UNKNOWN)
        if head in heads or not words:
            continue
        common[head] = known.most_common(1)[0][0] if known else _UNKNOWN
        for gpu, each in words.items():
            if each not in (common[head], _UNKNOWN, ""):
                peculiar.setdefault(gpu, []).append(_phrase(head, each))
    told = [_phrase(head, word) for head, word in common.items() if word not in ("", _UNKNOWN)]
    if told:
        yield f"{'usual' if peculiar else 'all' if len(gpus) > 1 else gpus[0].gpu}: {'; '.join(told)}"
    for phrases, names in grouped(peculiar, lambda gpu: tuple(peculiar[gpu])).items():
        yield f"but {compress_names(names)}: {'; '.join(phrases)}"
    if "UUID" not in heads and any(row.uuid for row in gpus):
        yield "; ".join(f"{row.gpu} {row.uuid}" for row in gpus if row.uuid)
    yield from _unknown(gpus, [head for head, word in common.items() if word == _UNKNOWN])


def _unknown(gpus: Sequence[GpuRow], silent: Sequence[str]) -> Iterator[str]:
    """Facts that no source has, then facts that a source refused, by its reason."""
    explained = {field for row in gpus for field in row.unknown}
    unexplained = [head for head in silent if not _FIELDS.get(head, set()) & explained]
    if unexplained:
        yield f"not known: {', '.join(unexplained)}"
    reasons: dict[str, dict[str, list[str]]] = {}
    for row in gpus:
        if row.lost:
            reasons.setdefault(row.lost, {}).setdefault("everything", []).append(row.gpu)
            continue
        for field, reason in row.unknown.items():
            reasons.setdefault(reason, {}).setdefault(field, []).append(row.gpu)
    for reason, fields in reasons.items():
        everywhere = [field for field, names in fields.items() if len(names) == len(gpus)]
        some = [f"{field} of {compress_names(names)}" for field, names in fields.items() if len(names) < len(gpus)]
        yield f"not known ({reason}): {', '.join(everywhere + some).replace('_', ' ')}"


def _phrase(head: str, word: str) -> str:
    return word if head == "name" else f"{head} {word}"


def nic_columns(nics: Sequence[NicRow]) -> list[Column]:
    """A line a NIC."""
    if not nics:
        return []
    return [
        Column("NIC", [row.nic for row in nics]),
        Column("bus id", [row.bus_id or _NONE for row in nics], spare=1),
        Column("link", [row.link_layer for row in nics]),
        Column("state", [row.state or _UNKNOWN for row in nics]),
        Column("Gb/s", [_UNKNOWN if row.rate_gbit_s is None else f"{row.rate_gbit_s:g}" for row in nics], right=True),
        Column("PCIe", [_pcie(row) for row in nics], spare=2),
        Column("NUMA", [_UNKNOWN if row.numa_node is None else str(row.numa_node) for row in nics]),
        Column("nearest GPUs", [_nearest(row) for row in nics]),
        Column("GPUDirect RDMA", [_gpudirect(row) for row in nics]),
        Column("model", [row.model or _NONE for row in nics], spare=3),
    ]


def _column(head: str, gpus: Sequence[GpuRow], spare: int) -> Column:
    """A column that may go, first of all where its cells say the same: a sentence can say it instead."""
    alike = len({_FACTS[head](row) for row in gpus if not row.lost}) == 1
    return Column(head, [_FACTS[head](row) for row in gpus], spare=_COMMON + spare if alike else spare)


def _memory(row: GpuRow) -> str:
    return _UNKNOWN if row.memory_bytes is None else format_memory(row.memory_bytes)


def _pcie(row: GpuRow | NicRow) -> str:
    link = PcieLink(
        generation=row.pcie_generation,
        width=row.pcie_width,
        max_generation=row.pcie_max_generation,
        max_width=row.pcie_max_width,
    )
    return pcie_text(link, idle=row.idle if isinstance(row, GpuRow) else None) or _UNKNOWN


def _nvlinks(row: GpuRow) -> str:
    if row.nvlinks is None or row.nvlinks_active is None:
        return _UNKNOWN
    if not row.nvlinks:
        return _NONE
    rate = f" × {row.nvlink_gb_s_per_link:g}" if row.nvlink_gb_s_per_link else ""
    return f"{row.nvlinks_active} of {row.nvlinks}{rate}"


def _nearest(row: NicRow) -> str:
    if not row.nearest_gpus:
        return _NONE
    shown = ",".join(name.removeprefix("GPU") for name in row.nearest_gpus[:4])
    return f"{shown}{'...' if len(row.nearest_gpus) > 4 else ''} ({row.nearest_path})"


def _gpudirect(row: NicRow) -> str:
    return {True: "possible", False: "no", None: _UNKNOWN}[row.gpudirect_rdma]


def _switch(value: bool | None) -> str:  # noqa: FBT001
    return {True: "on", False: "off", None: _UNKNOWN}[value]


def _fabric(row: GpuRow) -> str:
    if row.fabric_state is None:
        return _UNKNOWN
    clique = "" if row.fabric_clique is None or row.fabric_state != "completed" else f", clique {row.fabric_clique}"
    health = f", health {row.fabric_health}" if row.fabric_health and row.fabric_health != "not reported" else ""
    return row.fabric_state.replace("_", " ") + clique + health


def _rows(row: GpuRow) -> str:
    if row.remapped_rows_correctable is None:
        return _UNKNOWN
    count = row.remapped_rows_correctable + (row.remapped_rows_uncorrectable or 0)
    state = "failed" if row.remapped_rows_failure else "pending" if row.remapped_rows_pending else ""
    return " ".join(filter(None, (str(count) if count or not state else "", state)))


def _users(row: GpuRow) -> str:
    if row.users is None:
        return _UNKNOWN
    return f"{counted(len(row.users), 'process').replace('processs', 'processes')}" if row.users else "nobody"


def _throttle(row: GpuRow) -> str:
    if row.throttle_reasons is None:
        return _UNKNOWN
    return ", ".join(row.throttle_reasons).replace("_", " ") or "none"


def _or_unknown(value: object) -> str:
    return _UNKNOWN if value is None else str(value)


_FACTS: dict[str, Callable[[GpuRow], str]] = {
    "name": lambda row: row.name or _UNKNOWN,
    "memory": _memory,
    "PCIe": _pcie,
    "NVLinks": _nvlinks,
    "compute capability": lambda row: _or_unknown(row.compute_capability),
    "SMs": lambda row: _or_unknown(row.multiprocessors),
    "ECC": lambda row: _switch(row.ecc),
    "MIG": lambda row: _switch(row.mig),
    "persistence": lambda row: _switch(row.persistence),
    "CPUs": lambda row: row.cpu_affinity or _UNKNOWN,
    "NVLink version": lambda row: "" if row.nvlinks == 0 else row.nvlink_version or _UNKNOWN,
    "to": lambda row: ", ".join(name for name in row.nvlink_peers if name != "unknown") or "",
    "NVLink errors": lambda row: "" if row.nvlinks == 0 else _or_unknown(row.nvlink_errors),
    "fabric": _fabric,
    "throttled": _throttle,
    "remapped rows": _rows,
    "used by": _users,
}
"""Facts that sentences tell of GPUs, for they have no column."""

_FIELDS = {
    "PCIe": {"pcie"},
    "SMs": {"multiprocessors"},
    "NVLinks": {"nvlinks"},
    "memory": {"memory_bytes"},
    "fabric": {"fabric"},
    "throttled": {"throttle_reasons"},
    "remapped rows": {"remapped_rows"},
    "used by": {"processes"},
    "CPUs": {"cpu_affinity"},
    "ECC": {"ecc"},
    "MIG": {"mig"},
    "persistence": {"persistence"},
}
"""The fields behind these words: a reason given for one of them is said with the reason."""
