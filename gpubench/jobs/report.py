"""Show a stored result again, or judge results of another program like gpubench's own."""

import dataclasses
import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice, permutations
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpubench.collectives.registry import SUMMARIES, collective_named
from gpubench.conditions.circumstances import Circumstances
from gpubench.errors import (
    COULD_NOT_MEASURE,
    DONE,
    JUDGED_AND_FAILED,
    WRONG_USAGE,
    CouldNotMeasureError,
    IncompleteResultError,
    UsageError,
)
from gpubench.formats.delivery import tell
from gpubench.formats.registry import QUIET, SUMMARY, TABLE, Presentation
from gpubench.jobs.collective.metadata import speed_judge_maker
from gpubench.jobs.failed_runs import failures_in, failures_without_rows, show_failures
from gpubench.jobs.metadata import build_metadata
from gpubench.jobs.plans import Nics, ReportPlan
from gpubench.jobs.report_copies import ReadCopies, judge_copies, judge_transfer_file
from gpubench.jobs.runner import presenting
from gpubench.measure.collective import judged_rows
from gpubench.measure.collective.report import SpeedJudge
from gpubench.measure.transfers import ENGINES, TransferMachine
from gpubench.model.facts.snapshot import NicKind
from gpubench.model.paths.nodes import build_topologies
from gpubench.model.paths.wiring import GpuPlace, Wiring
from gpubench.model.profiles.profile import NicKindOfMachine, Profile
from gpubench.model.results.report import CollectiveRow, Metadata, make_record
from gpubench.model.results.result_file import ResultFile, RunPlace, UserFacts
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.settings import ALGORITHM_VARIABLE, Algorithm
from gpubench.model.terms.units import plural, shorten
from gpubench.model.terms.verdict import Finding, Origin, Verdict
from gpubench.profiles import find_domain, match_whole_machine, user_profiles
from gpubench.readers.registry import parse_all_results
from gpubench.readers.results.gpubench_json import EXPECTED, StoredRun
from gpubench.simulated.machine import MOST_NODES, SimulatedMachine, snapshots

SECTIONS = ("rows", "evidence", "fallback", "causes", "findings")

_ALGORITHMS = tuple(algorithm.upper() for algorithm in Algorithm)
_USUAL, _USUAL_OF_AMD, _GPUS_A_NODE = "hgx-h100-8", "mi300x-8", 8
"""The example machines in messages."""


