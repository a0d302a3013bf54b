"""The recipes of docs/recipes: read by what will read them, their commands run on a simulated machine."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import shells
from tests.cli.running import ROOT, environment

RECIPES = ROOT / "docs" / "recipes"
PROMETHEUS_FOLDER = RECIPES / "prometheus"
FILES = sorted(path for path in RECIPES.rglob("*") if path.is_file() and path.name != "README.md")
SCRIPTS = [path for path in FILES if path.suffix in (".sh", ".sbatch")]
HEALTHY, BROKEN = "--simulate hgx-h100-8", "--simulate hgx-h100-8 --fault gpu5:nvlink=12"
STAND_INS = {
    "srun": shells.LAUNCHER,
    "mpirun": shells.LAUNCHER,
    "logger": 'echo "logger $*"',
    "scontrol": 'echo "scontrol $*" >&3; if [ "$1" = show ]; then echo "   Reason=$REASON [root@now]"; fi',
}
"""What stands in for programs that are not here."""


def texts(value: Any) -> Iterator[str]:
    """Every command in a document: steps, scripts, argument lists."""
    if isinstance(value, dict):
        lists = (value.get(name) for name in ("command", "args"))
        words = [word for each in lists if isinstance(each, list) for word in each]
        if words[:1] == ["-c"]:
            yield words[1]
        elif words:
            yield shlex.join(words if "gpubench" in words else ["gpubench", *words])
        for key, each in value.items():
            if key == "run":
                yield each
            elif key == "script":
                yield from each
            else:
                yield from texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts(each)


def commands_of(path: Path) -> list[str]:
    """The gpubench commands of a recipe that is no script."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".yml", ".yaml"):
        found: list[str] = list(texts(yaml.safe_load(text)))
    elif path.suffix == ".json":
        found = list(texts(json.loads(text)))
    else:
        found = re.findall(r"^(?:ExecStart=| *command_line +)(.+)$", text, re.MULTILINE)
    lines = (line.strip().replace("/opt/gpubench/bin/", "") for each in found for line in each.splitlines())
    return [line for line in lines if re.match(r"(mpirun .*|said=\$\()?gpubench ", line)]


COMMANDS = [(path, command) for path in FILES if path not in SCRIPTS for command in commands_of(path)]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-ins."""
    tools = tmp_path_factory.mktemp("tools")
    shells.make_programs(tools, STAND_INS)
    return tools


def script(name: str, tools: Path, folder: Path) -> list[str]:
    """A script of Slurm's as a site has it, in whose folder gpubench is, and run as Slurm does: without PATH."""
    text = (RECIPES / "slurm" / name).read_text(encoding="utf-8")
    path = folder / name
    path.write_text(text.replace("/opt/gpubench/bin", str(tools)))
    return ["env", "--unset=PATH", "SLURMD_NODENAME=node7", "/bin/bash", str(path)]


def run(command: Sequence[str], tools: Path, folder: Path, machine: str = HEALTHY, **variables: str) -> shells.Ended:
    noting = ["bash", "-c", f'exec 3> "{folder}/calls"; exec "$@"', "bash"]
    return shells.run([*noting, *command], tools, folder, lambda words: [*words, *machine.split()], **variables)


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=lambda each: getattr(each, "name", "")[:40] or each[:40])
def test_commands_run(path: Path, command: str, tools: Path, tmp_path: Path) -> None:
    here = command.replace("/results", str(tmp_path)).replace("/var/lib/node_exporter/textfile", str(tmp_path))
    here = here.replace("/tmp/allreduce.json", f"{tmp_path}/allreduce.json")
    result = run(["bash", "-c", here], tools, tmp_path)
    assert result.returncode == 0, result.stderr
    for output in re.findall(r"--output (\S+)", here):
        assert (tmp_path / output).stat().st_size > 100


def test_every_recipe_with_a_command_is_covered() -> None:
    covered = {path.name for path, _ in COMMANDS} | {path.name for path in SCRIPTS}
    assert {path.name for path in FILES} - covered == {
        *("Containerfile", "gpubench.timer", "alerts.yml", "alerts_test.yml", "grafana.json")
    }


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck on this machine")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_clean(path: Path) -> None:
    result = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, check=False, timeout=300)
    assert result.stdout == ""


