"""`gpubench check`, `scan`, `watch`, `explain`, and `gpubench` without a command, which prints a check in ten lines."""

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

import typer

from gpubench.cli.exclusions import check_profile
from gpubench.cli.signature import HelpPage, check_presentation, job_runner, make_app
from gpubench.errors import UsageError, exclusive
from gpubench.jobs.plans import CheckPlan, ExplainPlan, RunPlan, ScanPlan, TypedSeconds, WatchPlan
from gpubench.model.terms.commands import BARE, Command

_CHECK = HelpPage(
    (
        ("Check this machine", "gpubench check"),
        (
            "Check two nodes of eight GPUs and keep the result",
            "mpirun -n 16 gpubench check --strict --output node-gate.json",
        ),
        ("Read facts only, e.g. in a Slurm prolog", "gpubench check --quick"),
        ("Start the ranks on these hosts", "gpubench check --hosts node1,node2"),
        ("Start the ranks in a Slurm allocation", "salloc -N 4 --gpus-per-node=8 gpubench check --slurm"),
        (
            "Try it without a GPU",
            "gpubench check --simulate 'hgx-h100-8*4' --fault node3.gpu5:nvlink=12",
        ),
    ),
    """
check finds the profile of the machine and reads its facts. It measures copies between all GPUs and with host memory,
and all-reduce at three sizes. It says what is wrong, on which part, and what to do. Every GPU and link is compared with
the profile and with its siblings. A part that could not be measured is an ERROR, which means neither healthy nor
faulty.

Under mpirun, with one rank per GPU, every node, GPU and link gets a verdict, and so does the cluster.
""",
)

_BARE = HelpPage(
    (
        ("Check this machine", "gpubench"),
        ("Read facts only, without a measurement", "gpubench --quick"),
        ("Keep the result, which gpubench report shows again", "gpubench -o today.json"),
        ("Try it without a GPU", "gpubench --simulate hgx-h100-8 --fault gpu5:nvlink=12"),
    ),
    """
The ten lines show the hardware, its health, its speed compared with the expected speed, the problems, and the next
command. Copies between all GPUs and all-reduce are measured at few sizes. gpubench check measures more. It also works
on a machine without GPUs.
""",
)

_SCAN = HelpPage(
    (
        (
            "Scan 64 nodes of eight GPUs, one rank per GPU, and keep every round",
            "mpirun -n 512 --map-by ppr:8:node --enable-recovery gpubench scan --rounds r/",
        ),
        (
            "Try it without a GPU, on 1024 nodes, one of which hangs",
            "gpubench scan --simulate 'hgx-h100-8*1024' --fault node9:hangs=round2",
        ),
        ("Judge the rounds that a job finished before it died", "gpubench scan --replay r/"),
        (
            "Try it without a GPU, on 128 nodes with a leaf that is slow on one rail",
            "gpubench scan --simulate 'hgx-h100-8*128' --fault leaf1.rail2:bandwidth=0.6",
        ),
    ),
    """
All nodes measure each other at the same time, on all rails. A scan of any size takes eleven rounds: three with random
pairs, three that pair suspects with healthy nodes, and five to confirm. A node that dies or hangs becomes a finding,
and the other nodes continue (docs/commands/scan.md lists the MPI options for this). Start one rank per GPU, or one
rank per node.
""",
)

_WATCH = HelpPage(
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
        ("Try the report of a hang without a GPU", "gpubench watch --hang --simulate hgx-h100-8 --fault gpu5:hang=yes"),
    ),
    """
watch reads the NVLink, PCIe and NIC counters and says which path the traffic takes: direct, host-staged, over sockets,
unbalanced, one GPU idle while its peers wait, loading data, idle, or unknown. It needs no log, no restart of the job
and no root. It cannot name the cause for processes of other users. Under mpirun or srun, nodes with the same result
share one line.

With --hang it asks NCCL's RAS instead (NCCL 2.24 or newer, on NCCL_RAS_ADDR or localhost:28028). A rank counts as
hung if two checks in a row find it at the same place behind the others, or get no answer from it. If the job
pauses for longer, for example for checkpoints, set a longer --interval. --record DIR keeps the answers, and gpubench
explain DIR reads them.
""",
)

_RUN = HelpPage(
    (
        (
            "Run a training job, and see which path its data took",
            "gpubench run -- torchrun --nproc-per-node 8 train.py",
        ),
        ("Name the rank that hangs, while the job runs", "gpubench run --hang 60s -- mpirun -n 8 python train.py"),
    ),
    """
run sets variables of NCCL, UCX and PyTorch's Flight Recorder. It keeps the values that you have set, except that
NCCL_DEBUG=WARN becomes INFO. If the logs exceed 512 MiB, their beginning and their newest part are kept. With a
--format for programs, the job writes to stderr. If the job fails, run exits with the job's exit code (128+n after
signal n), even with --exit-zero. Otherwise the report decides the exit code.
""",
)

