"""Text that others chose comes in by every way there is, and does nothing on stdout, in files and on stderr."""

import csv
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gpubench.cli import app as program
from gpubench.errors import GpubenchError
from gpubench.formats.registry import FORMATS
from gpubench.model.terms.units import error_text
from tests.cli.running import ROOT
from tests.formats.hostile import HOSTILE, PROBLEMS, line_problems
from tests.together import together

MACHINE = ROOT / "tests" / "machines" / "h200x4-vm"
LOGS = ROOT / "tests" / "logs" / "h200x4-p2p-disabled"
Way = Callable[[str, Path], tuple[str, ...]]


def _snapshot(folder: Path, change: Callable[[dict[str, Any]], None]) -> tuple[str, ...]:
    snapshot = json.loads((MACHINE / "nodes" / "vm.json").read_text())
    change(snapshot)
    path = folder / "snapshot.json"
    path.write_text(json.dumps(snapshot))
    return "topo", "--from", str(path)


def host_name(text: str, folder: Path) -> tuple[str, ...]:
    return _snapshot(folder, lambda snapshot: snapshot.update(host=text))


def gpu_name(text: str, folder: Path) -> tuple[str, ...]:
    return _snapshot(folder, lambda snapshot: [gpu.update(name=text) for gpu in snapshot["gpus"]].clear())


def process_name(text: str, folder: Path) -> tuple[str, ...]:
    held = {"pid": 7, "name": text, "memory_bytes": 1 << 30, "container": text}
    return _snapshot(folder, lambda snapshot: [gpu.update(processes=[held]) for gpu in snapshot["gpus"]].clear())


def driver_version(text: str, folder: Path) -> tuple[str, ...]:
    return _snapshot(folder, lambda snapshot: snapshot["driver"].update(version=text, absent=text))


def recorded_environment(text: str, folder: Path) -> tuple[str, ...]:
    shutil.copytree(MACHINE, folder / "machine")
    ranks = folder / "machine" / "ranks.jsonl"
    lines = [json.loads(line) for line in ranks.read_text().splitlines()]
    for line in lines:
        line["environment"] = {"NCCL_ALGO": text, "CUDA_VISIBLE_DEVICES": text}
    ranks.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return "topo", "--replay", str(folder / "machine")


def path_that_is_there(text: str, folder: Path) -> tuple[str, ...]:
    path = folder / text.replace("/", "").replace("\0", "")[:80]
    shutil.copytree(LOGS, path)
    return "explain", str(path)


def path_that_is_not_there(text: str, folder: Path) -> tuple[str, ...]:
    return "topo", "--from", str(folder / text.replace("\0", ""))


def option_value(text: str, folder: Path) -> tuple[str, ...]:
    return "topo", "--simulate", "hgx-h200-4", "--fault", text


def xml_attribute(text: str, folder: Path) -> tuple[str, ...]:
    shown = "".join(f"&#{ord(each)};" for each in text)
    given = (ROOT / "tests" / "machines" / "h200x4-nccl-xml" / "from.xml").read_text()
    for name in ('"GenuineIntel"', '"x86_64"', '"eth0"', '"32.0 GT/s PCIe"', '"0x406a10004657636"'):
        given = given.replace(name, f'"{shown}"')
    path = folder / "topo.xml"
    path.write_text(given)
    return "topo", "--from", str(path)


def log_line(text: str, folder: Path) -> tuple[str, ...]:
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


def log_host(text: str, folder: Path) -> tuple[str, ...]:
    for each in LOGS.iterdir():
        said = text.encode("utf-8", "surrogatepass")
        (folder / each.name).write_bytes(each.read_bytes().replace(b"vm:", said + b":"))
    return "explain", str(folder)


def profile_description(text: str, folder: Path) -> tuple[str, ...]:
    path = folder / "mine.toml"
    profile = (ROOT / "profiles" / "hgx-h200-4.toml").read_text()
    said = json.dumps(text.replace("\ud800", "").replace("\udfff", "").replace("\x7f", "")).replace("\\ud", "x")
    for name in ("title", "note"):
        profile = "\n".join(
            f"{name} = {said}" if line.startswith(f"{name} = ") else line for line in profile.split("\n")
        )
    path.write_text(profile)
    return "profiles", "show", str(path)


def result(text: str, folder: Path) -> tuple[str, ...]:
    paths = [folder / "old.json", folder / "new.json"]
    made = ("allreduce", "--simulate", "hgx-h200-4", "--sizes", "1M", "--output", str(paths[0]))
    assert CliRunner().invoke(program.app, made).exit_code == 0
    document = json.loads(paths[0].read_text())
    document["metadata"] |= {"hosts": [text], "source": text, "environment": {"NCCL_ALGO": text}}
    document["metadata"]["libraries"] = {"NCCL": text}
    for row in document["rows"]:
        row |= {"note": text, "group": text, "transport": text, "time_us": row["time_us"] * 3}
    paths[1].write_text(json.dumps(document))
    return "compare", *map(str, paths)


WAYS: tuple[Way, ...] = (
    *(host_name, gpu_name, process_name, driver_version, recorded_environment, xml_attribute),
    *(path_that_is_there, path_that_is_not_there, option_value, log_line, log_host, profile_description, result),
)
WIDE = ("--width", "1000")
"""A line that breaks between two words is no line of another's: the length of the test's folder must not decide."""

hostile = together("text", HOSTILE.values(), ids=lambda text: repr(text[:40]))
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
        yield "stderr", error_text(error)
    elif error is not None and not isinstance(error, SystemExit):
        raise error


@pytest.fixture(autouse=True)
def _long_cells() -> Iterator[None]:
    before = csv.field_size_limit(1 << 30)
    yield
    csv.field_size_limit(before)


@ways
@hostile
def test_text_of_others_is_inert_by_whatever_way_it_comes(way: Way, text: str, tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    (folder / "in").mkdir()
    try:
        arguments = way(text, folder / "in")
    except (OSError, UnicodeEncodeError):
        return  # no file system, no command line holds it
    found = [
        f"{name}: {problem}"
        for name, written in outputs(arguments, folder / "out")
        for problem in PROBLEMS.get(name, line_problems)(written)
    ]
    assert found == []


@ways
def test_every_way_leads_to_an_output(way: Way, tmp_path: Path) -> None:
    """Else the test above would pass because nothing came through."""
    (tmp_path / "in").mkdir()
    told = {name for name, text in outputs(way("Marker", tmp_path / "in"), tmp_path / "out") if "Marker" in text}
    only: dict[Way, set[str]] = {profile_description: {"table"}}
    only |= {each: {"stderr"} for each in (path_that_is_not_there, option_value)}
    only |= {each: {"json", "jsonl"} for each in (process_name, recorded_environment)}
    assert told == only.get(way, {"json", "table", "markdown"} | told), told