def test_a_batch_job_leaves_its_results(tools: Path, tmp_path: Path) -> None:
    result = run(["bash", str(RECIPES / "slurm" / "allreduce.sbatch")], tools, tmp_path)
    assert result.returncode == 0, result.stderr
    assert {path.name for path in (tmp_path / "gpubench-0").iterdir()} == {
        *("topo.json", "allreduce.json", "allreduce.html")
    }


SILENT, MISTAKEN, WITHOUT_GPUS = f"{HEALTHY} --fault node0:silent=nvml", "--no-such-option", "--replay nowhere"
DRAIN = "update NodeName=node7 State=DRAIN Reason=gpubench: (simulated) node0"
FAULTY = f"{DRAIN} GPU5: 6 of 18 NVLinks down (links 12-17). Try: nvidia-smi --gpu-reset -i 0000:1b:00.0"
OURS, THEIRS = "gpubench: GPU5: 6 of 18 NVLinks down", "new disk"
PROLOG, EPILOG, HEALTH_CHECK = "prolog_slurmd", "epilog_slurmd", ""


@pytest.mark.parametrize(
    ("machine", "reason", "context", "code", "update"),
    [
        (HEALTHY, "", PROLOG, 0, ""),
        (HEALTHY, "", EPILOG, 0, ""),
        (HEALTHY, "", HEALTH_CHECK, 0, ""),
        (HEALTHY, OURS, HEALTH_CHECK, 0, "update NodeName=node7 State=RESUME"),
        (HEALTHY, OURS, EPILOG, 0, ""),
        (HEALTHY, THEIRS, HEALTH_CHECK, 0, ""),
        (BROKEN, "", PROLOG, 1, FAULTY),
        (BROKEN, "", EPILOG, 1, FAULTY),
        (BROKEN, "", HEALTH_CHECK, 0, FAULTY),
        (BROKEN, OURS, HEALTH_CHECK, 0, ""),
        (BROKEN, THEIRS, PROLOG, 1, ""),
        (SILENT, "", HEALTH_CHECK, 0, f"{DRAIN}, nvml: no answer"),
        (WITHOUT_GPUS, "", PROLOG, 0, ""),
        (WITHOUT_GPUS, OURS, HEALTH_CHECK, 0, ""),
        (MISTAKEN, "", PROLOG, 0, ""),
        (MISTAKEN, "", HEALTH_CHECK, 0, ""),
    ],
)
def test_the_gate_of_slurm_drains_for_what_is_broken_alone(
    machine: str, reason: str, context: str, code: int, update: str, tools: Path, tmp_path: Path
) -> None:
    command = script("gate.sh", tools, tmp_path)
    result = run(command, tools, tmp_path, machine, REASON=reason, SLURM_SCRIPT_CONTEXT=context)
    assert result.returncode == code, result.stdout + result.stderr
    assert ("logger" in result.stdout) == (machine != HEALTHY)
    said = (tmp_path / "calls").read_text().splitlines()
    updates = [line for line in said if line.startswith("scontrol update")]
    assert [line[: len(f"scontrol {update}")] for line in updates] == [f"scontrol {update}"] * bool(update)


NO_ANSWER = {
    "absent": "exit 127",
    "broken": "python3 -c 'import no_such_module'",
    "crashed": "kill -SEGV $$",
    "late": "exit 124",
    "full disk": "echo 'No space left on device' >&2; exit 1",
}
"""What becomes of a gpubench that says nothing, by name."""


@pytest.mark.parametrize("fault", NO_ANSWER)
@pytest.mark.parametrize("context", [PROLOG, HEALTH_CHECK], ids=["prolog", "health check"])
@pytest.mark.parametrize("drain_unjudged", ["no", "yes"])
def test_a_gpubench_that_says_nothing_drains_no_node_unless_a_site_wants_it(
    drain_unjudged: str, context: str, fault: str, tmp_path: Path
) -> None:
    shells.make_programs(tmp_path, {**STAND_INS, "gpubench": NO_ANSWER[fault]})
    command = script("gate.sh", tmp_path, tmp_path)
    path = Path(command[-1])
    path.write_text(path.read_text().replace("drain_unjudged=no", f"drain_unjudged={drain_unjudged}"))
    result = run(command, tmp_path, tmp_path, REASON="", SLURM_SCRIPT_CONTEXT=context)
    drained = drain_unjudged == "yes"
    assert result.returncode == (drained and context == PROLOG), result.stdout + result.stderr
    assert f"{context or 'health check'}: unknown: exit code" in result.stdout
    assert ("Reason=gpubench: could not be judged: exit code" in (tmp_path / "calls").read_text()) == drained


