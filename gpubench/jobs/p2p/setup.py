"""A run of copies that can begin, whichever source its machine is from."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from gpubench.hardware import recorded
from gpubench.jobs.machines import Machines
from gpubench.jobs.metadata import metadata_of
from gpubench.jobs.p2p.plan import NAME, P2pPlan
from gpubench.measure.p2p.machine import CopyMachine
from gpubench.measure.p2p.recording import FILE, VERSION, RecordedP2p, RecordingBench
from gpubench.measure.p2p.request import Bench, P2pRequest
from gpubench.model.results.report import Metadata
from gpubench.model.terms.rank_identity import RankIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySetup:
    """A run ready to be measured: request, bench and machine; `ranks` where they measure."""

    plan: P2pPlan
    machines: Machines
    machine: CopyMachine
    request: P2pRequest
    bench: Bench
    libraries: Mapping[str, str]
    ranks: Sequence[RankIdentity] = ()

    def metadata(self, arguments: Sequence[str]) -> Metadata:
        """The metadata of the run."""
        machine, request, plan = self.machine, self.request, self.plan
        return metadata_of(
            arguments,
            NAME,
            machines=self.machines,
            matched=machine.matched,
            asked_profile=plan.profile is not None,
            origin=machine.origin,
            ranks=self.ranks,
            libraries=self.libraries,
            options={
                "pairs": [[machine.label(gpu) for gpu in pair] for pair in request.pairs],
                "sizes": sorted({each.size_bytes for each in request.series}),
                "warmup": request.method.warmup,
                "samples": request.method.samples,
                "repeats": request.method.repeats,
                "sample_seconds": request.method.sample_seconds,
                "as": plan.like,
                **_of_managed(request),
                "check": request.check,
                "strict": plan.strict,
                "evidence": plan.evidence.value,
                "gpus": {machine.label(gpu): machine.describe(gpu) for gpu in range(len(machine.gpus))},
                **({"timeout_s": plan.timeout_s} if machine.is_ranks and plan.source.text is None else {}),
            },
        )

    @contextmanager
    def recorded_bench(self, metadata: Metadata) -> Iterator[Bench]:
        """The bench, which writes down what it measures where that was asked for."""
        directory, machine = self.plan.recording.record, self.machine
        if directory is None:
            yield self.bench
            return
        recorded.write_recording(directory, self.machines.snapshots, machine.processes)
        with recorded.recording_samples(directory, FILE) as write:
            write(
                RecordedP2p(
                    schema_version=VERSION,
                    origin=machine.origin,
                    request=self.request,
                    hosts=tuple(metadata.hosts),
                    gpus=() if machine.is_ranks else tuple(machine.gpus),
                    ranks=tuple(self.ranks),
                    unreachable=tuple(sorted(machine.unreachable)),
                    like=self.plan.like,
                    strict=self.plan.strict,
                    libraries=self.libraries,
                    environment=metadata.environment,
                )
            )
            yield RecordingBench(self.bench, write)


def _of_managed(request: P2pRequest) -> dict[str, Any]:
    """Options of a run with managed memory, and what CUDA says of it."""
    if not request.managed_bytes:
        return {}
    return {"memory": "managed", "managed": [asdict(each) for each in request.managed]}
