"""`gpubench watch`: its help, what excludes what, and the run."""

import shlex
import sys
from dataclasses import replace

from gpubench.cli.options import PresentationOptions, check_replay
from gpubench.cli.signature import HelpPage, app_of
from gpubench.errors import UsageError, exclusive
from gpubench.jobs.plans import TypedSeconds, WatchPlan

HELP = HelpPage(
    (
        ("Watch all jobs of this machine, until q or Ctrl-C", "gpubench watch"),
        (
            "Fail if the traffic of the next job is host-staged",
            "gpubench watch --until-traffic --for 30s --strict",
        ),
        ("Watch one Slurm job and keep the result", "gpubench watch --job 4711 --for 1m --output watch.json"),
        ("Watch 16 nodes, one rank per node", "mpirun -n 16 --map-by ppr:1:node gpubench watch --for 30s"),
        ("Name the rank that keeps a job waiting", "gpubench watch --hang --for 30s --strict"),
        ("Try it without a GPU", "gpubench watch --simulate hgx-h200-4 --fault node0:traffic=staged"),
        ("See which answer a hang gets", "gpubench watch --hang --simulate hgx-h100-8 --fault gpu5:hang=yes"),
    ),
    """
watch reads the NVLink, PCIe and NIC counters and says which path the traffic takes: direct, host-staged, over sockets,
unbalanced, one GPU idle while its peers wait, loading data, idle, or unknown. It needs no log, no restart of the job
and no root; for processes of other users it cannot name the cause. Under mpirun or srun, equal nodes share one line.

With --hang it asks NCCL's RAS (NCCL 2.24, on NCCL_RAS_ADDR or localhost:28028) instead. A rank counts as hanging that
two answers in a row show in the same place, behind the others or silent; longer pauses, such as checkpoints, need a
longer --interval. --record DIR keeps the answers, and gpubench explain DIR reads them.
""",
)

_MOST_SECONDS, _SIMULATED_SECONDS = 7 * 86400.0, 10.0


def _run(plan: WatchPlan, shown: PresentationOptions) -> int:
    if plan.hang:
        from gpubench.jobs import hangs

        _check_hang(plan)
        return hangs.run(replace(plan, presentation=shown.parse(hangs.SECTIONS)), sys.argv[1:])
    from gpubench.jobs import watch

    plan = _checked(plan)
    return watch.run(replace(plan, presentation=shown.parse(watch.SECTIONS)), sys.argv[1:])


def _check_hang(plan: WatchPlan) -> None:
    """Raise UsageError for options that are about traffic, which --hang does not read."""
    beside: dict[str, object] = {
        "--until-traffic": plan.until_traffic,
        "--pid": plan.pid,
        "--job": plan.job,
        "--gpus": plan.gpus,
    }
    beside |= {"--replay": plan.recording.replay}
    beside |= {"--simulate with --record": plan.simulation and plan.recording.record}
    if others := [name for name, value in beside.items() if value]:
        raise exclusive(("--hang", *others), "--hang alone: it asks NCCL, and what it recorded explain reads")
    _check_seconds(plan, 0.0)
    for fault in () if plan.simulation is None else plan.simulation.faults:
        if not fault.variables and not all(key == "hang" for key, _ in fault.settings):
            raise UsageError(
                f"--fault {fault} with --hang",
                expected="a rank that hangs: NCCL's RAS shows nothing else",
                next_step="gpubench watch --hang --simulate hgx-h100-8 --fault gpu5:hang=yes",
            )


def _checked(plan: WatchPlan) -> WatchPlan:
    """The plan, which ends if its machine is simulated. Raises UsageError for options that exclude each other."""
    check_replay(
        plan.recording, {"--simulate": plan.simulation, "--record": plan.recording.record, "--gpus": plan.gpus}
    )
    _check_seconds(plan, plan.interval_s)
    if plan.simulation is None:
        return plan
    hanging = next((fault for fault in plan.simulation.faults if fault.get("hang")), None)
    if hanging is not None:
        raise UsageError(
            f"--fault {hanging} without --hang",
            expected="--hang with it: counters of links do not show which rank hangs",
            next_step=f"gpubench watch --hang --simulate {shlex.quote(plan.simulation.text)} --fault {hanging}",
        )
    if plan.gpus is not None:
        raise exclusive(("--simulate", "--gpus"), "one of them: all GPUs of a simulated machine are shown")
    return plan if plan.seconds is not None else replace(plan, seconds=max(_SIMULATED_SECONDS, plan.interval_s))


def _check_seconds(plan: WatchPlan, least: float) -> None:
    if isinstance(plan.seconds, TypedSeconds):
        plan.seconds.check("--for", least, _MOST_SECONDS)


app = app_of(HELP, WatchPlan, _run)
