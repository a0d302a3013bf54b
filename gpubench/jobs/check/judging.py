"""The end of every check: machines and measurements are recorded, judged and presented."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpubench.collectives.registry import collective_named
from gpubench.conditions.definition.circumstances import Facts
from gpubench.errors import no_gpu
from gpubench.formats.presenter import Presenter
from gpubench.hardware import recorded
from gpubench.jobs.check.plan import NAME, CheckPlan, Depth
from gpubench.jobs.machines import Machines, check_any_gpu
from gpubench.jobs.metadata import metadata_of
from gpubench.measure.check.documents import accounted, together
from gpubench.measure.check.health import judge
from gpubench.measure.collective.speed_judge import ExpectedTimes, SpeedJudge
from gpubench.model.facts.visible_gpus import HIDDEN_GPUS
from gpubench.model.paths.nodes import group
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.profile import Generic
from gpubench.model.results.measurements import QUICK, Measurements
from gpubench.model.results.report import CollectiveRow, Report
from gpubench.model.results.result_file import MODELS
from gpubench.model.results.topo.devices import device_sections
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.verdict import Verdict
from gpubench.profiles.matching import ProfileMatch
from gpubench.profiles.nodes import profile_of_gpus, profiles_for
from gpubench.readers.documents.json_lines import read_json_line

FILE = "check.jsonl"
"""The measurements of a check, in a recording."""


_OF_ANOTHER_COMMAND = "the recording is of another command than check"


def matches_of(plan: CheckPlan, machines: Machines) -> list[ProfileMatch | None]:
    """The profile of every node.

    Raises:
        CouldNotMeasureError: no node has a GPU, and the profile asked for is not that of a host.
        UsageError: a profile is not there, or broken.
    """
    given = machines.given()
    has_gpus = any(node.gpus or node.snapshot.failures for node in given.nodes)
    asked = Generic.HOST if plan.brief and not has_gpus and plan.profile is None else plan.profile
    matches = profiles_for(machines.nodes, os.environ, asked)
    is_host = any(each is not None and each.profile.match.generic is Generic.HOST for each in matches)
    if not has_gpus and not is_host:
        raise no_gpu(machines.why_no_gpu, for_what=NAME)
    check_any_gpu(given.nodes, plan.expected_gpus, NAME, machines.why_no_gpu)
    return matches


def deliver(
    plan: CheckPlan,
    arguments: Sequence[str],
    machines: Machines,
    matches: Sequence[ProfileMatch | None],
    measurements: Measurements,
    presenter: Presenter,
) -> int:
    """Record where asked, then judge the GPUs that processes were given, and present; the exit code."""
    if plan.recording.record is not None:
        recorded.write_recording(plan.recording.record, machines.snapshots, machines.processes)
        with recorded.recording_samples(plan.recording.record, FILE) as write:
            write(measurements)
    given = machines.given()
    nodes, hidden = given.nodes, machines.gpus - given.gpus
    measurements = accounted(measurements)
    profiles = [None if found is None else found.profile for found in matches]
    facts = Facts(
        nodes, group(nodes), machines.processes, profiles, measurements, plan.profile is not None, plan.expected_gpus
    )
    report = judge(facts)
    unmeasured = set(measurements.left_out.values()) == {_OF_ANOTHER_COMMAND} and plan.depth is not Depth.QUICK
    if unmeasured and report.verdict is Verdict.PASS:
        report = replace(report, verdict=Verdict.SKIP)
    if plan.brief:
        report = _with_machines(report, facts)
    metadata = metadata_of(
        arguments,
        NAME,
        machines=machines,
        matched=matches[0],
        asked_profile=plan.profile is not None,
        options={
            "depth": plan.depth.value,
            "strict": plan.strict,
            "timeout_s": plan.timeout_s,
            **({"brief": True} if plan.brief else {}),
            **({HIDDEN_GPUS: hidden} if hidden else {}),
            MODELS: sorted({gpu.name for node in nodes for gpu in node.gpus if gpu.name}),
        },
    )
    presenter.begin(metadata, ())
    presenter.end(report)
    return presenter.exit_code


def _with_machines(report: Report, facts: Facts) -> Report:
    """The report with what machines it is about; of one without any GPU nothing passes, since nothing was looked at."""
    no_gpu_anywhere = not any(node.gpus for node in facts.nodes)
    verdict = Verdict.SKIP if no_gpu_anywhere and report.verdict is Verdict.PASS else report.verdict
    return replace(report, verdict=verdict, sections={**report.sections, **device_sections(facts.nodes, facts.kinds)})


def recorded_measurements(directory: Path, node: Topology, asked: str | None) -> Measurements:
    """The measurements of a recorded check; of another command's recording nothing.

    `node` is the first, and `asked` the profile to judge by: recordings of before rows had what is expected of them get
    it now.

    Raises UsageError: the file cannot be read, or is none that a check wrote.
    """
    if not (directory / FILE).exists():
        return replace(QUICK, left_out=dict.fromkeys(QUICK.left_out, _OF_ANOTHER_COMMAND))
    lines = recorded.read_samples(directory, FILE, NAME)
    found = together([read_json_line(Measurements, line, where) for line, where in lines])
    return replace(
        found,
        pairs=tuple(replace(row, origin=_as_recorded(row.origin)) for row in found.pairs),
        collectives=tuple(
            replace(_with_expected(row, node, asked), origin=_as_recorded(row.origin)) for row in found.collectives
        ),
    )


def _with_expected(row: CollectiveRow, node: Topology, asked: str | None) -> CollectiveRow:
    if row.expected_us is not None or row.ranks % row.nodes:
        return row
    models = sorted({gpu.name for gpu in node.gpus if gpu.name})
    profile = profile_of_gpus(models, row.ranks // row.nodes, node, os.environ, asked)
    return SpeedJudge(ExpectedTimes(collective=collective_named(row.collective), profile=profile), ()).row(row)


def _as_recorded(origin: str) -> str:
    return Origin.RECORDED if origin == Origin.MEASURED else origin
