"""Text that others chose is no command, no markup and no formula, in any format; our own readers read it back."""

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from gpubench.formats.frame import read_frame
from gpubench.formats.registry import CSV, FORMATS, NAGIOS, NPD, SUMMARY, Color, Format, Presentation, Target
from gpubench.measure.topo import examine
from gpubench.model.facts.process import GpuProcess
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.topology import Topology
from gpubench.model.results.figures import SpeedFigures
from gpubench.model.results.report import (
    COLLECTIVE_COLUMNS,
    PAIR_COLUMNS,
    CollectiveRow,
    Metadata,
    PairRow,
    Report,
    Row,
)
from gpubench.model.results.sentence import sentence
from gpubench.model.terms.verdict import Finding, Verdict
from gpubench.readers.results.gpubench_csv import read as read_csv
from tests.examples import examples
from tests.formats.hostile import HOSTILE, LONGEST, PROBLEMS, WORST
from tests.formats.sample import FINDING, JSON, METADATA, PAIR, ROWS
from tests.machines.test_machines import read as read_machine

T = TypeVar("T", CollectiveRow, PairRow, Finding)

_OUR_OWN = (
    *("collective", "backend", "origin", "dtype", "op", "placement", "mode", "verified", "verdict", "severity"),
    *("direction", "engine", "peer", "scope", "id"),
)
"""Fields whose words gpubench chooses."""

EVERY_FORMAT = (*FORMATS, SUMMARY, NAGIOS, NPD)
hostile = pytest.mark.parametrize("text", HOSTILE.values(), ids=lambda text: repr(text[:40]))
worst = pytest.mark.parametrize("text", [HOSTILE[name] for name in sorted(WORST)], ids=lambda text: repr(text[:40]))

Run = tuple[Metadata, tuple[Row, ...], Report]


def told(value: T, text: str) -> T:
    """A row or a finding all of whose texts are another's."""
    texts = [each.name for each in fields(value) if "str" in str(each.type) and each.name not in _OUR_OWN]
    held = {name: getattr(value, name) for name in texts}
    changes: dict[str, Any] = {name: (text,) if isinstance(old, tuple) else text for name, old in held.items()}
    return replace(value, **changes)


def metadata(text: str, **changes: Any) -> Metadata:
    """The circumstances of a run, as hostile as the run."""
    ranks = tuple(replace(rank, host=text, gpu=text) for rank in METADATA.ranks)
    return replace(
        METADATA,
        command=("gpubench", text),
        hosts=(text,),
        ranks=ranks,
        source=text,
        libraries={"NCCL": text},
        environment={"NCCL_ALGO": text, "NCCL_DEBUG_FILE": text},
        profile={"name": text, "note": text, "sha256": "0"},
        **changes,
    )


def collective(text: str) -> Run:
    rows = tuple(told(row, text) for row in ROWS)
    return metadata(text), rows, Report(verdict=Verdict.FAIL, complete=True, findings=(told(FINDING, text),))


_OF_COPIES = {
    "pairs": [["GPU0", "GPU1"]], "check": True, "repeats": None, "sample_seconds": 0.01, "samples": 3, "warmup": 4,
}  # fmt: skip


def copies(text: str) -> Run:
    about = metadata(text, subject="p2p", collective=None, options=_OF_COPIES | {"gpus": {"GPU0": text, "GPU1": text}})
    return about, (told(PAIR, text),), Report(verdict=Verdict.FAIL, complete=True, findings=(told(FINDING, text),))


@cache
def _machine(name: str) -> Sequence[Snapshot]:
    return read_machine(name)[0]


_FEW = (0, 4)
"""Of the second node two GPUs, which no switch joins: all eight have no other rows, and take the time."""


def topo(text: str) -> Run:
    snapshot, *_ = _machine("h200x4-vm")
    held = GpuProcess(pid=1, name=text, memory_bytes=1, container=text)
    gpus = tuple(
        replace(gpu, name=text, processes=(held,), throttle_reasons=(text,), nvlinks=(gpu.nvlinks or ())[:2])
        for gpu in snapshot.gpus[:2]
    )
    hostile_node = replace(snapshot, host=text, gpus=gpus, machine=replace(snapshot.machine, cpu=text, kernel=text))
    other = _machine("l40s-pcie-switches")[0]
    nodes = [hostile_node, replace(other, host=f"{text}2", gpus=tuple(other.gpus[each] for each in _FEW))]
    about = metadata(text, subject="topo", collective=None, backend=None, options={})
    return about, (), examine([Topology(each) for each in nodes], [])


RUNS: Mapping[str, Callable[[str], Run]] = {"collective": collective, "p2p": copies, "topo": topo}
CASES = [
    (run, text)
    for number, (name, text) in enumerate(HOSTILE.items())
    for turn, run in enumerate(RUNS.values())
    if name in WORST or number % len(RUNS) == turn
]
"""What breaks out in different ways is in every run; what does so in the same way in another is in one, in turn."""
runs_and_texts = pytest.mark.parametrize(("run", "text"), CASES)


