"""Conditions that only figures show: copies, collectives and ranks slower than siblings, profile or limit."""

from collections.abc import Mapping, Sequence

from gpubench.conditions.definition.circumstances import Circumstances
from gpubench.conditions.definition.condition import Condition, Family, Found, Sighting, joined
from gpubench.model.paths.p2p import FAILED_SHARE, SLOW_SHARE, Oddity, Pair, odd_ones
from gpubench.model.paths.topology import Topology, loaded_link, pcie_ceiling_gb_s
from gpubench.model.paths.wiring import Wiring
from gpubench.model.profiles.learning import Expectation, judge_bandwidth, odd_among, of_copy
from gpubench.model.profiles.profile import Profile
from gpubench.model.results.figures import Measurements, host_rows, is_by_design, memory_row, peer_rows
from gpubench.model.results.neighbours import LATE_FROM_BYTES, LEAST_LOSS, late_rank
from gpubench.model.results.report import CollectiveRow, PairRow
from gpubench.model.results.speed import ABOVE_LIMIT, MOST_PERCENT, Slowness, is_slow, times_limit
from gpubench.model.terms.units import counted, format_size, grouped
from gpubench.model.terms.verdict import SLOW_UNEXPLAINED, STRAGGLER, WRONG_DATA, Finding, Verdict, overall

_SLOW_MEMORY_SHARE, _FAILED_MEMORY_SHARE = 0.75, 0.5
"""Of what nodes with the same CPU reach. Wider than for GPUs: others use the same memory, and one thread copies at the
clock of its core."""


def _slow_pairs(run: Circumstances) -> Found:
    """Below 90 or 75 % of what siblings reach, by GPU or pair; else against the profile.

    Pairs over different paths are compared by their share of what is expected of their path. Those that go through
    host memory are said to do that elsewhere, and a GPU that somebody uses is not judged.
    """
    for number, node in run.nodes.items():
        rows = peer_rows(run.measurements, node)
        profile = run.profiles.get(number)
        due = {pair: _due(profile, row) for pair, row in rows.items()}
        shares = {pair: (row.bandwidth_gb_s or 0) / _due_gb_s(due[pair], row, node, pair) for pair, row in rows.items()}
        oddities = odd_ones(shares, len(node.gpus))
        yield from (_odd(run, number, oddity, rows) for oddity in oddities)
        explained = {gpu for oddity in oddities for gpu in oddity.gpus}
        judged = {
            pair: verdict
            for pair, row in rows.items()
            if not explained & set(pair)
            and (verdict := judge_bandwidth(row.bandwidth_gb_s or 0, due[pair], _limit_gb_s(row))) is not None
        }
        if judged:
            _, seen, expected = judged[min(judged, key=lambda pair: shares[pair])]
            names = tuple(run.named(number, *(node.gpus[gpu] for gpu in pair)) for pair in sorted(judged))
            severity = overall(each[0] for each in judged.values())
            yield Sighting(subject=joined(names), seen=seen, names=names, severity=severity, expected=expected)


def _due(profile: Profile | None, row: PairRow) -> Expectation | None:
    quantity = "p2p.staged_gb_s" if is_by_design(row) else "p2p.write_gb_s"
    return of_copy(profile, quantity, row.limit_gb_s, row.path_class)


def _limit_gb_s(row: PairRow) -> float | None:
    return None if is_by_design(row) else row.limit_gb_s


def _due_gb_s(due: Expectation | None, row: PairRow, node: Topology, pair: Pair) -> float:
    """The scale on which pairs over different paths compare: the expectation of the path, else the limit, else one.

    Copies that go through host memory by design take PCIe, whatever links join the two GPUs.
    """
    if due is not None:
        return due.value
    if not is_by_design(row):
        return row.limit_gb_s or 1.0
    links = [pcie_ceiling_gb_s(loaded_link(node.gpus[gpu])) for gpu in pair]
    return min(filter(None, links), default=1.0)


def _odd(run: Circumstances, number: int, oddity: Oddity, rows: Mapping[Pair, PairRow]) -> Sighting:
    share = oddity.figure / oddity.usual
    name = run.named(number, *(run.nodes[number].gpus[gpu] for gpu in oddity.gpus))
    own = [row.bandwidth_gb_s for pair, row in rows.items() if set(oddity.gpus) <= set(pair)]
    role = "" if oddity.role == "pair" else f" {oddity.role}"
    slowest = min(figure for figure in own if figure is not None)
    return Sighting(
        subject=name,
        seen=f"{slowest:.4g} GB/s{role}, {share:.0%} of its siblings' bandwidth",
        severity=Verdict.FAIL if share < FAILED_SHARE else Verdict.WARN,
    )


