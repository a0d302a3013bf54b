"""Print the health of machines: the table of `gpubench check`, and the ten lines of `gpubench` without a command."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from gpubench.formats.layout import INDENT
from gpubench.formats.table import ReportView
from gpubench.model.facts.environment import MPS, performance_variables
from gpubench.model.facts.health import HIDDEN_GPUS
from gpubench.model.paths.p2p import is_large_copy
from gpubench.model.results.compare import HOST
from gpubench.model.results.figures import is_pinned
from gpubench.model.results.report import CheckRow, CollectiveRow, PairRow, Report, VerdictRow
from gpubench.model.results.topo import GpuRow, NicRow, NodeRow
from gpubench.model.terms.operation import Direction, Engine
from gpubench.model.terms.units import compress_names, format_memory, format_size, format_time, plural, shorten
from gpubench.model.terms.verdict import Finding, Verdict, gravity


class CheckView(ReportView):
    """Prints checks, devices that do not pass, findings and the verdict."""

    def end(self, report: Report) -> None:
        """Print all sections, or only the verdict if the run was cut short."""
        self._header()
        if report.sections:
            verdicts = report.rows(VerdictRow)
            self._checks(report.rows(CheckRow))
            self._verdicts(verdicts)
            self._page.print("")
        self._page.outcome(report)

    def _header(self) -> None:
        metadata = self._metadata
        depth = metadata.options.get("depth")
        mode = str(depth) if depth != "default" else ""
        self._page.heading(metadata, "check", mode, compress_names(metadata.hosts))
        profile = metadata.profile
        named = "none matches" if profile is None else f"{profile['name']} ({profile['sha256']})"
        note = f": {profile['note']}" if profile and profile.get("note") else ""
        if metadata.topology:  # Empty if no machine could be read
            self._page.wrap(f"{INDENT}profile {named}{note}")
        self._page.software(metadata)
        if metadata.source:
            self._page.wrap(f"{INDENT}{metadata.source}")
        self._page.print("")

    def _checks(self, rows: Sequence[CheckRow]) -> None:
        """Print the verdict of each check. Checks that passed, or were skipped for the same reason, share a line."""
        alike: dict[tuple[str, str | None], list[str]] = {}
        for row in rows:
            if row.verdict == Verdict.PASS or row.note:
                alike.setdefault((row.verdict, row.note), []).append(row.check)
        for (verdict, note), names in alike.items():
            if verdict == Verdict.PASS:
                reason = f": {note}" if note else ""
                self._page.wrap(f"{'PASS':<13} {', '.join(names)}{reason}", hanging=14)
        for row in rows:
            if row.verdict != Verdict.PASS and not row.note:
                found = plural(row.findings, "finding") + (", by design" if row.verdict == Verdict.SKIP else "")
                self._page.wrap(f"{row.verdict:<13} {row.check}: {found}", hanging=14)
        for (verdict, note), names in alike.items():
            if verdict != Verdict.PASS:
                self._page.wrap(f"{verdict:<13} {', '.join(names)}: not checked: {note}", hanging=14)
        self._nodes_in_error(rows)

    def _nodes_in_error(self, rows: Sequence[CheckRow]) -> None:
        """Print the nodes that a check could not examine, although it judged other nodes."""
        alike: dict[tuple[str, ...], list[str]] = {}
        for row in rows:
            if row.nodes_in_error and row.verdict != Verdict.ERROR:
                alike.setdefault(row.nodes_in_error, []).append(row.check)
        for hosts, names in alike.items():
            on = f"on {compress_names(hosts)}: {', '.join(names)}: not checked there"
            self._page.wrap(f"{Verdict.ERROR:<13} {on}", hanging=14)

    def _verdicts(self, rows: Sequence[VerdictRow]) -> None:
        self._page.print("")
        for scope in ("node", "gpu", "nic", "link"):
            own = [row for row in rows if row.scope == scope]
            if not own:
                continue
            counts = Counter(row.verdict for row in own)
            fared = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _BEST_FIRST if counts[verdict])
            self._page.print(f"{plural(len(own), _SCOPES[scope])}: {fared}")
            odd = [row for row in own if row.verdict not in (Verdict.PASS, Verdict.SKIP)]
            odd.sort(key=lambda row: gravity(row.verdict))
            shown = odd[:_MOST_LINKS] if scope == "link" and len(odd) > _MOST_LINKS + 1 else odd
            for row in shown:
                why = ", ".join(row.findings) or "its measurements"
                self._page.wrap(f"{INDENT}{row.verdict:<5} {row.subject}: {why}", hanging=8)
            if len(shown) < len(odd):
                cut = Counter(row.verdict for row in odd[len(shown) :])
                self._page.print(f"{INDENT}and {', '.join(f'{many} {verdict}' for verdict, many in cut.items())} more")


_MOST_LINKS = 4
"""Maximum number of bad links to list. A faulty GPU can have 18 of them."""

_BEST_FIRST = (Verdict.PASS, Verdict.SKIP, Verdict.WARN, Verdict.INCONCLUSIVE, Verdict.ERROR, Verdict.FAIL)
_SCOPES = {"node": "node", "gpu": "GPU", "nic": "NIC", "link": "link"}


_LABEL_WIDTH = 9
_MOST_FINDINGS = 2
_SMALL_BYTES = 2**16
"""Show the time instead of the bandwidth for messages below this size."""

_REMARKED_BELOW_PERCENT = 80
"""Add a remark if a small message passes with less than this percentage of the expected speed."""

_BAD = (Verdict.FAIL, Verdict.ERROR, Verdict.WARN, Verdict.INCONCLUSIVE)
_SCOPES_IN_BRIEF = {"gpu": "GPU", "nic": "NIC", "link": "link"}
_QUICK = "quick"


class BriefView(ReportView):
    """Prints the ten lines of `gpubench` without a command."""

    def end(self, report: Report) -> None:
        """Print all lines, or only the last one if the run was cut short."""
        metadata, page = self._metadata, self._page
        page.heading(metadata, compress_names(metadata.hosts))
        if report.sections:
            self._line("machine", "; ".join(_machine_lines(report, metadata.options.get(HIDDEN_GPUS))))
            for place in dict.fromkeys(filter(None, map(_place, report.rows(NodeRow)))):
                self._line("place", place)
            self._line("software", "; ".join(self._software(report)))
            settings = performance_variables(metadata.environment)
            if settings:
                self._line("settings", ", ".join(f"{name}={value}" for name, value in settings.items()))
            self._line("health", "; ".join(_health_words(report)), report.verdict if report.verdict in _BAD else None)
            for label, text, verdict in _speed_lines(report, quick=metadata.options.get("depth") == _QUICK):
                self._line(label, text, verdict)
            self._problems(report.findings)
            steps = list(_next_steps(metadata.options.get("depth"), report))
            wide = max(len(command) for command, _ in steps)
            for number, (command, what) in enumerate(steps):
                self._line("" if number else "next", f"{command:<{wide}}  {what}")
        page.closing(report)

    def _software(self, report: Report) -> Iterator[str]:
        metadata, nodes = self._metadata, report.rows(NodeRow)
        yield from dict.fromkeys(map(_driver, nodes))
        if MPS in metadata.libraries:
            yield f"{MPS} {metadata.libraries[MPS]}"
        yield from dict.fromkeys(f"Linux {row.kernel}" for row in nodes[:1] if row.kernel)
        if report.rows(GpuRow):
            yield f"profile {metadata.profile['name']}" if metadata.profile else "no profile of this machine"

    def _problems(self, findings: Sequence[Finding]) -> None:
        bad = [finding for finding in findings if finding.severity in _BAD]
        if not bad:
            self._line("problems", "none found")
        for finding in bad[:_MOST_FINDINGS]:
            self._line(f"{finding.severity}", f"{finding.id}: {finding.subject}: {finding.seen}", finding.severity)
            for number, command in enumerate(finding.commands):
                self._page.print(f"{'' if number else '  try':<{_LABEL_WIDTH}} {command}")
            if not finding.commands:
                self._line("  try", finding.comment)
        if len(bad) > _MOST_FINDINGS:
            self._line("", f"and {len(bad) - _MOST_FINDINGS} more: gpubench check")

    def _line(self, label: str, text: str, verdict: Verdict | None = None) -> None:
        self._page.labelled(f"{label:<{_LABEL_WIDTH}} ", text, verdict)


def _machine_lines(report: Report, hidden: object) -> Iterator[str]:
    nodes = report.rows(NodeRow)
    if len(nodes) > 1:
        yield plural(len(nodes), "node")
    gpus = report.rows(GpuRow)
    if not gpus:
        yield "no GPU"
    for (model, memory, links), number in Counter(map(_gpu, gpus)).items():
        total = f" of {len(gpus) + hidden}" if isinstance(hidden, int) else ""
        yield ", ".join(filter(None, (f"{number}{total} × {model}", memory, links)))
    if isinstance(hidden, int):
        yield f"CUDA_VISIBLE_DEVICES hides {hidden}"
    for text, number in Counter(map(_cpus, nodes)).items():
        yield text if number == len(nodes) else f"{plural(number, 'node')} with {text}"
    for rate, number in Counter(row.rate_gbit_s for row in report.rows(NicRow)).items():
        yield plural(number, "NIC") + ("" if rate is None else f" of {rate:g} Gb/s")


def _gpu(row: GpuRow) -> tuple[str, str, str]:
    memory = "" if row.memory_bytes is None else format_memory(row.memory_bytes)
    hidden = "NVLinks hidden by the driver" if row.unknown.get("nvlinks") else ""
    links = hidden or ("" if row.nvlinks_active is None else "no NVLink")
    if row.nvlinks:
        ends = shorten(row.nvlink_peers) if len(row.nvlink_peers) == 1 else ""
        total = "" if row.nvlinks_active == row.nvlinks else f" of {row.nvlinks}"
        links = f"{row.nvlinks_active}{total} NVLinks" + (f" to {ends}" if ends not in ("", "unknown") else "")
    return (row.name or "GPU of unknown model") if not row.lost else "GPU that is lost", memory, links


def _place(row: NodeRow) -> str:
    return f"{row.place}: {row.product}" if row.place and row.product else row.place or ""


def _driver(row: NodeRow) -> str:
    if row.driver_absent:
        return f"no driver: {row.driver_absent}"
    cuda = f" (CUDA {row.cuda})" if row.cuda else ""
    return f"driver {row.driver}{cuda}" if row.driver else "a driver that reports no version"


def _cpus(row: NodeRow) -> str:
    sockets = "" if not row.sockets else f"{plural(row.sockets, 'socket')}, "
    return f"{sockets}{'?' if row.cpus is None else row.cpus} CPUs"


def _health_words(report: Report) -> Iterator[str]:
    verdicts = report.rows(VerdictRow)
    for scope, name in _SCOPES_IN_BRIEF.items():
        found = Counter(row.verdict for row in verdicts if row.scope == scope)
        passed_first = sorted(found.items(), key=lambda item: item[0] != Verdict.PASS)
        if found:
            counts = ", ".join(f"{number} {verdict}" for verdict, number in passed_first)
            yield f"{plural(found.total(), name)}: {counts}"
    checks = Counter(row.verdict for row in report.rows(CheckRow))
    skipped = f"{checks[Verdict.SKIP]} skipped" + ("" if report.rows(GpuRow) else " (no GPU)")
    failed = ", ".join(f"{checks[verdict]} {verdict}" for verdict in _BAD if checks[verdict])
    passed = f"{plural(checks[Verdict.PASS], 'check')} passed"
    yield ", ".join(filter(None, (passed, failed, skipped if checks[Verdict.SKIP] else "")))


def _speed_lines(report: Report, *, quick: bool) -> Iterator[tuple[str, str, Verdict | None]]:
    gpu_copies, host_copies = _select_copies(report.rows(PairRow))
    if gpu_copies:
        verdicts = [row.verdict for row in report.rows(CheckRow) if row.check == "paths"]
        yield "copies", _copies(gpu_copies, verdicts), _worst_verdict(gpu_copies)
    elif host_copies:
        slowest = _slowest_copy(host_copies)
        where = f"{slowest.source} → {slowest.destination}, the slowest with host memory"
        yield "copies", f"{_speed_of_copy(slowest)}: {where}", _worst_verdict(host_copies)
    rows = report.rows(CollectiveRow)
    if rows:
        rates = ", ".join(_collective_speed(row) for row in sorted(rows, key=lambda row: -row.size_bytes))
        by = f"; {rows[0].ranks} CPU ranks, by MPI" if rows[0].backend == HOST else ""
        yield "allreduce", rates + by, _worst_verdict(rows)
    missing = [row.note for row in report.rows(CheckRow) if row.verdict == Verdict.ERROR and row.note]
    left_out = [row.note for row in report.rows(CheckRow) if row.check == "collective_bandwidth"]
    if quick:
        yield "speed", "not measured: --quick", None
    elif not rows and not missing and left_out and left_out[0]:
        yield "allreduce" if gpu_copies or host_copies else "speed", f"not measured: {left_out[0]}", None
    elif missing:
        yield "speed", f"not measured: {missing[-1]}", Verdict.ERROR


def _select_copies(rows: Iterable[PairRow]) -> tuple[list[PairRow], list[PairRow]]:
    """Return the large copies between GPUs by the copy engine, and the large copies to or from pinned host memory.

    Copies with peer access off are omitted unless they have a verdict, because the others are only baselines.
    """
    copied = [row for row in rows if row.bandwidth_gb_s is not None and is_large_copy(row.size_bytes)]
    host_copies = [row for row in copied if HOST in (row.source, row.destination) and row.source != row.destination]
    gpu_copies = [
        row
        for row in copied
        if HOST not in (row.source, row.destination)
        and (row.engine, row.direction) == (Engine.CE, Direction.WRITE)
        and (row.peer == "on" or row.verdict is not None)
    ]
    return gpu_copies, list(filter(is_pinned, host_copies))


def _copies(pairs: Sequence[PairRow], paths: Sequence[str]) -> str:
    slowest = _slowest_copy(pairs)
    where = f"the slowest of {plural(len(pairs), 'pair')}, {slowest.source} → {slowest.destination}"
    text = f"{_speed_of_copy(slowest)}: {where}; {slowest.path_class or 'path not known'}"
    staged = sum(row.peer != "on" for row in pairs)
    if staged:
        return f"{text}; {staged if staged < len(pairs) else 'all'} through host memory"
    return text + ("; all direct" if Verdict.PASS in paths else "")


def _slowest_copy(rows: Sequence[PairRow]) -> PairRow:
    """Return the slowest copy with a bad verdict. If there is none, return the slowest direct copy."""
    return min(rows, key=lambda row: (row.verdict not in _BAD, row.peer == "off", row.bandwidth_gb_s or 0.0))


def _speed_of_copy(row: PairRow) -> str:
    return f"{row.bandwidth_gb_s:.3g} GB/s{_expected_share(row.expected_gb_s, row.expected_percent)}"


def _collective_speed(row: CollectiveRow) -> str:
    size = format_size(row.size_bytes)
    if row.size_bytes >= _SMALL_BYTES:
        return f"{row.reached_gb_s:.3g} GB/s at {size}{_expected_share(row.expected_gb_s, row.expected_percent)}"
    expected = ""
    if row.expected_us is not None:
        # A small message may take longer than expected and still pass, because launch times differ between hosts.
        passes = row.verdict == Verdict.PASS and (row.expected_percent or 100.0) < _REMARKED_BELOW_PERCENT
        expected = f" ({format_time(row.expected_us)} expected{'; hosts can differ this much' if passes else ''})"
    return f"{format_time(row.time_us)} at {size}{expected}"


def _expected_share(expected: float | None, percent: float | None) -> str:
    if expected is None or percent is None:
        return " (no expected value)"
    return f" ({percent:.0f} % of {expected:.3g} expected)"


def _worst_verdict(rows: Sequence[PairRow | CollectiveRow]) -> Verdict | None:
    found = {row.verdict for row in rows}
    return next((verdict for verdict in _BAD if verdict in found), None)


def _next_steps(depth: object, report: Report) -> Iterator[tuple[str, str]]:
    gpus = report.rows(GpuRow)
    if not gpus:
        yield "gpubench --simulate hgx-h100-8", "the same report for a machine with GPUs"
        yield "gpubench allreduce", "MPI on CPU buffers, by size"
    elif depth == _QUICK:
        yield "gpubench", "the same with speed"
    elif report.verdict is Verdict.PASS:
        if len(gpus) > 1:
            yield "gpubench allreduce", "NCCL by size, from 1K to 4G"
        yield "gpubench check", "all types of copies, for a node gate"
    else:
        yield "gpubench check", "all findings with their causes"
