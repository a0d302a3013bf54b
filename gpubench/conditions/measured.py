"""Conditions that only measurements show: copies, collectives and ranks that are slower than their siblings,
profile or limit.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from msgspec import Struct

from gpubench.conditions.circumstances import Circumstances, Found, Sighting, joined
from gpubench.conditions.condition import Condition, Family
from gpubench.model.paths.p2p import FAILED_SHARE, SLOW_SHARE, find_oddities, is_large_copy
from gpubench.model.paths.wiring import Wiring
from gpubench.model.profiles.copies import comparison_key, describe_slowness, is_slow_copy, is_with_host
from gpubench.model.profiles.learning import find_slow_values
from gpubench.model.results.compare import HOST
from gpubench.model.results.figures import COLLECTIVE_NAMES, Measurements, memory_row, peer_rows
from gpubench.model.results.neighbours import LEAST_LOSS, LONE, SHARE, late_rank, slow_range
from gpubench.model.results.report import CollectiveRow, PairRow
from gpubench.model.results.speed import (
    ABOVE_LIMIT,
    SLOW_RANGE,
    TOO_NOISY,
    Slowness,
    is_lost_in_noise,
    is_slow,
    times_limit,
)
from gpubench.model.terms.operation import Direction, Engine, HostMemory
from gpubench.model.terms.ranks import DevicePlace, RankIdentity
from gpubench.model.terms.units import (
    BYTES_PER_GB,
    MICROSECONDS_PER_SECOND,
    format_bandwidth,
    format_size,
    format_time,
    group_by,
    plural,
)
from gpubench.model.terms.verdict import SLOW_UNEXPLAINED, STRAGGLER, WRONG_DATA, Cure, Finding, Verdict, worst_verdict

_SLOW_MEMORY_SHARE, _FAILED_MEMORY_SHARE = 0.75, 0.5
"""Thresholds for WARN and FAIL, relative to the bandwidth of nodes with the same CPU.