def _asymmetric(run: Circumstances) -> Found:
    """Below 90 or 75 % of the other direction, of pairs and GPUs that are not called slow already."""
    slow = {name for each in _slow_pairs(run) if isinstance(each, Sighting) for name in each.names or (each.subject,)}
    for number, node in run.nodes.items():
        rows = peer_rows(run.measurements, node)
        for (source, destination), row in rows.items():
            back = rows.get((destination, source))
            if back is None or not back.bandwidth_gb_s or row.bandwidth_gb_s is None:
                continue
            share = row.bandwidth_gb_s / back.bandwidth_gb_s
            ends = node.gpus[source], node.gpus[destination]
            name = run.named(number, *ends)
            if share < SLOW_SHARE and slow.isdisjoint((name, *(run.named(number, each) for each in ends))):
                one, other = (each.index for each in ends)
                yield Sighting(
                    subject=name,
                    seen=f"{row.bandwidth_gb_s:.4g} GB/s, but {back.bandwidth_gb_s:.4g} in the other direction",
                    cure=f"gpubench p2p --pairs {one}-{other},{other}-{one}. Look at link errors too: nvidia-smi "
                    f"nvlink -e",
                    severity=Verdict.FAIL if share < FAILED_SHARE else Verdict.WARN,
                )


def _host_copies(run: Circumstances) -> Found:
    """Below 90 or 75 % of siblings; else against the profile."""
    for number, node in run.nodes.items():
        for to_gpu, quantity in ((True, "host_to_device_gb_s"), (False, "device_to_host_gb_s")):
            rows = host_rows(run.measurements, node, to_gpu=to_gpu)
            figures = {gpu.device: row.bandwidth_gb_s or 0.0 for gpu, row in rows}
            odd = odd_among(figures)
            for gpu, row in rows:
                figure = figures[gpu.device]
                judged = judge_bandwidth(
                    figure, of_copy(run.profiles.get(number), quantity, row.limit_gb_s), row.limit_gb_s
                )
                if gpu.device in odd:
                    verdict, share, usual = odd[gpu.device]
                    judged = verdict, f"{figure:.4g} GB/s, {share:.0%}", f"{usual:.4g} GB/s, like its siblings"
                if judged is not None:
                    severity, seen, expected = judged
                    seen = f"{seen}, {'from' if to_gpu else 'to'} host memory"
                    yield Sighting(subject=run.named(number, gpu), seen=seen, severity=severity, expected=expected)


def _host_memory(run: Circumstances) -> Found:
    """Below 75 or 50 % of what nodes with the same CPU copy in their memory."""
    by_cpu: dict[str | None, dict[str, float]] = {}
    for node in run.nodes.values():
        row = memory_row(run.measurements, node.snapshot.host)
        if row is not None and row.bandwidth_gb_s is not None:
            by_cpu.setdefault(node.snapshot.machine.cpu, {})[node.snapshot.host] = row.bandwidth_gb_s
    for figures in by_cpu.values():
        for host, (_, share, usual) in odd_among(figures).items():
            if share < _SLOW_MEMORY_SHARE:
                yield Sighting(
                    subject=host,
                    seen=f"{figures[host]:.4g} GB/s, {share:.0%} (one thread, copying in host memory)",
                    severity=Verdict.FAIL if share < _FAILED_MEMORY_SHARE else Verdict.WARN,
                    expected=f"{usual:.4g} GB/s, like nodes with the same CPU",
                )


def _collectives(run: Circumstances) -> Found:
    hosts = tuple(node.snapshot.host for node in run.nodes.values())
    for rows in grouped(filter(is_slow, run.measurements.collectives), lambda row: row.collective).values():
        slowness = Slowness.of(rows)
        yield Sighting(
            subject=joined(hosts),
            heading=slowness.subject(joined(hosts)),
            names=hosts,
            seen=f"{slowness.seen}; the last was rank {slowness.worst.slowest_rank}",
            severity=slowness.severity,
            expected=slowness.expected,
            cure=f"gpubench p2p. Then run NCCL_DEBUG=INFO gpubench {rows[0].command}, and gpubench explain on its log",
        )


