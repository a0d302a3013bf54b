"""The health of machines, for people: what was looked for, what does not pass, findings, verdict."""

from collections import Counter
from collections.abc import Sequence

from gpubench.formats.text.header import INDENT
from gpubench.formats.text.page import ReportView
from gpubench.model.results.report import Report
from gpubench.model.results.rows.checks import CHECKS_SECTION, VERDICTS_SECTION, CheckRow, VerdictRow
from gpubench.model.terms.units import compress_names, counted
from gpubench.model.terms.verdict import Verdict, gravity


class CheckView(ReportView):
    """Checks, devices that do not pass, findings, verdict."""

    def end(self, report: Report) -> None:
        """The whole; of a run that was cut short there is nothing but the verdict."""
        self._header()
        if report.sections:
            verdicts = report.rows(VERDICTS_SECTION, VerdictRow)
            self._checks(report.rows(CHECKS_SECTION, CheckRow))
            self._verdicts(verdicts)
            self._page.print("")
        self._page.outcome(report)

    def _header(self) -> None:
        metadata = self._metadata
        depth = metadata.options.get("depth")
        mode = f"  {depth}" if depth != "default" else ""
        origin = f"  {metadata.origin}" if metadata.origin != "measured" else ""
        hosts = compress_names(metadata.hosts)
        self._page.wrap(f"gpubench {metadata.gpubench_version}  check{mode}{origin}  {hosts}")
        profile = metadata.profile
        named = "none matches" if profile is None else f"{profile['name']} ({profile['sha256']})"
        note = f": {profile['note']}" if profile and profile.get("note") else ""
        self._page.wrap(f"{INDENT}profile {named}{note}")
        self._page.software(metadata)
        if metadata.source:
            self._page.wrap(f"{INDENT}{metadata.source}")
        self._page.print("")

    def _checks(self, rows: Sequence[CheckRow]) -> None:
        """Verdicts of checks; in one line those that pass, and those that were not looked at for one reason."""
        alike: dict[tuple[str, str | None], list[str]] = {}
        for row in rows:
            if row.verdict == Verdict.PASS or row.note:
                alike.setdefault((row.verdict, row.note), []).append(row.check)
        for (verdict, note), names in alike.items():
            if verdict == Verdict.PASS:
                told = f": {note}" if note else ""
                self._page.wrap(f"{'PASS':<13} {', '.join(names)}{told}", hanging=14)
        for row in rows:
            if row.verdict != Verdict.PASS and not row.note:
                found = counted(row.findings, "finding") + (", by design" if row.verdict == Verdict.SKIP else "")
                self._page.wrap(f"{row.verdict:<13} {row.check}: {found}", hanging=14)
        for (verdict, note), names in alike.items():
            if verdict != Verdict.PASS:
                self._page.wrap(f"{verdict:<13} {', '.join(names)}: not looked at: {note}", hanging=14)
        self._nodes_in_error(rows)

    def _nodes_in_error(self, rows: Sequence[CheckRow]) -> None:
        """The nodes that checks could not look at, while they judged others."""
        alike: dict[tuple[str, ...], list[str]] = {}
        for row in rows:
            if row.nodes_in_error and row.verdict != Verdict.ERROR:
                alike.setdefault(row.nodes_in_error, []).append(row.check)
        for hosts, names in alike.items():
            on = f"on {compress_names(hosts)}: {', '.join(names)}: not looked at there"
            self._page.wrap(f"{Verdict.ERROR:<13} {on}", hanging=14)

    def _verdicts(self, rows: Sequence[VerdictRow]) -> None:
        self._page.print("")
        for scope in ("node", "gpu", "nic", "link"):
            own = [row for row in rows if row.scope == scope]
            if not own:
                continue
            fare = Counter(row.verdict for row in own)
            fared = ", ".join(f"{fare[verdict]} {verdict}" for verdict in _BEST_FIRST if fare[verdict])
            self._page.print(f"{counted(len(own), _SCOPES[scope])}: {fared}")
            odd = [row for row in own if row.verdict not in (Verdict.PASS, Verdict.SKIP)]
            odd.sort(key=lambda row: gravity(row.verdict))
            shown = odd[:_MOST_LINKS] if scope == "link" and len(odd) > _MOST_LINKS + 1 else odd
            for row in shown:
                why = ", ".join(row.findings) or "its own figures"
                self._page.wrap(f"{INDENT}{row.verdict:<5} {row.subject}: {why}", hanging=8)
            if len(shown) < len(odd):
                cut = Counter(row.verdict for row in odd[len(shown) :])
                self._page.print(f"{INDENT}and {', '.join(f'{many} {verdict}' for verdict, many in cut.items())} more")


_MOST_LINKS = 4
"""Of those that do not pass: a GPU in trouble has fourteen."""

_BEST_FIRST = (Verdict.PASS, Verdict.SKIP, Verdict.WARN, Verdict.INCONCLUSIVE, Verdict.ERROR, Verdict.FAIL)
_SCOPES = {"node": "node", "gpu": "GPU", "nic": "NIC", "link": "link"}