The tolerance is wider than for GPUs. Other programs use the same memory, and the single copying thread depends on its
core's clock.
"""


class _Slowness(Struct, frozen=True):
    """Slow GPUs, pairs or patterns found with one kind of copy, with the worst verdict among them."""

    names: tuple[str, ...]
    verdict: Verdict
    seen: str
    expected: str = ""
    expected_percent: float | None = None
    places: tuple[DevicePlace, ...] = ()


_OVER_PCIE: Mapping[str, Any] = {
    "likely": "lost PCIe lanes, PCIe errors, low clocks, or traffic of other jobs",
    "cure": Cure.of(
        "gpubench topo",
        comment="It shows PCIe links with fewer lanes than they could have. `nvidia-smi -q -d PERFORMANCE` shows "
        "throttling.",
    ),
}
"""Likely reason and cure for slow copies on machines without NVLinks."""


def _slow_copies(run: Circumstances) -> Found:
    """Find GPUs and pairs with slow copies, merging all kinds of copies.

    Host-staged pairs are left out, since the paths check reports them. Bidirectional copies are left out if one
    direction alone is already slow.
    """
    found: dict[tuple[str, ...], list[_Slowness]] = {}
    gpus = [gpu for node in run.nodes.values() for gpu in node.gpus]
    without_nvlinks = _OVER_PCIE if gpus and not any(gpu.nvlinks for gpu in gpus) else {}
    staged = {_ends(row) for row in run.measurements.pairs if _is_staged(run.measurements, row)}
    slow_ends = {frozenset(ends) for ends in staged}
    rows = [row for row in run.measurements.pairs if _is_between_gpus(row)]
    for alike in group_by(rows, comparison_key).values():
        known = staged
        if alike[0].direction == Direction.BOTH:
            known = {ends for ends in map(_ends, alike) if frozenset(ends) in slow_ends}
        own = [row for row in alike if _ends(row) not in known]
        if own and is_large_copy(own[0].size_bytes):
            slow_ends |= {frozenset(_ends(row)) for row in own if is_slow_copy(row)}
        for slowness in _slow_among(run, own):
            found.setdefault(slowness.names, []).append(slowness)
    for slow in (*found.values(), *([pattern] for pattern in _slow_patterns(run))):
        yield Sighting(
            subject=joined(slow[0].names),
            names=slow[0].names,
            places=slow[0].places,
            seen="; ".join(dict.fromkeys(slowness.seen for slowness in slow)),
            severity=worst_verdict(slowness.verdict for slowness in slow),
            expected=next((slowness.expected for slowness in slow if slowness.expected), ""),
            expected_percent=min(
                (slowness.expected_percent for slowness in slow if slowness.expected_percent), default=None
            ),
            **without_nvlinks,
        )


def _slow_among(run: Circumstances, rows: Sequence[PairRow]) -> Iterator[_Slowness]:
    """For one kind of copy, yield GPUs whose copies are mostly slow first. Then yield the remaining slow pairs."""
    names = dict(chain.from_iterable(zip(_ends(row), _names(run, row), strict=True) for row in rows))
    ends, positions = list(names.values()), {end: number for number, end in enumerate(names)}
    at = dict(chain.from_iterable(zip(_ends(row), _places(run, [row]), strict=True) for row in rows))
    places = [at[end] for end in names]
    by_pair = {(positions[one], positions[other]): row for row in rows for one, other in [_ends(row)]}
    slow = {pair: row for pair, row in by_pair.items() if is_slow_copy(row)}
    # Paths differ in bandwidth, so compare only whether each row is slow.
    for oddity in find_oddities({pair: 0.0 if pair in slow else 1.0 for pair in by_pair}, len(ends)):
        own = {pair: row for pair, row in slow.items() if oddity.role != "pair" and oddity.gpus[0] in pair}
        slow = {pair: row for pair, row in slow.items() if pair not in own}
        if own:
            yield _slowness([ends[oddity.gpus[0]]], own.values(), f", {oddity.role}", (places[oddity.gpus[0]],))
    if slow:
        both = tuple(dict.fromkeys(places[gpu] for pair in sorted(slow) for gpu in pair))
        yield _slowness([" → ".join(ends[gpu] for gpu in pair) for pair in sorted(slow)], slow.values(), "", both)


def _slowness(names: Sequence[str], rows: Collection[PairRow], role: str, places: tuple[DevicePlace, ...]) -> _Slowness:
    worst = min(rows, key=lambda row: row.expected_percent or 0.0)
    verdict = worst_verdict(Verdict(row.verdict or Verdict.WARN) for row in rows)
    expected = f"{_figure(worst, worst.expected_gb_s or 0.0)}, {worst.expected_source}"
    seen = f"{_kind(worst)}: {describe_slowness(worst)}{role}"
    return _Slowness(tuple(names), verdict, seen, expected, worst.expected_percent, places)


def _figure(row: PairRow, gb_s: float) -> str:
    if is_large_copy(row.size_bytes):
        return format_bandwidth(gb_s, 4)
    copies = 2 if row.direction == Direction.BOTH else 1
    return format_time(copies * (row.size_bytes or 0) / gb_s / BYTES_PER_GB * MICROSECONDS_PER_SECOND)


def _slow_patterns(run: Circumstances) -> Iterator[_Slowness]:
    """Yield patterns of simultaneous copies that are slower than expected from the same pairs measured alone."""
    several = len(run.nodes) > 1
    for row in run.measurements.patterns:
        if row.verdict in (Verdict.WARN, Verdict.FAIL) and not row.wrong and row.expected_gb_s and row.total_gb_s:
            name = f"{row.pattern.replace('_', ' ')} {row.direction} of {row.gpus} GPUs"
            share = row.total_gb_s / row.expected_gb_s
            yield _Slowness(
                (f"{row.node} {name}" if several and row.node else name,),
                Verdict(row.verdict),
                f"{format_bandwidth(row.total_gb_s, 4)} in total, {share:.0%} of the value predicted from single pairs",
                f"{format_bandwidth(row.expected_gb_s, 4)}, predicted from single pairs",
                100 * share,
                (DevicePlace(row.node),) if row.node else (),
            )


End = tuple[str, str]


def _ends(row: PairRow) -> tuple[End, End]:
    return (row.source_node, row.source), (row.destination_node, row.destination)


def _end_devices(row: PairRow) -> tuple[tuple[str, str, str | None], tuple[str, str, str | None]]:
    """Return the node, label and bus id of the source, then of the destination."""
    return (
        (row.source_node, row.source, row.source_bus_id),
        (row.destination_node, row.destination, row.destination_bus_id),
    )


def _is_between_gpus(row: PairRow) -> bool:
    """True for a measured copy between two GPUs by copy engines, kernels or NCCL."""
    managed = row.engine not in (Engine.CE, Engine.SM, "nccl")
    return row.bandwidth_gb_s is not None and not managed and HOST not in (row.source, row.destination)


def _is_staged(measured: Measurements, row: PairRow) -> bool:
    """True for a copy that was host-staged although peer access was on. The paths check reports it."""
    key = row.source_node, row.source_bus_id, row.destination_bus_id
    return row.peer == "on" and (bool(row.host_staged) or key in measured.staged)


def _names(run: Circumstances, row: PairRow) -> tuple[str, str]:
    """Return the names of source and destination: rank numbers, or the driver's names for GPUs of one process."""
    one, other = (_name(run, row, *device) for device in _end_devices(row))
    return one, other


