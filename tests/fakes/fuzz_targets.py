"""The readers of untrusted files, each as a function of bytes, with valid files as seeds.

A target returns or raises GpubenchError. Any other exception is a defect.
"""

import io
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st
from typer.testing import CliRunner

from gpubench.cli.app import app
from gpubench.formats.registry import FORMATS, Output, Presentation
from gpubench.jobs.report import run
from gpubench.machine import recorded
from gpubench.measure.compare.report import compare
from gpubench.measure.explain.report import explain
from gpubench.measure.topo import examine
from gpubench.model.paths.nodes import build_topologies, rename_duplicates
from gpubench.model.results.report import Report, Table
from gpubench.profiles import folder as profiles_folder
from gpubench.profiles import read_profile
from gpubench.readers.nccl_log.stream import NcclLogReader
from gpubench.readers.registry import read_file, read_results
from gpubench.readers.results.gpubench_json import read_stored
from gpubench.readers.results.history import read_head
from tests.cli.running import ROOT
from tests.fakes.nccl_logs import Job

_TESTS = ROOT / "tests"


@dataclass(frozen=True)
class FuzzTarget:
    """A reader: `run` reads bytes, and `seeds` are valid files."""

    name: str
    run: Callable[[bytes], None]
    seeds: Sequence[bytes]


def _rows(report: Report) -> None:
    for table in report.sections.values():
        if isinstance(table, Table):
            list(table.rows())


def _log(content: bytes) -> None:
    reader = NcclLogReader()
    reader.read(io.BytesIO(content))
    _rows(explain(reader.facts(), ["job.log"]))


def _machine(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.txt")
        path.write_bytes(content)
        nodes = build_topologies(rename_duplicates([read_file(path)]))
        _rows(examine(nodes, [], [None], asked=False, expected_gpus=None))


def _recording(content: bytes) -> None:
    """Read a node, and after a NUL the facts of ranks."""
    node, _, rank = content.partition(b"\0")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "nodes").mkdir()
        Path(folder, "nodes", "a.json").write_bytes(node)
        Path(folder, "ranks.jsonl").write_bytes(rank)
        snapshots, ranks = recorded.read_recording(Path(folder))
        nodes = build_topologies(rename_duplicates(snapshots))
        _rows(examine(nodes, ranks, [None], asked=False, expected_gpus=None))


def _stored(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        path = Path(folder, "a.json")
        path.write_bytes(content)
        outputs = tuple(Output(Path(folder, f"b{each.suffix}"), each) for each in FORMATS if each.suffix)
        run(read_stored(path), "a.json", Presentation(outputs=outputs))


def _stored_seeds() -> list[bytes]:
    """Return a sweep and copies of a simulated machine, as a document and as lines."""
    found = []
    for command in (("allreduce", "--sizes", "1K:4K"), ("p2p", "--no-patterns", "--no-host"), ("kv",)):
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder, name) for name in ("a.json", "a.jsonl")]
            given = [word for path in paths for word in ("-o", str(path))]
            CliRunner().invoke(app, [*command, "--simulate", "hgx-h200-2", *given])
            found += [path.read_bytes() for path in paths]
    return found