def test_the_gate_judges_all_gpus_and_not_those_of_the_job(tmp_path: Path) -> None:
    shells.make_programs(tmp_path, {**STAND_INS, "gpubench": 'echo "drain: ${CUDA_VISIBLE_DEVICES-all GPUs}"; exit 1'})
    variables = {"REASON": "", "SLURM_SCRIPT_CONTEXT": PROLOG, "CUDA_VISIBLE_DEVICES": "3"}
    result = run(script("gate.sh", tmp_path, tmp_path), tmp_path, tmp_path, **variables)
    assert result.returncode == 1
    assert "Reason=gpubench: all GPUs" in (tmp_path / "calls").read_text()


@pytest.mark.parametrize("fault", NO_ANSWER)
def test_a_gpubench_that_says_nothing_is_no_problem_of_a_kubernetes_node(fault: str, tmp_path: Path) -> None:
    shells.make_programs(tmp_path, {"gpubench": NO_ANSWER[fault]})
    rules = json.loads((RECIPES / "kubernetes" / "node-problem-detector.json").read_text())["rules"]
    words = [rules[0]["path"], *rules[0]["args"]]
    command = [word.replace("/opt/gpubench/bin", str(tmp_path)) for word in words]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (result.returncode, result.stdout) == (2, "")


@pytest.mark.parametrize(
    ("machine", "code"), [(HEALTHY, 0), (BROKEN, 1), (SILENT, 1), (WITHOUT_GPUS, 2), (MISTAKEN, 2)]
)
def test_node_problem_detector_has_the_policy_of_the_gate(machine: str, code: int, tools: Path, tmp_path: Path) -> None:
    (command,) = commands_of(RECIPES / "kubernetes" / "node-problem-detector.json")
    result = run(["bash", "-c", command], tools, tmp_path, machine)
    assert (result.returncode, bool(result.stdout)) == (code, True), result.stderr


@pytest.mark.parametrize(("machine", "code"), [(HEALTHY, 0), (BROKEN, 1)], ids=["healthy", "broken"])
def test_a_job_of_gitlab_measures_everything_and_fails_if_anything_failed(
    machine: str, code: int, tools: Path, tmp_path: Path
) -> None:
    lines = yaml.safe_load((RECIPES / "gitlab-ci.yml").read_text())["gpu-links"]["script"]
    script = "\n".join(["set -e", *(line for line in lines if not line.startswith("pip "))])
    result = run(["bash", "-c", script], tools, tmp_path, machine)
    assert result.returncode == code, result.stderr
    assert {path.name for path in tmp_path.glob("*.xml")} == {"topo.xml", "p2p.xml", "allreduce.xml"}


