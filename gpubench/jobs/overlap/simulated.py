"""An overlap on a simulated machine: one process, no MPI, no GPU."""

from collections.abc import Sequence
from dataclasses import replace

from gpubench.hardware.simulated.overlap import OverlapModel
from gpubench.jobs.collective.overlap.metadata import overlap_metadata
from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.jobs.collective.simulated import modelled
from gpubench.jobs.listeners import ReportCollector
from gpubench.jobs.outputs import presenting
from gpubench.jobs.sources import Simulated
from gpubench.measure.collective.cases import JobFacts, cases
from gpubench.measure.collective.simulated import BACKEND
from gpubench.measure.overlap.rows import StepSample, overlap_cases, row_of, with_rows
from gpubench.model.paths.topology import Topology
from gpubench.model.results.rows.overlap import OverlapRow
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.overlap.asked import OverlapAsked


def run(plan: CollectivePlan, asked: OverlapAsked, source: Simulated, arguments: Sequence[str]) -> int:
    """Present the model's figures; the exit code. Raises as `jobs.collective.simulated.modelled`."""
    found = modelled(plan, source)
    request, simulation = replace(found.request, check=False), source.simulation
    model = OverlapModel(simulation.machine, simulation.faults, simulation.seed, found.per_node)
    job = JobFacts(BACKEND, Origin.SIMULATED, len(found.identities), len(found.nodes))
    with presenting(plan.presentation) as presenter:
        topology = Topology(found.nodes[0]).fingerprint()
        presenter.begin(
            overlap_metadata(found.described, plan.collective, asked, arguments, topology=topology),
            OverlapRow.columns(),
        )
        alone = ReportCollector()
        report = found.report(alone, plan, lambda _seconds: None)
        rows: list[OverlapRow] = []
        every_case = tuple(cases(request, len(found.identities)))
        for case in overlap_cases(every_case, plan.collective.name, asked):
            step = model.step(
                case.collective,
                case.size_bytes,
                case.ctas,
                case.partner,
                gemm_side=asked.gemm_side,
                count=asked.partner_count,
            )
            sample = StepSample(
                times=step.times,
                partner_count=step.partner_count,
                steps=step.steps,
                step_ci95_percent=step.step_ci95_percent,
            )
            rows.append(row_of(case, job, sample))
            presenter.row(rows[-1])
        presenter.end(with_rows(report, alone.collectives, rows))
    return presenter.exit_code
