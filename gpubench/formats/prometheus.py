"""Prometheus text for the textfile collector of node_exporter, in base units (bytes, seconds).

The collector may read at any time, and drops a file with one bad line. So the file is replaced once, at the end. The
collector rejects timestamps, so `gpubench_last_run_timestamp_seconds` gives the age of all samples. If a run is killed,
the file of the previous run stays.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any

from gpubench.formats.json import DocumentRun, DocumentWriter
from gpubench.formats.registry import Presentation, Target
from gpubench.model.results.compare import HOST
from gpubench.model.results.ending import compute_exit_code
from gpubench.model.results.report import Metadata, PairRow, Report, Table, VerdictRow
from gpubench.model.terms.operation import HostMemory
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND, printable_line
from gpubench.model.terms.verdict import Verdict

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\""})
_OF_EXPECTED = "Measured speed divided by the expected speed. Below 1 is slower."


Metric = tuple[str, str, str]
"""A gauge: its name, the column of its value, and its help text. The value is converted to base units."""

_SCALES = {"_us": 1 / MICROSECONDS_PER_SECOND, "_gb_s": BYTES_PER_GB, "_percent": 0.01}
"""Factors that convert a column to base units, by the suffix of the column's name."""

_WHICH_PAIR = (
    *("source", "destination", "source_node", "destination_node", "scope", "direction", "engine", "peer", "size_bytes"),
    "memory",
)
_WHICH_WAY = ("source_node", "destination_node", "scope", "direction", "engine", "peer", "size_bytes")
_BUILD = {"driver": "driver", "nccl": "NCCL", "mpi": "MPI"}
_MOST_SUBJECTS = 1000
"""Limit on `gpubench_finding` samples, one per finding and subject. `gpubench_findings` counts all of them."""

_WHICH_ROW = (
    *("collective", "backend", "group", "ranks", "nodes", "size_bytes", "dtype", "op", "root", "placement", "mode"),
    *("graph", "setting"),
)