_EXPLAIN = HelpPage(
    (
        ("Read the logs of gpubench run, or of NCCL_DEBUG=INFO", "gpubench explain logs/"),
        ("Write the paths as CSV", "gpubench explain logs/ --output paths.csv"),
        ("Read the output of all ranks in one file", "zcat slurm-4711.out.gz | gpubench explain -"),
        ("Find the rank that hangs, in PyTorch's dumps", "gpubench explain dumps/"),
        ("Fail if any path is in doubt", "gpubench explain logs/ --strict"),
        ("Show how NIXL or UCX moves a KV cache", "UCX_PROTO_INFO=y python serve.py 2>&1 | gpubench explain -"),
    ),
    """
A log may be one file per rank, or a single file for all ranks, as written by mpirun or srun. gzip files work too.

To name the rank that keeps the others waiting, it reads dumps of PyTorch's Flight Recorder (one file per rank, with
the rank in its name). It also reads answers of NCCL's RAS (ncclras -v), py-spy dumps in the same folder, and files of
NCCL's Inspector.

If a log is incomplete, a WARN says what is missing.
""",
)


def checked(plan: CheckPlan) -> CheckPlan:
    """Return the plan with its presentation checked. Raises UsageError for a missing or invalid profile."""
    from gpubench.jobs.check import SECTIONS

    check_profile(plan.profile)
    return check_presentation(plan, (*SECTIONS, *(("nodes", "gpus", "nics") if plan.brief else ())))


_run_check = job_runner("gpubench.jobs.check", checked)


def _run_briefly(plan: CheckPlan) -> int:
    return _run_check(replace(plan, brief=True))


def _checked_scan(plan: ScanPlan) -> ScanPlan:
    """Return the plan with its presentation checked.

    Raises: UsageError for --ranks-per-gpu with the host backend, whose ranks use no GPUs.
    """
    from gpubench.jobs.scan import SECTIONS

    if plan.ranks_per_gpu > 1 and plan.backend == "host":
        raise exclusive(("--backend host", "--ranks-per-gpu"), "only one of them, because the host backend uses no GPU")
    return check_presentation(plan, SECTIONS)


_MOST_SECONDS, _SIMULATED_SECONDS = 7 * 86400.0, 10.0


def _run_watch(plan: WatchPlan) -> int:
    if plan.hang:
        from gpubench.jobs import hangs

        _check_hang(plan)
        return hangs.run(check_presentation(plan, hangs.SECTIONS), sys.argv[1:])
    from gpubench.jobs import watch

    return watch.run(check_presentation(_checked_watch(plan), watch.SECTIONS), sys.argv[1:])


def _check_hang(plan: WatchPlan) -> None:
    """Raise UsageError for --fault keys that --hang cannot show, and for --record in a simulation."""
    if plan.simulation is not None and plan.recording.record is not None:
        raise exclusive(("--hang", "--record"), "only one of them, because a simulated hang cannot be recorded")
    _check_seconds(plan, 0.0)
    for fault in () if plan.simulation is None else plan.simulation.faults:
        if not fault.variables and not all(key == "hang" for key, _ in fault.settings):
            raise UsageError(
                f"--fault {fault} with --hang",
                expected="a fault that makes a rank hang, because NCCL's RAS shows nothing else",
                next_step="gpubench watch --hang --simulate hgx-h100-8 --fault gpu5:hang=yes",
            )


def _checked_watch(plan: WatchPlan) -> WatchPlan:
    """Return the plan. A simulated watch gets a time limit if it has none.

    Raises: UsageError for a simulated hang, because link counters do not show which rank hangs.
    """
    _check_seconds(plan, plan.interval_s)
    if plan.simulation is None:
        return plan
    hanging = next((fault for fault in plan.simulation.faults if fault.get("hang")), None)
    if hanging is not None:
        raise UsageError(
            f"--fault {hanging} without --hang",
            expected="--hang, because link counters do not show which rank hangs",
            next_step=f"gpubench watch --hang --simulate {shlex.quote(plan.simulation.text)} --fault {hanging}",
        )
    return plan if plan.seconds is not None else replace(plan, seconds=max(_SIMULATED_SECONDS, plan.interval_s))


def _check_seconds(plan: WatchPlan, least: float) -> None:
    if isinstance(plan.seconds, TypedSeconds):
        plan.seconds.check("--for", least, _MOST_SECONDS)


NOT_BARE = ("full", "kv", "hosts", "slurm", "ranks_per_gpu")
"""Options of `gpubench check` that `gpubench` without a command does not have."""

_APPS: Mapping[str, Callable[[Command], typer.Typer]] = {
    BARE.name: make_app(
        _BARE,
        CheckPlan,
        _run_briefly,
        without=NOT_BARE,
    ),
    "check": make_app(_CHECK, CheckPlan, _run_check),
    "scan": make_app(_SCAN, ScanPlan, job_runner("gpubench.jobs.scan", _checked_scan)),
    "watch": make_app(_WATCH, WatchPlan, _run_watch),
    "run": make_app(_RUN, RunPlan, job_runner("gpubench.jobs.run")),
    "explain": make_app(_EXPLAIN, ExplainPlan, job_runner("gpubench.jobs.explain")),
}


def app(command: Command) -> typer.Typer:
    return _APPS[command.name](command)