def _name(run: Circumstances, row: PairRow, host: str, label: str, bus_id: str | None) -> str:
    known = f"{label} ({bus_id})" if bus_id else label
    if row.scope not in (None, "process"):
        return f"rank {known}"
    return f"{host} {known}" if len(run.nodes) > 1 else known


def _places(run: Circumstances, rows: Iterable[PairRow]) -> tuple[DevicePlace, ...]:
    """Return the node and device of each GPU that these copies used, with the driver's name if known."""
    gpus = ((node.snapshot.host, gpu) for node in run.nodes.values() for gpu in node.gpus)
    names: dict[tuple[str, str | None], str] = {
        (host, gpu.bus_id): gpu.device for host, gpu in gpus if gpu.bus_id is not None
    }
    devices = (device for row in rows for device in _end_devices(row) if device[1] != HOST)
    return tuple(
        dict.fromkeys(DevicePlace(node, names.get((node, bus_id), label), bus_id) for node, label, bus_id in devices)
    )


def _kind(row: PairRow) -> str:
    """Return the kind of copy, such as 'ce write', 'ce write peer off' or 'ce write 16'."""
    series = "nccl" if row.engine == "nccl" else f"{row.engine} {row.direction}"
    size = "" if is_large_copy(row.size_bytes) else f" {format_size(row.size_bytes or 0)}"
    return f"{series}{' peer off' if row.peer == 'off' else ''}{size}"


def _asymmetric(run: Circumstances) -> Found:
    """Find pairs that reach less than 90 % (WARN) or 75 % (FAIL) of the opposite direction.

    Pairs are skipped if one of their rows is already reported as slow.
    """
    slow = {frozenset(_ends(row)) for row in run.measurements.pairs if is_slow_copy(row)}
    for number, node in run.nodes.items():
        rows = peer_rows(run.measurements, node)
        for (source, destination), row in rows.items():
            back = rows.get((destination, source))
            if back is None or not back.bandwidth_gb_s or row.bandwidth_gb_s is None:
                continue
            share = row.bandwidth_gb_s / back.bandwidth_gb_s
            if share < SLOW_SHARE and frozenset(_ends(row)) not in slow:
                ends = node.gpus[source], node.gpus[destination]
                one, other = (end.index for end in ends)
                yield Sighting(
                    subject=run.names_with_ids(number, *ends),
                    places=run.places(number, *ends),
                    seen=f"{format_bandwidth(row.bandwidth_gb_s, 4)}, but "
                    f"{format_bandwidth(back.bandwidth_gb_s, 4)} in the other direction",
                    cure=Cure.of(
                        f"gpubench p2p --pairs {one}-{other},{other}-{one}",
                        comment="Also look at link errors with `nvidia-smi nvlink -e`.",
                    ),
                    severity=Verdict.FAIL if share < FAILED_SHARE else Verdict.WARN,
                )


