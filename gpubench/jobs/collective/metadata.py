"""Build the metadata of a collective, and the judge of its speed."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from gpubench.collectives.record import Collective, SweepRequest
from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.jobs.metadata import build_metadata
from gpubench.measure.collective.cases import RECORDING_VERSION, DescribedCollective, RunOptions
from gpubench.measure.collective.report import ExpectedTimes, SpeedJudge
from gpubench.model.facts.process import MpiSupport
from gpubench.model.results.neighbours import SHARE
from gpubench.model.results.report import CollectiveRow, Metadata, Report, Table, make_record
from gpubench.model.results.speed import OF_THE_PAST, ExpectedTime, between_nodes
from gpubench.model.terms.operation import GATE, gated_backends
from gpubench.model.terms.ranks import RankIdentity, why_not_judged
from gpubench.model.terms.statistics import AUTO, Mode
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND, group_by, plural
from gpubench.model.terms.verdict import Cure, Finding, Origin, Verdict

if TYPE_CHECKING:
    from gpubench.conditions.circumstances import Circumstances
    from gpubench.model.paths.topology import Topology
    from gpubench.model.paths.wiring import NodeNetwork
    from gpubench.model.profiles.profile import Profile
    from gpubench.model.results.history import PastFigures
    from gpubench.simulated.times import CollectiveTimes


def nothing_measured() -> Report:
    """Return the report for a run whose only backend does not support the collective."""
    finding = Finding(
        id="not-measured",
        severity=Verdict.ERROR,
        subject="--backend mpi",
        seen="no row, because the operation does not work on GPU memory and was not started in this job",
        expected="rows",
        cause="the MPI trial above",
        cure=Cure.of("gpubench allreduce --backend nccl", comment="`--backend host` measures MPI on CPU buffers."),
    )
    return Report(verdict=Verdict.ERROR, complete=True, findings=(finding,))


def add_mpi_support(report: Report, support: MpiSupport | None) -> Report:
    """Add the trials of MPI on GPU memory to the report. Findings about failed trials come first."""
    if support is None:
        return report
    from gpubench.conditions.process import mpi_findings
    from gpubench.model.results.backends import MpiTrialRow

    rows = [make_record(MpiTrialRow, trial) for trial in support.trials]
    sections = {**report.sections, **Table.group_by_section({MpiTrialRow: rows})}
    return replace(report, sections=sections).add_findings(first=mpi_findings(support))


def described_collective(
    plan: CollectivePlan, request: SweepRequest, *, settings: Sequence[str] = (), split: str | None = None, **known: Any
) -> DescribedCollective:
    """Describe a run. Its metadata and the first line of its recording are derived from this description."""
    options = RunOptions(
        allocator=plan.buffer_allocator.value,
        timeout_s=plan.timeout_s,
        evidence=plan.evidence,
        strict=plan.strict,
        settings=tuple(settings),
        split=split,
    )
    collective = request.collective.name
    return DescribedCollective(
        schema_version=RECORDING_VERSION, collective=collective, asked=request.asked, options=options, **known
    )


def collective_metadata(
    found: DescribedCollective,
    collective: Collective,
    arguments: Sequence[str],
    *,
    topology: str | None = None,
    replayed: str | None = None,
) -> Metadata:
    """Return the metadata of a run. `replayed` names the recording if the run is replayed."""
    model, options = found.model, found.options
    request = found.asked.request(collective)
    recorded = replayed is not None and found.origin is Origin.MEASURED
    beside = {"evidence": options.evidence.value, "strict": options.strict}
    if model is not None:
        described = {"allocator": options.allocator, "seed": model.seed} | beside
        described |= {"settings": list(options.settings)} if options.settings else {}
        if options.split:
            described |= {"split": options.split, "groups": [part.name for part in found.parts]}
    else:
        described = {"allocator": options.allocator, "timeout_s": options.timeout_s} | beside
        described |= {"settings": list(options.settings), "split": options.split}
        described |= {"groups": [part.name for part in found.parts]}
        one_by_one, graph = request.sampling.mode is Mode.LATENCY, request.graph_replays > 0
        if gated_backends((found.backend, *options.settings), one_by_one=one_by_one, graph=graph):
            described |= {"clock": GATE}
    return build_metadata(
        arguments,
        collective.name,
        collective=collective.name,
        backend=found.backend,
        origin=Origin.RECORDED if recorded else found.origin,
        hosts=list(dict.fromkeys(rank.host for rank in found.ranks)) if model is None else list(found.hosts),
        ranks=found.ranks,
        libraries=found.libraries,
        environment=found.environment,
        options=describe(request) | described,
        dropped_sizes=found.dropped_sizes,
        topology=topology,
        profile=None if model is None else dict(model.profile),
        source=replayed or (None if model is None else model.source),
    )


def describe(request: SweepRequest) -> dict[str, object]:
    """Return the sweep request as plain data, for the metadata."""
    collective, sampling = request.collective, request.sampling
    return {
        "sizes": list(request.sizes),
        "dtypes": [dtype.value for dtype in request.dtypes],
        "ops": [op.value for op in request.ops] if collective.reduces else [],
        "root": request.root if collective.rooted else None,
        "placements": [placement.value for placement in request.placements],
        "mode": sampling.mode.value,
        "iters": AUTO if sampling.iterations is None else sampling.iterations,
        **({"budget_s": sampling.budget_seconds} if sampling.iterations is None else {}),
        "warmup": request.warmup,
        "graph": request.graph_replays,
        "check": request.check,
        **({"percentiles": True} if sampling.percentiles else {}),
        **({} if request.skew is None else {"skew": request.skew}),
        **({} if request.cycles == 1 else {"cycles": request.cycles}),
    }


_MOST_CHANCE = 1.0  # Largest relative slowdown by noise alone. If noise may double a time, past results cannot judge it
_ROWS = 46  # Rows in a typical sweep, 1K to 4G in both placements. Noise may make any row look slow


def speed_judge_maker(
    collective: Collective,
    ranks: Sequence[RankIdentity],
    nccl: str | None,
    asked_profile: str | None,
    past: "PastFigures | None" = None,
    cpus: Sequence[tuple[int, Collection[int]]] = (),
) -> Callable[["Circumstances | None"], SpeedJudge]:
    """Return a function that makes the speed judge for rows of these ranks.

    - `nccl` is the NCCL version, followed by the file of the library.
    - `past` has earlier results.
    - `cpus` has the node and the allowed CPUs of each rank. Without it, they come from the circumstances.
    """
    hosts = tuple(dict.fromkeys(rank.host for rank in ranks))

    def make(circumstances: "Circumstances | None") -> SpeedJudge:
        node = None if circumstances is None else circumstances.nodes.get(ranks[0].node)
        profile = profile_of_ranks(ranks, node, asked_profile)
        version = None if nccl is None else nccl.split(" ")[0]
        joined, unlike, known = None, why_not_judged(ranks), cpus
        if circumstances is not None:
            from gpubench.conditions.node import cpus_in
            from gpubench.model.facts.health import describe_mig_split

            known = known or [(fact.node, cpus_in(fact.affinity or "") or ()) for fact in circumstances.facts]
            unlike = unlike or describe_mig_split(gpu for _, _, gpu in circumstances.gpus())

            joined = circumstances.wiring.networks
            if circumstances.wiring.domain(0) is not None:
                from gpubench.profiles import find_domain

                profile = find_domain(sorted({rank.gpu for rank in ranks if rank.gpu})) or profile
        network = _host_network(ranks, asked_profile) if joined is None else joined[1]
        sources = ExpectedTimes(collective=collective, profile=profile, nccl=version, network=network, unlike=unlike)
        if past is not None:
            sources = replace(sources, past=partial(_past_time, past))
        return SpeedJudge(sources, hosts, ranks, turns_on_cpus=_turns_on_cpus(known))

    return make


# On two CPUs, 1 KiB took 20 µs with two ranks, 11 ms with eight ranks and 5 ms with twelve ranks
_MOST_RANKS_PER_CPU = 4


def _turns_on_cpus(cpus: Iterable[tuple[int, Collection[int]]]) -> str:
    """Return why CPU ranks must take turns, for example '64 ranks share 2 CPUs'. Empty if there are enough CPUs.

    `cpus` has the node of each rank, and the CPUs on which the rank may run.
    """
    for ranks in group_by((each for each in cpus if each[1]), lambda each: each[0]).values():
        shared = {cpu for _, own in ranks for cpu in own}
        if len(ranks) > _MOST_RANKS_PER_CPU * len(shared):
            return f"{len(ranks)} {SHARE} {plural(len(shared), 'CPU')}"
    return ""


def _past_time(past: "PastFigures", row: CollectiveRow) -> ExpectedTime | None:
    figure = past.collective_figure(row)
    if figure is None or figure.time_us is None:
        return None
    chance = figure.slow_beyond(_ROWS) - 1
    if chance > _MOST_CHANCE:
        return None
    return ExpectedTime(figure.time_us, figure.source, replace(OF_THE_PAST, fail=max(OF_THE_PAST.fail, chance)))


def judge_by_model(
    collective: Collective, times: "CollectiveTimes", nodes: Sequence["Topology"], per_node: int, profile: "Profile"
) -> SpeedJudge:
    """Return the speed judge for a simulated machine. On several nodes, the expected time comes from the model
    without faults, otherwise from the profile.
    """
    from gpubench.model.facts.health import describe_mig_split

    def healthy_time(row: CollectiveRow) -> ExpectedTime | None:
        if row.nodes == 1 or profile.match.generic is not None:
            return None
        seconds = times.healthy_seconds(collective.name, row.size_bytes, ranks_per_node=per_node)
        source = f"profile {profile.name}, {row.nodes} nodes by a model"
        return ExpectedTime(seconds * MICROSECONDS_PER_SECOND, source, between_nodes(row.size_bytes))

    # Assume the NCCL version that the profile was measured with, because the model is based on it.
    versions = {each.nccl for each in profile.all_expected if each.quantity.startswith(f"{collective.name}.")}
    nccl = next(iter(sorted(filter(None, versions))), None)
    unlike = describe_mig_split(gpu for node in nodes for gpu in node.gpus)
    sources = ExpectedTimes(collective=collective, profile=profile, nccl=nccl, past=healthy_time, unlike=unlike)
    return SpeedJudge(sources, [node.snapshot.host for node in nodes])


def _host_network(ranks: Sequence[RankIdentity], asked: str | None) -> "NodeNetwork | None":
    """Return the network between hosts without GPUs, with the NICs in the profile `asked`.

    The rates that network interfaces report are misleading, so they are not used.
    """
    nodes = Counter(rank.node for rank in ranks)
    if asked is None or len(nodes) < 2 or any(rank.gpu for rank in ranks) or len(set(nodes.values())) > 1:
        return None
    from gpubench.model.facts.snapshot import NicKind
    from gpubench.model.paths.topology import BITS_PER_BYTE
    from gpubench.model.paths.wiring import NodeNetwork
    from gpubench.profiles import find

    profile = find(asked, os.environ)
    rates = [nic.rate_gbit_s / BITS_PER_BYTE for nic in profile.nic if nic.rate_gbit_s]
    if not rates:
        return None
    rdma = any(nic.kind is not NicKind.ETHERNET for nic in profile.nic)
    return NodeNetwork(len(nodes), len(ranks), profile.nics_gb_s, min(rates), rdma)


def profile_of_ranks(ranks: Sequence[RankIdentity], node: "Topology | None", asked: str | None) -> "Profile | None":
    """Return the profile with as many GPUs per node as there are ranks per node, or None if the nodes differ.

    Raises UsageError for an invalid profile.
    """
    models = {rank.gpu for rank in ranks}
    counts = set(Counter(rank.node for rank in ranks).values())
    if None in models or len(counts) != 1:
        return None
    from gpubench.profiles import find_gpu_profile

    return find_gpu_profile(sorted(filter(None, models)), counts.pop(), node, os.environ, asked)
