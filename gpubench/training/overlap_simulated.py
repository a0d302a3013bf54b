"""Simulate a collective during computation."""

from functools import partial

from gpubench.jobs.collective.simulated import ModelledCollective, open_model
from gpubench.jobs.runner import Place, ReportCollector, Steps
from gpubench.jobs.sources import note_ignored_variables
from gpubench.measure.collective.cases import JobFacts, cases
from gpubench.measure.collective.recording import SIMULATED_BACKEND
from gpubench.model.paths.topology import Topology
from gpubench.model.results.overlap import OverlapRow
from gpubench.model.results.report import Report
from gpubench.model.terms.overlap import OVERLAP
from gpubench.model.terms.verdict import Origin
from gpubench.simulated.times import OverlapModel
from gpubench.training.overlap_options import OverlapPlan
from gpubench.training.overlap_steps import add_overlap_rows, overlap_metadata, overlap_row


def simulation_steps(plan: OverlapPlan) -> Steps[ModelledCollective]:
    return Steps(OVERLAP, open_model, partial(_measure, plan))


def _measure(plan: OverlapPlan, place: Place, found: ModelledCollective) -> Report:
    collective, presenter, simulation = place.plan.collective, place.presenter, found.simulation
    model = OverlapModel(simulation.machine, simulation.faults, simulation.seed, found.per_node)
    job = JobFacts(SIMULATED_BACKEND, Origin.SIMULATED, len(found.identities), len(found.nodes))
    note_ignored_variables(place.plan.source, presenter)
    topology = Topology(found.nodes[0]).fingerprint()
    metadata = overlap_metadata(plan, found.described, collective, place.arguments, topology=topology)
    presenter.begin(metadata, OverlapRow.columns())
    undisturbed = ReportCollector()
    report = found.report(undisturbed, place.plan, lambda *_: None)
    rows: list[OverlapRow] = []
    every_case = tuple(cases(found.request, len(found.identities)))
    for partner in plan.partners:
        for size in [case.size_bytes for case in every_case]:
            for ctas in plan.ctas:
                sample = model.step(plan.collective, size, ctas, partner, gemm_side=plan.gemm_side)
                rows.append(overlap_row(plan, size, partner, ctas, job, sample))
                presenter.row(rows[-1])
    return add_overlap_rows(report, undisturbed.collectives, rows)
