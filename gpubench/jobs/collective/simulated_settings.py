"""Settings of NCCL on a simulated machine: the times under each, and the settings that NCCL refuses."""

from gpubench.collectives.record import SweepRequest
from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.jobs.sources import Simulation
from gpubench.measure.collective.recording import SIMULATED_BACKEND
from gpubench.model.results.backends import RefusedRow
from gpubench.model.terms.settings import MAX_CTAS, NcclSetting
from gpubench.records import dataclass
from gpubench.simulated.settings import job_variables, known_effects
from gpubench.simulated.times import CollectiveTimes


@dataclass(frozen=True, slots=True)
class SimulatedSettings:
    """The times under each setting, by its name in rows, and the settings that NCCL refuses."""

    times: dict[str, CollectiveTimes]
    refused: tuple[RefusedRow, ...] = ()


def simulated_settings(
    plan: CollectivePlan, simulation: Simulation, request: SweepRequest, per_node: int
) -> SimulatedSettings:
    """The settings of a plan. Raises UsageError for a setting whose effect on this machine is not known."""
    plan.check_unset({name: value for each in simulation.faults for name, value in each.variables.items()})
    times, refused, machine = dict[str, CollectiveTimes](), list[RefusedRow](), simulation.machine
    for name in plan.names_of_settings(SIMULATED_BACKEND):
        faults = (*simulation.faults, *job_variables(_known_variables(name, plan, simulation), machine.nodes))
        found = CollectiveTimes(machine, faults, simulation.seed, root=request.root)
        try:
            found.seconds(request.collective.name, max(request.sizes), row=0, ranks_per_node=per_node)
        except CouldNotMeasureError as error:
            refused.append(
                RefusedRow(
                    collective=request.collective.name,
                    backend=SIMULATED_BACKEND,
                    setting=name,
                    dtype=None,
                    op=None,
                    size_bytes=None,
                    reason=str(error),
                )
            )
        else:
            times[name] = found
    return SimulatedSettings(times, tuple(refused))


def _known_variables(name: str, plan: CollectivePlan, simulation: Simulation) -> dict[str, str]:
    setting, machine = NcclSetting.of(name), simulation.machine
    variables = dict(setting.variables)
    if MAX_CTAS in setting.requests:
        variables["NCCL_MAX_CTAS"] = setting.requests[MAX_CTAS]
    known = known_effects(machine.profile, variables, machine.nodes)
    if not variables or known != variables or not setting.requests.keys() <= {MAX_CTAS}:
        raise UsageError(
            f"{' '.join(plan.compared_by)} with --simulate {simulation.text}: {name}",
            expected="a setting with a known effect: ring, tree and protocols on one node of H100s or H200s, and the "
            "variables of docs/faults.md",
            reason=f"how fast {machine.profile.name} is with {name} is not known",
            next_step="gpubench allreduce --algo ring,tree --proto ll,ll128,simple --simulate hgx-h100-8",
        )
    return variables