_METRICS: Mapping[str, tuple[Sequence[str], Sequence[Metric]]] = {
    "busbw_gb_s": (
        _WHICH_ROW,
        (
            ("collective_time_seconds", "time_us", "Time of one operation, mean over ranks."),
            ("collective_algbw_bytes_per_second", "algbw_gb_s", "Algorithm bandwidth: size divided by time."),
            ("collective_busbw_bytes_per_second", "busbw_gb_s", "Bus bandwidth as nccl-tests defines it."),
            ("collective_limit_bytes_per_second", "limit_gb_s", "Physical limit of the links."),
            ("collective_expected_bytes_per_second", "expected_gb_s", "Bus bandwidth of a healthy machine."),
            ("collective_expected_seconds", "expected_us", "Time on a healthy machine."),
            ("collective_expected_ratio", "expected_percent", _OF_EXPECTED),
            ("collective_wrong_elements", "wrong", "Wrong elements on all ranks."),
            ("collective_host_staged", "host_staged", "1 if data went through host memory."),
        ),
    ),
    "latency_us": (
        _WHICH_PAIR,
        (
            ("pair_bandwidth_bytes_per_second", "bandwidth_gb_s", "Bandwidth of copies between two GPUs."),
            ("pair_latency_seconds", "latency_us", "Time of one copy."),
            ("pair_expected_bytes_per_second", "expected_gb_s", "Bandwidth of a healthy machine."),
            ("pair_expected_seconds", "expected_us", "Time on a healthy machine."),
            ("pair_expected_ratio", "expected_percent", _OF_EXPECTED),
            ("pair_host_staged", "host_staged", "1 if a copy went through host memory."),
        ),
    ),
    "block_us": (
        ("node", "source", "destination", "backend", "direction", "memory", "size_bytes", "blocks"),
        (
            ("kv_bandwidth_bytes_per_second", "bandwidth_gb_s", "Bandwidth of a KV transfer between two processes."),
            ("kv_seconds", "p50_us", "Median time of a KV transfer."),
            ("kv_host_staged", "host_staged", "1 if a KV transfer went through host memory."),
        ),
    ),
    "slowest": (
        _WHICH_WAY,
        (
            ("slowest_pair_bandwidth_bytes_per_second", "bandwidth_gb_s", "Bandwidth of the slowest pair."),
            ("slowest_pair_expected_ratio", "expected_percent", _OF_EXPECTED),
        ),
    ),
    "nvlinks_active": (
        ("node", "gpu", "name", "uuid", "bus_id"),
        (
            ("gpu_nvlinks_active", "nvlinks_active", "Active NVLinks."),
            ("gpu_nvlinks", "nvlinks", "NVLinks of the GPU, active or not."),
            ("gpu_nvlink_errors", "nvlink_errors", "Errors counted by the GPU's NVLinks."),
            ("gpu_pcie_width_lanes", "pcie_width", "PCIe lanes in use."),
            ("gpu_pcie_replays", "pcie_replays", "Retransmitted PCIe packets."),
        ),
    ),
    "gpudirect_rdma": (
        ("node", "nic", "model"),
        (
            ("nic_rate_bytes_per_second", "rate_gb_s", "Rate of the port."),
            ("nic_gpudirect_rdma", "gpudirect_rdma", "1 if the NIC can access GPU memory directly."),
        ),
    ),
    "times_slower": (
        ("conclusion", "verdict", "confidence", "transport", "cause"),
        (("paths", "count", "Ordered pairs with the same conclusion."),),
    ),
    "score_percent": (
        ("node", "rail", "leaf", "nic"),
        (
            ("scan_cell_ratio", "score_percent", "Bandwidth divided by that of the same rail on other nodes."),
            ("scan_cell_bytes_per_second", "both_ways_gb_s", "Bandwidth of both directions together."),
            ("scan_cell_failures", "failures", "Rounds without a value."),
        ),
    ),
    "network_sent_gb_s": (
        ("node", "device"),
        (
            ("traffic_nvlink_sent_bytes_per_second", "nvlink_sent_gb_s", "Traffic in the last interval."),
            ("traffic_nvlink_received_bytes_per_second", "nvlink_received_gb_s", "Traffic in the last interval."),
            ("traffic_pcie_sent_bytes_per_second", "pcie_sent_gb_s", "Traffic in the last interval."),
            ("traffic_pcie_received_bytes_per_second", "pcie_received_gb_s", "Traffic in the last interval."),
            ("traffic_network_sent_bytes_per_second", "network_sent_gb_s", "Traffic in the last interval."),
            ("traffic_network_received_bytes_per_second", "network_received_gb_s", "Traffic in the last interval."),
        ),
    ),
    "way": (
        ("node", "job", "way", "verdict"),
        (("job_seconds", "seconds", "Time during which the job's data took this path."),),
    ),
    "partner_operation": (
        ("collective", "partner", "size_bytes", "ctas", "data_type", "ranks", "nodes"),
        (
            ("overlap_step_seconds", "step_us", "Time of one step of collective and computation."),
            (
                "overlap_communication_slowdown",
                "communication_slowdown",
                "Time of the collective during computation, divided by its time alone.",
            ),
            ("overlap_waiting_slowdown", "waiting_slowdown", "Part of that slowdown that comes from waiting for SMs."),
            (
                "overlap_compute_slowdown",
                "compute_slowdown",
                "Time of computation during the collective, divided by its time alone.",
            ),
            ("overlap_hidden_ratio", "hidden_share", "Share of the collective that is hidden behind computation."),
            ("overlap_wrong_elements", "wrong", "Wrong elements on all ranks."),
        ),
    ),
    "channels_most": (
        ("communicator", "scope", "transport", "verdict"),
        (("connected_pairs", "pairs", "Pairs with the same transport in an NCCL log."),),
    ),
}
"""Labels and gauges for each type of row. The key is a column that only this type has."""


class _Exposition:
    """Collects samples by metric and labels, because the collector rejects a file with duplicate samples."""

    def __init__(self, common: Mapping[str, str]) -> None:
        self._common = common
        self._help: dict[str, str] = {}
        self._samples: dict[str, dict[str, float]] = {}

    def add(self, name: str, help_text: str, value: float, labels: Mapping[str, object]) -> None:
        """Add a sample, or replace the one with the same metric and labels."""
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
    """Escape text for the value of a label, including line breaks and quotation marks."""
    return printable_line(text).translate(_ESCAPES)