def _wrong(run: Circumstances) -> Found:
    for row in run.measurements.collectives:
        if row.wrong:
            subject = f"{row.collective} of {format_size(row.size_bytes)} on {row.ranks} ranks"
            yield Sighting(subject=subject, seen=counted(row.wrong, "wrong element"))


def _late(run: Circumstances) -> Found:
    ranks = {each.rank: str(each) for each in run.measurements.ranks}
    for rows in grouped(run.measurements.collectives, lambda row: row.collective).values():
        if (found := late_rank(rows)) is not None:
            of = f"{found.worst.collective} of {format_size(found.worst.size_bytes)}"
            seen = f"{found.times:.2f} times the time of the fastest rank, {of}"
            yield Sighting(subject=ranks.get(found.rank, f"rank {found.rank}"), seen=seen)


def _above_limit(run: Circumstances) -> Found:
    """Rows well above their limit: those of a collective together, and those over a kind of path, by the worst."""
    hosts = tuple(node.snapshot.host for node in run.nodes.values())
    above = [row for row in run.measurements.collectives if times_limit(row) is not None]
    for rows in grouped(above, lambda row: row.collective).values():
        worst = max(rows, key=lambda row: times_limit(row) or 0.0)
        yield Sighting(
            subject=f"{worst.collective} of {format_size(worst.size_bytes)} on {worst.ranks} ranks",
            names=hosts,
            heading=f"{worst.collective} of {format_size(worst.size_bytes)} on {worst.ranks} ranks",
            seen=f"busbw {_times(worst.reached_gb_s, worst)}",
            expected=f"{_ceiling(worst)}, the limit of its ranks' links and NICs as reported by the driver",
            cure=f"gpubench {worst.command} --evidence. It shows the paths; `gpubench topo` shows the links",
        )
    copies = [row for row in run.measurements.pairs if times_limit(row) is not None]
    for path, pairs in grouped(copies, lambda row: row.path_class).items():
        most = max(pairs, key=lambda row: times_limit(row) or 0.0)
        ends = [(row.source_node if len(hosts) > 1 else "", row.source, "→", row.destination) for row in pairs]
        names = tuple(dict.fromkeys(" ".join(filter(None, each)) for each in ends))
        link = f"the path {path}" if path is not None else "the GPU's PCIe link"
        yield Sighting(
            subject=joined(names),
            names=names,
            seen=_times(most.bandwidth_gb_s or 0.0, most),
            expected=f"{_ceiling(most)}, the limit of {link} as reported by the driver",
        )


def impossible(*, collectives: Sequence[CollectiveRow] = (), pairs: Sequence[PairRow] = ()) -> tuple[Finding, ...]:
    """The findings on rows well above their limit."""
    measured = Measurements(collectives=tuple(collectives), pairs=tuple(pairs))
    return tuple(IMPOSSIBLE.findings(Circumstances(wiring=Wiring([], {}), measurements=measured)))


def _times(gb_s: float, row: CollectiveRow | PairRow) -> str:
    return f"{gb_s:.4g} GB/s, {times_limit(row):.1f} times the limit"


def _ceiling(row: CollectiveRow | PairRow) -> str:
    return f"at most {row.limit_gb_s:.4g} GB/s"


def _not_measured(run: Circumstances) -> Found:
    for need, reason in run.measurements.failed.items():
        yield Sighting(subject=str(need), seen=reason, expected=f"a measurement of {need}")
    for each in run.measurements.failed_on:
        yield Sighting(subject=f"{each.node}, {each.need}", seen=each.reason, expected=f"a measurement of {each.need}")


_LINES, _EVIDENCE, _LIMITS = "check.md", "evidence.md", "limits.md"
HOST_MEMORY_SLOW = Condition(
    id="host-memory-slow",
    title="A node copies in its host memory more slowly than nodes with the same CPU",
    detection="64 MiB copied within host memory by one thread, of nodes with the same CPU",
    check="host_memory",
    likely="low CPU clocks, memory channels without modules, or other jobs that use CPUs and memory",
    cure="sudo dmidecode -t memory. Run it, `lscpu` and `top` on that node",
    link=_LINES,
    look=_host_memory,
)

