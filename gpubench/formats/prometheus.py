"""Prometheus text for node_exporter's textfile collector, in base units (bytes, seconds).

Written once, at the end, and whole: the collector reads whenever it likes, and one bad line costs it the whole file.
No sample has a timestamp, which the collector refuses; `gpubench_last_run_timestamp_seconds` says how old all this is.
What a killed run leaves is the file of the run before, which grows old.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from gpubench.formats.json import DocumentRun, DocumentWriter
from gpubench.formats.registry import Presentation, Target
from gpubench.model.results.compare import HOST
from gpubench.model.results.ending import compute_exit_code
from gpubench.model.results.report import Metadata, PairRow, Report, Table, VerdictRow
from gpubench.model.terms.operation import HostMemory
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND, printable_line
from gpubench.model.terms.verdict import Verdict

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\""})
_PER_MICROSECOND = 1 / MICROSECONDS_PER_SECOND
_PER_CENT = 0.01
_OF_EXPECTED = "Speed over the expected one: 1 is as expected, less is slower."


class Metric(NamedTuple):
    """A gauge made from a column: its value times `scale`, with the row's labels."""

    name: str
    help: str
    column: str
    scale: float = 1.0


_WHICH_PAIR = (
    *("source", "destination", "source_node", "destination_node", "scope", "direction", "engine", "peer", "size_bytes"),
    "memory",
)
_WHICH_WAY = ("source_node", "destination_node", "scope", "direction", "engine", "peer", "size_bytes")
_OF_SLOWEST = ("bandwidth_gb_s", "expected_percent")
_BUILD = {"driver": "driver", "nccl": "NCCL", "mpi": "MPI"}
_MOST_SUBJECTS = 1000
"""A file has no more findings by subject; `gpubench_findings` counts all."""

_WHICH_ROW = (
    *("collective", "backend", "group", "ranks", "nodes", "size_bytes", "dtype", "op", "root", "placement", "mode"),
    *("graph", "setting"),
)