def _results(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.txt")
        path.write_bytes(content)
        file = read_results(path)
        _rows(compare([file], [file]))


def _head(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.json")
        path.write_bytes(content)
        read_head(path)


def _profile(content: bytes) -> None:
    read_profile(content, "mine.toml")


def _recordings() -> list[bytes]:
    folders = [_TESTS / "machines" / name for name in ("h200x4-vm", "a100-mig", "no-gpu")]
    return [
        next((folder / "nodes").iterdir()).read_bytes() + b"\0" + (folder / "ranks.jsonl").read_bytes()
        if (folder / "ranks.jsonl").exists()
        else next((folder / "nodes").iterdir()).read_bytes() + b"\0"
        for folder in folders
    ]


def _logs() -> list[bytes]:
    recorded_logs = [path.read_bytes()[:20_000] for path in sorted((_TESTS / "logs").glob("*/*.log"))[:3]]
    return ["".join(Job(version=version, ranks=4).logs()).encode() for version in ((2, 12), (2, 28))] + recorded_logs


_RESULT = _TESTS / "results" / "h200x4"
_OSU = b"""# OSU MPI Allreduce Latency Test v7.4
# Datatype: MPI_FLOAT.
# Size       Avg Latency(us)
4                       1.23
1024                    4.56
"""
_NCCL_TESTS_JSON = json.dumps(
    {
        "version": 1,
        "start_time": "a",
        "args": ["all_reduce_perf"],
        "env": ["NCCL_DEBUG=INFO"],
        "nccl_version": 22809,
        "config": {"nthreads": 1, "ngpus": 2, "iterations": 20, "devices": [
            {"rank": 0, "group": 0, "pid": 1, "hostname": "a", "device": 0, "device_hex": "0000:1a:00",
             "device_info": "H200"}]},
        "results": [{"size": 8, "count": 2, "type": "float", "redop": "sum", "root": -1, "out_of_place":
                     {"time": 1.0, "alg_bw": 1.0, "bus_bw": 1.0, "nwrong": "0"}, "in_place": None}],
        "end_time": "b",
    }
).encode()  # fmt: skip
_CSV = (
    b"collective,backend,ranks,size_bytes,dtype,placement,time_us,origin,nodes,iterations,mode,verified,graph,count,algbw_gb_s,busbw_gb_s\n"
    b"allreduce,nccl,4,1024,float32,out_of_place,1.5,measured,1,20,throughput,last,0,256,1.0,1.5\n"
)

FUZZ_TARGETS = (
    FuzzTarget("logs", _log, _logs()),
    FuzzTarget(
        "machines",
        _machine,
        [
            (_TESTS / "machines" / "h200x4-nccl-xml" / "from.xml").read_bytes(),
            *(path.read_bytes() for path in sorted((_TESTS / "machines").glob("*/from.txt"))[:2]),
            next((_TESTS / "machines" / "h200x4-vm" / "nodes").iterdir()).read_bytes(),
        ],
    ),
    FuzzTarget("recordings", _recording, _recordings()),
    FuzzTarget(
        "results",
        _results,
        [
            *(path.read_bytes() for path in sorted(_RESULT.glob("*.txt"))[:2]),
            (_RESULT / "check.json").read_bytes(),
            _OSU,
            _CSV,
            _NCCL_TESTS_JSON,
        ],
    ),
    FuzzTarget("stored results", _stored, [(_RESULT / "check.json").read_bytes(), *_stored_seeds()]),
    FuzzTarget("heads of results", _head, [(_RESULT / "check.json").read_bytes()]),
    FuzzTarget("profiles", _profile, [path.read_bytes() for path in sorted(profiles_folder().glob("*.toml"))[:4]]),
)

_TOKENS = (
    *(b"\0", b"\n", b"\r", b"\xff", b"\xed\xa0\x80", b"[" * 70, b"{" * 2000, b'"', b",", b"\x1b[0m", b"\x1b]", b"null"),
    *(
        b"-1",
        b"0",
        b"1e999",
        b"NaN",
        b"9" * 39,
        b"9" * 400,
        b"2000000000",
        b"-0.0",
        b"true",
        b'"\\ud800"',
        b"[]",
        b"{}",
    ),
    *(
        b" NCCL INFO ",
        b" NCCL WARN ",
        b"GPU0",
        b"NV18",
        b"<gpu ",
        b"</pci>",
        b" via ",
        b" -> ",
        b"comm 0x1 rank 0 nranks ",
    ),
)
"""Tokens that break readers, inserted anywhere"""

_Change = tuple[str, float, float, bytes]

_CHANGES = st.lists(
    st.tuples(
        st.sampled_from(("cut", "repeat", "put", "replace a number", "swap")),
        st.floats(0, 1),
        st.floats(0, 0.05),
        st.sampled_from(_TOKENS) | st.binary(max_size=8),
    ),
    min_size=1,
    max_size=6,
)


def hostile_bytes(target: FuzzTarget) -> st.SearchStrategy[bytes]:
    """Return valid files with several changes, and files of random bytes."""
    changed = st.builds(_changed, st.sampled_from(target.seeds), _CHANGES)
    return changed | st.binary(max_size=200)


def _changed(content: bytes, changes: Sequence[_Change]) -> bytes:
    for kind, place, share, token in changes:
        start = int(place * len(content))
        end = start + int(share * len(content))
        if kind == "cut":
            content = content[:start] + content[end:]
        elif kind == "repeat":
            content = content[:end] + content[start:end] * 3 + content[end:]
        elif kind == "swap":
            content = content[end:] + content[:end]
        elif kind == "replace a number":
            content = content[:start] + _with_other_number(content[start:], token)
        else:
            content = content[:start] + token + content[start:]
    return content


def _with_other_number(content: bytes, token: bytes) -> bytes:
    """Replace the first run of digits."""
    start = next((place for place, byte in enumerate(content) if 48 <= byte <= 57), len(content))
    rest = content[start:].lstrip(b"0123456789")
    return content[:start] + token + rest
