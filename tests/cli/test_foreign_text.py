"""Text that others chose comes in by every way there is, and does nothing on stdout, in files and on stderr."""

import csv
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpubench.cli import app as program
from gpubench.errors import GpubenchError
from gpubench.formats.registry import FORMATS
from gpubench.model.terms.units import format_error
from tests.cli.running import ROOT
from tests.formats.hostile import HOSTILE, PROBLEMS, WORST, line_problems

MACHINE = ROOT / "tests" / "machines" / "h200x4-vm"
LOGS = ROOT / "tests" / "logs" / "h200x4-p2p-disabled"
Way = Callable[[Sequence[str], Path], tuple[str, ...]]


def facts(texts: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Names of a host and of its GPUs, versions of its driver, names of processes: in this order, where not empty."""
    snapshot = json.loads((MACHINE / "nodes" / "vm.json").read_text())
    gpus = snapshot["gpus"] = snapshot["gpus"][:2]
    snapshot["pairs"] = [
        each for each in snapshot["pairs"] if {each["source"], each["destination"]} == {"GPU0", "GPU1"}
    ]
    held = [{"pid": 7, "memory_bytes": 1 << 30} for _ in gpus]
    for gpu, process in zip(gpus, held, strict=True):
        gpu["processes"] = [process]
    driver = snapshot["driver"]
    places = [(snapshot, "host"), *((gpu, "name") for gpu in gpus), (driver, "version"), (driver, "absent")]
    places += [(process, "name") for process in held]
    for (place, name), text in zip(places, texts, strict=False):
        place |= {name: text} if text else {}
    path = folder / "snapshot.json"
    path.write_text(json.dumps(snapshot))
    return "topo", "--from", str(path)


NAMES, FACTS = 3, 7
"""Of the facts, those that have to be printable, which come first; and all."""


VARIABLES = ("NCCL_ALGO", "CUDA_VISIBLE_DEVICES", *(f"NCCL_{name}" for name in ("PROTO", "NET", "IB_HCA", "DEBUG")))


def recorded_environment(texts: Sequence[str], folder: Path) -> tuple[str, ...]:
    shutil.copytree(MACHINE, folder / "machine")
    ranks = folder / "machine" / "ranks.jsonl"
    line = json.loads(ranks.read_text()) | {"environment": dict(zip(VARIABLES, texts, strict=False))}
    ranks.write_text(f"{json.dumps(line)}\n")
    return "topo", "--replay", str(folder / "machine")


def path_that_is_there(texts: Sequence[str], folder: Path) -> tuple[str, ...]:
    (text,) = texts
    path = folder / text.replace("/", "").replace("\0", "")[:80]
    shutil.copytree(LOGS, path)
    return "explain", str(path)


def path_that_is_not_there(texts: Sequence[str], folder: Path) -> tuple[str, ...]:
    (text,) = texts
    return "topo", "--from", str(folder / text.replace("\0", ""))


def option_value(texts: Sequence[str], folder: Path) -> tuple[str, ...]:
    (text,) = texts
    return "topo", "--simulate", "hgx-h200-4", "--fault", text


XML_ATTRIBUTES = ("GenuineIntel", "eth0", "32.0 GT/s PCIe")
"""Those that are shown."""


def xml_attributes(texts: Sequence[str], folder: Path) -> tuple[str, ...]:
    given = (ROOT / "tests" / "machines" / "h200x4-nccl-xml" / "from.xml").read_text()
    for name, text in zip(XML_ATTRIBUTES, texts, strict=False):
        given = given.replace(f'"{name}"', '"{}"'.format("".join(f"&#{ord(each)};" for each in text)))
    path = folder / "topo.xml"
    path.write_text(given)
    return "topo", "--from", str(path)


def log_line(texts: Sequence[str], folder: Path) -> tuple[str, ...]:
    (text,) = texts
    log = (LOGS / "p2poff.3936.log").read_bytes()
    said = text.encode("utf-8", "surrogatepass")
    more = [
        b"vm:3936:3936 [0] NCCL WARN " + said,
        b"vm:3936:3936 [0] NCCL INFO NCCL_ALGO set by environment to " + said,
        b"vm:3936:3936 [0] misc/socket.cc:1 NCCL WARN socketStartConnect: Connect to 192.0.2.1<1> failed : " + said,
        said,
    ]
    path = folder / "nccl.log"
    path.write_bytes(log + b"".join(line + b"\n" for line in more))
    return "explain", str(path)


def log_host(texts: Sequence[str], folder: Path) -> tuple[str, ...]:
    (text,) = texts
    for each in LOGS.iterdir():
        said = text.encode("utf-8", "surrogatepass")
        (folder / each.name).write_bytes(each.read_bytes().replace(b"vm:", said + b":"))
    return "explain", str(folder)


def profile_description(texts: Sequence[str], folder: Path) -> tuple[str, ...]:
    (text,) = texts
    path = folder / "mine.toml"
    profile = (ROOT / "profiles" / "hgx-h200-4.toml").read_text()
    said = json.dumps(text.replace("\ud800", "").replace("\udfff", "").replace("\x7f", "")).replace("\\ud", "x")
    for name in ("title", "note"):
        profile = "\n".join(
            f"{name} = {said}" if line.startswith(f"{name} = ") else line for line in profile.split("\n")
        )
    path.write_text(profile)
    return "profiles", "show", str(path)


@cache
def _measured() -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        made = ("allreduce", "--simulate", "hgx-h200-4", "--sizes", "1M", "--output", str(path))
        assert CliRunner().invoke(program.app, made).exit_code == 0
        return path.read_text()


def result(texts: Sequence[str], folder: Path) -> tuple[str, ...]:
    (text,) = texts
    paths = [folder / "old.json", folder / "new.json"]
    paths[0].write_text(_measured())
    document = json.loads(paths[0].read_text())
    document["metadata"] |= {"hosts": [text], "source": text, "environment": {"NCCL_ALGO": text}}
    document["metadata"]["libraries"] = {"NCCL": text}
    for row in document["rows"]:
        row |= {"note": text, "group": text, "transport": text, "time_us": row["time_us"] * 3}
    paths[1].write_text(json.dumps(document))
    return "compare", *map(str, paths)


WAYS: tuple[Way, ...] = (
    *(facts, recorded_environment, xml_attributes, path_that_is_there, path_that_is_not_there),
    *(option_value, log_line, log_host, profile_description, result),
)
WIDE = ("--width", "1000")
"""A line that breaks between two words is no line of another's: the length of the test's folder must not decide."""

ways = pytest.mark.parametrize("way", WAYS, ids=lambda each: each.__name__)


def outputs(arguments: tuple[str, ...], folder: Path) -> Iterator[tuple[str, str]]:
    """What a run with these arguments writes: formats with their texts; of an error, what is told of it.

    Formats are written into files by what writes them to stdout (test_every_output.py), so that one run has them all.
    """
    if arguments[0] == "profiles":
        shown = CliRunner().invoke(program.app, arguments)
        yield from _told(shown.exception)
        yield "table", shown.stdout
        return
    folder.mkdir()
    files = {each.name: folder / f"out{each.suffix}" for each in FORMATS if each.suffix is not None}
    given = [*WIDE, *(word for path in files.values() for word in ("--output", str(path)))]
    shown = CliRunner().invoke(program.app, [*arguments, *given, "--format", "github"])
    yield from _told(shown.exception)
    yield from ((name, path.read_bytes().decode("utf-8")) for name, path in files.items() if path.exists())
    yield "stderr", shown.stderr
    if shown.stdout:
        yield "github", shown.stdout


def _told(error: BaseException | None) -> Iterator[tuple[str, str]]:
    if isinstance(error, GpubenchError):
        yield "stderr", format_error(error)
    elif error is not None and not isinstance(error, SystemExit):
        raise error


@pytest.fixture(autouse=True)
def _long_cells() -> Iterator[None]:
    before = csv.field_size_limit(1 << 30)
    yield
    csv.field_size_limit(before)


def texts_of(way: Way) -> list[str]:
    """The worst come by every way, each other one by one way, in turn: each is in every format in tests/formats."""
    turn = WAYS.index(way)
    return [text for at, (name, text) in enumerate(HOSTILE.items()) if name in WORST or at % len(WAYS) == turn]


def runs(way: Way) -> Iterator[Sequence[str]]:
    """The texts of each run: every text of the way, and each of them as each of the facts."""
    texts = texts_of(way)
    if way is facts:
        yield from _turns([text for text in texts if text.isprintable()], FACTS)
        refused = [text for text in texts if not text.isprintable()]
        yield from ([text] for text in refused)
        yield from (["", text] for text in refused)
        yield from ([*[""] * NAMES, *turn] for turn in _turns(refused, FACTS - NAMES))
        return
    several: dict[Way, int] = {recorded_environment: len(VARIABLES), xml_attributes: len(XML_ATTRIBUTES)}
    together = several.get(way, 1)
    alone = [text for text in texts if way is xml_attributes and not _is_of_xml(text)]
    rest = [text for text in texts if text not in alone]
    yield from ([text] for text in alone)
    yield from (rest[first : first + together] for first in range(0, len(rest), together))


def _turns(texts: Sequence[str], places: int) -> Iterator[Sequence[str]]:
    """Every text at every place."""
    return ([*texts[first:], *texts[:first]][:places] for first in range(len(texts)))


def _is_of_xml(text: str) -> bool:
    """False for what no file of XML may hold, which is refused with all that is in it."""
    return not any((each < " " and each not in "\t\n\r") or "\ud800" <= each <= "\udfff" for each in text)


@ways
def test_text_of_others_is_inert_by_whatever_way_it_comes(way: Way, tmp_path: Path) -> None:
    found = []
    for number, texts in enumerate(runs(way)):
        folder = tmp_path / str(number)
        (folder / "in").mkdir(parents=True)
        try:
            arguments = way(texts, folder / "in")
        except (OSError, UnicodeEncodeError):
            continue  # no file system, no command line holds it
        found += [
            f"{name}: {problem}, of {[text[:40] for text in texts]!a}"
            for name, written in outputs(arguments, folder / "out")
            for problem in PROBLEMS.get(name, line_problems)(written)
        ]
    assert found == []


@ways
def test_every_way_leads_to_an_output(way: Way, tmp_path: Path) -> None:
    """Else the test above would pass because nothing came through."""
    (tmp_path / "in").mkdir()
    markers = [f"Marker{place:02}" for place in range(max(map(len, runs(way))))]
    written = list(outputs(way(markers, tmp_path / "in"), tmp_path / "out"))
    told = [{name for name, text in written if marker in text} for marker in markers]
    shown, kept = {"json", "table"}, {"json", "jsonl"}
    expected: dict[Way, list[set[str]]] = {
        facts: [shown] * (FACTS - 2) + [kept] * 2,
        recorded_environment: [kept] * len(VARIABLES),
        profile_description: [{"table"}],
        path_that_is_not_there: [{"stderr"}],
        option_value: [{"stderr"}],
    }
    for place, formats in enumerate(expected.get(way, [shown] * len(markers))):
        assert told[place] >= formats, (place, told)
