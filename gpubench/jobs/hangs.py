"""Query NCCL's RAS about running jobs repeatedly, and find the rank that the others wait for."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gpubench.errors import CouldNotMeasureError, UsageError, unwritable_output
from gpubench.formats.delivery import say
from gpubench.formats.registry import TABLE
from gpubench.jobs.metadata import build_metadata
from gpubench.jobs.plans import WatchPlan
from gpubench.jobs.runner import presenting
from gpubench.jobs.sources import Simulated
from gpubench.jobs.watch import NAME, Interrupts
from gpubench.measure.explain.hangs import RasCourse
from gpubench.measure.explain.report import WATCHED_SECTIONS as SECTIONS
from gpubench.measure.explain.report import report_on_hangs
from gpubench.model.facts.environment import detect_launcher, refuse_several_ranks
from gpubench.model.paths.hang import RasCommunicator
from gpubench.model.terms.verdict import Origin
from gpubench.ranks.ras import ADDRESS, AS_JSON, ask_ras, ras_address
from gpubench.readers import limits
from gpubench.readers.hangs import is_ras_answer, read_ras_answer
from gpubench.simulated.traffic import ras_answer

if TYPE_CHECKING:
    from gpubench.model.results.report import Metadata

__all__ = ["SECTIONS", "run"]

_SECONDS_OF_A_LEG = 3
"""Timeout between two processes of a job, in seconds. RAS reports a process as silent after this time."""

_SECONDS_TO_ANSWER = 9.0


class NobodyListensError(CouldNotMeasureError):
    """No process of a job listens on the RAS port."""


def run(plan: WatchPlan, arguments: Sequence[str]) -> int:
    """Query until the time is up, all jobs have ended, or Ctrl-C is pressed; return the exit code.

    Raises GpubenchError if nothing or another program listens on the port, or an output cannot be written.
    """
    launch = detect_launcher(os.environ)
    refuse_several_ranks(launch, f"{NAME} --hang", "one process, because each process of a job knows all others")
    with presenting(plan.presentation, is_rank=launch is not None) as presenter:
        course = RasCourse()
        with suppress(KeyboardInterrupt), Interrupts() as interrupts:
            if isinstance(plan.source, Simulated):
                _simulate(plan, plan.source, course)
            else:
                _ask_again(plan, course, interrupts)
        presenter.begin(_metadata(plan, arguments, course), ())
        presenter.end(report_on_hangs(course.hangs(), is_judged=course.is_judged))
    return presenter.exit_code


def _ask_again(plan: WatchPlan, course: RasCourse, interrupts: Interrupts) -> None:
    from gpubench.formats.text.explain import status_line

    begun = time.monotonic()
    while True:
        asked = time.monotonic()
        try:
            answer = ask(plan.recording.record, course.asked + 1)
        except NobodyListensError:
            if not course.asked:
                raise
            say(f"{asked - begun:8.1f} s  no answer any more, because the jobs have ended")
            return
        course.add(answer, time.time())
        if plan.presentation.format is TABLE:
            say(status_line(asked - begun, None if answer is None else len(answer), course.hangs()))
        left = float("inf") if plan.seconds is None else begun + plan.seconds - time.monotonic()
        if left <= 0 or interrupts.asked:
            return
        time.sleep(max(min(asked + plan.interval_s - time.monotonic(), left), 0.0))


def _simulate(plan: WatchPlan, source: Simulated, course: RasCourse) -> None:
    """Add simulated RAS answers without waiting in between. There are at least two, because a hang shows only in
    the second answer.
    """
    from gpubench.formats.text.explain import status_line

    nodes = source.machines().snapshots
    most = 1 if plan.seconds is None else max(1, int(plan.seconds / plan.interval_s))
    begun = time.time() - most * plan.interval_s
    for number in range(most + 1):
        seconds = number * plan.interval_s
        answer = ras_answer(nodes, source.simulation.faults, number)
        course.add(answer, begun + seconds)
        if plan.presentation.format is TABLE:
            say(status_line(seconds, len(answer), course.hangs()))


def ask(
    record: Path | None, number: int, environment: Mapping[str, str] = os.environ
) -> tuple[RasCommunicator, ...] | None:
    """Query RAS once. Return the communicators in its answer, or None if no process answers in time.

    Raises NobodyListensError if the port is closed, and UsageError if another program answers.
    """
    data = ask_ras(
        _SECONDS_TO_ANSWER,
        environment,
        question=AS_JSON,
        leg_seconds=_SECONDS_OF_A_LEG,
        most_bytes=limits.MOST_DUMP_BYTES,
    )
    if data is None:
        raise NobodyListensError(
            f"no process listens on {ras_address(environment)}, the port of NCCL's RAS",
            expected="a running job with NCCL 2.24 or newer, on this host and in this network namespace",
            reason=f"no job runs here, NCCL_RAS_ENABLE=0, or the job has another {ADDRESS}",
            next_step=f"{ADDRESS}=HOST:PORT gpubench {NAME} --hang",
            comment="If the job runs in a container, run the command in that container.",
        )
    if not data:
        return None
    name = f"the answer from {ras_address(environment)}"
    if not is_ras_answer(data):
        raise UsageError(
            f"{name} is not from NCCL's RAS: {data[:60].decode(errors='replace')!r}",
            expected=f"the same {ADDRESS} as in the job",
            reason="another program listens there",
        )
    if record is not None:
        path = record / f"ras-{number:05}"
        try:
            record.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError as error:
            raise unwritable_output(path, error) from error
    try:
        return read_ras_answer(data, name)
    except UsageError:  # The timeout cut off the JSON
        return None


def _metadata(plan: WatchPlan, arguments: Sequence[str], course: RasCourse) -> "Metadata":
    simulation = plan.source.simulation if isinstance(plan.source, Simulated) else None
    hosts = dict.fromkeys(
        rank.host for communicator in course.communicators for rank in communicator.ranks if rank.host
    )
    return build_metadata(
        arguments,
        NAME,
        origin=Origin.MEASURED if simulation is None else Origin.SIMULATED,
        hosts=list(hosts) or ["unknown"],
        options={
            "strict": plan.strict,
            "hang": True,
            "interval_s": float(plan.interval_s),  # msgspec cannot write the type TypedSeconds
            "seconds": None if plan.seconds is None else float(plan.seconds),
            "answers": course.asked,
            "communicators": len(course.communicators),
            "ranks": max((communicator.size or 0 for communicator in course.communicators), default=0),
        },
        source=f"NCCL's RAS on {ras_address()}" if simulation is None else simulation.source,
    )
