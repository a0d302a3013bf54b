"""Every command on all that is recorded, and on simulated machines of each kind: JSON validates, formats agree."""

import csv
import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from gpubench.cli.app import app
from gpubench.errors import GpubenchError
from gpubench.formats.registry import FORMATS
from tests.cli.running import ROOT
from tests.formats.schema import validate
from tests.formats.test_documents import samples

MACHINES = sorted(path.parent for path in (ROOT / "tests" / "machines").glob("*/nodes"))
FILES = sorted((ROOT / "tests" / "machines").glob("*/from.*"))
LOGS = sorted(path for path in (ROOT / "tests" / "logs").iterdir() if path.is_dir())
RUNS = (
    *(("topo", "--replay", str(path)) for path in MACHINES),
    *(("topo", "--from", str(path)) for path in FILES),
    *(("explain", str(path)) for path in LOGS),
    *(("topo", "--simulate", name) for name in ("gb300-nvl72/8", "a100-pcie-2*2", "gh200-1*2", "hgx-h100-4*2")),
    *(("allreduce", "--simulate", name, "--sizes", "1K:1G:32") for name in ("gb200-nvl72", "l4-8", "hgx-h100-8")),
    ("sendrecv", "--simulate", "a10-4", "--sizes", "1K:1G:32"),
    *(("p2p", "--simulate", name) for name in ("a10-4", "hgx-h200-4", "h100-nvl-2", "rtx-4090-2", "gh200-1")),
    ("p2p", "--simulate", "hgx-h100-4", "--fault", "link0-3:staged=yes", "--fault", "gpu2:lost=yes"),
    *(("kv", "--simulate", name, "--blocks", "1,256") for name in ("hgx-h200-4", "rtx-4090-2", "gh200-1")),
    ("kv", "--simulate", "hgx-h200-2", "--memory", "malloc,async", "--fault", "link0-1:ipc=no"),
    ("allreduce", "--simulate", "hgx-h200-4", "--sizes", "1G", "--fault", "link0-1:staged=yes", "--strict"),
    ("scan", "--simulate", "hgx-h100-8*8", "--fault", "node3.nic5:bandwidth=0.5"),
    ("plan", "--parameters", "7B", "--simulate", "hgx-h200-8"),
    ("overlap", "--simulate", "hgx-h100-8", "--sizes", "64M"),
    ("watch", "--simulate", "hgx-h200-4", "--for", "3s"),
    ("check", "--simulate", "hgx-h200-4", "--quick"),
)  # fmt: skip


def outputs(arguments: tuple[str, ...], folder: Path) -> tuple[dict[str, str], int]:
    """All that one run writes, by format, and its exit code."""
    paths = {each.name: folder / f"result{each.suffix}" for each in FORMATS if each.suffix is not None}
    given = [word for path in paths.values() for word in ("--output", str(path))]
    result = CliRunner().invoke(app, [*arguments, *given, "--format", "github"])
    if isinstance(result.exception, GpubenchError):
        raise result.exception
    written = {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.exists()}
    return written | {"github": result.stdout}, result.exit_code


def case(words: tuple[str, ...]) -> Any:
    """A run as a parameter."""
    return pytest.param(words, id="-".join(Path(word).name for word in words))


@pytest.fixture(scope="module", params=map(case, RUNS))
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], int, Path]:
    """What a run wrote, its exit code, and the folder with its files."""
    folder = tmp_path_factory.mktemp("run")
    return *outputs(request.param, folder), folder


def test_all_formats_of_a_run_agree(ran: tuple[dict[str, str], int, Path]) -> None:
    written, code, _ = ran
    document = json.loads(written["json"])
    validate(document)
    verdict = document["verdict"]
    sentence = document["sentence"]
    word = sentence.partition(": ")[0]
    assert word in (verdict, f"{verdict} (simulated)")
    assert code == {"FAIL": 1, "ERROR": 3}.get(verdict, 0) or f"exit code {code} with" in sentence
    lines = [json.loads(line) for line in written["jsonl"].splitlines()]
    assert (lines[-1]["verdict"], lines[-1]["sentence"]) == (verdict, sentence)
    assert written["table"].splitlines()[-1] == sentence
    assert f": {verdict}</title>" in written["html"]
    assert f"{word}: " in written["markdown"].splitlines()[0]
    assert sentence.replace("%", "%25") in written["github"]
    suite = ElementTree.fromstring(written["junit"])[0].attrib
    assert (suite["failures"] != "0") == (verdict == "FAIL")
    assert (suite["errors"] != "0") >= (verdict == "ERROR")
    scraped = samples(written["prometheus"])
    assert [labels for (_, labels), value in scraped.items() if f',verdict="{verdict}"' in labels and value == 1]
    cells = {len(row) for row in csv.reader(io.StringIO(written["csv"]))}
    assert len(cells) == 1


def but_for_its_duration(text: str) -> list[str]:
    """The lines of an output but for how long its run took, which only the run itself knows."""
    return [line for line in text.splitlines() if "gpubench_last_run_duration_seconds" not in line]


def test_every_format_of_a_stored_result_is_that_of_its_run(
    ran: tuple[dict[str, str], int, Path], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Of runs of a kind every second one is read from jsonl, the others from json."""
    written, code, folder = ran
    place = RUNS.index(request.node.callspec.params["ran"])
    found, same_code = outputs(("report", str(folder / f"result.{('json', 'jsonl')[place % 2]}")), tmp_path)
    assert same_code == code
    assert found.keys() == written.keys()
    assert [name for name in written if but_for_its_duration(found[name]) != but_for_its_duration(written[name])] == []
