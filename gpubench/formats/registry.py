"""The output formats. A new one is one file and one line here."""

from gpubench.formats.writer import Format

TABLE = Format("table", ".txt", "for people", "table:TableWriter")
CSV = Format("csv", ".csv", "one line a row, unknown values empty", "csv:CsvWriter")

FORMATS = (
    TABLE,
    CSV,
    Format("json", ".json", "one document: metadata, sections, findings, verdict", "json:JsonWriter"),
    Format("jsonl", ".jsonl", "one JSON object a line: metadata, rows, report", "jsonl:JsonLinesWriter"),
    Format("junit", ".xml", "a test case for everything that was judged, for CI", "junit:writer"),
    Format("prometheus", ".prom", "gauges for node_exporter's textfile collector", "prometheus:writer"),
    Format("markdown", ".md", "verdict, findings and figures for $GITHUB_STEP_SUMMARY", "markdown:writer"),
    Format("github", None, "annotations of GitHub Actions", "github:writer"),
    Format("html", ".html", "one page with curves and heat maps, light and dark, no network", "html:writer"),
)

DATED = Format("dated json", None, "a json of every run, in a folder", "dated:DatedWriter")
"""The format of an output that is a folder; it is none of FORMATS, since nobody asks for it by name."""

BASELINE = Format("baseline", None, "a json of this run under a name, once it is whole", "baseline:BaselineWriter")
"""The format of `--save-baseline`."""

NAGIOS = Format("nagios", None, "a Nagios plugin's line", "status_line:nagios_writer")
NPD = Format("npd", None, "a node-problem-detector plugin's message", "status_line:npd_writer")
"""The formats of `--exit-style`, for stdout."""

QUIET = Format("quiet", None, "findings and the last sentence", "text.quiet:QuietWriter")
"""The format of `--quiet` in the place of the table, for stdout."""

VETO = Format(
    "veto", None, "one line of shell that keeps programs off peer access that does not work", "text.veto:VetoWriter"
)
"""The format of `p2p --veto`, for stdout."""

SUMMARY = Format("summary", None, "the last sentence alone", "summary:writer")
"""The format of `--summary`, for stdout."""
