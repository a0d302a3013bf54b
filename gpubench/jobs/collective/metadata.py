"""The metadata of a collective: one builder for runs that are measured, simulated or replayed."""

from collections.abc import Sequence
from typing import Any

from gpubench.collectives.record import Collective
from gpubench.collectives.request import SweepRequest
from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.jobs.metadata import metadata_of
from gpubench.measure.collective.described import VERSION, DescribedCollective, RunOptions
from gpubench.model.facts.backends import GATE, gated
from gpubench.model.results.report import Metadata
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.statistics.sampling import AUTO, Mode, Sampling


def described_collective(
    plan: CollectivePlan, request: SweepRequest, *, settings: Sequence[str] = (), split: str | None = None, **known: Any
) -> DescribedCollective:
    """A run in words, of which the metadata are made and a recording begins; `known` are further fields of it."""
    options = RunOptions(
        allocator=plan.allocator.value,
        timeout_s=plan.timeout_s,
        evidence=plan.evidence,
        strict=plan.strict,
        settings=tuple(settings),
        split=split,
    )
    collective = request.collective.name
    return DescribedCollective(
        schema_version=VERSION, collective=collective, asked=request.asked, options=options, **known
    )


def describe_sampling(sampling: Sampling) -> dict[str, object]:
    """Sampling as plain data, for the metadata."""
    if sampling.iterations is None:
        return {"mode": sampling.mode.value, "iters": AUTO, "budget_s": sampling.budget_seconds}
    return {"mode": sampling.mode.value, "iters": sampling.iterations}


def collective_metadata(
    found: DescribedCollective,
    collective: Collective,
    arguments: Sequence[str],
    *,
    topology: str | None = None,
    replayed: str | None = None,
) -> Metadata:
    """The metadata of a run; `replayed` names the recording that it comes from, where it was not made now."""
    model, options = found.model, found.options
    request = found.asked.request(collective)
    recorded = replayed is not None and found.origin is Origin.MEASURED
    beside = {"evidence": options.evidence.value, "strict": options.strict}
    if model is not None:
        described = {"allocator": options.allocator, "seed": model.seed} | beside
    else:
        described = {"allocator": options.allocator, "timeout_s": options.timeout_s} | beside
        described |= {"settings": list(options.settings), "split": options.split}
        described |= {"groups": [part.name for part in found.parts]}
        if gated((found.backend, *options.settings), alone=request.sampling.mode is Mode.LATENCY):
            described |= {"clock": GATE}
    return metadata_of(
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
    """The request as plain data, for the metadata."""
    collective = request.collective
    return {
        "sizes": list(request.sizes),
        "dtypes": [dtype.value for dtype in request.dtypes],
        "ops": [op.value for op in request.ops] if collective.reduces else [],
        "root": request.root if collective.rooted else None,
        "placements": [placement.value for placement in request.placements],
        **describe_sampling(request.sampling),
        "warmup": request.warmup,
        "graph": request.graph_replays,
        "check": request.check,
    }