def written(format_: Format, run: Run, style: Presentation | None = None) -> str:
    about, rows, report = run
    report = replace(report, sentence=sentence(about, report, SpeedFigures()))
    stream = io.StringIO()
    writer = format_.writer(Target(stream=stream), style or Presentation(plot=True, verbose=True))
    columns = {"topo": (), "p2p": PAIR_COLUMNS}.get(about.subject, COLLECTIVE_COLUMNS)
    writer.begin(about, columns)
    for row in rows:
        writer.row(row)
    writer.end(report)
    return stream.getvalue()


def test_every_format_has_a_check_of_foreign_text() -> None:
    missing = {format_.name for format_ in EVERY_FORMAT} - PROBLEMS.keys()
    assert not missing, f"add to PROBLEMS in tests/formats/hostile.py what their output must fulfil: {missing}"


def inert_in_every_format(made: Run) -> list[str]:
    """The problems of a run by format; none is well."""
    return [
        f"{format_.name}: {problem}"
        for format_ in EVERY_FORMAT
        for problem in PROBLEMS[format_.name](written(format_, made))
    ]


@runs_and_texts
def test_text_of_others_is_inert(run: Any, text: str) -> None:
    assert inert_in_every_format(run(text)) == []


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("text", LONGEST.values(), ids=LONGEST)
def test_the_longest_text_of_others_is_inert(run: Any, text: str) -> None:
    assert inert_in_every_format(run(text)) == []


@worst
def test_every_section_of_csv_is_inert(text: str) -> None:
    made = topo(text)
    for name in made[2].sections:
        assert list(PROBLEMS["csv"](written(CSV, made, Presentation(section=name)))) == []
    for name in ("findings",):
        assert list(PROBLEMS["csv"](written(CSV, collective(text), Presentation(section=name)))) == []


@worst
def test_files_hold_what_stdout_shows(text: str, tmp_path: Path) -> None:
    about, rows, report = collective(text)
    found = []
    for format_ in (each for each in EVERY_FORMAT if each.suffix is not None):
        path = tmp_path / f"result-{format_.name}{format_.suffix}"
        writer = format_.writer(Target(path=path), Presentation())
        writer.begin(about, COLLECTIVE_COLUMNS)
        for row in rows:
            writer.row(row)
        writer.end(report)
        found += [f"{format_.name}: {each}" for each in PROBLEMS[format_.name](path.read_bytes().decode("utf-8"))]
    assert found == []


@hostile
def test_json_is_exact(text: str) -> None:
    document = json.loads(written(JSON, collective(text)))
    assert document["metadata"]["environment"]["NCCL_ALGO"] == text
    assert document["findings"][0]["subject"] == text


@pytest.mark.parametrize(("run", "text"), [*zip(cycle(RUNS.values()), map(HOSTILE.__getitem__, sorted(WORST)))])
def test_in_colours_too_a_table_has_no_other_s_escapes(run: Any, text: str) -> None:
    shown = written(FORMATS[0], run(text), Presentation(color=Color.ALWAYS))
    assert list(PROBLEMS["table"](re.sub(r"\x1b\[[0-9;]*m", "", shown))) == []


def _texts() -> Iterator[Any]:
    yield st.text(min_size=1)
    yield st.sampled_from([*HOSTILE.values(), "NA", "nan", "null", "1", "1.0", "true", "''", "'", "\\", "'\\x41"])
    yield st.text(alphabet="=+-@'\\:#[x1\t\r\n\ud800\u202e,;\" ", min_size=1)


@settings(max_examples=examples(100 // len(ROWS)))
@given(st.lists(st.one_of(*_texts()), min_size=len(ROWS), max_size=len(ROWS)))
def test_what_is_neutralised_in_csv_is_read_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    rows = tuple(replace(row, group=text, note=text) for row, text in zip(ROWS, texts, strict=True))
    about, _, report = collective("x")
    as_csv = written(CSV, (about, rows, report))
    assert read_csv(as_csv, "x").rows == rows
    path = tmp_path_factory.mktemp("csv") / "x.csv"
    path.write_text(as_csv, encoding="utf-8")
    frame = read_frame(path)
    assert frame["group"].tolist() == frame["note"].tolist() == texts
    assert frame["busbw_gb_s"].tolist() == [row.busbw_gb_s for row in rows]
    pairs = tuple(replace(PAIR, source=text, note=text) for text in texts)
    about = metadata("x", subject="p2p", collective=None, options={"gpus": {}})
    assert read_csv(written(CSV, (about, pairs, report)), "x").pairs == pairs