def _host_copies(run: Circumstances) -> Found:
    """Find GPUs with slow copies to or from host memory. Report both directions as one finding."""
    slow = [row for row in run.measurements.pairs if is_with_host(row) and is_slow_copy(row)]
    for name, rows in group_by(slow, lambda row: _host_end(run, row)).items():
        worst = min(rows, key=lambda row: row.expected_percent or 0.0)
        yield Sighting(
            subject=name,
            places=_places(run, rows[:1]),
            seen="; ".join(f"{_way(row)}: {describe_slowness(row)}" for row in rows),
            severity=worst_verdict(Verdict(row.verdict or Verdict.WARN) for row in rows),
            expected=f"{_figure(worst, worst.expected_gb_s or 0.0)}, {worst.expected_source}",
            expected_percent=worst.expected_percent,
        )


def _host_end(run: Circumstances, row: PairRow) -> str:
    source, destination = _end_devices(row)
    return _name(run, row, *(destination if row.source_bus_id is None else source))


def _way(row: PairRow) -> str:
    pageable = "pageable " if HostMemory.parse_note(row.note) is HostMemory.PAGEABLE else ""
    return f"{'from' if row.source_bus_id is None else 'to'} {pageable}host memory"


def _host_memory(run: Circumstances) -> Found:
    """Find nodes whose host memory copies reach less than 75 % (WARN) or 50 % (FAIL) of nodes with the same CPU."""
    by_cpu: dict[str | None, dict[str, float]] = {}
    for node in run.nodes.values():
        row = memory_row(run.measurements, node.snapshot.host)
        if row is not None and row.bandwidth_gb_s is not None:
            by_cpu.setdefault(node.snapshot.machine.cpu, {})[node.snapshot.host] = row.bandwidth_gb_s
    for figures in by_cpu.values():
        for host, (_, share, usual) in find_slow_values(figures).items():
            if share < _SLOW_MEMORY_SHARE:
                yield Sighting(
                    subject=host,
                    places=(DevicePlace(host),),
                    seen=f"{format_bandwidth(figures[host], 4)}, {share:.0%} (one thread, copying in host memory)",
                    severity=Verdict.FAIL if share < _FAILED_MEMORY_SHARE else Verdict.WARN,
                    expected=f"{format_bandwidth(usual, 4)}, like nodes with the same CPU",
                )


def _collectives(run: Circumstances) -> Found:
    hosts = joined(node.snapshot.host for node in run.nodes.values())
    for rows in group_by(filter(is_slow, run.measurements.collectives), lambda row: row.collective).values():
        slowness = Slowness.of(rows)
        yield run.nodes_sighting(
            run.nodes,
            f"{slowness.seen}; rank {slowness.worst.slowest_rank} was slowest",
            heading=slowness.subject(hosts),
            severity=slowness.severity,
            expected=slowness.expected,
            expected_percent=slowness.percent,
            cure=Cure.of(
                "gpubench p2p",
                comment=f"Then run `NCCL_DEBUG=INFO gpubench {rows[0].command}`, and `gpubench explain` on its log.",
            ),
        )


def _wrong(run: Circumstances) -> Found:
    for row in run.measurements.collectives:
        if row.wrong:
            subject = f"{row.collective} of {format_size(row.size_bytes)} on {row.ranks} ranks"
            places = tuple(place for number in run.nodes for place in run.places(number))
            yield Sighting(subject=subject, seen=plural(row.wrong, "wrong element"), places=places)


def _late(run: Circumstances) -> Found:
    ranks = {rank.rank: rank for rank in run.measurements.ranks}
    for rows in group_by(run.measurements.collectives, lambda row: row.collective).values():
        if (found := late_rank(rows)) is not None:
            of = f"{found.worst.collective} of {format_size(found.worst.size_bytes)}"
            seen = f"{found.times:.2f} times the time of the fastest rank, {of}"
            rank = ranks.get(found.rank)
            places = () if rank is None else (rank.place,)
            yield Sighting(subject=str(rank or f"rank {found.rank}"), seen=seen, places=places)