LATE_RANK = Condition(
    id=STRAGGLER,
    title="One rank takes longer than the others for the same collective",
    detection=f"the time of the slowest rank divided by that of the fastest, from {format_size(LATE_FROM_BYTES)} on: "
    "the same rank in most rows",
    check="stragglers",
    expected=f"at most {LEAST_LOSS:.0%} more than the fastest rank, beyond the interval of the time",
    likely="its process is delayed: shared CPUs, low clocks, or a busy GPU",
    cure="nvidia-smi. Run it and `top` on that host; bind ranks with mpirun --bind-to numa",
    link=_LINES,
    look=_late,
)

IMPOSSIBLE = Condition(
    id=ABOVE_LIMIT,
    title="A bandwidth is far above the limit of its links: a fact about the links, or the measurement, is wrong",
    detection=f"every bandwidth against its limit: more than {MOST_PERCENT:g} %",
    check="measured",
    likely="a link that the driver or hypervisor reports narrower than it is, a link or NIC that was not found, "
    "or a wrong time",
    cure="gpubench topo. It shows these links; `nvidia-smi topo -m` and `nvidia-smi nvlink -s` should agree",
    link=_LIMITS,
    look=_above_limit,
)

MEASURED = Family.of(
    "measured",
    "What measuring shows",
    Condition(
        id="p2p-slow",
        title="Copies between GPUs are slower than between siblings, or than on healthy machines",
        detection="`gpubench p2p`: every ordered pair against its siblings, the profile and the limit",
        check="p2p_bandwidth",
        expected="the same bandwidth as other pairs with this path",
        likely="links that are down or have errors, lost PCIe lanes, low clocks, or traffic of other jobs",
        cure="nvidia-smi nvlink -e. `nvidia-smi -q -d PERFORMANCE` shows throttling; `gpubench p2p` measures "
        "every pair",
        look=_slow_pairs,
    ),
    Condition(
        id="p2p-asymmetric",
        title="Copies between two GPUs are slower in one direction than in the other",
        detection="`gpubench p2p`: both directions of every pair without another slowness",
        check="p2p_symmetry",
        expected="the same bandwidth in both directions",
        likely="a link that repeats packets in one direction, or different routes for the two directions",
        cure="gpubench p2p --pairs I-J,J-I. Look at link errors too: nvidia-smi nvlink -e",
        look=_asymmetric,
    ),
    Condition(
        id="host-copies-slow",
        title="Copies between host memory and a GPU are slow (H2D, D2H bandwidth)",
        detection="`gpubench p2p`: pinned host memory to and from every GPU, against siblings and the profile",
        check="host_bandwidth",
        likely="a PCIe link with fewer lanes or a lower generation, a slot of the other socket, or busy host memory",
        cure="gpubench topo. It shows the link; run nvidia-smi -q | grep -A 6 'GPU Link Info' during copies",
        look=_host_copies,
    ),
    HOST_MEMORY_SLOW,
    Condition(
        id=SLOW_UNEXPLAINED,
        title="A collective takes longer than on healthy machines (low busbw), for no known reason",
        detection="`gpubench allreduce` and the others: the time of every size from 1 KiB on against the "
        "expected time; "
        "a known cause of slowness is reported instead",
        check="collective_bandwidth",
        likely="one slow GPU or link slows all ranks, or NCCL uses another path than on healthy machines",
        cure="gpubench p2p. Then run NCCL_DEBUG=INFO gpubench allreduce, and gpubench explain on its log",
        look=_collectives,
        aliases=("collective-slow",),
    ),
    Condition(
        id=WRONG_DATA,
        title="Wrong data: wrong elements after a copy or a collective",
        detection="every destination compares received data with sent data",
        check="data_correct",
        expected="every element correct",
        likely="data corrupted by a GPU, a link, ACS or an IOMMU between peers, or a bug in the library",
        cure="gpubench p2p. Then run with NCCL_P2P_DISABLE=1: if the data are correct, peer copies are at fault",
        link=_EVIDENCE,
        look=_wrong,
    ),
    LATE_RANK,
    IMPOSSIBLE,
    Condition(
        id="not-measured",
        title="A measurement failed: the result is neither healthy nor faulty",
        detection="how gpubench's own measurements ended",
        check="measured",
        likely="the driver, a library or a rank failed; this says nothing about the links",
        cure="gpubench p2p. Run the failed measurement alone (or gpubench allreduce)",
        look=_not_measured,
    ),
    link=_LINES,
)