_METRICS: Mapping[str, tuple[Sequence[str], Sequence[Metric]]] = {
    "busbw_gb_s": (
        _WHICH_ROW,
        (
            Metric("collective_time_seconds", "Time of an operation, mean over ranks.", "time_us", _PER_MICROSECOND),
            Metric("collective_algbw_bytes_per_second", "Size over time.", "algbw_gb_s", BYTES_PER_GB),
            Metric("collective_busbw_bytes_per_second", "Bus bandwidth of nccl-tests.", "busbw_gb_s", BYTES_PER_GB),
            Metric("collective_limit_bytes_per_second", "What the links carry at most.", "limit_gb_s", BYTES_PER_GB),
            Metric("collective_expected_bytes_per_second", "Of a healthy machine.", "expected_gb_s", BYTES_PER_GB),
            Metric("collective_expected_seconds", "Of a healthy machine.", "expected_us", _PER_MICROSECOND),
            Metric("collective_expected_ratio", _OF_EXPECTED, "expected_percent", _PER_CENT),
            Metric("collective_wrong_elements", "Wrong elements over all ranks.", "wrong"),
            Metric("collective_host_staged", "1 where bytes went through host memory.", "host_staged"),
        ),
    ),
    "nvlink_bytes": (
        _WHICH_PAIR,
        (
            Metric("pair_bandwidth_bytes_per_second", "Copied from GPU to GPU.", "bandwidth_gb_s", BYTES_PER_GB),
            Metric("pair_latency_seconds", "Time of a copy.", "latency_us", _PER_MICROSECOND),
            Metric("pair_expected_bytes_per_second", "Of a healthy machine.", "expected_gb_s", BYTES_PER_GB),
            Metric("pair_expected_seconds", "Of a healthy machine.", "expected_us", _PER_MICROSECOND),
            Metric("pair_expected_ratio", _OF_EXPECTED, "expected_percent", _PER_CENT),
            Metric("pair_host_staged", "1 where a copy went through host memory.", "host_staged"),
        ),
    ),
    "slowest": (
        _WHICH_WAY,
        (
            Metric("slowest_pair_bandwidth_bytes_per_second", "Of the slowest pair.", "bandwidth_gb_s", BYTES_PER_GB),
            Metric("slowest_pair_expected_ratio", _OF_EXPECTED, "expected_percent", _PER_CENT),
        ),
    ),
    "nvlinks_active": (
        ("node", "gpu", "name", "uuid", "bus_id"),
        (
            Metric("gpu_nvlinks_active", "NVLinks that are up.", "nvlinks_active"),
            Metric("gpu_nvlinks", "NVLinks that the GPU has.", "nvlinks"),
            Metric("gpu_nvlink_errors", "Errors that its NVLinks have counted.", "nvlink_errors"),
            Metric("gpu_pcie_width_lanes", "PCIe lanes in use.", "pcie_width"),
            Metric("gpu_pcie_replays", "PCIe packets that were sent again.", "pcie_replays"),
        ),
    ),
    "gpudirect_rdma": (
        ("node", "nic", "model"),
        (
            Metric("nic_rate_bytes_per_second", "Rate of the port.", "rate_gb_s", BYTES_PER_GB),
            Metric("nic_gpudirect_rdma", "1 where it may reach GPU memory.", "gpudirect_rdma"),
        ),
    ),
    "times_slower": (
        ("conclusion", "verdict", "confidence", "transport", "cause"),
        (Metric("paths", "Ordered pairs that fare alike, by what is concluded of them.", "count"),),
    ),
    "score_percent": (
        ("node", "rail", "leaf", "nic"),
        (
            Metric("scan_cell_ratio", "Of what the same rail of other nodes delivers.", "score_percent", _PER_CENT),
            Metric("scan_cell_bytes_per_second", "Both directions together.", "both_ways_gb_s", BYTES_PER_GB),
            Metric("scan_cell_failures", "Rounds without a figure.", "failures"),
        ),
    ),
    "network_sent_gb_s": (
        ("node", "device"),
        (
            Metric("traffic_nvlink_sent_bytes_per_second", "In the last interval.", "nvlink_sent_gb_s", BYTES_PER_GB),
            Metric(
                "traffic_nvlink_received_bytes_per_second",
                "In the last interval.",
                "nvlink_received_gb_s",
                BYTES_PER_GB,
            ),
            Metric("traffic_pcie_sent_bytes_per_second", "In the last interval.", "pcie_sent_gb_s", BYTES_PER_GB),
            Metric(
                "traffic_pcie_received_bytes_per_second", "In the last interval.", "pcie_received_gb_s", BYTES_PER_GB
            ),
            Metric("traffic_network_sent_bytes_per_second", "In the last interval.", "network_sent_gb_s", BYTES_PER_GB),
            Metric(
                "traffic_network_received_bytes_per_second",
                "In the last interval.",
                "network_received_gb_s",
                BYTES_PER_GB,
            ),
        ),
    ),
    "way": (
        ("node", "job", "way", "verdict"),
        (Metric("job_seconds", "How long the bytes of a job went that way.", "seconds"),),
    ),
    "partner_operation": (
        ("collective", "partner", "size_bytes", "ctas", "data_type", "ranks", "nodes"),
        (
            Metric(
                "overlap_step_seconds", "From step to step, collective and computation.", "step_us", _PER_MICROSECOND
            ),
            Metric("overlap_communication_slowdown", "Beside computation, over alone.", "communication_slowdown"),
            Metric("overlap_waiting_slowdown", "The part of it that is waiting for SMs.", "waiting_slowdown"),
            Metric("overlap_compute_slowdown", "While the collective is in flight, over alone.", "compute_slowdown"),
            Metric("overlap_hidden_ratio", "Part of the collective that running both saves.", "hidden_share"),
            Metric("overlap_wrong_elements", "Wrong elements over all ranks.", "wrong"),
        ),
    ),
    "channels_most": (
        ("communicator", "scope", "transport", "verdict"),
        (Metric("connected_pairs", "Pairs that an NCCL log connects alike.", "pairs"),),
    ),
}
"""By a column that only rows of one kind have: the columns that tell its rows apart, and the metrics."""


class _Exposition:
    """Samples by metric and labels: the collector refuses a file that has a sample twice."""

    def __init__(self, common: Mapping[str, str]) -> None:
        self._common = common
        self._help: dict[str, str] = {}
        self._samples: dict[str, dict[str, float]] = {}

    def add(self, name: str, help_text: str, value: float, labels: Mapping[str, object]) -> None:
        """Add a sample. A later one with the same labels replaces it."""
        all_labels = {**self._common, **labels}
        text = ",".join(f'{key}="{_label(str(value))}"' for key, value in all_labels.items() if value != "")
        self._help[name] = help_text
        self._samples.setdefault(name, {})[text] = value

    def lines(self) -> Iterator[str]:
        for name, samples in self._samples.items():
            yield f"# HELP {name} {self._help[name]}\n# TYPE {name} gauge\n"
            for labels, value in samples.items():
                yield f"{name}{{{labels}}} {value:.10g}\n"


def _label(text: str) -> str:
    """Escape a text as the value of a label: one line, and no quotation mark ends it."""
    return printable_line(text).translate(_ESCAPES)