def _find_rows_above_limit(run: Circumstances) -> Found:
    """Find bandwidths well above their limit. Return one finding per collective and one per path class."""
    above = [row for row in run.measurements.collectives if times_limit(row) is not None]
    for rows in group_by(above, lambda row: row.collective).values():
        worst = max(rows, key=lambda row: times_limit(row) or 0.0)
        row_name = f"{worst.collective} of {format_size(worst.size_bytes)} on {worst.ranks} ranks"
        yield run.nodes_sighting(
            run.nodes,
            f"busbw {_times(worst.reached_gb_s, worst)}",
            subject=row_name,
            heading=row_name,
            expected=f"{_ceiling(worst)}, the limit of the ranks' links and NICs according to the driver",
            cure=Cure.of(
                f"gpubench {worst.command} --evidence", comment="It shows the paths. `gpubench topo` shows the links."
            ),
        )
    measured = run.measurements
    # Copies without peer access, or staged ones, use PCIe, which may be faster than a single NVLink.
    direct = (row for row in measured.pairs if row.peer != "off" and not _is_staged(measured, row))
    copies = [row for row in direct if times_limit(row) is not None]
    for path, pairs in group_by(copies, lambda row: row.path_class).items():
        most = max(pairs, key=lambda row: times_limit(row) or 0.0)
        ends = [(row.source_node if len(run.nodes) > 1 else "", row.source, "→", row.destination) for row in pairs]
        names = tuple(dict.fromkeys(" ".join(filter(None, end)) for end in ends))
        link = f"the path {path}" if path is not None else "the GPU's PCIe link"
        yield Sighting(
            subject=joined(names),
            names=names,
            places=_places(run, pairs),
            seen=_times(most.bandwidth_gb_s or 0.0, most),
            expected=f"{_ceiling(most)}, the limit of {link} according to the driver",
        )


def impossible(*, collectives: Sequence[CollectiveRow] = (), pairs: Sequence[PairRow] = ()) -> tuple[Finding, ...]:
    """Return findings about bandwidths that are well above their limit."""
    measured = Measurements(collectives=tuple(collectives), pairs=tuple(pairs))
    return tuple(IMPOSSIBLE.findings(Circumstances(wiring=Wiring([], {}), measurements=measured)))


def _times(gb_s: float, row: CollectiveRow | PairRow) -> str:
    return f"{format_bandwidth(gb_s, 4)}, {times_limit(row):.1f} times the limit"


def _ceiling(row: CollectiveRow | PairRow) -> str:
    return f"at most {format_bandwidth(row.limit_gb_s or 0.0, 4)}"


def _not_measured(run: Circumstances) -> Found:
    for need, reason in run.measurements.failed.items():
        yield Sighting(subject=str(need), seen=reason, expected=f"a measurement of {need}")
    for failure in run.measurements.failed_on:
        yield Sighting(
            subject=f"{failure.node}, {failure.need}",
            places=(DevicePlace(failure.node),),
            seen=failure.reason,
            expected=f"a measurement of {failure.need}",
        )


_LINES, _EVIDENCE, _LIMITS = "commands/check.md", "explanation/evidence.md", "explanation/limits.md"
HOST_MEMORY_SLOW = Condition(
    id="host-memory-slow",
    title="A node copies in its host memory more slowly than nodes with the same CPU",
    check="host_memory",
    likely="low CPU clocks, memory channels without modules, or other jobs that use CPUs and memory",
    command="sudo dmidecode -t memory",
    comment="Run it, `lscpu` and `top` on that node.",
    link="https://github.com/noonghunna/club-3090/pull/919",
    look=_host_memory,
)

