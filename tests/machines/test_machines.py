"""Every recorded machine as a table and as a summary of its JSON, as they were last approved.

A machine is a folder: a recording (`nodes/HOST.json`, what `gpubench topo --record` writes) or a file for `--from`
(`from.xml`, `from.txt`). `pytest tests/machines --golden` writes its outputs next to it: read the difference before you
commit.
"""

import csv
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.formats.registry import CSV, TABLE, Format, Presentation, Target
from gpubench.machine.recorded import read_recording
from gpubench.measure.topo import examine
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.topology import PATH_CLASSES, Topology
from gpubench.model.results.figures import SpeedFigures
from gpubench.model.results.report import PAIR_COLUMNS, Metadata, Report
from gpubench.model.results.sentence import sentence
from gpubench.model.results.topo import TOPO_SECTIONS
from gpubench.readers.registry import read_file
from tests.formats.sample import JSON, JSONL
from tests.formats.schema import validate

FOLDER = Path(__file__).parent
MACHINES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir() and path.name != "__pycache__")

machines = pytest.mark.parametrize("machine", MACHINES)


def read(machine: str) -> tuple[list[Snapshot], list[RankFacts]]:
    inputs = sorted((FOLDER / machine).glob("from.*"))
    if inputs:
        snapshot = read_file(inputs[0])
        return [replace(snapshot, source=snapshot.source.replace(str(inputs[0]), inputs[0].name))], []
    return read_recording(FOLDER / machine)


@cache
def examined(machine: str) -> tuple[Metadata, Report]:
    snapshots, ranks = read(machine)
    nodes = [Topology(snapshot) for snapshot in snapshots]
    metadata = Metadata(
        gpubench_version="0",
        run_id="golden",
        started_at="2026-01-01T00:00:00+00:00",
        command=("gpubench", "topo"),
        subject="topo",
        origin="recorded",
        hosts=[snapshot.host for snapshot in snapshots],
        topology=nodes[0].fingerprint(),
        source=machine,
    )
    report = examine(nodes, ranks)
    return metadata, replace(report, sentence=sentence(metadata, report, SpeedFigures()))


@cache
def written(machine: str, format_: Format, section: str | None = None) -> str:
    metadata, report = examined(machine)
    stream = io.StringIO()
    writer = format_.writer(Target(stream=stream), Presentation(section=section))
    writer.begin(metadata, ())
    writer.end(report)
    return stream.getvalue()


def summary(document: dict[str, Any]) -> str:
    """The document with a line per column instead of per row, and the columns that all rows share in one line."""
    lines = []
    for section, rows in document.items():
        if section == "metadata":
            continue
        columns: dict[str, Any] = {"": rows}
        if isinstance(rows, list) and rows and isinstance(rows[0], dict):
            values = {name: [row.get(name) for row in rows] for name in rows[0]}
            shared = {name: column[0] for name, column in values.items() if column.count(column[0]) == len(rows)}
            named = {name: value for name, value in shared.items() if value is not None}
            columns = {f"[{len(rows)}]": named} | {f".{name}": values[name] for name in values.keys() - shared.keys()}
        elif isinstance(rows, dict):
            columns = {f".{name}": row for name, row in rows.items()}
        for name, value in sorted(columns.items()):
            lines.append(f'"{section}{name}": {json.dumps(value, ensure_ascii=False)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


@machines
@pytest.mark.parametrize("suffix", [".txt", ".json"])
def test_output_is_as_approved(machine: str, suffix: str, request: pytest.FixtureRequest) -> None:
    golden = FOLDER / machine / f"topo{suffix}"
    text = written(machine, TABLE) if suffix == ".txt" else summary(json.loads(written(machine, JSON)))
    if request.config.getoption("--golden"):
        golden.write_text(text, encoding="utf-8")
    assert golden.exists(), f"{golden} is missing: pytest tests/machines --golden writes it; read it before you commit"
    assert text == golden.read_text(encoding="utf-8")


@machines
def test_json_holds_every_section_and_validates(machine: str) -> None:
    document = json.loads(written(machine, JSON))
    validate(document)
    assert list(document)[6:] == list(TOPO_SECTIONS)
    names = set(document["matrix"])
    for source, row in document["matrix"].items():
        assert set(row) == names
        assert row[source] == "X"
        assert all(word in (*PATH_CLASSES, "X", "?") or word.startswith("NV") for word in row.values())
    assert {row["origin"] for row in (*document["gpus"], *document["pairs"], *document["nodes"])} <= {"recorded"}


@machines
def test_json_lines_say_what_json_says(machine: str) -> None:
    document = json.loads(written(machine, JSON))
    lines = [json.loads(line) for line in written(machine, JSONL).splitlines()]
    assert (lines[0]["kind"], lines[-1]["kind"]) == ("metadata", "report")
    assert lines[-1]["findings"] == document["findings"]
    assert {name: value for name, value in lines[0].items() if name != "kind"} == document["metadata"]
    sections: dict[str, Any] = {name: type(document[name])() for name in TOPO_SECTIONS[:-1]}
    for line in lines[1:-1]:
        section = sections[line.pop("kind")]
        if isinstance(section, dict):
            section[line["name"]] = line["cells"]
        else:
            section.append(line)
    assert sections == {name: document[name] for name in sections}


@machines
def test_csv_has_a_row_for_every_ordered_pair(machine: str) -> None:
    snapshots, _ = read(machine)
    rows = list(csv.DictReader(io.StringIO(written(machine, CSV))))
    devices = [len(snapshot.gpus) + len(snapshot.nics) for snapshot in snapshots]
    assert len(rows) == sum(count * (count - 1) for count in devices)
    assert all(tuple(row) == PAIR_COLUMNS for row in rows)


@machines
def test_csv_shows_the_section_asked_for(machine: str) -> None:
    document = json.loads(written(machine, JSON))
    for section in TOPO_SECTIONS:
        lines = list(csv.reader(io.StringIO(written(machine, CSV, section))))
        assert (section, len(lines)) == (section, len(document[section]) + 1)
        assert (section, len({len(line) for line in lines})) == (section, 1)


def test_machines_of_every_kind_are_there() -> None:
    assert len(MACHINES) >= 13
