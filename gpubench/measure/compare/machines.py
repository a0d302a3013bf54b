"""Two machines side by side: by collective the peak, the size where half of it is reached, latency, and ratios.

Bus bandwidth is the bandwidth of one GPU's links whatever the number of ranks, so jobs of any size compare per GPU;
times grow with the number of ranks and compare only between jobs of the same size.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from gpubench.measure.compare.circumstances import circumstance_rows
from gpubench.model.results.compare import CircumstanceRow, MachineRow, RowKey, collective_key, pair_key
from gpubench.model.results.report import FINDINGS_SECTION, PairRow, Report, Table
from gpubench.model.results.result_file import ResultFile
from gpubench.model.terms.units import grouped, some_of
from gpubench.model.terms.verdict import Finding, Verdict
from gpubench.records import dataclass

SECTIONS_OF_MACHINES = (MachineRow.section, CircumstanceRow.section, FINDINGS_SECTION)
_IN_PLACE = "in_place"


@dataclass(frozen=True, slots=True)
class MachineCurve:
    """Bandwidth and time of one collective, or of copies, by size; GPUs and nodes where they are known."""

    gpus: int | None
    nodes: int | None
    gb_s: Mapping[int, float]
    time_us: Mapping[int, float]

    @property
    def peak_size(self) -> int:
        """The smallest size with the highest bandwidth."""
        return max(sorted(self.gb_s), key=self.gb_s.__getitem__)

    @property
    def half_size(self) -> int:
        """The smallest measured size that reaches half of the highest bandwidth."""
        return min(size for size, value in self.gb_s.items() if value >= self.gb_s[self.peak_size] / 2)

    def of_node(self, size: int) -> float | None:
        """The bandwidth of all GPUs of a node together."""
        return self.gb_s[size] * self.gpus / self.nodes if self.gpus and self.nodes else None


def compare_machines(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> Report:
    """The report on two machines, which judges nothing; ERROR, with the reason, where nothing compares."""
    before, after = _curves(base), _curves(new)
    rows = [_row(name, before[name], after[name]) for name in before if name in after]
    sections = Table.by_section({MachineRow: rows, CircumstanceRow: circumstance_rows(base, new)})
    findings = () if rows else (_nothing(before, after),)
    verdict = Verdict.SKIP if rows else Verdict.ERROR
    return Report(verdict=verdict, complete=True, findings=findings, sections=sections, main=MachineRow.section)


def _row(name: str, base: MachineCurve, new: MachineCurve) -> MachineRow:
    common = base.gb_s.keys() & new.gb_s.keys()
    sizes = (max(common),) * 2 if common else (base.peak_size, new.peak_size)
    figures = base.gb_s[sizes[0]], new.gb_s[sizes[1]]
    of_nodes = base.of_node(sizes[0]), new.of_node(sizes[1])
    timed = base.time_us.keys() & new.time_us.keys()
    reason = None
    if base.gpus != new.gpus:
        reason = f"{new.gpus or '?'} ranks, not {base.gpus or '?'}: times grow with the number of ranks"
    elif not timed:
        reason = "no size in common"
    latency = None if reason else min(timed)
    return MachineRow(
        what=name,
        base_gpus=base.gpus,
        new_gpus=new.gpus,
        base_nodes=base.nodes,
        new_nodes=new.nodes,
        size_bytes=max(common, default=None),
        base_gb_s=figures[0],
        new_gb_s=figures[1],
        ratio=figures[1] / figures[0],
        base_node_gb_s=of_nodes[0],
        new_node_gb_s=of_nodes[1],
        base_peak_gb_s=base.gb_s[base.peak_size],
        new_peak_gb_s=new.gb_s[new.peak_size],
        base_peak_bytes=base.peak_size,
        new_peak_bytes=new.peak_size,
        base_half_bytes=base.half_size,
        new_half_bytes=new.half_size,
        latency_bytes=latency,
        base_latency_us=None if latency is None else base.time_us[latency],
        new_latency_us=None if latency is None else new.time_us[latency],
        reason=reason,
    )


def _curves(files: Sequence[ResultFile]) -> dict[str, MachineCurve]:
    """Of several runs the median; out of place where both placements were measured."""
    found = dict(_collectives(files))
    pairs = [row for file in files for row in file.pairs if _between_gpus(row)]
    gpus = len({(node, end) for row in pairs for node, end in _ends(row)})
    nodes = len({node for row in pairs for node, _ in _ends(row)})
    for key, own in grouped(pairs, lambda row: (row.direction, row.engine, row.peer)).items():
        direction, engine, peer = key
        name = f"copies {direction} {engine}" + (" peer off" if peer == "off" else "")
        gb_s = [(row.size_bytes, row.bandwidth_gb_s) for row in own]
        found[name] = MachineCurve(
            gpus, nodes, _medians(gb_s), _medians([(row.size_bytes, row.latency_us) for row in own])
        )
    return {name: curve for name, curve in found.items() if curve.gb_s}


def _collectives(files: Sequence[ResultFile]) -> Iterator[tuple[str, MachineCurve]]:
    rows = [row for file in files for row in file.rows if not row.wrong and row.group is None]

    def case(key: RowKey) -> RowKey:
        return key._replace(ranks=None, nodes=None, size_bytes=None)

    cases = grouped(rows, lambda row: case(collective_key(row)))
    for key, own in cases.items():
        if key.placement == _IN_PLACE and key._replace(placement="out_of_place") in cases:
            continue
        largest = max(own, key=lambda row: row.ranks)
        same = [row for row in own if (row.ranks, row.nodes) == (largest.ranks, largest.nodes)]
        backend = "" if key.backend == "nccl" else f" {key.backend}"
        yield (
            key.name + backend,
            MachineCurve(
                largest.ranks,
                largest.nodes,
                _medians([(row.size_bytes, row.busbw_gb_s) for row in same]),
                _medians([(row.size_bytes, row.time_us) for row in same]),
            ),
        )


def _medians(points: Sequence[tuple[int | None, float | None]]) -> dict[int, float]:
    known = [(size, value) for size, value in points if size is not None and value]
    return {size: median(value for _, value in own) for size, own in grouped(known, lambda each: each[0]).items()}


def _ends(row: PairRow) -> tuple[tuple[str, str], tuple[str, str]]:
    return (row.source_node, row.source), (row.destination_node, row.destination)


def _between_gpus(row: PairRow) -> bool:
    return pair_key(row).setting is None and row.bandwidth_gb_s is not None


def _nothing(before: Mapping[str, MachineCurve], after: Mapping[str, MachineCurve]) -> Finding:
    listed = [some_of(list(side)) if side else "no figures" for side in (after, before)]
    return Finding(
        id="nothing-compared",
        severity=Verdict.ERROR,
        subject="the two machines",
        seen=f"nothing in common: {listed[0]}, not {listed[1]}",
        expected="the same collective, type and reduction on both machines",
        cause="other commands or options were run" if before and after else "one side has no figures",
        next_command="Measure the new side with the options of the old one",
    )
