"""Judge rows that another program measured, such as nccl-tests."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import permutations

from msgspec.structs import replace

from gpubench.collectives.record import Collective
from gpubench.errors import UsageError
from gpubench.measure.collective.paths import add_limit
from gpubench.measure.collective.report import ALL_CORRECT, CORRUPTED, SpeedJudge, wrong_data, wrong_data_cure
from gpubench.measure.path_outcome import unwatched
from gpubench.model.paths.topology import Limit
from gpubench.model.paths.wiring import Wiring, assumed_limit, busbw_limit, internode_limit
from gpubench.model.results.report import CollectiveRow, Report
from gpubench.model.results.result_file import CPU_TIME, ResultFile, left_out_remark
from gpubench.model.terms import verdict
from gpubench.model.terms.operation import algbw_gb_s
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.units import MICROSECONDS_PER_SECOND, format_bandwidth, format_size, plural
from gpubench.ports.group import Listener

NICS_ASSUMED = "NICs assumed (set others with --nics)"

DOMAIN_ASSUMED = "NVLinks between the nodes assumed (set others with --machine)"

_NO_PATHS = "the file does not show which paths the data used"

_LIKELY = {
    "": "a slow NIC, or data through host memory or sockets",
    NICS_ASSUMED: "other NICs than assumed (set them with --nics), or a slow path",
    DOMAIN_ASSUMED: "NICs instead of NVLinks between the nodes",
}
"""The likely cause of slow rows. The key is the assumption about the machine, or empty."""

_INSIDE_A_NODE = "copies in host memory, lost links, or slow or busy GPUs"

_LOGGING = verdict.Cure.of(
    "export NCCL_DEBUG=INFO", comment="Run that job again with this variable, and pass its log to `gpubench explain`."
)

_MOST_OF_LIMIT = 2.5

_PRECISE_GB_S = 10.0  # From here on, two decimals give four digits, as many as nccl-tests prints for a time
# Rounding changes the ratio of algbw to size over time by less. A wrong unit changes it 8 or 1,000 times
_MOST_OFF = 2.0


def check_figures(rows: Sequence[CollectiveRow], name: str) -> None:
    """Raise UsageError if algbw differs much from size / time: a column was edited or has another unit."""
    row = max(rows, key=lambda row: row.size_bytes)
    computed = algbw_gb_s(row.size_bytes, row.time_us / MICROSECONDS_PER_SECOND)
    if (
        row.algbw_gb_s >= 1
        and CPU_TIME not in (row.note or "")
        and not 1 / _MOST_OFF < row.algbw_gb_s / computed < _MOST_OFF
    ):
        raise UsageError(
            f"{name}: {row.size_bytes} bytes in {row.time_us:g} µs are {format_bandwidth(computed, 4)}, but algbw "
            f"is {row.algbw_gb_s:g}",
            expected="bytes, µs and GB/s of 1e9 bytes, as nccl-tests prints them",
            reason="a column has another unit (ms, Gb/s, MB/s), or was moved or edited",
            next_step="use the output as the program printed it",
        )


FindLimit = Callable[[str | None], Limit]
"""Returns the busbw limit for an algorithm. None is an unknown algorithm."""


def check_limits(rows: Sequence[CollectiveRow], find_limit: FindLimit, name: str) -> None:
    """Raise UsageError if a busbw is over 2.5 times the limit. Switches that reduce data allow twice the limit."""
    row = max(rows, key=lambda row: row.reached_gb_s)
    limit = find_limit(row.algorithm).gb_s
    if limit and row.reached_gb_s > _MOST_OF_LIMIT * limit:
        raise UsageError(
            f"{name}: busbw is {format_bandwidth(row.reached_gb_s or 0.0, 4)} at {format_size(row.size_bytes)}, "
            f"but the links of this machine carry at most {format_bandwidth(limit, 4)}",
            expected="GB/s of 1e9 bytes, and the machine that produced the table",
            reason="the column has another unit (Gb/s), or the table is from another machine",
            next_step="set the machine with --machine and --nics",
        )


def judge_rows(
    file: ResultFile,
    rows: Sequence[CollectiveRow],
    collective: Collective,
    ranks: Sequence[RankIdentity],
    find_limit: FindLimit | None,
    speed: SpeedJudge,
    listener: Listener[CollectiveRow],
) -> Report:
    """Complete and judge the rows of a table, pass them to the listener, and return the report.

    Rows get a limit, an expected value and a verdict.
    """
    verdicts, wrong = [verdict.Verdict.SKIP], []
    factor = collective.busbw_factor(rows[0].ranks)
    exact = [_restore_digits(row, factor) for row in rows]
    if find_limit is not None:
        exact = [add_limit(row, find_limit(row.algorithm)) if row.limit_gb_s is None else row for row in exact]
    speed.note_tries([(replace(row, host_staged=None), 1) for row in exact])
    for row in exact:
        if row.wrong is not None:
            row = replace(row, verdict=verdict.Verdict.FAIL if row.wrong else verdict.Verdict.PASS)
        # Expect the speed of the direct path, because another finding reports host-staged paths.
        row = replace(speed.row(replace(row, host_staged=None)), host_staged=row.host_staged)
        listener.row(row)
        verdicts += [verdict.Verdict(row.verdict)] if row.verdict else []
        wrong += [(row, ())] if row.wrong else []
    if staged := [row for row in rows if row.host_staged]:
        found = list(speed.findings([_staging_finding(file.name, staged[0], ranks)], None))
    else:
        found = [_add_likely_cause(finding, speed, ranks) for finding in speed.findings((), None)]
    found += left_out_findings(file) or ([] if found else list(_unfinished(file)))
    total = file.circumstances.wrong_elements
    if wrong:
        found = [wrong_data(wrong, ranks), *found]
    elif total:
        seen = f"Out of bounds values: {total}, in the last lines of the run"
        subject = plural(len(ranks), "rank")
        cure = wrong_data_cure(f"gpubench {rows[0].command}")
        found = [
            verdict.Finding(verdict.WRONG_DATA, verdict.Verdict.FAIL, subject, seen, ALL_CORRECT, CORRUPTED, cure),
            *found,
        ]
    report = Report(
        verdict=verdict.worst_verdict([verdict.worst_row_verdict(verdicts), *(finding.severity for finding in found)]),
        complete=True,
        findings=tuple(found),
    )
    has_paths = any(row.transport for row in rows)
    return report if has_paths else unwatched(report, _NO_PATHS, verdict.Origin.RECORDED)


def _restore_digits(row: CollectiveRow, factor: float) -> CollectiveRow:
    """Recompute bandwidths from the time if they were printed with few digits.

    If the time was measured on the CPU, keep the printed bandwidths.
    """
    if row.algbw_gb_s >= _PRECISE_GB_S or CPU_TIME in (row.note or ""):
        return row
    algbw = algbw_gb_s(row.size_bytes, row.time_us / MICROSECONDS_PER_SECOND)
    return replace(row, algbw_gb_s=algbw, busbw_gb_s=algbw * factor)


def limits(collective: Collective, wiring: Wiring) -> FindLimit:
    """Return a cached function that finds the busbw limit of an algorithm on this machine."""

    @cache
    def find_limit(algorithm: str | None) -> Limit:
        joined = wiring.networks
        if joined is not None and joined[0].nodes > 1:
            return internode_limit(algorithm, collective, joined[0])
        if algorithm is None or collective.point_to_point:
            return assumed_limit(collective, wiring)
        return busbw_limit(algorithm, list(permutations(range(len(wiring.gpus)), 2)), wiring)

    return find_limit


def _add_likely_cause(found: verdict.Finding, speed: SpeedJudge, ranks: Sequence[RankIdentity]) -> verdict.Finding:
    likely = _LIKELY[speed.expected.assumed]
    if len({rank.host for rank in ranks}) == 1:
        likely = _INSIDE_A_NODE
    elif found.severity is verdict.Verdict.WARN and found.expected.endswith("assumed"):
        likely = "a different algorithm than assumed, or a slow NIC"
    return replace(found, cause=likely, cure=_LOGGING)


def _staging_finding(name: str, row: CollectiveRow, ranks: Sequence[RankIdentity]) -> verdict.Finding:
    return verdict.Finding(
        id=verdict.HOST_STAGED,
        severity=verdict.Verdict.FAIL,
        subject=plural(len(ranks), "rank"),
        seen=f"through host memory ({row.transport})",
        expected="GPUDirect RDMA between nodes, peer access inside a node",
        cause=f"data go through host memory ({row.transport})",
        cure=verdict.Cure.of(f"gpubench explain {name}"),
    )


def incomplete(subject: str, seen: str, expected: str, cause: str, cure: verdict.Cure) -> verdict.Finding:
    """Return the finding that rows or GPUs are missing in a result."""
    return verdict.Finding(
        id="incomplete-result",
        severity=verdict.Verdict.WARN,
        subject=subject,
        seen=seen,
        expected=expected,
        cause=cause,
        cure=cure,
    )


def left_out_findings(file: ResultFile) -> list[verdict.Finding]:
    """Return a finding if some rows of the file could not be read."""
    if not file.left_out:
        return []
    expected = "complete rows, with times and bandwidths above 0"
    cause = "the text was truncated or edited, or it has other output between its rows"
    cure = verdict.Cure.of(f"less -N {file.name}")
    return [incomplete(file.name, left_out_remark(file.left_out), expected, cause, cure)]


def _unfinished(file: ResultFile) -> Iterator[verdict.Finding]:
    if file.complete or not file.circumstances.hosts:
        return
    seen = "; ".join(file.remarks) or "the run did not finish"
    expected = f"the last line of {file.circumstances.tool}, # Out of bounds values"
    cause = "the run ended early, or the text is truncated"
    yield incomplete(file.name, seen, expected, cause, verdict.Cure.of(f"tail {file.name}"))


def absent_gpus(subject: str, present: int, visible: int, command: str = "") -> list[verdict.Finding]:
    """Return a finding if some of the machine's GPUs did not take part."""
    if present >= visible:
        return []
    seen = f"{present} of the {plural(visible, 'GPU')}{' of each node' if '*' in subject else ''}"
    cause = "a GPU is lost or hidden, the text is truncated, or only these GPUs took part"
    return [incomplete(subject, seen, "every GPU of the machine", cause, verdict.Cure.of(command or "nvidia-smi -L"))]
