"""The command line without ranks: help, options, and one clear message for everything that cannot be."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from gpubench.cli.commands.collective import checked, collective_help
from gpubench.collectives.record import Collective
from gpubench.collectives.registry import COLLECTIVES
from gpubench.errors import CouldNotMeasureError, GpubenchError, UsageError
from gpubench.formats.presenter import adapt_to_plain_stream, adapt_to_stream
from gpubench.formats.registry import Color, Presentation, parse_outputs
from gpubench.jobs.collective import job as alone
from gpubench.jobs.collective.nccl_tests import settle_nccl_tests
from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.jobs.runner import check_writable
from gpubench.machine.nvml import Driver
from gpubench.model.paths.transport import EvidenceUse
from gpubench.model.terms.operation import DataType, Placement, ReduceOp
from gpubench.model.terms.options import options_of, plan_from
from gpubench.model.terms.statistics import Mode, Sampling
from gpubench.ranks import launch
from tests.cli.running import ASCII, gpubench


def options(name: str = "allreduce", **given: object) -> CollectivePlan:
    assert given.keys() <= {option.field for option in options_of(CollectivePlan)}
    return checked(plan_from(CollectivePlan, settle_nccl_tests({**given, "command": name}), name))


def test_help_says_what_to_type_first_and_names_every_collective() -> None:
    result = gpubench("--help")
    assert result.returncode == 0
    assert "gpubench --simulate hgx-h100-8" in result.stdout
    for collective in COLLECTIVES:
        assert collective.name in result.stdout
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80


def test_version() -> None:
    assert gpubench("--version").stdout.startswith("gpubench 0.")


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda each: each.name)
def test_every_collective_has_help_of_its_own_in_eighty_columns(collective: Collective) -> None:
    from typer.testing import CliRunner

    from gpubench.cli.app import app

    result = CliRunner().invoke(app, [collective.name, "--help-all"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    assert ("--op" in result.output) == collective.reduces
    assert ("--root" in result.output) == collective.rooted
    assert f"gpubench {collective.name}" in result.output
    assert collective.description in collective_help(collective).about


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["allreduce", "--sizes", "4G:1K"], "in the wrong order"),
        (["allreduce", "--sizes", ""], "--sizes is empty"),
        (["allreduce", "--dtype", "float31"], "try:      --dtype float32"),
        (["allreduce", "--dtype", "zzz"], "one of int8, uint8"),
        (["allreduce", "--op", "summ"], "try:      --op sum"),
        (["allgather", "--op", "sum"], "--op"),
        (["allreduce", "--root", "1"], "--root"),
        (["alltoall", "--in-place"], "alltoall has no in-place form"),
        (["sendrecv", "--in-place"], "sendrecv has no in-place form"),
        (["allreduce", "--in-place", "--out-of-place"], "--in-place and --out-of-place exclude each other"),
        (["allreduce", "--backend", "ncl"], "try:      --backend nccl"),
        (["allreduce", "--format", "xml"], "one of table, csv, json, jsonl"),
        (["allreduce", "--output", "result.yaml"], "no format has this suffix"),
        (["allreduce", "--output", "/nowhere/result.csv"], "No such file or directory"),
        (["allreduce", "--output", "/proc/result.csv"], "--output /proc/result.csv cannot be written"),
        (["allreduce", "--output", "a.csv", "--output", "./a.csv"], "is set twice"),
        (["allreduce", "--color", "yes"], "one of auto, always, never"),
        (["allreduce", "--iters", "0"], "--iters"),
        (["allreduce", "--np", "0"], "--np"),
        (["allreduce", "--width", "3"], "--width"),
        (["broadcast", "--root", "2", "--backend", "host"], "a rank from 0 to 1"),
        (["broadcast", "--root", "-1", "--backend", "host"], "--root -1 is out of range for 2 ranks"),
        (["allreduce", "--graph", "2", "--backend", "host"], "--graph needs GPUs, and --backend host uses none"),
        (["allreduce", "--nccl-library", "/nowhere.so"], "there is no such file"),
        (["allreduce", "--nccl-library", __file__, "--backend", "host"], "--nccl-library needs GPUs"),
        (["allreduce", "--allocator", "nccl", "--backend", "host"], "leave --allocator nccl out"),
        (["allreduce", "--allocator", "cud"], "try:      --allocator cuda"),
        (["allreduce", "--nonsense"], "--nonsense"),
        (["explain", "--simulate", "hgx-h100-8"], "try:      gpubench check --simulate hgx-h100-8"),
    ],
)
def test_wrong_usage_is_one_clear_message(arguments: list[str], said: str) -> None:
    result = gpubench(*arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_machine_without_gpus_says_so() -> None:
    result = gpubench("allreduce", "--backend", "nccl")
    if result.returncode == 0:
        pytest.skip("this machine has GPUs")
    assert result.returncode == 3
    assert "no usable GPU" in result.stderr
    assert "--backend host" in result.stderr


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({"iters": "7"}, Sampling(Mode.THROUGHPUT, 7)),
        ({"mode": "latency"}, Sampling(Mode.LATENCY, 200)),
        ({"mode": "latency", "iters": "3"}, Sampling(Mode.LATENCY, 3)),
        ({"iters": "auto"}, Sampling(Mode.THROUGHPUT, None, 0.1)),
        ({"iters": "auto", "budget": 0.0}, Sampling(Mode.THROUGHPUT, None, 0.0)),
        ({"budget": 2.0}, Sampling(Mode.THROUGHPUT, None, 2.0)),
        ({"backends": "host"}, Sampling(Mode.THROUGHPUT, None, 0.1)),
        ({"graph_replays": 3}, Sampling(Mode.THROUGHPUT, 20)),
        ({"split": "pairs"}, Sampling(Mode.THROUGHPUT, 20)),
        ({"simulate": "hgx-h200-4"}, Sampling(Mode.THROUGHPUT, 20)),
    ],
)
def test_how_rows_are_timed(given: dict[str, Any], chosen: Sampling) -> None:
    assert options(**given).request.sampling == chosen


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"iters": "0"}, "--iters 0"),
        ({"iters": "-3"}, "--iters -3"),
        ({"iters": "all"}, "--iters all"),
        ({"iters": "²"}, "--iters ²"),
        ({"mode": "fast"}, "--mode 'fast' is not known"),
        ({"iters": "20", "budget": 2.0}, "--budget 2 without --iters auto"),
        ({"mode": "latency", "budget": 2.0}, "--budget 2 without --iters auto"),
        ({"graph_replays": 3, "budget": 2.0}, "--budget 2 without --iters auto"),
        ({"iters": "auto", "graph_replays": 3}, "--iters auto with --graph"),
    ],
)
def test_rows_that_cannot_be_timed_so(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        options(**given)


@pytest.mark.parametrize("text", ["node", "rail", "pairs", "2", "64"])
def test_groups_are_measured_without_evidence(text: str) -> None:
    chosen = options(split=text)
    assert (chosen.split, chosen.evidence) == (text, EvidenceUse.OFF)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"split": "2", "iters": "auto"}, "--iters auto with --split 2"),
        ({"split": "2", "strict": True}, "--strict with --split 2"),
        ({"split": "2", "shows_evidence": True}, "--evidence with --split 2"),
        ({"split": "node", "simulate": "hgx-h200-4", "record": "DIR"}, "--record with --split node"),
    ],
)
def test_what_cannot_be_in_groups(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as raised:
        options(**given)
    error = raised.value
    assert error.exit_code == 2
    assert all((error.expected, error.reason, error.next_step))


@pytest.mark.parametrize("text", ["0", "1", "nodes", "-2"])
def test_groups_that_mean_nothing(text: str) -> None:
    with pytest.raises(UsageError, match=f"--split {text}"):
        options(split=text)


def test_defaults_are_nccl_tests_but_for_the_number_of_iterations() -> None:
    chosen = options()
    assert (chosen.request.warmup, chosen.request.graph_replays, chosen.request.check) == (5, 0, True)
    assert chosen.request.sampling == Sampling(Mode.THROUGHPUT, None, 0.1)
    assert chosen.request.dtypes == (DataType.FLOAT32,)
    assert chosen.request.ops == (ReduceOp.SUM,)
    assert chosen.request.placements == (Placement.OUT_OF_PLACE, Placement.IN_PLACE)
    assert options("alltoall").request.placements == (Placement.OUT_OF_PLACE,)
    assert options(in_place=True).request.placements == (Placement.IN_PLACE,)
    assert options(out_of_place=True).request.placements == (Placement.OUT_OF_PLACE,)
    assert chosen.request_for("nccl").sizes[-1] == 2**32
    assert chosen.request_for("host").sizes[-1] < 2**30
    assert options(sizes="1K").request_for("nccl").sizes == (1024,)


def test_choices_may_be_listed_or_repeated() -> None:
    chosen = options(dtypes=["int8,float16", "int8"], ops=["max", "min, sum"])
    assert chosen.request.dtypes == (DataType.INT8, DataType.FLOAT16)
    assert chosen.request.ops == (ReduceOp.MAX, ReduceOp.MIN, ReduceOp.SUM)


def test_checking_an_output_changes_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "kept.csv"
    kept.write_text("earlier results")
    outputs = parse_outputs([str(kept), str(tmp_path / "new.json")])
    check_writable(outputs)
    assert kept.read_text() == "earlier results"
    assert list(tmp_path.iterdir()) == [kept]
    assert [output.format.name for output in outputs] == ["csv", "json"]
    with pytest.raises(UsageError, match="Is a directory"):
        check_writable(parse_outputs([str(folder_named_csv(tmp_path))]))
    check_writable(parse_outputs([f"{tmp_path}/folder.csv/"]))
    assert list((tmp_path / "folder.csv").iterdir()) == []


def folder_named_csv(parent: Path) -> Path:
    folder = parent / "folder.csv"
    folder.mkdir()
    return folder


HAS_GPUS = Driver(version="580", cuda=13000, gpus=4, visible=4)


@pytest.mark.parametrize(
    ("given", "driver", "ranks"),
    [
        ({}, Driver(), 2),
        ({"rank_counts": "5"}, Driver(), 5),
        ({}, HAS_GPUS, 4),
        ({"rank_counts": "2"}, HAS_GPUS, 2),
        ({"backends": "host"}, HAS_GPUS, 4),
        ({"backends": "host", "rank_counts": "9"}, HAS_GPUS, 9),
        ({}, Driver(gpus=4, visible=0), 2),
    ],
)
def test_one_rank_a_gpu_else_two(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], driver: Driver, ranks: int
) -> None:
    monkeypatch.setattr("gpubench.backends.cuda.check_installed", lambda _driver: None)
    assert alone.choose_ranks(options(**given), driver) == ranks


@pytest.mark.parametrize(
    ("given", "driver", "error", "said"),
    [
        ({"rank_counts": "8"}, HAS_GPUS, UsageError, "shows 4 GPUs"),
        ({"backends": "nccl"}, Driver(absent="no driver"), CouldNotMeasureError, "no driver"),
        ({"backends": "nccl"}, Driver(version="580"), CouldNotMeasureError, "the driver finds none"),
        ({"backends": "nccl"}, Driver(gpus=4), CouldNotMeasureError, "CUDA_VISIBLE_DEVICES hides the 4 GPUs"),
        ({"graph_replays": 1}, Driver(), UsageError, "--graph needs GPUs"),
        ({"nccl_library": __file__}, Driver(), UsageError, "--nccl-library needs GPUs"),
    ],
)
def test_what_this_machine_cannot_do_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], driver: Driver, error: type[GpubenchError], said: str
) -> None:
    monkeypatch.setattr("gpubench.backends.cuda.check_installed", lambda _driver: None)
    with pytest.raises(error, match=said):
        alone.choose_ranks(options(**given), driver)


class Terminal:
    def __init__(self, *, terminal: bool) -> None:
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize(
    ("color", "terminal", "environment", "colored"),
    [
        ("auto", True, {}, True),
        ("auto", False, {}, False),
        ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"TERM": "dumb"}, False),
        ("always", False, {"NO_COLOR": "1"}, True),
        ("never", True, {}, False),
    ],
)
def test_colours(color: str, terminal: bool, environment: dict[str, str], colored: bool) -> None:
    chosen = options(color=color, width=90).presentation
    assert chosen.color is Color(color)
    stream = Terminal(terminal=terminal)
    shown = adapt_to_stream(chosen, stream, environment)  # type: ignore[arg-type]
    assert (shown.width, shown.is_colored, shown.terminal) == (90, colored, terminal)


def test_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "77")
    assert adapt_to_stream(Presentation(), Terminal(terminal=True), {}).columns == 77  # type: ignore[arg-type]
    assert adapt_to_stream(Presentation(), Terminal(terminal=False), {}).columns == 100  # type: ignore[arg-type]
    assert adapt_to_plain_stream(Presentation()).columns == 77
    assert adapt_to_plain_stream(Presentation(width=60)).columns == 60


@pytest.mark.parametrize("arguments", [("topo", "--simulate", "hgx-h100-8"), ("allreduce", "--simulate", "hgx-h200-4")])
def test_what_an_encoding_cannot_show_is_spelled_out(arguments: tuple[str, ...]) -> None:
    result = gpubench(*arguments, env=ASCII)
    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii()
    assert "18 of 18 x 25" in result.stdout or "time us" in result.stdout
    assert "?" not in result.stdout.replace("  ?", "")


@pytest.mark.parametrize(("code", "starts"), [(launch.DAEMON_FAILED, 2), (1, 1)])
def test_a_launcher_whose_own_daemon_did_not_start_is_started_once_more(
    code: int, starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Any] = []
    real = launch.start

    def start(_command: Any, environment: Any) -> Any:
        jobs.append(real([sys.executable, "-c", f"raise SystemExit({code})"], environment))
        return jobs[-1]

    monkeypatch.setattr(launch, "start", start)
    with pytest.raises(CouldNotMeasureError, match=f"mpirun ended with exit code {code} before any rank started"):
        alone.launch_ranks(options(backends="host", sizes="1K"), ["allreduce"])
    assert len(jobs) == starts
    for job in jobs:
        job.stdout.close()


def test_help_has_its_options_under_headings() -> None:
    shown = gpubench("allreduce", "--help-all").stdout
    headings = re.findall(r"^(\w[\w ]*):$", shown, re.MULTILINE)
    assert headings == ["Examples", "Measure", "Judge", "NCCL", "Simulate and record", "Output", "Help"]
    under = dict(zip(headings, re.split(r"^\w[\w ]*:$", shown, flags=re.MULTILINE)[1:], strict=True))
    for heading, names in {
        "Measure": ("--sizes", "--iters", "--timeout"),
        "Judge": ("--strict", "--profile", "--expect-gpus"),
        "NCCL": ("--algo", "--graph", "--nccl-library", "-b SIZE"),
        "Simulate and record": ("--simulate", "--fault", "--record"),
        "Output": ("--format", "--output", "--quiet"),
    }.items():
        assert all(f" {name}" in under[heading] for name in names), heading


def test_timeout_says_the_same_everywhere() -> None:
    for command in ("topo", "p2p", "check", "scan", "allreduce", "watch", "plan", "overlap", "libraries"):
        told = " ".join(gpubench(command, "--help-all").stdout.partition("--timeout S ")[2].split())
        assert told.startswith("Give up after S seconds on "), command


def test_profiles_alone_shows_its_help() -> None:
    result = gpubench("profiles")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("Usage: ")
    assert "gpubench profiles show hgx-h100-8" in result.stdout
