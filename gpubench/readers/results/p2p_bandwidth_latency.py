"""Reads p2pBandwidthLatencyTest of NVIDIA's CUDA samples: copies between GPUs, without and with peer access.

GB/s is 1e9 bytes per second. A copy has 40 million integers of 4 bytes (or --numElems), and 16 bytes for latencies. A
row is the source, except of reads. Tables of before 2018 do not say which of the two GPUs copied. Without peer access,
the program copies all the same, so such pairs have no value with peer access here. Bidirectional copies without peer
access and the CPU's latencies are not read.
"""

import re

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.model.facts.snapshot import normalize_bus_id
from gpubench.model.results.report import PairRow
from gpubench.model.results.result_file import FileCircumstances, ResultFile
from gpubench.model.terms.units import shorten
from gpubench.readers.documents import last_numbers, output_lines
from gpubench.readers.transfers import damaged, text_result, transfer_row

KIND = "p2pBandwidthLatencyTest"
_LATENCY_BYTES, _INTEGERS, _INTEGER_BYTES = 16, 40_000_000, 4
_MOST_GPUS = 128
_TITLE = re.compile(
    r"(?:(?P<ways>Uni|Bi)directional )?P2P=(?P<peer>Dis|En)abled (?P<what>Bandwidth|Latency) "
    r"(?:\(P2P (?P<way>Write|Read)s\) )?Matrix"
)
_DEVICE = re.compile(
    r"\bDevice: (?P<index>\d{1,3}), (?P<name>\S.{0,80}?), pciBusID: (?P<bus>[0-9a-f]{1,2}), "
    r"pciDeviceID: (?P<device>[0-9a-f]{1,2}), pciDomainID: ?(?P<domain>[0-9a-f]{1,8})"
)
_ACCESS = re.compile(r"\bDevice=(?P<one>\d{1,3}) CANNOT Access Peer Device=(?P<other>\d{1,3})")
_COLUMNS = re.compile(r"(?P<corner>D\\D|GPU|CPU)(?P<gpus>(?:\s+\d{1,3})+)\s*$")
_OLD = re.compile(r"(?:Unidirectional |^\s*)P2P=Enabled (?:Bandwidth|Latency) Matrix", re.MULTILINE)
_ELEMENTS = re.compile(r"p2pBandwidthLatencyTest\b.*--?numElems=(?P<count>\d{1,12})")


def recognises(text: str) -> bool:
    """Return True if a text has the title of a matrix of p2pBandwidthLatencyTest."""
    return _TITLE.search(text) is not None


def read(text: str, name: str) -> ResultFile:
    """Read the matrices of a run. Raises UsageError if there are none."""
    parser = _Matrices(is_old=_OLD.search(text) is not None)
    for number, line in output_lines(text, name):
        parser.line(line, number)
    parser.end_matrix()
    known = FileCircumstances(tool=KIND, gpus=tuple(gpu for _, gpu in sorted(parser.models.items())))
    expected = "matrices with a line for each GPU, below P2P=Disabled and P2P=Enabled"
    return text_result(name, KIND, parser.left_out, expected, circumstances=known, pairs=parser.rows.values())


class _Matrices(Struct):
    is_old: bool
    size_bytes: int = _INTEGERS * _INTEGER_BYTES
    rows: dict[tuple[object, ...], PairRow] = field(default_factory=dict)
    models: dict[int, str] = field(default_factory=dict)
    bus_ids: dict[int, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    engine: str = "ce"
    refused: set[tuple[int, int]] = field(default_factory=set)
    _title: re.Match[str] | None = None
    _columns: list[int] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)

    def line(self, text: str, number: int) -> None:
        if found := _TITLE.search(text):
            self.end_matrix()
            self._title = found
        elif self._title is not None and (found := _COLUMNS.search(text)):
            if found["corner"] == "CPU":
                self.end_matrix()
            else:
                self._columns = [int(gpu) for gpu in found["gpus"].split()][:_MOST_GPUS]
        elif self._title is not None and self._columns:
            self._values(self._title, text, number)
        elif found := _DEVICE.search(text):
            self._device(found)
        elif found := _ACCESS.search(text):
            self.refused.add((int(found["one"]), int(found["other"])))
        elif found := _ELEMENTS.search(text):
            self.size_bytes = max(1, int(found["count"])) * _INTEGER_BYTES
        if "--sm_copy" in text and KIND in text:
            self.engine = "sm"

    def end_matrix(self) -> None:
        """End the current matrix, and record the GPUs whose rows are missing."""
        missing = [f"GPU{gpu}" for gpu in self._columns if gpu not in self._seen]
        if self._title is not None and missing:
            self.left_out.append(f"{self._title[0]}: without {shorten(missing)}")
        self._title, self._columns, self._seen = None, [], set()

    def _device(self, found: re.Match[str]) -> None:
        index = int(found["index"])
        domain, bus, device = (int(found[part], 16) for part in ("domain", "bus", "device"))
        self.models[index] = found["name"]
        self.bus_ids[index] = normalize_bus_id(f"{domain:08x}:{bus:02x}:{device:02x}.0")

    def _values(self, title: re.Match[str], text: str, number: int) -> None:
        values = last_numbers(text)
        if len(values) <= 1:
            if text.strip():
                self.end_matrix()
            return
        gpu = int(values[0]) if values[0] in self._columns else None
        if gpu is None or len(values) != len(self._columns) + 1 or not all(0 < value < 1e6 for value in values[1:]):
            self.left_out.append(damaged(number, text))
            self._seen |= set() if gpu is None else {gpu}
            return
        self._seen.add(gpu)
        columns = self._columns
        for other, value in zip(columns, values[1:], strict=True):
            if other != gpu:
                self._cell(title, (gpu, other), value)
        if self._seen >= set(columns):
            self.end_matrix()

    def _cell(self, title: re.Match[str], pair: tuple[int, int], value: float) -> None:
        peer = "on" if title["peer"] == "En" else "off"
        if title["ways"] == "Bi" and peer == "off":
            return
        is_latency = title["what"] == "Latency"
        way = "both" if title["ways"] == "Bi" else "read" if title["way"] == "Read" else "write"
        # A read copies from the GPU of the column. Before 2018, all copies were reads
        source, destination = reversed(pair) if way == "read" or self.is_old else pair
        size = _LATENCY_BYTES if is_latency else self.size_bytes
        is_refused = peer == "on" and (pair in self.refused or pair[::-1] in self.refused)
        row = transfer_row(
            (f"GPU{source}", f"GPU{destination}"),
            self.engine if peer == "on" else "ce",
            size,
            size / (value * 1e3) if is_latency else value,
            direction=way,
            scope="process",
            latency_us=value if is_latency else None,
        )
        self.rows[source, destination, row.engine, way, peer, size] = replace(
            row,
            source_bus_id=self.bus_ids.get(source),
            destination_bus_id=self.bus_ids.get(destination),
            peer=peer,
            bandwidth_gb_s=None if is_refused else row.bandwidth_gb_s,
        )
