"""Rows of nodes that are alike: what is written in short is read as what it was, and nothing else is taken for it."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.errors import UsageError
from gpubench.model.results.report import Table, VerdictRow
from gpubench.model.results.result_file import ALIKE, HOST_FIELDS, UnfoldedRows, alike_rows
from gpubench.readers.results.gpubench_json import read
from tests.cli.running import gpubench
from tests.formats.schema import VALIDATOR

LEAST_ROWS = 512
"""In place of thousands, for which it takes twice as many nodes."""

NODES = {"topo": 10, "check": 7}
"""As few as have enough rows, of which those of two or three nodes are written."""

TOPO = ("--fault", "node7.gpu1:nvlink=12", "--fault", "node9.nic0:missing=yes")
RUNS = (("topo", *TOPO), ("check", "--fault", "node3.gpu5:nvlink=12"))


@pytest.fixture(autouse=True, scope="module")
def _less_is_enough() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gpubench.model.results.result_file.LEAST_ROWS", LEAST_ROWS)
        yield


def row(node: str, subject: str, verdict: str) -> VerdictRow:
    return VerdictRow(scope="gpu", node=node, subject=subject, verdict=verdict, findings=(), origin="simulated")


def folded(rows: list[VerdictRow]) -> tuple[list[dict[str, Any]], list[Any]] | None:
    """What is written of these rows, as it is read again, however few they are."""
    found = alike_rows("verdicts", Table(VerdictRow.columns(), lambda: rows))
    if found is None:
        return None
    written, nodes = json.loads(
        json.dumps([[each.to_record() for part in found.written for each in part], found.nodes])
    )
    return written, nodes


@given(st.lists(st.lists(st.sampled_from(["PASS", "FAIL"]), min_size=1, max_size=3), min_size=1, max_size=6))
def test_what_is_written_in_short_is_read_in_full(nodes: list[list[str]]) -> None:
    least = pytest.MonkeyPatch()
    least.setattr("gpubench.model.results.result_file.LEAST_ROWS", 1)
    rows = [
        row(f"node{number}", f"GPU{gpu}", verdict)
        for number, verdicts in enumerate(nodes)
        for gpu, verdict in enumerate(verdicts)
    ]
    found = folded(rows)
    least.undo()
    assert found is not None
    written, told = found
    unfolded = UnfoldedRows(written, told, HOST_FIELDS["verdicts"])
    assert len(unfolded) == len(rows)
    assert [*unfolded] == json.loads(json.dumps([each.to_record() for each in rows]))


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], tuple[Path, Path]]:
    """The JSON of a run on many nodes, and its CSV of pairs, which has every row."""

    @cache
    def stored(words: tuple[str, ...]) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("alike")
        outputs = ("-o", str(folder / "run.json"), "-o", str(folder / "run.csv"), "--section", "pairs")
        command, *faults = words
        gpubench(command, "--simulate", f"hgx-h100-8*{NODES[command]}", *faults, *outputs)
        return folder / "run.json", folder / "run.csv"

    return stored


@pytest.fixture(scope="module", params=RUNS, ids=lambda words: str(words[0]))
def stored(request: pytest.FixtureRequest, run_of: Callable[[tuple[str, ...]], tuple[Path, Path]]) -> tuple[Path, Path]:
    return run_of(request.param)


def test_a_document_of_many_nodes_is_short_and_every_format_of_it_is_that_of_its_run(
    stored: tuple[Path, Path], tmp_path: Path
) -> None:
    source, table = stored
    document = json.loads(source.read_text())
    VALIDATOR.validate({name: part[:20] if isinstance(part, list) else part for name, part in document.items()})
    rows = table.read_text().count("\n") - 1
    assert rows > LEAST_ROWS
    assert len(document["pairs"]) * 3 < rows
    assert {name for each in document[ALIKE]["pairs"] for name in each["nodes"]} == {*document["metadata"]["hosts"]}
    again = ("-o", str(tmp_path / "again.json"), "-o", str(tmp_path / "again.csv"), "--section", "pairs")
    ended = gpubench("report", str(source), *again, "--summary")
    assert ended.stdout.rstrip() == document["sentence"]
    assert (tmp_path / "again.csv").read_text() == table.read_text()
    assert (tmp_path / "again.json").read_text() == source.read_text()


def test_a_document_that_was_written_out_is_the_same_as_one_in_short(stored: tuple[Path, Path], tmp_path: Path) -> None:
    """As those of before: nobody has to measure again."""
    document = json.loads(stored[0].read_text())
    for section, nodes in document.pop(ALIKE).items():
        document[section] = [*UnfoldedRows(document[section], nodes, HOST_FIELDS[section])]
    old, again = tmp_path / "old.json", tmp_path / "again.json"
    old.write_text(json.dumps(document))
    assert len(old.read_text()) > 2 * len(stored[0].read_text())
    gpubench("report", str(old), "-o", str(again), "-q")
    assert again.read_text() == stored[0].read_text()


@pytest.fixture(scope="module")
def checked(run_of: Callable[[tuple[str, ...]], tuple[Path, Path]]) -> Path:
    """The JSON of the smaller run; what is refused is the same section of each."""
    return run_of(RUNS[1])[0]


def _too_many(alike: dict[str, Any]) -> None:
    alike["pairs"] = [*alike["pairs"], *[{"nodes": ["x"] * 10_000, "as": "node0"}] * 2]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda alike: alike["pairs"].append({"nodes": ["x"], "as": "nobody"}), "x does not fit the rows of nobody"),
        (
            lambda alike: alike["pairs"].append({"nodes": ["x"], "as": "node0", "values": {"note": ["a"]}}),
            "does not fit",
        ),
        (lambda alike: alike["pairs"].append({"nodes": ["x"], "as": "node0", "values": {"no": []}}), "does not fit"),
        (lambda alike: alike["pairs"].append({"nodes": [7], "as": "node0"}), "a node without a name"),
        (lambda alike: alike["pairs"].append({"nodes": 7}), "alike.pairs"),
        (lambda alike: alike["pairs"].append([]), "alike.pairs"),
        (lambda alike: alike.update(pairs=None), "alike.pairs"),
        (lambda alike: alike.update(kinds=[]), "alike has no sections of nodes"),
        (_too_many, "rows"),
    ],
)
def test_what_does_not_fit_is_refused(edit: Callable[[dict[str, Any]], object], said: str, checked: Path) -> None:
    document = json.loads(checked.read_text())
    edit(document[ALIKE])
    with pytest.raises(UsageError) as refused:
        read(json.dumps(document), "edited.json")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("cell", "said"), [(-1.0, "bandwidth_gb_s is -1.0"), ("fast", "bandwidth_gb_s is 'fast'"), (7, "")]
)
def test_cells_of_one_node_are_checked_as_all_others(cell: Any, said: str, checked: Path) -> None:
    """Rows are read alike in short and written out, and what cannot be is named with its place in all rows."""
    document = json.loads(checked.read_text())
    own = [row for row in document["pairs"] if row["source_node"] == "node0"]
    cells = [row["bandwidth_gb_s"] for row in own[:-1]]
    values = {"bandwidth_gb_s": [*cells, cell], "note": [f"row {number}" for number in range(len(own))]}
    document[ALIKE]["pairs"] = [{"nodes": ["node0"]}, {"nodes": ["x"], "as": "node0", "values": values}]
    document["pairs"] = own
    written = document | {"pairs": [*UnfoldedRows(document["pairs"], document[ALIKE]["pairs"], HOST_FIELDS["pairs"])]}
    del written[ALIKE]
    texts = json.dumps(document), json.dumps(written)
    if said:
        for text in texts:
            with pytest.raises(UsageError, match=f"pairs.{len(written['pairs']) - 1}..{said}"):
                read(text, "a.json")
    else:
        short, long = ([*read(text, "a.json").pairs] for text in texts)
        assert short == long
        assert (short[-1].bandwidth_gb_s, short[-1].source_node, short[-1].note) == (7, "x", f"row {len(own) - 1}")
        assert type(short[-1].bandwidth_gb_s) is float