def render(run: DocumentRun, *, pairs: bool = False) -> Iterator[str]:
    """Yield the lines of the file. `pairs` adds a sample for every GPU pair, which can be thousands for two nodes."""
    metadata, report = run.metadata, run.report
    exposition = _Exposition({"command": metadata.subject, "origin": metadata.origin})
    started = datetime.fromisoformat(metadata.started_at).timestamp()
    for name, help_text, value in (
        ("last_run_timestamp_seconds", "Unix time at which the last run started.", started),
        ("last_run_complete", "0 if the last run was cut short.", float(report.complete)),
        (
            "last_run_exit_code",
            "0 healthy, 1 judged and failed, 3 could not measure.",
            compute_exit_code(metadata, report),
        ),
    ):
        exposition.add(f"gpubench_{name}", help_text, value, {})
    if report.duration_s is not None:
        meaning = "Duration of the last run in seconds."
        exposition.add("gpubench_last_run_duration_seconds", meaning, report.duration_s, {})
    versions = {name: metadata.libraries.get(key, "").split(" ")[0] for name, key in _BUILD.items()}
    info = {"version": metadata.gpubench_version, **versions}
    exposition.add("gpubench_build_info", "Software versions of the last run.", 1.0, info)
    for verdict in Verdict:
        is_it = float(report.verdict is verdict)
        exposition.add("gpubench_last_run_verdict", "1 for the verdict of the last run.", is_it, {"verdict": verdict})
    found: dict[tuple[str, str], int] = {}
    for finding in report.findings:
        key = (finding.id, finding.severity.value)
        found[key] = found.get(key, 0) + len(finding.subjects or (finding.subject,))
    for (id_, severity), count in found.items():
        labels = {"id": id_, "severity": severity}
        exposition.add("gpubench_findings", "Number of subjects with this finding.", count, labels)
    _add_subjects(exposition, report)
    slowest: dict[tuple[object, ...], Mapping[str, Any]] = {}
    for record in _records(run):
        is_pair = "latency_us" in record
        if pairs or not is_pair:
            _add_samples(exposition, record, metadata)
        if is_pair and record["bandwidth_gb_s"] is not None and HOST not in (record["source"], record["destination"]):
            way = tuple(record[name] for name in _WHICH_WAY)
            slowest[way] = min(slowest.get(way, record), record, key=lambda row: row["bandwidth_gb_s"])
    columns = (*_WHICH_PAIR[:2], *_WHICH_WAY, "bandwidth_gb_s", "expected_percent", "origin")
    for record in slowest.values():
        _add_samples(exposition, {name: record[name] for name in columns} | {"slowest": 1}, metadata)
    yield from exposition.lines()


def _add_subjects(exposition: _Exposition, report: Report) -> None:
    wrong = ((finding, subject) for finding in report.findings for subject in (finding.subjects or (finding.subject,)))
    for finding, subject in islice(wrong, _MOST_SUBJECTS):
        labels = {"id": finding.id, "severity": finding.severity.value, "subject": subject}
        exposition.add("gpubench_finding", "1 for each finding on a subject.", 1.0, labels)
    for row in report.rows(VerdictRow):
        if row.scope != "link":
            labels = {"scope": row.scope, "node": row.node, "subject": row.subject, "verdict": row.verdict}
            exposition.add("gpubench_verdict", "1 for the verdict on a node, GPU or NIC.", 1.0, labels)


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
        for name, column, help_text in metrics:
            if record[column] is not None:
                scale = next((scale for ending, scale in _SCALES.items() if column.endswith(ending)), 1.0)
                exposition.add(f"gpubench_{name}", help_text, float(record[column]) * scale, labels)


def writer(target: Target, shown: Presentation) -> DocumentWriter:
    """Return the writer. With `--section pairs`, it also writes the values of every GPU pair."""
    return DocumentWriter(target, partial(render, pairs=shown.section == PairRow.section), marks_unfinished=False)