LATE_RANK = Condition(
    id=STRAGGLER,
    title="One rank takes longer than the others for the same collective",
    check="stragglers",
    expected=f"at most {LEAST_LOSS:.0%} more than the fastest rank, plus the confidence interval of the time",
    likely="shared CPUs, low clocks or a busy GPU, which delay this rank",
    command="nvidia-smi",
    comment="Run it and `top` on that host. Bind ranks with `mpirun --bind-to numa`.",
    link="https://github.com/NVIDIA/nccl/issues/893",
    look=_late,
)

IMPOSSIBLE = Condition(
    id=ABOVE_LIMIT,
    title="A bandwidth is far above the limit of its links: a fact about the links, or the measurement, is wrong",
    check="measured",
    likely="a link that the driver or hypervisor reports narrower than it is, a link or NIC that was not found, "
    "or a wrong time",
    command="gpubench topo",
    comment="It shows these links. `nvidia-smi topo -m` and `nvidia-smi nvlink -s` should show the same.",
    link=_LIMITS,
    look=_find_rows_above_limit,
)

MEASURED = Family.of(
    "measured",
    "What measurements show",
    Condition(
        id="p2p-slow",
        title="Copies between GPUs are slower than between sibling GPUs, or than on healthy machines",
        check="p2p_bandwidth",
        expected="the same bandwidth as other pairs with this path",
        likely="links that are down or have errors, lost PCIe lanes, low clocks, or traffic of other jobs",
        command="nvidia-smi nvlink -e",
        comment="`nvidia-smi -q -d PERFORMANCE` shows throttling, and `gpubench p2p` measures every pair.",
        look=_slow_copies,
    ),
    Condition(
        id="p2p-asymmetric",
        title="Copies between two GPUs are slower in one direction than in the other",
        check="p2p_symmetry",
        expected="the same bandwidth in both directions",
        likely="a link that resends packets in one direction, or different routes for the two directions",
        command=("gpubench p2p", "nvidia-smi nvlink -e"),
        comment="The second command shows link errors.",
        look=_asymmetric,
    ),
    Condition(
        id="host-copies-slow",
        title="Copies between host memory and a GPU are slow (H2D, D2H bandwidth)",
        check="host_bandwidth",
        likely="a PCIe link with fewer lanes or a lower generation, a slot on the other socket, or busy host memory",
        command="gpubench topo",
        comment="It shows the link. Run `nvidia-smi -q | grep -A 6 'GPU Link Info'` during copies.",
        link="https://github.com/NVIDIA/nvbandwidth/issues/53",
        look=_host_copies,
    ),
    HOST_MEMORY_SLOW,
    Condition(
        id=SLOW_UNEXPLAINED,
        title="A collective takes longer than on healthy machines (low busbw), for no known reason",
        check="collective_bandwidth",
        likely="one slow GPU or link slows all ranks, or NCCL uses a different path than on healthy machines",
        command="gpubench p2p",
        comment="Then run `NCCL_DEBUG=INFO gpubench allreduce`, and `gpubench explain` on its log.",
        look=_collectives,
        aliases=("collective-slow",),
    ),
    Condition(
        id=WRONG_DATA,
        title="Wrong data: wrong elements after a copy or a collective",
        check="data_correct",
        expected="every element correct",
        likely="data corrupted by a GPU, a link, ACS or an IOMMU, or a bug in the library",
        command="gpubench p2p",
        comment="Then run with NCCL_P2P_DISABLE=1. If the data are then correct, peer copies are at fault.",
        link=_EVIDENCE,
        look=_wrong,
    ),
    LATE_RANK,
    IMPOSSIBLE,
    Condition(
        id="not-measured",
        title="A measurement failed: the result is neither healthy nor faulty",
        check="measured",
        likely="the driver, a library or a rank failed, so the links were not tested",
        command="gpubench p2p",
        comment="Run the failed measurement alone (or gpubench allreduce).",
        look=_not_measured,
    ),
    link=_LINES,
)


_ONE_PER_CPU, _IDLE = "Start at most one rank per CPU.", "Run it on an idle machine."


def _noisy(run: Circumstances) -> Found:
    """Find noisy rows that have an expected value. Gates report other noisy rows as not judged."""
    yield from _noise_of(row for row in run.measurements.collectives if row.expected_us is not None)


