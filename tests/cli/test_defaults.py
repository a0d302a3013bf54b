"""Options that nobody gave on the command line: the environment comes before a file of the current folder."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import TypeVar, cast

import pytest

from gpubench.backends.mpi.group import AloneGroup
from gpubench.cli.defaults import MOST_BYTES, options_of_all_commands, variable_name
from gpubench.errors import UsageError
from gpubench.jobs.rank import AgreedError, agree_on_defaults
from gpubench.ranks.launch import find_launcher
from tests.cli.running import MPI_ENVIRONMENT, PROGRAM, ROOT, SECONDS, environment, gpubench, mpirun

T = TypeVar("T")
MACHINE = ("--simulate", "hgx-h200-4")
TOPO = ("topo", *MACHINE)
ALLREDUCE = ("allreduce", *MACHINE, "--sizes", "1K")


def document(text: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(text)
    return found


def test_a_variable_is_the_default_of_its_option() -> None:
    result = gpubench(*TOPO, env=environment(GPUBENCH_FORMAT="json", GPUBENCH_STRICT="yes", GPUBENCH_TIMEOUT="60"))
    metadata = json.loads(result.stdout)["metadata"]
    assert (metadata["options"]["strict"], metadata["options"]["timeout_s"]) == (True, 60)
    assert metadata["defaults"] == {
        "--strict": "GPUBENCH_STRICT=yes",
        "--timeout": "GPUBENCH_TIMEOUT=60",
        "--format": "GPUBENCH_FORMAT=json",
    }
    assert metadata["defaults_file"] is None


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    (tmp_path / "gpubench.toml").write_text(
        'format = "json"\ntimeout = 1\nwidth = 90\nseed = 7\n[topo]\ntimeout = 2\nprofile = "hgx-h200-4"\n'
    )
    metadata = json.loads(gpubench(*TOPO, cwd=tmp_path).stdout)["metadata"]
    assert metadata["options"]["timeout_s"] == 2
    assert metadata["defaults"] == {
        "--seed": "seed = 7 in gpubench.toml",
        "--timeout": "timeout = 2 in gpubench.toml, [topo]",
        "--profile": "profile = hgx-h200-4 in gpubench.toml, [topo]",
        "--format": "format = json in gpubench.toml",
        "--width": "width = 90 in gpubench.toml",
    }
    assert metadata["defaults_file"] == "gpubench.toml"
    variable = environment(GPUBENCH_TIMEOUT="3")
    assert json.loads(gpubench(*TOPO, cwd=tmp_path, env=variable).stdout)["metadata"]["options"]["timeout_s"] == 3
    given = json.loads(gpubench(*TOPO, "--timeout", "4", cwd=tmp_path, env=variable).stdout)["metadata"]
    assert given["options"]["timeout_s"] == 4
    assert "--timeout" not in given["defaults"]


def test_a_table_of_another_command_means_nothing(tmp_path: Path) -> None:
    (tmp_path / "gpubench.toml").write_text('[allreduce]\nformat = "json"\n[check]\nquick = true\n')
    assert gpubench(*TOPO, cwd=tmp_path).stdout.startswith("gpubench ")


def test_an_option_on_top_is_for_the_commands_that_have_it(tmp_path: Path) -> None:
    (tmp_path / "gpubench.toml").write_text('sizes = "2K"\nquick = true\nformat = "json"\n')
    rows = json.loads(gpubench("allreduce", *MACHINE, cwd=tmp_path).stdout)["rows"]
    assert {row["size_bytes"] for row in rows} == {2048}
    assert gpubench(*TOPO, cwd=tmp_path).returncode == 0


def test_pyproject_has_a_table_and_the_own_file_comes_first(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text(
        '[project]\nname = "mine"\n[tool.gpubench]\nformat = "csv"\n[tool.gpubench.topo]\nsection = "nics"\n'
    )
    assert gpubench(*TOPO, cwd=tmp_path).stdout.startswith("node,")
    (tmp_path / "gpubench.toml").write_text('format = "json"\n')
    assert json.loads(gpubench(*TOPO, cwd=tmp_path).stdout)["metadata"]["defaults_file"] == "gpubench.toml"


def test_a_project_that_says_nothing_of_gpubench_may_be_broken(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project\n")
    assert gpubench(*TOPO, cwd=tmp_path).returncode == 0


def test_several_values_are_replaced_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "gpubench.toml").write_text('output = ["a.json", "b.csv"]\n')
    assert gpubench(*TOPO, cwd=tmp_path).returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"gpubench.toml", "a.json", "b.csv"}
    assert gpubench(*TOPO, "-o", "c.json", cwd=tmp_path).returncode == 0
    assert document((tmp_path / "c.json").read_text())["verdict"] == "PASS"
    assert not {"--output"} & set(json.loads((tmp_path / "c.json").read_text())["metadata"]["defaults"])


def test_a_flag_can_be_switched_off_and_given_again() -> None:
    off = environment(GPUBENCH_HOST="off", GPUBENCH_FORMAT="json")
    for more, switched_off in (((), True), (("--host",), False)):
        found = json.loads(gpubench("p2p", *MACHINE, *more, env=off).stdout)["metadata"]["defaults"]
        assert ("--host" in found) is switched_off


def test_verbose_headers_say_what_was_read(tmp_path: Path) -> None:
    (tmp_path / "gpubench.toml").write_text("seed = 3\n")
    for command in (TOPO, ALLREDUCE, ("check", "--quick", *MACHINE), ("p2p", "--sizes", "1M", *MACHINE)):
        text = gpubench(*command, "-v", cwd=tmp_path).stdout
        assert "  options from gpubench.toml of this folder\n" in text, command
        assert "  --seed by seed = 3 in gpubench.toml\n" in text, command
        assert "gpubench.toml" not in gpubench(*command, cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("GPUBENCH_TIMEOUT", "soon", "expected: a number from 0.1 to 86400"),
        ("GPUBENCH_TIMEOUT", "0", "--timeout 0\n"),
        ("GPUBENCH_FORMAT", "jsno", "--format 'jsno' is not known"),
        ("GPUBENCH_PROFILE", "no-such", "no profile is called 'no-such'"),
        ("GPUBENCH_FROM", "/nowhere.xml", "--from and --simulate exclude each other"),
        ("GPUBENCH_OUTPUT", "result", "--output result: no format has this suffix"),
        ("GPUBENCH_STRICT", "maybe", "is not yes or no"),
    ],
)
def test_a_wrong_value_is_told_with_its_variable(variable: str, value: str, said: str) -> None:
    result = gpubench(*TOPO, env=environment(**{variable: value}))
    assert (result.returncode, result.stdout) == (2, "")
    assert said in result.stderr
    assert f"{variable}={value}" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("content", "said", "next_step"),
    [
        ("timout = 60\n", "gpubench.toml: no command has an option timout", "try:      timeout"),
        ("[topo]\nsizes = '1K'\n", "gpubench.toml, [topo]: no option sizes", "expected: an option of gpubench topo"),
        ("[tpo]\n", "no command with options is called tpo", "try:      topo"),
        ("[profiles]\n", "no command with options is called profiles", "expected: one of check, scan"),
        ("timeout = [1, 2]\n", "timeout = [1, 2] in gpubench.toml is not a value", "a quoted text or a number"),
        ("timeout = true\n", "timeout = true in gpubench.toml is not a value", "a quoted text or a number"),
        ("strict = 'yes'\n", "strict = yes in gpubench.toml is not true or false", "without quotes"),
        ("width = 12\n", "--width 12\n", "set by:   width = 12 in gpubench.toml"),
        ("timeout = 60\ntimeout = 61\n", "gpubench.toml: not TOML", "GPUBENCH_DEFAULTS=off, to ignore the file"),
        ("\xff", "gpubench.toml is not UTF-8 text", "GPUBENCH_DEFAULTS=off, to ignore the file"),
        ("#" * (MOST_BYTES + 1), "gpubench.toml has more than 1 MiB", "GPUBENCH_DEFAULTS=off, to ignore the file"),
    ],
    ids=lambda text: text.strip()[:20],
)
def test_a_file_that_cannot_be_right_is_refused(content: str, said: str, next_step: str, tmp_path: Path) -> None:
    (tmp_path / "gpubench.toml").write_bytes(content.encode("latin-1"))
    result = gpubench(*TOPO, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert said in result.stderr
    assert next_step in result.stderr


def test_a_file_that_cannot_be_right_can_be_ignored_and_leaves_the_help(tmp_path: Path) -> None:
    for content in ("timout = 60\n", "[topo\n"):
        (tmp_path / "gpubench.toml").write_text(content)
        assert gpubench(*TOPO, cwd=tmp_path, env=environment(GPUBENCH_DEFAULTS="off")).returncode == 0
        assert gpubench("topo", "--help", cwd=tmp_path).returncode == 0


def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "gpubench.toml"
    file.write_text("timeout = 60\n")
    file.chmod(0o646)
    assert "a file that can be written by anyone" in gpubench(*TOPO, cwd=tmp_path).stderr
    file.chmod(0o664)
    assert gpubench(*TOPO, cwd=tmp_path).returncode == 0
    if os.geteuid() == 0:
        os.chown(file, 12345, -1)
        result = gpubench(*TOPO, cwd=tmp_path)
        assert (result.returncode, "another user owns" in result.stderr) == (2, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone gives files away")
@pytest.mark.parametrize("name", ["gpubench.toml", "pyproject.toml"])
def test_a_link_of_somebody_else_to_a_file_of_ones_own_is_refused(name: str, tmp_path: Path) -> None:
    target, folder = tmp_path / "mine.toml", tmp_path / "shared"
    target.write_text("tool.gpubench.timeout = 60\n" if name == "pyproject.toml" else "timeout = 60\n")
    folder.mkdir()
    (folder / name).symlink_to(target)
    assert gpubench(*TOPO, cwd=folder).returncode == 0
    os.lchown(folder / name, 12345, -1)
    result = gpubench(*TOPO, cwd=folder)
    assert (result.returncode, "another user owns or links to" in result.stderr) == (2, True), result.stderr


def test_a_pipe_or_a_folder_of_that_name_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gpubench.toml")
    assert "gpubench.toml is a pipe" in gpubench(*TOPO, cwd=tmp_path).stderr
    (tmp_path / "gpubench.toml").unlink()
    (tmp_path / "gpubench.toml").mkdir()
    result = gpubench(*TOPO, cwd=tmp_path)
    assert (result.returncode, "cannot be read: Is a directory" in result.stderr) == (2, True), result.stderr


def test_what_is_neither_on_nor_off_is_refused() -> None:
    assert "GPUBENCH_DEFAULTS=on" in gpubench(*TOPO, env=environment(GPUBENCH_DEFAULTS="on")).stderr


@pytest.mark.parametrize(
    ("by_default", "given", "is_quiet"), [("GPUBENCH_VERBOSE", "-q", True), ("GPUBENCH_QUIET", "-v", False)]
)
def test_quiet_and_verbose_give_way_to_the_other_one(by_default: str, given: str, is_quiet: bool) -> None:
    lines = gpubench(*TOPO, given, env=environment(**{by_default: "1"})).stdout.splitlines()
    assert (len(lines) == 1) is is_quiet


def test_a_replay_is_not_refused_for_a_default(tmp_path: Path) -> None:
    recording = str(tmp_path / "recording")
    assert gpubench(*ALLREDUCE, "--record", recording).returncode == 0
    env = environment(GPUBENCH_SIZES="4K", GPUBENCH_TIMEOUT="99", GPUBENCH_CHECK="0", GPUBENCH_FORMAT="json")
    replayed = gpubench("allreduce", "--replay", recording, env=env)
    assert {row["size_bytes"] for row in json.loads(replayed.stdout)["rows"]} == {1024}
    assert "--replay and --sizes" in gpubench("allreduce", "--replay", recording, "--sizes", "4K", env=env).stderr


def test_monitoring_gets_its_line_of_an_error_too(tmp_path: Path) -> None:
    for env, cwd in ((environment(GPUBENCH_EXIT_STYLE="nagios"), tmp_path), (environment(), tmp_path)):
        if "GPUBENCH_EXIT_STYLE" not in env:
            (tmp_path / "gpubench.toml").write_text('exit-style = "nagios"\n')
        result = gpubench(*TOPO, "--widht", "80", env=env, cwd=cwd)
        assert (result.returncode, result.stdout.startswith("GPUBENCH UNKNOWN")) == (3, True)
        assert gpubench(*TOPO, env=env, cwd=cwd).stdout.startswith("GPUBENCH TOPO (SIMULATED) OK")


def test_profiles_have_no_defaults() -> None:
    assert gpubench("profiles", "list", env=environment(GPUBENCH_OUTPUT="x", GPUBENCH_TIMEOUT="x")).returncode == 0


class TwoRanks(AloneGroup):
    """A group in which another rank has other options."""

    def __init__(self, other: dict[str, str]) -> None:
        super().__init__()
        self._other = other

    def gather(self, value: T) -> list[T]:
        return [value, cast("T", self._other)]


def test_ranks_that_do_not_agree_are_refused() -> None:
    own = {"--sizes": "GPUBENCH_SIZES=1K"}
    agree_on_defaults(TwoRanks(dict(own)), own)
    with pytest.raises(AgreedError) as raised:
        agree_on_defaults(TwoRanks({}), own)
    assert isinstance(raised.value.error, UsageError)
    assert "--sizes: rank 0: GPUBENCH_SIZES=1K, rank 1: not set" in raised.value.error.seen


@pytest.mark.mpi
def test_ranks_that_gpubench_starts_get_its_options_once(tmp_path: Path) -> None:
    (tmp_path / "gpubench.toml").write_text('output = "result.json"\nformat = "json"\nbackend = "host"\niters = 3\n')
    result = gpubench("allreduce", cwd=tmp_path, env=environment(GPUBENCH_SIZES="1K:2K"))
    found = json.loads(result.stdout)
    assert {row["size_bytes"] for row in found["rows"]} == {1024, 2048}
    assert found["metadata"]["options"]["iters"] == 3
    assert found["metadata"]["defaults"]["--sizes"] == "GPUBENCH_SIZES=1K:2K"
    assert json.loads((tmp_path / "result.json").read_text())["metadata"] == found["metadata"]


@pytest.mark.mpi
@pytest.mark.parametrize("command", ["allreduce", "topo"])
def test_ranks_of_an_mpirun_have_to_agree(command: str) -> None:
    variable = {"allreduce": "GPUBENCH_SIZES=1K", "topo": "GPUBENCH_SIMULATE=hgx-h200-4"}[command]
    variables = environment(GPUBENCH_BACKEND="host", GPUBENCH_ITERS="3") | MPI_ENVIRONMENT
    one = [*PROGRAM, command, "--timeout", "30"]
    ranks = ["-n", "1", *one, ":", "-n", "1", "env", variable, "GPUBENCH_WIDTH=90", *one]
    result = subprocess.run(
        [find_launcher().path, *ranks], capture_output=True, text=True, timeout=SECONDS, check=False, env=variables
    )
    option = f"--{variable.partition('=')[0].removeprefix('GPUBENCH_').lower()}"
    assert f"ranks do not agree on {option}: rank 0: not set, rank 1: {variable}" in result.stderr
    assert f"set {option} on the command line" in result.stderr
    assert (result.returncode, result.stdout) == (2, "")


@pytest.mark.slow
@pytest.mark.mpi
def test_ranks_of_an_mpirun_have_the_defaults_of_their_environment() -> None:
    run = ("allreduce", "--backend", "host", "--iters", "3", "--format", "json")
    result = mpirun(2, *run, env=environment(GPUBENCH_SIZES="1K"))
    assert {row["size_bytes"] for row in json.loads(result.stdout)["rows"]} == {1024}


def test_no_option_has_the_name_of_a_variable_that_gpubench_uses() -> None:
    pattern = re.compile(r'"(GPUBENCH_[A-Z_]+)"')
    used = {name for path in (ROOT / "gpubench").rglob("*.py") for name in pattern.findall(path.read_text())}
    assert {"GPUBENCH_CHANNEL", "GPUBENCH_SETTINGS", "GPUBENCH_PROFILES", "GPUBENCH_DEFAULTS"} <= used
    options = {variable_name(option) for option in options_of_all_commands()}
    assert {"GPUBENCH_TIMEOUT", "GPUBENCH_EXPECT_GPUS", "GPUBENCH_AS"} <= options
    assert not used & options
    assert not [name for name in options if name.startswith("GPUBENCH_TEST_")]