def render(run: DocumentRun, *, pairs: bool = False) -> Iterator[str]:
    """Return the file. With `pairs` it has values for every pair, of which two nodes have thousands."""
    metadata, report = run.metadata, run.report
    exposition = _Exposition({"command": metadata.subject, "origin": metadata.origin})
    started = datetime.fromisoformat(metadata.started_at).timestamp()
    for name, help_text, value in (
        ("last_run_timestamp_seconds", "Unix time at which the last run began.", started),
        ("last_run_complete", "0 where the last run was cut short.", float(report.complete)),
        (
            "last_run_exit_code",
            "0 healthy, 1 judged and failed, 3 could not measure.",
            compute_exit_code(metadata, report),
        ),
    ):
        exposition.add(f"gpubench_{name}", help_text, value, {})
    if report.duration_s is not None:
        meaning = "Seconds that the last run took."
        exposition.add("gpubench_last_run_duration_seconds", meaning, report.duration_s, {})
    versions = {name: metadata.libraries.get(key, "").split(" ")[0] for name, key in _BUILD.items()}
    info = {"version": metadata.gpubench_version, **versions}
    exposition.add("gpubench_build_info", "Versions that the last run was made with.", 1.0, info)
    for verdict in Verdict:
        is_it = float(report.verdict is verdict)
        exposition.add("gpubench_last_run_verdict", "1 for the verdict of the last run.", is_it, {"verdict": verdict})
    found: dict[tuple[str, str], int] = {}
    for finding in report.findings:
        key = (finding.id, finding.severity.value)
        found[key] = found.get(key, 0) + len(finding.subjects or (finding.subject,))
    for (id_, severity), count in found.items():
        labels = {"id": id_, "severity": severity}
        exposition.add("gpubench_findings", "Subjects with a finding, by its id.", count, labels)
    _add_subjects(exposition, report)
    slowest = _SlowestPairs()
    for record in _records(run):
        if "nvlink_bytes" not in record or pairs:
            _add_samples(exposition, record, metadata)
        if "nvlink_bytes" in record:
            slowest.add(record)
    for record in slowest.records():
        _add_samples(exposition, record, metadata)
    yield from exposition.lines()


def _add_subjects(exposition: _Exposition, report: Report) -> None:
    wrong = ((finding, subject) for finding in report.findings for subject in (finding.subjects or (finding.subject,)))
    for finding, subject in islice(wrong, _MOST_SUBJECTS):
        labels = {"id": finding.id, "severity": finding.severity.value, "subject": subject}
        exposition.add("gpubench_finding", "1 for a subject and a finding on it.", 1.0, labels)
    for row in report.rows(VerdictRow):
        if row.scope != "link":
            labels = {"scope": row.scope, "node": row.node, "subject": row.subject, "verdict": row.verdict}
            exposition.add("gpubench_verdict", "1 for the verdict on a node, GPU or NIC.", 1.0, labels)


class _SlowestPairs:
    """The slowest pair of every way of copying."""

    def __init__(self) -> None:
        self._slowest: dict[tuple[object, ...], Mapping[str, Any]] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        if record["bandwidth_gb_s"] is None or record["source"] == HOST or record["destination"] == HOST:
            return
        key = tuple(record[name] for name in _WHICH_WAY)
        known = self._slowest.get(key)
        if known is None or record["bandwidth_gb_s"] < known["bandwidth_gb_s"]:
            self._slowest[key] = record

    def records(self) -> Iterator[Mapping[str, Any]]:
        """Return rows that have only the columns of `slowest_pair_*`."""
        for record in self._slowest.values():
            yield {name: record[name] for name in (*_WHICH_PAIR[:2], *_WHICH_WAY, *_OF_SLOWEST, "origin")} | {
                "slowest": 1
            }


def _records(run: DocumentRun) -> Iterator[Mapping[str, Any]]:
    yield from (row.to_record() for row in run.rows)
    for section in run.report.sections.values():
        if isinstance(section, Table) and any(column in section.columns for column in _METRICS):
            yield from (row.to_record() for row in section.rows())


def _add_samples(exposition: _Exposition, record: Mapping[str, Any], metadata: Metadata) -> None:
    for mark, (which, metrics) in _METRICS.items():
        if mark not in record:
            continue
        labels = {name: record[name] for name in which if record.get(name) is not None}
        if memory := HostMemory.parse_note(record.get("note")):
            labels["memory"] = str(memory)
        if metadata.origin != record.get("origin", metadata.origin):
            labels["origin"] = record["origin"]
        for metric in metrics:
            value = record[metric.column]
            if value is not None:
                exposition.add(f"gpubench_{metric.name}", metric.help, float(value) * metric.scale, labels)


def writer(target: Target, shown: Presentation) -> DocumentWriter:
    """Return the writer. The section of pairs asks for values of every pair."""
    with_pairs = partial(render, pairs=shown.section == PairRow.section)
    return DocumentWriter(target, with_pairs, marks_unfinished=False)