def test_alerts_speak_of_metrics_that_exist(tools: Path, tmp_path: Path) -> None:
    commands = commands_of(PROMETHEUS_FOLDER / "gpubench.service")
    assert len(commands) == 2
    for command in commands:
        run(["bash", "-c", command.replace("/var/lib/node_exporter/textfile", str(tmp_path))], tools, tmp_path)
    texts = [path.read_text() for path in tmp_path.glob("*.prom")]
    written = {name for text in texts for name in re.findall(r"^# TYPE (\w+) gauge$", text, re.MULTILINE)}
    rules = yaml.safe_load((RECIPES / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]
    assert len(rules) == 4
    assert {name for rule in rules for name in re.findall(r"gpubench_\w+", rule["expr"])} <= written


def installed(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"no {program} on this machine")


def reads(*command: str | Path, text: str = "", cwd: Path = RECIPES) -> None:
    """A program that reads a recipe has nothing against it."""
    words = list(map(str, command))
    result = subprocess.run(words, input=text, capture_output=True, text=True, check=False, timeout=300, cwd=cwd)
    assert result.returncode == 0, result.stdout + result.stderr


@installed("promtool")
def test_prometheus_reads_the_alerts_and_raises_them_as_their_tests_say() -> None:
    reads("promtool", "check", "rules", "alerts.yml", cwd=PROMETHEUS_FOLDER)
    reads("promtool", "test", "rules", "alerts_test.yml", cwd=PROMETHEUS_FOLDER)


def panels() -> list[str]:
    """What the panels of the dashboard ask of Prometheus."""
    dashboard = json.loads((PROMETHEUS_FOLDER / "grafana.json").read_text(encoding="utf-8"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


@installed("promtool")
def test_prometheus_reads_what_the_dashboard_asks(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": expr} for number, expr in enumerate(panels())]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    reads("promtool", "check", "rules", "rules.yml", cwd=tmp_path)


def test_the_dashboard_asks_for_figures_that_are_written(tools: Path, tmp_path: Path) -> None:
    """By all commands together; promtool, where it is installed, reads each."""
    written: set[str] = set()
    for command in ("topo", "p2p", "allreduce", "check --quick"):
        text = run(["bash", "-c", f"gpubench {command} --format prometheus"], tools, tmp_path).stdout
        written |= set(re.findall(r"^# TYPE (\w+) gauge$", text, re.MULTILINE))
        if shutil.which("promtool"):
            reads("promtool", "check", "metrics", text=text)
    asked = {name for expr in panels() for name in re.findall(r"gpubench_\w+", expr)}
    assert len(asked) >= 9
    assert asked <= written


@installed("systemd-analyze")
def test_systemd_reads_the_units(tools: Path, tmp_path: Path) -> None:
    for name in ("gpubench.service", "gpubench.timer"):
        text = (PROMETHEUS_FOLDER / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace("/opt/gpubench/bin", str(tools)))
    reads("systemd-analyze", "verify", tmp_path / "gpubench.service", tmp_path / "gpubench.timer")


@pytest.mark.parametrize(
    ("machine", "code", "word"),
    [(HEALTHY, 0, "OK"), (BROKEN, 2, "CRITICAL"), ("--simulate hgx-h100-8 --fault node0:silent=nvml", 3, "UNKNOWN")],
)
def test_the_nagios_command_ends_as_a_plugin(machine: str, code: int, word: str, tools: Path, tmp_path: Path) -> None:
    """One line with performance data after a bar, and the plugins' exit codes (Monitoring Plugins' guidelines)."""
    (command,) = commands_of(RECIPES / "nagios.cfg")
    result = run(["bash", "-c", command], tools, tmp_path, machine)
    assert result.returncode == code, result.stdout
    (line,) = result.stdout.splitlines()
    assert word in line.partition("|")[0]


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ("github-workflows", "docs/recipes/github-actions.yml"),
        ("github-workflows", ".github/workflows/release.yml"),
        ("github-actions", "action.yml"),
        ("gitlab-ci", "docs/recipes/gitlab-ci.yml"),
    ],
)
def test_jobs_of_hosted_ci_have_the_form_that_is_published(
    schema: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: most of the time is imports."""
    program = pytest.importorskip("check_jsonschema")
    with pytest.raises(SystemExit) as ended:
        program.main(["--builtin-schema", f"vendor.{schema}", str(ROOT / path)])
    assert ended.value.code == 0, capsys.readouterr().out


def test_the_job_for_kubernetes_has_the_form_that_is_published() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    job = yaml.safe_load((RECIPES / "kubernetes" / "job.yaml").read_text(encoding="utf-8"))
    validate.validate(job, validate.latest_version(), strict=True)


def test_every_recipe_is_listed() -> None:
    text = (RECIPES / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[([\w./-]+)\]\(\1\) \| .+ \|$", text, re.MULTILINE)
    assert sorted(listed) == sorted(str(path.relative_to(RECIPES)) for path in FILES)


def test_words_complete() -> None:
    """What the shell asks when somebody presses the tabulator."""
    asked = environment(_GPUBENCH_COMPLETE="complete_bash", COMP_WORDS="gpubench all", COMP_CWORD="1")
    program = Path(sys.executable).parent / "gpubench"
    if not program.exists():
        pytest.skip("gpubench is not installed")
    result = subprocess.run([program], capture_output=True, text=True, check=False, env=asked, timeout=300)
    assert set(result.stdout.split()) == {"allreduce", "allgather", "alltoall"}