def _noise_of(rows: Iterable[CollectiveRow]) -> Iterable[Sighting]:
    noisy = [row for row in rows if row.verdict == Verdict.INCONCLUSIVE]
    for alike in group_by(noisy, lambda row: row.collective).values():
        worst = max(alike, key=lambda row: (row.ci95_percent or 0.0, row.time_us))
        size, more = format_size(worst.size_bytes), f", and {len(alike) - 1} more" if len(alike) > 1 else ""
        placement = worst.placement.replace("_", " ")
        shares_cpus = SHARE in (worst.note or "")
        option, comment = ("--np 2", _ONE_PER_CPU) if shares_cpus else ("--budget 2", _IDLE)
        yield Sighting(
            subject=f"{COLLECTIVE_NAMES.get(worst.collective, worst.collective)} of {size} {placement}{more}",
            seen=_seen_noise(worst),
            likely="more ranks than CPUs" if shares_cpus else "",
            cure=Cure.of(f"gpubench {worst.command} --sizes {size} {option}", comment=comment),
        )


def _seen_noise(row: CollectiveRow) -> str:
    seen = format_time(row.time_us) + ("" if row.ci95_percent is None else f" ±{row.ci95_percent:.0f} %")
    why = [part for part in (row.note or "").split("; ") if part == LONE or SHARE in part]
    if row.expected_us is not None and not is_lost_in_noise(row.ci95_percent):
        seen = f"{seen}, {format_time(row.expected_us)} expected"
    return "; ".join((seen, *why))


def _slow_range(run: Circumstances) -> Found:
    for rows in group_by(run.measurements.collectives, lambda row: (row.collective, row.group)).values():
        right = [row for row in rows if not row.wrong and row.verdict in (None, Verdict.PASS)]
        if (found := slow_range(right)) is not None:
            first, last, worst = found.rows[0], found.rows[-1], found.worst
            size, usual = format_size(worst.size_bytes), format_time(found.usual_us)
            seen = f"{format_time(worst.time_us)} at {size}, {worst.time_us / found.usual_us - 1:.0%} more than {usual}"
            yield Sighting(
                subject=f"{worst.collective} of {format_size(first.size_bytes)} to {format_size(last.size_bytes)}",
                seen=seen,
                cure=Cure.of(
                    f"gpubench {worst.command} --sizes {size} --evidence",
                    comment="It shows the algorithm and the paths.",
                ),
            )


SWEEP = Family.of(
    "sweep",
    "What the rows of a sweep show",
    Condition(
        id=TOO_NOISY,
        title="A time varies too much to be judged, or is out of line with the times of neighbouring sizes",
        check="collective_bandwidth",
        expected="a 95 % interval much narrower than the time, and a time in line with those of neighbouring sizes",
        likely="other programs on the same cores or links, or too few operations",
        command="gpubench allreduce --budget 2",
        comment="Run it on an idle machine.",
        look=_noisy,
    ),
    Condition(
        id=SLOW_RANGE,
        title="A range of sizes is slower than smaller and larger sizes of the same sweep",
        check="collective_bandwidth",
        expected="a time between those of smaller and larger sizes",
        likely="an algorithm or protocol that does not fit these sizes, an NCCL setting, or other work at that time",
        command="gpubench allreduce --evidence",
        comment="It shows the algorithm and the paths.",
        link="https://github.com/aws/aws-ofi-nccl/issues/65",
        look=_slow_range,
    ),
    link="commands/collectives.md",
)


def sweep_findings(rows: Sequence[CollectiveRow], ranks: Sequence[RankIdentity] = ()) -> tuple[Finding, ...]:
    """Return findings about a whole sweep: noise, a slow range of sizes, or a late rank."""
    run = Circumstances(wiring=Wiring([], {}), measurements=Measurements(collectives=tuple(rows), ranks=tuple(ranks)))
    noise, range_, *_ = SWEEP.conditions
    return (*noise.to_findings(_noise_of(rows)), *range_.findings(run), *LATE_RANK.findings(run))