def _replace_nics(profile: Profile, nics: Nics) -> Profile:
    """Return the profile with these NICs, spread evenly over the locations of its GPUs."""
    if [nic.rate_gbit_s for nic in profile.nic] == [nics.rate_gbit_s] * nics.count and not nics.is_ethernet:
        return profile
    places: list[str | None] = [*dict.fromkeys(profile.gpu.places)] or [None]
    return replace(
        profile,
        nic=tuple(
            NicKindOfMachine(
                name=f"nic{number}",
                kind=NicKind.ETHERNET if nics.is_ethernet else NicKind.INFINIBAND,
                rate_gbit_s=nics.rate_gbit_s,
                place=places[number * max(len(places), nics.count) // nics.count % len(places)],
            )
            for number in range(nics.count)
        ),
    )


class JudgedTable(Struct, frozen=True):
    """Rows of one collective on one number of ranks, and the machine that they ran on, or None if it is unknown.

    `ranks` are the ranks that the file names. `located` are the same ranks with the PCI addresses of their GPUs on the
    machine.
    """

    rows: Sequence[CollectiveRow]
    machine: SimulatedMachine | None
    ranks: tuple[RankIdentity, ...]
    located: tuple[RankIdentity, ...]
    circumstances: Circumstances | None

    @property
    def wiring(self) -> Wiring | None:
        return None if self.circumstances is None else self.circumstances.wiring

    def speed_judge(self, file: ResultFile, assumed: str) -> SpeedJudge:
        """Return the judge that gpubench uses for its own measured rows."""
        collective = collective_named(self.rows[0].collective)
        nccl = file.circumstances.libraries.get("NCCL")
        made = speed_judge_maker(collective, self.located, nccl, None)(self.circumstances)
        first = self.rows[0]
        table = first.collective, first.ranks, first.nodes
        launches = max((run.launches for run in file.runs if run.table == table), default=1)
        return SpeedJudge(replace(made.expected, assumed=assumed, launches=launches), made.hosts)


def judge_results(plan: ReportPlan, text: str, arguments: Sequence[str]) -> int:
    """Judge the results in a file, show them, and return the exit code.

    Raises UsageError if the file is unreadable, contradicts the options, or does not name the collective or the
    machine.
    """
    failures = failures_in(text)
    try:
        files, errors = parse_all_results(text, plan.name, _user_facts(plan))
    except UsageError as error:
        failures = failures_in(text, has_rows=False)
        if any(failure.severity is Verdict.FAIL for failure in failures):
            return show_failures(plan, failures, arguments)
        if isinstance(error, IncompleteResultError):
            raise _what_is_missing(plan, gpus=plan.machine is None and error.ranks, error=error) from None
        raise
    failures = failures_without_rows(text, failures)
    tables = [table for file in files for table in _split_tables(plan, file)]
    one_document = plan.presentation.format not in (TABLE, QUIET, SUMMARY) or plan.presentation.outputs
    if not errors and (len(tables) == 1 or one_document):
        if len(files) > 1:
            raise UsageError(
                f"{plan.name} has {len(tables)} tables: {shorten([table.kind for table in tables])}",
                expected="one table for --output, or for a format other than table",
                reason="the file contains several runs",
                next_step=f"gpubench report {plan.name}",
            )
        return _judge_file(plan, tables[0] if len(tables) == 1 else files[0], failures, arguments)
    codes = [error.exit_code for error in errors]
    for number, table in enumerate(tables):
        try:
            codes.append(_judge_file(plan, table, failures if number == 0 else (), arguments))
        except UsageError as error:
            errors.append(error)
            codes.append(error.exit_code)
    for unread in errors:
        tell(unread, sys.stderr)
    return min(codes, key=_GRAVEST_FIRST.index)


_GRAVEST_FIRST = JUDGED_AND_FAILED, COULD_NOT_MEASURE, WRONG_USAGE, DONE


def _split_tables(plan: ReportPlan, file: ResultFile) -> list[ResultFile]:
    """Return a file for each table of a file: one collective, on one machine. `--collective` selects among them."""
    groups: dict[object, tuple[list[CollectiveRow], list[RunPlace]]] = {}
    if not file.rows or file.pairs or sum(run.rows for run in file.runs) != len(file.rows):
        return [file]
    rows = iter(file.rows)
    for run in file.runs:
        own = list(islice(rows, run.rows))
        if plan.collective in (None, run.table[0]):
            found = groups.setdefault((run.table, run.machine), ([], []))
            found[0].extend(own)
            found[1].append(run)
    if len(groups) <= 1:
        return [file]
    return [
        replace(
            file,
            rows=tuple(own),
            runs=tuple(runs),
            left_out=file.left_out if number == 0 else (),
            circumstances=replace(
                file.circumstances,
                hosts=runs[0].machine[0],
                gpus=runs[0].machine[1],
                wrong_elements=sum(run.wrong_elements or 0 for run in runs) or None,
            ),
        )
        for number, (own, runs) in enumerate(groups.values())
    ]


def _judge_file(plan: ReportPlan, file: ResultFile, failures: Sequence[Finding], arguments: Sequence[str]) -> int:
    if file.pairs and not (file.rows or file.latencies):
        return _run_copies(plan, file, failures, arguments)
    rows = _rows_of_one_table(plan, file)
    judged_rows.check_figures(rows, file.name)
    table = _judged_table(plan, file, rows)
    speed = table.speed_judge(file, _assumed_network(plan, table))
    wiring, collective = table.wiring, speed.expected.collective
    limit_of = None if wiring is None else judged_rows.limits(collective, wiring)
    if limit_of is not None:
        judged_rows.check_limits(rows, limit_of, file.name)
    with presenting(plan.presentation) as presenter:
        metadata = _metadata_of_results(plan, file, table, speed, arguments)
        presenter.begin(metadata)
        report = judged_rows.judge_rows(file, rows, collective, table.ranks, limit_of, speed, presenter)
        presenter.end(report.add_findings([*failures, *_absent_gpus(plan, rows[0].ranks // rows[0].nodes)]))
    return presenter.exit_code


def _absent_gpus(plan: ReportPlan, present: int) -> list[Finding]:
    machine = plan.machine
    if machine is None:
        return []
    name, _, nodes = str(machine).partition("*")
    part = f"{name.partition('/')[0]}/{present}" + (f"*{nodes}" if nodes else "")
    command = f"gpubench report {plan.name} --machine {shlex.quote(part)}, which judges them as a part of the machine"
    return judged_rows.absent_gpus(str(machine), present, machine.profile.match.visible, command)


def _user_facts(plan: ReportPlan) -> UserFacts:
    machine = plan.machine
    if machine is None:
        return UserFacts(collective=plan.collective)
    return UserFacts(
        collective=plan.collective, ranks=machine.nodes * machine.profile.match.visible, nodes=machine.nodes
    )


def _run_copies(plan: ReportPlan, file: ResultFile, failures: Sequence[Finding], arguments: Sequence[str]) -> int:
    twice = [run for run in file.runs if [run.table for run in file.runs].count(run.table) > 1]
    if twice:
        raise _several_runs_error(file, [run for run in twice if run.table == twice[0].table])
    if any(row.engine in ENGINES for row in file.pairs):
        return judge_transfer_file(plan, file, _machine_of_transfers(plan), failures, arguments)
    copies, models = ReadCopies.of(file), file.circumstances.gpus
    if plan.machine is None and not models:
        raise _what_is_missing(plan, gpus=True)
    machine = plan.machine or _machine_of(models, len(copies.names), 1)
    _check_machine(plan, len(copies.names), 1, models, "GPU")
    absent = _absent_gpus(plan, len(copies.names)) or judged_rows.absent_gpus(file.name, len(copies.names), len(models))
    others = (*failures, *judged_rows.left_out_findings(file), *absent, *copies.incomplete())
    return judge_copies(plan, file, copies, machine, others, arguments)


def _machine_of_transfers(plan: ReportPlan) -> TransferMachine:
    """Return what --machine and --nics say about the ends of a transfer: one NIC between nodes, or a node's GPUs."""
    machine = plan.machine
    rates = {nic.rate_gbit_s for nic in machine.profile.nic} if machine is not None else set()
    rate = plan.nics.rate_gbit_s if plan.nics is not None else rates.pop() if len(rates) == 1 else None
    if machine is None or machine.nodes > 1 or plan.nics is not None:
        return TransferMachine(nic_gb_s=rate / 8 if rate else None)
    node = build_topologies(snapshots(machine))[0]
    wiring = Wiring([GpuPlace(node.snapshot.host, 0, gpu.bus_id) for gpu in node.gpus], {0: node})
    pairs = list(permutations(range(len(node.gpus)), 2))
    alike = len({wiring.limit(pair).gb_s for pair in pairs}) == 1 and all(map(wiring.outruns_host, pairs))
    missing = "" if alike else "bandwidths are comparable only between GPUs with the same NVLinks"
    return TransferMachine(nic_gb_s=rate / 8 if rate else None, wiring=wiring, missing=missing)


def _assumed_network(plan: ReportPlan, table: JudgedTable) -> str:
    """Return which network between nodes is assumed, or an empty text without an assumption. `--machine` implies
    NVLink between the nodes of a rack, but does not name NICs.
    """
    machine = table.machine
    if machine is None or (plan.machine is not None and machine.nodes <= machine.domain_nodes):
        return ""
    if plan.machine is None and machine.domain_nodes > 1:
        return judged_rows.DOMAIN_ASSUMED
    return "" if plan.nics is not None else judged_rows.NICS_ASSUMED


def _what_is_missing(
    plan: ReportPlan,
    *,
    gpus: bool,
    error: IncompleteResultError | None = None,
    ranks: int | None = None,
    example: str = _USUAL,
    models: Sequence[str] = (),
) -> UsageError:
    collectives = list(error.collectives) if error is not None and plan.collective is None else []
    models = models if error is None else error.models
    known = match_whole_machine(models[:1], _GPUS_A_NODE) if models else None
    usual, visible = (example, _GPUS_A_NODE) if known is None else (known.profile.name, known.profile.match.visible)
    missing = ["the number of nodes" if models else "the GPUs and the number of nodes"] if gpus else []
    missing += [f"the collective ({' or '.join(collectives)})"] if len(collectives) > 1 else []
    ranks = ranks if error is None else error.likely_ranks
    nodes, rest = divmod(ranks or visible, visible)
    machine = f"{usual}/{rest}" if not nodes else usual if nodes == 1 else f"{usual}*{nodes}"
    words = ["gpubench", "report", plan.name]
    words += ["--machine", machine] if gpus else []
    words += ["--collective", collectives[0]] if len(collectives) > 1 else []
    expected = ["--machine NAME*NODES, with the name of a profile (gpubench profiles list)"] if gpus else []
    expected += ["--collective NAME"] if len(collectives) > 1 else []
    tells = f". Its rows are those of {plural(ranks, 'rank')}" if ranks else ""
    return UsageError(
        f"{plan.name} does not contain {' or '.join(missing)}{tells}",
        expected=" and ".join(expected),
        reason=f"its lines have {shorten(models)}, but no hosts"
        if gpus and models
        else "the lines above the rows, with GPUs and hosts, were cut off or have no GPU model"
        if gpus
        else "the text lacks the command, and the lines of nccl-tests that name the collective",
        next_step=shlex.join(words),
        comment="Replace these values if something else ran.",
    )


def _rows_of_one_table(plan: ReportPlan, file: ResultFile) -> list[CollectiveRow]:
    """Return the rows of the collective that the options name, or of the only collective in the file.

    Raises UsageError if there are no rows, or if tables of several collectives or numbers of ranks remain.
    """
    rows = [*file.rows, *_latency_rows(plan, file)]
    tables = Counter((row.collective, row.ranks, row.nodes) for row in rows)
    wanted = [table for table in tables if plan.collective in (None, table[0])]
    if len(wanted) != 1:
        lines = {run.table: f" (line {run.line})" for run in reversed(file.runs)}
        held = " and ".join(
            f"{table[0]} on {plural(table[1], 'rank')}{lines.get(table, '') if wanted[1:] else ''}" for table in tables
        )
        held = held or "no row"
        names = list(dict.fromkeys(name for name, _, _ in wanted))
        raise UsageError(
            f"{file.name} has {held}" + (f", and none of {plan.collective}" if not wanted and rows else ""),
            expected="one table, for one collective and one number of ranks",
            reason="the file contains several runs",
            next_step=f"gpubench report {file.name} --collective {names[0]}" if len(names) > 1 else "one file per run",
        )
    runs = [run for run in file.runs if run.table == wanted[0]]
    if len({run.machine for run in runs}) > 1:
        raise _several_runs_error(file, runs)
    name, algorithm = wanted[0][0], (file.circumstances.environment or {}).get(ALGORITHM_VARIABLE, "").upper()
    if name not in SUMMARIES:
        raise UsageError(
            f"{file.name} is from {name}", expected=f"one of {', '.join(SUMMARIES)}", reason="only nccl-tests has it"
        )
    return [
        replace(row, algorithm=algorithm) if row.algorithm is None and algorithm in _ALGORITHMS else row
        for row in rows
        if (row.collective, row.ranks, row.nodes) == wanted[0]
    ]


def _several_runs_error(file: ResultFile, runs: Sequence[RunPlace]) -> UsageError:
    """Return the error for several runs that do not form one table. Their machines differ, or they repeat the same
    copies.
    """
    places = [f"line {run.line}" + (f" on {shorten(run.machine[0], 2)}" if run.machine[0] else "") for run in runs]
    later = [run.line for run in file.runs if run.line > runs[0].line]
    return UsageError(
        f"{file.name} has {len(runs)} runs of {runs[0].table[0]}: {shorten(places)}",
        expected="one run, or several runs on one machine",
        reason="the file contains several runs",
        next_step=f"gpubench report <(sed -n '1,{min(later) - 1}p' {shlex.quote(file.name)}) judges the first one",
    )


def _latency_rows(plan: ReportPlan, file: ResultFile) -> list[CollectiveRow]:
    if file.latencies and any(row.ranks is None or row.busbw_gb_s is None for row in file.latencies):
        raise _what_is_missing(plan, gpus=True)
    nodes = 1 if plan.machine is None else plan.machine.nodes
    return [
        make_record(
            CollectiveRow,
            row,
            nodes=nodes,
            count=row.size_bytes,
            graph=0,
            slowest_rank=None,
            algbw_gb_s=row.size_bytes / row.time_us / 1e3,
            verdict=None,
        )
        for row in file.latencies
    ]


def _judged_table(plan: ReportPlan, file: ResultFile, rows: Sequence[CollectiveRow]) -> JudgedTable:
    first, models, hosts = rows[0], file.circumstances.gpus, file.circumstances.hosts
    on_gpus = first.backend != "host"
    if plan.machine is None and not models and on_gpus:
        example, named = _USUAL_OF_AMD if first.backend == "rccl" else _USUAL, file.circumstances.models
        raise _what_is_missing(plan, gpus=True, ranks=first.ranks, example=example, models=named)
    per_node, rest = divmod(first.ranks, first.nodes)
    machine = None if rest or not on_gpus else plan.machine or _machine_of(models, per_node, first.nodes)
    _check_machine(plan, first.ranks, first.nodes, models or file.circumstances.models)
    if machine is not None and plan.nics is not None:
        machine = replace(machine, profile=_replace_nics(machine.profile, plan.nics))
    names = hosts if len(hosts) == first.nodes else [f"node{number}" for number in range(first.nodes)]
    gpus: Sequence[str | None] = models if len(models) == first.ranks else [None] * first.ranks
    if machine is not None and plan.machine is not None:
        gpus = [machine.profile.gpu.name] * first.ranks
    ranks = (
        tuple(
            RankIdentity(
                rank=rank,
                host=names[rank // per_node],
                node=rank // per_node,
                local_rank=rank % per_node,
                pid=0,
                gpu=gpu,
            )
            for rank, gpu in enumerate(gpus)
        )
        if not rest
        else ()
    )
    if machine is None:
        return JudgedTable(rows, None, ranks, ranks, None)
    nodes = dict(enumerate(build_topologies(snapshots(machine))))
    located = tuple(replace(rank, gpu_bus_id=nodes[rank.node].gpus[rank.local_rank].bus_id) for rank in ranks)
    return JudgedTable(rows, machine, ranks, located, Circumstances(wiring=Wiring(located, nodes)))


def _machine_of(models: Sequence[str], per_node: int, nodes: int) -> SimulatedMachine | None:
    """Return nodes with these GPUs, or None if no profile matches.

    With several nodes, assume as few NVLink domains as possible. Slower results then show that a node left its domain.
    """
    if len(set(models)) != 1 or nodes > MOST_NODES:
        return None
    domain = find_domain(models[:1]) if nodes > 1 else None
    if domain is not None and per_node == domain.match.visible:
        return SimulatedMachine(domain.split_into_domains(nodes), nodes)
    own = user_profiles(os.environ)
    found = match_whole_machine(models[:1], per_node, among=own) or match_whole_machine(models[:1], per_node)
    return None if found is None else SimulatedMachine(found.profile, nodes)


def _check_machine(plan: ReportPlan, count: int, nodes: int, models: Sequence[str], unit: str = "rank") -> None:
    """Raise UsageError if --machine has other GPUs or nodes than the file. `count` and `nodes` are the file's."""
    machine = plan.machine
    if machine is None:
        return
    profile, per_node = machine.profile, count // nodes
    known = match_whole_machine(sorted(set(models)), 1) if models else None
    if known is not None and not profile.match.covers(models):
        seen = f"{plan.name} names {', '.join(dict.fromkeys(models))}"
    elif machine.nodes != nodes or not 0 < per_node <= profile.match.visible:
        seen = f"{plan.name} has {plural(count, unit)}"
        seen += f" on {plural(nodes, 'node')}" if per_node else ""
    else:
        return
    needed = -(-count // (profile.match.visible * machine.domain_nodes))  # All nodes of a rack count as one
    raise UsageError(
        f"{seen}, but --machine {machine} has {plural(machine.nodes, 'node')} of {profile.match.visible} × "
        f"{profile.gpu.name}",
        expected="the machine of the table",
        reason="the file is from another run" if per_node else "the machine has more nodes than the run had ranks",
        next_step=f"gpubench report {shlex.quote(plan.name)}"
        + ("" if per_node else f" --machine '{profile.name}*{needed}'"),
        comment="" if per_node else "Replace this machine if another one ran.",
    )


def _metadata_of_results(
    plan: ReportPlan, file: ResultFile, table: JudgedTable, speed: SpeedJudge, arguments: Sequence[str]
) -> Metadata:
    known, rows = file.circumstances, table.rows
    profile = speed.expected.profile
    return build_metadata(
        arguments,
        rows[0].collective,
        collective=rows[0].collective,
        backend=rows[0].backend,
        origin=Origin.SIMULATED if Origin.SIMULATED in {row.origin for row in rows} else Origin.RECORDED,
        hosts=list(dict.fromkeys(rank.host for rank in table.ranks)) or ["unknown"],
        ranks=table.ranks,
        libraries=dict(known.libraries),
        environment=dict(known.environment or {}),
        options=_options(plan, file, rows),
        profile=None if table.machine is None or profile is None else {"name": profile.name, "sha256": profile.sha256},
        source=f"{file.name}, {file.kind}",
    )


def _options(plan: ReportPlan, file: ResultFile, rows: Sequence[CollectiveRow]) -> Mapping[str, Any]:
    """Return the options of the original run, derived from its rows and file, under the names that gpubench uses."""
    warmup = file.circumstances.options.get("warmup")
    return {
        "sizes": sorted({row.size_bytes for row in rows}),
        "dtypes": list(dict.fromkeys(row.dtype for row in rows)),
        "ops": list(dict.fromkeys(row.op for row in rows if row.op is not None)),
        "root": rows[0].root,
        "placements": list(dict.fromkeys(row.placement for row in rows)),
        "mode": rows[0].mode,
        "iters": rows[0].iterations,
        "warmup": None if warmup is None else int(warmup),
        "graph": rows[0].graph,
        **({} if any(row.p50_us is not None for row in rows) else {"percentiles": False}),
        "check": any(row.wrong is not None for row in rows),
        "allocator": None,
        "strict": plan.strict,
        "read_from": "; ".join((f"{file.name}: {file.kind}", *file.remarks)),
        "machine": None if plan.machine is None else str(plan.machine),
        "nics": None if plan.nics is None else str(plan.nics),
    }


def run(stored: StoredRun, name: str, presentation: Presentation) -> int:
    """Show a stored result and return the exit code of its run.

    Raises GpubenchError if the result cannot be shown or an output cannot be written. Also raises it if the run is
    incomplete but monitoring needs a verdict.
    """
    if presentation.exit_style is not None and not stored.report.complete:
        raise CouldNotMeasureError(f"{name}: the run was cut short, or has not ended")
    # Drop the default options of `report`, because they were not options of the stored run.
    shown = dataclasses.replace(presentation, defaults={}, defaults_file=None)
    try:
        with presenting(shown) as presenter:
            presenter.begin(stored.metadata, stored.columns)
            for row in stored.rows:
                presenter.row(row)
            presenter.end(stored.report)
        return presenter.exit_code
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UsageError(
            f"{name} cannot be displayed: {type(error).__name__}: {error}",
            expected=EXPECTED,
            reason="it was edited by hand, or an older gpubench wrote it without some of the values",
            next_step="run the same command again, with --output",
        ) from None
